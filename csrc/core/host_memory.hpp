// How much memory the machine has left, before a request for very much of it.
#pragma once
#include <cstdint>
#include <new>

namespace relive {

struct OutOfMemory : std::bad_alloc {
    const char* what() const noexcept override {
        return "memory: expected room for the whole result, got less. Ask for fewer rows or shorter sequences.";
    }
};

constexpr int64_t kMuchMemory = int64_t{1} << 30;

// Throws OutOfMemory if the system says that so many bytes cannot be had. It grants pages that it does not have, and
// ends a process when they are touched.
void look_for_memory(int64_t bytes);

inline void require_memory(int64_t bytes) {
    if (bytes > kMuchMemory) look_for_memory(bytes);
}

}  // namespace relive
