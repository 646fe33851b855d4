// The C entry points: the call is checked, and the best of the instruction sets that the CPU has is taken.
#include <new>

#include "args.h"

namespace regard_portable {
void attention(const regard_args &);
}
#if defined(__x86_64__)
namespace regard_avx2 {
void attention(const regard_args &);
}
namespace regard_avx512 {
void attention(const regard_args &);
}
namespace regard_avx512_bf16 {
void attention(const regard_args &);
}
#endif

namespace {

bool has(int32_t isa) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (isa == REGARD_AVX2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (isa == REGARD_AVX512)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    if (isa == REGARD_AVX512_BF16) return has(REGARD_AVX512) && __builtin_cpu_supports("avx512bf16");
#endif
    return isa == REGARD_PORTABLE;
}

bool good_shape(const regard_args &a) {
    if (a.batch < 0 || a.heads < 0 || a.queries < 0 || a.keys < 0 || a.keys > INT32_MAX / 2) return false;
    if (a.queries > INT32_MAX / 2 || a.groups <= 0 || a.heads % a.groups || a.threads < 1) return false;
    return a.width >= 1 && a.width <= 256 && a.value_width >= 1 && a.value_width <= 256;
}

}  // namespace

extern "C" int32_t regard_best_isa(void) {
    int32_t isa = REGARD_AVX512_BF16;
    while (!has(isa)) isa--;  // each has all that those before it have
    return isa;
}

extern "C" uint64_t regard_args_size(void) { return sizeof(regard_args); }

extern "C" int32_t regard_attention(const regard_args *args) {
    if (!args || args->size != sizeof(regard_args)) return REGARD_BAD_SIZE;
    if (!good_shape(*args)) return REGARD_BAD_SHAPE;
    const int32_t isa = args->isa == REGARD_AUTO ? regard_best_isa() : args->isa;
    if (!has(isa)) return REGARD_NO_SUCH_ISA;
    try {
        switch (isa) {
#if defined(__x86_64__)
        case REGARD_AVX512_BF16: regard_avx512_bf16::attention(*args); break;
        case REGARD_AVX512: regard_avx512::attention(*args); break;
        case REGARD_AVX2: regard_avx2::attention(*args); break;
#endif
        default: regard_portable::attention(*args);
        }
    } catch (const std::bad_alloc &) {
        return REGARD_NO_MEMORY;
    }
    return REGARD_OK;
}
