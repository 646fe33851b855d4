// Compiled once per instruction set, each time in another namespace.
#include "backward_schedule.h"
#include "decode_in_lanes.h"
#include "prepare.h"

namespace REGARD_NAMESPACE {

// Frees scratch memory of the calling thread that is above the limit, also after std::bad_alloc.
struct KeepLittle {
    ~KeepLittle() {
        packed.keep(4 * KEPT);  // keys and values of all heads
        part_sums.keep(KEPT);
    }
};

void attention(const regard_args &a) {
    const KeepLittle after;
    if (fills_lanes(a) && !looks(a))
        return with_dtypes(a, [&](auto q, auto k) { decode_in_lanes<decltype(q), decltype(k)>(a, packed); });
    if (few(a) && !looks(a))
        return with_dtypes(a, [&](auto q, auto k) { decode<decltype(q), decltype(k)>(a, packed); });
    prepare(a, [](const regard_args &b, auto number) {
        const Work work(b);
        looks(b) ? looking<decltype(number)>(work) : plain<decltype(number)>(work);
    });
}

void backward(const regard_args &a, const regard_gradients &g) {
    if constexpr (PAIRS)
        if (a.dtype == REGARD_BFLOAT16) return Backward<Pair>(a, g).run();
    Backward<float>(a, g).run();
}

}  // namespace REGARD_NAMESPACE
