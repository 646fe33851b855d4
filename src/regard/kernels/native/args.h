// The arguments of a call, as plain C: pointers, sizes, strides. Independent of torch.
//
// Letters: B batch, H query heads, G kv heads, N queries, M keys, D width of q and k, E width of v.
// Strides count elements. The last axis of q, k, v and out is contiguous. A stride of 0 broadcasts.
#pragma once
#include <cstdint>

#define REGARD_API __attribute__((visibility("default")))

extern "C" {

enum regard_isa : int32_t {
    REGARD_AUTO = 0,
    REGARD_PORTABLE = 1,
    REGARD_AVX2 = 2,
    REGARD_AVX512 = 3,
    REGARD_AVX512_BF16 = 4,  // with products of bfloat16
    REGARD_AMX = 5,          // and of tiles of it, in the forward pass; only if asked for
};

enum regard_dtype : int32_t { REGARD_FLOAT32 = 0, REGARD_BFLOAT16 = 1, REGARD_FLOAT16 = 2 };

enum regard_status : int32_t {
    REGARD_OK = 0,
    REGARD_BAD_SIZE = 1,   // `size` is not sizeof(struct) of this library
    REGARD_BAD_SHAPE = 2,  // negative size, width above REGARD_WIDEST, heads not a multiple of groups, segments that do
                           // not fit; backward: no out or lse, segments
    REGARD_NO_SUCH_ISA = 3,  // the CPU does not have the instruction set
    REGARD_NO_MEMORY = 4,
};

enum { REGARD_WIDEST = 1024 };  // numbers of a head

// Some of the keys and values of a call, that lie in another place than those before them.
struct regard_segment {
    const void *k, *v;               // (B, G, keys, D), (B, G, keys, E), of the dtype of the call or int8
    const float *k_scale, *v_scale;  // (B, G, keys): k and v are int8, and a row is to be multiplied by its scale
    int64_t keys;
    int64_t k_stride[3], v_stride[3], k_scale_stride[3], v_scale_stride[3];
};

struct regard_args {
    uint64_t size;  // sizeof(regard_args), to detect another version
    int32_t isa;
    int32_t threads;
    int32_t dtype;  // of q, k, v, out, and their gradients; everything else is float32
    int32_t causal;

    int64_t batch, heads, groups, queries, keys, width, value_width;
    const void *q, *k, *v;  // (B, H, N, D), (B, G, M, D), (B, G, M, E)
    void *out;              // (B, H, N, E), or null to compute only statistics and lse
    float *lse;             // (B, H, N), or null
    int64_t q_stride[3], k_stride[3], v_stride[3], out_stride[3], lse_stride[3];

    float scale;
    float softcap;    // 0: none
    int64_t q_start;  // position of the first query; keys are at 0 .. M - 1

    // Key j is visible to the query at position p iff (not causal or j <= p) and p - before <= j <= p + after.
    int64_t before, after;               // -1: no limit
    const int64_t *key_start, *key_end;  // (B) visible keys are [start, end); or null
    const int32_t *q_docs, *k_docs;      // (1|B, N) and (1|B, M): visible if equal; or null
    int64_t q_docs_stride, k_docs_stride;
    const uint8_t *mask;  // (1|B, 1|H, 1|N, 1|M), nonzero: visible; or null
    int64_t mask_stride[4];
    const float *bias;  // the same shape, added to the scores; or null
    int64_t bias_stride[4];
    const float *sinks;  // (1|B, H): an additional score in the denominator of each row; or null
    int64_t sinks_stride[2];

    const int32_t *drop_rows;  // (1|B, H, N) hashes of the query rows; null: no dropout
    const int32_t *drop_cols;  // (1|B, M) hashes of the key columns
    int64_t drop_rows_stride[3], drop_cols_stride[2];
    int32_t drop_threshold;  // a weight is kept iff its hash is at least this
    float drop_kept;         // factor of kept weights

    const regard_segment *segments;  // keys and values, in the place of k and v; all int8, or none; or null
    int64_t segment_count;

    // Statistics of the weights before dropout, all contiguous, each null if not wanted.
    float *entropy, *peak;     // (B, H, N)
    int64_t *target;           // (B, H, N), -1 for a fully masked row
    float *distance, *offset;  // (B, H, N) by positions
    float *on_first;           // (B, H, N)
    float *received;           // (B, H, M)
    float *offsets;            // (B, H, offsets_before + 1 + offsets_after), summed over queries
    int64_t offsets_before, offsets_after;
    float *heatmap;  // (B, H, rows, cols): query i is in cell i * rows / N
    int64_t heatmap_rows, heatmap_cols;

    const uint8_t *uncounted;  // (B, N), nonzero: left out of received, offsets and heatmap; or null
    // Positions by which distance and offset are taken; null: contiguous, from q_start and 0.
    const int64_t *q_positions, *k_positions;  // (1|B, N), (1|B, M)
    int64_t q_positions_stride, k_positions_stride;

    float *columns;               // (B, H, N, column_count): sums of weights times a factor per key
    const float *column_factors;  // (1|B, 1|H, column_count, M), the last two axes contiguous
    int64_t column_count, column_stride[2];

    float *lists;  // (B, H, N, list_count): sums of weights over lists of keys, some for each query
    // List k of query i is list_keys[list_begin[i][k]] ... list_keys[list_end[i][k] - 1]: lists may share keys.
    const int32_t *list_keys;              // indices of keys
    const int64_t *list_begin, *list_end;  // (1|B, N, list_count), contiguous; for each item into all of list_keys
    int64_t list_count, list_stride;

    float *link_weights;  // (B, H, N, link_count): the largest weights, descending; 0 if there are fewer keys
    int64_t *link_keys;   // the same shape: their keys; -1 if there are fewer
    int64_t link_count;

    float *crop;  // (B, H, crop_rows, crop_cols): the weights of some queries and keys
    int64_t crop_row, crop_rows, crop_col, crop_cols;
};

// Inputs and outputs of the backward pass, beside the call itself with `out` and `lse` of the forward pass. Gradients
// have the dtype of their tensors; each is null if not wanted.
struct regard_gradients {
    uint64_t size;       // sizeof(regard_gradients)
    const void *d_out;   // (B, H, N, E)
    const float *d_lse;  // (B, H, N), or null: 0
    int64_t d_out_stride[3], d_lse_stride[3];

    void *d_q, *d_k, *d_v;
    int64_t d_q_stride[3], d_k_stride[3], d_v_stride[3];
    float *d_bias;  // the shape of the bias; summed over axes with stride 0, and added to the existing values
    int64_t d_bias_stride[4];
    float *d_sinks;  // (B, H), contiguous
};

// What is done to x W^T + bias.
enum regard_after : int32_t {
    REGARD_NOTHING = 0,
    REGARD_GELU = 1,
    REGARD_GELU_TANH = 2,
    REGARD_QUICK_GELU = 3,
    REGARD_RELU = 4,
    REGARD_SILU = 5,
    REGARD_TANH = 6,
    REGARD_ADD = 7,    // another tensor is added
    REGARD_TIMES = 8,  // or multiplied
};

// x, (rows, width), times several weights. Everything has the same dtype, and its last axis is contiguous.
struct regard_product {
    uint64_t size;  // sizeof(regard_product)
    int32_t isa;
    int32_t threads;
    int32_t dtype;
    int32_t after;  // enum regard_after
    int64_t rows, width, factors;
    const void *x;
    int64_t x_stride;
};

// One of these weights: out = after(x weight^T + bias).
struct regard_factor {
    const void *weight, *bias;  // (outs, width); (outs), or null
    void *out;                  // (rows, outs)
    const void *other;          // (rows, outs) with REGARD_ADD and REGARD_TIMES, else null
    int64_t outs, weight_stride, out_stride, other_stride;
};

// Rows of x divided by their root mean square, times weight + more. Everything has the same dtype.
struct regard_norm {
    uint64_t size;  // sizeof(regard_norm)
    int32_t isa;
    int32_t threads;
    int32_t dtype;
    float eps, more;
    int64_t rows, width;
    const void *x, *weight;  // (rows, width), its last axis contiguous; (width), or null
    void *out;               // (rows, width), contiguous
    int64_t x_stride;
};

// For each token of some texts, two lists for each kind: the tokens that stand `after` (0 or 1) after its earlier
// copies, and the same without the text's first token, the neighbours and the token itself. Both are slices of `keys`.
struct regard_copies_args {
    uint64_t size;         // sizeof(regard_copies_args)
    const int64_t *ids;    // (items, tokens)
    const int32_t *after;  // (kinds)
    int64_t items, tokens, kinds;
    int32_t *keys;         // (items, kinds, tokens): slots in the order of ids, `after` added
    int64_t *begin, *end;  // (items, tokens, kinds, 2), indices into all of `keys`
};

REGARD_API int32_t regard_attention(const regard_args *args);
REGARD_API int32_t regard_attention_backward(const regard_args *args, const regard_gradients *gradients);
REGARD_API int32_t regard_multiply(const regard_product *args, const regard_factor *factors);
REGARD_API int32_t regard_rms_norm(const regard_norm *args);
REGARD_API int32_t regard_copies(const regard_copies_args *args);
REGARD_API int32_t regard_best_isa(void);
REGARD_API int32_t regard_has_isa(int32_t isa);
REGARD_API uint64_t regard_args_size(void);
REGARD_API uint64_t regard_gradients_size(void);
REGARD_API uint64_t regard_product_size(void);
REGARD_API uint64_t regard_norm_size(void);
REGARD_API uint64_t regard_copies_args_size(void);
}
