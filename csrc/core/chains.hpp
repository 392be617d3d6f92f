// Counts how the steps that one object writes are joined, so that data that looks like a mistake is noticed. The counters
// are no part of what is stored. The same rule in Python: replay/chains.py.
#pragma once
#include <cstdint>

#include "step_block.hpp"

namespace relive {

struct Chains {
    int64_t followed = 0;  // steps after a step that did not end its episode
    int64_t cut = 0;       // of these, steps that do not start where the step before led
    int64_t ended = 0;     // ends of episodes that a step was seen after
    int64_t reset = 0;     // of these, ends that lead to the observation of that step and not to their own
    int64_t restarted = 0;  // steps that show a reset from outside that was not announced by a cut

    int64_t infinite = 0;   // writes with a reward that is infinite or no number

    bool look_cut() const { return followed >= 64 && 2 * cut > followed; }
    bool look_reset() const { return ended >= 8 && reset == ended; }
    // Unless most steps are joined, observations were changed: that tells nothing of resets.
    bool look_restarted() const { return restarted > 0 && 2 * cut < followed; }

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

enum class Doubt { kNone, kLooksCut, kLooksReset, kLooksRestarted, kLooksInfinite };

class ChainCounter {
public:
    explicit ChainCounter(const RingMemory& memory) : memory_(memory) {}

    // Count step i, just before it is written.
    void count_step(bool continues) { chains_.count_step(continues); }
    void count_rewards(bool finite) { chains_.infinite += !finite; }
    void count_steps(int64_t continuing) { chains_.followed += continuing; }
    // A step that should have begun with the pending observation: a reset row, or one of an episode that goes on.
    void count_start(bool continues, bool is_reset_row) { chains_.restarted += !continues && (is_reset_row || watches_cuts_); }
    void count_end(const StepBlock& block, int64_t env, int64_t i);

    const Chains& counted() const { return chains_; }

    // Whether what was counted looks like a mistake. Each doubt is reported once.
    Doubt doubt() {
        if (!told_cut_ && chains_.look_cut()) {
            told_cut_ = true;
            return Doubt::kLooksCut;
        }
        if (!told_reset_ && chains_.look_reset()) {
            told_reset_ = true;
            return Doubt::kLooksReset;
        }
        if (!told_restarted_ && chains_.look_restarted()) {
            told_restarted_ = true;
            return Doubt::kLooksRestarted;
        }
        if (!told_infinite_ && chains_.infinite) {
            told_infinite_ = true;
            return Doubt::kLooksInfinite;
        }
        return Doubt::kNone;
    }

    // Statistics count episodes: a cut that nobody announced joins two of them.
    void watch_cuts(bool on) { watches_cuts_ = on; }

private:
    bool leads_away(int64_t flat, int64_t next) const;

    const RingMemory& memory_;
    Chains chains_;
    bool told_cut_ = false, told_reset_ = false, told_restarted_ = false, told_infinite_ = false;
    bool watches_cuts_ = false;
};

}  // namespace relive
