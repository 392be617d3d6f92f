#include "ring_writer.hpp"

#include <algorithm>
#include <cstring>

#include "copy.hpp"
#include "ring_checksums.hpp"

namespace relive {
namespace {

void store(const Leaf& leaf, char* column, int64_t flat, const char* given) {
    if (leaf.stacked()) leaf.frames.take(column + flat * leaf.bytes, given, leaf.frames.k - 1);
    else std::memcpy(column + flat * leaf.bytes, given, static_cast<size_t>(leaf.bytes));
}

}  // namespace

int64_t RingWriter::check_stacks() {
    touched_.slots.clear();
    return block_.check_stacks();
}

void RingWriter::write() {
    const bool may_copy = ring_.envs > 1 && block_.of_all_envs() && !ring_.keeps_next && !block_.has_stacks();
    for (int64_t t = 0; t < block_.steps(); ++t) {
        if (may_copy && all_continue(t)) {
            write_all_envs(t);
            continue;
        }
        for (int64_t n = 0; n < block_.envs(); ++n) write_one(block_.env_at(n), t * block_.envs() + n);
    }
}

// Whether all environments have the same head and continue their episodes, or start one.
bool RingWriter::all_continue(int64_t t) const {
    const int64_t envs = ring_.envs, row = ring_.head[0], flat = ring_.at(row, 0);
    const bool open = ring_.open[0];
    for (int64_t e = 0; e < envs; ++e)
        if (ring_.head[e] != row || static_cast<bool>(ring_.open[e]) != open || ring_.resetting[e]) return false;
    for (size_t o = 0; o < memory_.observed.size() && open; ++o) {
        const Leaf& leaf = memory_.observation(o);
        if (std::memcmp(leaf.at(flat), block_.obs(o, t * envs), static_cast<size_t>(leaf.bytes * envs)) != 0) return false;
    }
    return true;
}

// A step of all environments is one copy per leaf.
void RingWriter::write_all_envs(int64_t t) {
    Ring ring = ring_;  // a copy of the pointers: no store can change them, so that they stay in registers
    const int64_t envs = ring.envs, row = ring.head[0], next = plus(row, 1), first_step = t * envs;
    const bool open = ring.open[0];
    if (open) chains_.count_steps(envs);
    else for (int64_t e = 0; e < envs; ++e) chains_.count_end(block_, e, first_step + e);
    std::vector<int64_t>* touched = touched_slots();
    for (int64_t e = 0; e < envs; ++e) ring.begin(e);
    for (int64_t e = 0; e < envs && !open; ++e) ring.advance(row, e, touched);
    for (int64_t e = 0; e < envs; ++e) ring.advance(next, e, touched);
    const int64_t flat = ring.at(row, 0), next_flat = ring.at(next, 0);
    for (size_t l = 0; l < memory_.leaves.size(); ++l) {
        const Leaf& leaf = memory_.leaves[l];
        const bool observation = std::find(memory_.observed.begin(), memory_.observed.end(), static_cast<int>(l)) != memory_.observed.end();
        if (!(observation && open)) copy_block(leaf.at(flat), block_.item(l, leaf.bytes, first_step), leaf.bytes * envs);
    }
    for (size_t o = 0; o < memory_.observed.size(); ++o) {
        const Leaf& leaf = memory_.observation(o);
        copy_block(leaf.at(next_flat), block_.next_obs(o, first_step), leaf.bytes * envs);
    }
    close_all_envs(row, first_step, open);
}

// After the leaves of a step of all environments are stored: what the rows are now.
void RingWriter::close_all_envs(int64_t row, int64_t first_step, bool open) {
    Ring ring = ring_;
    const int64_t next = plus(row, 1), flat = ring.at(row, 0), next_flat = ring.at(next, 0);
    const char *terminated = block_.terminated_flags() + first_step, *truncated = block_.truncated_flags() + first_step;
    std::vector<int64_t>* touched = touched_slots();
    for (int64_t e = 0; e < ring.envs; ++e) {
        const bool end = terminated[e] || truncated[e], closes = end && !ring.next_step;
        if (!open) ring.first[flat + e] = 1;
        ring.first[next_flat + e] = 0;
        store_checksums(memory_, flat + e, row, !open, true);
        store_checksums(memory_, next_flat + e, next, true, false);
        ring.kind[flat + e] = kTransition;
        ring.kind[next_flat + e] = closes ? kFinal : kPending;
        ring.resetting[e] = end && ring.next_step;
        ring.head[e] = plus(next, closes);
        ring.open[e] = !closes;
        ring.count[e] = plus(ring.count[e], 1);
        if (touched) touched->push_back(flat + e);
        ring.complete(e);
    }
}

void RingWriter::store_leaves(int64_t flat, int64_t i, bool with_obs) {
    size_t next = 0;
    for (size_t l = 0; l < memory_.leaves.size(); ++l) {
        const Leaf& leaf = memory_.leaves[l];
        const bool observation = next < memory_.observed.size() && static_cast<size_t>(memory_.observed[next]) == l;
        next += observation;
        if (!observation || with_obs) store(leaf, leaf.column, flat, block_.item(l, leaf.given_bytes, i));
    }
}

void RingWriter::store_next_obs(int64_t flat, int64_t i) {
    for (size_t o = 0; o < memory_.observed.size(); ++o) {
        const Leaf& leaf = memory_.observation(o);
        store(leaf, ring_.keeps_next ? memory_.next_columns[o] : leaf.column, flat, block_.next_obs(o, i));
    }
}

// Finish a row whose next observation is stored beside it.
void RingWriter::finish_beside(int64_t env, int64_t row, int64_t i, bool with_obs) {
    const int64_t flat = ring_.at(row, env);
    store_next_obs(flat, i);
    store_checksums(memory_, flat, row, with_obs, true);
    ring_.head[env] = plus(row, 1);
    ring_.complete(env);
}

void RingWriter::write_one(int64_t env, int64_t i) {
    std::vector<int64_t>* touched = touched_slots();
    const bool reset = ring_.next_step && ring_.resetting[env];
    int64_t row = ring_.head[env];
    bool open = ring_.open[env];  // the row has its observation already
    const bool continues = !open || reset || block_.continues_pending(row, env, i);
    if (!open) chains_.count_end(block_, env, i);
    else if (reset) chains_.count_start(block_.starts_with(ring_.at(row, env), i), true);
    else {
        chains_.count_step(continues);
        chains_.count_start(continues, false);
    }
    ring_.begin(env);
    if (!continues) {
        ring_.kind[ring_.at(row, env)] = kFinal;
        row = plus(row, 1);
        open = false;
    }
    if (!open) ring_.advance(row, env, touched);
    const int64_t flat = ring_.at(row, env);
    store_leaves(flat, i, !open);
    if (!open) ring_.first[flat] = 1;
    ring_.kind[flat] = reset ? kFinal : kTransition;
    ring_.count[env] = plus(ring_.count[env], !reset);
    if (touched && !reset) touched->push_back(flat);
    const bool end = block_.ended(i) && !reset;
    if (ring_.next_step) ring_.resetting[env] = end;
    if (ring_.keeps_next) return finish_beside(env, row, i, !open);
    const int64_t next = plus(row, 1), next_flat = ring_.at(next, env);
    ring_.advance(next, env, touched);
    store_next_obs(next_flat, i);
    store_checksums(memory_, flat, row, !open, true);
    ring_.first[next_flat] = reset;
    store_checksums(memory_, next_flat, next, true, false);
    const bool closes = end && !ring_.next_step;
    ring_.kind[next_flat] = closes ? kFinal : kPending;
    ring_.head[env] = plus(next, closes);
    ring_.open[env] = !closes;
    ring_.complete(env);
}

}  // namespace relive
