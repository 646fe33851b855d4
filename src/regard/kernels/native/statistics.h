// Statistics of the weights in the strip that the forward pass keeps: each weight is read once more, and not stored.
// Per row: sums in lanes. Per key: sums across lanes, W keys at a time. Per cell of the heatmap: sums over its keys in
// lanes, transposed to rows at the end of the block. `selected.h` has the statistics of single weights.
#pragma once
#include "selected.h"

namespace REGARD_NAMESPACE {

// Sums of one part of a head, laid out as [received (M) | offsets | heatmap (rows x cols)]. The parts of a head are
// added in order, so that results do not depend on the order of threads.
struct Part {
    float *received, *offsets, *heatmap;
};

inline bool looks(const regard_args &a) {
    return a.entropy || a.peak || a.target || a.distance || a.offset || a.on_first || a.received || a.offsets ||
           a.heatmap || selects(a);
}

inline int64_t part_size(const regard_args &a) {
    return (a.received ? a.keys : 0) + (a.offsets ? a.offsets_before + 1 + a.offsets_after : 0) +
           (a.heatmap ? a.heatmap_rows * a.heatmap_cols : 0);
}

// The first key of cell c of n keys: the smallest j with j * cells / n >= c.
inline int64_t first_of_cell(int64_t cell, int64_t cells, int64_t n) { return (cell * n + cells - 1) / cells; }

struct Moments {
    // Sums of weight * (j - i) and of weight * |j - i|. In double, because positions are thousands and weights small.
    // `mass` is the sum of the same weights, so that common rounding errors cancel in the quotient.
    alignas(64) double ahead[LANES], apart[LANES], mass[LANES];
    // Of the queries, and of the keys of a span, relative to the first query of the block.
    alignas(64) float position[LANES], key[KEYS];
};

// The cells of the heatmap for the keys of a span: `at` is the row of lanes of the first cell, `next` the key (counted
// from the first of the span) at which it ends.
struct Cells {
    float *at;
    int64_t number, next, cols, keys, first;

    void step() {
        at += LANES;
        number++;
        next = first_of_cell(number + 1, cols, keys) - first;
    }
};

// How the keys of a span lie to the queries of its block.
enum class Side { BEFORE, AFTER, ACROSS, ANYWHERE };  // ANYWHERE: positions are not contiguous

// The weights of one span, NV vectors of lanes: with `Across` sums over the lanes for each key, and with `Down` sums
// over the keys for each cell.
template <int NV, bool Across, bool Down>
void sum_strip(const float *p, int64_t keys, const float *factor, int lane, F *across, bool first, Cells cells) {
    F f[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) f[v] = load(factor + lane + v * W);
    for (int64_t j = 0; j < keys;) {
        const int64_t stop = Down ? std::min(cells.next, keys) : keys;
        F cell[NV] = {};
        for (; j < stop; j++) {
            F together = first || !Across ? F{} : across[j];
#pragma GCC unroll 4
            for (int v = 0; v < NV; v++) {
                const F x = load(p + j * LANES + lane + v * W);
                if (Across) together += x * f[v];
                if (Down) cell[v] += x;
            }
            if (Across) across[j] = together;
        }
        if (!Down) continue;
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) {
            float *to = cells.at + lane + v * W;
            store(to, load(to) + cell[v] * f[v]);
        }
        cells.step();
    }
}

// Sums of weight * (j - i) and of weight * |j - i| over the keys of a span whose positions are in `moments.key`.
template <int NV>
void gaps_strip(const float *p, int64_t keys, int lane, const Moments &moments, float *ahead, float *apart) {
    F along[NV] = {}, distance[NV] = {}, position[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) position[v] = load(moments.position + lane + v * W);
    for (int64_t j = 0; j < keys; j++) {
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) {
            const F gap = moments.key[j] - position[v], x = load(p + j * LANES + lane + v * W);
            along[v] += x * gap;
            distance[v] += x * choose(gap < 0.0f, -gap, gap);
        }
    }
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) store(ahead + lane + v * W, along[v]), store(apart + lane + v * W, distance[v]);
}

// Adds the keys of a span to the moments. `factor`: of its weights.
inline void add_moments(const Seen &seen, const float *factor, Side side, Moments &moments) {
    const SpanSums &sums = seen.sums;
    alignas(64) float ahead[LANES] = {}, apart[LANES] = {};
    if (side == Side::ACROSS || side == Side::ANYWHERE)
        over_lanes(seen.span.lane, seen.span.lanes_end, [&](int lane, auto nv) {
            gaps_strip<nv.value>(seen.weights, seen.span.last - seen.span.first, lane, moments, ahead, apart);
        });
    const float sign = side == Side::BEFORE ? -1.0f : 1.0f;
    for (int i = 0; i < LANES; i++) {
        // Contiguous keys: the mean of their numbers within the span is enough.
        const float along =
            side == Side::ANYWHERE ? ahead[i] : sums.slope[i] + sums.total[i] * (moments.key[0] - moments.position[i]);
        const float distance = side == Side::BEFORE || side == Side::AFTER ? sign * along : apart[i];
        moments.ahead[i] += (double)(along * factor[i]);
        moments.apart[i] += (double)(distance * factor[i]);
        moments.mass[i] += (double)(sums.total[i] * factor[i]);
    }
}

