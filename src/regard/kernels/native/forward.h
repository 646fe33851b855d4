// One block of queries against all keys that it may see.
#pragma once
#include <cstdlib>
#include <new>
#include <vector>

#include "layout.h"
#include "softmax.h"
#include "visibility.h"

namespace REGARD_NAMESPACE {

// Memory that a thread keeps from call to call, cut up anew for each.
class Scratch {
    char *memory = nullptr;
    size_t size = 0, used = 0;

  public:
    ~Scratch() { std::free(memory); }
    void reserve(size_t bytes) {
        used = 0;
        if (bytes <= size) return;
        std::free(memory);
        size = 0;
        memory = static_cast<char *>(std::aligned_alloc(64, (bytes + 4095) / 4096 * 4096));
        if (!memory) throw std::bad_alloc();
        size = bytes;
    }
    template <class T>
    T *take(size_t count) {
        T *p = reinterpret_cast<T *>(memory + used);
        used += (count * sizeof(T) + 63) / 64 * 64;
        return p;
    }
};

// A span that has been computed, for those who look at the weights afterwards.
struct Seen {
    Span span;
    const float *weights;             // (keys, LANES), relative to `base`
    alignas(64) float base[LANES];
};

// What one thread works with.
struct Desk {
    Scratch scratch;
    float *q, *o, *s, *kept, *bias, *keys, *values, *strip;
    uint8_t *pairs;
    Rows rows;
    std::vector<Seen> seen;
    std::vector<float> near;  // weights by offset, the largest first
    float exponent = LOG2_E;  // what scores are multiplied by in the exponent, base 2
    alignas(64) int32_t drop_row[LANES];
    alignas(64) float factor[LANES];  // of the weights: 1 / total
    alignas(64) float log[LANES];     // ln of total: minus ln of factor

