// Compiled once per instruction set, each time in another namespace.
#include "backward_schedule.h"
#include "decode_in_lanes.h"
#include "prepare.h"

#if defined(__AMX_BF16__)
namespace regard_avx512_bf16 {
void attention(const regard_args &);
}
#endif

namespace REGARD_NAMESPACE {

// Frees scratch memory of the calling thread that is above the limit, also after std::bad_alloc.
struct KeepLittle {
    ~KeepLittle() {
        packed.keep(4 * KEPT);  // keys and values of all heads
        part_sums.keep(KEPT);
    }
};

struct AllBlocks {
    template <class T>
    void operator()(const regard_args &a, T) const {
        const Work work(a);
        looks(a) ? looking<T>(work) : plain<T>(work);
    }
};

#if defined(__AMX_BF16__)
// The forward pass, where tiles suit it; the build without them does all else.
void attention(const regard_args &a) {
    const KeepLittle after;
    const bool decodes = (fills_lanes(a) || few(a)) && !looks(a);
    if (decodes || !prepare_for_tiles(a, AllBlocks{})) regard_avx512_bf16::attention(a);
}
#else
void attention(const regard_args &a) {
    const KeepLittle after;
    if (fills_lanes(a) && !looks(a))
        return with_dtypes(a, [&](auto q, auto k) { decode_in_lanes<decltype(q), decltype(k)>(a, packed); });
    if (few(a) && !looks(a))
        return with_dtypes(a, [&](auto q, auto k) { decode<decltype(q), decltype(k)>(a, packed); });
    prepare(a, AllBlocks{});
}

void backward(const regard_args &a, const regard_gradients &g) {
    if constexpr (PAIRS)
        if (a.dtype == REGARD_BFLOAT16) return Backward<Pair>(a, g).run();
    Backward<float>(a, g).run();
}
#endif

}  // namespace REGARD_NAMESPACE
