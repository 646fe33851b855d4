// Distributes the units of a backward pass over threads. The partition depends only on the shapes and the number of
// threads, and sums are added in a fixed order, so the same call gives the same bits.
//
//     kv head    b * groups + group
//     step       one block of queries of one query head of a kv head: there are blocks * shared of them
//     part       every parts-th step of a kv head, so that expensive and cheap steps are balanced
//     unit       a part of a kv head: number kv_head * parts + part
#pragma once
#include "backward.h"
#include "schedule.h"

namespace REGARD_NAMESPACE {

// The calling thread's. (A variable template that is thread_local is not destroyed with its thread by GCC 12.)
template <class T>
Bench<T> &bench_of() {
    thread_local Bench<T> bench;
    return bench;
}

// T: the operands of the products.
template <class T>
class Backward {
    const regard_args &a;
    const regard_gradients &g;
    const Work work;
    BiasGradient bias;
    const int64_t kv_heads, shared;  // shared: query heads of a kv head
    const int64_t together;          // consecutive steps in the same part: those that share rows of the bias gradient
    const int64_t parts;
    const int64_t padded_k, padded_v;
    const int64_t dk_size, dv_size;  // of a unit's sums
    // If keys, values and their gradients do not fit in the L2 cache, `team` blocks share each chunk of keys.
    const int64_t team, chunk;
    Scratch partial;
    float *sums = nullptr;          // (kv_heads, parts, dk_size + dv_size), if a kv head has several parts
    std::vector<double> sink_sums;  // (batch * heads, blocks)

    int64_t steps() const { return work.blocks * shared; }

    // One part per kv head if there are enough of them; else several, whose sums take memory.
    int64_t count_parts() const {
        if (a.threads == 1 || kv_heads == 0 || kv_heads >= 4 * a.threads) return 1;
        return std::max<int64_t>(1, std::min(steps() / together, (4 * a.threads + kv_heads - 1) / kv_heads));
    }

    // The steps of a part, one team at a time.
    void take_steps(const Unit<T> &unit, int64_t kv_head, int64_t part) {
        Bench<T> &bench = bench_of<T>();
        const auto nth = [&](int64_t n) { return (part + n / together * parts) * together + n % together; };
        const int64_t count = (steps() / together - part + parts - 1) / parts * together;
        for (int64_t n = 0; n < count; n += team) {
            const int64_t some = std::min(team, count - n);
            for (int64_t m = 0; m < some; m++) {
                const int64_t number = nth(n + m) / shared, head = kv_head * shared + nth(n + m) % shared;
                if (head % shared == 0) bias.wait(number, kv_head);
                bench.team[m].upcoming = {};
                if (n + team + m < count) {
                    const int64_t after = nth(n + team + m);
                    bench.team[m].upcoming = work.block(kv_head * shared + after % shared, after / shared);
                }
                const double d_sink = open(a, g, work.block(head, number), bench.team[m], bench);
                if (g.d_sinks) sink_sums[(size_t)(head * work.blocks + number)] = d_sink;
            }
            for (int64_t j = 0; j < a.keys; j += chunk)
                for (int64_t m = 0; m < some; m++) advance(a, g, unit, bench.team[m], bias, bench, j, j + chunk);
            for (int64_t m = 0; m < some; m++) {
                close(a, g, bench.team[m], bench);
                if (nth(n + m) % shared == shared - 1) bias.pass(nth(n + m) / shared, kv_head);
            }
        }
    }

    void run_unit(int64_t number) {
        const int64_t kv_head = number / parts, item = kv_head / a.groups, group = kv_head % a.groups;
        Bench<T> &bench = bench_of<T>();
        float *const dk = parts == 1 ? bench.dk : sums + number * (dk_size + dv_size);
        float *const dv = parts == 1 ? bench.dv : dk + dk_size;
        const T *k = contiguous_rows(a, a.k, a.k_stride, a.width, item, group, bench.k);
        const T *v = contiguous_rows(a, a.v, a.v_stride, a.value_width, item, group, bench.v);
        const bool careful = any_mask(a) && !(finite(k, a.keys * operands<T>(a.width)) &&
                                              finite(v, a.keys * operands<T>(a.value_width)));
        std::memset(dk, 0, (size_t)dk_size * sizeof(float));
        std::memset(dv, 0, (size_t)dv_size * sizeof(float));
        const T *columns = as_columns(a, item, group, k, bench.k_columns);
        take_steps({number, k, v, columns, dk, dv, careful}, kv_head, number % parts);
        if (parts == 1) deliver(kv_head, dk, dv, 0, a.keys);
    }

