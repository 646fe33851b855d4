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
// place. The scale is applied at the end: once to dQ and dK, and not to each dS.
//
// A *unit* of work is a kv head, or some of the queries that attend to it; it has its own sums of dK and dV.
//
//     q, d_out, out         (D or E, LANES)            the queries of the block, along the lanes
//     q_rows, d_out_rows    (LANES, D'), (LANES, E')   the same as rows; ' means rounded up to whole vectors
//     p, ds, slope, bias    (KEYS, LANES)              of one span
//     dq                    (D, LANES)
//     k, v                  (M, D), (M, E)             keys and values of the unit, contiguous
//     dk, dv                (M, D'), (M, E')           sums of the unit
#pragma once
#include <optional>

#include "bias_gradient.h"
#include "forward.h"

namespace REGARD_NAMESPACE {

inline int64_t whole_vectors(int64_t width) { return (width + W - 1) / W * W; }

constexpr int64_t BACKWARD_TEAM = 4;  // blocks of queries that are computed together, chunk of keys by chunk

// The state of a block of queries.
struct Queries {
    Block block, upcoming;  // upcoming: the one after it; rows == 0 if there is none
    std::optional<Plan> plan;
    float *q, *d_out, *dq, *q_copy, *d_out_copy;
    const float *q_rows, *d_out_rows;
    alignas(64) float lse[LANES], delta[LANES];
    alignas(64) int32_t drop_row[LANES];
    bool odd;  // the output or log-sum-exp of some row is NaN or inf
};

// Buffers of one thread: the state of a team of blocks, and scratch for one span of one block.
struct Bench {
    Scratch scratch;
    Queries team[BACKWARD_TEAM];
    float *out, *p, *ds, *slope, *bias, *clean_k, *clean_v, *k, *v, *dk, *dv;
    alignas(64) float ones[LANES], scale[LANES];

