// Which keys are visible to which queries. Causality, windows and padding give each query one range of keys [low,
// high); documents and dense masks restrict it further. `Plan` goes through the keys of a block of queries: keys
// visible to no query are skipped, keys visible to all need no mask.
#pragma once
#include <algorithm>

#include "args.h"
#include "bits.h"
#include "micro.h"

namespace REGARD_NAMESPACE {

constexpr int64_t KEYS = 64;    // per block of keys
constexpr int64_t CHUNK = 512;  // keys that a team of blocks shares while they are in the L2 cache
constexpr int64_t EDGE = 16;  // keys per block where ranges begin or end, so that whole columns of lanes can be skipped

struct Block {
    int64_t item, head, group, row;  // row: the first query
    int rows, lanes;                 // lanes: rows rounded up to whole columns
};

struct Span {
    int64_t first, last;  // keys
    int lane, lanes_end;  // the lanes to which some of them are visible
    bool masked;          // whether some pairs are hidden
};

inline bool any_mask(const regard_args &a) {
    return a.causal || a.before >= 0 || a.after >= 0 || a.key_start || a.key_end || a.q_docs || a.mask;
}

// The keys [first, second) visible to a query by causality, window and padding.
inline std::pair<int64_t, int64_t> range_of(const regard_args &a, int64_t item, int64_t row) {
    const int64_t position = a.q_start + row;
    int64_t from = a.key_start ? std::max<int64_t>(a.key_start[item], 0) : 0;
    int64_t to = a.key_end ? std::min(a.key_end[item], a.keys) : a.keys;
    if (a.before >= 0) from = std::max(from, position - a.before);
    if (a.after >= 0) to = std::min(to, position + a.after + 1);
    if (a.causal) to = std::min(to, position + 1);
    return {std::min(from, a.keys), std::max<int64_t>(to, 0)};
}

class Plan {
    static_assert(LANES == 64 && KEYS == 64, "a dense mask is a square of bits");
    const regard_args &a;
    const Block &block;
    alignas(64) int32_t low[LANES], high[LANES], docs[LANES];
    int32_t low_least[LANES / COLUMN], low_most[LANES / COLUMN], high_least[LANES / COLUMN], high_most[LANES / COLUMN];
    int64_t all_low = 0, all_high = 0, begin = 0, end = 0;  // keys visible to all queries; to some
    uint64_t pairs[KEYS] = {};                              // the dense mask: bit i of word j for lane i, key j
    bool dense = false;

  public:
    // Spans begin at multiples of `step`, or of EDGE if that is less.
    Plan(const regard_args &a, const Block &block, int64_t step = 1) : a(a), block(block) {
        const bool shared = !a.causal && a.before < 0 && a.after < 0;  // one range for all queries
        auto range = range_of(a, block.item, block.row);
        for (int i = 0; i < block.lanes; i++) {
            const int64_t row = block.row + std::min(i, block.rows - 1);
            if (!shared) range = range_of(a, block.item, row);
            low[i] = (int32_t)range.first;
            high[i] = (int32_t)range.second;
            if (a.q_docs) docs[i] = a.q_docs[block.item * a.q_docs_stride + row];
        }
        all_high = begin = a.keys;
        for (int c = 0; c < block.lanes / COLUMN; c++) {
            const int32_t *l = low + c * COLUMN, *h = high + c * COLUMN;
            low_least[c] = low_most[c] = l[0];
            high_least[c] = high_most[c] = h[0];
            for (int i = 1; i < COLUMN; i++) {  // (std::min_element is not vectorised)
                low_least[c] = std::min(low_least[c], l[i]);
                low_most[c] = std::max(low_most[c], l[i]);
                high_least[c] = std::min(high_least[c], h[i]);
                high_most[c] = std::max(high_most[c], h[i]);
            }
            all_low = std::max<int64_t>(all_low, low_most[c]);
            all_high = std::min<int64_t>(all_high, high_least[c]);
            begin = std::min<int64_t>(begin, low_least[c]);
            end = std::max<int64_t>(end, high_most[c]);
        }
        begin -= begin % step;
        all_low = (all_low + step - 1) / step * step;
        if (all_high < end) all_high -= all_high % step;
    }

    int64_t first() const { return begin; }
    int64_t last() const { return end; }

