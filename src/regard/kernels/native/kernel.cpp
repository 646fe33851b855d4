// Compiled once for each instruction set, each time in a namespace of its own.
#include "backward_schedule.h"
#include "decode.h"
#include "prepare.h"

namespace REGARD_NAMESPACE {

constexpr size_t KEPT = 32 << 20;  // bytes of copies, from call to call: faster than new memory each time

void attention(const regard_args &a) {
    if (few(a) && !looks(a)) return with_dtype(a.dtype, [&](auto number) { decode<decltype(number)>(a, packed); });
    prepare(a, [](const regard_args &b, auto number) {
        const Work work(b);
        looks(b) ? looking<decltype(number)>(work) : plain<decltype(number)>(work);
    });
    packed.keep(KEPT);
    part_sums.keep(KEPT);
}

void backward(const regard_args &a, const regard_gradients &g) { Backward(a, g).run(); }

}  // namespace REGARD_NAMESPACE
