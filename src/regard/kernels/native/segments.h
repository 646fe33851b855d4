// Keys and values that lie in several places, one after another (a prefix that several caches share, and a tail of
// one's own), or that are int8 with a scale per row. A call without segments is one segment.
#pragma once
#include <algorithm>

#include "args.h"
#include "numbers.h"

namespace REGARD_NAMESPACE {

// The part of a kv head's keys and values that one segment has. K: the type of its numbers.
template <class K>
struct Stretch {
    const K *k, *v;
    const float *k_scale, *v_scale;  // null: 1
    int64_t k_stride, v_stride, k_scale_stride, v_scale_stride;
    int64_t first, last;  // its keys, counted over all segments

    const K *key(int64_t j) const { return k + (j - first) * k_stride; }
    const K *value(int64_t j) const { return v + (j - first) * v_stride; }
    float key_scale(int64_t j) const { return k_scale ? k_scale[(j - first) * k_scale_stride] : 1.0f; }
    float value_scale(int64_t j) const { return v_scale ? v_scale[(j - first) * v_scale_stride] : 1.0f; }
};

// f(stretch) for the stretches that have some of the keys [from, to), in their order.
template <class K, class Function>
void over_stretches(const regard_args &a, int64_t item, int64_t group, int64_t from, int64_t to, Function f) {
    if (!a.segments) {
        const K *k = (const K *)a.k + item * a.k_stride[0] + group * a.k_stride[1];
        const K *v = (const K *)a.v + item * a.v_stride[0] + group * a.v_stride[1];
        if (from < to) f(Stretch<K>{k, v, nullptr, nullptr, a.k_stride[2], a.v_stride[2], 0, 0, 0, a.keys});
        return;
    }
    int64_t first = 0;
    for (int64_t i = 0; i < a.segment_count; i++) {
        const regard_segment &x = a.segments[i];
        const int64_t last = first + x.keys;
        if (std::max(first, from) < std::min(last, to)) {
            const auto at = [&](const int64_t (&stride)[3]) { return item * stride[0] + group * stride[1]; };
            f(Stretch<K>{(const K *)x.k + at(x.k_stride), (const K *)x.v + at(x.v_stride),
                         x.k_scale ? x.k_scale + at(x.k_scale_stride) : nullptr,
                         x.v_scale ? x.v_scale + at(x.v_scale_stride) : nullptr, x.k_stride[2], x.v_stride[2],
                         x.k_scale_stride[2], x.v_scale_stride[2], first, last});
        }
        first = last;
    }
}

inline bool is_int8(const regard_args &a) { return a.segments && a.segments[0].k_scale; }

// f(T{}, K{}) with the types of the queries and of the keys.
template <class Function>
void with_dtypes(const regard_args &a, Function f) {
    with_dtype(a.dtype, [&](auto number) { is_int8(a) ? f(number, Int8{}) : f(number, number); });
}

}  // namespace REGARD_NAMESPACE
