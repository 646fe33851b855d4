// 16-bit numbers: widened to float32 when loaded, rounded to nearest (ties to even) when stored. NaN stays NaN. The
// code does not depend on the CPU's mode for subnormal numbers, which the workers flush to zero.
#pragma once
#include <type_traits>

#include "args.h"
#include "simd.h"

namespace REGARD_NAMESPACE {

struct BFloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};

// An integer from -127 to 127, which has its scale elsewhere.
struct Int8 {
    int8_t value;
};

typedef uint16_t H __attribute__((vector_size(W * 2)));

inline F widen(H x, BFloat16) { return (F)(__builtin_convertvector(x, U) << 16); }
inline H narrow(F x, BFloat16) {
    const U bits = (U)x;
    const U rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const U quiet = (bits >> 16) | 0x40u;
    return __builtin_convertvector((U)choose(x != x, (I)quiet, (I)rounded), H);
}

#if defined(__F16C__) && defined(__AVX512F__)
inline F widen(H x, Float16) { return (F)_mm512_cvtph_ps((__m256i)x); }
inline H narrow(F x, Float16) { return (H)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT); }
#elif defined(__F16C__)
inline F widen(H x, Float16) { return (F)_mm256_cvtph_ps((__m128i)x); }
inline H narrow(F x, Float16) { return (H)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT); }
#else
inline F widen(H x, Float16) {
    const U all = __builtin_convertvector(x, U), size = all & 0x7fffu;
    const F small = __builtin_convertvector((I)size, F) * 0x1p-24f;  // a subnormal is a multiple of 2 ** -24
    const U moved = (size << 13) + (112u << 23);                     // the exponents' biases differ by 127 - 15
    const U beyond = moved + (112u << 23);                           // inf and NaN have the largest exponent
    const I large = choose((I)size >= 0x7c00, (I)beyond, (I)moved);
    return (F)((U)choose((I)size < 0x400, (I)small, large) | (all & 0x8000u) << 16);
}
inline H narrow(F x, Float16) {
    const U size = (U)x & 0x7fffffffu;
    const U small = (U)((F)size + 0.5f) - (U)broadcast(0.5f);  // the ulp of 0.5 is 2 ** -24, so the addition rounds
    const U less = size - (112u << 23);
    const U moved = (less + 0xfffu + ((less >> 13) & 1u)) >> 13;
    I to = choose((I)size < 0x38800000, (I)small, (I)moved);
    to = choose((I)size >= 0x47800000, broadcast(0x7c00), to);
    to = choose((I)size > 0x7f800000, broadcast(0x7e00), to);
    return __builtin_convertvector((U)to | ((U)x >> 16 & 0x8000u), H);
}
#endif

template <class T>
inline F load(const T *p) {
    H x;
    std::memcpy(&x, p, sizeof x);
    return widen(x, T{});
}
template <class T>
inline void store(T *p, F x) {
    const H y = narrow(x, T{});
    std::memcpy(p, &y, sizeof y);
}

inline F load(const Int8 *p) {
#if defined(__AVX512F__)
    return (F)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
#elif defined(__AVX2__)
    return (F)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#else
    typedef int8_t Bytes __attribute__((vector_size(W)));
    Bytes x;
    std::memcpy(&x, p, sizeof x);
    return __builtin_convertvector(__builtin_convertvector(x, I), F);
#endif
}

// Loads the first `count` numbers, fewer than W; the rest is 0 and not read.
template <class T>
inline F load_some(const T *p, int64_t count) {
    T some[W] = {};
    std::memcpy(some, p, (size_t)count * sizeof(T));
    return load(some);
}
template <class T>
inline void store_some(T *p, F x, int64_t count) {
    T some[W];
    store(some, x);
    std::memcpy(p, some, (size_t)count * sizeof(T));
}

inline float widened(float x) { return x; }
template <class T>
inline float widened(T x) {
    return load_some(&x, 1)[0];
}

inline void put(float *p, float x) { *p = x; }
template <class T>
inline void put(T *p, float x) {
    store_some(p, broadcast(x), 1);
}

// Two bfloat16 numbers: neighbours in a row, or the same column of two neighbouring rows. The CPU
// multiplies pairs and adds both products to a float32, at twice the speed of float32.
typedef int32_t Pair;

// Two floats, each as a sum of three bfloat16 numbers: in a row of these, all pairs of the largest parts come first,
// then those of the middle ones, then those of the smallest. Only CPUs with tiles multiply them (`tiles.h`).
struct Split {
    Pair pair;
};

template <class T>
constexpr int TOGETHER = std::is_same_v<T, float> ? 1 : 2;  // numbers in an operand of the products
template <class T>
constexpr int PARTS = std::is_same_v<T, Split> ? 3 : 1;  // bfloat16 numbers that make up one number

constexpr int64_t TILE = 16;  // rows of a tile, and pairs in a row of it
constexpr int64_t whole_tiles(int64_t count) { return (count + TILE - 1) / TILE * TILE; }
#if defined(__AMX_BF16__)
constexpr bool TILES = true;  // pairs are multiplied tile by tile
#else
constexpr bool TILES = false;
#endif

