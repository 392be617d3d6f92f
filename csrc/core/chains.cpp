#include "chains.hpp"

#include <cstring>

namespace relive {

Doubt ChainCounter::look(const StepBlock& block) {
    const bool may_cut = !told_cut_ && chains_.may_look_cut(block.count());
    const bool may_reset = !told_reset_ && !memory_.ring.next_step && chains_.may_look_reset(most_ends(block));
    if (!may_cut && !may_reset) return Doubt::kNone;
    foreseen_ = foresee(block);
    if (may_cut && foreseen_.look_cut()) {
        told_cut_ = true;
        return Doubt::kLooksCut;
    }
    if (may_reset && foreseen_.look_reset()) {
        told_reset_ = true;
        return Doubt::kLooksReset;
    }
    return Doubt::kNone;
}

// At most so many steps of the block follow an end.
int64_t ChainCounter::most_ends(const StepBlock& block) const {
    int64_t closed = 0;
    for (int64_t n = 0; n < block.envs(); ++n) closed += !memory_.ring.open[block.env_at(n)];
    return closed + (block.steps() - 1) * block.envs();
}

// Count the end that step i follows, if that end is still stored. An episode of one step tells nothing: a bandit may well
// pass the next context as the next observation.
void ChainCounter::count_end(const StepBlock& block, int64_t env, int64_t i, Chains& chains) const {
    const Ring& ring = memory_.ring;
    const int64_t row = minus(ring.head[env], 2);  // the step that ended; the row after it holds the observation that it led to
    if (ring.next_step || ring.keeps_next || row < ring.floor[env]) return;
    const int64_t flat = ring.at(row, env), final = ring.at(plus(row, 1), env);
    const bool is_step = ring.kind[flat] == kTransition || ring.kind[flat] == kHistory;
    if (ring.kind[final] != kFinal || !is_step || ring.first[flat]) return;
    const bool terminated = memory_.leaves[static_cast<size_t>(memory_.terminated)].column[flat];
    if (!terminated && !memory_.leaves[static_cast<size_t>(memory_.truncated)].column[flat]) return;  // cut
    chains.count_end(leads_away(flat, final) && block.starts_with(final, i), terminated || memory_.same_step);
}

// Whether two slots hold different observations; of stacked frames, whole stacks are compared.
bool ChainCounter::leads_away(int64_t flat, int64_t next) const {
    std::vector<char> own, led;
    for (size_t o = 0; o < memory_.observed.size(); ++o) {
        const Leaf& leaf = memory_.observation(o);
        const char *a = leaf.at(flat), *b = leaf.at(next);
        if (leaf.stacked()) {
            own.resize(static_cast<size_t>(leaf.given_bytes));
            led.resize(own.size());
            build_stack(memory_.ring, leaf, leaf.column, flat, own.data());
            build_stack(memory_.ring, leaf, leaf.column, next, led.data());
            a = own.data(), b = led.data();
        }
        if (std::memcmp(a, b, static_cast<size_t>(leaf.given_bytes)) != 0) return true;
    }
    return false;
}

// The counters after these steps.
Chains ChainCounter::foresee(const StepBlock& block) const {
    const Ring& ring = memory_.ring;
    const int64_t envs = block.envs();
    Chains chains = chains_;
    // Of the previous step in each column: it only resets; it starts an episode.
    std::vector<uint8_t> reset(static_cast<size_t>(envs), 0), starts(reset.size(), 0);
    for (int64_t i = 0; i < block.count(); ++i) {
        const auto n = static_cast<size_t>(i % envs);
        const int64_t env = block.env_of(i), before = i - envs;
        const bool later = before >= 0, after_end = later && block.ended(before) && !reset[n];
        const bool resets = ring.next_step && (later ? after_end : ring.resetting[env]);
        const bool open = later ? ring.next_step || !after_end : ring.open[env];
        bool continues = false;
        if (open && !resets) {
            continues = later && !block.has_stacks() ? block.continues_block(i)
                                                     : block.continues_pending(ring.head[env], env, i);
            chains.count_step(continues);
        } else if (!later) {
            if (!open) count_end(block, env, i, chains);
        } else if (!ring.next_step && !starts[n]) {
            chains.count_end(block.previous_leads_to_start(i), block.terminated(before) || memory_.same_step);
        }
        starts[n] = !continues && !resets;
        reset[n] = resets;
    }
    return chains;
}

}  // namespace relive
