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

// The same in memory, at any address that is aligned for a float. (Through memcpy GCC spills sums before it stores
// them.)
typedef F FInMemory __attribute__((aligned(4), may_alias));
typedef I IInMemory __attribute__((aligned(4), may_alias));

inline F load(const float *p) { return *(const FInMemory *)p; }
inline I load(const int32_t *p) { return *(const IInMemory *)p; }
inline void store(float *p, F x) { *(FInMemory *)p = x; }
inline void store(int32_t *p, I x) { *(IInMemory *)p = x; }
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

// 2 ** x for x <= about 0 (up to 127), within 0.95 ulp; exactly 0 from -150 down, and from -126 down without AVX-512 or
// where subnormals are flushed; NaN stays NaN. `x` is clamped in place, so that 0 * x is 0 and not NaN if x was -inf.
// Each step is done for NV vectors before the next: it takes longer than a CPU can look ahead.
template <int NV>
inline void exp2_clamped(F (&x)[NV], F (&power)[NV]) {
    F n[NV], f[NV];
    const auto each = [](auto step) {
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) step(v);
    };
#if defined(__AVX512F__)
    each([&](int v) { x[v] = larger(broadcast(-151.0f), x[v]); });
    each([&](int v) { n[v] = (F)_mm512_roundscale_ps((__m512)x[v], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); });
#else
    // Adding 1.5 * 2 ** 23 rounds to the nearest integer n; with 127 more, the lowest bits are the exponent of 2 ** n.
    const F shifter = broadcast(12582912.0f + 127.0f);
    F shifted[NV];
    each([&](int v) { x[v] = larger(broadcast(-127.0f), x[v]); });
    each([&](int v) { shifted[v] = x[v] + shifter; });
    each([&](int v) { n[v] = shifted[v] - shifter; });
#endif
    each([&](int v) { f[v] = x[v] - n[v]; });
    each([&](int v) { power[v] = 0x1.41fbap-13f * f[v] + 0x1.5f3e5p-10f; });
    each([&](int v) { power[v] = power[v] * f[v] + 0x1.3b2d4ep-7f; });
    each([&](int v) { power[v] = power[v] * f[v] + 0x1.c6aee8p-5f; });
    each([&](int v) { power[v] = power[v] * f[v] + 0x1.ebfbdcp-3f; });
    each([&](int v) { power[v] = power[v] * f[v] + 0x1.62e43p-1f; });
    each([&](int v) { power[v] = power[v] * f[v] + 1.0f; });
#if defined(__AVX512F__)
    each([&](int v) { power[v] = (F)_mm512_scalef_ps((__m512)power[v], (__m512)n[v]); });
#else
    each([&](int v) { power[v] *= (F)((U)shifted[v] << 23); });
#endif
}

inline F exp2(F x) {
    F one[1] = {x}, power[1];
    exp2_clamped(one, power);
    return power[0];
}

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

#if defined(__AVX2__) && !defined(__AVX512F__)
// With AVX, instructions that interleave or shuffle work on each half of a vector; those that cross the halves are
// slow.
inline F unpack_low(F a, F b) { return (F)_mm256_unpacklo_ps((__m256)a, (__m256)b); }
inline F unpack_high(F a, F b) { return (F)_mm256_unpackhi_ps((__m256)a, (__m256)b); }
inline F low_halves(F a, F b) { return (F)_mm256_permute2f128_ps((__m256)a, (__m256)b, 0x20); }
inline F high_halves(F a, F b) { return (F)_mm256_permute2f128_ps((__m256)a, (__m256)b, 0x31); }

// Transpose 8 x 8 in place: 4 x 4 within the halves, then the halves.
inline void transpose(F (&x)[W]) {
    F y[W];
#pragma GCC unroll 2
    for (int i = 0; i < W; i += 4) {
        const F a = unpack_low(x[i], x[i + 2]), b = unpack_low(x[i + 1], x[i + 3]);
        const F c = unpack_high(x[i], x[i + 2]), d = unpack_high(x[i + 1], x[i + 3]);
        y[i] = unpack_low(a, b), y[i + 1] = unpack_high(a, b);
        y[i + 2] = unpack_low(c, d), y[i + 3] = unpack_high(c, d);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) x[i] = low_halves(y[i], y[i + 4]), x[i + 4] = high_halves(y[i], y[i + 4]);
}

// The sums of W vectors, as one vector.
inline F sums(F (&x)[W]) {
    const auto both = [](F a, F b) { return unpack_low(a, b) + unpack_high(a, b); };
    const F low = both(both(x[0], x[2]), both(x[1], x[3])), high = both(both(x[4], x[6]), both(x[5], x[7]));
    return low_halves(low, high) + high_halves(low, high);
}
#else
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
#endif

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
