// A forked child has none of its parent's threads, but the OpenMP state of the thread that forked still expects them
// and would wait forever. A new thread has no such state, so in a forked child calls run in a new thread.
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
