// Runs the same function in several threads.
#pragma once
#include <omp.h>

namespace REGARD_NAMESPACE {

// A team of one is a plain call: OpenMP takes a microsecond to form it, more than a small attention.
template <class Function>
void in_team(int threads, Function f) {
    if (threads == 1) return f();
#pragma omp parallel num_threads(threads)
    f();
}

}  // namespace REGARD_NAMESPACE
