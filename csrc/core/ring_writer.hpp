// Writes steps into the ring.
#pragma once
#include <cstdint>
#include <vector>

#include "chains.hpp"
#include "ring_memory.hpp"
#include "step_block.hpp"

namespace relive {

class RingWriter {
public:
    explicit RingWriter(RingMemory& memory) : memory_(memory), ring_(memory.ring), block_(memory), chains_(memory) {
        touched_.kind = ring_.kind;
    }

    // The steps to write. Fill the block, check it, then write it.
    StepBlock& block() { return block_; }
    ChainCounter& chains() { return chains_; }

    // Whether every stack of the block can be rebuilt: -1, or the leaf that cannot.
    int64_t check_stacks();

    // Write all steps of the block, which are checked.
    void write();

    Touched& touched() { return touched_; }
    void keep_touched(bool on) { keep_touched_ = on; }

private:
    bool all_continue(int64_t t) const;
    void write_all_envs(int64_t t);
    void close_all_envs(int64_t row, int64_t first_step, bool open);
    void write_one(int64_t env, int64_t i);
    void finish_beside(int64_t env, int64_t row, int64_t i, bool with_obs);
    void store_leaves(int64_t flat, int64_t i, bool with_obs);
    void store_next_obs(int64_t flat, int64_t i);

    std::vector<int64_t>* touched_slots() { return keep_touched_ ? &touched_.slots : nullptr; }

    RingMemory& memory_;
    Ring& ring_;
    StepBlock block_;
    ChainCounter chains_;
    Touched touched_;
    bool keep_touched_ = false;
};

}  // namespace relive
