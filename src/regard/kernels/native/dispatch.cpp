// The C entry points: the call is checked, and the best of the instruction sets that the CPU has is taken.
#include <new>

#include "args.h"

namespace regard_portable {
void attention(const regard_args &);
void backward(const regard_args &, const regard_gradients &);
}
#if defined(__x86_64__)
namespace regard_avx2 {
void attention(const regard_args &);
void backward(const regard_args &, const regard_gradients &);
}
namespace regard_avx512 {
void attention(const regard_args &);
void backward(const regard_args &, const regard_gradients &);
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
#endif
    return isa == REGARD_PORTABLE;
}

bool good_shape(const regard_args &a) {
    if (a.batch < 0 || a.heads < 0 || a.queries < 0 || a.keys < 0 || a.keys > INT32_MAX / 2) return false;
    if (a.queries > INT32_MAX / 2 || a.groups <= 0 || a.heads % a.groups || a.threads < 1) return false;
    return a.width >= 1 && a.width <= 256 && a.value_width >= 1 && a.value_width <= 256;
}

// What the backward pass cannot do without. (It is written for float32 alone.)
bool complete(const regard_args &a, const regard_gradients &g) {
    const bool nothing = a.batch * a.heads * a.queries == 0;
    return a.dtype == REGARD_FLOAT32 && (nothing || (a.out && a.lse && g.d_out));
}

}  // namespace

extern "C" int32_t regard_best_isa(void) {
    return has(REGARD_AVX512) ? REGARD_AVX512 : has(REGARD_AVX2) ? REGARD_AVX2 : REGARD_PORTABLE;
}

extern "C" uint64_t regard_args_size(void) { return sizeof(regard_args); }
extern "C" uint64_t regard_gradients_size(void) { return sizeof(regard_gradients); }

extern "C" int32_t regard_attention(const regard_args *args) {
    if (!args || args->size != sizeof(regard_args)) return REGARD_BAD_SIZE;
    if (!good_shape(*args)) return REGARD_BAD_SHAPE;
    const int32_t isa = args->isa == REGARD_AUTO ? regard_best_isa() : args->isa;
    if (!has(isa)) return REGARD_NO_SUCH_ISA;
    try {
        switch (isa) {
#if defined(__x86_64__)
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

extern "C" int32_t regard_attention_backward(const regard_args *args, const regard_gradients *gradients) {
    if (!args || args->size != sizeof(regard_args)) return REGARD_BAD_SIZE;
    if (!gradients || gradients->size != sizeof(regard_gradients)) return REGARD_BAD_SIZE;
    if (!good_shape(*args) || !complete(*args, *gradients)) return REGARD_BAD_SHAPE;
    const int32_t isa = args->isa == REGARD_AUTO ? regard_best_isa() : args->isa;
    if (!has(isa)) return REGARD_NO_SUCH_ISA;
    try {
        switch (isa) {
#if defined(__x86_64__)
        case REGARD_AVX512: regard_avx512::backward(*args, *gradients); break;
        case REGARD_AVX2: regard_avx2::backward(*args, *gradients); break;
#endif
        default: regard_portable::backward(*args, *gradients);
        }
    } catch (const std::bad_alloc &) {
        return REGARD_NO_MEMORY;
    }
    return REGARD_OK;
}