// Positions of the keys of a span, and how they lie to the queries of the block. Where all lie on one side, the first
// is enough.
inline Side place_keys(const regard_args &a, const Block &block, const Span &span, Moments &moments) {
    const int64_t *positions = a.k_positions;
    if (!positions) {
        const int64_t origin = a.q_start + block.row;
        moments.key[0] = (float)(span.first - origin);
        if (span.last - 1 <= origin) return Side::BEFORE;
        if (span.first >= origin + block.rows - 1) return Side::AFTER;
        for (int64_t j = span.first; j < span.last; j++) moments.key[j - span.first] = (float)(j - origin);
        return Side::ACROSS;
    }
    const int64_t origin = a.q_positions[block.item * a.q_positions_stride + block.row];
    positions += block.item * a.k_positions_stride;
    for (int64_t j = span.first; j < span.last; j++) moments.key[j - span.first] = (float)(positions[j] - origin);
    return Side::ANYWHERE;
}

inline void place_queries(const regard_args &a, const Block &block, Moments &moments) {
    const int64_t *positions = a.q_positions ? a.q_positions + block.item * a.q_positions_stride + block.row : nullptr;
    for (int i = 0; i < LANES; i++) {
        moments.ahead[i] = moments.apart[i] = moments.mass[i] = 0.0;
        moments.position[i] = !positions ? (float)i : i < block.rows ? (float)(positions[i] - positions[0]) : 0.0f;
    }
}

// to[j] += the sum of across[j], W keys at a time.
inline void add_across(F *across, int64_t keys, float *to) {
    for (int64_t j = keys; j < keys + W; j++) across[j] = F{};
    for (int64_t j = 0; j < keys; j += W) {
        F some[W];
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) some[i] = across[j + i];
        const F s = sums(some);
        if (j + W <= keys) {
            store(to + j, load(to + j) + s);
        } else {
            for (int i = 0; j + i < keys; i++) to[j + i] += s[i];
        }
    }
}

// The statistics of each row. Each has a loop of its own, over all lanes, so that it is done in vectors.
inline void write_rows(const regard_args &a, const Block &block, const Desk &desk, const Moments &moments,
                       const float *on_first) {
    const AllowSubnormals allow;
    const Rows &rows = desk.rows;
    const int64_t at = (block.item * a.heads + block.head) * a.queries + block.row;
    alignas(64) float result[LANES];
    bool empty[LANES];
    for (int i = 0; i < LANES; i++) empty[i] = rows.total[i] == 0.0f || desk.factor[i] == 0.0f;
    const auto write = [&](float *to, auto value) {
        if (!to) return;
        for (int i = 0; i < LANES; i++) result[i] = empty[i] ? 0.0f : (float)value(i);
        std::memcpy(to + at, result, (size_t)block.rows * sizeof(float));
    };
    // `factor` includes the sink in the denominator: the mass of a row is then below 1.
    write(a.entropy, [&](int i) {
        const double factor = desk.factor[i], mass = rows.total[i] * factor, logs = rows.logs[i] * factor;
        return mass * desk.log[i] - logs * 0.6931471805599453;
    });
    write(a.peak, [&](int i) { return desk.factor[i]; });
    write(a.distance, [&](int i) { return moments.apart[i] / moments.mass[i]; });
    write(a.offset, [&](int i) { return moments.ahead[i] / moments.mass[i]; });
    if (a.on_first) std::memcpy(a.on_first + at, on_first, (size_t)block.rows * sizeof(float));
    if (a.target)
        for (int i = 0; i < block.rows; i++) a.target[at + i] = empty[i] ? -1 : rows.at[i];
}

