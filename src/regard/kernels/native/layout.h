// Transposes rows in memory to lanes and back, in W x W blocks.
#pragma once
#include "micro.h"

namespace REGARD_NAMESPACE {

// to[x][lane] = from[lane][x] for `rows` lanes and `width` numbers; the lanes from `rows` to `lanes` become 0. Numbers
// of one lane are `Stride` apart.
template <int Stride = LANES, class T>
void rows_to_lanes(const T *from, int64_t stride, int64_t rows, int lanes, int64_t width, float *to) {
    for (int lane = 0; lane < lanes; lane += W) {
        const int64_t here = rows - lane < W ? (rows > lane ? rows - lane : 0) : W;
        const T *p = from + lane * stride;
        int64_t x = 0;
        for (; here > 0 && x + W <= width; x += W) {
            F block[W];
            if (here == W) {
#pragma GCC unroll 16
                for (int i = 0; i < W; i++) block[i] = load(p + i * stride + x);
            } else {
#pragma GCC unroll 16
                for (int i = 0; i < W; i++) block[i] = i < here ? load(p + i * stride + x) : F{};
            }
            transpose(block);
#pragma GCC unroll 16
            for (int i = 0; i < W; i++) store(to + (x + i) * Stride + lane, block[i]);
        }
        for (; x < width; x++) {
            for (int i = 0; i < W; i++) to[x * Stride + lane + i] = i < here ? widened(p[i * stride + x]) : 0.0f;
        }
    }
}

// to[lane][x] = from[x][lane] * factor[lane]. Returns false if a number is not finite.
template <class T>
bool lanes_to_rows(const float *from, int64_t rows, int64_t width, const float *factor, T *to, int64_t stride) {
    F odd[4] = {};  // 0 * x is NaN if x is not finite, else 0; four sums, so that they need not wait for each other
    float odd_one = 0.0f;
    for (int64_t lane = 0; lane < rows; lane += W) {
        const int64_t here = rows - lane < W ? rows - lane : W;
        const F f = load(factor + lane);
        T *p = to + lane * stride;
        int64_t x = 0;
        for (; x + W <= width; x += W) {
            F block[W];
#pragma GCC unroll 16
            for (int i = 0; i < W; i++) block[i] = load(from + (x + i) * LANES + lane) * f;
            transpose(block);
            if (here == W) {
#pragma GCC unroll 16
                for (int i = 0; i < W; i++) odd[i % 4] += block[i] * 0.0f, store(p + i * stride + x, block[i]);
            } else {
                for (int i = 0; i < here; i++) odd[0] += block[i] * 0.0f, store(p + i * stride + x, block[i]);
            }
        }
        for (; x < width; x++) {
            for (int i = 0; i < here; i++) {
                const float y = from[x * LANES + lane + i] * factor[lane + i];
                odd_one += y * 0.0f;
                put(p + i * stride + x, y);
            }
        }
    }
    const F all = (odd[0] + odd[1]) + (odd[2] + odd[3]);
    return !any(all != all) && odd_one == odd_one;
}

// to[j][lane] = from[lane][j] with any strides, for blocks of a dense bias.
inline void block_to_lanes(const float *from, int64_t row_stride, int64_t key_stride, int64_t rows, int lanes,
                           int64_t keys, float *to) {
    if (key_stride == 1) {
        rows_to_lanes(from, row_stride, rows, lanes, keys, to);
        return;
    }
    for (int64_t j = 0; j < keys; j++) {
        for (int i = 0; i < lanes; i++) to[j * LANES + i] = i < rows ? from[i * row_stride + j * key_stride] : 0.0f;
    }
}

}  // namespace REGARD_NAMESPACE
