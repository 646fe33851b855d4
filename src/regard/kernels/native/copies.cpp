// For each token of a text, its earlier copies: the lists of keys of `Induction` and `Duplicate`.
#include <algorithm>
#include <new>
#include <vector>

#include "args.h"

namespace {

struct Token {
    int64_t id;
    int32_t slot;
};

// In the order of ids the earlier copies of a token are a slice that ends where the token itself stands.
struct Sorted {
    std::vector<Token> tokens;
    std::vector<int64_t> begin, place;  // for each token: where the first with its id stands, and where it does itself

    explicit Sorted(size_t count) : tokens(count), begin(count), place(count) {}

    void sort(const int64_t *ids) {
        for (size_t i = 0; i < tokens.size(); i++) tokens[i] = {ids[i], (int32_t)i};
        std::sort(tokens.begin(), tokens.end(),
                  [](const Token &a, const Token &b) { return a.id != b.id ? a.id < b.id : a.slot < b.slot; });
        for (size_t p = 0, first = 0; p < tokens.size(); p++) {
            if (tokens[p].id != tokens[first].id) first = p;
            begin[(size_t)tokens[p].slot] = (int64_t)first;
            place[(size_t)tokens[p].slot] = (int64_t)p;
        }
    }
};

}  // namespace

extern "C" int32_t regard_copies(const regard_copies_args *args) {
    if (!args || args->size != sizeof(regard_copies_args)) return REGARD_BAD_SIZE;
    const regard_copies_args &a = *args;
    if (a.items < 0 || a.tokens < 0 || a.tokens >= INT32_MAX || a.kinds < 0) return REGARD_BAD_SHAPE;
    try {
        Sorted sorted((size_t)a.tokens);
        for (int64_t item = 0; item < a.items; item++) {
            const int64_t *ids = a.ids + item * a.tokens;
            sorted.sort(ids);
            for (int64_t kind = 0; kind < a.kinds; kind++) {
                const int32_t after = a.after[kind];
                const int64_t first = (item * a.kinds + kind) * a.tokens;  // of this kind's keys
                for (int64_t p = 0; p < a.tokens; p++) a.keys[first + p] = sorted.tokens[(size_t)p].slot + after;
                for (int64_t i = 0; i < a.tokens; i++) {
                    const int64_t begin = first + sorted.begin[(size_t)i], end = first + sorted.place[(size_t)i];
                    int64_t near = 0;  // copies whose token `after` is a neighbour of the query, or the query itself
                    for (int64_t distance = 1; distance < 2 + after && distance <= i; distance++)
                        near += ids[i] == ids[i - distance];
                    const int64_t apart = begin + (after == 0 && ids[i] == ids[0]);  // without the first token
                    const int64_t at = ((item * a.tokens + i) * a.kinds + kind) * 2;
                    a.begin[at] = begin, a.end[at] = end;
                    a.begin[at + 1] = apart, a.end[at + 1] = std::max(apart, end - near);
                }
            }
        }
    } catch (const std::bad_alloc &) {
        return REGARD_NO_MEMORY;
    }
    return REGARD_OK;
}

extern "C" uint64_t regard_copies_args_size(void) { return sizeof(regard_copies_args); }