    // Writes the rows [first, last) of the gradients of a kv head: the sum over its parts, the first of which is given.
    void deliver(int64_t kv_head, const float *dk, const float *dv, int64_t first, int64_t last) const {
        const auto rows = [&](const float *from, int64_t padded, int64_t width, float factor, auto *to,
                              const int64_t *stride) {
            auto *at = to + kv_head / a.groups * stride[0] + kv_head % a.groups * stride[1];
            for (int64_t j = first; j < last; j++) {
                for (int64_t x = 0; x < width; x += W) {
                    F sum = load(from + j * padded + x);
                    for (int64_t i = 1; i < parts; i++) sum += load(from + i * (dk_size + dv_size) + j * padded + x);
                    sum *= factor;
                    if (x + W <= width) store(at + j * stride[2] + x, sum);
                    else store_some(at + j * stride[2] + x, sum, width - x);
                }
            }
        };
        with_dtype(a.dtype, [&](auto number) {
            using N = decltype(number);
            if (g.d_k) rows(dk, padded_k, a.width, a.scale, (N *)g.d_k, g.d_k_stride);
            if (g.d_v) rows(dv, padded_v, a.value_width, a.drop_rows ? a.drop_kept : 1.0f, (N *)g.d_v, g.d_v_stride);
        });
    }

  public:
    Backward(const regard_args &a, const regard_gradients &g)
        : a(a), g(g), work(a), bias(a, g), kv_heads(a.batch * a.groups), shared(a.heads / a.groups),
          together(bias.whole_blocks() ? shared : 1), parts(count_parts()), padded_k(whole_vectors(a.width)),
          padded_v(whole_vectors(a.value_width)), dk_size(g.d_k ? a.keys * padded_k : 0),
          dv_size(g.d_v ? a.keys * padded_v : 0),
          team(a.keys * (padded_k + padded_v) * 2 * (int64_t)sizeof(float) > (1 << 20) ? BACKWARD_TEAM : 1),
          chunk(team > 1 ? KEYS : std::max<int64_t>(a.keys, 1)) {
        bias.prepare(kv_heads * parts, work.blocks);
        if (parts > 1) {
            const size_t floats = (size_t)(kv_heads * parts * (dk_size + dv_size));
            partial.reserve(floats * sizeof(float) + 64);
            sums = partial.take<float>(floats);
        }
        if (g.d_sinks) sink_sums.resize((size_t)(a.batch * a.heads * work.blocks));
    }

    void run() {
        std::atomic<int64_t> next{0};
        std::atomic<bool> failed{false};
        const bool copies_k = !in_place<T>(a, a.k, a.k_stride, a.width);
        const bool copies_v = !in_place<T>(a, a.v, a.v_stride, a.value_width);
        in_team(a.threads, [&] {
            FlushSubnormals flush;
            Bench<T> &bench = bench_of<T>();
            bool ready = true;
            try {
                bench.lay(a, team, copies_k, copies_v, parts == 1);
            } catch (const std::bad_alloc &) {
                ready = false;
                failed = true;
            }
            // A unit that has started must not fail: others may wait for its turn.
            for (int64_t i; ready && (i = next.fetch_add(1, std::memory_order_relaxed)) < kv_heads * parts;)
                run_unit(i);
            bench.scratch.keep(KEPT);
            if (parts > 1) {
                constexpr int64_t ROWS = 64;
                const int64_t runs = (a.keys + ROWS - 1) / ROWS;
#pragma omp barrier
#pragma omp for schedule(static)
                for (int64_t i = 0; i < kv_heads * runs; i++) {
                    const int64_t kv_head = i / runs, first = i % runs * ROWS;
                    const float *dk = sums + kv_head * parts * (dk_size + dv_size);
                    deliver(kv_head, dk, dk + dk_size, first, std::min(first + ROWS, a.keys));
                }
            }
        });
        if (failed) throw std::bad_alloc();
        bias.finish(parts);
        if (g.d_sinks) {
            for (int64_t head = 0; head < a.batch * a.heads; head++) {
                const double *from = sink_sums.data() + head * work.blocks;
                g.d_sinks[head] = (float)std::accumulate(from, from + work.blocks, 0.0);
            }
        }
    }
};

}  // namespace REGARD_NAMESPACE
