#include "row_batch.hpp"

#include <new>

#include "n_step_sums.hpp"

namespace relive {

RowBatch::RowBatch(const RingMemory& memory, int64_t count, int64_t n, TensorPlans& plans) : memory_(&memory), n_(std::min(n, memory.ring.slots)) {
    for (const Leaf& leaf : memory.leaves) plan_leaf(plans, leaf, 1, &count);
    for (size_t o = 0; o < memory.observed.size(); ++o) plan_leaf(plans, memory.observation(o), 1, &count);
    plans.add(kInt64, 1, &count);
    if (n > 0) plans.add(kFloat32, 1, &count);
    require_memory(plans.bytes() + 3 * 8 * count);
    first_.resize(static_cast<size_t>(count));
    last_.resize(n > 0 ? first_.size() : 0);
    next_.resize(memory.ring.keeps_next ? 0 : first_.size());
}

void RowBatch::connect(const TensorPlans& plans) {
    const RingMemory& memory = *memory_;
    size_t made = 0;
    for (size_t l = 0; l < memory.leaves.size(); ++l) {
        const bool is_end = static_cast<int>(l) == memory.terminated || static_cast<int>(l) == memory.truncated;
        const Leaf& leaf = memory.leaves[l];
        readings_.push_back({&leaf, leaf.column, is_end ? last() : first_.data(), plans.data(made++)});
    }
    for (size_t o = 0; o < memory.observed.size(); ++o) {
        const Leaf& leaf = memory.observation(o);
        if (memory.ring.keeps_next) readings_.push_back({&leaf, memory.next_columns[o], last(), plans.data(made++)});
        else readings_.push_back({&leaf, leaf.column, next_.data(), plans.data(made++)});
    }
    ids_ = reinterpret_cast<int64_t*>(plans.data(made++));
    if (n_ > 0) discount_ = reinterpret_cast<float*>(plans.data(made));
}

void RowBatch::find_ends() {
    const Ring ring = memory_->ring;  // a copy: no store can change it, so that it stays in registers
    for (size_t i = 0; i < last_.size(); ++i) last_[i] = last_of(ring, first_[i], n_);
    const int64_t* last = this->last();
    for (size_t i = 0; i < next_.size(); ++i) next_[i] = ring.after(last[i]);
}

void RowBatch::read(double gamma) const {
    memory_->ring.ids_of(first_.data(), count(), ids_);
    for (size_t i = 0; i < readings_.size(); ++i)
        if (n_ == 0 || static_cast<int>(i) != memory_->reward) read_leaf(memory_->ring, readings_[i], count());
    if (n_ == 0) return;
    sum_rewards(memory_->ring, readings_[static_cast<size_t>(memory_->reward)], last(), count(), gamma, discount_);
}

}  // namespace relive
