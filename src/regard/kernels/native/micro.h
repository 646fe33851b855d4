// The matrix products, in registers. Everything is laid out with *queries along the lanes*: a block of up to LANES
// queries is transposed once, and then
//
//     S^T (keys x lanes)  = K (keys x D) Q^T (D x lanes)        K is read in place, its numbers are broadcast
//     O^T (E x lanes)    += V^T (E x keys) P^T (keys x lanes)   V likewise
//
// so neither K nor V is packed or transposed, softmax has no horizontal reduction, and each lane is one query: maxima,
// sums and statistics are plain vector arithmetic.
//
// The backward pass has a third product, which sums over queries:
//
//     dV (keys x E)      += P^T (keys x lanes) dO (lanes x E)   the width is along the vectors, P^T is broadcast
//
// T is the type of the operands: float, or pairs of bfloat16 that are neighbours in the sum: of the width for scores,
// of keys for p v, of queries for the third product.
#pragma once
#include <array>
#include <utility>

#include "numbers.h"

namespace REGARD_NAMESPACE {

constexpr int LANES = 64;                         // queries per block, and the row length of every array with lanes
constexpr int COLUMN = 16;                        // lanes are skipped in groups of so many
constexpr int VECTORS = REGISTERS == 32 ? 4 : 2;  // per row of a tile

// The number of rows of a tile of NV vectors: as many as fit in the registers beside NV operands and a broadcast.
constexpr int rows_of(int nv) { return REGISTERS == 32 ? (nv == 4 ? 6 : nv == 3 ? 8 : 12) : (nv == 2 ? 6 : 10); }
constexpr int MOST_ROWS = REGISTERS == 32 ? 12 : 10;

// The number of rows of the next tile, of `left`. A thin tile would come last where few rows remain after this one: its
// few sums would wait for each other, so both are made about equal.
constexpr int64_t next_rows(int64_t left, int64_t most) {
    if (left <= most) return left;
    return left <= most + most / 2 ? (left + 1) / 2 : most;
}

// Rows that will be needed soon. Each tile fetches a few cache lines of them, while it multiplies others.
class Ahead {
    const char *row = nullptr;
    int64_t rows = 0, bytes = 0, stride = 0, at = 0;

  public:
    Ahead() = default;
    // `count` rows of `width` numbers; the stride counts numbers as well.
    template <class T>
    Ahead(const T *first, int64_t count, int64_t width, int64_t stride)
        : row((const char *)first), rows(count), bytes(width * (int64_t)sizeof(T)),
          stride(stride * (int64_t)sizeof(T)) {}
    void fetch(int64_t lines) {
        for (; lines > 0 && rows > 0; lines--) {
            __builtin_prefetch(row + at);
            at += 64;
            if (at >= bytes) row += stride, rows--, at = 0;
        }
    }
};

// R keys against NV vectors of queries, over part of the width; with `Add` added to s. `top` is the running maximum of
// each lane, `at` its key.
template <int R, int NV, bool Add, bool Max, bool Where, class T>
void scores_tile(const T *k, int64_t k_stride, const T *q, int64_t width, float *s, float *top, int32_t *at,
                 int32_t key) {
    F sum[R][NV] = {};
    for (int64_t d = 0; d < width; d++) {
        Vector<T> x[NV];
#pragma GCC unroll 16
        for (int v = 0; v < NV; v++) x[v] = load(q + d * LANES + v * W);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const Vector<T> y = broadcast(k[r * k_stride + d]);
#pragma GCC unroll 16
            for (int v = 0; v < NV; v++) sum[r][v] = add_product(sum[r][v], y, x[v]);
        }
    }
#pragma GCC unroll 16
    for (int v = 0; v < NV; v++) {
        F most = Max ? load(top + v * W) : F{};
        I best = Where ? load(at + v * W) : I{};
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            if (Add) sum[r][v] += load(s + r * LANES + v * W);
            store(s + r * LANES + v * W, sum[r][v]);
            if (Where) {
                const I more = sum[r][v] > most;
                best = choose(more, broadcast(key + r), best);
            }
            if (Max) most = larger(most, sum[r][v]);
        }
        if (Max) store(top + v * W, most);
        if (Where) store(at + v * W, best);
    }
}

