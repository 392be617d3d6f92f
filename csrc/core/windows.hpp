// Windows of steps around rows of a ring, read in runs: steps that follow each other are copied at once.
#pragma once
#include <algorithm>
#include <vector>

#include "gather.hpp"
#include "ring.hpp"

namespace relive {

// The slots of a row and of the steps after it; -1 from the first step that is not stored.
inline void window_forward(const Ring& ring, int64_t slot, int64_t length, bool cross, int64_t* out) {
    for (int64_t j = 0; j < length; ++j) {
        out[j] = slot;
        if (slot < 0) continue;
        int64_t next = ring.after(slot);
        // The row after a final row starts the next episode; two final rows in a row are a cut just after a start.
        for (int skipped = 0; cross && ring.kind[next] == kFinal && skipped < ring.slots; ++skipped) next = ring.after(next);
        // Inside an episode the next row is younger; after a final row it may be the oldest of all.
        slot = ring.kind[next] == kTransition && (!cross || ring.row_of(next) > ring.row_of(slot)) ? next : -1;
    }
}

// The slot of the step before a row; -1 if it is not stored.
inline int64_t step_before(const Ring& ring, int64_t slot, bool cross) {
    if (ring.first[slot] && !cross) return -1;
    int64_t previous = ring.before(slot);
    for (int skipped = 0; cross && ring.kind[previous] == kFinal && skipped < ring.slots; ++skipped)
        previous = ring.before(previous);
    const bool older = !cross || ring.row_of(previous) < ring.row_of(slot);
    return older && ring.kind[previous] == kTransition ? previous : -1;
}

// The slots of up to `before` steps before a row, of the row and of the steps after it, then -1: `before + after` slots.
// Returns how many steps lie before the row.
inline int64_t window_around(const Ring& ring, int64_t slot, int64_t before, int64_t after, bool cross, int64_t* out) {
    int64_t burn_in = 0;
    for (int64_t previous = slot; burn_in < before && (previous = step_before(ring, previous, cross)) >= 0; ++burn_in)
        slot = previous;
    window_forward(ring, slot, burn_in + after, cross, out);
    std::fill(out + burn_in + after, out + before + after, int64_t{-1});
    return burn_in;
}

// Steps that follow each other in their environment's column, from a slot on; slot -1: steps that are not stored.
struct SlotRun {
    int64_t slot, count;
};

inline void find_runs(const Ring& ring, const int64_t* slots, int64_t count, std::vector<SlotRun>& runs) {
    for (int64_t i = 0, stop = 0; i < count; i = stop) {
        const int64_t stride = slots[i] < 0 ? 0 : ring.envs;
        for (stop = i + 1; stop < count && slots[stop] == slots[stop - 1] + stride;) ++stop;
        runs.push_back({slots[i], stop - i});
    }
}

// Copy rows that lie `stride` bytes apart. Copies of a size known at compile time become one or two instructions.
template <int64_t Bytes>
inline void copy_apart(char* out, const char* in, int64_t count, int64_t bytes, int64_t stride) noexcept {
    if (Bytes) bytes = Bytes;
    for (int64_t i = 0; i < count; ++i) {
        RELIVE_PREFETCH(in + (i + kAhead) * stride);
        std::memcpy(out + i * bytes, in + i * stride, static_cast<size_t>(bytes));
    }
}

// Read the items of a column [slots, envs] for the steps of all runs; zeros for steps that are not stored.
inline void read_runs(char* out, const char* column, const std::vector<SlotRun>& runs, int64_t bytes, int64_t envs) noexcept {
    for (const SlotRun& run : runs) {
        const char* in = column + run.slot * bytes;
        const int64_t whole = run.count * bytes, stride = envs * bytes;
        if (run.slot < 0) std::memset(out, 0, static_cast<size_t>(whole));
        else if (envs == 1) std::memcpy(out, in, static_cast<size_t>(whole));
        else if (bytes == 1) copy_apart<1>(out, in, run.count, bytes, stride);
        else if (bytes == 4) copy_apart<4>(out, in, run.count, bytes, stride);
        else if (bytes == 8) copy_apart<8>(out, in, run.count, bytes, stride);
        else copy_apart<0>(out, in, run.count, bytes, stride);
        out += whole;
    }
}

}  // namespace relive
