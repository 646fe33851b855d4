// Few queries against many keys, as in text generation: the time is that of reading K and V. So both are read once for
// all queries of their head, in their own dtype, and the layout is the opposite one: *keys and widths* are along the
// lanes.
//
//     s (queries x keys)   = q (queries x D) . K (keys x D)     rows of K as vectors; W sums at a time
//     o (queries x E)     += p (queries x keys) V (keys x E)    rows of V as vectors; p is broadcast
//
// The keys of a head are divided into pieces, enough for all threads. Each piece has its maximum, sum and output, which
// are merged in order.
#pragma once
#include <atomic>
#include <tuple>

#include "forward.h"
#include "numbers.h"
#include "segments.h"
#include "team.h"

namespace REGARD_NAMESPACE {

constexpr int64_t MOST = 128;      // queries per kv head, at most
constexpr int64_t RUN = 256;       // keys per step of the online softmax
constexpr int64_t AHEAD = 512;     // numbers to prefetch before the next rows
constexpr int64_t SHORTEST = 256;  // length of a piece, in keys, at least

inline int64_t padded(int64_t count) { return (count + W - 1) / W * W; }

// Rows padded with 0 to a multiple of W.
template <class T>
void pad(const T *from, int64_t stride, int64_t rows, int64_t width, float *to) {
    const int64_t whole = width / W * W;
    for (int64_t j = 0; j < rows; j++, from += stride, to += padded(width)) {
        for (int64_t x = 0; x < whole; x += W) store(to + x, load(from + x));
        if (whole < width) store(to + whole, load_some(from + whole, width - whole));
    }
}

// Loads a vector of keys to multiply with queries of type Q: bfloat16 as pairs, other types widened.
template <class Q, class T>
inline auto operand(const T *p) {
    if constexpr (std::is_same_v<Q, float>) return load(p);
    else return load((const Pair *)p);
}

// QT queries against W keys, of which only `keys` exist (the last one is repeated for the others).
template <int QT, class T, class Q>
void meet(const T *k, int64_t stride, int64_t keys, const Q *q, int64_t width, float *s) {
    constexpr int KT = W / QT, STEP = W * (int)(sizeof(float) / sizeof(Q));
    for (int64_t j = 0; j < keys; j += KT) {
        F sum[W];
        // Key by key, in memory order: the hardware prefetcher follows one stream better than many.
#pragma GCC unroll 16
        for (int i = 0; i < KT; i++) {
            const T *key = k + std::min(j + i, keys - 1) * stride;
            F one[QT];
#pragma GCC unroll 16
            for (int n = 0; n < QT; n++) one[n] = F{};
#pragma GCC unroll 4
            for (int64_t d = 0; d < width; d += STEP) {
                const auto y = operand<Q>(key + d);
#pragma GCC unroll 16
                for (int n = 0; n < QT; n++) one[n] = add_product(one[n], operand<Q>(q + n * width + d), y);
            }
#pragma GCC unroll 16
            for (int n = 0; n < QT; n++) sum[n * KT + i] = one[n];
        }
        alignas(64) float all[W];
        store(all, sums(sum));
#pragma GCC unroll 16
        for (int n = 0; n < QT; n++) std::memcpy(s + n * RUN + j, all + n * KT, KT * sizeof(float));
    }
}

// ET vectors of a row. Two vectors of bfloat16 are widened to the even and the odd numbers, which is the cheapest way;
// `in_order` restores the order of results. (A last single vector is widened in order.)
template <int ET, class T>
inline void widen_row(const T *p, F (&y)[ET]) {
    if constexpr (std::is_same_v<T, BFloat16> && ET % 2 == 0) {
#pragma GCC unroll 16
        for (int x = 0; x < ET; x += 2) {
            const I both = load((const Pair *)(p + x * W));
            y[x] = (F)(both << 16);
            y[x + 1] = (F)(both & ~0xffff);
        }
    } else {
#pragma GCC unroll 16
        for (int x = 0; x < ET; x++) y[x] = load(p + x * W);
    }
}

// o = o * shrink + p v for QT queries and ET vectors of the width.
template <int QT, int ET, class T>
void weigh(const T *v, int64_t stride, int64_t keys, const float *p, const float *shrink, float *o, int64_t row) {
    F sum[QT][ET];
#pragma GCC unroll 16
    for (int n = 0; n < QT; n++) {
#pragma GCC unroll 16
        for (int x = 0; x < ET; x++) sum[n][x] = load(o + n * row + x * W) * shrink[n];
    }
    for (int64_t j = 0; j < keys; j++) {
        F y[ET];
        widen_row(v + j * stride, y);
#pragma GCC unroll 16
        for (int n = 0; n < QT; n++) {
            const F w = broadcast(p[n * RUN + j]);
#pragma GCC unroll 16
            for (int x = 0; x < ET; x++) sum[n][x] += w * y[x];
        }
    }
#pragma GCC unroll 16
    for (int n = 0; n < QT; n++) {
#pragma GCC unroll 16
        for (int x = 0; x < ET; x++) store(o + n * row + x * W, sum[n][x]);
    }
}

// f(n, size as a type) for tiles of [first, last): of `size` while they fit, then of half of it, and so on.
template <int size, class Function>
inline void over_tiles(int64_t first, int64_t last, Function f) {
    for (; first + size <= last; first += size) f(first, std::integral_constant<int, size>{});
    if constexpr (size > 1) over_tiles<size / 2>(first, last, f);
}

// The queries of one kv head and their running softmax. Query n is row n % N of query head n / N of the group. Queries
// are of type T, keys and values of type K. The scales of int8 multiply scores and weights, not the numbers themselves.
template <class T, class K>
class Reading {
    const regard_args &a;
    const int64_t item, group, count, q_row, o_row;
    float *q, *s, *o, *rows;
    int64_t low[MOST], high[MOST];
    float top[MOST], base[MOST], shrink[MOST];
    F total[MOST];