    // `sums`: whether dk and dv are allocated here.
    void lay(const regard_args &a, int64_t team_size, bool sums) {
        const int64_t padded_k = whole_vectors(a.width), padded_v = whole_vectors(a.value_width), block = KEYS * LANES;
        size_t floats = 0;
        // Runs twice: first to count the bytes, then to assign the pointers.
        const auto cut = [&](bool really) {
            const auto take = [&](float *&to, int64_t count) {
                if (really) to = scratch.take<float>((size_t)count);
                else floats += (size_t)(count + 15) / 16 * 16;
            };
            for (int64_t m = 0; m < team_size; m++) {
                take(team[m].q, a.width * LANES);
                take(team[m].d_out, a.value_width * LANES);
                take(team[m].dq, a.width * LANES);
                take(team[m].q_copy, LANES * padded_k);
                take(team[m].d_out_copy, LANES * padded_v);
            }
            for (float **x : {&p, &ds, &slope, &bias}) take(*x, block);
            take(out, a.value_width * LANES);
            take(clean_k, KEYS * a.width);
            take(clean_v, KEYS * a.value_width);
            take(k, a.k_stride[2] == a.width ? 0 : a.keys * a.width);
            take(v, a.v_stride[2] == a.value_width ? 0 : a.keys * a.value_width);
            take(dk, sums ? a.keys * padded_k : 0);
            take(dv, sums ? a.keys * padded_v : 0);
        };
        cut(false);
        scratch.reserve(floats * sizeof(float));
        cut(true);
        for (int i = 0; i < LANES; i++) {
            ones[i] = 1.0f;
            scale[i] = a.scale;
        }
    }
};

// Rows with a stride of `padded` numbers, 0 from `width` on: in place if they have that form, else copied.
inline const float *padded_rows(const float *from, int64_t stride, int64_t rows, int64_t width, int64_t padded,
                                float *to) {
    if (stride == padded && width == padded) return from;
    for (int64_t i = 0; i < rows; i++) {
        std::memcpy(to + i * padded, from + i * stride, (size_t)width * sizeof(float));
        std::memset(to + i * padded + width, 0, (size_t)(padded - width) * sizeof(float));
    }
    return to;
}

inline bool finite(const float *x, int64_t count) {
    int32_t odd = 0;
    for (int64_t i = 0; i < count; i++) {
        int32_t bits;
        std::memcpy(&bits, x + i, sizeof bits);
        odd |= (bits & 0x7f800000) == 0x7f800000;
    }
    return !odd;
}

// The same rows with 0 in place of NaN and inf.
inline const float *cleaned(const float *from, int64_t rows, int64_t width, float *to) {
    for (int64_t x = 0; x < rows * width; x++) to[x] = std::isfinite(from[x]) ? from[x] : 0.0f;
    return to;
}

// delta[lane] = sum_e d_out[e][lane] out[e][lane], in the same order of summation as `scores`: for a query with a
// single visible key, delta and dP are then equal to the bit, and their difference is exactly 0.
inline void row_sums(const float *d_out, const float *out, int64_t width, int lanes, float *delta) {
    const int64_t pieces = (width + PIECE - 1) / PIECE;
    for (int lane = 0; lane < lanes; lane += W) {
        F total = {};
        for (int64_t i = 0, e = 0; i < pieces; i++) {
            F sum = {};
            for (; e < width * (i + 1) / pieces; e++)
                sum += load(out + e * LANES + lane) * load(d_out + e * LANES + lane);
            total = sum + total;
        }
        store(delta + lane, total);
    }
}

// Loads the queries of a block and their gradients as lanes and as rows, with lse and delta of each row. Returns their
// contribution to the gradient of the head's sink, which is a key whose dP is 0.
inline double open(const regard_args &a, const regard_gradients &g, const Block &block, Queries &to, Bench &bench) {
    to.block = block;
    to.plan.emplace(a, to.block);
    const auto rows_at = [&](const void *x, const int64_t *stride) {
        return (const float *)x + block.item * stride[0] + block.head * stride[1] + block.row * stride[2];
    };
    const int64_t padded_k = whole_vectors(a.width), padded_v = whole_vectors(a.value_width);
    to.q_rows = padded_rows(rows_at(a.q, a.q_stride), a.q_stride[2], block.rows, a.width, padded_k, to.q_copy);
    to.d_out_rows = padded_rows(rows_at(g.d_out, g.d_out_stride), g.d_out_stride[2], block.rows, a.value_width,
                                padded_v, to.d_out_copy);
    rows_to_lanes(to.q_rows, padded_k, block.rows, block.lanes, a.width, to.q);
    rows_to_lanes(to.d_out_rows, padded_v, block.rows, block.lanes, a.value_width, to.d_out);
    rows_to_lanes(rows_at(a.out, a.out_stride), a.out_stride[2], block.rows, block.lanes, a.value_width, bench.out);
    row_sums(to.d_out, bench.out, a.value_width, block.lanes, to.delta);
    std::memset(to.dq, 0, sizeof(float) * LANES * a.width);

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
template <bool Drop, int NV>
void weigh_strip(const regard_args &a, const int32_t *col, int64_t keys, float scale, int lane, const Queries &of,
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

inline void weigh(const regard_args &a, const Queries &of, const Span &span, float scale, float *p, float *ds) {
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

struct Unit {
    int64_t number;
    const float *k, *v;  // contiguous
    float *dk, *dv;
    bool careful;  // keys or values have NaN or inf: hidden pairs must not contribute 0 * NaN
};

// A block of queries against the keys [from, to): adds to dK and dV of the unit, and to dQ of the block.
inline void advance(const regard_args &a, const regard_gradients &g, const Unit &unit, Queries &of, BiasGradient &bias,
                    Bench &bench, int64_t from, int64_t to) {
    const Block &block = of.block;
    const int64_t padded_k = whole_vectors(a.width), padded_v = whole_vectors(a.value_width);
    // A positive scale is applied in the exponent; others are not, because they would change the -inf of hidden pairs.
    const bool transformed = transforms(a);
    Plan &plan = *of.plan;
    plan.each(from, to, [&](const Span &span) {
        const int64_t keys = span.last - span.first;
        const int first = span.lane, last = span.lanes_end, queries = std::min(last, block.rows) - first;
        const float *k = unit.k + span.first * a.width, *v = unit.v + span.first * a.value_width;
        float *p = bench.p, *ds = bench.ds;
        // To be fetched meanwhile: the next rows of K, V, dK and dV; after the last ones the rows of the next queries.
        const bool ends = span.last == plan.last();
        const auto next = [&](const float *x, int64_t width) {
            return Ahead(x + span.last * width, std::min(KEYS, plan.last() - span.last), width, width);
        };
        scores<false, false>(k, a.width, keys, of.q, a.width, first, last, p, nullptr, nullptr, 0,
                             ends ? rows_ahead(a, a.q, a.q_stride, of.upcoming, a.width) : next(unit.k, a.width));
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
            k = cleaned(k, keys, a.width, bench.clean_k);
            v = cleaned(v, keys, a.value_width, bench.clean_v);
        }
        scores<false, false>(v, a.value_width, keys, of.d_out, a.value_width, first, last, ds, nullptr, nullptr, 0,
                             ends ? rows_ahead(a, g.d_out, g.d_out_stride, of.upcoming, a.value_width)
                                  : next(unit.v, a.value_width));
        weigh(a, of, span, transformed ? 1.0f : a.scale, p, ds);
        if (span.masked && of.odd) {  // avoids 0 * NaN
            plan.hide(span, p, 0.0f);
            plan.hide(span, ds, 0.0f);
        }
        if (g.d_v)
            weigh_rows(p + first, keys, queries, of.d_out_rows + first * padded_v, padded_v,
                       unit.dv + span.first * padded_v,
                       ends ? rows_ahead(a, a.out, a.out_stride, of.upcoming, a.value_width) : next(unit.dv, padded_v));
        if (bias.wanted) bias.add(block, unit.number, span, ds);
        if (a.softcap != 0.0f) follow_softcap(span, bench.slope, ds);
        if (g.d_k)
            weigh_rows(ds + first, keys, queries, of.q_rows + first * padded_k, padded_k,
                       unit.dk + span.first * padded_k,
                       ends ? rows_ahead(a, g.d_q, g.d_q_stride, block, a.width) : next(unit.dk, padded_k));
        if (g.d_q) values(k, a.width, ds, keys, a.width, first, last, bench.ones, of.dq);
    });
}

inline void close(const regard_args &a, const regard_gradients &g, const Queries &of, const Bench &bench) {
    if (!g.d_q) return;
    const Block &block = of.block;
    float *to =
        (float *)g.d_q + block.item * g.d_q_stride[0] + block.head * g.d_q_stride[1] + block.row * g.d_q_stride[2];
    lanes_to_rows(of.dq, block.rows, a.width, bench.scale, to, g.d_q_stride[2]);
}

}  // namespace REGARD_NAMESPACE
