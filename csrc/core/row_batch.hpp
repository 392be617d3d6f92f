// A batch of rows, each read as one transition or as n steps in one.
#pragma once
#include <cstdint>
#include <vector>

#include "leaf_reading.hpp"
#include "ring_memory.hpp"
#include "tensor_plans.hpp"

namespace relive {

// Allocates everything that reading needs, so that nothing after it can fail for want of memory.
//
// The tensors: every leaf at each row, the observations that the rows led to, the rows' ids. With n > 0 the flags and the
// next observation are those of the last of up to n steps, rewards are summed (float32 or float64), and a last tensor holds
// the discounts.
class RowBatch {
public:
    // Plan the tensors. Call `connect` once they are made, fill `slots`, then `read`.
    RowBatch(const RingMemory& memory, int64_t count, int64_t n, TensorPlans& plans);
    RowBatch(const RowBatch&) = delete;
    RowBatch(RowBatch&&) = default;

    void connect(const TensorPlans& plans);

    bool is_of(const RingMemory& memory) const { return memory_ == &memory; }
    int64_t count() const { return static_cast<int64_t>(first_.size()); }
    int64_t* slots() { return first_.data(); }

    // Find the last step and the next observation of every row. Quick.
    void find_ends();

    // Read every leaf; `find_ends` was called.
    void read(double gamma) const;

private:
    const int64_t* last() const { return n_ > 0 ? last_.data() : first_.data(); }

    const RingMemory* memory_;
    int64_t n_;
    std::vector<int64_t> first_, last_, next_;  // slots
    std::vector<LeafReading> readings_;
    int64_t* ids_ = nullptr;
    float* discount_ = nullptr;
};

}  // namespace relive
