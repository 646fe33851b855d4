// Who sees whom. Causality, windows and padding give each query one range of keys [low, high); documents and dense masks
// come on top. `Plan` walks the keys of a block of queries: what no query sees is skipped, what all see needs no mask.
#pragma once
#include <algorithm>

#include "args.h"
#include "micro.h"

namespace REGARD_NAMESPACE {

constexpr int64_t KEYS = 64;  // of a key block
constexpr int64_t CHUNK = 512;  // of keys that several blocks of queries share while they are in the L2 cache
constexpr int64_t EDGE = 16;  // of a key block where ranges begin or end: there whole columns of lanes drop out

struct Block {
    int64_t item, head, group, row;  // row: the first query
    int rows, lanes;                 // lanes: rows, rounded up to columns
};

struct Span {
    int64_t first, last;  // keys
    int lane, lanes_end;  // the lanes that may see some of them
    bool masked;          // whether some pairs are hidden
};

inline bool any_mask(const regard_args &a) {
    return a.causal || a.before >= 0 || a.after >= 0 || a.key_start || a.key_end || a.q_docs || a.mask;
}

class Plan {
    const regard_args &a;
    const Block &block;
    alignas(64) int32_t low[LANES], high[LANES], docs[LANES];
    int32_t low_least[LANES / COLUMN], low_most[LANES / COLUMN], high_least[LANES / COLUMN], high_most[LANES / COLUMN];
    int64_t all_low = 0, all_high = 0, begin = 0, end = 0;  // seen by all, seen by some
    uint8_t *pairs;                                         // (KEYS, LANES): the dense mask's part
    bool dense = false;

  public:
    Plan(const regard_args &a, const Block &block, uint8_t *pairs) : a(a), block(block), pairs(pairs) {
        const int64_t start = a.key_start ? std::max<int64_t>(a.key_start[block.item], 0) : 0;
        const int64_t stop = a.key_end ? std::min(a.key_end[block.item], a.keys) : a.keys;
        for (int i = 0; i < block.lanes; i++) {
            const int64_t row = block.row + std::min(i, block.rows - 1);
            const int64_t position = a.q_start + row;
            int64_t from = start, to = stop;
            if (a.before >= 0) from = std::max(from, position - a.before);
            if (a.after >= 0) to = std::min(to, position + a.after + 1);
            if (a.causal) to = std::min(to, position + 1);
            low[i] = (int32_t)std::min(from, a.keys);
            high[i] = (int32_t)std::max<int64_t>(to, 0);
            if (a.q_docs) docs[i] = a.q_docs[block.item * a.q_docs_stride + row];
        }
        all_high = begin = a.keys;
        for (int c = 0; c < block.lanes / COLUMN; c++) {
            const int32_t *l = low + c * COLUMN, *h = high + c * COLUMN;
            low_least[c] = *std::min_element(l, l + COLUMN);
            low_most[c] = *std::max_element(l, l + COLUMN);
            high_least[c] = *std::min_element(h, h + COLUMN);
            high_most[c] = *std::max_element(h, h + COLUMN);
            all_low = std::max<int64_t>(all_low, low_most[c]);
            all_high = std::min<int64_t>(all_high, high_least[c]);
            begin = std::min<int64_t>(begin, low_least[c]);
            end = std::max<int64_t>(end, high_most[c]);
        }
    }

    int64_t first() const { return begin; }
    int64_t last() const { return end; }

    // f(span) for each run of keys in [from, to) that some lane may see, ascending; none crosses a chunk's end. `hide` belongs to the span of the moment.
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

    // -inf for each hidden pair of the span.
    void hide(const Span &span, float *s) const {
        const F nothing = broadcast(-__builtin_inff());
        for (int lane = span.lane; lane < span.lanes_end; lane += W) {
            const I from = load(low + lane), to = load(high + lane);
            const I doc = a.q_docs ? load(docs + lane) : I{};
            const int32_t *key_docs = a.q_docs ? a.k_docs + block.item * a.k_docs_stride : nullptr;
            for (int64_t j = span.first; j < span.last; j++) {
                const int64_t at = j - span.first;
                const I key = broadcast((int32_t)j);
                I visible = (from <= key) & (to > key);
                if (key_docs) visible &= doc == broadcast(key_docs[j]);
                if (dense) {
                    I bytes;
                    for (int i = 0; i < W; i++) bytes[i] = pairs[at * LANES + lane + i];
                    visible &= bytes != 0;
                }
                float *p = s + at * LANES + lane;
                store(p, choose(visible, load(p), nothing));
            }
        }
    }

  private:
    // Whether the documents let anything through: by the extremes of their numbers, which settles packed documents.
    bool documents(Span &span) const {
        if (!a.q_docs) return true;
        const int32_t *keys = a.k_docs + block.item * a.k_docs_stride;
        const auto [k0, k1] = std::minmax_element(keys + span.first, keys + span.last);
        const auto [q0, q1] = std::minmax_element(docs + span.lane, docs + span.lanes_end);
        if (*k1 < *q0 || *q1 < *k0) return false;
        span.masked |= *k0 != *k1 || *q0 != *q1;
        return true;
    }

    // The dense mask's part, transposed; false where it hides everything.
    bool pairwise(Span &span) {
        dense = false;
        if (!a.mask) return true;
        const int64_t *stride = a.mask_stride;
        const uint8_t *from = a.mask + block.item * stride[0] + block.head * stride[1] + block.row * stride[2];
        uint8_t some = 0, every = 1;
        for (int i = span.lane; i < span.lanes_end; i++) {
            const uint8_t *row = from + std::min(i, block.rows - 1) * stride[2] + span.first * stride[3];
            for (int64_t j = 0; j < span.last - span.first; j++) {
                const uint8_t seen = row[j * stride[3]] != 0;
                pairs[j * LANES + i] = seen;
                some |= seen;
                every &= seen;
            }
        }
        if (!some) return false;
        dense = !every;
        span.masked |= dense;
        return true;
    }
};

}  // namespace
