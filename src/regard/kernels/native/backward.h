// The backward pass: a block of queries against all keys visible to it, as in the forward pass, from `out` and `lse`:
//
//     S^T  = K Q^T        (keys x lanes)     P^T  = exp(S^T - lse)
//     dP^T = V dO^T       (keys x lanes)     dS^T = P^T (dP^T - delta),  delta = rowsum(dO O) - d_lse
//     dV  += P^T dO       (keys x E)
//     dK  += dS^T Q       (keys x D)
//     dQ^T += K^T dS^T    (D x lanes)
//
// Five products, none with a horizontal reduction: P^T and dS^T have queries along the lanes, which gives vectors for
// dQ^T and broadcasts for dV and dK. So Q and dO of a block are needed both as lanes and as rows; K and V are read in
// place, or copied once for a unit. The scale is applied at the end: once to dQ and dK, and not to each dS.
//
// A *unit* of work is a kv head, or some of the queries that attend to it; it has its own sums of dK and dV.
//
//     q, d_out, out         (D or E, LANES)            the queries of the block, along the lanes
//     q_rows, d_out_rows    (LANES, D'), (LANES, E')   the same as rows; ' means rounded up to whole vectors
//     p, ds, slope, bias    (KEYS, LANES)              of one span
//     dq                    (D, LANES)
//     k, v                  (M, D), (M, E)             keys and values of the unit, contiguous
//     k_columns             (M, D)                     the keys as dQ needs them
//     dk, dv                (M, D'), (M, E')           sums of the unit
//
// Operands of the products are of type T: float, or pairs of bfloat16. Pairs are neighbours in the sum of their
// product: of the width in q, d_out, out, k and v; of queries in q_rows, d_out_rows, and in p and ds rounded as rows;
// of keys in k_columns, and in ds rounded for dQ. Softmax and sums are float32 in any case.
#pragma once
#include <optional>

#include "bias_gradient.h"
#include "forward.h"

namespace REGARD_NAMESPACE {

inline int64_t whole_vectors(int64_t width) { return (width + W - 1) / W * W; }
constexpr int64_t BACKWARD_TEAM = 4;  // blocks of queries that are computed together, chunk of keys by chunk

// The state of a block of queries.
template <class T>
struct Queries {
    Block block, upcoming;  // upcoming: the one after it; rows == 0 if there is none
    std::optional<Plan> plan;
    T *q, *d_out, *q_copy, *d_out_copy;
    const T *q_rows, *d_out_rows;
    float *dq;
    alignas(64) float lse[LANES], delta[LANES];
    alignas(64) int32_t drop_row[LANES];
    bool odd;  // the output or log-sum-exp of some row is NaN or inf
};

// Buffers of one thread: the state of a team of blocks, and scratch for one span of one block.
template <class T>
struct Bench {
    Scratch scratch;
    Queries<T> team[BACKWARD_TEAM];
    float *p, *ds, *slope, *bias, *dk, *dv, *rows;
    T *out, *clean_k, *clean_v, *k, *v, *k_columns;
    Pair *p_rounded, *ds_rounded, *ds_by_keys;
    alignas(64) float ones[LANES], scale[LANES];

