// A forked child has none of its parent's threads, but its OpenMP runtime still counts on those of the thread that
// forked and would wait for them for ever. A thread that is new in the child has no such memory: so there, calls run in
// one.
#pragma once
#include <pthread.h>

#include <atomic>
#include <thread>

namespace regard {

inline std::atomic<bool> in_a_child{false};
inline const int watching = pthread_atfork(nullptr, nullptr, [] { in_a_child = true; });

template <class Function>
void run_anywhere(Function f) {
    if (!in_a_child) return f();
    std::thread(f).join();
}

}  // namespace regard
