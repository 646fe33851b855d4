// Statistics of selected weights in the strip that the forward pass keeps: sums over lists of keys and over weighted
// columns, the largest weights, and a region. Each is a small part of the weights, so it costs little beside a pass
// over all of them.
#pragma once
#include "forward.h"

namespace REGARD_NAMESPACE {

inline bool selects(const regard_args &a) { return a.columns || a.lists || a.link_weights || a.crop; }

// The place of a block's rows in a (B, H, N, count) tensor.
inline int64_t place_of(const regard_args &a, const Block &block, int64_t count) {
    return ((block.item * a.heads + block.head) * a.queries + block.row) * count;
}

// columns[i][c] = sum_j weight_ij factors[c][j]. Factors are mostly 0, if columns are classes of keys.
inline void sum_columns(const regard_args &a, const Block &block, const Desk &desk) {
    const int64_t *stride = a.column_stride;
    const float *factors = a.column_factors + block.item * stride[0] + block.head * stride[1];
    float *to = a.columns + place_of(a, block, a.column_count);
    for (int64_t c = 0; c < a.column_count; c++, factors += a.keys) {
        alignas(64) float sum[LANES] = {};
        for (size_t s = 0; s < desk.seen.size(); s++) {
            const Span &span = desk.seen[s].span;
            int picked[KEYS], count = 0;
            for (int64_t j = span.first; j < span.last; j++)
                if (factors[j] != 0.0f) picked[count++] = (int)(j - span.first);
            if (!count) continue;
            for (int lane = span.lane; lane < span.lanes_end; lane += W) {
                F x = {};
                for (int i = 0; i < count; i++)
                    x += load(desk.seen[s].weights + picked[i] * LANES + lane) * factors[span.first + picked[i]];
                store(sum + lane, load(sum + lane) + x * load(desk.factors.data() + s * LANES + lane));
            }
        }
        for (int i = 0; i < block.rows; i++) to[i * a.column_count + c] = sum[i];
    }
}

// Which span has a key: an index into `desk.seen`, or -1 if the key is visible to nobody.
inline void index_spans(Desk &desk) {
    const int64_t first = desk.seen.front().span.first, last = desk.seen.back().span.last;
    desk.span_of.assign((size_t)(last - first), -1);
    for (size_t s = 0; s < desk.seen.size(); s++)
        for (int64_t j = desk.seen[s].span.first; j < desk.seen[s].span.last; j++)
            desk.span_of[(size_t)(j - first)] = (int32_t)s;
}

// The sum of a lane's weights over some keys. Keys are `Everywhere` if all spans have all lanes, and none is left out.
// The weights of all spans lie in one strip, so that a weight is found without its span.
template <bool Everywhere>
float sum_list(const Desk &desk, const int32_t *keys, int64_t count, int lane) {
    const int64_t first = desk.seen.front().span.first, seen = (int64_t)desk.span_of.size();
    const float *strip = desk.seen.front().weights + lane, *factors = desk.factors.data() + lane;
    float sum = 0.0f;
    for (int64_t x = 0; x < count; x++) {
        const int64_t j = keys[x] - first;
        if (j < 0 || j >= seen) continue;
        const int32_t s = desk.span_of[(size_t)j];
        if (!Everywhere) {
            if (s < 0) continue;
            const Span &span = desk.seen[(size_t)s].span;
            if (lane < span.lane || lane >= span.lanes_end) continue;
        }
        sum += strip[j * LANES] * factors[s * LANES];
    }
    return sum;
}

inline void sum_lists(const regard_args &a, const Block &block, Desk &desk) {
    float *to = a.lists + place_of(a, block, a.list_count);
    if (desk.seen.empty()) {
        std::memset(to, 0, (size_t)(block.rows * a.list_count) * sizeof *to);
        return;
    }
    index_spans(desk);
    bool everywhere = true;
    int64_t last = desk.seen.front().span.first;
    for (const Seen &seen : desk.seen) {
        everywhere = everywhere && seen.span.first == last && seen.span.lane == 0 && seen.span.lanes_end >= block.rows;
        last = seen.span.last;
    }
    const auto sum = everywhere ? sum_list<true> : sum_list<false>;
    const int64_t lists = block.item * a.list_stride + block.row * a.list_count;
    for (int64_t x = 0; x < block.rows * a.list_count; x++) {
        const int64_t begin = a.list_begin[lists + x], end = a.list_end[lists + x];
        to[x] = begin < end ? sum(desk, a.list_keys + begin, end - begin, (int)(x / a.list_count)) : 0.0f;
    }
}

// The largest weights of each lane, descending, by insertion. Of equal weights the first key comes first.
inline void find_links(const regard_args &a, const Block &block, Desk &desk) {
    const int64_t count = a.link_count, at = place_of(a, block, count);
    float *weights = a.link_weights + at;
    int64_t *keys = a.link_keys + at;
    std::fill(weights, weights + block.rows * count, 0.0f);
    std::fill(keys, keys + block.rows * count, -1);
    alignas(64) float least[LANES] = {};  // what a weight must exceed
    for (size_t s = 0; s < desk.seen.size(); s++) {
        const Span &span = desk.seen[s].span;
        for (int64_t j = span.first; j < span.last; j++) {
            const float *p = desk.seen[s].weights + (j - span.first) * LANES;
            for (int lane = span.lane; lane < span.lanes_end; lane += W) {
                const F x = load(p + lane) * load(desk.factors.data() + s * LANES + lane);
                if (!any(x > load(least + lane))) continue;
                for (int i = lane; i < std::min(lane + W, block.rows); i++) {
                    const float weight = x[i - lane];
                    if (!(weight > least[i])) continue;
                    float *w = weights + i * count;
                    int64_t *k = keys + i * count, place = count - 1;
                    for (; place > 0 && w[place - 1] < weight; place--) {
                        w[place] = w[place - 1];
                        k[place] = k[place - 1];
                    }
                    w[place] = weight;
                    k[place] = j;
                    least[i] = w[count - 1];
                }
            }
        }
    }
}

inline void copy_region(const regard_args &a, const Block &block, const Desk &desk) {
    float *to = a.crop + (block.item * a.heads + block.head) * a.crop_rows * a.crop_cols;
    for (size_t s = 0; s < desk.seen.size(); s++) {
        const Span &span = desk.seen[s].span;
        const int64_t first = std::max(span.first, a.crop_col), last = std::min(span.last, a.crop_col + a.crop_cols);
        for (int i = span.lane; i < std::min(span.lanes_end, block.rows); i++) {
            const int64_t row = block.row + i - a.crop_row;
            if (row < 0 || row >= a.crop_rows) continue;
            for (int64_t j = first; j < last; j++)
                to[row * a.crop_cols + j - a.crop_col] =
                    desk.seen[s].weights[(j - span.first) * LANES + i] * desk.factors[s * LANES + i];
        }
    }
}

inline void select(const regard_args &a, const Block &block, Desk &desk) {
    if (a.columns) sum_columns(a, block, desk);
    if (a.lists) sum_lists(a, block, desk);
    if (a.link_weights) find_links(a, block, desk);
    if (a.crop) copy_region(a, block, desk);
}

}  // namespace REGARD_NAMESPACE
