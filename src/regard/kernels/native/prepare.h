// Converts keys and values to the type of the products: float32, or pairs of bfloat16 if the CPU has instructions for
// them. They are copied once; queries are converted when a block is transposed to lanes.
#pragma once
#include "schedule.h"
#include "segments.h"

namespace REGARD_NAMESPACE {

// Whether there are so many queries per key that copying keys and values once is faster than in every block.
inline bool many(const regard_args &a) { return a.queries * (a.heads / a.groups) >= 4 * LANES; }
inline size_t key_rows(const regard_args &a) { return (size_t)(a.batch * a.groups * a.keys); }

template <class Function>
void in_floats(const regard_args &a, Function run) {
    regard_args b = a;
    with_dtype(a.dtype, [&](auto number) {
        using T = decltype(number);
        const bool other = !std::is_same_v<T, float>;
        const bool keys = other || (many(a) && a.k_stride[2] != a.width);
        const bool values = a.out && (other || (many(a) && a.v_stride[2] != a.value_width));
        packed.reserve(key_rows(a) * (size_t)(a.width * keys + a.value_width * values) * sizeof(float) + 128);
        const auto copied = [&](const void *from, int64_t (&stride)[3], int64_t width) {
            const int64_t apart = stride[2];
            return pack<float>(a, (const T *)from, stride, a.keys, width,
                               [&](const T *rows, int64_t j, float *to) { copy_row(rows + j * apart, width, to); });
        };
        if (keys) b.k = copied(a.k, b.k_stride, a.width);
        if (values) b.v = copied(a.v, b.v_stride, a.value_width);
    });
    run(b, float{});
}

template <class Function>
void in_pairs(const regard_args &a, Function run) {
    regard_args b = a;
    const int64_t width = width_of<Pair>(a), pairs = (a.keys + 1) / 2;
    const size_t widths = (size_t)(a.width + a.value_width);
    packed.reserve((key_rows(a) + (size_t)(a.batch * a.groups)) * (widths + 1) * sizeof(BFloat16) + 128);
    if (lies_in_pairs(a.k, a.k_stride, a.width) && !(many(a) && a.k_stride[2] != a.width)) {
        for (int64_t &stride : b.k_stride) stride /= 2;
    } else {
        b.k = pack<Pair>(a, (const BFloat16 *)a.k, b.k_stride, a.keys, width,
                         [&](const BFloat16 *k, int64_t j, Pair *to) { to_pairs(k + j * a.k_stride[2], a.width, to); });
    }
    if (a.out) {
        b.v = pack<Pair>(a, (const BFloat16 *)a.v, b.v_stride, pairs, a.value_width,
                         [&](const BFloat16 *v, int64_t j, Pair *to) {
                             const BFloat16 *first = v + 2 * j * a.v_stride[2];
                             pair_rows(first, 2 * j + 1 < a.keys ? first + a.v_stride[2] : nullptr, a.value_width, to);
                         });
    }
    run(b, Pair{});
}

// Puts the segments side by side.
template <class Function>
void in_one_place(const regard_args &a, Function run) {
    regard_args b = a;
    b.segments = nullptr;
    packed.reserve(key_rows(a) * (size_t)(a.width + a.value_width) * sizeof(float) + 128);
    float *k = packed.take<float>(key_rows(a) * (size_t)a.width);
    float *v = packed.take<float>(key_rows(a) * (size_t)a.value_width);
    const auto copy = [&](auto number) {
        using K = decltype(number);
        in_team(a.threads, [&] {
#pragma omp for schedule(static)
            for (int64_t head = 0; head < a.batch * a.groups; head++) {
                over_stretches<K>(a, head / a.groups, head % a.groups, 0, a.keys, [&](const Stretch<K> &from) {
                    for (int64_t j = from.first; j < from.last; j++) {
                        const int64_t row = head * a.keys + j;
                        copy_row(from.key(j), a.width, k + row * a.width, from.key_scale(j));
                        copy_row(from.value(j), a.value_width, v + row * a.value_width, from.value_scale(j));
                    }
                });
            }
        });
    };
    is_int8(a) ? copy(Int8{}) : with_dtype(a.dtype, copy);
    const auto dense = [&](int64_t (&stride)[3], int64_t width) {
        stride[0] = a.groups * a.keys * width, stride[1] = a.keys * width, stride[2] = width;
    };
    dense(b.k_stride, a.width), dense(b.v_stride, a.value_width);
    b.k = k, b.v = v;
    run(b, float{});
}

// run(call, T{}) with a call whose k and v are of type T, with strides in T.
template <class Function>
void prepare(const regard_args &a, Function run) {
    if (a.segments) return in_one_place(a, run);
    if constexpr (PAIRS)
        if (a.dtype == REGARD_BFLOAT16) return in_pairs(a, run);
    in_floats(a, run);
}

}  // namespace REGARD_NAMESPACE
