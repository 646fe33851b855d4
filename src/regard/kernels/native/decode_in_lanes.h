// Few tokens, but many query heads to a kv head: latent attention in its absorbed form, multi-query attention. The time
// is that of the products. So the queries of one kv head (all of its heads and tokens) fill the lanes, as those of a
// text do in `forward.h`, and each key that is read is used for all of them:
//
//     S^T (keys x lanes) = K Q^T,   O^T (E x lanes) += V^T P^T
//
// As in `decode.h` the keys are divided into pieces, which are merged in order. The pieces depend on the shapes alone:
// results are the same for any number of threads.
#pragma once
#include "decode.h"

namespace REGARD_NAMESPACE {

constexpr int64_t PIECE_KEYS = 512;  // keys of a piece, at least
constexpr int64_t MOST_UNITS = 64;   // about so many pieces, blocks and heads, at most: enough for all threads

// Whether it is faster than `decode`; the rest is for the other paths.
inline bool fills_lanes(const regard_args &a) {
    const int64_t lanes = a.queries * (a.heads / a.groups);
    return a.queries <= COLUMN / 2 && lanes >= COLUMN && a.heads > a.groups && !a.bias && !a.mask && !a.q_docs &&
           !a.drop_rows;
}

// Up to LANES queries of one kv head against some of its keys.
template <class T, class K>
class LanesReading {
    const regard_args &a;
    const int64_t item, group, first, count;  // queries [first, first + count) of the group
    const int lanes;
    float *q, *o, *s, *wide_keys, *wide_values;
    Rows rows;
    alignas(64) int32_t low[LANES], high[LANES];
    int64_t all_low = 0, all_high;  // keys that all of them see

  public:
    LanesReading(const regard_args &a, int64_t item, int64_t group, int64_t first, int64_t count, Scratch &scratch)
        : a(a), item(item), group(group), first(first), count(count),
          lanes((int)((count + COLUMN - 1) / COLUMN * COLUMN)), all_high(a.keys) {
        const size_t widths = (size_t)(a.width + a.value_width);
        scratch.reserve((widths * LANES + KEYS * LANES + KEYS * widths) * sizeof(float) + 5 * 64);
        q = scratch.take<float>((size_t)a.width * LANES);
        o = scratch.take<float>((size_t)a.value_width * LANES);
        s = scratch.take<float>(KEYS * LANES);
        wide_keys = scratch.take<float>(KEYS * (size_t)a.width);
        wide_values = scratch.take<float>(KEYS * (size_t)a.value_width);
        for (int64_t i = 0; i < count; i++) {  // (side by side in the place of keys, which come later)
            const int64_t n = first + i, row = n % a.queries, head = group * (a.heads / a.groups) + n / a.queries;
            copy_row((const T *)a.q + item * a.q_stride[0] + head * a.q_stride[1] + row * a.q_stride[2], a.width,
                     wide_keys + i * a.width);
        }
        rows_to_lanes(wide_keys, a.width, count, lanes, a.width, q);
        for (int i = 0; i < lanes; i++) {
            const auto range = range_of(a, item, (first + std::min<int64_t>(i, count - 1)) % a.queries);
            low[i] = (int32_t)range.first;
            high[i] = (int32_t)range.second;
            all_low = std::max(all_low, range.first);
            all_high = std::min(all_high, range.second);
        }
    }

    // Processes the keys [from, to). Output: rows of `row` floats.
    void read(int64_t from, int64_t to, float *out, int64_t row, float *tops, float *sums) {
        pass(from, to, false);
        alignas(64) float ones[LANES];
        for (float &one : ones) one = 1.0f;
        const auto write = [&] { return lanes_to_rows(o, count, a.value_width, ones, out, row); };
        // (Lanes beyond the width are read when pieces are merged.)
        for (int64_t i = 0; i < count; i++)
            for (int64_t e = a.value_width; e < row; e++) out[i * row + e] = 0.0f;
        if (!write() && (from < all_low || to > all_high)) {  // maybe from 0 * NaN of a hidden key: rare
            pass(from, to, true);
            write();
        }
        for (int64_t i = 0; i < count; i++) tops[i] = rows.base[i], sums[i] = rows.total[i];
    }

  private:
    void pass(int64_t from, int64_t to, bool careful) {
        rows.begin();
        std::memset(o, 0, (size_t)(a.value_width * LANES) * sizeof(float));
        over_stretches<K>(a, item, group, from, to, [&](const Stretch<K> &held) {
            const int64_t end = std::min(to, held.last);
            for (int64_t j = std::max(from, held.first), some; j < end; j += some) {
                some = std::min(KEYS, end - j);
                step(held, j, some, std::min(KEYS, end - j - some), careful);
            }
        });
    }

