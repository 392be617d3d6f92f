// The memory of a replay buffer: one ring of rows per environment, each with its own head.
//
// Row numbers never restart; row r of environment e is stored at slot r mod S of its column. The next observation of a
// transition is the observation of the following row: every observation is stored once. A flat slot is slot · envs +
// env.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "arrays.hpp"
#include "random.hpp"

namespace relive {

enum Kind : uint8_t {
    // There is no row, or an expired one.
    kEmpty = 0,
    // The row can be sampled; the following row holds its next observation.
    kTransition = 1,
    // The row has only an observation, the last one of an episode that ended or was cut.
    kFinal = 2,
    // The row has only an observation, the newest one. The next step starts with this observation.
    kPending = 3,
    // The row is a transition too old to be sampled, kept for frame stacks of younger rows.
    kHistory = 4,
};

// Arithmetic on row numbers wraps modulo 2^64, and every number maps to a slot: a corrupt head yields a wrong row,
// never an access out of bounds.
constexpr int64_t plus(int64_t a, int64_t b) {
    return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
}
constexpr int64_t minus(int64_t a, int64_t b) {
    return static_cast<int64_t>(static_cast<uint64_t>(a) - static_cast<uint64_t>(b));
}
constexpr int64_t times(int64_t a, int64_t b) {
    return static_cast<int64_t>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
}

// Return the remainder in [0, divisor).
constexpr int64_t modulo(int64_t number, int64_t divisor) {
    const int64_t rest = number % divisor;
    return rest < 0 ? rest + divisor : rest;
}

// The state of a ring. The arrays are in the caller's memory: on the heap, shared between processes, or mapped from
// files. `journal` and `checksums` are null unless the memory outlives the process.
struct Ring {
    // Content of each slot, a `Kind`.
    uint8_t* kind;  // [slots, envs]
    // Whether the observation starts an episode.
    uint8_t* first;  // [slots, envs]
    // Next row to write.
    int64_t* head;  // [envs]
    // Whether the observation of the head row is already stored.
    uint8_t* open;  // [envs]
    // Whether the next step only resets the environment.
    uint8_t* resetting;  // [envs]
    // Number of rows that can be sampled.
    int64_t* count;  // [envs]
    // First row since the last clear.
    int64_t* floor;  // [envs]

    // Value of 1 + 2 · head + open at the start of an unfinished step; 0 without an unfinished step.
    int64_t* journal = nullptr;  // [envs]
    // Checksums of the observation and of the rest of the row.
    uint64_t* checksums = nullptr;  // [slots, envs, 2]

    int64_t slots, envs;
    // Number of newest rows that can be sampled, the pending row included.
    int64_t num_sampleable;
    // Whether next observations have columns of their own, in which case no row is pending.
    bool stores_next_obs;
    // Autoreset mode NEXT_STEP: the row after an episode end only resets the environment.
    bool next_step;

    int64_t at(int64_t row, int64_t env) const { return modulo(row, slots) * envs + env; }
    int64_t newest(int64_t env) const { return minus(head[env], open[env] ? 0 : 1); }

    // Return the row number stored at a slot, which is among the newest S rows.
    int64_t get_row(int64_t flat) const {
        const int64_t slot = flat / envs, env = flat % envs, top = newest(env);
        return minus(top, modulo(minus(top, slot), slots));
    }

    int64_t get_id(int64_t flat) const { return plus(times(get_row(flat), envs), flat % envs); }

    // Compute the row ids of many slots. A single environment needs no division per slot.
    void get_ids(const int64_t* flat, int64_t count, int64_t* out) const {
        if (envs != 1) {
            for (int64_t i = 0; i < count; ++i) out[i] = get_id(flat[i]);
            return;
        }
        const int64_t top = newest(0), at = modulo(top, slots);
        for (int64_t i = 0; i < count; ++i) out[i] = plus(top, flat[i] - at - (flat[i] > at ? slots : 0));
    }

    int64_t num_flat() const { return slots * envs; }

    // Return the slot `steps` rows later, or earlier if `steps` is negative. |steps| is less than the number of slots.
    int64_t shift(int64_t flat, int64_t steps) const {
        const int64_t moved = flat + steps * envs, all = num_flat();
        return moved < 0 ? moved + all : moved < all ? moved : moved - all;
    }

