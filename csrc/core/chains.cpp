#include "chains.hpp"

#include <cstring>
#include <vector>

namespace relive {

// Count the end that step i follows, if that end is still stored. An episode of one step tells nothing: a bandit may well
// pass the next context as the next observation.
void ChainCounter::count_end(const StepBlock& block, int64_t env, int64_t i) {
    const Ring& ring = memory_.ring;
    const int64_t row = minus(ring.head[env], 2);  // the step that ended; the row after it holds the observation that it led to
    if (ring.next_step || ring.keeps_next || row < ring.floor[env]) return;
    const int64_t flat = ring.at(row, env), final = ring.at(plus(row, 1), env);
    const bool is_step = ring.kind[flat] == kTransition || ring.kind[flat] == kHistory;
    if (ring.kind[final] != kFinal || !is_step || ring.first[flat]) return;
    const bool terminated = memory_.leaves[static_cast<size_t>(memory_.terminated)].column[flat];
    if (!terminated && !memory_.leaves[static_cast<size_t>(memory_.truncated)].column[flat]) return;  // cut
    chains_.count_end(leads_away(flat, final) && block.starts_with(final, i), terminated || memory_.same_step);
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

}  // namespace relive