    void step(const Stretch<K> &held, int64_t j, int64_t some, int64_t next, bool careful) {
        int64_t k_stride, v_stride;
        const float *k = in_floats(held.key(j), held.k_stride, some, a.width, wide_keys, k_stride,
                                   [&](int64_t i) { return held.key_scale(j + i); });
        const Ahead k_ahead(held.key(j + some), next, a.width, held.k_stride);
        if (!transforms(a) && j >= all_low && j + some <= all_high) {
            scores<true, false>(k, k_stride, some, q, a.width, 0, lanes, s, rows.top, nullptr, 0, k_ahead);
        } else {
            scores<false, false>(k, k_stride, some, q, a.width, 0, lanes, s, nullptr, nullptr, 0, k_ahead);
            if (transforms(a)) transform(s, some, 0, lanes, a.scale, a.softcap, nullptr);
            hide(j, some);
            maxima<false>(s, some, 0, lanes, rows, 0);
        }
        exponentials<false>(s, some, 0, lanes, exponent_of(a), rows);
        if (!a.out) return;
        if (careful) return add_carefully(held, j, some);
        // Values that are the first numbers of the keys, as in latent attention, are in floats already.
        const bool same = (const void *)held.k == (const void *)held.v && held.k_stride == held.v_stride &&
                          held.k_scale == held.v_scale && a.value_width <= a.width;
        v_stride = k_stride;
        const float *v = same ? k
                              : in_floats(held.value(j), held.v_stride, some, a.value_width, wide_values, v_stride,
                                          [&](int64_t i) { return held.value_scale(j + i); });
        const Ahead v_ahead = same ? Ahead() : Ahead(held.value(j + some), next, a.value_width, held.v_stride);
        values(v, v_stride, s, some, a.value_width, 0, lanes, rows.shrink, o, v_ahead);
    }

    // Rows as they are if they are floats, else widened.
    template <class Scale>
    static const float *in_floats(const K *from, int64_t stride, int64_t count, int64_t width, float *to,
                                  int64_t &to_stride, Scale scale) {
        if constexpr (std::is_same_v<K, float>) {
            to_stride = stride;
            return from;
        } else {
            to_stride = width;
            for (int64_t i = 0; i < count; i++) copy_row(from + i * stride, width, to + i * width, scale(i));
            return to;
        }
    }

    void hide(int64_t j, int64_t some) {
        if (j >= all_low && j + some <= all_high) return;
        for (int64_t i = 0; i < some; i++) {
            const I key = broadcast((int32_t)(j + i));
            for (int lane = 0; lane < lanes; lane += W) {
                float *p = s + i * LANES + lane;
                const I sees = (key >= load(low + lane)) & (key < load(high + lane));
                store(p, choose(sees, load(p), broadcast(-__builtin_inff())));
            }
        }
    }

    // If v has NaN or inf: only visible pairs, since 0 * NaN of a hidden one must not count.
    void add_carefully(const Stretch<K> &held, int64_t j, int64_t some) {
        for (int64_t e = 0; e < a.value_width; e++) {
            for (int lane = 0; lane < lanes; lane++) {
                float &sum = o[e * LANES + lane];
                sum *= rows.shrink[lane];
                for (int64_t i = 0; i < some; i++) {
                    if (j + i < low[lane] || j + i >= high[lane]) continue;
                    sum += s[i * LANES + lane] * widened(held.value(j + i)[e]) * held.value_scale(j + i);
                }
            }
        }
    }
};

template <class T, class K>
void decode_in_lanes(const regard_args &a, Scratch &memory) {
    const int64_t heads = a.batch * a.groups, queries = a.queries * (a.heads / a.groups);
    if (heads == 0) return;
    const int64_t longest = longest_seen(a), blocks = (queries + LANES - 1) / LANES;
    const int64_t most = std::max<int64_t>(1, MOST_UNITS / (heads * blocks));
    const int64_t count = std::max<int64_t>(1, std::min(longest / PIECE_KEYS, most));
    Pieces pieces{a, count, queries, padded(a.value_width), nullptr};
    const size_t floats = (size_t)(heads * count * queries * (pieces.row + 2));
    memory.reserve((floats + (size_t)(heads * blocks)) * sizeof(float) + 2 * 64);
    pieces.memory = memory.take<float>(floats);
    int32_t *left = memory.take<int32_t>((size_t)(heads * blocks));  // pieces of a block that are not done
    std::fill(left, left + heads * blocks, (int32_t)count);
    const int64_t units = heads * blocks * count;
    std::atomic<int64_t> next{0};
    std::atomic<bool> failed{false};
    in_team((int)std::min<int64_t>(a.threads, units), [&] {
        FlushSubnormals flush;
        try {
            // The blocks of a piece one after another: the second reads its keys from the caches.
            for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < units;) {
                const int64_t block = i % blocks, piece = i / blocks % count, head = i / (blocks * count);
                const int64_t item = head / a.groups, n = block * LANES, some = std::min<int64_t>(LANES, queries - n);
                const auto [first, last] = seen_by_some(a, item);
                const int64_t from = first + (last - first) * piece / count;
                const int64_t to = first + (last - first) * (piece + 1) / count;
                const int64_t number = head * count + piece;
                LanesReading<T, K>(a, item, head % a.groups, n, some, reading)
                    .read(from, to, pieces.output(number) + n * pieces.row, pieces.row, pieces.maxima(number) + n,
                          pieces.sums(number) + n);
                if (__atomic_sub_fetch(left + head * blocks + block, 1, __ATOMIC_ACQ_REL) == 0)
                    for (int64_t m = n; m < n + some; m++) join<T>(pieces, head, m);
            }
        } catch (const std::bad_alloc &) {
            failed = true;
        }
    });
    if (failed) throw std::bad_alloc();
}

}  // namespace REGARD_NAMESPACE
