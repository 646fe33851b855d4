// What the CPU can do at most: multiply-adds per second from registers, in float32 and bfloat16; bytes per second from
// memory. Compiled by benchmarks/kernels.py, which runs it beside what it measures.
#include <immintrin.h>

#include <cstdint>

// 12 independent sums in registers of their own, enough to hide the latency of each. They hold zeros: subnormal numbers,
// which may be left in a register, take a hundred times as long on some CPUs.
#define TWELVE(op, r) \
    op " %%" r "0, %%" r "1, %%" r "2\n" op " %%" r "0, %%" r "1, %%" r "3\n" op " %%" r "0, %%" r "1, %%" r "4\n" \
    op " %%" r "0, %%" r "1, %%" r "5\n" op " %%" r "0, %%" r "1, %%" r "6\n" op " %%" r "0, %%" r "1, %%" r "7\n" \
    op " %%" r "0, %%" r "1, %%" r "8\n" op " %%" r "0, %%" r "1, %%" r "9\n" op " %%" r "0, %%" r "1, %%" r "10\n" \
    op " %%" r "0, %%" r "1, %%" r "11\n" op " %%" r "0, %%" r "1, %%" r "12\n" op " %%" r "0, %%" r "1, %%" r "13\n"
#define ZEROED \
    "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", \
        "xmm15"
#define BUSY(op, r) \
    _Pragma("omp parallel num_threads(threads)") { \
        asm volatile("vzeroall" ::: ZEROED); \
        for (int64_t i = 0; i < rounds; i++) \
            asm volatile(TWELVE(op, r)::: ZEROED); \
    }

extern "C" {

// Each returns the floating-point operations done.
double fma_avx512(int64_t rounds, int threads) {
    BUSY("vfmadd231ps", "zmm")
    return 2.0 * 16 * 12 * (double)rounds * threads;
}

double fma_avx2(int64_t rounds, int threads) {
    BUSY("vfmadd231ps", "ymm")
    return 2.0 * 8 * 12 * (double)rounds * threads;
}

double bf16_avx512(int64_t rounds, int threads) {
    BUSY("vdpbf16ps", "zmm")
    return 2.0 * 32 * 12 * (double)rounds * threads;
}

// Reads `count` bytes once, split over the threads; the answer is of no use but to keep the reads.
__attribute__((target("avx2"))) int64_t read_all(const char *from, int64_t count, int threads) {
    int64_t total = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : total) schedule(static)
    for (int64_t block = 0; block < count / 4096; block++) {
        __m256i sum = _mm256_setzero_si256();
        for (int64_t i = 0; i < 4096; i += 32)
            sum = _mm256_add_epi64(sum, _mm256_loadu_si256((const __m256i *)(from + block * 4096 + i)));
        total += _mm256_extract_epi64(sum, 0);
    }
    return total;
}
}
