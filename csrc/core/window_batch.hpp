// A batch of sequences out of a ring: windows of steps around drawn rows.
#pragma once
#include <cstdint>
#include <vector>

#include "leaf_reading.hpp"
#include "ring_memory.hpp"
#include "tensor_plans.hpp"
#include "windows.hpp"

namespace relive {

// Raises if a window does not contain its own row, or if the steps of all windows cannot be counted.
void check_windows(int64_t before, int64_t after, int64_t count);

// The slots of windows [count, before + after] around each slot (see `window_around`), and which of them start an episode.
void find_windows(const Ring& ring, const int64_t* drawn, int64_t count, int64_t before, int64_t after, bool cross,
                  int64_t* slots, uint8_t* starts);

// The tensors: every leaf that is not carried [B, L, …], the observations that these steps led to, which steps are real,
// which of them are no burn-in, which start an episode, the carried leaves at the first step [B, …], the drawn rows' ids.
class WindowBatch {
public:
    WindowBatch(const RingMemory& memory, const int64_t* drawn, int64_t count, int64_t before, int64_t after, bool cross,
                const std::vector<int>& carried);

    // All slots of all windows; -1 is no step.
    const std::vector<int64_t>& slots() const { return slots_; }

    void plan(TensorPlans& plans) const;
    void read(const TensorPlans& plans);

private:
    std::vector<SlotRun> read_steps() const;
    void mark_steps(char* mask, char* train) const;

    const RingMemory& memory_;
    const int64_t* drawn_;
    int64_t count_, length_;
    std::vector<int64_t> slots_, next_;            // [count, length]
    std::vector<int64_t> start_, burn_in_;         // [count]
    std::vector<LeafReading> at_steps_, at_start_;  // leaves read at every step, and once per window
};

}  // namespace relive
