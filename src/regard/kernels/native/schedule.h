// Distributes the blocks of a call over threads.
#pragma once
#include <atomic>

#include "statistics.h"
#include "team.h"

namespace REGARD_NAMESPACE {

// Queries per block: LANES, or fewer if there would not be enough blocks for all threads.
inline int rows_per_block(const regard_args &a) {
    int rows = LANES;
    while (rows > COLUMN && a.batch * a.heads * ((a.queries + rows - 1) / rows) < 3 * a.threads) rows /= 2;
    return rows;
}

struct Work {
    const regard_args &a;  // (a reference that outlives this)
    int rows;              // of a block
    int64_t blocks;        // of a head
    explicit Work(const regard_args &a) : a(a), rows(rows_per_block(a)), blocks((a.queries + rows - 1) / rows) {}

    // The last rows first: with a causal mask they are the most expensive; cheap ones at the end balance the load.
    Block block(int64_t head, int64_t number) const {
        Block b;
        b.item = head / a.heads;
        b.head = head % a.heads;
        b.group = b.head / (a.heads / a.groups);
        b.row = (blocks - 1 - number) * rows;
        b.rows = (int)std::min<int64_t>(rows, a.queries - b.row);
        b.lanes = (b.rows + COLUMN - 1) / COLUMN * COLUMN;
        return b;
    }
};

constexpr int TEAM = 4;
constexpr int64_t STRIPS = 4 << 20;  // bytes of strips that a thread keeps
thread_local Desk team[TEAM];
inline void keep_desks() {
    for (Desk &desk : team) desk.keep(KEPT);
}
thread_local Scratch packed, part_sums;  // of the calling thread

// Copies keys or values once for all blocks of queries: contiguous, even if their strides are those of (B, N, H, D),
// and of type T. copy(rows, j, to) writes row j.
template <class T, class From, class Copy>
const T *pack(const regard_args &a, const From *from, int64_t (&stride)[3], int64_t rows, int64_t width, Copy copy) {
    T *to = packed.take<T>((size_t)(a.batch * a.groups * rows * width));
    constexpr int64_t RUN = 128;
    const int64_t runs = (rows + RUN - 1) / RUN;
    // A small copy is faster than waking other threads.
    const int64_t bytes = a.batch * a.groups * rows * width * (int64_t)sizeof(T);
    const int threads = (int)std::min<int64_t>(a.threads, 1 + bytes / (512 << 10));
    in_team(threads, [&] {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < a.batch * a.groups * runs; i++) {
            const int64_t head = i / runs, row = i % runs * RUN;
            const From *here = from + head / a.groups * stride[0] + head % a.groups * stride[1];
            for (int64_t j = row; j < std::min(row + RUN, rows); j++) copy(here, j, to + (head * rows + j) * width);
        }
    });
    stride[0] = a.groups * rows * width;
    stride[1] = rows * width;
    stride[2] = width;
    return to;
}

// The blocks of a team.
struct Blocks {
    Block block[TEAM];
    int64_t count = 0;
};

// A team of blocks goes through the keys chunk by chunk, so that all but the first read a chunk from the L2 cache.
// `next`: the team after it, as far as is known.
template <bool Look, class T>
void go_through(const regard_args &a, const Blocks &now, const Blocks &next) {
    const Block *blocks = now.block;
    const int64_t count = now.count;
    for (int64_t m = 0; m < count; m++) {
        start<T>(a, blocks[m], team[m]);
        team[m].upcoming = m < next.count ? next.block + m : nullptr;
    }
    const int64_t step = count == 1 ? a.keys : CHUNK;
    for (int64_t j = 0; j < a.keys; j += step)
        for (int64_t m = 0; m < count; m++) advance<Look, T>(a, blocks[m], team[m], false, j, j + step);
    for (int64_t m = 0; m < count; m++) finish<Look, T>(a, blocks[m], team[m]);
}

// The number of blocks in a team: 1, unless the keys and values of a head do not fit in the L2 cache.
template <class T>
int64_t team_size(const Work &work) {
    const regard_args &a = work.a;
    const int64_t number = PARTS<T> * (int64_t)sizeof(T) / TOGETHER<T>;  // bytes
    const bool large = a.keys * (a.width + a.value_width) * number > (1 << 20);
    return large && a.batch * a.heads * work.blocks >= 4 * TEAM * a.threads ? TEAM : 1;
}

