// The memory of a replay buffer: a ring, the columns of its leaves, and which leaves have a meaning.
#pragma once
#include <cstdint>
#include <vector>

#include "leaf.hpp"
#include "rewritable.hpp"
#include "ring.hpp"

namespace relive {

struct RingMemory {
    Ring ring{};
    std::vector<Leaf> leaves;
    std::vector<int> observed;         // which leaves are observations, ascending
    std::vector<char*> next_columns;   // of the next observations, if they are stored beside their rows
    int reward, terminated, truncated;  // which leaves they are
    Rewritable rewritable;
    bool same_step;  // environments are known to reset in the step that ends an episode

    const Leaf& observation(size_t o) const { return leaves[static_cast<size_t>(observed[o])]; }

    bool has_stacks() const {
        for (const int o : observed)
            if (leaves[static_cast<size_t>(o)].stacked()) return true;
        return false;
    }

    // How many rows may be drawn.
    int64_t stored() const {
        int64_t sum = 0;
        for (int64_t e = 0; e < ring.envs; ++e) sum = plus(sum, ring.count[e]);
        return sum;
    }
};

// The stack of a leaf at a slot, built from its frames.
inline void build_stack(const Ring& ring, const Leaf& leaf, const char* column, int64_t flat, char* stack) noexcept {
    const char* frames[kMostFrames];
    frames_at(ring, column, leaf.frames, flat, frames);
    leaf.frames.put_all(stack, frames);
}

}  // namespace relive
