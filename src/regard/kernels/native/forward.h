// The forward pass: one block of queries against all keys visible to it.
#pragma once
#include <vector>

#include "layout.h"
#include "scratch.h"
#include "softmax.h"
#include "visibility.h"

namespace REGARD_NAMESPACE {

// A span whose weights are kept for the statistics.
struct Seen {
    Span span;
    const float *weights;  // (keys, LANES), relative to `sums.base`
    SpanSums sums;         // 0 in lanes that the span does not have

    Seen(const Span &span, const float *weights) : span(span), weights(weights) {
        if (span.lane > 0 || span.lanes_end < LANES) std::memset(&sums, 0, sizeof sums);
    }
};

// Buffers of one thread.
struct Desk {
    Scratch scratch;
    float *q, *o, *s, *kept, *bias, *keys, *values, *strip;
    Pair *rounded;  // weights as pairs of keys
    Rows rows;
    const Block *upcoming = nullptr;  // what this desk is likely to be used for after this block
    std::vector<Seen> seen;
    std::vector<float> near;       // sums of weights by offset, largest offset first
    std::vector<float> factors;    // (spans, LANES): from kept weights to those of the softmax
    std::vector<int32_t> span_of;  // the index of each key's span
    float exponent = LOG2_E;       // factor of scores in the exponent of 2
    alignas(64) int32_t drop_row[LANES];
    alignas(64) float factor[LANES];  // 1 / total; subnormal if a sink outweighs all keys by far
    alignas(64) float log[LANES];     // ln of total

    // Frees memory that only a long text needs: a strip of 1,000,000 keys is 256 MB.
    void keep(size_t bytes) {
        scratch.keep(bytes);
        if (seen.capacity() * sizeof(Seen) > bytes) std::vector<Seen>().swap(seen);
        if (near.capacity() * sizeof(float) > bytes) std::vector<float>().swap(near);
        if (factors.capacity() * sizeof(float) > bytes) std::vector<float>().swap(factors);
        if (span_of.capacity() * sizeof(int32_t) > bytes) std::vector<int32_t>().swap(span_of);
    }

