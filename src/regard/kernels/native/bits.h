// A dense mask as bits: one 64-bit word per key, one bit per lane.
#pragma once
#include "simd.h"

namespace REGARD_NAMESPACE {

// Bit i is set iff byte i is not 0.
inline uint64_t bits_of(const uint8_t (&bytes)[64]) {
#if defined(__AVX512BW__)
    const __m512i x = _mm512_loadu_si512(bytes);
    return _mm512_test_epi8_mask(x, x);
#elif defined(__SSE2__)
    uint64_t zero = 0;
    for (int i = 0; i < 64; i += 16) {
        const __m128i x = _mm_loadu_si128((const __m128i *)(bytes + i));
        zero |= (uint64_t)(uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(x, _mm_setzero_si128())) << i;
    }
    return ~zero;
#else
    uint64_t bits = 0;
    for (int i = 0; i < 64; i++) bits |= (uint64_t)(bytes[i] != 0) << i;
    return bits;
#endif
}

// Transposes 64 x 64 bits: swaps off-diagonal halves, then recursively smaller blocks.
template <int half = 32>
inline void transpose(uint64_t (&x)[64]) {
    constexpr uint64_t low = ~0ull / ((1ull << half) + 1);  // the lower half of every 2 * half bits
    for (int first = 0; first < 64; first += 2 * half) {
#pragma GCC unroll 32
        for (int i = first; i < first + half; i++) {
            const uint64_t differ = ((x[i] >> half) ^ x[i + half]) & low;
            x[i] ^= differ << half;
            x[i + half] ^= differ;
        }
    }
    if constexpr (half > 1) transpose<half / 2>(x);
}

template <int... lane>
inline I lane_bits(std::integer_sequence<int, lane...>) {
    return I{(1 << lane)...};
}
// The W lowest bits as a lane mask, as comparisons return it: lane i is all ones iff bit i is set.
inline I spread(uint64_t bits) {
    return (broadcast((int32_t)bits) & lane_bits(std::make_integer_sequence<int, W>{})) != 0;
}

}  // namespace REGARD_NAMESPACE