    // f(span) for each run of keys in [from, to) that is visible to some lane, ascending; no span crosses the end of a
    // chunk. `hide` applies to the current span.
    template <class Function>
    void each(int64_t from, int64_t to, Function f) {
        for (int64_t j = std::max(begin, from); j < std::min(end, to);) {
            const int64_t limit = std::min({end, to, (j / CHUNK + 1) * CHUNK});
            Span span{j, limit, 0, block.lanes, false};
            if (j >= all_low && j + EDGE <= all_high) {
                span.last = std::min({j + KEYS, all_high, limit});
            } else {
                span.last = std::min(j + EDGE, limit);
                int some = block.lanes, some_end = 0;
                for (int c = 0; c < block.lanes / COLUMN; c++) {
                    if (high_most[c] <= span.first || low_least[c] >= span.last) continue;
                    some = std::min(some, c * COLUMN);
                    some_end = (c + 1) * COLUMN;
                    span.masked |= low_most[c] > span.first || high_least[c] < span.last;
                }
                span.lane = some;
                span.lanes_end = some_end;
            }
            j = span.last;
            if (span.lane < span.lanes_end && documents(span) && pairwise(span)) f(span);
        }
    }

    // Whether a pair of the current span is visible.
    bool sees(const Span &span, int lane, int64_t key) const {
        if (!span.masked) return true;
        if (key < low[lane] || key >= high[lane]) return false;
        if (a.q_docs && docs[lane] != a.k_docs[block.item * a.k_docs_stride + key]) return false;
        return !dense || (pairs[key - span.first] >> lane & 1);
    }

    // Writes `value` for each hidden pair of the span: -inf for scores, 0 for weights.
    void hide(const Span &span, float *s, float value = -__builtin_inff()) const {
        const F nothing = broadcast(value);
        for (int lane = span.lane; lane < span.lanes_end; lane += W) {
            const I from = load(low + lane), to = load(high + lane);
            const I doc = a.q_docs ? load(docs + lane) : I{};
            const int32_t *key_docs = a.q_docs ? a.k_docs + block.item * a.k_docs_stride : nullptr;
            for (int64_t j = span.first; j < span.last; j++) {
                const int64_t at = j - span.first;
                const I key = broadcast((int32_t)j);
                I visible = (from <= key) & (to > key);
                if (key_docs) visible &= doc == broadcast(key_docs[j]);
                if (dense) visible &= spread(pairs[at] >> lane);
                float *p = s + at * LANES + lane;
                store(p, choose(visible, load(p), nothing));
            }
        }
    }

  private:
    // Whether documents leave any pair visible, by the smallest and largest ids, which is exact for packed documents.
    bool documents(Span &span) const {
        if (!a.q_docs) return true;
        const int32_t *keys = a.k_docs + block.item * a.k_docs_stride;
        const auto [k0, k1] = std::minmax_element(keys + span.first, keys + span.last);
        const auto [q0, q1] = std::minmax_element(docs + span.lane, docs + span.lanes_end);
        if (*k1 < *q0 || *q1 < *k0) return false;
        span.masked |= *k0 != *k1 || *q0 != *q1;
        return true;
    }

    // Reads the dense mask of a span; false if it hides everything.
    bool pairwise(Span &span) {
        dense = false;
        if (!a.mask) return true;
        const int64_t *stride = a.mask_stride, keys = span.last - span.first;
        const uint8_t *from =
            a.mask + block.item * stride[0] + block.head * stride[1] + block.row * stride[2] + span.first * stride[3];
        uint64_t every = ~0ull, some = 0;  // a bit for each key
        uint8_t bytes[64] = {};
        const int rows = std::min(span.lanes_end, block.rows);
        for (int i = span.lane; i < rows; i++) {
            if (i == span.lane || stride[2] != 0) {  // else the same for all queries, as for padding
                const uint8_t *row = from + i * stride[2];
                if (keys == KEYS && stride[3] == 1) std::memcpy(bytes, row, KEYS);
                else
                    for (int64_t j = 0; j < keys; j++) bytes[j] = row[j * stride[3]];
                pairs[i] = bits_of(bytes);
                every &= pairs[i];
                some |= pairs[i];
            } else {
                pairs[i] = pairs[span.lane];
            }
        }
        if (!some) return false;
        dense = (~every << (KEYS - keys)) != 0;
        span.masked |= dense;
        if (dense) transpose(pairs);  // to one word per key; bits of lanes outside of the span are not used
        return true;
    }
};

}  // namespace REGARD_NAMESPACE