template <class T>
void plain(const Work &work) {
    const regard_args &a = work.a;
    const int64_t heads = a.batch * a.heads, size = team_size<T>(work);
    const int64_t teams = (work.blocks + size - 1) / size;
    const auto blocks_of = [&](int64_t i) {
        Blocks blocks;
        for (int64_t n = i % teams * size; i < heads * teams && blocks.count < size && n < work.blocks; n++)
            blocks.block[blocks.count++] = work.block(i / teams, n);
        return blocks;
    };
    std::atomic<int64_t> next{0};
    std::atomic<bool> failed{false};
    in_team(a.threads, [&] {
        const FlushSubnormals flush;
        const Operate<T> tiles;
        try {
            for (int m = 0; m < size; m++) {
                team[m].lay<T>(a, false, 0);
                team[m].s = team[0].s;  // buffers for one span are shared
            }
            Blocks later;
            int64_t guess = -1;  // the team that this thread is likely to take after this one, whose blocks are `later`
            for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < heads * teams;) {
                const Blocks now = i == guess ? later : blocks_of(i);
                guess = i + a.threads;
                later = blocks_of(guess);
                go_through<false, T>(a, now, later);
            }
        } catch (const std::bad_alloc &) {
            failed = true;
        }
        keep_desks();
    });
    if (failed) throw std::bad_alloc();
}

// The parts of a head depend only on the shapes and the number of threads, not on which thread computes which.
template <class T>
void looking(const Work &work) {
    const regard_args &a = work.a;
    const int64_t heads = a.batch * a.heads;
    const int64_t parts = std::max<int64_t>(1, std::min(work.blocks, (8 * a.threads + heads - 1) / heads));
    const int64_t sums_size = part_size(a), offsets = a.offsets_before + 1 + a.offsets_after;
    // Each block of a team keeps a strip of its weights: only as many as fit in the caches.
    const int64_t strip = a.keys * LANES * (int64_t)sizeof(float);
    const int64_t size = std::max<int64_t>(1, std::min(team_size<T>(work), STRIPS / strip));
    part_sums.reserve((size_t)(heads * parts * sums_size) * sizeof(float) + 64);
    float *sums = part_sums.take<float>((size_t)(heads * parts * sums_size));
    const auto part_at = [&](int64_t number) {
        float *p = sums + number * sums_size;
        Part part{};
        if (a.received) part.received = p, p += a.keys;
        if (a.offsets) part.offsets = p, p += offsets;
        if (a.heatmap) part.heatmap = p;
        return part;
    };
    std::atomic<int64_t> next{0};
    std::atomic<bool> failed{false};
#pragma omp parallel num_threads(a.threads)
    {
        const FlushSubnormals flush;
        const Operate<T> tiles;
        try {
            const size_t cells = a.heatmap ? (size_t)a.heatmap_cols * LANES : 0;
            float *cell = nullptr;
            for (int64_t m = 0; m < size; m++) {
                team[m].lay<T>(a, true, m == 0 ? cells : 0);
                if (m == 0) cell = team[m].scratch.take<float>(cells);
            }
            for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < heads * parts;) {
                const Part part = part_at(i);
                std::memset(sums + i * sums_size, 0, (size_t)sums_size * sizeof(float));
                // Every parts-th block, so that expensive and cheap ones are balanced.
                const auto blocks_from = [&](int64_t first) {
                    Blocks blocks;
                    for (int64_t b = first; blocks.count < size && b < work.blocks; b += parts)
                        blocks.block[blocks.count++] = work.block(i / parts, b);
                    return blocks;
                };
                for (int64_t b = i % parts; b < work.blocks; b += parts * size) {
                    const Blocks blocks = blocks_from(b);
                    go_through<true, T>(a, blocks, blocks_from(b + parts * size));
                    for (int64_t m = 0; m < blocks.count; m++) look(a, blocks.block[m], team[m], part, cell);
                }
            }
        } catch (const std::bad_alloc &) {
            failed = true;
        }
        keep_desks();
#pragma omp barrier
#pragma omp for schedule(static)
        for (int64_t head = 0; head < heads; head++) {
            const auto add = [&](float *to, float *Part::*which, int64_t count) {
                if (!to) return;
                to += head * count;
                std::memcpy(to, part_at(head * parts).*which, (size_t)count * sizeof(float));
                for (int64_t i = 1; i < parts; i++) {
                    const float *more = part_at(head * parts + i).*which;
                    for (int64_t x = 0; x < count; x++) to[x] += more[x];
                }
            };
            add(a.received, &Part::received, a.keys);
            add(a.offsets, &Part::offsets, offsets);
            add(a.heatmap, &Part::heatmap, a.heatmap_rows * a.heatmap_cols);
        }
    }
    if (failed) throw std::bad_alloc();
}

}  // namespace REGARD_NAMESPACE
