// Compiled once per instruction set, each time in another namespace.
#include "products.h"

#include "norms.h"

namespace REGARD_NAMESPACE {

void product(const regard_product &a, const regard_factor *factors) {
    if (a.rows == 0 || a.factors == 0) return;
    with_dtype(a.dtype, [&](auto number) { Product<decltype(number)>(a, factors).run(); });
}

void norm(const regard_norm &a) { norm_rows(a); }

}  // namespace REGARD_NAMESPACE