// The number of T that hold one part of a row of so many numbers, and all parts of it. With tiles, rows are padded with
// 0.
template <class T>
constexpr int64_t operands_of_part(int64_t numbers) {
    const int64_t count = (numbers + TOGETHER<T> - 1) / TOGETHER<T>;
    return TILES && !std::is_same_v<T, float> ? whole_tiles(count) : count;
}
template <class T>
constexpr int64_t operands(int64_t numbers) {
    return PARTS<T> * operands_of_part<T>(numbers);
}

inline F add_product(F sum, F a, F b) { return sum + a * b; }
#if defined(__AVX512BF16__)
constexpr bool PAIRS = true;  // faster than float32
inline F add_product(F sum, I a, I b) { return (F)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b); }

template <int... i>
inline I interleave(__m512bh apart, std::integer_sequence<int, i...>) {
    typedef int16_t S __attribute__((vector_size(64)));
    return (I)__builtin_shuffle((S)apart, S{(i / 2 + i % 2 * W)...});
}
// The pairs of two vectors, lane by lane, rounded to bfloat16.
inline I paired(F first, F second) {
    return interleave(_mm512_cvtne2ps_pbh((__m512)second, (__m512)first), std::make_integer_sequence<int, 2 * W>{});
}
// The pairs of neighbours in a vector, rounded to bfloat16.
inline void store_neighbours(Pair *to, F x) {
    _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh((__m512)x));
}
#else
constexpr bool PAIRS = false;
inline F add_product(F sum, I a, I b) {
    sum += (F)(a << 16) * (F)(b << 16);
    return sum + (F)(a & ~0xffff) * (F)(b & ~0xffff);
}
inline I paired(F first, F second) {
    const U low = __builtin_convertvector(narrow(first, BFloat16{}), U);
    return (I)(low | __builtin_convertvector(narrow(second, BFloat16{}), U) << 16);
}
inline void store_neighbours(Pair *to, F x) { store((BFloat16 *)to, x); }
#endif

// The pairs of two vectors, lane by lane, in parts that are `apart` operands from each other.
template <class T>
inline void store_paired(T *to, int64_t apart, F first, F second) {
    if constexpr (!std::is_same_v<T, Split>) return store((Pair *)to, paired(first, second));
    // Rounded by integers, ties away from 0: fewer instructions than to nearest even, and nothing is lost by it, for
    // the next part has the rest. The last one has at most eight bits.
#pragma GCC unroll 2
    for (int part = 0; part < 2; part++) {
        const I a = ((I)first + 0x8000) & ~0xffff, b = ((I)second + 0x8000) & ~0xffff;
        store((Pair *)to + part * apart, (I)((U)a >> 16) | b);
        first -= (F)a, second -= (F)b;
    }
    store((Pair *)to + 2 * apart, (I)((U)(I)first >> 16) | ((I)second & ~0xffff));
}
// The same for pairs of neighbours in one vector.
template <class T>
inline void store_neighbours(T *to, int64_t apart, F x) {
#pragma GCC unroll 3
    for (int part = 0; part < PARTS<T>; part++) {
        Pair *here = (Pair *)to + part * apart;
        store_neighbours(here, x);
        if (part + 1 < PARTS<T>) x -= load((const BFloat16 *)here);
    }
}

// to = row * scale
inline void copy_row(const float *from, int64_t width, float *to, float = 1.0f) {
    std::memcpy(to, from, (size_t)width * sizeof *to);
}
template <class T>
void copy_row(const T *from, int64_t width, float *to, float scale = 1.0f) {
    int64_t x = 0;
    for (; x + W <= width; x += W) store(to + x, load(from + x) * scale);
    for (; x < width; x++) to[x] = widened(from[x]) * scale;
}
// The same as pairs of neighbours, padded with 0 (an odd width; with tiles, to whole ones).
inline void copy_row(const BFloat16 *from, int64_t width, Pair *to) {
    std::memset(to + width / 2, 0, (size_t)(operands<Pair>(width) - width / 2) * sizeof *to);
    std::memcpy(to, from, (size_t)width * sizeof *from);
}
template <class T>
void copy_row(const T *from, int64_t width, Split *to) {
    const int64_t apart = operands_of_part<Split>(width);
    for (int64_t x = 0; x < 2 * apart; x += W) {
        const int64_t left = width - x;
        store_neighbours(to + x / 2, apart, left >= W ? load(from + x) : left > 0 ? load_some(from + x, left) : F{});
    }
}

// f(T{}) with the type of `dtype`.
template <class Function>
inline void with_dtype(int32_t dtype, Function f) {
    if (dtype == REGARD_BFLOAT16) f(BFloat16{});
    else if (dtype == REGARD_FLOAT16) f(Float16{});
    else f(float{});
}

}  // namespace REGARD_NAMESPACE