    // Whether q and k are multiplied as bfloat16 pairs: their width is a multiple of whole vectors.
    static constexpr bool CAN_PAIR = PAIRS && std::is_same_v<K, BFloat16>;
    bool paired() const { return CAN_PAIR && a.width % (2 * W) == 0; }
    int64_t head_of(int64_t n) const { return group * (a.heads / a.groups) + n / a.queries; }

  public:
    Reading(const regard_args &a, int64_t item, int64_t group, Scratch &scratch, float *o)
        : a(a), item(item), group(group), count(a.queries * (a.heads / a.groups)), q_row(padded(a.width)),
          o_row(padded(a.value_width)), o(o) {
        const int64_t more = RUN * std::max(q_row, o_row);
        scratch.reserve((size_t)(count * (q_row + RUN) + more) * sizeof(float) + 3 * 64);
        q = scratch.take<float>((size_t)(count * q_row));
        s = scratch.take<float>((size_t)(count * RUN));
        rows = scratch.take<float>((size_t)more);
        for (int64_t n = 0; n < count; n++) {
            const int64_t row = n % a.queries;
            const T *from = (const T *)a.q + item * a.q_stride[0] + head_of(n) * a.q_stride[1] + row * a.q_stride[2];
            if (paired()) std::memcpy((T *)q + n * q_row, from, (size_t)q_row * sizeof(T));
            else pad(from, 0, 1, a.width, q + n * q_row);
            std::tie(low[n], high[n]) = range_of(a, item, row);
        }
    }

