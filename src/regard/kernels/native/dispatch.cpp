// The C entry points: check the call, and run it with the best instruction set of the CPU.
#include <new>
#include <system_error>

#include "after_fork.h"
#include "args.h"

#define DECLARE(name)                                                                                                  \
    namespace regard_##name {                                                                                          \
        void attention(const regard_args &);                                                                           \
        void backward(const regard_args &, const regard_gradients &);                                                  \
    }
DECLARE(portable)
DECLARE(avx2)
DECLARE(avx512)
DECLARE(avx512_bf16)

namespace {

// `kernel.cpp` compiled for one instruction set.
struct Build {
    bool here;  // whether the CPU supports it
    void (*attention)(const regard_args &);
    void (*backward)(const regard_args &, const regard_gradients &);
};

Build build_of(int32_t isa) {
// (REGARD_HAS_...: the instruction sets it was compiled for. A compiler that supports one supports those before it.)
#if defined(REGARD_HAS_AVX512)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    if (isa == REGARD_AVX2) return {avx2, regard_avx2::attention, regard_avx2::backward};
    if (isa == REGARD_AVX512) return {avx512, regard_avx512::attention, regard_avx512::backward};
#if defined(REGARD_HAS_AVX512_BF16)
    const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
    if (isa == REGARD_AVX512_BF16) return {bf16, regard_avx512_bf16::attention, regard_avx512_bf16::backward};
#endif
#endif
    return {isa == REGARD_PORTABLE, regard_portable::attention, regard_portable::backward};
}

// Whether the segments make up all keys.
bool good_segments(const regard_args &a) {
    if (!a.segments) return true;
    int64_t keys = 0;
    for (int64_t i = 0; i < a.segment_count; i++) {
        const regard_segment &x = a.segments[i], &first = a.segments[0];
        if (x.keys < 0 || !x.k_scale != !first.k_scale || !x.v_scale != !first.k_scale) return false;
        keys += x.keys;
    }
    return a.segment_count > 0 && keys == a.keys;
}

bool good_shape(const regard_args &a) {
    if (a.batch < 0 || a.heads < 0 || a.queries < 0 || a.keys < 0 || a.keys > INT32_MAX / 2) return false;
    if (a.queries > INT32_MAX / 2 || a.groups <= 0 || a.heads % a.groups || a.threads < 1) return false;
    if (a.dtype < REGARD_FLOAT32 || a.dtype > REGARD_FLOAT16) return false;
    if (!good_segments(a)) return false;
    return a.width >= 1 && a.width <= REGARD_WIDEST && a.value_width >= 1 && a.value_width <= REGARD_WIDEST;
}

// Whether everything is given that the backward pass needs. (It supports float32 only.)
bool complete(const regard_args &a, const regard_gradients &g) {
    const bool nothing = a.batch * a.heads * a.queries == 0;
    return a.dtype == REGARD_FLOAT32 && !a.segments && (nothing || (a.out && a.lse && g.d_out));
}

// The same call with fewer threads if there is little to do: waking a thread takes microseconds.
regard_args with_busy_threads(const regard_args &a) {
    constexpr int64_t WORTH_WAKING = 1 << 18;  // products: a few microseconds
    const double products = (double)a.batch * a.heads * a.queries * a.keys * (a.width + a.value_width);
    regard_args b = a;
    if (products < (double)WORTH_WAKING * a.threads) b.threads = 1 + (int32_t)(products / WORTH_WAKING);
    return b;
}

// f(build); exceptions become a status, since the caller is C.
template <class Function>
int32_t run(int32_t isa, Function f) {
    const Build build = build_of(isa == REGARD_AUTO ? regard_best_isa() : isa);
    if (!build.here) return REGARD_NO_SUCH_ISA;
    int32_t status = REGARD_OK;
    try {
        regard::run_anywhere([&] {
            try {
                f(build);
            } catch (const std::bad_alloc &) {
                status = REGARD_NO_MEMORY;
            }
        });
    } catch (const std::system_error &) {  // no thread could be started
        status = REGARD_NO_MEMORY;
    }
    return status;
}

}  // namespace

extern "C" int32_t regard_has_isa(int32_t isa) { return build_of(isa).here; }

extern "C" int32_t regard_best_isa(void) {
    int32_t isa = REGARD_AVX512_BF16;
    while (!build_of(isa).here) isa--;  // (each includes those before it)
    return isa;
}

extern "C" uint64_t regard_args_size(void) { return sizeof(regard_args); }

extern "C" uint64_t regard_gradients_size(void) { return sizeof(regard_gradients); }

extern "C" int32_t regard_attention(const regard_args *args) {
    if (!args || args->size != sizeof(regard_args)) return REGARD_BAD_SIZE;
    if (!good_shape(*args)) return REGARD_BAD_SHAPE;
    return run(args->isa, [&](const Build &build) { build.attention(with_busy_threads(*args)); });
}

extern "C" int32_t regard_attention_backward(const regard_args *args, const regard_gradients *gradients) {
    if (!args || args->size != sizeof(regard_args)) return REGARD_BAD_SIZE;
    if (!gradients || gradients->size != sizeof(regard_gradients)) return REGARD_BAD_SIZE;
    if (!good_shape(*args) || !complete(*args, *gradients)) return REGARD_BAD_SHAPE;
    return run(args->isa, [&](const Build &build) { build.backward(with_busy_threads(*args), *gradients); });
}
