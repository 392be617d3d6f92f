// The tensors that a call will return: dtype and shape of each before they are made, and their memory afterwards.
//
// Making a tensor costs more than filling a small one. The small tensors of a batch therefore share one block of memory,
// which lives as long as any of them. A large tensor has a block of its own, so that keeping the rewards of a batch does
// not keep its images.
#pragma once
#include <cstdint>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "array_view.hpp"
#include "host_memory.hpp"

namespace relive {

struct TensorPlan {
    DataType dtype;
    int ndim;
    int64_t shape[kMaxDims];
    int64_t bytes;
    bool in_shared_block;
    char* data;  // null until the tensor is made
};

class TensorPlans {
public:
    static constexpr int64_t round_up(int64_t bytes) { return (bytes + 63) / 64 * 64; }

    // Plan one more tensor. Its memory is `data(i)` once the tensors are made.
    void add(DataType dtype, int ndim, const int64_t* shape) {
        TensorPlan plan{dtype, ndim, {}, dtype.bytes(), false, nullptr};
        bool is_empty = false;  // then strides are counted all the same
        for (int d = 0; d < ndim; ++d) {
            plan.shape[d] = shape[d];
            if (shape[d] < 0 || (shape[d] > 0 && plan.bytes > kMostBytes / shape[d])) throw OutOfMemory();
            plan.bytes *= shape[d] ? shape[d] : 1;
            is_empty = is_empty || shape[d] == 0;
        }
        if (is_empty) plan.bytes = 0;
        total_ += round_up(plan.bytes);
        if (total_ > kMostBytes) throw OutOfMemory();
        require_memory(total_);
        plan.in_shared_block = shared_bytes_ + round_up(plan.bytes) <= kSharedBytes;
        if (plan.in_shared_block) {
            ++shared_;
            shared_bytes_ += round_up(plan.bytes);
        }
        plans_.push_back(plan);
    }

    // Plan a tensor [lead…, shape…]; `what` is named if it has too many axes.
    void add(DataType dtype, int lead_ndim, const int64_t* lead, int ndim, const int64_t* shape, const char* what) {
        if (lead_ndim + ndim > kMaxDims) throw std::invalid_argument(std::string(what) + ": expected fewer axes");
        int64_t whole[kMaxDims];
        std::memcpy(whole, lead, sizeof(int64_t) * static_cast<size_t>(lead_ndim));
        std::memcpy(whole + lead_ndim, shape, sizeof(int64_t) * static_cast<size_t>(ndim));
        add(dtype, lead_ndim + ndim, whole);
    }

    std::vector<TensorPlan>& plans() { return plans_; }
    char* data(size_t i) const { return plans_[i].data; }
    int64_t bytes() const { return total_; }
    size_t shared() const { return shared_; }
    int64_t shared_bytes() const { return shared_bytes_; }

private:
    static constexpr int64_t kSharedBytes = 1 << 17;
    static constexpr int64_t kMostBytes = int64_t{1} << 48;  // larger than any address space, and sums of it cannot wrap

    std::vector<TensorPlan> plans_;
    size_t shared_ = 0;  // how many tensors share a block
    int64_t shared_bytes_ = 0, total_ = 0;
};

}  // namespace relive