    int64_t after(int64_t flat) const {
        const int64_t next = flat + envs;
        return next < num_flat() ? next : next - num_flat();
    }

    int64_t before(int64_t flat) const {
        const int64_t previous = flat - envs;
        return previous >= 0 ? previous : previous + num_flat();
    }

    // Return the number of rows that can be sampled.
    int64_t stored() const {
        int64_t sum = 0;
        for (int64_t e = 0; e < envs; ++e) sum = plus(sum, count[e]);
        return sum;
    }

    // Return the number of transitions of the same episode after a slot.
    int64_t count_following(int64_t flat) const {
        int64_t steps = 0;
        for (int64_t at = after(flat); kind[at] == kTransition && steps < slots; ++steps) at = after(at);
        return steps;
    }

    // Return the number of transitions of the same episode before a slot.
    int64_t count_preceding(int64_t flat) const {
        int64_t steps = 0;
        for (; !first[flat] && kind[before(flat)] == kTransition && steps < slots; ++steps) flat = before(flat);
        return steps;
    }

    // Write the slots of row ids to `out`, -1 for rows that can no longer be sampled. Returns -1, or the position of
    // the first id that was never issued to a transition.
    int64_t locate(const int64_t* ids, int64_t count, int64_t* out) const {
        for (int64_t i = 0; i < count; ++i) {
            if (ids[i] < 0) return i;
            const int64_t env = ids[i] % envs, row = ids[i] / envs, flat = at(row, env);
            if (row >= head[env]) return i;
            const bool in_window = row > minus(newest(env), num_sampleable);
            if (in_window && kind[flat] == kFinal) return i;
            out[i] = in_window && kind[flat] == kTransition ? flat : -1;
        }
        return -1;
    }

    // Whether every slot still holds the row with its id, and the row can be sampled.
    bool holds(const int64_t* flat, const int64_t* ids, int64_t count) const {
        for (int64_t i = 0; i < count; ++i) {
            const int64_t env = envs == 1 ? 0 : flat[i] % envs, youngest = plus(times(newest(env), envs), env);
            // A row is overwritten once the youngest id of its environment is larger by at least `num_flat()`.
            if (kind[flat[i]] != kTransition || ids[i] > youngest || minus(youngest, ids[i]) >= num_flat())
                return false;
        }
        return true;
    }

    // Whether every invariant of the ring holds, given the flags [slots, envs] of its rows. `has_mutable` means that
    // some leaves of a row may be written again. `replay/invariants.py` checks the same invariants one by one, and its
    // error names the violated one.
    bool is_valid(const uint8_t* terminated, const uint8_t* truncated, bool has_mutable) const {
        std::vector<Column> columns;
        for (int64_t e = 0; e < envs; ++e) {
            if (!is_valid_head(e, terminated, truncated)) return false;
            const int64_t top = newest(e);
            columns.push_back({modulo(top, slots), std::min(top - floor[e], slots), open[e] != 0});
        }
        std::vector<int64_t> counts(columns.size(), 0);
        for (int64_t flat = 0, slot = 0; slot < slots; ++slot)
            for (size_t e = 0; e < columns.size(); ++e, ++flat) {
                if (!is_valid_slot(flat, slot, columns[e], terminated, truncated, has_mutable)) return false;
                counts[e] += kind[flat] == kTransition;
            }
        return std::equal(counts.begin(), counts.end(), count);
    }

