// The steps of one call, found in the caller's memory and cast, before any of them is stored.
#pragma once
#include <cstdint>
#include <vector>

#include "ring_memory.hpp"

namespace relive {

// The items of one leaf in the order [steps, environments]: exact dtype, contiguous.
struct GivenLeaf {
    const char* data;
    const char* source;  // the caller's memory, before any cast
    int64_t source_bytes;
    std::vector<char> scratch;  // the items, if they had to be cast
};

// The axes before a leaf's own shape: [steps, environments], each only if it is given.
struct LeadingAxes {
    int64_t steps, envs;
    bool has_steps, has_envs;

    // How many leading axes the array has; -1 if they do not fit.
    int count_in(const ArrayView& array) const;
};

// Use an array for a leaf, with a cast if one is needed; false if it is no exact fit.
bool accept(const ArrayView& array, const Leaf& leaf, const LeadingAxes& lead, GivenLeaf& given);

class StepBlock {
public:
    explicit StepBlock(const RingMemory& memory) : memory_(memory), given_(memory.leaves.size() + memory.observed.size()) {}

    // Begin a call of so many steps of all environments, or of the environments in `env_index`.
    void begin(int64_t steps);
    void begin(int64_t steps, const int64_t* env_index, int64_t envs);

    int64_t steps() const { return steps_; }
    int64_t envs() const { return envs_; }
    int64_t count() const { return steps_ * envs_; }
    bool of_all_envs() const { return of_all_envs_; }

    // The environment of position n, one of `envs()`, and of step i, one of `count()` in the order [steps, environments].
    int64_t env_at(int64_t n) const { return of_all_envs_ ? n : env_index_[static_cast<size_t>(n)]; }
    int64_t env_of(int64_t i) const { return env_at(i % envs_); }
    const int64_t* env_ids() const { return of_all_envs_ ? nullptr : env_index_.data(); }

    // All leaves, then the next observations.
    size_t size() const { return given_.size(); }
    GivenLeaf& given(size_t i) { return given_[i]; }

    const char* item(size_t leaf, int64_t bytes, int64_t i) const { return given_[leaf].data + i * bytes; }
    const char* obs(size_t o, int64_t i) const {
        return item(static_cast<size_t>(memory_.observed[o]), memory_.observation(o).given_bytes, i);
    }
    const char* next_obs(size_t o, int64_t i) const {
        return item(memory_.leaves.size() + o, memory_.observation(o).given_bytes, i);
    }

    const char* terminated_flags() const { return given_[static_cast<size_t>(memory_.terminated)].data; }
    const char* truncated_flags() const { return given_[static_cast<size_t>(memory_.truncated)].data; }
    bool ended(int64_t i) const { return terminated_flags()[i] || truncated_flags()[i]; }

    // Whether the observation and the next observation of the first step share memory: then the environment reuses its
    // array.
    bool overlaps(size_t o) const;

    // Whether every stack can be rebuilt from single frames. Returns -1, or the leaf that cannot (`size()` counts them).
    // Remembers which steps continue the step before.
    int64_t check_stacks();

    // Whether step i starts with the observation that a slot holds.
    bool starts_with(int64_t flat, int64_t i) const;

    // Whether step i starts with the observation that the step before it in this block led to.
    bool continues_block(int64_t i) const;

    // Whether step i starts with the observation of the pending row of its environment.
    bool continues_pending(int64_t row, int64_t env, int64_t i) const {
        return continues_.empty() ? starts_with(memory_.ring.at(row, env), i) : continues_[static_cast<size_t>(i)] != 0;
    }

    bool has_stacks() const { return !continues_.empty(); }
    bool stack_continues(int64_t i) const { return continues_[static_cast<size_t>(i)] != 0; }

    // Free the memory of large casts.
    void forget_casts();

private:
    int64_t unpadded(int64_t i) const;
    int64_t unstackable(int64_t i) const;

    const RingMemory& memory_;
    int64_t steps_ = 0, envs_ = 0;
    std::vector<GivenLeaf> given_;
    bool of_all_envs_ = true;
    std::vector<int64_t> env_index_;
    std::vector<uint8_t> continues_;     // of stacks: which steps start where the step before led
    mutable std::vector<char> rebuilt_;  // a stack, for comparison
};

}  // namespace relive
