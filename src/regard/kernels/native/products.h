// Projections: out = after(x W^T + bias), with the weight as it lies in memory (out, in).
//
// As in attention (micro.h), rows of x lie along the lanes: x is transposed once, in strips of STRIP rows, and the
// numbers of the weight are broadcast, so it is neither packed nor transposed. A panel of it stays in the L2 cache
// while the strips are multiplied by it. Up to four rows are dot products instead, limited by memory. 16-bit weights
// are widened panel by panel, but where the CPU multiplies pairs of bfloat16, which lie side by side. A row's result
// depends neither on the number of threads nor, from five rows on, on the others.
#pragma once
#include <atomic>
#include <vector>

#include "activations.h"
#include "layout.h"
#include "product_tiles.h"
#include "scratch.h"
#include "team.h"

namespace REGARD_NAMESPACE {

constexpr int64_t FEW_ROWS = 4;
constexpr int64_t PANEL = 256 << 10;     // bytes of a piece of a panel, in float32
constexpr int64_t TRANSPOSED = 8 << 20;  // bytes of x that are transposed at once
constexpr int64_t TASKS = 4;             // per thread, if there is enough to do
constexpr int64_t THIN = 96;             // rows of a panel, at least, if there are several groups of strips
constexpr int64_t GROUP = 128 / STRIP;   // strips

// Some rows of one of the weights.
template <class T>
struct Panel {
    const regard_factor &factor;
    int64_t first, outs;
    const T *row(int64_t n) const { return (const T *)factor.weight + (first + n) * factor.weight_stride; }
};

// The number of vectors of a strip with so many rows.
inline int vectors_of(int64_t rows) { return (int)((rows + W - 1) / W); }

// Bias, what follows, and back to rows: out[row + lane][n] from sums[n][lane].
template <class T>
void finish_rows(int32_t after, const Panel<T> &panel, int64_t row, int64_t rows, const float *sums) {
    const int64_t lanes = vectors_of(rows) * W;
    const regard_factor &f = panel.factor;
    for (int64_t lane = 0; lane < rows; lane += W) {
        const int64_t here = std::min<int64_t>(rows - lane, W);
        for (int64_t n = 0; n < panel.outs; n += W) {
            const int64_t some = std::min<int64_t>(panel.outs - n, W), column = panel.first + n;
            const auto get = [&](const void *from, int64_t at) {
                const T *p = (const T *)from + at;
                return some == W ? load(p) : load_some(p, some);
            };
            F block[W];
#pragma GCC unroll 16
            for (int i = 0; i < W; i++) block[i] = i < some ? load(sums + (n + i) * lanes + lane) : F{};
            transpose(block);
            const F bias = f.bias ? get(f.bias, column) : F{};
            for (int64_t i = 0; i < here; i++) {
                const int64_t to = row + lane + i;
                F y = block[i] + bias;
                if (!f.other) y = activated(after, y);
                else {
                    const F other = get(f.other, to * f.other_stride + column);
                    y = after == REGARD_TIMES ? y * other : y + other;
                }
                T *out = (T *)f.out + to * f.out_stride + column;
                some == W ? store(out, y) : store_some(out, y, some);
            }
        }
    }
}

thread_local Scratch x_strips;     // of the calling thread: x, transposed
thread_local Scratch panel_bench;  // of each thread: sums of a panel with a group of strips; a piece of it in float32

// Whether x and all weights are bfloat16 that can be read as pairs, and too many rows for dot products.
inline bool lie_in_pairs(const regard_product &a, const regard_factor *factors) {
    uint64_t all = (uintptr_t)a.x / sizeof(BFloat16) | (uint64_t)a.x_stride | (uint64_t)a.width;
    for (int64_t i = 0; i < a.factors; i++)
        all |= (uintptr_t)factors[i].weight / sizeof(BFloat16) | (uint64_t)factors[i].weight_stride;
    return a.dtype == REGARD_BFLOAT16 && a.rows > FEW_ROWS && all % 2 == 0;
}

// T: the numbers in memory; O: the operands of the tiles, float or pairs of bfloat16.
template <class T, class O>
class Product {
    static constexpr bool IN_PLACE = !std::is_same_v<O, float> || std::is_same_v<T, float>;
    // Operands of the width that are summed at once; long sums are made of such pieces. A piece of a strip of x fits in
    // the L1 cache; but widening 16-bit weights takes less time in longer pieces.
    static constexpr int64_t DEPTH = IN_PLACE && STRIP > 32 ? 128 : 256;
    const regard_product &a;
    const bool few = a.rows <= FEW_ROWS;
    const int64_t width = a.width / TOGETHER<O>;  // in operands
    const int64_t strip_size = few ? FEW_ROWS * width : STRIP * width;
    const int64_t pieces = few ? 1 : (width + DEPTH - 1) / DEPTH;  // of the width, computed one after another
    int64_t panel_rows = 0;
    std::vector<Panel<T>> panels;

  public:
    Product(const regard_product &a, const regard_factor *factors) : a(a) {
        int64_t outs = 0;
        for (int64_t i = 0; i < a.factors; i++) outs += factors[i].outs;
        if (outs == 0) return;
        // As many panels as tasks are wanted, unless they would become thin or groups of strips are enough.
        const int64_t tile = outs_of((int)std::min<int64_t>(vectors_of(a.rows), WIDE));
        const int64_t groups = (a.rows + GROUP * STRIP - 1) / (GROUP * STRIP);
        const int64_t wanted = (TASKS * a.threads + groups - 1) / groups;
        const int64_t thinnest = groups == 1 ? tile : THIN;
        const int64_t most = std::max(PANEL * pieces / (4 * width), tile);
        const int64_t rows = std::min(most, std::max(thinnest, (outs + wanted - 1) / wanted));
        const int64_t count = (outs + rows - 1) / rows;
        panel_rows = ((outs + count - 1) / count + tile - 1) / tile * tile;
        for (int64_t i = 0; i < a.factors; i++)
            for (int64_t n = 0; n < factors[i].outs; n += panel_rows)
                panels.push_back({factors[i], n, std::min(panel_rows, factors[i].outs - n)});
    }

