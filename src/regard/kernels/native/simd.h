// A vector of W floats; the instruction set determines W at compile time. Arithmetic uses GCC's vector extensions
// (a * b + c becomes one FMA under -ffp-contract=fast), with intrinsics only for what they lack.
#pragma once
#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace REGARD_NAMESPACE {

#if defined(__AVX512F__)
constexpr int W = 16;
constexpr int REGISTERS = 32;
#elif defined(__AVX2__)
constexpr int W = 8;
constexpr int REGISTERS = 16;
#else
constexpr int W = 4;
constexpr int REGISTERS = 16;
#endif

typedef float F __attribute__((vector_size(W * 4)));
typedef int32_t I __attribute__((vector_size(W * 4)));
typedef uint32_t U __attribute__((vector_size(W * 4)));

inline F load(const float *p) {
    F x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
inline I load(const int32_t *p) {
    I x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
inline void store(float *p, F x) { std::memcpy(p, &x, sizeof x); }
inline void store(int32_t *p, I x) { std::memcpy(p, &x, sizeof x); }
inline F broadcast(float x) { return x - F{}; }  // (0 + x would turn -0 into 0)
inline I broadcast(int32_t x) { return x - I{}; }

template <class T>
using Vector = decltype(load((const T *)nullptr));

// The larger of two; a NaN in b is kept, a NaN in a is lost.
inline F larger(F a, F b) {
#if defined(__AVX512F__)
    return (F)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (F)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__SSE2__)
    return (F)_mm_max_ps((__m128)a, (__m128)b);
#else
    return a > b ? a : b;
#endif
}

// Rounds a product: keeps the compiler from fusing it with a following addition.
inline F rounded(F product) {
#if defined(__AVX512F__)
    asm("" : "+v"(product));
#elif defined(__SSE2__)
    asm("" : "+x"(product));
#endif
    return product;
}

// where ? a : b, lane by lane; `where` is the result of a comparison.
inline F choose(I where, F a, F b) { return where ? a : b; }
inline I choose(I where, I a, I b) { return where ? a : b; }

inline bool any(I where) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)where, (__m512i)where) != 0;
#elif defined(__AVX2__)
    return _mm256_movemask_ps((__m256)where) != 0;
#else
    int32_t all = 0;
    for (int i = 0; i < W; i++) all |= where[i];
    return all != 0;
#endif
}

// 2 ** x for x <= about 0 (up to 127), within 0.7 ulp; below -126 exactly 0; NaN stays NaN. `x` is clamped in
// place, so that 0 * x is 0 and not NaN if x was -inf.
inline F exp2_clamped(F &x) {
    const F lowest = broadcast(-127.0f);
    x = larger(lowest, x);
#if defined(__AVX512F__)
    const F n = (F)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
    const F n = (F)_mm256_round_ps((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const F shifter = broadcast(12582912.0f);  // 1.5 * 2 ** 23: adding it rounds to the nearest integer
    const F n = (x + shifter) - shifter;
#endif
    const F f = x - n;
    F p = broadcast(0x1.41fbap-13f);
    p = p * f + 0x1.5f3e5p-10f;
    p = p * f + 0x1.3b2d4ep-7f;
    p = p * f + 0x1.c6aee8p-5f;
    p = p * f + 0x1.ebfbdcp-3f;
    p = p * f + 0x1.62e43p-1f;
    p = p * f + 1.0f;
#if defined(__AVX512F__)
    // 2 ** -127 is subnormal, and the workers flush it to zero
    return (F)_mm512_scalef_ps((__m512)p, (__m512)n);
#elif defined(__AVX2__)
    const I e = (I)_mm256_cvtps_epi32((__m256)n);
    return p * (F)((e + 127) << 23);
#else
    const I e = __builtin_convertvector(n, I);
    return p * (F)((e + 127) << 23);
#endif
}

inline F exp2(F x) { return exp2_clamped(x); }

// tanh within 2 ulp: a polynomial about 0 (Cephes), (1 - e) / (1 + e) with e = exp(-2 |x|) beyond.
inline F tanh(F x) {
    const F a = choose(x < 0.0f, -x, x);
    const F z = x * x;
    F p = broadcast(-5.70498872745e-3f);
    p = p * z + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    const F near = p * z * x + x;
    const F e = exp2(a * -2.8853900817779268f);
    const F far = (1.0f - e) / (1.0f + e);
    return choose(a < 0.625f, near, choose(x < 0.0f, -far, far));
}

constexpr int log2_of(int n) { return n <= 1 ? 0 : 1 + log2_of(n / 2); }

template <int... lane>
inline F interleave_low(F a, F b, std::integer_sequence<int, lane...>) {
    return __builtin_shuffle(a, b, I{(lane / 2 + (lane % 2) * W)...});
}
template <int... lane>
inline F interleave_high(F a, F b, std::integer_sequence<int, lane...>) {
    return __builtin_shuffle(a, b, I{(lane / 2 + W / 2 + (lane % 2) * W)...});
}
inline F interleave_low(F a, F b) { return interleave_low(a, b, std::make_integer_sequence<int, W>{}); }
inline F interleave_high(F a, F b) { return interleave_high(a, b, std::make_integer_sequence<int, W>{}); }

// Transpose W x W in place: log2(W) perfect shuffles of the matrix.
inline void transpose(F (&x)[W]) {
    F y[W];
#pragma GCC unroll 4
    for (int stage = 0; stage < log2_of(W); stage++) {
#pragma GCC unroll 16
        for (int i = 0; i < W / 2; i++) {
            y[2 * i] = interleave_low(x[i], x[i + W / 2]);
            y[2 * i + 1] = interleave_high(x[i], x[i + W / 2]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) x[i] = y[i];
    }
}

// The sums of W vectors, as one vector.
inline F sums(F (&x)[W]) {
#pragma GCC unroll 8
    for (int half = W / 2; half >= 1; half /= 2) {
#pragma GCC unroll 16
        for (int i = 0; i < half; i++) {
            x[i] = interleave_low(x[i], x[i + half]) + interleave_high(x[i], x[i + half]);
        }
    }
    return x[0];
}

template <int by, int... lane>
inline F rotate(F x, std::integer_sequence<int, lane...>) {
    return __builtin_shuffle(x, I{((lane + by) % W)...});
}

// The largest of W numbers; a NaN may be lost.
template <int by = W / 2>
inline float largest(F x) {
    if constexpr (by == 0) return x[0];
    else return largest<by / 2>(larger(x, rotate<by>(x, std::make_integer_sequence<int, W>{})));
}

// Flushes subnormals to zero in its scope: they cost hundreds of cycles each, and a saturated softmax has many.
class FlushSubnormals {
#if defined(__SSE2__)
    unsigned before = _mm_getcsr();

  public:
    FlushSubnormals() { _mm_setcsr(before | 0x8040); }
    ~FlushSubnormals() { _mm_setcsr(before); }
#else
  public:
    FlushSubnormals() {}
    ~FlushSubnormals() {}
#endif
    FlushSubnormals(const FlushSubnormals &) = delete;
};

// Allows subnormals again within that scope, where they must differ from 0.
class AllowSubnormals {
#if defined(__SSE2__)
    unsigned before = _mm_getcsr();

  public:
    AllowSubnormals() { _mm_setcsr(before & ~0x8040u); }
    ~AllowSubnormals() { _mm_setcsr(before); }
#else
  public:
    AllowSubnormals() {}
    ~AllowSubnormals() {}
#endif
    AllowSubnormals(const AllowSubnormals &) = delete;
};

}  // namespace REGARD_NAMESPACE
