// Reads one leaf at many slots.
#pragma once
#include <cstdint>
#include <cstring>

#include "gather.hpp"
#include "ring_memory.hpp"
#include "tensor_plans.hpp"

namespace relive {

constexpr int64_t kMostSteps = int64_t{1} << 30;  // of a window, and windows of a batch: their product fits

// One leaf to read: from which column, at which slots, and where to.
struct LeafReading {
    const Leaf* leaf;
    const char* column;
    const int64_t* slots;  // -1 gives zeros for stacked leaves; other leaves need slots of the ring
    char* out;
};

inline void plan_leaf(TensorPlans& plans, const Leaf& leaf, int lead_ndim, const int64_t* lead) {
    plans.add(leaf.dtype, lead_ndim, lead, leaf.ndim, leaf.shape, "leaf");
}

inline void read_leaf(const Ring& ring, const LeafReading& reading, int64_t count) noexcept {
    const Leaf& leaf = *reading.leaf;
    if (!leaf.stacked()) {
        gather(reading.out, reading.column, reading.slots, count, leaf.bytes, ring.num_flat());
        return;
    }
    for (int64_t i = 0; i < count; ++i) {
        char* stack = reading.out + i * leaf.given_bytes;
        if (reading.slots[i] < 0) std::memset(stack, 0, static_cast<size_t>(leaf.given_bytes));
        else build_stack(ring, leaf, reading.column, reading.slots[i], stack);
    }
}

}  // namespace relive
