// Converts keys and values to the type of the products: float32, or pairs of bfloat16 if the CPU has instructions for
// them, or what tiles multiply. They are copied once; queries are converted when a block is transposed to lanes.
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
    const int64_t width = operands<Pair>(a.width), pairs = (a.keys + 1) / 2;
    const size_t widths = (size_t)(a.width + a.value_width);
    packed.reserve((key_rows(a) + (size_t)(a.batch * a.groups)) * (widths + 1) * sizeof(BFloat16) + 128);
    if (lies_in_pairs(a.k, a.k_stride, a.width) && !(many(a) && a.k_stride[2] != a.width)) {
        for (int64_t &stride : b.k_stride) stride /= 2;
    } else {
        b.k = pack<Pair>(a, (const BFloat16 *)a.k, b.k_stride, a.keys, width,
                         [&](const BFloat16 *k, int64_t j, Pair *to) { copy_row(k + j * a.k_stride[2], a.width, to); });
    }
    if (a.out) {
        b.v = pack<Pair>(
            a, (const BFloat16 *)a.v, b.v_stride, pairs, a.value_width, [&](const BFloat16 *v, int64_t j, Pair *to) {
                const BFloat16 *first = v + 2 * j * a.v_stride[2];
                pair_rows(first, 2 * j + 1 < a.keys ? first + a.v_stride[2] : nullptr, a.value_width, to, 0);
            });
    }
    run(b, Pair{});
}

// The largest of the bits of some numbers without their signs: of the numbers, too, for floats are in their order.
template <class T>
uint32_t largest_bits(const T *row, int64_t width) {
    I most = {};
    const auto add = [&](F x) {
        const I bits = (I)x & 0x7fffffff;
        most = choose(bits > most, bits, most);
    };
    int64_t x = 0;
    for (; x + W <= width; x += W) add(load(row + x));
    if (x < width) add(load_some(row + x, width - x));
    int32_t largest = 0;
    for (int i = 0; i < W; i++) largest = std::max(largest, most[i]);
    return (uint32_t)largest;
}

// The largest absolute value of a tensor, (batch, heads, rows, width); NaN where it holds one.
inline float largest_of(const regard_args &a, const void *x, const int64_t (&stride)[3], int64_t heads, int64_t rows,
                        int64_t width) {
    std::atomic<uint32_t> all{0};
    with_dtype(a.dtype, [&](auto number) {
        using N = decltype(number);
        constexpr int64_t RUN = 64;
        const int64_t runs = (rows + RUN - 1) / RUN;
        in_team((int)std::min<int64_t>(a.threads, 1 + a.batch * heads * rows * width / (256 << 10)), [&] {
            uint32_t most = 0;
#pragma omp for schedule(static) nowait
            for (int64_t i = 0; i < a.batch * heads * runs; i++) {
                const int64_t head = i / runs, first = i % runs * RUN;
                const N *row = (const N *)x + head / heads * stride[0] + head % heads * stride[1];
                for (int64_t j = first; j < std::min(first + RUN, rows); j++)
                    most = std::max(most, largest_bits(row + j * stride[2], width));
            }
            uint32_t before = all;
            while (before < most && !all.compare_exchange_weak(before, most)) {
            }
        });
    });
    const uint32_t bits = all;
    float largest;
    std::memcpy(&largest, &bits, sizeof largest);
    return largest;
}

// Whether the numbers of T are multiplied on tiles. Scores are to be so small that it does not matter in which order
// they were summed: the backward pass, which has no tiles, takes weights from the log-sum-exp of this one. Numbers that
// are split are to be finite, and not so small that parts of them, or of products of two such numbers, are subnormal.
template <class T>
bool suit_tiles(const regard_args &a) {
    constexpr double MOST_SCORE = 1 << 14;  // one rounding of it is 2 ** -10
    const auto splits = [](float largest) { return largest == 0.0f || (largest >= 0x1p-40f && largest < 0x1p60f); };
    const float q = largest_of(a, a.q, a.q_stride, a.heads, a.queries, a.width);
    const float k = largest_of(a, a.k, a.k_stride, a.groups, a.keys, a.width);
    if (!((double)q * k * a.width * std::fabs(a.scale) <= MOST_SCORE)) return false;  // (or one of them is NaN)
    if constexpr (std::is_same_v<T, Pair>) return true;
    return splits(q) && splits(k) &&
           (!a.out || splits(largest_of(a, a.v, a.v_stride, a.groups, a.keys, a.value_width)));
}

// On tiles: keys as rows, values as columns. T is Pair for bfloat16, else Split.
template <class T, class Function>
void on_tiles(const regard_args &a, Function run) {
    regard_args b = a;
    const Columns<T> columns(a.value_width);
    const int64_t width = operands<T>(a.width), heads = a.batch * a.groups;
    const int64_t size = a.out ? columns.size(a.keys) : 0;  // of the values of a head
    packed.reserve((key_rows(a) * (size_t)width + (size_t)(heads * size)) * sizeof(T) + 2 * 64);
    with_dtype(a.dtype, [&](auto number) {
        using N = decltype(number);
        if constexpr (std::is_same_v<T, Pair> == std::is_same_v<N, BFloat16>) {
            if (std::is_same_v<T, Pair> && lies_in_pairs(a.k, a.k_stride, a.width) &&
                !(many(a) && a.k_stride[2] != a.width)) {
                for (int64_t &stride : b.k_stride) stride /= 2;
            } else {
                b.k = pack<T>(a, (const N *)a.k, b.k_stride, a.keys, width, [&](const N *rows, int64_t j, T *to) {
                    copy_row(rows + j * a.k_stride[2], a.width, to);
                });
            }
            if (!a.out) return;
            T *to = packed.take<T>((size_t)(heads * size));
            const int64_t runs = (a.keys + CHUNK - 1) / CHUNK;
            in_team((int)std::min<int64_t>(a.threads, 1 + heads * size * (int64_t)sizeof(T) / (256 << 10)), [&] {
#pragma omp for schedule(static)
                for (int64_t i = 0; i < heads * runs; i++) {
                    const int64_t head = i / runs, first = i % runs * CHUNK;
                    const N *rows = (const N *)a.v + head / a.groups * a.v_stride[0] + head % a.groups * a.v_stride[1];
                    for (int64_t j = first; j < std::min(first + CHUNK, a.keys); j += columns.together)
                        turn_rows(rows + j * a.v_stride[2], a.v_stride[2], std::min(columns.together, a.keys - j),
                                  columns, to + head * size + j / columns.together * columns.stride);
                }
            });
            b.v = to;
            b.v_stride[0] = a.groups * size, b.v_stride[1] = size, b.v_stride[2] = columns.stride;
        }
    });
    run(b, T{});
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
    if constexpr (PAIRS) {
        if (a.dtype == REGARD_BFLOAT16) return in_pairs(a, run);
    }
    in_floats(a, run);
}

// The same for tiles; false, and nothing is done, where they do not suit.
template <class Function>
bool prepare_for_tiles(const regard_args &a, Function run) {
    if (a.segments) return false;
    const bool pairs = a.dtype == REGARD_BFLOAT16;
    if (!(pairs ? suit_tiles<Pair>(a) : suit_tiles<Split>(a))) return false;
    pairs ? on_tiles<Pair>(a, run) : on_tiles<Split>(a, run);
    return true;
}

}  // namespace REGARD_NAMESPACE