    // Draw `count` slots of transitions uniformly with replacement. Returns false if transitions are too rare to find
    // by chance.
    bool draw(int64_t count, const BitGenerator& random, int64_t* out) const {
        // Transitions are rare if at most one in this many slots is one.
        constexpr int64_t kRare = 16;
        // Largest number of rows since the last clear in any column.
        int64_t longest = 0;
        for (int64_t e = 0; e < envs; ++e) longest = std::max(longest, minus(plus(newest(e), 1), floor[e]));
        const bool is_full = longest >= slots;
        const int64_t range = (is_full ? slots : longest) * envs;
        if (stored() <= range / kRare) return false;
        // Each round draws all slots that are still missing before it reads their kinds, so that the cache lines are
        // fetched in parallel.
        for (int64_t num_drawn = 0, draws_left = 1024 + 4 * kRare * count; num_drawn < count;) {
            if ((draws_left -= count - num_drawn) < 0) return false;
            for (int64_t i = num_drawn; i < count; ++i) {
                out[i] = is_full ? random.below_any(range) : recent_slot(random.below_any(range));
                if (out[i] >= 0) RELIVE_PREFETCH(kind + out[i]);
            }
            for (int64_t i = num_drawn; i < count; ++i) {
                const int64_t slot = out[i];
                out[num_drawn] = slot;
                num_drawn += slot >= 0 && kind[slot] == kTransition;
            }
        }
        return true;
    }

    // Return the slot `back / envs` rows before the newest row of environment `back % envs`; -1 before the last clear.
    int64_t recent_slot(int64_t back) const {
        const int64_t env = back % envs, row = minus(newest(env), back / envs);
        return row < floor[env] ? -1 : at(row, env);
    }

    // Record the start of a step in the journal, because a process may be killed between any two stores, and other
    // processes then continue with the memory. A compiler fence suffices, because a kill does not reorder completed
    // stores.
    void begin(int64_t env) {
        if (!journal) return;
        journal[env] = plus(1 + open[env], times(2, head[env]));
        std::atomic_signal_fence(std::memory_order_seq_cst);
    }

    // Record that the step is complete.
    void complete(int64_t env) {
        if (!journal) return;
        std::atomic_signal_fence(std::memory_order_seq_cst);
        journal[env] = 0;
    }

    // Make `row` the newest row of its environment. The row that leaves the window can no longer be sampled.
    void advance(int64_t row, int64_t env, std::vector<int64_t>* changed) {
        const int64_t old = minus(row, num_sampleable);
        if (old >= 0) {
            const int64_t flat = at(old, env);
            if (kind[flat] == kTransition) {
                kind[flat] = slots > num_sampleable ? kHistory : kEmpty;
                count[env] = minus(count[env], 1);
                if (changed) changed->push_back(flat);
            }
        }
        kind[at(row, env)] = kEmpty;
    }

private:
    // Whether a slot holds a row that ends an episode.
    bool is_end(int64_t flat, const uint8_t* terminated, const uint8_t* truncated) const {
        return (kind[flat] == kTransition || kind[flat] == kHistory) && (terminated[flat] || truncated[flat]);
    }

    bool is_valid_head(int64_t env, const uint8_t* terminated, const uint8_t* truncated) const {
        const bool has_rows = head[env] > floor[env];
        if (floor[env] < 0 || head[env] < floor[env] || head[env] > INT64_MAX / envs - 1) return false;
        if (open[env] > 1 || resetting[env] > 1) return false;
        if (open[env] && (stores_next_obs || !has_rows)) return false;
        if (resetting[env] && !(next_step && (open[env] || stores_next_obs || !has_rows))) return false;
        if (!next_step || !has_rows) return true;
        const bool is_after_end = is_end(at(head[env] - 1, env), terminated, truncated);
        return resetting[env] ? is_after_end : !(is_after_end && open[env]);
    }

    // Numbers of one environment with which `is_valid` checks each of its slots.
    struct Column {
        int64_t newest_slot;
        // Age of the first row since the last clear; the newest row has age 0.
        int64_t oldest_age;
        bool is_open;
    };

