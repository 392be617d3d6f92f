#include "row_batch.hpp"

#include <new>

namespace relive {
namespace {

// The slot of the last of up to n steps: the end of the episode or the newest row may come first.
int64_t last_of(const Ring& ring, int64_t slot, int64_t n) {
    for (int64_t k = 1; k < n; ++k) {
        const int64_t next = ring.after(slot);
        if (ring.kind[next] != kTransition) break;
        slot = next;
    }
    return slot;
}

}  // namespace

RowBatch::RowBatch(const RingMemory& memory, int64_t count, int64_t n, TensorPlans& plans) : memory_(&memory), n_(n) {
    if (count < 0 || count > kMostSteps * 2) throw std::bad_alloc();
    for (const Leaf& leaf : memory.leaves) plan_leaf(plans, leaf, 1, &count);
    for (size_t o = 0; o < memory.observed.size(); ++o) plan_leaf(plans, memory.observation(o), 1, &count);
    plans.add(kInt64, 1, &count);
    if (n > 0) plans.add(kFloat32, 1, &count);
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
    const LeafReading& rewards = readings_[static_cast<size_t>(memory_->reward)];
    if (rewards.leaf->dtype == kFloat32) sum_rewards<float>(rewards, gamma);
    else sum_rewards<double>(rewards, gamma);
}

template <class T>
void RowBatch::sum_rewards(const LeafReading& reading, double gamma) const {
    const auto* rewards = reinterpret_cast<const T*>(reading.column);
    auto* out = reinterpret_cast<T*>(reading.out);
    const int64_t width = reading.leaf->bytes / static_cast<int64_t>(sizeof(T)), count = this->count();
    const int64_t* last = this->last();
    const Ring ring = memory_->ring;
    for (int64_t i = 0; i < count; ++i) {
        int64_t slot = reading.slots[i];
        double factor = 1;
        for (int64_t w = 0; w < width; ++w) out[i * width + w] = rewards[slot * width + w];
        while (slot != last[i]) {
            slot = ring.after(slot);
            factor *= gamma;
            for (int64_t w = 0; w < width; ++w) out[i * width + w] += static_cast<T>(factor * rewards[slot * width + w]);
        }
        discount_[i] = static_cast<float>(factor * gamma);
    }
}

}  // namespace relive
