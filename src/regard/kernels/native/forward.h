// The forward pass: one block of queries against all keys visible to it.
#pragma once
#include <vector>

#include "layout.h"
#include "scratch.h"
#include "softmax.h"
#include "tiles.h"
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
    Pair *rounded;  // weights as pairs of keys, in parts that are PAIR_ROWS rows apart
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

    // T: the operands of the products.
    template <class T>
    void lay(const regard_args &a, bool looking, size_t more) {
        const size_t block = KEYS * LANES, strip = looking ? (size_t)(a.keys + TILE) * LANES : 0;
        const size_t width = (size_t)std::max(operands<T>(a.width), a.width);
        const size_t value_width = (size_t)whole_tiles(a.value_width);
        const size_t floats = (width + value_width) * LANES + 3 * block + 3 * PAIR_ROWS * LANES +
                              KEYS * (width + value_width) + strip + more;
        scratch.reserve(floats * 4 + 16 * 64);
        q = scratch.take<float>(width * LANES);
        o = scratch.take<float>(value_width * LANES);
        s = scratch.take<float>(block);
        kept = scratch.take<float>(block);
        bias = scratch.take<float>(block);
        rounded = scratch.take<Pair>(3 * PAIR_ROWS * LANES);
        keys = scratch.take<float>(KEYS * width);
        values = scratch.take<float>(KEYS * value_width);
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

// Whether rows can be read as pairs in place; else `copy_row` copies them. (Tiles read whole tiles of pairs.)
inline bool lies_in_pairs(const void *p, const int64_t (&stride)[3], int64_t width) {
    if (width % (TILES ? 2 * TILE : 2)) return false;
    return ((uintptr_t)p / 2 | (uintptr_t)(stride[0] | stride[1] | stride[2])) % 2 == 0;
}
// Interleaves two rows to pairs, in parts that are `apart` operands from each other; `second` may be null for 0.
template <class T, class N>
void pair_rows(const N *first, const N *second, int64_t width, T *to, int64_t apart) {
    if constexpr (std::is_same_v<N, BFloat16>) {  // one part: nothing is rounded
        for (int64_t x = 0; x < width; x++)
            ((Pair *)to)[x] = (Pair)(first[x].bits | (uint32_t)(second ? second[x].bits : 0) << 16);
    } else {
        int64_t x = 0;
        for (; x + W <= width; x += W) store_paired(to + x, apart, load(first + x), second ? load(second + x) : F{});
        if (x == width) return;
        T some[PARTS<T> * W];
        store_paired(some, W, load_some(first + x, width - x), second ? load_some(second + x, width - x) : F{});
        for (int part = 0; part < PARTS<T>; part++)
            std::memcpy(to + part * apart + x, some + part * W, (size_t)(width - x) * sizeof *to);
    }
}

// Rows of a block from memory to lanes of T. `width`: numbers of a row. `copy`: memory for the rows as operands.
template <class T>
void to_lanes(const regard_args &a, const void *x, const int64_t (&stride)[3], int64_t width, const Block &block,
              float *copy, T *to) {
    const int64_t at = block.item * stride[0] + block.head * stride[1] + block.row * stride[2];
    const int64_t apart = operands<T>(width);
    // Pairs are transposed like floats.
    const auto turn = [&](const auto *from, int64_t stride) {
        rows_to_lanes(from, stride, block.rows, block.lanes, apart, (float *)to);
    };
    const auto turn_copies = [&](const auto *from) {
        for (int i = 0; i < block.rows; i++) copy_row(from + i * stride[2], width, (T *)copy + i * apart);
        turn((const float *)copy, apart);
    };
    if constexpr (std::is_same_v<T, Pair>) {
        const BFloat16 *from = (const BFloat16 *)x + at;
        lies_in_pairs(x, stride, width) ? turn((const float *)from, stride[2] / 2) : turn_copies(from);
    } else {
        with_dtype(a.dtype, [&](auto number) {
            const auto *from = (const decltype(number) *)x + at;
            if constexpr (std::is_same_v<T, float>) turn(from, stride[2]);
            else turn_copies(from);
        });
    }
}

// Values as the products read them. Floats: rows. Pairs: rows of pairs of neighbouring keys. On tiles: columns in
// tiles, each contiguous, with the pairs of 32 keys in a row; padded with 0, for whole tiles are read.
//
//     rows       (M, E)                     stride: E
//     pairs      (M / 2, E)                 stride: E
//     on tiles   (M / 32, parts, E', 16)    stride: from one 32 keys to the next; E' is E rounded up to whole tiles
template <class T>
struct Columns {
    static constexpr bool turned = TILES && !std::is_same_v<T, float>;
    static constexpr int64_t together = turned ? 2 * TILE : TOGETHER<T>;  // keys that lie together
    int64_t width;                                                        // numbers of a row
    int64_t part;                                                         // pairs between the parts of a column
    int64_t stride;
    explicit Columns(int64_t width)
        : width(width), part(whole_tiles(width) * TILE), stride(turned ? PARTS<T> * part : width) {}

    int64_t size(int64_t keys) const { return (keys + together - 1) / together * stride; }
    // Those of key j and its neighbours.
    const T *at(const T *v, int64_t stride, int64_t j) const { return v + j / together * stride; }
    // One value of key j, counted from the first at v.
    float value(const T *v, int64_t stride, int64_t j, int64_t e) const {
        const T *row = at(v, stride, j);
        if constexpr (std::is_same_v<T, float>) return row[e];
        else {
            const Pair *pair = (const Pair *)row + (turned ? e * TILE + j % together / 2 : e);
            float sum = 0.0f;
            for (int i = PARTS<T> - 1; i >= 0; i--)
                sum += widened(BFloat16{(uint16_t)((uint32_t)pair[i * part] >> 16 * (j % 2))});
            return sum;
        }
    }
};

// Turns up to 32 rows to columns for tiles.
template <class T, class N>
void turn_rows(const N *rows, int64_t stride, int64_t keys, const Columns<T> &columns, T *to) {
    static_assert(!TILES || W == TILE);
    for (int64_t e = 0; e < whole_tiles(columns.width); e += TILE) {
        alignas(64) T block[PARTS<T>][W][W] = {};
        for (int64_t i = 0; i < W && 2 * i < keys; i++) {
            const N *row = rows + 2 * i * stride + e;
            pair_rows(row, 2 * i + 1 < keys ? row + stride : nullptr, std::min(TILE, columns.width - e), block[0][i],
                      W * W);
        }
        for (int part = 0; part < PARTS<T>; part++) {
            F x[W];
            for (int i = 0; i < W; i++) x[i] = load((const float *)block[part][i]);
            transpose(x);
            for (int i = 0; i < W; i++) store((float *)(to + part * columns.part + (e + i) * TILE), x[i]);
        }
    }
}

// Rounds neighbouring keys of a span to pairs: (parts, rows, LANES). Tiles read rows of 0 before and after them, for
// all keys that lie together with theirs. Returns the number of rows.
template <class T>
int64_t pair_keys(const float *x, const Span &span, Pair *to) {
    constexpr int64_t part = PAIR_ROWS * LANES;
    const int64_t keys = span.last - span.first, pairs = (keys + 1) / 2;
    const int64_t before = TILES ? span.first % (2 * TILE) / 2 : 0, rows = before + pairs;
    for (int64_t j = 0; j < keys; j += 2) {
        for (int lane = span.lane; lane < span.lanes_end; lane += W) {
            const float *at = x + j * LANES + lane;
            store_paired((T *)to + (before + j / 2) * LANES + lane, part, load(at),
                         j + 1 < keys ? load(at + LANES) : F{});
        }
    }
    if (!TILES) return rows;
    for (int i = 0; i < PARTS<T>; i++) {
        std::memset(to + i * part, 0, (size_t)(before * LANES) * sizeof *to);
        std::memset(to + i * part + rows * LANES, 0, (size_t)((whole_tiles(rows) - rows) * LANES) * sizeof *to);
    }
    return whole_tiles(rows);
}

// Rows for tiles, which read whole ones: where they lie, or with rows of 0 after them in `copy`.
template <class T>
const T *whole_rows(const T *rows, int64_t &stride, int64_t count, int64_t width, float *copy) {
    if (count % TILE == 0) return rows;
    for (int64_t j = 0; j < count; j++)
        std::memcpy((T *)copy + j * width, rows + j * stride, (size_t)width * sizeof(T));
    std::memset((T *)copy + count * width, 0, (size_t)((whole_tiles(count) - count) * width) * sizeof(T));
    stride = width;
    return (const T *)copy;
}

// s = k q for the keys of a span; with `Max` also the running maximum, with `Where` also its key. `copy`: memory for
// its rows of k.
template <bool Max, bool Where, class T>
void scores_of(const T *k, int64_t stride, const T *q, int64_t numbers, const Span &span, float *s, Rows &rows,
               float *copy, const Ahead &ahead) {
    const int64_t keys = span.last - span.first, width = operands<T>(numbers);
    const int32_t key = (int32_t)span.first;
    if constexpr (TILES && !std::is_same_v<T, float>) {
        k = whole_rows(k, stride, keys, width, copy);
        tile_scores<PARTS<T>>((const Pair *)k, stride, keys, (const Pair *)q, operands_of_part<T>(numbers), span.lane,
                              span.lanes_end, s, ahead);
        if (Max) maxima<Where>(s, keys, span.lane, span.lanes_end, rows, key);
    } else {
        k = side_by_side(k, stride, keys, width, copy);
        scores<Max, Where>(k, width, keys, q, width, span.lane, span.lanes_end, s, rows.top, rows.at, key, ahead);
    }
}

// o = o * shrink + v p for the keys of a span, where v is as `Columns` describes. `copy`: memory for its rows of v;
// `rounded`: for its weights as operands.
template <class T>
void values_of(const T *v, int64_t stride, const float *p, const Span &span, const Columns<T> &columns,
               const float *shrink, float *o, float *copy, Pair *rounded, const Ahead &ahead) {
    const int64_t keys = span.last - span.first, width = columns.width;
    const int first = span.lane, last = span.lanes_end;
    if constexpr (std::is_same_v<T, float>) {
        v = side_by_side(v, stride, keys, width, copy);
        values(v, width, p, keys, width, first, last, shrink, o, ahead);
    } else {
        const int64_t pairs = pair_keys<T>(p, span, rounded);
        if constexpr (TILES)
            tile_values<PARTS<T>>((const Pair *)v, stride, columns.part, rounded, pairs, width, first, last, shrink, o,
                                  ahead);
        else values(v, stride, rounded, pairs, width, first, last, shrink, o, ahead);
    }
}

// The same if v has NaN or inf: only visible pairs, since 0 * NaN of a hidden one must not count. (NaN of a visible one
// does, whatever its weight, as without a mask.)
template <class T>
void values_carefully(const T *v, int64_t stride, const float *p, const Plan &plan, const Span &span,
                      const Columns<T> &columns, Desk &desk) {
    const int64_t keys = span.last - span.first, width = columns.width;
    for (int64_t j = 0; j < keys; j++) {
        for (int64_t e = 0; e < width; e++) {
            const float x = columns.value(v, stride, span.first % columns.together + j, e);
            desk.values[j * width + e] = std::isfinite(x) ? x : 0.0f;
        }
    }
    values(desk.values, width, p, keys, width, span.lane, span.lanes_end, desk.rows.shrink, desk.o);
    for (int64_t j = 0; j < keys; j++) {
        for (int64_t e = 0; e < width; e++) {
            const float x = columns.value(v, stride, span.first % columns.together + j, e);
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
    to_lanes(a, a.q, a.q_stride, a.width, block, desk.keys, (T *)desk.q);
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
    const Columns<T> columns(a.value_width);
    const int64_t width = operands<T>(a.width);
    Rows &rows = desk.rows;
    const bool transformed = transforms(a);
    const float factor = desk.exponent = exponent_of(a);
    Plan plan(a, block, columns.together);
    plan.each(from, to, [&](const Span &span) {
        const int64_t keys = span.last - span.first;
        const int first = span.lane, last = span.lanes_end;
        const T *key = k + span.first * a.k_stride[2];
        // To be fetched meanwhile: the next keys and values; after the last ones the next queries and the output's
        // rows.
        const bool ends = span.last == plan.last();
        const int64_t next = std::min(KEYS, plan.last() - span.last);
        const Ahead k_ahead = !ends           ? Ahead(k + span.last * a.k_stride[2], next, width, a.k_stride[2])
                              : desk.upcoming ? rows_ahead(a, a.q, a.q_stride, *desk.upcoming, a.width)
                                              : Ahead();
        const Ahead v_ahead =
            !ends ? Ahead(columns.at(v, a.v_stride[2], span.last), (next + columns.together - 1) / columns.together,
                          columns.stride, a.v_stride[2])
                  : rows_ahead(a, a.out, a.out_stride, block, a.value_width);
        float *s = Look ? desk.strip + (span.first - plan.first()) * LANES : desk.s;
        if (!transformed && !span.masked) {
            scores_of<true, Look>(key, a.k_stride[2], q, a.width, span, s, rows, desk.keys, k_ahead);
        } else {
            scores_of<false, false>(key, a.k_stride[2], q, a.width, span, s, rows, desk.keys, k_ahead);
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
            maxima<Look>(s, keys, first, last, rows, (int32_t)span.first);
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
        const T *value = columns.at(v, a.v_stride[2], span.first);
        if (careful) values_carefully(value, a.v_stride[2], p, plan, span, columns, desk);
        else values_of(value, a.v_stride[2], p, span, columns, rows.shrink, desk.o, desk.values, desk.rounded, v_ahead);
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