// R columns of v against NV vectors of weights: o = o * shrink + p v over all keys of a block.
template <int R, int NV, class T>
void values_tile(const T *v, int64_t v_stride, const T *p, int64_t keys, const float *shrink, float *o) {
    F sum[R][NV];
#pragma GCC unroll 16
    for (int c = 0; c < NV; c++) {
        const F f = load(shrink + c * W);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) sum[r][c] = load(o + r * LANES + c * W) * f;
    }
    for (int64_t j = 0; j < keys; j++) {
        Vector<T> x[NV];
#pragma GCC unroll 16
        for (int c = 0; c < NV; c++) x[c] = load(p + j * LANES + c * W);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const Vector<T> y = broadcast(v[j * v_stride + r]);
#pragma GCC unroll 16
            for (int c = 0; c < NV; c++) sum[r][c] = add_product(sum[r][c], y, x[c]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 16
        for (int c = 0; c < NV; c++) store(o + r * LANES + c * W, sum[r][c]);
    }
}

// R rows of weights against NV vectors of the rows of queries: to += p rows. With pairs, a row of p holds LANES / 2
// pairs of lanes, and `rows` holds pairs of queries. The sum starts from 0 and is added at once: over thousands of
// queries, sums of sums have less rounding error than a long sum.
template <int R, int NV, class T>
void rows_tile(const T *p, int64_t count, const T *rows, int64_t stride, float *to) {
    F sum[R][NV] = {};
    for (int64_t i = 0; i < count; i++) {
        Vector<T> x[NV];
#pragma GCC unroll 16
        for (int v = 0; v < NV; v++) x[v] = load(rows + i * stride + v * W);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const Vector<T> y = broadcast(p[r * (LANES / TOGETHER<T>)+i]);
#pragma GCC unroll 16
            for (int v = 0; v < NV; v++) sum[r][v] = add_product(sum[r][v], y, x[v]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 16
        for (int v = 0; v < NV; v++) {
            float *at = to + r * stride + v * W;
            store(at, load(at) + sum[r][v]);
        }
    }
}

template <class T>
using ScoresTile = decltype(&scores_tile<1, 1, false, false, false, T>);
template <class T>
using ValuesTile = decltype(&values_tile<1, 1, T>);
template <class T>
using RowsTile = decltype(&rows_tile<1, 1, T>);

template <int NV, bool Add, bool Max, bool Where, class T, int... r>
constexpr std::array<ScoresTile<T>, MOST_ROWS> scores_tiles(std::integer_sequence<int, r...>) {
    return {(r < rows_of(NV) ? &scores_tile<(r < rows_of(NV) ? r + 1 : 1), NV, Add, Max, Where, T> : nullptr)...};
}
template <int NV, class T, int... r>
constexpr std::array<ValuesTile<T>, MOST_ROWS> values_tiles(std::integer_sequence<int, r...>) {
    return {(r < rows_of(NV) ? &values_tile<(r < rows_of(NV) ? r + 1 : 1), NV, T> : nullptr)...};
}
template <int NV, class T, int... r>
constexpr std::array<RowsTile<T>, MOST_ROWS> rows_tiles(std::integer_sequence<int, r...>) {
    return {(r < rows_of(NV) ? &rows_tile<(r < rows_of(NV) ? r + 1 : 1), NV, T> : nullptr)...};
}

template <int NV, bool Add, bool Max, bool Where, class T>
void scores_strip(const T *k, int64_t k_stride, int64_t keys, const T *q, int64_t width, float *s, float *top,
                  int32_t *at, int32_t key, Ahead &ahead) {
    static constexpr auto tiles = scores_tiles<NV, Add, Max, Where, T>(std::make_integer_sequence<int, MOST_ROWS>{});
    constexpr int R = rows_of(NV);
    for (int64_t j = 0, some; j < keys; j += some) {
        some = next_rows(keys - j, R);
        ahead.fetch(some * width * NV * W / (16 * LANES));
        tiles[some - 1](k + j * k_stride, k_stride, q, width, s + j * LANES, top, at, key + (int32_t)j);
    }
}

template <int NV, class T>
void values_strip(const T *v, int64_t v_stride, const T *p, int64_t keys, int64_t value_width, const float *shrink,
                  float *o, Ahead &ahead) {
    static constexpr auto tiles = values_tiles<NV, T>(std::make_integer_sequence<int, MOST_ROWS>{});
    constexpr int R = rows_of(NV);
    for (int64_t e = 0, some; e < value_width; e += some) {
        some = next_rows(value_width - e, R);
        ahead.fetch(some * keys * NV * W / (16 * LANES));
        tiles[some - 1](v + e, v_stride, p, keys, shrink, o + e * LANES);
    }
}

template <int NV, class T>
void rows_strip(const T *p, int64_t keys, int64_t count, const T *rows, int64_t stride, float *to, Ahead &ahead) {
    static constexpr auto tiles = rows_tiles<NV, T>(std::make_integer_sequence<int, MOST_ROWS>{});
    constexpr int R = rows_of(NV);
    for (int64_t j = 0, some; j < keys; j += some) {
        some = next_rows(keys - j, R);
        ahead.fetch(some * NV * W / 16);
        tiles[some - 1](p + j * (LANES / TOGETHER<T>), count, rows, stride, to + j * stride);
    }
}

// f(lane, NV as a type) for the tiles, NV vectors wide, that cover the lanes [first, last).
template <int NV = VECTORS, class Function>
inline void over_lanes(int first, int last, Function f) {
    int lane = first;
    for (; lane + NV * W <= last; lane += NV * W) f(lane, std::integral_constant<int, NV>{});
    if constexpr (NV > 1) {
        if (lane < last) over_lanes<NV - 1>(lane, last, f);
    }
}

// The width is summed in pieces of at most so many: a piece of the queries stays in the L1 cache, and sums of sums have
// less rounding error than long sums.
constexpr int64_t PIECE = W > 4 ? 96 : 32;  // (without FMA, products are rounded as well)

// s[j][lane] = k[j] . q[lane]; with `Max` also the running maximum, with `Where` also its key.
template <bool Max, bool Where, class T>
void scores(const T *k, int64_t k_stride, int64_t keys, const T *q, int64_t width, int first, int last, float *s,
            float *top, int32_t *at, int32_t key, Ahead ahead = {}) {
    const int64_t pieces = (width + PIECE - 1) / PIECE;
    over_lanes(first, last, [&](int lane, auto nv) {
        constexpr int NV = nv.value;
        int64_t d = 0;
        for (int64_t i = 0; i < pieces; i++) {
            const int64_t next = width * (i + 1) / pieces, some = next - d;
            const T *x = k + d, *y = q + d * LANES + lane;
            float *to = s + lane, *tops = Max ? top + lane : nullptr;
            int32_t *places = Where ? at + lane : nullptr;
            if (i + 1 < pieces) {
                if (i == 0)
                    scores_strip<NV, false, false, false>(x, k_stride, keys, y, some, to, nullptr, nullptr, key, ahead);
                else scores_strip<NV, true, false, false>(x, k_stride, keys, y, some, to, nullptr, nullptr, key, ahead);
            } else {
                if (i == 0)
                    scores_strip<NV, false, Max, Where>(x, k_stride, keys, y, some, to, tops, places, key, ahead);
                else scores_strip<NV, true, Max, Where>(x, k_stride, keys, y, some, to, tops, places, key, ahead);
            }
            d = next;
        }
    });
}

// o[e][lane] = o[e][lane] * shrink[lane] + sum_j v[j][e] p[j][lane]
template <class T>
void values(const T *v, int64_t v_stride, const T *p, int64_t keys, int64_t value_width, int first, int last,
            const float *shrink, float *o, Ahead ahead = {}) {
    over_lanes(first, last, [&](int lane, auto nv) {
        values_strip<nv.value>(v, v_stride, p + lane, keys, value_width, shrink + lane, o + lane, ahead);
    });
}

// to[j][x] += sum_i p[j][i] rows[i][x], i < count. The rows of both have a stride of `width`, a multiple of W.
template <class T>
void weigh_rows(const T *p, int64_t keys, int64_t count, const T *rows, int64_t width, float *to, Ahead ahead = {}) {
    over_lanes(0, (int)width,
               [&](int x, auto nv) { rows_strip<nv.value>(p, keys, count, rows + x, width, to + x, ahead); });
}

}  // namespace REGARD_NAMESPACE