    void lay(const regard_args &a, bool looking, size_t more) {
        const size_t block = KEYS * LANES, strip = looking ? (size_t)a.keys * LANES : 0;
        const size_t floats =
            (a.width + a.value_width) * LANES + 4 * block + KEYS * (a.width + a.value_width) + strip + more;
        scratch.reserve(floats * 4 + 16 * 64);
        q = scratch.take<float>(a.width * LANES);
        o = scratch.take<float>(a.value_width * LANES);
        s = scratch.take<float>(block);
        kept = scratch.take<float>(block);
        bias = scratch.take<float>(block);
        rounded = scratch.take<Pair>(block / 2);
        keys = scratch.take<float>(KEYS * a.width);
        values = scratch.take<float>(KEYS * a.value_width);
        this->strip = looking ? scratch.take<float>(strip) : nullptr;
    }
};

// Copies strided rows to contiguous ones, which is cheap once per block: rows with (B, N, H, D) strides fall into few
// cache sets, and into one page each.
template <class T>
const T *side_by_side(const T *from, int64_t stride, int64_t rows, int64_t width, float *to) {
    if (stride == width) return from;
    for (int64_t j = 0; j < rows; j++) std::memcpy(to + j * width, from + j * stride, width * sizeof(T));
    return (const T *)to;
}

// The number of T in a row of q or k.
template <class T>
int64_t width_of(const regard_args &a) {
    return std::is_same_v<T, Pair> ? (a.width + 1) / 2 : a.width;
}

// Whether rows can be read as pairs in place; else `to_pairs` copies them.
inline bool lies_in_pairs(const void *p, const int64_t (&stride)[3], int64_t width) {
    return ((uintptr_t)p / 2 | (uintptr_t)(stride[0] | stride[1] | stride[2] | width)) % 2 == 0;
}
inline void to_pairs(const BFloat16 *from, int64_t width, Pair *to) {
    std::memset(to + (width - 1) / 2, 0, sizeof *to);  // an odd width is padded with 0
    std::memcpy(to, from, (size_t)width * sizeof *from);
}
// Interleaves two rows to pairs; `second` may be null for 0.
inline void pair_rows(const BFloat16 *first, const BFloat16 *second, int64_t width, Pair *to) {
    for (int64_t x = 0; x < width; x++) to[x] = (Pair)(first[x].bits | (uint32_t)(second ? second[x].bits : 0) << 16);
}

// Rows of a block from memory to lanes of T. `width`: numbers of a row. `pairs`: memory for the rows as pairs.
template <class T>
void to_lanes(const regard_args &a, const void *x, const int64_t (&stride)[3], int64_t width, const Block &block,
              Pair *pairs, T *to) {
    const int64_t at = block.item * stride[0] + block.head * stride[1] + block.row * stride[2];
    if constexpr (std::is_same_v<T, Pair>) {
        // Pairs are transposed like floats.
        const BFloat16 *from = (const BFloat16 *)x + at;
        int64_t apart = stride[2] / 2;
        if (!lies_in_pairs(x, stride, width)) {
            apart = (width + 1) / 2;
            for (int i = 0; i < block.rows; i++) to_pairs(from + i * stride[2], width, pairs + i * apart);
            from = (const BFloat16 *)pairs;
        }
        rows_to_lanes((const float *)from, apart, block.rows, block.lanes, (width + 1) / 2, (float *)to);
    } else {
        with_dtype(a.dtype, [&](auto number) {
            rows_to_lanes((const decltype(number) *)x + at, stride[2], block.rows, block.lanes, width, to);
        });
    }
}

// The value of key j, counted from an even key; a pair has the values of two keys.
inline float value_at(const float *v, int64_t stride, int64_t j, int64_t e) { return v[j * stride + e]; }
inline float value_at(const Pair *v, int64_t stride, int64_t j, int64_t e) {
    return widened(BFloat16{(uint16_t)((uint32_t)v[j / 2 * stride + e] >> 16 * (j % 2))});
}

// Rounds neighbouring keys of a span to pairs.
inline void pair_keys(const float *x, const Span &span, Pair *to) {
    const int64_t keys = span.last - span.first;
    for (int64_t j = 0; j < keys; j += 2) {
        for (int lane = span.lane; lane < span.lanes_end; lane += W) {
            const float *at = x + j * LANES + lane;
            store(to + j / 2 * LANES + lane, paired(load(at), j + 1 < keys ? load(at + LANES) : F{}));
        }
    }
}

// o += p v
inline void values_of(const float *v, int64_t stride, const float *p, const Span &span, int64_t width, Desk &desk,
                      const Ahead &ahead) {
    const int64_t keys = span.last - span.first;
    values(side_by_side(v, stride, keys, width, desk.values), width, p, keys, width, span.lane, span.lanes_end,
           desk.rows.shrink, desk.o, ahead);
}
inline void values_of(const Pair *v, int64_t stride, const float *p, const Span &span, int64_t width, Desk &desk,
                      const Ahead &ahead) {
    pair_keys(p, span, desk.rounded);
    values(v, stride, desk.rounded, (span.last - span.first + 1) / 2, width, span.lane, span.lanes_end,
           desk.rows.shrink, desk.o, ahead);
}

// The same if v has NaN or inf: only visible pairs, since 0 * NaN of a hidden one must not count. (NaN of a visible one
// does, whatever its weight, as without a mask.)
template <class T>
void values_carefully(const T *v, int64_t stride, const float *p, const Plan &plan, const Span &span, int64_t width,
                      Desk &desk) {
    const int64_t keys = span.last - span.first;
    for (int64_t j = 0; j < keys; j++) {
        for (int64_t e = 0; e < width; e++) {
            const float x = value_at(v, stride, j, e);
            desk.values[j * width + e] = std::isfinite(x) ? x : 0.0f;
        }
    }
    values(desk.values, width, p, keys, width, span.lane, span.lanes_end, desk.rows.shrink, desk.o);
    for (int64_t j = 0; j < keys; j++) {
        for (int64_t e = 0; e < width; e++) {
            const float x = value_at(v, stride, j, e);
            if (std::isfinite(x)) continue;
            for (int i = span.lane; i < span.lanes_end; i++)
                if (plan.sees(span, i, span.first + j)) desk.o[e * LANES + i] += p[j * LANES + i] * x;
        }
    }
}

// Whether scores are more than q . k times a positive scale. The scale is part of the exponent's FMA; anything else is
// computed first, in base e.
inline bool transforms(const regard_args &a) { return a.softcap != 0.0f || a.bias || !(a.scale > 0.0f); }
// The factor of scores in the exponent of 2.
inline float exponent_of(const regard_args &a) {
    return transforms(a) ? LOG2_E : (float)(a.scale * 1.4426950408889634);
}

// The factor of scores in base e. It is not derived from that in base 2, because lse must agree with what the backward
// pass recomputes, however large the scores.
inline double natural_of(const regard_args &a) { return transforms(a) ? 1.0 : a.scale; }

// Loads the queries into the lanes, and resets the running softmax.
template <class T>
void start(const regard_args &a, const Block &block, Desk &desk) {
    to_lanes(a, a.q, a.q_stride, a.width, block, (Pair *)desk.keys, (T *)desk.q);
    if (a.out) {  // only lanes that are used: a short text has 16 of the 64
        for (int64_t e = 0; e < a.value_width; e++)
            for (int lane = 0; lane < block.lanes; lane += COLUMN)
                std::memset(desk.o + e * LANES + lane, 0, COLUMN * sizeof(float));
    }
    desk.rows.begin();
    desk.seen.clear();
    if (a.drop_rows) {
        const int64_t *stride = a.drop_rows_stride;
        const int32_t *from = a.drop_rows + block.item * stride[0] + block.head * stride[1];
        for (int i = 0; i < block.lanes; i++)
            desk.drop_row[i] = from[(block.row + std::min(i, block.rows - 1)) * stride[2]];
    }
}

// The rows of a block in a tensor, which may be null, to be fetched.
inline Ahead rows_ahead(const regard_args &a, const void *x, const int64_t (&stride)[3], const Block &block,
                        int64_t width) {
    if (!x) return Ahead();
    const int64_t at = block.item * stride[0] + block.head * stride[1] + block.row * stride[2];
    if (a.dtype == REGARD_FLOAT32) return Ahead((const float *)x + at, block.rows, width, stride[2]);
    return Ahead((const uint16_t *)x + at, block.rows, width, stride[2]);
}

// Processes the keys [from, to): scores, weights, weighted values; the state is in `desk.rows`. With `Look` the weights
// are kept in the strip. K and V are of type T, whatever the dtype of the call.
template <bool Look, class T>
void advance(const regard_args &a, const Block &block, Desk &desk, bool careful, int64_t from, int64_t to) {
    const T *k = (const T *)a.k + block.item * a.k_stride[0] + block.group * a.k_stride[1];
    const T *v = (const T *)a.v + block.item * a.v_stride[0] + block.group * a.v_stride[1], *q = (const T *)desk.q;
    constexpr int64_t SOME = TOGETHER<T>;  // keys in a row of v
    const int64_t width = width_of<T>(a);
    Rows &rows = desk.rows;
    const bool transformed = transforms(a);
    const float factor = desk.exponent = exponent_of(a);
    Plan plan(a, block, SOME);
    plan.each(from, to, [&](const Span &span) {
        const int64_t keys = span.last - span.first;
        const int first = span.lane, last = span.lanes_end;
        const T *key = side_by_side(k + span.first * a.k_stride[2], a.k_stride[2], keys, width, desk.keys);
        // To be fetched meanwhile: the next keys and values; after the last ones the next queries and the output's
        // rows.
        const bool ends = span.last == plan.last();
        const int64_t next = std::min(KEYS, plan.last() - span.last);
        const Ahead k_ahead = !ends           ? Ahead(k + span.last * a.k_stride[2], next, width, a.k_stride[2])
                              : desk.upcoming ? rows_ahead(a, a.q, a.q_stride, *desk.upcoming, a.width)
                                              : Ahead();
        const Ahead v_ahead =
            !ends ? Ahead(v + span.last / SOME * a.v_stride[2], (next + 1) / SOME, a.value_width, a.v_stride[2])
                  : rows_ahead(a, a.out, a.out_stride, block, a.value_width);
        float *s = Look ? desk.strip + (span.first - plan.first()) * LANES : desk.s;
        if (!transformed && !span.masked) {
            scores<true, Look>(key, width, keys, q, width, first, last, s, rows.top, rows.at, (int32_t)span.first,
                               k_ahead);
        } else {
            scores<false, false>(key, width, keys, q, width, first, last, s, rows.top, rows.at, 0, k_ahead);
            if (transformed) {
                if (a.bias) {
                    const int64_t *stride = a.bias_stride;
                    const float *from = a.bias + block.item * stride[0] + block.head * stride[1];
                    block_to_lanes(from + block.row * stride[2] + span.first * stride[3], stride[2], stride[3],
                                   block.rows, block.lanes, keys, desk.bias);
                }
                transform(s, keys, first, last, a.scale, a.softcap, a.bias ? desk.bias : nullptr);
            }
            if (span.masked) plan.hide(span, s);
            maxima(s, keys, first, last, rows, (int32_t)span.first);
        }
        if (Look) desk.seen.emplace_back(span, s);
        exponentials<Look>(s, keys, first, last, factor, rows, Look ? &desk.seen.back().sums : nullptr);
        if (!a.out) return;
        const float *p = s;
        if (a.drop_rows) {
            const int64_t *stride = a.drop_cols_stride;
            drop(s, keys, first, last, desk.drop_row, a.drop_cols + block.item * stride[0] + span.first * stride[1],
                 stride[1], a.drop_threshold, desk.kept);
            p = desk.kept;
        }
        const T *value = v + span.first / SOME * a.v_stride[2];
        careful ? values_carefully(value, a.v_stride[2], p, plan, span, a.value_width, desk)
                : values_of(value, a.v_stride[2], p, span, a.value_width, desk, v_ahead);
    });
}

struct RowEnd {
    float factor;  // of weights relative to the last base: 1 / total
    float log;     // -ln(factor)
    float lse;
};

// Adds the sink to the total, as one more key. `before`: the last base, in base e.
inline RowEnd end_of_row(const regard_args &a, int64_t item, int64_t head, double before, double total) {
    double base = before, shrink = 1.0;
    if (a.sinks) {
        const double sink = a.sinks[item * a.sinks_stride[0] + head * a.sinks_stride[1]];
        base = total == 0.0 ? sink : std::max(base, sink);
        shrink = total == 0.0 ? 0.0 : std::exp(before - base);
        total = total * shrink + (sink == -__builtin_inf() ? 0.0 : std::exp(sink - base));
    }
    if (total == 0.0) return {0.0f, -__builtin_inff(), -__builtin_inff()};
    const float log = std::log((float)total);
    return {(float)shrink / (float)total, log + (float)(base - before), (float)(base + log)};
}

inline void conclude(const regard_args &a, const Block &block, Desk &desk) {
    const AllowSubnormals allow;
    const Rows &rows = desk.rows;
    const double to_e = natural_of(a);
    float *lse = a.lse ? a.lse + block.item * a.lse_stride[0] + block.head * a.lse_stride[1] : nullptr;
    for (int i = 0; i < block.rows; i++) {
        const RowEnd end = end_of_row(a, block.item, block.head, rows.base[i] * to_e, rows.total[i]);
        desk.factor[i] = end.factor;
        desk.log[i] = end.log;
        if (lse) lse[(block.row + i) * a.lse_stride[2]] = end.lse;
    }
    for (int i = block.rows; i < LANES; i++) desk.factor[i] = 0.0f;
}

template <bool Look, class T>
void finish(const regard_args &a, const Block &block, Desk &desk) {
    conclude(a, block, desk);
    if (!a.out) return;
    alignas(64) float factor[LANES];
    const float kept = a.drop_rows ? a.drop_kept : 1.0f;
    for (int i = 0; i < LANES; i++) factor[i] = desk.factor[i] * kept;
    const auto write = [&] {
        const int64_t at = block.item * a.out_stride[0] + block.head * a.out_stride[1] + block.row * a.out_stride[2];
        bool finite = true;
        with_dtype(a.dtype, [&](auto number) {
            auto *out = (decltype(number) *)a.out + at;
            finite = lanes_to_rows(desk.o, block.rows, a.value_width, factor, out, a.out_stride[2]);
        });
        return finite;
    };
    if (!write() && any_mask(a)) {  // maybe from 0 * NaN of a hidden key: rare, so it may be slow
        start<T>(a, block, desk);
        advance<Look, T>(a, block, desk, true, 0, a.keys);
        write();
    }
}

}  // namespace REGARD_NAMESPACE
