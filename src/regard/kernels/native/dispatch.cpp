// The C entry points: check the call, and run it with the best instruction set of the CPU.
#if defined(REGARD_HAS_AMX) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <new>
#include <system_error>

#include "after_fork.h"
#include "args.h"

#define DECLARE(name)                                                                                                  \
    namespace regard_##name {                                                                                          \
        void attention(const regard_args &);                                                                           \
        void backward(const regard_args &, const regard_gradients &);                                                  \
        void product(const regard_product &, const regard_factor *);                                                   \
        void norm(const regard_norm &);                                                                                \
    }
DECLARE(portable)
DECLARE(avx2)
DECLARE(avx512)
DECLARE(avx512_bf16)
namespace regard_amx {
void attention(const regard_args &);
}
#if defined(REGARD_HAS_AMX) && defined(__linux__)
extern "C" __attribute__((weak)) int regard_emulated_tiles();  // of tests/kernels/tiles_emulator.c, if that is loaded
#endif

namespace {

// `kernel.cpp` compiled for one instruction set.
struct Build {
    bool here;  // whether the CPU supports it
    void (*attention)(const regard_args &);
    void (*backward)(const regard_args &, const regard_gradients &);
    void (*product)(const regard_product &, const regard_factor *);
    void (*norm)(const regard_norm &);
};

// Whether the CPU has tiles, and the system lets this process use them: they are asked for, once, because the memory in
// which a thread's registers are saved grows by 8 KB. Or whether a test executes their instructions in software.
bool has_tiles() {
#if defined(REGARD_HAS_AMX) && defined(__linux__)
    static const bool granted = [] {
        constexpr unsigned BF16 = 1u << 22, TILE = 1u << 24;
        constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM
        unsigned a = 0, b = 0, c = 0, d = 0;
        const bool here = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & BF16) && (d & TILE);
        if (here && syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0) return true;
        return regard_emulated_tiles && regard_emulated_tiles();
    }();
    return granted;
#else
    return false;
#endif
}

#define BUILD(here, name)                                                                                              \
    {here, regard_##name::attention, regard_##name::backward, regard_##name::product, regard_##name::norm}

Build build_of(int32_t isa) {
// (REGARD_HAS_...: the instruction sets it was compiled for. A compiler that supports one supports those before it.)
#if defined(REGARD_HAS_AVX512)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    if (isa == REGARD_AVX2) return BUILD(avx2, avx2);
    if (isa == REGARD_AVX512) return BUILD(avx512, avx512);
#if defined(REGARD_HAS_AVX512_BF16)
    const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
    if (isa == REGARD_AVX512_BF16) return BUILD(bf16, avx512_bf16);
#if defined(REGARD_HAS_AMX)
    if (isa == REGARD_AMX) {
        Build build = BUILD(bf16 && has_tiles(), avx512_bf16);
        build.attention = regard_amx::attention;
        return build;
    }
#endif
#endif
#endif
    return BUILD(isa == REGARD_PORTABLE, portable);
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

// Whether everything is given that the backward pass needs.
bool complete(const regard_args &a, const regard_gradients &g) {
    const bool nothing = a.batch * a.heads * a.queries == 0;
    return !a.segments && (nothing || (a.out && a.lse && g.d_out));
}

// Fewer threads if there is little to do: waking a thread takes microseconds.
int32_t busy_threads(double products, int32_t threads) {
    constexpr int64_t WORTH_WAKING = 1 << 18;  // products: a few microseconds
    return products < (double)WORTH_WAKING * threads ? 1 + (int32_t)(products / WORTH_WAKING) : threads;
}
regard_args with_busy_threads(const regard_args &a) {
    regard_args b = a;
    b.threads = busy_threads((double)a.batch * a.heads * a.queries * a.keys * (a.width + a.value_width), a.threads);
    return b;
}

bool good_product(const regard_product &a, const regard_factor *factors) {
    if (a.rows < 0 || a.width < 1 || a.factors < 0 || a.threads < 1 || (a.factors && !factors)) return false;
    if (a.dtype < REGARD_FLOAT32 || a.dtype > REGARD_FLOAT16) return false;
    if (a.after < REGARD_NOTHING || a.after > REGARD_TIMES) return false;
    for (int64_t i = 0; i < a.factors; i++)
        if (factors[i].outs < 0 || !factors[i].other != (a.after < REGARD_ADD)) return false;
    return true;
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
    int32_t isa = REGARD_AVX512_BF16;   // (not REGARD_AMX, which is for those who ask for it)
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

extern "C" uint64_t regard_product_size(void) { return sizeof(regard_product); }

extern "C" int32_t regard_multiply(const regard_product *args, const regard_factor *factors) {
    if (!args || args->size != sizeof(regard_product)) return REGARD_BAD_SIZE;
    if (!good_product(*args, factors)) return REGARD_BAD_SHAPE;
    regard_product a = *args;
    int64_t outs = 0;
    for (int64_t i = 0; i < a.factors; i++) outs += factors[i].outs;
    a.threads = busy_threads((double)a.rows * a.width * outs, a.threads);
    return run(a.isa, [&](const Build &build) { build.product(a, factors); });
}

extern "C" uint64_t regard_norm_size(void) { return sizeof(regard_norm); }

extern "C" int32_t regard_rms_norm(const regard_norm *args) {
    if (!args || args->size != sizeof(regard_norm)) return REGARD_BAD_SIZE;
    regard_norm a = *args;
    if (a.rows < 0 || a.width < 1 || a.threads < 1) return REGARD_BAD_SHAPE;
    if (a.dtype < REGARD_FLOAT32 || a.dtype > REGARD_FLOAT16) return REGARD_BAD_SHAPE;
    a.threads = busy_threads(2.0 * (double)a.rows * (double)a.width, a.threads);
    return run(a.isa, [&](const Build &build) { build.norm(a); });
}