    // `copies`: whether keys and values are copied; `sums`: whether dk and dv are allocated here.
    void lay(const regard_args &a, int64_t team_size, bool copies_k, bool copies_v, bool sums) {
        constexpr bool in_pairs = std::is_same_v<T, Pair>;
        const int64_t padded_k = whole_vectors(a.width), padded_v = whole_vectors(a.value_width), block = KEYS * LANES;
        const int64_t width = operands<T>(a.width), value_width = operands<T>(a.value_width);
        size_t numbers = 0;
        // Runs twice: first to count the bytes, then to assign the pointers. (All numbers have four bytes.)
        const auto cut = [&](bool really) {
            const auto take = [&](auto *&to, int64_t count) {
                static_assert(sizeof *to == 4);
                if (really) to = scratch.take<std::remove_reference_t<decltype(*to)>>((size_t)count);
                else numbers += (size_t)(count + 15) / 16 * 16;
            };
            for (int64_t m = 0; m < team_size; m++) {
                take(team[m].q, width * LANES);
                take(team[m].d_out, value_width * LANES);
                take(team[m].dq, a.width * LANES);
                take(team[m].q_copy, operands<T>(LANES) * padded_k);
                take(team[m].d_out_copy, operands<T>(LANES) * padded_v);
            }
            for (float **x : {&p, &ds, &slope, &bias}) take(*x, block);
            for (Pair **x : {&p_rounded, &ds_rounded, &ds_by_keys}) take(*x, in_pairs ? block / 2 : 0);
            take(rows, in_pairs ? LANES * std::max(width, value_width) : 0);
            take(out, value_width * LANES);
            take(clean_k, KEYS * a.width);
            take(clean_v, KEYS * value_width);
            take(k, copies_k ? a.keys * width : 0);
            take(v, copies_v ? a.keys * value_width : 0);
            take(k_columns, in_pairs ? operands<T>(a.keys) * a.width : 0);
            take(dk, sums ? a.keys * padded_k : 0);
            take(dv, sums ? a.keys * padded_v : 0);
        };
        cut(false);
        scratch.reserve(numbers * 4);
        cut(true);
        for (int i = 0; i < LANES; i++) {
            ones[i] = 1.0f;
            scale[i] = a.scale;
        }
    }
};

// Whether keys or values are read as T where they lie, one row after another.
template <class T>
bool in_place(const regard_args &a, const void *x, const int64_t (&stride)[3], int64_t width) {
    if (stride[2] != width) return false;
    return std::is_same_v<T, Pair> ? lies_in_pairs(x, stride, width) : a.dtype == REGARD_FLOAT32;
}

// Keys or values of a kv head as T, contiguous: where they lie, or in `to`.
template <class T>
const T *contiguous_rows(const regard_args &a, const void *x, const int64_t (&stride)[3], int64_t width, int64_t item,
                         int64_t group, T *to) {
    const int64_t at = item * stride[0] + group * stride[1];
    const auto copied = [&](const auto *from, auto copy) {
        if (in_place<T>(a, x, stride, width)) return (const T *)from;
        for (int64_t j = 0; j < a.keys; j++) copy(from + j * stride[2], to + j * operands<T>(width));
        return (const T *)to;
    };
    if constexpr (std::is_same_v<T, Pair>) {
        return copied((const BFloat16 *)x + at, [&](const BFloat16 *row, Pair *to) { copy_row(row, width, to); });
    } else {
        const T *rows = nullptr;
        with_dtype(a.dtype, [&](auto number) {
            using N = decltype(number);
            rows = copied((const N *)x + at, [&](const N *row, float *to) { copy_row(row, width, to); });
        });
        return rows;
    }
}

// The keys as pairs of keys, for dQ: (M / 2, D).
inline const float *as_columns(const regard_args &, int64_t, int64_t, const float *k, float *) { return k; }
inline const Pair *as_columns(const regard_args &a, int64_t item, int64_t group, const Pair *, Pair *to) {
    const BFloat16 *k = (const BFloat16 *)a.k + item * a.k_stride[0] + group * a.k_stride[1];
    for (int64_t j = 0; j < a.keys; j += 2) {
        const BFloat16 *row = k + j * a.k_stride[2];
        pair_rows(row, j + 1 < a.keys ? row + a.k_stride[2] : nullptr, a.width, to + j / 2 * a.width, 0);
    }
    return to;
}

// The queries of a block as rows with a stride of `padded` numbers, 0 from `width` on; with pairs, pairs of queries.
// In place if they have that form, else copied.
template <class T>
const T *padded_rows(const regard_args &a, const void *x, const int64_t (&stride)[3], const Block &block, int64_t width,
                     int64_t padded, T *to) {
    const int64_t at = block.item * stride[0] + block.head * stride[1] + block.row * stride[2];
    const T *result = to;
    const auto copy = [&](const auto *from) {
        using N = std::remove_cv_t<std::remove_reference_t<decltype(*from)>>;
        if constexpr (std::is_same_v<N, T>) {
            if (stride[2] == padded && width == padded) {
                result = from;
                return;
            }
        }
        for (int i = 0; i < block.rows; i += TOGETHER<T>) {
            T *row = to + i / TOGETHER<T> * padded;
            const N *first = from + i * stride[2];
            if constexpr (!std::is_same_v<T, Pair>) copy_row(first, width, row);
            else if constexpr (std::is_same_v<N, BFloat16>)
                pair_rows(first, i + 1 < block.rows ? first + stride[2] : nullptr, width, row, 0);
            std::memset(row + width, 0, (size_t)(padded - width) * sizeof *row);
        }
    };
    with_dtype(a.dtype, [&](auto number) { copy((const decltype(number) *)x + at); });
    return result;
}

// Whether no bit pattern is that of NaN or inf.
inline bool finite(const float *x, int64_t count) {
    int32_t odd = 0;
    for (int64_t i = 0; i < count; i++) {
        int32_t bits;
        std::memcpy(&bits, x + i, sizeof bits);
        odd |= (bits & 0x7f800000) == 0x7f800000;
    }
    return !odd;
}
inline bool finite(const Pair *x, int64_t count) {
    int32_t odd = 0;
    for (int64_t i = 0; i < count; i++) odd |= (x[i] & 0x7f80) == 0x7f80 || (x[i] & 0x7f800000) == 0x7f800000;
    return !odd;
}

// The same rows with 0 in place of NaN and inf.
inline const float *cleaned(const float *from, int64_t rows, int64_t width, float *to) {
    for (int64_t x = 0; x < rows * width; x++) to[x] = std::isfinite(from[x]) ? from[x] : 0.0f;
    return to;
}
inline const Pair *cleaned(const Pair *from, int64_t rows, int64_t width, Pair *to) {
    for (int64_t x = 0; x < rows * width; x++) {
        const bool low = (from[x] & 0x7f80) == 0x7f80, high = (from[x] & 0x7f800000) == 0x7f800000;
        to[x] = from[x] & ((low ? 0 : 0xffff) | (high ? 0 : (Pair)0xffff0000));
    }
    return to;
}

// delta[lane] = sum_e d_out[e][lane] out[e][lane], in the same order of summation as `scores`: for a query with a
// single visible key, delta and dP are then equal to the bit, and their difference is exactly 0.
template <class T>
void row_sums(const T *d_out, const T *out, int64_t width, int lanes, float *delta) {
    const int64_t pieces = (width + PIECE - 1) / PIECE;
    for (int lane = 0; lane < lanes; lane += W) {
        F total = {};
        for (int64_t i = 0, e = 0; i < pieces; i++) {
            F sum = {};
            for (; e < width * (i + 1) / pieces; e++)
                sum = add_product(sum, load(out + e * LANES + lane), load(d_out + e * LANES + lane));
            total = sum + total;
        }
        store(delta + lane, total);
    }
}

// Loads the queries of a block and their gradients as lanes and as rows, with lse and delta of each row. Returns their
// contribution to the gradient of the head's sink, which is a key whose dP is 0.
template <class T>
double open(const regard_args &a, const regard_gradients &g, const Block &block, Queries<T> &to, Bench<T> &bench) {
    to.block = block;
    to.plan.emplace(a, to.block, TOGETHER<T>);
    to.q_rows = padded_rows(a, a.q, a.q_stride, block, a.width, whole_vectors(a.width), to.q_copy);
    to.d_out_rows =
        padded_rows(a, g.d_out, g.d_out_stride, block, a.value_width, whole_vectors(a.value_width), to.d_out_copy);
    to_lanes(a, a.q, a.q_stride, a.width, block, bench.rows, to.q);
    to_lanes(a, g.d_out, g.d_out_stride, a.value_width, block, bench.rows, to.d_out);
    to_lanes(a, a.out, a.out_stride, a.value_width, block, bench.rows, bench.out);
    row_sums(to.d_out, bench.out, operands<T>(a.value_width), block.lanes, to.delta);
    std::memset(to.dq, 0, sizeof(float) * LANES * a.width);

    const auto rows_at = [&](const float *x, const int64_t *stride) {
        return x + block.item * stride[0] + block.head * stride[1] + block.row * stride[2];
    };
    const float *lse = rows_at(a.lse, a.lse_stride), *d_lse = g.d_lse ? rows_at(g.d_lse, g.d_lse_stride) : nullptr;
    const float sink = a.sinks ? a.sinks[block.item * a.sinks_stride[0] + block.head * a.sinks_stride[1]] : 0.0f;
    double d_sink = 0.0;
    to.odd = false;
    for (int i = 0; i < block.lanes; i++) {
        to.lse[i] = i < block.rows ? lse[i * a.lse_stride[2]] : -__builtin_inff();
        if (to.lse[i] == -__builtin_inff()) {  // no such row, or a fully masked one: all weights are 0
            to.lse[i] = __builtin_inff();
            to.delta[i] = 0.0f;
            continue;
        }
        to.odd |= !std::isfinite(to.lse[i]) || !std::isfinite(to.delta[i]);
        if (d_lse) to.delta[i] -= d_lse[i * g.d_lse_stride[2]];
        if (a.sinks) d_sink -= (double)std::exp(sink - to.lse[i]) * to.delta[i];
    }
    if (a.drop_rows) {
        const int64_t *stride = a.drop_rows_stride;
        const int32_t *from = a.drop_rows + block.item * stride[0] + block.head * stride[1];
        for (int i = 0; i < block.lanes; i++)
            to.drop_row[i] = from[(block.row + std::min(i, block.rows - 1)) * stride[2]];
    }
    return d_sink;
}

// p: scores become weights, after dropout. ds: dP becomes dS. Scores times scale are rounded as for lse, so that a
// single dominant key has a weight of exactly 1, however large the scores.
template <bool Drop, int NV, class T>
void weigh_strip(const regard_args &a, const int32_t *col, int64_t keys, float scale, int lane, const Queries<T> &of,
                 float *weights, float *gradients) {
    F lse[NV], delta[NV];
    I row[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) {
        lse[v] = load(of.lse + lane + v * W);
        delta[v] = load(of.delta + lane + v * W);
        row[v] = Drop ? load(of.drop_row + lane + v * W) : I{};
    }
    for (int64_t j = 0; j < keys; j++) {
        const I c = Drop ? broadcast(col[j * a.drop_cols_stride[1]]) : I{};
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) {
            float *p = weights + j * LANES + lane + v * W, *ds = gradients + j * LANES + lane + v * W;
            const F weight = exp2((rounded(load(p) * scale) - lse[v]) * LOG2_E);
            F d = load(ds), kept = weight;
            if (Drop) {
                const I here = stays<I, U>(row[v], c, a.drop_threshold);
                d = choose(here, d * a.drop_kept, F{});
                kept = choose(here, weight, F{});
            }
            store(p, kept);
            store(ds, weight * (d - delta[v]));
        }
    }
}

