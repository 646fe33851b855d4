// The gradient of a bias. Heads may share a plane (N x M) in memory (a bias broadcast over heads or the batch), and
// pairs within a plane may share an element (broadcast over queries or keys; a Toeplitz view, whose rows overlap). The
// sums must not depend on the order of threads, and there is no memory for copies of an N x M plane. So
//
//   - dense: if each pair has its own element, gradients are added in place. Heads that share a plane add to each block
//     of rows in the order of heads, each waiting for the one before it. All heads go through the blocks in the same
//     order, so there is no waiting after the first few steps.
//   - thin: if pairs share elements, there are only O(N + M) elements. Each unit of work has its own plane, and these
//     are added at the end.
#pragma once
#include <atomic>
#include <numeric>
#include <thread>
#include <vector>

#include "layout.h"
#include "visibility.h"

namespace REGARD_NAMESPACE {

// to[i * row_stride + j * key_stride] += ds[j][i] for the rows i of a block in the lanes [first, lanes_end), and all
// keys. Pairs that share an element are first added to each other, which is faster and more accurate. (Lanes beyond the
// rows are zero.)
inline void add_block(const float *ds, int64_t keys, int first, int lanes_end, int rows, float *to, int64_t row_stride,
                      int64_t key_stride) {
    const int last = std::min(lanes_end, rows);
    if (key_stride == 0) {
        alignas(64) float sum[LANES] = {};
        for (int64_t j = 0; j < keys; j++)
            for (int i = first; i < last; i++) sum[i] += ds[j * LANES + i];
        for (int i = first; i < last; i++) to[i * row_stride] += sum[i];
    } else if (row_stride == 0) {
        for (int64_t j = 0; j < keys; j += W) {
            const int64_t some = std::min<int64_t>(W, keys - j);
            F across[W] = {};
            for (int64_t x = 0; x < some; x++)
                for (int lane = first; lane < lanes_end; lane += W) across[x] += load(ds + (j + x) * LANES + lane);
            const F sum = sums(across);
            for (int64_t x = 0; x < some; x++) to[(j + x) * key_stride] += sum[x];
        }
    } else if (key_stride == 1) {
        int i = first;
        for (; i + W <= last; i += W) {
            int64_t j = 0;
            for (; j + W <= keys; j += W) {
                F block[W];
#pragma GCC unroll 16
                for (int x = 0; x < W; x++) block[x] = load(ds + (j + x) * LANES + i);
                transpose(block);
#pragma GCC unroll 16
                for (int x = 0; x < W; x++) {
                    float *at = to + (i + x) * row_stride + j;
                    store(at, load(at) + block[x]);
                }
            }
            for (; j < keys; j++)
                for (int x = i; x < i + W; x++) to[x * row_stride + j] += ds[j * LANES + x];
        }
        for (; i < last; i++)
            for (int64_t j = 0; j < keys; j++) to[i * row_stride + j] += ds[j * LANES + i];
    } else {
        for (int64_t j = 0; j < keys; j++)
            for (int i = first; i < last; i++) to[i * row_stride + j * key_stride] += ds[j * LANES + i];
    }
}

class BiasGradient {
    const regard_args &a;
    const regard_gradients &g;
    int64_t row = 0, key = 0;  // strides within a plane; for a thin one in units of `step`
    int64_t step = 1;          // of a thin plane: greatest common divisor of its strides
    int64_t size = 0;          // elements of a thin plane; 0: dense
    int64_t origin = 0;        // the element of the first pair
    int64_t heads = 1;         // thin planes per unit
    bool turns = false;
    std::vector<float> planes;                // (units, heads, size)
    std::vector<std::atomic<int64_t>> added;  // per block of rows: how many kv heads have added to it

  public:
    const bool wanted;

    BiasGradient(const regard_args &a, const regard_gradients &g)
        : a(a), g(g), wanted(g.d_bias && a.bias && a.queries > 0 && a.keys > 0) {
        if (!wanted) return;
        const int64_t *stride = g.d_bias_stride;
        row = a.queries > 1 ? stride[2] : 0;
        key = a.keys > 1 ? stride[3] : 0;
        const bool dense =
            row != 0 && key != 0 &&
            (std::abs(row) > std::abs(key) * (a.keys - 1) || std::abs(key) > std::abs(row) * (a.queries - 1));
        if (dense) {
            turns = (stride[0] == 0 && a.batch > 1) || (stride[1] == 0 && a.groups > 1);
            return;
        }
        step = std::max<int64_t>(std::gcd(row, key), 1);
        row /= step;
        key /= step;
        size = std::abs(row) * (a.queries - 1) + std::abs(key) * (a.keys - 1) + 1;
        origin = (row < 0 ? -row * (a.queries - 1) : 0) + (key < 0 ? -key * (a.keys - 1) : 0);
        heads = stride[1] == 0 ? 1 : a.heads / a.groups;
    }

    // Whether a block of rows must belong to one unit for all query heads of a kv head: they share its memory, or wait
    // for their turn together.
    bool whole_blocks() const { return wanted && size == 0 && (turns || g.d_bias_stride[1] == 0); }

    void prepare(int64_t units, int64_t blocks) {
        if (!wanted) return;
        if (size) planes.assign((size_t)(units * heads * size), 0.0f);
        if (turns) added = std::vector<std::atomic<int64_t>>((size_t)blocks);
    }

    // Wait for the turn of a kv head at a block of rows, and end it. Units start in the order of kv heads, so the one
    // that is waited for is running or done.
    void wait(int64_t block, int64_t kv_head) {
        if (!turns) return;
        while (added[(size_t)block].load(std::memory_order_acquire) != kv_head) std::this_thread::yield();
    }
    void pass(int64_t block, int64_t kv_head) {
        if (turns) added[(size_t)block].store(kv_head + 1, std::memory_order_release);
    }

    void add(const Block &block, int64_t unit, const Span &span, const float *ds) {
        float *to;
        if (size) {
            const int64_t head = heads == 1 ? 0 : block.head % heads;
            to = planes.data() + (unit * heads + head) * size + origin;
        } else {
            to = g.d_bias + block.item * g.d_bias_stride[0] + block.head * g.d_bias_stride[1];
        }
        add_block(ds, span.last - span.first, span.lane, span.lanes_end, block.rows,
                  to + block.row * row + span.first * key, row, key);
    }

    // Adds the thin planes to the gradient, unit by unit. (Elements without a contribution may be outside of the view.)
    void finish(int64_t parts) {
        if (!wanted || !size) return;
        const int64_t units = (int64_t)planes.size() / (heads * size);
        for (int64_t i = 0; i < units * heads; i++) {
            const int64_t kv_head = i / heads / parts, item = kv_head / a.groups, group = kv_head % a.groups;
            const int64_t head = group * (a.heads / a.groups) + i % heads;
            float *to = g.d_bias + item * g.d_bias_stride[0] + head * g.d_bias_stride[1] - origin * step;
            const float *from = planes.data() + i * size;
            for (int64_t x = 0; x < size; x++)
                if (from[x] != 0.0f) to[x * step] += from[x];
        }
    }
};

}  // namespace REGARD_NAMESPACE