    bool is_valid_slot(int64_t flat, int64_t slot, const Column& column, const uint8_t* terminated,
                       const uint8_t* truncated, bool has_mutable) const {
        const int64_t oldest_age = column.oldest_age, previous = before(flat), second_previous = before(previous);
        const int64_t age = column.newest_slot - slot + (slot > column.newest_slot ? slots : 0);
        const uint8_t is = kind[flat];
        const bool is_stored = age <= oldest_age, follows = age < std::min(oldest_age, slots - 1);
        const bool is_after_final = follows && kind[previous] == kFinal;
        if ((first[flat] | terminated[flat] | truncated[flat]) > 1 || is > kHistory || is_stored != (is != kEmpty))
            return false;
        if ((is == kPending) != (is_stored && age == 0 && column.is_open)) return false;
        if (is == kTransition && age >= num_sampleable) return false;
        if (is == kHistory && age < num_sampleable && age <= oldest_age - (slots - num_sampleable) && !has_mutable)
            return false;
        if (!stores_next_obs && (is == kTransition || is == kHistory) && age == 0) return false;
        if (is == kFinal && !next_step && (is_after_final || age == oldest_age)) return false;
        if (is == kFinal && next_step && is_after_final && age + 1 < std::min(oldest_age, slots - 1) &&
            kind[second_previous] == kFinal)
            return false;
        const bool is_after_end = follows && is_end(previous, terminated, truncated);
        if (stores_next_obs) return (first[flat] || !is_stored) && (is_after_end || !(follows && is == kFinal));
        if (follows && static_cast<bool>(first[flat]) != is_after_final) return false;
        return !is_after_end || is == kFinal || (is == kPending && next_step);
    }
};

// Slots that the last write changed to or from kTransition, for samplers that store a number per slot.
struct ChangedSlots {
    std::vector<int64_t> slots;
    const uint8_t* kind;
};

constexpr int kMaxFrames = 64;

// Frame stacking: callers pass k stacked frames [outer, k, inner], and the ring stores single frames [outer, inner].
struct Frames {
    int64_t k = 1;
    int64_t outer = 1;
    int64_t inner = 0;  // in bytes
    // Whether frames before an episode's first frame repeat the first frame, instead of being zeros.
    bool repeat = true;

    int64_t frame_bytes() const { return outer * inner; }

    // Copy frame j out of a stack.
    void copy_frame(char* frame, const char* stack, int64_t j) const noexcept {
        if (inner == 1 && k == 4) spread<1>(frame, 1, stack + j, 4);
        else spread(frame, inner, stack + j * inner, k * inner);
    }

    // Build a stack from k frames, oldest first. A null frame gives zeros.
    void build(char* __restrict stack, const char* const* frames) const noexcept {
        if (inner == 1 && k == 4 && frames[0] && frames[1] && frames[2])
            return interleave(stack, frames[0], frames[1], frames[2], frames[3]);
        for (int64_t j = 0; j < k; ++j) {
            if (frames[j]) spread(stack + j * inner, k * inner, frames[j], inner);
            else for (int64_t o = 0; o < outer; ++o) std::memset(stack + (o * k + j) * inner, 0, inner);
        }
    }

    // Whether `next` is the stack one step after `stack`: all frames but its newest are the newer frames of `stack`.
    bool follows(const char* next, const char* stack) const noexcept {
        // Written without branches, for compilers to vectorise: the frames of a pixel are the bytes of a word.
        if (inner == 1 && k == 4) {
            char differs = 0;
            for (int64_t o = 0; o < 4 * outer; o += 4)
                differs = static_cast<char>(differs | (next[o] ^ stack[o + 1]) | (next[o + 1] ^ stack[o + 2]) |
                                            (next[o + 2] ^ stack[o + 3]));
            return differs == 0;
        }
        for (int64_t o = 0; o < outer; ++o)
            if (std::memcmp(next + o * k * inner, stack + (o * k + 1) * inner, (k - 1) * inner) != 0)
                return false;
        return true;
    }

private:
    // Copy the `outer` blocks of a frame, `out_step` and `in_step` bytes apart. A block size known at compile time
    // avoids a call of memcpy.
    template <int64_t Inner>
    void spread(char* __restrict out, int64_t out_step, const char* __restrict in, int64_t in_step) const noexcept {
        const auto bytes = static_cast<size_t>(Inner ? Inner : inner);
        for (int64_t o = 0; o < outer; ++o) std::memcpy(out + o * out_step, in + o * in_step, bytes);
    }

    void spread(char* out, int64_t out_step, const char* in, int64_t in_step) const noexcept {
        with_size(inner, [&](auto size) { spread<size.value>(out, out_step, in, in_step); });
    }

