#include "ring_slots.hpp"

#include <algorithm>

#include "prefetch.hpp"

namespace relive {
namespace {

constexpr int64_t kRare = 16;  // one transition in so many slots is too rare to find by chance

// The slot of the row that lies `back / envs` rows before the newest row of environment `back % envs`; -1 before the last
// clear.
int64_t recent_slot(const Ring& ring, int64_t back) {
    const int64_t env = back % ring.envs, row = minus(ring.newest(env), back / ring.envs);
    return row < ring.floor[env] ? -1 : ring.at(row, env);
}

}  // namespace

bool draw_slots(const RingMemory& memory, int64_t count, const BitGenerator& random, int64_t* slots) {
    const Ring& ring = memory.ring;
    int64_t longest = 0;  // the longest column, in rows since the last clear
    for (int64_t e = 0; e < ring.envs; ++e) longest = std::max(longest, minus(plus(ring.newest(e), 1), ring.floor[e]));
    const bool is_full = longest >= ring.slots;
    const int64_t range = (is_full ? ring.slots : longest) * ring.envs;
    if (memory.stored() <= range / kRare) return false;
    // All missing slots are drawn before any is looked at, so that their cache lines arrive together.
    for (int64_t found = 0, draws_left = 1024 + 4 * kRare * count; found < count;) {
        if ((draws_left -= count - found) < 0) return false;
        for (int64_t i = found; i < count; ++i) {
            slots[i] = is_full ? random.below_any(range) : recent_slot(ring, random.below_any(range));
            if (slots[i] >= 0) RELIVE_PREFETCH(ring.kind + slots[i]);
        }
        for (int64_t i = found; i < count; ++i) {
            const int64_t slot = slots[i];
            slots[found] = slot;
            found += slot >= 0 && ring.kind[slot] == kTransition;
        }
    }
    return true;
}

int64_t steps_following(const Ring& ring, int64_t flat) {
    int64_t steps = 0;
    for (int64_t at = ring.after(flat); ring.kind[at] == kTransition && steps < ring.slots; ++steps) at = ring.after(at);
    return steps;
}

int64_t steps_preceding(const Ring& ring, int64_t flat) {
    int64_t steps = 0;
    while (!ring.first[flat] && ring.kind[ring.before(flat)] == kTransition && steps < ring.slots) {
        flat = ring.before(flat);
        ++steps;
    }
    return steps;
}

int64_t locate(const Ring& ring, const int64_t* ids, int64_t count, int64_t* slots) {
    for (int64_t i = 0; i < count; ++i) {
        if (ids[i] < 0) return i;
        const int64_t env = ids[i] % ring.envs, row = ids[i] / ring.envs;
        if (row >= ring.head[env]) return i;
        const bool in_window = row > minus(ring.newest(env), ring.alive);
        const int64_t flat = ring.at(row, env);
        if (in_window && ring.kind[flat] == kFinal) return i;
        slots[i] = in_window && ring.kind[flat] == kTransition ? flat : -1;
    }
    return -1;
}

bool hold(const Ring& ring, const int64_t* slots, const int64_t* ids, int64_t count) {
    // A younger row on the same slot has an id that is larger by at least this.
    const int64_t envs = ring.envs, round = ring.num_flat();
    for (int64_t i = 0; i < count; ++i) {
        const int64_t env = envs == 1 ? 0 : slots[i] % envs, newest = plus(times(ring.newest(env), envs), env);
        if (ring.kind[slots[i]] != kTransition || ids[i] > newest || minus(newest, ids[i]) >= round) return false;
    }
    return true;
}

}  // namespace relive