    // Processes the keys [from, to): scores, weights, weighted values.
    void read(int64_t from, int64_t to, bool careful) {
        const bool transformed = transforms(a);
        const float factor = exponent_of(a);
        std::memset(o, 0, (size_t)(count * o_row) * sizeof(float));
        for (int64_t n = 0; n < count; n++) top[n] = -__builtin_inff(), base[n] = 0.0f, total[n] = F{};
        over_stretches<K>(a, item, group, from, to, [&](const Stretch<K> &held) {
            const int64_t end = std::min(to, held.last);
            for (int64_t j = std::max(from, held.first), keys; j < end; j += keys) {
                keys = std::min(RUN, end - j);
                prefetch(held.value(j), held.v_stride, a.value_width, keys);
                if constexpr (CAN_PAIR) paired() ? score(held, (const T *)q, j, keys) : score(held, q, j, keys);
                else score(held, q, j, keys);
                alignas(64) float key_scales[RUN], value_scales[RUN];
                if constexpr (SCALED) {
                    for (int64_t i = 0; i < keys; i++) {
                        key_scales[i] = held.key_scale(j + i), value_scales[i] = held.value_scale(j + i);
                    }
                    for (int64_t i = keys; i < padded(keys); i++) key_scales[i] = value_scales[i] = 0.0f;
                }
                for (int64_t n = 0; n < count; n++) {
                    if constexpr (SCALED) multiply(n, key_scales, keys);
                    if (transformed) transform(n, j, keys);
                    hide(n, j, keys);
                    soften(n, keys, factor);
                    if (a.drop_rows) drop(n, j, keys);
                    if constexpr (SCALED) multiply(n, value_scales, keys);
                }
                prefetch(held.key(j + keys), held.k_stride, a.width, end - j - keys);
                if (a.out) careful ? add_carefully(held, j, keys) : add(held, j, keys);
            }
        });
        if (std::is_same_v<K, BFloat16> && !careful && a.value_width % W == 0) in_order();
    }

    bool finite() const {
        F odd = {};  // 0 * x is NaN if x is not finite, else 0
        for (int64_t x = 0; x < count * o_row; x += W) odd += load(o + x) * 0.0f;
        return !any(odd != odd);
    }

    // The maximum and the sum of each query.
    void tell(float *maxima, float *sums) const {
        for (int64_t n = 0; n < count; n++) {
            maxima[n] = base[n];
            sums[n] = 0.0f;
            for (int i = 0; i < W; i++) sums[n] += total[n][i];
        }
    }

  private:
    static constexpr bool SCALED = std::is_same_v<K, Int8>;
    void multiply(int64_t n, const float *by, int64_t keys) {
        float *row = s + n * RUN;
        for (int64_t j = 0; j < keys; j += W) store(row + j, load(row + j) * load(by + j));
    }

    // f(rows, stride), with rows padded if needed.
    template <class Function>
    void with_whole_vectors(const K *from, int64_t stride, int64_t count, int64_t width, Function f) {
        if (width % W == 0) return f(from, stride);
        pad(from, stride, count, width, rows);
        f((const float *)rows, padded(width));
    }

    // Prefetches the beginning of the next rows; the hardware prefetches the rest.
    static void prefetch(const K *rows, int64_t stride, int64_t width, int64_t count) {
        const int64_t line = 64 / (int64_t)sizeof(K);
        count = std::min(count, AHEAD / width);
        for (int64_t j = 0; j < count; j++)
            for (int64_t x = 0; x < width; x += line) __builtin_prefetch(rows + j * stride + x, 0, 2);
    }

    template <class Q>
    void score(const Stretch<K> &held, const Q *q, int64_t first, int64_t keys) {
        for (int64_t j = 0; j < keys; j += W) {
            const int64_t some = std::min<int64_t>(W, keys - j);
            with_whole_vectors(held.key(first + j), held.k_stride, some, a.width, [&](const auto *key, int64_t stride) {
                over_tiles<(W > 4 ? 4 : 2)>(0, count, [&](int64_t n, auto qt) {
                    meet<qt.value>(key, stride, some, q + n * q_row, q_row, s + n * RUN + j);
                });
            });
        }
    }