inline void look(const regard_args &a, const Block &block, Desk &desk, const Part &part, float *cells) {
    const Rows &rows = desk.rows;
    const int64_t first_position = a.q_start + block.row;
    Moments moments;
    place_queries(a, block, moments);
    alignas(64) float counted[LANES];  // 0 for queries that are left out of sums over queries
    for (int i = 0; i < LANES; i++) {
        const bool left_out = a.uncounted && i < block.rows && a.uncounted[block.item * a.queries + block.row + i];
        counted[i] = left_out ? 0.0f : 1.0f;
    }
    desk.factors.resize(selects(a) ? desk.seen.size() * LANES : 0);
    // Moments are quotients, so if a sink leaves almost no weight for the keys, a larger factor avoids subnormals.
    alignas(64) float shown[LANES];
    {
        const AllowSubnormals allow;
        for (int i = 0; i < LANES; i++) shown[i] = desk.factor[i] == 0.0f ? 0.0f : std::max(desk.factor[i], 0x1p-100f);
    }
    alignas(64) float on_first[LANES] = {};
    if (part.offsets) desk.near.assign(a.offsets_before + 1 + a.offsets_after, 0.0f);
    int64_t cell_begin = 0, cell_end = 0;  // the cells of the heatmap in this block
    for (const Seen &seen : desk.seen) {
        const Span &span = seen.span;
        // Weights are relative to the base of their span; the factor makes them relative to the last base and total.
        alignas(64) float factor[LANES];
        for (int lane = 0; lane < LANES; lane += W) {
            // (Bases only increase, except from 0 of a row without visible keys, whose weights are 0.)
            const F fall = (load(seen.sums.base + lane) - load(rows.base + lane)) * desk.exponent;
            store(factor + lane, exp2(choose(fall > 0.0f, F{}, fall)) * load(shown + lane));
        }
        for (int i = block.rows; i < LANES; i++) factor[i] = 0.0f;
        if (selects(a)) std::memcpy(desk.factors.data() + (&seen - desk.seen.data()) * LANES, factor, sizeof factor);
        const float *p = seen.weights;
        if (span.first == 0)
            for (int i = span.lane; i < span.lanes_end; i++) on_first[i] = p[i] * factor[i];

        const int64_t keys = span.last - span.first;
        Cells cells_here{};
        if (a.heatmap) {
            const int64_t number = span.first * a.heatmap_cols / a.keys;
            const int64_t last = (span.last - 1) * a.heatmap_cols / a.keys;
            if (cell_end == 0) cell_begin = cell_end = number;
            for (; cell_end <= last; cell_end++)
                std::memset(cells + (cell_end - cell_begin) * LANES, 0, LANES * sizeof(float));
            cells_here = {cells + (number - cell_begin - 1) * LANES, number - 1, 0, a.heatmap_cols, a.keys, span.first};
            cells_here.step();
        }
        if (a.distance || a.offset) add_moments(seen, factor, place_keys(a, block, span, moments), moments);
        alignas(64) float of_counted[LANES];
        for (int i = 0; i < LANES; i++) of_counted[i] = factor[i] * counted[i];
        if (part.received || part.heatmap) {
            const auto strip = [&](auto nv) {
                if (!part.heatmap) return sum_strip<nv.value, true, false>;
                return part.received ? sum_strip<nv.value, true, true> : sum_strip<nv.value, false, true>;
            };
            F across[KEYS + W];
            bool first = true;
            over_lanes(span.lane, span.lanes_end, [&](int lane, auto nv) {
                strip(nv)(p, keys, of_counted, lane, across, first, cells_here);
                first = false;
            });
            if (part.received) add_across(across, keys, part.received + span.first);
        }
        if (part.offsets) {
            // The lanes within the range of offsets of key j are contiguous; their offsets decrease.
            const int64_t low = std::max(span.first, first_position - a.offsets_before);
            const int64_t high = std::min(span.last, first_position + block.rows + a.offsets_after);
            for (int64_t j = low; j < high; j++) {
                const int64_t origin = j - first_position - a.offsets_after;
                const int64_t from = std::max<int64_t>(origin, span.lane);
                const int64_t to =
                    std::min<int64_t>(j - first_position + a.offsets_before + 1, std::min(span.lanes_end, block.rows));
                const float *weights = p + (j - span.first) * LANES;
                float *near = desk.near.data() - origin;
                for (int64_t i = from; i < to; i++) near[i] += weights[i] * of_counted[i];
            }
        }
    }
    if (part.offsets) {
        const int64_t count = (int64_t)desk.near.size();
        for (int64_t x = 0; x < count; x++) part.offsets[x] += desk.near[count - 1 - x];
    }
    if (part.heatmap && cell_end > cell_begin) {
        alignas(64) float ones[LANES];
        for (float &x : ones) x = 1.0f;
        // Several lanes may share a row of cells: lanes are added one by one.
        float turned[LANES * 64];
        for (int64_t c = cell_begin; c < cell_end; c += 64) {
            const int64_t some = std::min<int64_t>(64, cell_end - c);
            lanes_to_rows(cells + (c - cell_begin) * LANES, block.rows, some, ones, turned, 64);
            for (int i = 0; i < block.rows; i++) {
                float *to = part.heatmap + (block.row + i) * a.heatmap_rows / a.queries * a.heatmap_cols + c;
                for (int64_t x = 0; x < some; x++) to[x] += turned[i * 64 + x];
            }
        }
    }
    if (selects(a)) select(a, block, desk);
    write_rows(a, block, desk, moments, on_first);
}

}  // namespace REGARD_NAMESPACE
