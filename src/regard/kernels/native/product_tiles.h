// The products of projections, in registers: rows of a weight, as they lie in memory, times a few rows of x.
#pragma once
#include <algorithm>

#include "micro.h"

namespace REGARD_NAMESPACE {

// Tiles are wider than those of attention, whose blocks of queries are a power of two: 4 x 3 vectors need 7 loads for
// 12 products, 6 x 2 need 8.
constexpr int WIDE = REGISTERS == 32 ? 4 : 3;  // vectors per row of a tile
constexpr int outs_of(int nv) { return nv == 3 && REGISTERS == 16 ? 4 : rows_of(nv); }
constexpr int STRIP = WIDE * W;  // rows of x that lie along the lanes

// R rows of the weight against a strip of NV vectors, over part of the width. With `Fetch` the rows that come next are
// fetched meanwhile, from `next` on. T: float, or pairs of bfloat16 along the width.
template <int R, int NV, bool Fetch, class T>
void product_tile(const T *w, int64_t stride, const T *x, int64_t width, bool add, float *to, const T *next) {
    F sum[R][NV] = {};
    const int64_t line = Fetch ? 16 : width;
    for (int64_t begin = 0; begin < width; begin += line) {
        if constexpr (Fetch)
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) __builtin_prefetch(next + r * stride + begin);
        const int64_t end = std::min(begin + line, width);
        for (int64_t d = begin; d < end; d++) {
            Vector<T> y[NV];
#pragma GCC unroll 16
            for (int v = 0; v < NV; v++) y[v] = load(x + (d * NV + v) * W);
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) {
                const Vector<T> z = broadcast(w[r * stride + d]);
#pragma GCC unroll 16
                for (int v = 0; v < NV; v++) sum[r][v] = add_product(sum[r][v], z, y[v]);
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 16
        for (int v = 0; v < NV; v++) {
            float *at = to + (r * NV + v) * W;
            store(at, add ? load(at) + sum[r][v] : sum[r][v]);
        }
    }
}

template <class T>
using ProductTile = decltype(&product_tile<1, 1, false, T>);
template <int NV, bool Fetch, class T, int... r>
constexpr std::array<ProductTile<T>, MOST_ROWS> product_tiles(std::integer_sequence<int, r...>) {
    return {(r < outs_of(NV) ? &product_tile<(r < outs_of(NV) ? r + 1 : 1), NV, Fetch, T> : nullptr)...};
}

// to[n][lane] = w[n] . x[lane], or added to it, for a strip of NV vectors of lanes. After these rows comes `next`.
template <int NV, bool Fetch, class T>
void times_strip(const T *w, int64_t stride, int64_t outs, const T *x, int64_t width, bool add, float *to,
                 const T *next) {
    static constexpr auto tiles = product_tiles<NV, Fetch, T>(std::make_integer_sequence<int, MOST_ROWS>{});
    for (int64_t n = 0, some; n < outs; n += some) {
        some = next_rows(outs - n, outs_of(NV));
        const T *after = n + some < outs ? w + (n + some) * stride : next;
        tiles[some - 1](w + n * stride, stride, x, width, add, to + n * NV * W, after);
    }
}

// to[n][m] = w[n] . x[m] for M rows of x, R rows of the weight at a time: at most four for one row of x, which a CPU
// fetches ahead by itself. Each product has SUMS sums, which need not wait for each other.
template <int M, class T>
void dots(const T *w, int64_t stride, int64_t outs, const float *x, int64_t width, float *to) {
    constexpr int R = M == 1 ? 4 : W / M, SUMS = W / (M * R);
    for (int64_t n = 0; n < outs; n += R) {
        const T *row[R];
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) row[r] = w + std::min(n + r, outs - 1) * stride;
        using Sums = F[R * M];
        Sums sum[SUMS] = {};
        const auto add = [&](int64_t d, Sums &to, auto load_it) {
            F y[M];
#pragma GCC unroll 16
            for (int m = 0; m < M; m++) y[m] = load_it(x + m * width + d);
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) {
                const F z = load_it(row[r] + d);
#pragma GCC unroll 16
                for (int m = 0; m < M; m++) to[r * M + m] += z * y[m];
            }
        };
        int64_t d = 0;
        constexpr int64_t LINE = 64 / (int64_t)sizeof(T), STEP = std::max<int64_t>(W * SUMS, LINE);  // numbers
        for (; d + STEP <= width; d += STEP) {
            for (int64_t line = 0; line < STEP; line += LINE)
#pragma GCC unroll 16
                for (int r = 0; r < R; r++) __builtin_prefetch(row[r] + R * stride + d + line);
#pragma GCC unroll 8
            for (int64_t i = 0; i < STEP; i += W) add(d + i, sum[i / W % SUMS], [](auto *p) { return load(p); });
        }
        for (; d + W <= width; d += W) add(d, sum[0], [](auto *p) { return load(p); });
        if (d < width) add(d, sum[0], [&](auto *p) { return load_some(p, width - d); });
        F all[W] = {};
#pragma GCC unroll 16
        for (int i = 0; i < R * M; i++) {
            all[i] = sum[0][i];
#pragma GCC unroll 16
            for (int k = 1; k < SUMS; k++) all[i] += sum[k][i];
        }
        const F totals = sums(all);
        for (int r = 0; r < R && n + r < outs; r++)
            for (int m = 0; m < M; m++) to[(n + r) * W + m] = totals[r * M + m];
    }
}

}  // namespace REGARD_NAMESPACE
