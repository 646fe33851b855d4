// What the CPU can do at most: multiply-adds per second from registers, in float32 and bfloat16; bytes per second from
// memory. Compiled by benchmarks/kernels.py, which runs it beside what it measures.
#include <immintrin.h>

#include <cstdint>


extern "C" {

// Floating-point operations done: `rounds` of 16 independent chains, enough to hide the latency.
__attribute__((target("avx512f"))) double fma_avx512(int64_t rounds, int threads) {
#pragma omp parallel num_threads(threads)
    {
        __m512 sum[16], x = _mm512_set1_ps(1.0001f), y = _mm512_set1_ps(0.5f);
        for (auto &s : sum) s = y;
        for (int64_t i = 0; i < rounds; i++) {
#pragma GCC unroll 16
            for (int c = 0; c < 16; c++) asm volatile("vfmadd231ps %1, %2, %0" : "+v"(sum[c]) : "v"(x), "v"(y));
        }
    }
    return 2.0 * 16 * 16 * (double)rounds * threads;
}

__attribute__((target("avx2,fma"))) double fma_avx2(int64_t rounds, int threads) {
#pragma omp parallel num_threads(threads)
    {
        __m256 sum[12], x = _mm256_set1_ps(1.0001f), y = _mm256_set1_ps(0.5f);
        for (auto &s : sum) s = y;
        for (int64_t i = 0; i < rounds; i++) {
#pragma GCC unroll 12
            for (int c = 0; c < 12; c++) asm volatile("vfmadd231ps %1, %2, %0" : "+x"(sum[c]) : "x"(x), "x"(y));
        }
    }
    return 2.0 * 8 * 12 * (double)rounds * threads;
}

__attribute__((target("avx512f,avx512bf16"))) double bf16_avx512(int64_t rounds, int threads) {
#pragma omp parallel num_threads(threads)
    {
        __m512 sum[16], x = _mm512_set1_ps(1.0001f);
        for (auto &s : sum) s = x;
        for (int64_t i = 0; i < rounds; i++) {
#pragma GCC unroll 16
            for (int c = 0; c < 16; c++) asm volatile("vdpbf16ps %1, %1, %0" : "+v"(sum[c]) : "v"(x));
        }
    }
    return 2.0 * 32 * 16 * (double)rounds * threads;
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
