// Online softmax, a query to a lane: from scores to weights relative to the running maximum of each row.
#pragma once
#include <cmath>

#include "micro.h"

namespace REGARD_NAMESPACE {

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;

// What is known of each row so far. `base` is what is subtracted from scores: the maximum, or 0 where nothing was seen.
// It is subtracted before anything is multiplied: the largest weight is 1 exactly, however large the scores.
struct Rows {
    alignas(64) float top[LANES];  // the largest score
    alignas(64) float base[LANES];
    alignas(64) float total[LANES];   // sum of weights
    alignas(64) float logs[LANES];    // sum of weight * log2(weight): entropy comes of it
    alignas(64) float shrink[LANES];  // what sums relative to the former base are multiplied by
    alignas(64) int32_t at[LANES];    // the key of the largest score

    void begin() {
        for (int i = 0; i < LANES; i++) {
            top[i] = -__builtin_inff();
            base[i] = total[i] = logs[i] = 0.0f;
            at[i] = -1;
        }
    }
};

// The scores' own arithmetic where there is more than a positive scale: softcap, bias. In place, in base e. `slope`
// takes the softcap's derivative, where it is wanted.
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

// The running maximum, where the product has not taken it along.
inline void maxima(const float *s, int64_t keys, int first, int last, Rows &rows, int32_t key) {
    for (int lane = first; lane < last; lane += W) {
        F top = load(rows.top + lane);
        I at = load(rows.at + lane);
        for (int64_t j = 0; j < keys; j++) {
            const F x = load(s + j * LANES + lane);
            at = choose(x > top, broadcast(key + (int32_t)j), at);
            top = larger(top, x);
        }
        store(rows.top + lane, top);
        store(rows.at + lane, at);
    }
}

// s becomes 2 ** ((s - base) * factor) with the base of the new maximum; sums follow.
template <bool Logs, int NV>
void exponentials_strip(float *s, int64_t keys, float factor, Rows &rows, int lane) {
    // What these keys add up to is added as a whole: sums of sums have less rounding error than long ones.
    F base[NV], total[NV] = {}, logs[NV] = {};
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) {
        const int i = lane + v * W;
        const F top = load(rows.top + i), before = load(rows.base + i), sum = load(rows.total + i);
        const I nothing = top == -__builtin_inff();
        base[v] = choose(nothing, F{}, top);
        // A sum of 0 has no base yet: whatever it is shrunk by must not be inf.
        const F fall = choose(sum == 0.0f, F{}, (before - base[v]) * factor);
        const F shrink = exp2(fall);
        store(rows.total + i, sum * shrink);
        if (Logs) store(rows.logs + i, (load(rows.logs + i) + sum * fall) * shrink);
        store(rows.shrink + i, shrink);
        store(rows.base + i, base[v]);
    }
    for (int64_t j = 0; j < keys; j++) {
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) {
            float *p = s + j * LANES + lane + v * W;
            F x = (load(p) - base[v]) * factor;
            const F weight = exp2_clamped(x);
            total[v] += weight;
            if (Logs) logs[v] += weight * x;
            store(p, weight);
        }
    }
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) {
        const int i = lane + v * W;
        store(rows.total + i, load(rows.total + i) + total[v]);
        if (Logs) store(rows.logs + i, load(rows.logs + i) + logs[v]);
    }
}

template <bool Logs>
void exponentials(float *s, int64_t keys, int first, int last, float factor, Rows &rows) {
    over_lanes(first, last,
               [&](int lane, auto nv) { exponentials_strip<Logs, nv.value>(s, keys, factor, rows, lane); });
}

// Whether dropout keeps a weight, by the hashes of its row and column. (Unsigned arithmetic wraps; the shift is
// signed.)
template <class Signed, class Unsigned>
inline auto stays(Signed row, Signed col, int32_t threshold) {
    Signed x = (Signed)((Unsigned)(row ^ col) * 0x2C1B3C6Du);
    x ^= x >> 15;
    x = (Signed)((Unsigned)x * 0x297A2D39u);
    return x >= threshold;
}

// kept = weights, or 0 where dropout's hash of row and column says so.
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
