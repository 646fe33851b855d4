// Compiled once per instruction set, each time in another namespace.
#include "products.h"

#include "norms.h"

namespace REGARD_NAMESPACE {

void product(const regard_product &a, const regard_factor *factors) {
    if (a.rows == 0 || a.factors == 0) return;
    if constexpr (PAIRS)
        if (lie_in_pairs(a, factors)) return Product<BFloat16, Pair>(a, factors).run();
    with_dtype(a.dtype, [&](auto number) { Product<decltype(number), float>(a, factors).run(); });
}

void norm(const regard_norm &a) { norm_rows(a); }

}  // namespace REGARD_NAMESPACE