    void lay(const regard_args &a, bool looking, size_t more) {
        const size_t block = KEYS * LANES, strip = looking ? (size_t)a.keys * LANES : 0;
        const size_t floats = (a.width + a.value_width) * LANES + 3 * block + KEYS * (a.width + a.value_width) + strip + more;
        scratch.reserve(floats * 4 + block + 16 * 64);
        q = scratch.take<float>(a.width * LANES);
        o = scratch.take<float>(a.value_width * LANES);
        s = scratch.take<float>(block);
        kept = scratch.take<float>(block);
        bias = scratch.take<float>(block);
        keys = scratch.take<float>(KEYS * a.width);
        values = scratch.take<float>(KEYS * a.value_width);
        pairs = scratch.take<uint8_t>(block);
        this->strip = looking ? scratch.take<float>(strip) : nullptr;
    }
};

// Rows that lie apart, side by side: (B, N, H, D) strides land in few sets of the caches and a page each. Copied once per
// block they cost little; read in place up to a third.
inline const float *side_by_side(const float *from, int64_t stride, int64_t rows, int64_t width, float *to) {
    if (stride == width) return from;
    for (int64_t j = 0; j < rows; j++) std::memcpy(to + j * width, from + j * stride, width * sizeof(float));
    return to;
}

// o += p v where v may hold NaN or inf: what has no weight does not count, and what has gives NaN.
inline void values_carefully(Desk &desk, const float *v, int64_t stride, const float *p, const Span &span,
                             int64_t width) {
    const int64_t keys = span.last - span.first;
    for (int64_t j = 0; j < keys; j++) {
        for (int64_t e = 0; e < width; e++) {
            const float x = v[j * stride + e];
            desk.values[j * width + e] = std::isfinite(x) ? x : 0.0f;
        }
    }
    values(desk.values, width, p, keys, width, span.lane, span.lanes_end, desk.rows.shrink, desk.o);
    for (int64_t j = 0; j < keys; j++) {
        for (int64_t e = 0; e < width; e++) {
            if (std::isfinite(v[j * stride + e])) continue;
            for (int i = span.lane; i < span.lanes_end; i++)
                if (p[j * LANES + i] != 0.0f) desk.o[e * LANES + i] = __builtin_nanf("");
        }
    }
}

// The queries into the lanes; nothing is seen yet.
inline void start(const regard_args &a, const Block &block, Desk &desk) {
    const float *q = (const float *)a.q + block.item * a.q_stride[0] + block.head * a.q_stride[1] + block.row * a.q_stride[2];
    rows_to_lanes(q, a.q_stride[2], block.rows, block.lanes, a.width, desk.q);
    if (a.out) std::memset(desk.o, 0, sizeof(float) * LANES * a.value_width);
    desk.rows.begin();
    desk.seen.clear();
    if (a.drop_rows) {
        const int64_t *stride = a.drop_rows_stride;
        const int32_t *from = a.drop_rows + block.item * stride[0] + block.head * stride[1];
        for (int i = 0; i < block.lanes; i++)
            desk.drop_row[i] = from[(block.row + std::min(i, block.rows - 1)) * stride[2]];
    }
}

// The keys [from, to): scores, weights, and their sum of values; the rows of `desk` hold the rest. With `Look` the
// weights stay in the strip.
template <bool Look>
void advance(const regard_args &a, const Block &block, Desk &desk, bool careful, int64_t from, int64_t to) {
    const float *k = (const float *)a.k + block.item * a.k_stride[0] + block.group * a.k_stride[1];
    const float *v = (const float *)a.v + block.item * a.v_stride[0] + block.group * a.v_stride[1];
    Rows &rows = desk.rows;
    // A positive scale alone is left to the exponent's FMA; anything more is computed in base e first.
    const bool transformed = a.softcap != 0.0f || a.bias || !(a.scale > 0.0f);
    const float factor = desk.exponent = transformed ? LOG2_E : (float)(a.scale * 1.4426950408889634);
    Plan plan(a, block, desk.pairs);
    plan.each(from, to, [&](const Span &span) {
        const int64_t keys = span.last - span.first;
        const int first = span.lane, last = span.lanes_end;
        const float *key = side_by_side(k + span.first * a.k_stride[2], a.k_stride[2], keys, a.width, desk.keys);
        float *s = Look ? desk.strip + (span.first - plan.first()) * LANES : desk.s;
        if (!transformed && !span.masked) {
            scores<true, Look>(key, a.width, keys, desk.q, a.width, first, last, s, rows.top, rows.at,
                               (int32_t)span.first);
        } else {
            scores<false, false>(key, a.width, keys, desk.q, a.width, first, last, s, rows.top, rows.at, 0);
            if (transformed) {
                if (a.bias) {
                    const int64_t *stride = a.bias_stride;
                    const float *from = a.bias + block.item * stride[0] + block.head * stride[1];
                    block_to_lanes(from + block.row * stride[2] + span.first * stride[3], stride[2], stride[3],
                                   block.rows, block.lanes, keys, desk.bias);
                }
                transform(s, keys, first, last, a.scale, a.softcap, a.bias ? desk.bias : nullptr);
            }
            if (span.masked) plan.hide(span, s);
            maxima(s, keys, first, last, rows, (int32_t)span.first);
        }
        exponentials<Look>(s, keys, first, last, factor, rows);
        if (Look) {
            desk.seen.push_back({span, s, {}});
            std::memcpy(desk.seen.back().base, rows.base, sizeof rows.base);
        }
        if (!a.out) return;
        const float *p = s;
        if (a.drop_rows) {
            const int64_t *stride = a.drop_cols_stride;
            drop(s, keys, first, last, desk.drop_row, a.drop_cols + block.item * stride[0] + span.first * stride[1],
                 stride[1], a.drop_threshold, desk.kept);
            p = desk.kept;
        }
        const float *value = v + span.first * a.v_stride[2];
        if (careful) {
            values_carefully(desk, value, a.v_stride[2], p, span, a.value_width);
        } else {
            values(side_by_side(value, a.v_stride[2], keys, a.value_width, desk.values), a.value_width, p, keys,
                   a.value_width, first, last, rows.shrink, desk.o);
        }
    });
}

// The sink joins the total, as one more key. Then log-sum-exp, and `factor`: what weights relative to the last base are
// multiplied by, 1 / total.
inline void conclude(const regard_args &a, const Block &block, Desk &desk) {
    const Rows &rows = desk.rows;
    // From scores as they were compared to base e.
    const double to_e = a.softcap != 0.0f || a.bias || !(a.scale > 0.0f) ? 1.0 : a.scale;
    const float sink = a.sinks ? a.sinks[block.item * a.sinks_stride[0] + block.head * a.sinks_stride[1]] : 0.0f;
    float *lse = a.lse ? a.lse + block.item * a.lse_stride[0] + block.head * a.lse_stride[1] : nullptr;
    for (int i = 0; i < block.rows; i++) {
        double base = rows.base[i] * to_e, total = rows.total[i], shrink = 1.0;
        const double before = base;
        if (a.sinks) {
            base = total == 0.0 ? sink : std::max<double>(base, sink);
            shrink = total == 0.0 ? 0.0 : std::exp(before - base);
            total = total * shrink + (sink == -__builtin_inff() ? 0.0 : std::exp(sink - base));
        }
        const float log = std::log((float)total);
        desk.factor[i] = total == 0.0 ? 0.0f : (float)shrink / (float)total;
        desk.log[i] = log + (float)(base - before);
        if (lse) lse[(block.row + i) * a.lse_stride[2]] = total == 0.0 ? -__builtin_inff() : (float)(base + log);
    }
    for (int i = block.rows; i < LANES; i++) desk.factor[i] = 0.0f;
}

template <bool Look>
void finish(const regard_args &a, const Block &block, Desk &desk) {
    conclude(a, block, desk);
    if (!a.out) return;
    float *out = (float *)a.out + block.item * a.out_stride[0] + block.head * a.out_stride[1] + block.row * a.out_stride[2];
    alignas(64) float factor[LANES];
    const float kept = a.drop_rows ? a.drop_kept : 1.0f;
    for (int i = 0; i < LANES; i++) factor[i] = desk.factor[i] * kept;
    const bool finite = lanes_to_rows(desk.o, block.rows, a.value_width, factor, out, a.out_stride[2]);
    if (!finite && any_mask(a)) {  // maybe 0 * NaN of a key that is hidden: rare, so it may cost
        start(a, block, desk);
        advance<Look>(a, block, desk, true, 0, a.keys);
        lanes_to_rows(desk.o, block.rows, a.value_width, factor, out, a.out_stride[2]);
    }
}

template <bool Look>
void forward(const regard_args &a, const Block &block, Desk &desk) {
    start(a, block, desk);
    advance<Look>(a, block, desk, false, 0, a.keys);
    finish<Look>(a, block, desk);
}

}  // namespace