template <class T>
void weigh(const regard_args &a, const Queries<T> &of, const Span &span, float scale, float *p, float *ds) {
    const int64_t keys = span.last - span.first;
    const int32_t *col = a.drop_rows
                             ? a.drop_cols + of.block.item * a.drop_cols_stride[0] + span.first * a.drop_cols_stride[1]
                             : nullptr;
    over_lanes(span.lane, span.lanes_end, [&](int lane, auto nv) {
        if (a.drop_rows) weigh_strip<true, nv.value>(a, col, keys, scale, lane, of, p, ds);
        else weigh_strip<false, nv.value>(a, col, keys, scale, lane, of, p, ds);
    });
}

// ds *= slope. (The slope of a hidden pair may be NaN; its gradient is 0.)
inline void follow_softcap(const Span &span, const float *slope, float *ds) {
    for (int64_t j = 0; j < span.last - span.first; j++) {
        for (int lane = span.lane; lane < span.lanes_end; lane += W) {
            const F x = load(ds + j * LANES + lane);
            store(ds + j * LANES + lane, choose(x == 0.0f, F{}, x * load(slope + j * LANES + lane)));
        }
    }
}

template <class T>
struct Unit {
    int64_t number;
    const T *k, *v;      // contiguous
    const T *k_columns;  // for dQ
    float *dk, *dv;
    bool careful;  // keys or values have NaN or inf: hidden pairs must not contribute 0 * NaN
};

