// Projections: out = after(x W^T + bias), with the weight as it lies in memory (out, in).
//
// As in attention (micro.h), rows of x lie along the lanes: x is transposed once, in strips of STRIP rows, and the
// numbers of the weight are broadcast, so it is neither packed nor transposed. A panel of it stays in the L2 cache
// while the strips are multiplied by it. Up to four rows are dot products instead, limited by memory. 16-bit weights
// are widened panel by panel. A row's result depends neither on the number of threads nor, from five rows on, on the
// others.
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
constexpr int64_t PANEL = 256 << 10;     // bytes of a panel, in float32
constexpr int64_t TRANSPOSED = 8 << 20;  // bytes of x that are transposed at once
constexpr int64_t TASKS = 3;             // panels per thread, at least
constexpr int64_t STRIPS_OF_A_TASK = 4;  // at least

// Some rows of one of the weights.
template <class T>
struct Panel {
    const regard_factor &factor;
    int64_t first, outs;
    const T *row(int64_t n) const { return (const T *)factor.weight + (first + n) * factor.weight_stride; }
};

// Bias, what follows, and back to rows: out[row + lane][n] from sums[n][lane].
template <class T>
void finish_rows(int32_t after, const Panel<T> &panel, int64_t row, int64_t rows, const float *sums) {
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
            for (int i = 0; i < W; i++) block[i] = i < some ? load(sums + (n + i) * STRIP + lane) : F{};
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
thread_local Scratch panel_bench;  // of each thread: the sums of a panel with a strip, and a panel in float32

template <class T>
class Product {
    static constexpr bool IN_PLACE = std::is_same_v<T, float>;
    const regard_product &a;
    const bool few = a.rows <= FEW_ROWS;
    const int64_t width = a.width, strip_size = few ? FEW_ROWS * width : STRIP * width;
    std::vector<Panel<T>> panels;
    int64_t panel_rows;

  public:
    Product(const regard_product &a, const regard_factor *factors) : a(a) {
        int64_t outs = 0;
        for (int64_t i = 0; i < a.factors; i++) outs += factors[i].outs;
        const int64_t tile = rows_of((int)std::min<int64_t>((a.rows + W - 1) / W, VECTORS));
        const int64_t wanted = std::min(PANEL / (4 * width), outs / (TASKS * a.threads));
        panel_rows = std::max<int64_t>(wanted / tile, 1) * tile;
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
        const int64_t enough = 8 * TASKS * a.threads / (int64_t)panels.size();
        const int64_t groups = std::max<int64_t>(1, std::min(enough, count / STRIPS_OF_A_TASK));
        std::atomic<int64_t> next{0};
        std::atomic<bool> failed{false};
        in_team(a.threads, [&] {
#pragma omp for schedule(static)
            for (int64_t i = 0; i < count; i++) lay((first + i) * STRIP, x + i * strip_size);
            try {
                const bool widen = !IN_PLACE && !few;
                const size_t sums_size = (size_t)(panel_rows * STRIP);
                const size_t wide_size = widen ? (size_t)(panel_rows * width) : 0;
                panel_bench.reserve((sums_size + wide_size) * sizeof(float) + 128);
                float *sums = panel_bench.take<float>(sums_size), *wide = panel_bench.take<float>(wide_size);
                const Panel<T> *widened = nullptr;
                for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < (int64_t)panels.size() * groups;) {
                    const Panel<T> &panel = panels[(size_t)(i / groups)];
                    if (widen && widened != &panel) {
                        for (int64_t n = 0; n < panel.outs; n++) copy_row(panel.row(n), width, wide + n * width);
                        widened = &panel;
                    }
                    const int64_t begin = count * (i % groups) / groups, end = count * (i % groups + 1) / groups;
                    for (int64_t s = begin; s < end; s++) {
                        const int64_t row = (first + s) * STRIP, rows = std::min<int64_t>(a.rows - row, STRIP);
                        multiply(panel, wide, rows, x + s * strip_size, s == begin, sums);
                        finish_rows(a.after, panel, row, rows, sums);
                    }
                }
            } catch (const std::bad_alloc &) {
                failed = true;
            }
            panel_bench.keep(KEPT);
        });
        if (failed) throw std::bad_alloc();
    }

    // A strip of x: transposed; or a few rows as they are, with zeros after them.
    void lay(int64_t row, float *to) const {
        const int64_t rows = std::min<int64_t>(a.rows - row, STRIP);
        const T *from = (const T *)a.x + row * a.x_stride;
        if (!few) return rows_to_lanes<STRIP>(from, a.x_stride, rows, (int)((rows + W - 1) / W * W), width, to);
        for (int64_t m = 0; m < rows; m++) copy_row(from + m * a.x_stride, width, to + m * width);
        std::fill(to + rows * width, to + FEW_ROWS * width, 0.0f);
    }

    // sums[n][lane]; the first strip of a panel finds it outside of the caches.
    void multiply(const Panel<T> &panel, const float *wide, int64_t rows, const float *x, bool first,
                  float *sums) const {
        const int64_t stride = panel.factor.weight_stride, outs = panel.outs;
        if (few) {
            if (rows == 1) dots<1>(panel.row(0), stride, outs, x, width, sums);
            else if (rows == 2) dots<2>(panel.row(0), stride, outs, x, width, sums);
            else dots<4>(panel.row(0), stride, outs, x, width, sums);
            return;
        }
        over_lanes(0, (int)((rows + W - 1) / W * W), [&](int lane, auto nv) {
            constexpr int NV = nv.value;
            if constexpr (!IN_PLACE) times_strip<NV, false>(wide, width, outs, x + lane, width, sums + lane);
            else if (first) times_strip<NV, true>(panel.row(0), stride, outs, x + lane, width, sums + lane);
            else times_strip<NV, false>(panel.row(0), stride, outs, x + lane, width, sums + lane);
        });
    }
};

}  // namespace REGARD_NAMESPACE
