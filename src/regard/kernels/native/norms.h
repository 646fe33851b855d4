// Root mean square norm: out = x / sqrt(mean(x^2) + eps) * weight, each row by itself, computed in float32.
#pragma once
#include <cmath>

#include "numbers.h"
#include "team.h"

namespace REGARD_NAMESPACE {

// f(first, number of columns) for all of them, W at a time; the last time perhaps fewer.
template <class Function>
inline void over_columns(int64_t width, Function f) {
    int64_t x = 0;
    for (; x + W <= width; x += W) f(x, W);
    if (x < width) f(x, width - x);
}

template <class T>
inline F load_up_to(const T *p, int64_t count) {
    return count == W ? load(p) : load_some(p, count);
}

template <class T>
void norm_row(const regard_norm &a, const T *x, T *out) {
    constexpr int SUMS = 4;  // that need not wait for each other
    F sum[SUMS] = {};
    over_columns(a.width, [&](int64_t at, int64_t count) {
        const F y = load_up_to(x + at, count);
        sum[at / W % SUMS] += y * y;
    });
    const F all = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    float total = 0.0f;
    for (int i = 0; i < W; i++) total += all[i];
    const float factor = 1.0f / std::sqrt(total / (float)a.width + a.eps);
    over_columns(a.width, [&](int64_t at, int64_t count) {
        F y = load_up_to(x + at, count) * factor;
        if (a.weight) y *= load_up_to((const T *)a.weight + at, count) + a.more;
        count == W ? store(out + at, y) : store_some(out + at, y, count);
    });
}

inline void norm_rows(const regard_norm &a) {
    with_dtype(a.dtype, [&](auto number) {
        using T = decltype(number);
        in_team(a.threads, [&] {
#pragma omp for schedule(static)
            for (int64_t row = 0; row < a.rows; row++)
                norm_row<T>(a, (const T *)a.x + row * a.x_stride, (T *)a.out + row * a.width);
        });
    });
}

}  // namespace REGARD_NAMESPACE
