// Online softmax, one query per lane: from scores to weights relative to the running maximum of each row.
#pragma once
#include <cmath>

#include "micro.h"

namespace REGARD_NAMESPACE {

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;

// The running softmax of each row. `base` is subtracted from scores: it is the maximum, or 0 if no key was visible yet.
// It is subtracted before scores are multiplied, so that the largest weight is exactly 1, however large the scores.
struct Rows {
    alignas(64) float top[LANES];  // the largest score
    alignas(64) float base[LANES];
    alignas(64) float total[LANES];   // sum of weights
    alignas(64) float logs[LANES];    // sum of weight * log2(weight), for the entropy
    alignas(64) float shrink[LANES];  // factor for sums relative to the previous base
    alignas(64) int32_t at[LANES];    // the key of the largest score

    void begin() {
        for (int i = 0; i < LANES; i++) {
            top[i] = -__builtin_inff();
            base[i] = total[i] = logs[i] = 0.0f;
            at[i] = -1;
        }
    }
};

// Applies scale, softcap and bias to the scores, in place, in base e. Stores the derivative of the softcap in `slope`,
// if given.
inline void transform(float *s, int64_t keys, int first, int last, float scale, float softcap, const float *bias,
                      float *slope = nullptr) {
    const float inner = softcap != 0.0f ? scale / softcap : scale;
    for (int64_t j = 0; j < keys; j++) {
        for (int lane = first; lane < last; lane += W) {
            float *p = s + j * LANES + lane;
            F x = load(p) * inner;
            if (softcap != 0.0f) {
                x = tanh(x);
                if (slope) store(slope + j * LANES + lane, 1.0f - x * x);
                x *= softcap;
            }
            if (bias) x += load(bias + j * LANES + lane);
            store(p, x);
        }
    }
}

// The running maximum, if the product did not compute it; with `Where` also its key.
template <bool Where>
void maxima(const float *s, int64_t keys, int first, int last, Rows &rows, int32_t key) {
    over_lanes(first, last, [&](int lane, auto nv) {
        constexpr int NV = nv.value;
        F top[NV];
        I at[NV];
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) top[v] = load(rows.top + lane + v * W), at[v] = load(rows.at + lane + v * W);
        for (int64_t j = 0; j < keys; j++) {
            const I here = broadcast(key + (int32_t)j);
#pragma GCC unroll 4
            for (int v = 0; v < NV; v++) {
                const F x = load(s + j * LANES + lane + v * W);
                if (Where) at[v] = choose(x > top[v], here, at[v]);
                top[v] = larger(top[v], x);
            }
        }
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) store(rows.top + lane + v * W, top[v]), store(rows.at + lane + v * W, at[v]);
    });
}

// Of the weights of some keys, relative to the base after them: what the statistics of rows are made of.
struct SpanSums {
    alignas(64) float base[LANES];
    alignas(64) float total[LANES];  // sum of weights
    alignas(64) float slope[LANES];  // sum of weight * j, keys counted from the first
};

// s = 2 ** ((s - base) * factor), with the new maximum as base; updates the sums, and with `Look` those of these keys.
template <bool Look, int NV>
void exponentials_strip(float *s, int64_t keys, float factor, Rows &rows, SpanSums *sums, int lane) {
    // The sum over these keys is added at once: sums of sums have less rounding error than long sums.
    F base[NV], total[NV] = {}, logs[NV] = {}, slope[NV] = {}, step = {};
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) {
        const int i = lane + v * W;
        const F top = load(rows.top + i), before = load(rows.base + i), sum = load(rows.total + i);
        const I nothing = top == -__builtin_inff();
        base[v] = choose(nothing, F{}, top);
        // A sum of 0 has no base yet: its factor must not be inf.
        const F fall = choose(sum == 0.0f, F{}, (before - base[v]) * factor);
        const F shrink = exp2(fall);
        store(rows.total + i, sum * shrink);
        if (Look) store(rows.logs + i, (load(rows.logs + i) + sum * fall) * shrink);
        store(rows.shrink + i, shrink);
        store(rows.base + i, base[v]);
    }
    for (int64_t j = 0; j < keys; j++) {
        float *p = s + j * LANES + lane;
        F x[NV], weight[NV];
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) x[v] = (load(p + v * W) - base[v]) * factor;
        exp2_clamped(x, weight);
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) {
            total[v] += weight[v];
            if (Look) logs[v] += weight[v] * x[v], slope[v] += weight[v] * step;
            store(p + v * W, weight[v]);
        }
        if (Look) step += 1.0f;
    }
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) {
        const int i = lane + v * W;
        store(rows.total + i, load(rows.total + i) + total[v]);
        if (!Look) continue;
        store(rows.logs + i, load(rows.logs + i) + logs[v]);
        store(sums->base + i, base[v]);
        store(sums->total + i, total[v]);
        store(sums->slope + i, slope[v]);
    }
}

template <bool Look>
void exponentials(float *s, int64_t keys, int first, int last, float factor, Rows &rows, SpanSums *sums = nullptr) {
    over_lanes(first, last,
               [&](int lane, auto nv) { exponentials_strip<Look, nv.value>(s, keys, factor, rows, sums, lane); });
}

// Whether dropout keeps a weight, by the hashes of its row and column. (Products wrap unsigned; the shift is signed.)
template <class Signed, class Unsigned>
inline auto stays(Signed row, Signed col, int32_t threshold) {
    Signed x = (Signed)((Unsigned)(row ^ col) * 0x2C1B3C6Du);
    x ^= x >> 15;
    x = (Signed)((Unsigned)x * 0x297A2D39u);
    return x >= threshold;
}

// kept = weights, or 0 for dropped ones.
inline void drop(const float *p, int64_t keys, int first, int last, const int32_t *row, const int32_t *col,
                 int64_t col_stride, int32_t threshold, float *kept) {
    for (int64_t j = 0; j < keys; j++) {
        const I c = broadcast(col[j * col_stride]);
        for (int lane = first; lane < last; lane += W) {
            const I stay = stays<I, U>(load(row + lane), c, threshold);
            store(kept + j * LANES + lane, choose(stay, load(p + j * LANES + lane), F{}));
        }
    }
}

}  // namespace REGARD_NAMESPACE
