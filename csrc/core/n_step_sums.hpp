// Rewards of several steps summed into one, for batches of rows.
#pragma once
#include <cstdint>

#include "leaf_reading.hpp"

namespace relive {

// The slot of the last of up to n steps: the end of the episode or the newest row may come first.
inline int64_t last_of(const Ring& ring, int64_t slot, int64_t n) {
    for (int64_t k = 1; k < n; ++k) {
        const int64_t next = ring.after(slot);
        if (ring.kind[next] != kTransition) break;
        slot = next;
    }
    return slot;
}

template <class T>
inline void sum_rewards_as(const Ring& memory_ring, const LeafReading& reading, const int64_t* last, int64_t count,
                           double gamma, float* discount) {
    const auto* rewards = reinterpret_cast<const T*>(reading.column);
    auto* out = reinterpret_cast<T*>(reading.out);
    const int64_t width = reading.leaf->bytes / static_cast<int64_t>(sizeof(T));
    const Ring ring = memory_ring;  // a copy: no store can change it, so that it stays in registers
    for (int64_t i = 0; i < count; ++i) {
        int64_t slot = reading.slots[i];
        double factor = 1;
        for (int64_t w = 0; w < width; ++w) out[i * width + w] = rewards[slot * width + w];
        while (slot != last[i]) {
            slot = ring.after(slot);
            factor *= gamma;
            for (int64_t w = 0; w < width; ++w) out[i * width + w] += static_cast<T>(factor * rewards[slot * width + w]);
        }
        discount[i] = static_cast<float>(factor * gamma);
    }
}

// out[i] = Σ γ^j r of the k steps from `reading.slots[i]` to `last[i]`, and discount[i] = γ^k. Rewards are float32 or float64.
inline void sum_rewards(const Ring& ring, const LeafReading& reading, const int64_t* last, int64_t count, double gamma,
                        float* discount) {
    if (reading.leaf->dtype == kFloat32) sum_rewards_as<float>(ring, reading, last, count, gamma, discount);
    else sum_rewards_as<double>(ring, reading, last, count, gamma, discount);
}

// The discounts alone, multiplied in the same order.
inline void multiply_discounts(const Ring& ring, const int64_t* first, const int64_t* last, int64_t count, double gamma,
                               float* discount) {
    for (int64_t i = 0; i < count; ++i) {
        double factor = gamma;
        for (int64_t slot = first[i]; slot != last[i]; slot = ring.after(slot)) factor *= gamma;
        discount[i] = static_cast<float>(factor);
    }
}

}  // namespace relive
