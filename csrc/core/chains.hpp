// Counts how the steps that one object writes are joined, so that data that looks like a mistake is noticed. The counters
// are no part of what is stored. The same rule in Python: replay/chains.py.
#pragma once
#include <cstdint>
#include <vector>

#include "step_block.hpp"

namespace relive {

struct Chains {
    int64_t followed = 0;  // steps after a step that did not end its episode
    int64_t cut = 0;       // of these, steps that do not start where the step before led
    int64_t ended = 0;     // ends of episodes that a step was seen after
    int64_t reset = 0;     // of these, ends that lead to the observation of that step and not to their own

    bool look_cut() const { return may_look_cut(0); }
    bool look_reset() const { return may_look_reset(0); }

    // The same after so many more steps, or ends, in the worst case.
    bool may_look_cut(int64_t more) const { return followed + more >= 64 && 2 * cut + more > followed; }
    bool may_look_reset(int64_t more) const { return reset == ended && ended + more >= 8; }

    void count_step(bool continues) {
        ++followed;
        cut += !continues;
    }

    // An end that leads to where the next episode starts. A truncated end may be an episode that simply goes on, unless
    // the environments are known to reset in the same step.
    void count_end(bool leads_to_start, bool surely_over) {
        if (leads_to_start && !surely_over) return;
        ++ended;
        reset += leads_to_start;
    }
};

enum class Doubt { kNone, kLooksCut, kLooksReset };

class ChainCounter {
public:
    explicit ChainCounter(const RingMemory& memory) : memory_(memory) {}

    // Before a block is written: whether the chains would look broken with it. Each doubt is reported once.
    Doubt doubt(const StepBlock& block) { return may_doubt(block.count()) ? look(block) : Doubt::kNone; }

    // Count step i, just before it is written.
    void count_step(bool continues) { chains_.count_step(continues); }
    void count_steps(int64_t continuing) { chains_.followed += continuing; }
    void count_end(const StepBlock& block, int64_t env, int64_t i) { count_end(block, env, i, chains_); }

    const Chains& counted() const { return chains_; }
    const Chains& foreseen() const { return foreseen_; }  // with the block that was last doubted

private:
    void count_end(const StepBlock& block, int64_t env, int64_t i, Chains& chains) const;
    bool leads_away(int64_t flat, int64_t next) const;
    // Whether the steps have to be looked at, which is rare.
    bool may_doubt(int64_t steps) const {
        return !memory_.ring.keeps_next && ((!told_cut_ && chains_.may_look_cut(steps)) ||
                                            (!told_reset_ && !memory_.ring.next_step && chains_.may_look_reset(steps)));
    }

    Doubt look(const StepBlock& block);
    Chains foresee(const StepBlock& block) const;
    int64_t most_ends(const StepBlock& block) const;

    const RingMemory& memory_;
    Chains chains_, foreseen_;
    bool told_cut_ = false, told_reset_ = false;
};

}  // namespace relive