    void transform(int64_t n, int64_t first, int64_t keys) {
        float *row = s + n * RUN;
        const float inner = a.softcap != 0.0f ? a.scale / a.softcap : a.scale;
        for (int64_t j = 0; j < keys; j += W) {
            const F x = load(row + j) * inner;
            store(row + j, a.softcap != 0.0f ? tanh(x) * a.softcap : x);
        }
        if (!a.bias) return;
        const int64_t *stride = a.bias_stride;
        const float *bias =
            a.bias + item * stride[0] + head_of(n) * stride[1] + n % a.queries * stride[2] + first * stride[3];
        for (int64_t j = 0; j < keys; j++) row[j] += bias[j * stride[3]];
    }

    // Sets -inf for hidden keys, and for the lanes after the last key.
    void hide(int64_t n, int64_t first, int64_t keys) {
        constexpr float NOTHING = -__builtin_inff();
        float *row = s + n * RUN;
        for (int64_t j = keys; j < padded(keys); j++) row[j] = NOTHING;
        for (int64_t j = 0; j < std::min(low[n] - first, keys); j++) row[j] = NOTHING;
        for (int64_t j = std::max<int64_t>(high[n] - first, 0); j < keys; j++) row[j] = NOTHING;
        if (a.q_docs) {
            const int32_t doc = a.q_docs[item * a.q_docs_stride + n % a.queries];
            const int32_t *docs = a.k_docs + item * a.k_docs_stride + first;
            for (int64_t j = 0; j < keys; j++) row[j] = docs[j] == doc ? row[j] : NOTHING;
        }
        if (a.mask) {
            const int64_t *stride = a.mask_stride;
            const uint8_t *mask =
                a.mask + item * stride[0] + head_of(n) * stride[1] + n % a.queries * stride[2] + first * stride[3];
            for (int64_t j = 0; j < keys; j++) row[j] = mask[j * stride[3]] ? row[j] : NOTHING;
        }
    }

    // Scores to weights relative to the running maximum: `exponentials`, with keys along the lanes.
    void soften(int64_t n, int64_t keys, float factor) {
        float *row = s + n * RUN;
        F most = load(row);
        for (int64_t j = W; j < keys; j += W) most = larger(most, load(row + j));
        top[n] = std::max(top[n], largest(most));
        const float now = top[n] == -__builtin_inff() ? 0.0f : top[n];
        const bool nothing =
            !any(total[n] != 0.0f);  // nothing was seen yet: the factor for the old sums must not be inf
        const F less = exp2(broadcast(nothing ? 0.0f : (base[n] - now) * factor));
        F sum = total[n] * less;
        for (int64_t j = 0; j < keys; j += W) {
            const F weight = exp2((load(row + j) - now) * factor);
            sum += weight;
            store(row + j, weight);
        }
        shrink[n] = less[0];
        base[n] = now;
        total[n] = sum;
    }

    void drop(int64_t n, int64_t first, int64_t keys) {
        const int64_t *rows = a.drop_rows_stride, *cols = a.drop_cols_stride;
        const int32_t hash = a.drop_rows[item * rows[0] + head_of(n) * rows[1] + n % a.queries * rows[2]];
        const int32_t *col = a.drop_cols + item * cols[0] + first * cols[1];
        for (int64_t j = 0; j < keys; j++) {
            float &weight = s[n * RUN + j];
            weight = stays<int32_t, uint32_t>(hash, col[j * cols[1]], a.drop_threshold) ? weight : 0.0f;
        }
    }

    // o = o * shrink + p v
    void add(const Stretch<K> &held, int64_t first, int64_t keys) {
        with_whole_vectors(
            held.value(first), held.v_stride, keys, a.value_width, [&](const auto *value, int64_t stride) {
                over_tiles<2>(0, count, [&](int64_t n, auto qt) {
                    constexpr int QT = qt.value, ET = std::min(REGISTERS / 2 / QT, 8);
                    over_tiles<ET>(0, o_row / W, [&](int64_t x, auto et) {
                        const int64_t e = x * W;
                        weigh<QT, et.value>(value + e, stride, keys, s + n * RUN, shrink + n, o + n * o_row + e, o_row);
                    });
                });
            });
    }

