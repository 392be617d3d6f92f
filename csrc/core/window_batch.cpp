#include "window_batch.hpp"

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>

namespace relive {

void check_windows(int64_t before, int64_t after, int64_t count) {
    if (before < 0 || after < 1) throw std::out_of_range("window: expected at least 0 steps before and 1 from the row on");
    if (before > kMostSteps || after > kMostSteps || count > kMostSteps) throw OutOfMemory();
    require_memory(count * (before + after) > kMostSteps * 16 ? kMostSteps * kMostSteps : count * (before + after) * 2 * 8);
}

void find_windows(const Ring& ring, const int64_t* drawn, int64_t count, int64_t before, int64_t after, bool cross,
                  int64_t* slots, uint8_t* starts) {
    const int64_t length = before + after;
    for (int64_t i = 0; i < count; ++i) {
        if (drawn[i] < 0) std::fill_n(slots + i * length, length, int64_t{-1});
        else window_around(ring, drawn[i], before, after, cross, slots + i * length);
        for (int64_t j = i * length; j < (i + 1) * length; ++j) starts[j] = slots[j] >= 0 && ring.first[slots[j]];
    }
}

WindowBatch::WindowBatch(const RingMemory& memory, const int64_t* drawn, int64_t count, int64_t before, int64_t after,
                         bool cross, const std::vector<int>& carried)
    : memory_(memory), drawn_(drawn), count_(count), length_(before + after),
      slots_(static_cast<size_t>(count * length_)), next_(slots_.size()), start_(static_cast<size_t>(count)),
      burn_in_(start_.size()) {
    const Ring ring = memory.ring;  // a copy: no store can change it, so that it stays in registers
    for (int64_t i = 0; i < count; ++i) {
        const auto b = static_cast<size_t>(i);
        burn_in_[b] = window_around(ring, drawn[i], before, after, cross, slots_.data() + i * length_);
        start_[b] = slots_[static_cast<size_t>(i * length_)];
    }
    for (size_t i = 0; i < slots_.size(); ++i) next_[i] = slots_[i] < 0 ? -1 : ring.after(slots_[i]);
    for (size_t l = 0; l < memory.leaves.size(); ++l) {
        const Leaf& leaf = memory.leaves[l];
        const bool once = std::find(carried.begin(), carried.end(), static_cast<int>(l)) != carried.end();
        (once ? at_start_ : at_steps_).push_back({&leaf, leaf.column, once ? start_.data() : slots_.data(), nullptr});
    }
    for (size_t o = 0; o < memory.observed.size(); ++o) {
        const Leaf& leaf = memory.observation(o);
        at_steps_.push_back({&leaf, leaf.column, next_.data(), nullptr});
    }
}

void WindowBatch::plan(TensorPlans& plans) const {
    const int64_t lead[] = {count_, length_};
    for (const LeafReading& reading : at_steps_) plan_leaf(plans, *reading.leaf, 2, lead);
    for (int mark = 0; mark < 3; ++mark) plans.add(kBool, 2, lead);
    for (const LeafReading& reading : at_start_) plan_leaf(plans, *reading.leaf, 1, lead);
    plans.add(kInt64, 1, lead);
}

void WindowBatch::read(const TensorPlans& plans) {
    size_t made = 0;
    for (LeafReading& reading : at_steps_) reading.out = plans.data(made++);
    char *mask = plans.data(made), *train = plans.data(made + 1), *is_first = plans.data(made + 2);
    made += 3;
    for (LeafReading& reading : at_start_) reading.out = plans.data(made++);
    const Ring& ring = memory_.ring;
    ring.ids_of(drawn_, count_, reinterpret_cast<int64_t*>(plans.data(made)));
    const std::vector<SlotRun> runs = read_steps();
    for (const LeafReading& reading : at_start_) read_leaf(ring, reading, count_);
    read_runs(is_first, reinterpret_cast<const char*>(ring.first), runs, 1, ring.envs);
    mark_steps(mask, train);
}

// Returns the runs of the windows' slots.
std::vector<SlotRun> WindowBatch::read_steps() const {
    const auto steps = static_cast<int64_t>(slots_.size());
    const Ring& ring = memory_.ring;
    std::vector<SlotRun> runs = runs_of(ring, slots_.data(), steps);
    const std::vector<SlotRun> next_runs = runs_of(ring, next_.data(), steps);
    for (const LeafReading& reading : at_steps_) {
        const bool is_next = reading.slots == next_.data();
        if (reading.leaf->stacked()) read_leaf(ring, reading, steps);
        else read_runs(reading.out, reading.column, is_next ? next_runs : runs, reading.leaf->bytes, ring.envs);
    }
    return runs;
}

void WindowBatch::mark_steps(char* mask, char* train) const {
    for (size_t i = 0; i < slots_.size(); ++i) mask[i] = slots_[i] >= 0;
    std::memcpy(train, mask, slots_.size());
    for (int64_t i = 0; i < count_; ++i)
        std::memset(train + i * length_, 0, static_cast<size_t>(burn_in_[static_cast<size_t>(i)]));
}

}  // namespace relive
