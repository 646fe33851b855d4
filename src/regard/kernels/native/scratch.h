// Memory that a thread keeps between calls.
#pragma once
#include <cstdlib>
#include <new>

namespace REGARD_NAMESPACE {

constexpr size_t KEPT = 8 << 20;  // bytes of scratch that are kept between calls, which is faster than allocating

// Memory that a thread keeps between calls, from which each call takes its buffers.
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
    // Frees the memory if it is more than `bytes`.
    void keep(size_t bytes) {
        if (size <= bytes) return;
        std::free(memory);
        memory = nullptr;
        size = 0;
    }
    template <class T>
    T *take(size_t count) {
        T *p = reinterpret_cast<T *>(memory + used);
        used += (count * sizeof(T) + 63) / 64 * 64;
        return p;
    }
};

}  // namespace REGARD_NAMESPACE