    // Interleave four one-byte frames, the most common stack. Written for compilers to vectorise with shuffles.
    void interleave(char* __restrict stack, const char* __restrict a, const char* __restrict b,
                    const char* __restrict c, const char* __restrict d) const noexcept {
        for (int64_t o = 0; o < outer; ++o) {
            stack[4 * o] = a[o];
            stack[4 * o + 1] = b[o];
            stack[4 * o + 2] = c[o];
            stack[4 * o + 3] = d[o];
        }
    }
};

// A leaf of a step: the shape that callers pass per environment, and the column [slots, envs, …] that stores it.
struct Leaf {
    char* column;
    DataType dtype;
    // Number of bytes of an item in the column.
    int64_t bytes;
    // Number of axes of an item as passed by callers, the frame axis included.
    int ndim;
    int64_t shape[kMaxDims];
    int64_t input_bytes;
    Frames frames;
    bool is_observation = false;

    Leaf(const ArrayView& array, int64_t slots, int64_t envs)
        : column(array.data), dtype(array.dtype), bytes(array.itemsize()), ndim(array.ndim - 2) {
        if (ndim < 0 || array.shape[0] != slots || array.shape[1] != envs)
            throw std::invalid_argument("column: expected shape [slots, envs, …]");
        for (int d = 0; d < ndim; ++d) bytes *= shape[d] = array.shape[d + 2];
        input_bytes = bytes;
    }

    // Accept stacks of k frames along an axis.
    void stack(int64_t k, int axis, bool repeat) {
        if (k < 1 || k > kMaxFrames || axis < 0 || axis > ndim)
            throw std::invalid_argument("stack: expected fewer frames along an axis of the leaf");
        frames.k = k;
        frames.repeat = repeat;
        frames.inner = dtype.bytes();
        for (int d = 0; d < ndim; ++d) (d < axis ? frames.outer : frames.inner) *= shape[d];
        std::copy_backward(shape + axis, shape + ndim, shape + ndim + 1);
        shape[axis] = k;
        ++ndim;
        input_bytes = bytes * k;
    }

    bool stacked() const { return frames.k > 1; }
    int64_t input_elements() const { return input_bytes / dtype.bytes(); }
    char* at(int64_t flat) const { return column + flat * bytes; }
};

// Build the frame stack of a leaf at a slot. `column` is the leaf's own column or its column of next observations.
inline void build_stack(const Ring& ring, const Leaf& leaf, const char* column, int64_t flat, char* stack) noexcept {
    const Frames& frames = leaf.frames;
    const char* parts[kMaxFrames];
    parts[frames.k - 1] = column + flat * frames.frame_bytes();
    bool started = false;
    for (int64_t j = frames.k - 2; j >= 0; --j) {
        started = started || ring.first[flat];
        if (!started) flat = ring.before(flat);
        parts[j] = started && !frames.repeat ? nullptr : column + flat * frames.frame_bytes();
    }
    frames.build(stack, parts);
}

// Leaves that may be rewritten after a row was stored, with the checksums and the journal that make this safe. Both are
// null unless the memory outlives the process.
struct Rewritable {
    // Ascending indices of leaves, none of them an observation.
    std::vector<int> leaves;

    // Checksums of the rewritable leaves, which the other checksums of a row exclude.
    uint64_t* checksums = nullptr;  // [slots, envs]
    // The slot that is being written plus 1, or 0; then the new bytes of the leaves of this slot.
    int64_t* journal = nullptr;
};

// A ring, the columns of its leaves, and the indices of the leaves with a special meaning.
struct RingMemory {
    Ring ring{};
    std::vector<Leaf> leaves;
    // Ascending leaf indices of observations.
    std::vector<int> obs_leaves;
    // Columns of next observations; empty unless `ring.stores_next_obs`.
    std::vector<char*> next_columns;
    // Leaf indices of the fields with these names.
    int reward, terminated, truncated;
    Rewritable rewritable;
    // Autoreset mode SAME_STEP: environments reset in the step that ends an episode.
    bool same_step;

    const Leaf& leaf(int i) const { return leaves[i]; }
    const Leaf& observation(size_t o) const { return leaf(obs_leaves[o]); }
    bool has_stacks() const {
        return std::any_of(obs_leaves.begin(), obs_leaves.end(), [this](int o) { return leaf(o).stacked(); });
    }
};

}
