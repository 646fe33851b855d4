// Compiled once for each instruction set, each time in a namespace of its own.
#include "backward_schedule.h"
#include "schedule.h"

namespace REGARD_NAMESPACE {

void attention(const regard_args &a) {
    regard_args b = a;
    // (With few queries a copy for each block of them is as good.)
    const bool many = a.queries * (a.heads / a.groups) >= 4 * LANES;
    const bool keys = many && a.k_stride[2] != a.width, values = many && a.out && a.v_stride[2] != a.value_width;
    packed.reserve((size_t)(a.batch * a.groups * a.keys * (a.width * keys + a.value_width * values)) * 4 + 128);
    if (keys) b.k = pack(a, (const float *)a.k, b.k_stride, a.width);
    if (values) b.v = pack(a, (const float *)a.v, b.v_stride, a.value_width);
    const Work work(b);
    looks(b) ? looking(work) : plain(work);
}

void backward(const regard_args &a, const regard_gradients &g) { Backward(a, g).run(); }

}  // namespace REGARD_NAMESPACE