// p or ds of a span as rows, the operand of dV and dK: with pairs, neighbouring lanes are rounded to them. (Lanes from
// `rows` on are not read, but for the second half of the last pair, which becomes 0.)
template <class T>
const T *as_rows(const float *x, const Span &span, int rows, Pair *to) {
    if constexpr (!std::is_same_v<T, Pair>) return x;
    else {
        for (int64_t j = 0; j < span.last - span.first; j++) {
            for (int lane = span.lane; lane < span.lanes_end; lane += W)
                store_neighbours(to + (j * LANES + lane) / 2, load(x + j * LANES + lane));
            if (rows % 2 && rows < span.lanes_end) to[(j * LANES + rows) / 2] &= 0xffff;
        }
        return to;
    }
}

// ds of a span as the operand of dQ: with pairs, neighbouring keys are rounded to them.
template <class T>
const T *by_keys(const float *ds, const Span &span, Pair *to) {
    if constexpr (!std::is_same_v<T, Pair>) return ds;
    else {
        pair_keys<T>(ds, span, to);
        return to;
    }
}

// A block of queries against the keys [from, to): adds to dK and dV of the unit, and to dQ of the block.
template <class T>
void advance(const regard_args &a, const regard_gradients &g, const Unit<T> &unit, Queries<T> &of, BiasGradient &bias,
             Bench<T> &bench, int64_t from, int64_t to) {
    constexpr int SOME = TOGETHER<T>;
    const Block &block = of.block;
    const int64_t width = operands<T>(a.width), value_width = operands<T>(a.value_width);
    const int64_t padded_k = whole_vectors(a.width), padded_v = whole_vectors(a.value_width);
    // A positive scale is applied in the exponent; others are not, because they would change the -inf of hidden pairs.
    const bool transformed = transforms(a);
    Plan &plan = *of.plan;
    plan.each(from, to, [&](const Span &span) {
        const int64_t keys = span.last - span.first;
        const int first = span.lane, last = span.lanes_end;
        const int64_t queries = operands<T>(std::min(last, block.rows) - first);
        const T *k = unit.k + span.first * width, *v = unit.v + span.first * value_width;
        const T *k_columns = unit.k_columns + span.first / SOME * a.width;
        float *p = bench.p, *ds = bench.ds;
        // To be fetched meanwhile: the next rows of K, V, dK and dV; after the last ones the rows of the next queries.
        const bool ends = span.last == plan.last();
        const auto next = [&](const auto *x, int64_t width) {
            return Ahead(x + span.last * width, std::min(KEYS, plan.last() - span.last), width, width);
        };
        scores<false, false>(k, width, keys, of.q, width, first, last, p, nullptr, nullptr, 0,
                             ends ? rows_ahead(a, a.q, a.q_stride, of.upcoming, a.width) : next(unit.k, width));
        if (transformed) {
            if (a.bias) {
                const int64_t *stride = a.bias_stride;
                const float *plane = a.bias + block.item * stride[0] + block.head * stride[1];
                block_to_lanes(plane + block.row * stride[2] + span.first * stride[3], stride[2], stride[3], block.rows,
                               block.lanes, keys, bench.bias);
            }
            transform(p, keys, first, last, a.scale, a.softcap, a.bias ? bench.bias : nullptr, bench.slope);
        }
        if (span.masked) plan.hide(span, p);
        if (unit.careful) {
            k_columns = cleaned(k_columns, operands<T>(keys), a.width, bench.clean_k);
            v = cleaned(v, keys, value_width, bench.clean_v);
        }
        scores<false, false>(v, value_width, keys, of.d_out, value_width, first, last, ds, nullptr, nullptr, 0,
                             ends ? rows_ahead(a, g.d_out, g.d_out_stride, of.upcoming, a.value_width)
                                  : next(unit.v, value_width));
        weigh(a, of, span, transformed ? 1.0f : a.scale, p, ds);
        if (span.masked && of.odd) {  // avoids 0 * NaN
            plan.hide(span, p, 0.0f);
            plan.hide(span, ds, 0.0f);
        }
        if (g.d_v)
            weigh_rows(as_rows<T>(p, span, block.rows, bench.p_rounded) + first / SOME, keys, queries,
                       of.d_out_rows + first / SOME * padded_v, padded_v, unit.dv + span.first * padded_v,
                       ends ? rows_ahead(a, a.out, a.out_stride, of.upcoming, a.value_width) : next(unit.dv, padded_v));
        if (bias.wanted) bias.add(block, unit.number, span, ds);
        if (a.softcap != 0.0f) follow_softcap(span, bench.slope, ds);
        if (g.d_k)
            weigh_rows(as_rows<T>(ds, span, block.rows, bench.ds_rounded) + first / SOME, keys, queries,
                       of.q_rows + first / SOME * padded_k, padded_k, unit.dk + span.first * padded_k,
                       ends ? rows_ahead(a, g.d_q, g.d_q_stride, block, a.width) : next(unit.dk, padded_k));
        if (g.d_q)
            values(k_columns, a.width, by_keys<T>(ds, span, bench.ds_by_keys), operands<T>(keys), a.width, first, last,
                   bench.ones, of.dq);
    });
}

template <class T>
void close(const regard_args &a, const regard_gradients &g, const Queries<T> &of, const Bench<T> &bench) {
    if (!g.d_q) return;
    const Block &block = of.block;
    const int64_t at = block.item * g.d_q_stride[0] + block.head * g.d_q_stride[1] + block.row * g.d_q_stride[2];
    with_dtype(a.dtype, [&](auto number) {
        lanes_to_rows(of.dq, block.rows, a.width, bench.scale, (decltype(number) *)g.d_q + at, g.d_q_stride[2]);
    });
}

}  // namespace REGARD_NAMESPACE