    // Restores the order that `widen_row` changed.
    void in_order() {
        for (int64_t n = 0; n < count; n++) {
            for (int64_t e = 0; e + 2 * W <= o_row; e += 2 * W) {
                float *p = o + n * o_row + e;
                const F even = load(p), odd = load(p + W);
                store(p, interleave_low(even, odd));
                store(p + W, interleave_high(even, odd));
            }
        }
    }

    // Whether a key is visible to a query.
    bool sees(int64_t n, int64_t key) const {
        if (key < low[n] || key >= high[n]) return false;
        const int64_t row = n % a.queries, *stride = a.mask_stride;
        if (a.q_docs && a.q_docs[item * a.q_docs_stride + row] != a.k_docs[item * a.k_docs_stride + key]) return false;
        return !a.mask || a.mask[item * stride[0] + head_of(n) * stride[1] + row * stride[2] + key * stride[3]];
    }

    // `add` if v has NaN or inf: only visible pairs, since 0 * NaN of a hidden one must not count.
    void add_carefully(const Stretch<K> &held, int64_t first, int64_t keys) {
        for (int64_t n = 0; n < count; n++) {
            for (int64_t e = 0; e < a.value_width; e++) {
                float sum = o[n * o_row + e] * shrink[n];
                for (int64_t j = 0; j < keys; j++) {
                    if (sees(n, first + j)) sum += s[n * RUN + j] * widened(held.value(first + j)[e]);
                }
                o[n * o_row + e] = sum;
            }
        }
    }
};

// The results of the pieces.
struct Pieces {
    const regard_args &a;
    int64_t count, queries, row;  // pieces per head, queries per head, floats per output
    float *memory;
    float *output(int64_t number) const { return memory + number * queries * (row + 2); }
    float *maxima(int64_t number) const { return output(number) + queries * row; }
    float *sums(int64_t number) const { return maxima(number) + queries; }
};

// Merges all pieces of a query into its output and log-sum-exp.
template <class T>
void join(const Pieces &pieces, int64_t head, int64_t n) {
    const regard_args &a = pieces.a;
    const int64_t item = head / a.groups, query_head = head % a.groups * (a.heads / a.groups) + n / a.queries;
    const int64_t row = n % a.queries;
    const float factor = exponent_of(a);
    double base = 0.0, total = 0.0;
    bool any = false;
    for (int64_t p = head * pieces.count; p < (head + 1) * pieces.count; p++) {
        if (pieces.sums(p)[n] == 0.0f) continue;
        base = any ? std::max<double>(base, pieces.maxima(p)[n]) : pieces.maxima(p)[n];
        any = true;
    }
    alignas(64) float
        sum[REGARD_WIDEST + W];  // (as much of it as is read is set: all of it would take longer than a small call)
    for (int64_t e = 0; e < pieces.row; e += W) store(sum + e, F{});
    for (int64_t p = head * pieces.count; p < (head + 1) * pieces.count; p++) {
        // (A piece of weight 0 adds 0, or NaN if a value is NaN.)
        const double part = pieces.sums(p)[n] == 0.0f ? 0.0 : std::exp2((pieces.maxima(p)[n] - base) * factor);
        total += pieces.sums(p)[n] * part;
        const float *from = pieces.output(p) + n * pieces.row;
        for (int64_t e = 0; e < pieces.row; e += W) store(sum + e, load(sum + e) + load(from + e) * (float)part);
    }
    const RowEnd end = end_of_row(a, item, query_head, base * natural_of(a), total);
    if (a.lse) a.lse[item * a.lse_stride[0] + query_head * a.lse_stride[1] + row * a.lse_stride[2]] = end.lse;
    if (!a.out) return;
    T *out = (T *)a.out + item * a.out_stride[0] + query_head * a.out_stride[1] + row * a.out_stride[2];
    const float scale = end.factor * (a.drop_rows ? a.drop_kept : 1.0f);
    int64_t e = 0;
    for (; e + W <= a.value_width; e += W) store(out + e, load(sum + e) * scale);
    if (e < a.value_width) store_some(out + e, load(sum + e) * scale, a.value_width - e);
}

// The keys visible to some query of a batch item.
inline std::pair<int64_t, int64_t> seen_by_some(const regard_args &a, int64_t item) {
    int64_t first = a.keys, last = 0;
    for (int64_t row = 0; row < a.queries; row++) {
        const auto [low, high] = range_of(a, item, row);
        first = std::min(first, low);
        last = std::max(last, high);
    }
    return {std::min(first, last), last};
}

// How many they are, at most.
inline int64_t longest_seen(const regard_args &a) {
    int64_t longest = 0;
    for (int64_t item = 0; item < a.batch; item++) {
        const auto [first, last] = seen_by_some(a, item);
        longest = std::max(longest, last - first);
    }
    return longest;
}

// Whether this path is faster. The other one computes at least COLUMN lanes per head, even if fewer are needed; with
// many keys that no heads share it is limited by memory as well.
inline bool few(const regard_args &a) {
    const bool waits = a.groups == a.heads && a.keys >= 1024 && a.dtype == REGARD_FLOAT32;
    return a.queries <= (waits ? COLUMN : COLUMN / 2) && a.queries * (a.heads / a.groups) <= MOST;
}

thread_local Scratch reading;

// `memory`: scratch of the calling thread.
template <class T, class K>
void decode(const regard_args &a, Scratch &memory) {
    const int64_t heads = a.batch * a.groups, queries = a.queries * (a.heads / a.groups);
    if (heads * queries == 0) return;
    const int64_t longest = longest_seen(a);
    // Pieces, and so the results, depend only on the shapes and the number of threads, not on the scheduling.
    const int64_t wanted = a.threads > 1 ? (4 * a.threads + heads - 1) / heads : 1;
    const int64_t count = std::max<int64_t>(1, std::min(wanted, longest / SHORTEST));
    Pieces pieces{a, count, queries, padded(a.value_width), nullptr};
    const size_t floats = (size_t)(heads * count * queries * (pieces.row + 2));
    memory.reserve((floats + (size_t)heads) * sizeof(float) + 2 * 64);
    pieces.memory = memory.take<float>(floats);
    int32_t *left = memory.take<int32_t>((size_t)heads);  // pieces of a head that are not done
    std::fill(left, left + heads, (int32_t)count);
    const int64_t bytes = heads * longest * (a.width + a.value_width) * (int64_t)sizeof(K);
    const int threads = (int)std::min<int64_t>({a.threads, heads * count, 1 + bytes / (64 << 10)});
    std::atomic<int64_t> next{0};
    std::atomic<bool> failed{false};
    in_team(threads, [&] {
        FlushSubnormals flush;
        try {
            for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < heads * count;) {
                const int64_t head = i / count, part = i % count, item = head / a.groups;
                const auto [first, last] = seen_by_some(a, item);
                const int64_t from = first + (last - first) * part / count;
                const int64_t to = first + (last - first) * (part + 1) / count;
                Reading<T, K> piece(a, item, head % a.groups, reading, pieces.output(i));
                piece.read(from, to, false);
                if (any_mask(a) && !piece.finite())
                    piece.read(from, to, true);  // maybe from 0 * NaN of a hidden key: rare
                piece.tell(pieces.maxima(i), pieces.sums(i));
                // The thread that finishes the last piece of a head merges them all, so that none has to wait.
                if (__atomic_sub_fetch(left + head, 1, __ATOMIC_ACQ_REL) == 0)
                    for (int64_t n = 0; n < queries; n++) join<T>(pieces, head, n);
            }
        } catch (const std::bad_alloc &) {
            failed = true;
        }
    });
    if (failed) throw std::bad_alloc();
}

}  // namespace REGARD_NAMESPACE
