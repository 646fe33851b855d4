// The products of `micro.h` on tiles (AMX): registers of 16 rows of 64 bytes, and one instruction that multiplies 16 x
// 32 by 32 x 16 numbers of bfloat16. Its second factor is a tile of pairs that are neighbours in the sum: queries along
// the lanes have just that form, and so do weights as pairs of keys. The first factor is read as rows:
//
//     S^T (keys x lanes)  = K Q^T           rows of K
//     O^T (E x lanes)    += V^T P^T         rows of V^T: values are transposed once (`Columns`)
//
// float32 is multiplied as well: a number is the sum of three of bfloat16, exactly but for very small ones, and of the
// nine products of such sums the six largest are taken; the others are below 2 ** -24 of the result, as rounding is.
// Tiles take subnormal parts for 0, so numbers that are all very small are left to `micro.h` (`suit_tiles`).
#pragma once
#include "visibility.h"

namespace REGARD_NAMESPACE {

// Within its scope the calling thread has its tiles.
class TileState {
#if defined(__AMX_BF16__)
  public:
    TileState() {
        alignas(64) uint8_t config[64] = {1};                                        // the one layout that there is
        for (int t = 0; t < 8; t++) config[16 + 2 * t] = 64, config[48 + t] = TILE;  // bytes of a row, rows
        _tile_loadconfig(config);
    }
    ~TileState() { _tile_release(); }
#else
  public:
    TileState() {}
    ~TileState() {}
#endif
    TileState(const TileState &) = delete;
};

// What a thread needs for products of T.
struct Nothing {
    Nothing() {}
    ~Nothing() {}
};
template <class T>
using Operate = std::conditional_t<TILES && !std::is_same_v<T, float>, TileState, Nothing>;

// s[j][lane] = k[j] . q[lane]. Rows of whole tiles are read and written. `width`: operands of a part.
template <int PARTS>
void tile_scores(const Pair *k, int64_t k_stride, int64_t keys, const Pair *q, int64_t width, int first, int last,
                 float *s, Ahead ahead);

// The rows of pairs of a span: for all keys that lie together with its own.
constexpr int64_t PAIR_ROWS = KEYS / 2 + TILE;

// o[e][lane] = o[e][lane] * shrink[lane] + sum_j v[e][j] p[j][lane]. v: columns in tiles, `stride` from one 16 pairs of
// keys to the next, `part` between its parts; those of p are PAIR_ROWS rows apart. `pairs`: a multiple of 16.
template <int PARTS>
void tile_values(const Pair *v, int64_t stride, int64_t part, const Pair *p, int64_t pairs, int64_t value_width,
                 int first, int last, const float *shrink, float *o, Ahead ahead);

#if defined(__AMX_BF16__)

// A factor of a product. Pairs: a row, a step of 16 pairs of the sum, and a part are so many pairs apart.
struct Factor {
    const Pair *at;
    int64_t row, step, part;
    Factor moved(int64_t pairs) const { return {at + pairs, row, step, part}; }
};

// Tiles 0 to 3 hold sums: R x C of them. Tiles 4 and 5 hold the first factor, 6 and 7 the second.
template <int R, int C>
inline void clear_sums() {
    _tile_zero(0);
    if (C == 2) _tile_zero(1);
    if (R == 2) _tile_zero(2);
    if (R == 2 && C == 2) _tile_zero(3);
}
template <int R, int C>
inline void load_sums(const float *from, int64_t stride) {
    const int64_t bytes = stride * 4;
    _tile_loadd(0, from, bytes);
    if (C == 2) _tile_loadd(1, from + TILE, bytes);
    if (R == 2) _tile_loadd(2, from + TILE * stride, bytes);
    if (R == 2 && C == 2) _tile_loadd(3, from + TILE * stride + TILE, bytes);
}
template <int R, int C>
inline void store_sums(float *to, int64_t stride) {
    const int64_t bytes = stride * 4;
    _tile_stored(0, to, bytes);
    if (C == 2) _tile_stored(1, to + TILE, bytes);
    if (R == 2) _tile_stored(2, to + TILE * stride, bytes);
    if (R == 2 && C == 2) _tile_stored(3, to + TILE * stride + TILE, bytes);
}
template <int R>
inline void load_first(const Factor &a, const Pair *at) {
    _tile_loadd(4, at, a.row * 4);
    if (R == 2) _tile_loadd(5, at + TILE * a.row, a.row * 4);
}
template <int C>
inline void load_second(const Factor &b, const Pair *at) {
    _tile_loadd(6, at, b.row * 4);
    if (C == 2) _tile_loadd(7, at + TILE, b.row * 4);
}
template <int R, int C>
inline void multiply_tiles() {
    _tile_dpbf16ps(0, 4, 6);
    if (C == 2) _tile_dpbf16ps(1, 4, 7);
    if (R == 2) _tile_dpbf16ps(2, 5, 6);
    if (R == 2 && C == 2) _tile_dpbf16ps(3, 5, 7);
}

// Adds the product of R x 16 rows and C x 16 columns to the sums. Of split numbers the small parts come first, in an
// order in which each part is loaded as seldom as possible.
template <int PARTS, int R, int C>
inline void multiply(const Factor &a, const Factor &b, int64_t steps) {
    const Pair *x = a.at, *y = b.at;
    for (int64_t i = 0; i < steps; i++, x += a.step, y += b.step) {
        if constexpr (PARTS == 1) {
            load_second<C>(b, y), load_first<R>(a, x), multiply_tiles<R, C>();
        } else {
            load_second<C>(b, y);
            load_first<R>(a, x + 2 * a.part), multiply_tiles<R, C>();
            load_first<R>(a, x + a.part), multiply_tiles<R, C>();
            load_second<C>(b, y + b.part), multiply_tiles<R, C>();
            load_first<R>(a, x), multiply_tiles<R, C>();
            load_second<C>(b, y + 2 * b.part), multiply_tiles<R, C>();
            load_second<C>(b, y), multiply_tiles<R, C>();
        }
    }
}

// f(row, column, R, C) for all tiles of a product, R and C as types; two by two, so that sums need not wait for each
// other.
template <class Function>
inline void over_tiles(int64_t rows, int64_t first_column, int64_t last_column, Function f) {
    using One = std::integral_constant<int, 1>;
    using Two = std::integral_constant<int, 2>;
    asm volatile("" ::: "memory");  // (GCC 12 does not know that loading a tile reads memory)
    for (int64_t c = first_column; c < last_column; c += 2 * TILE) {
        const bool one = c + TILE >= last_column;
        int64_t r = 0;
        for (; r + TILE < rows; r += 2 * TILE) one ? f(r, c, Two{}, One{}) : f(r, c, Two{}, Two{});
        if (r < rows) one ? f(r, c, One{}, One{}) : f(r, c, One{}, Two{});
    }
}

template <int PARTS>
void tile_scores(const Pair *k, int64_t k_stride, int64_t keys, const Pair *q, int64_t width, int first, int last,
                 float *s, Ahead ahead) {
    const Factor a{k, k_stride, TILE, width}, b{q, LANES, TILE * LANES, width * LANES};
    over_tiles(keys, first, last, [&](int64_t j, int64_t lane, auto r, auto c) {
        ahead.fetch(PARTS * width * r.value * c.value / 4);
        clear_sums<r.value, c.value>();
        multiply<PARTS, r.value, c.value>(a.moved(j * k_stride), b.moved(lane), width / TILE);
        store_sums<r.value, c.value>(s + j * LANES + lane, LANES);
    });
}

template <int PARTS>
void tile_values(const Pair *v, int64_t stride, int64_t part, const Pair *p, int64_t pairs, int64_t value_width,
                 int first, int last, const float *shrink, float *o, Ahead ahead) {
    for (int lane = first; lane < last; lane += W) {
        const F factor = load(shrink + lane);
        if (!any(factor != 1.0f)) continue;
        for (int64_t e = 0; e < value_width; e++) store(o + e * LANES + lane, load(o + e * LANES + lane) * factor);
    }
    const Factor a{v, TILE, stride, part}, b{p, LANES, TILE * LANES, PAIR_ROWS * LANES};
    over_tiles(value_width, first, last, [&](int64_t e, int64_t lane, auto r, auto c) {
        ahead.fetch(PARTS * pairs * r.value * c.value / 4);
        load_sums<r.value, c.value>(o + e * LANES + lane, LANES);
        multiply<PARTS, r.value, c.value>(a.moved(e * TILE), b.moved(lane), pairs / TILE);
        store_sums<r.value, c.value>(o + e * LANES + lane, LANES);
    });
}

#endif

}  // namespace REGARD_NAMESPACE