    void run() {
        const int64_t all = (a.rows + STRIP - 1) / STRIP;
        const int64_t at_once = std::min(all, std::max<int64_t>(TRANSPOSED / (4 * strip_size), 1));
        x_strips.reserve((size_t)(at_once * strip_size) * sizeof(float) + 64);
        float *x = x_strips.take<float>((size_t)(at_once * strip_size));
        for (int64_t first = 0; first < all; first += at_once) run(first, std::min(at_once, all - first), x);
        x_strips.keep(2 * TRANSPOSED);
    }

  private:
    // All panels times some strips. A task is a panel and a group of strips.
    void run(int64_t first, int64_t count, float *x) {
        const int64_t groups = (count + GROUP - 1) / GROUP, tasks = (int64_t)panels.size() * groups;
        std::atomic<int64_t> next{0};
        std::atomic<bool> failed{false};
        in_team(a.threads, [&] {
#pragma omp for schedule(static)
            for (int64_t i = 0; i < count * pieces; i++) {
                const int64_t d = width * (i % pieces) / pieces, end = width * (i % pieces + 1) / pieces;
                lay((first + i / pieces) * STRIP, d, end - d, x + i / pieces * strip_size);
            }
            try {
                const size_t sums_size = (size_t)(panel_rows * STRIP * std::min(count, GROUP));
                const size_t wide_size = IN_PLACE || few ? 0 : (size_t)(panel_rows * ((width + pieces - 1) / pieces));
                panel_bench.reserve((sums_size + wide_size) * sizeof(float) + 128);
                float *sums = panel_bench.take<float>(sums_size), *wide = panel_bench.take<float>(wide_size);
                for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
                    const int64_t begin = i % groups * GROUP, some = std::min(GROUP, count - begin);
                    task(panels[(size_t)(i / groups)], (first + begin) * STRIP, some, x + begin * strip_size, sums,
                         wide);
                }
            } catch (const std::bad_alloc &) {
                failed = true;
            }
            panel_bench.keep(KEPT);
        });
        if (failed) throw std::bad_alloc();
    }

    // A piece of a strip of x: transposed; or a few rows as they are, with zeros after them.
    void lay(int64_t row, int64_t d, int64_t deep, float *to) const {
        const int64_t rows = std::min<int64_t>(a.rows - row, STRIP);
        const T *from = (const T *)a.x + row * a.x_stride + d * TOGETHER<O>;
        if (!few) {
            return over_lanes<WIDE>(0, vectors_of(rows) * W, [&](int, auto nv) {
                constexpr int LANES_HERE = nv.value * W;
                float *at = to + d * LANES_HERE;
                if constexpr (std::is_same_v<O, Pair>)  // pairs are transposed like floats
                    rows_to_lanes<LANES_HERE>((const float *)from, a.x_stride / 2, rows, LANES_HERE, deep, at);
                else rows_to_lanes<LANES_HERE>(from, a.x_stride, rows, LANES_HERE, deep, at);
            });
        }
        for (int64_t m = 0; m < rows; m++) copy_row(from + m * a.x_stride, width, to + m * width);
        std::fill(to + rows * width, to + FEW_ROWS * width, 0.0f);
    }

    // A panel times `count` strips from `row` on. sums[strip][n][lane]; `wide`: memory for a piece of the panel.
    void task(const Panel<T> &panel, int64_t row, int64_t count, const float *x, float *sums, float *wide) const {
        const int64_t stride = panel.factor.weight_stride, outs = panel.outs;
        if (few) {
            if (a.rows == 1) dots<1>(panel.row(0), stride, outs, x, width, sums);
            else if (a.rows == 2) dots<2>(panel.row(0), stride, outs, x, width, sums);
            else dots<4>(panel.row(0), stride, outs, x, width, sums);
            return finish_rows(a.after, panel, row, a.rows, sums);
        }
        for (int64_t i = 0; i < pieces; i++) {
            const int64_t d = width * i / pieces, deep = width * (i + 1) / pieces - d;
            if constexpr (!IN_PLACE)
                for (int64_t n = 0; n < outs; n++) copy_row(panel.row(n) + d, deep, wide + n * deep);
            for (int64_t s = 0; s < count; s++) {
                const int64_t rows = std::min<int64_t>(a.rows - row - s * STRIP, STRIP);
                float *to = sums + s * panel_rows * STRIP;
                over_lanes<WIDE>(0, vectors_of(rows) * W, [&](int, auto nv) {
                    constexpr int NV = nv.value;
                    const O *y = (const O *)(x + s * strip_size) + d * NV * W;
                    if constexpr (!IN_PLACE) times_strip<NV, false>(wide, deep, outs, y, deep, i > 0, to, wide);
                    else {
                        const int64_t apart = stride / TOGETHER<O>;
                        const O *w = (const O *)panel.row(0) + d;
                        const O *next = i + 1 < pieces ? w + deep : (const O *)panel.row(outs);
                        if (s) times_strip<NV, false>(w, apart, outs, y, deep, i > 0, to, next);
                        else times_strip<NV, true>(w, apart, outs, y, deep, i > 0, to, next);
                    }
                });
                if (i + 1 == pieces) finish_rows(a.after, panel, row + s * STRIP, rows, to);
            }
        }
    }
};

}  // namespace REGARD_NAMESPACE
