// Which steps of a rollout make which sequences.
//
// A rollout's valid steps are listed environment by environment in time order; a sequence is a run of that list. What
// cuts the list: the end of an environment, and of an episode where sequences may not cross it.
#pragma once
#include <cstdint>

namespace recollect {

struct Cuts {
    int64_t length;     // of a full sequence; 0: as long as what is cut
    int64_t stride;     // between the starts of full sequences
    bool split;         // at the ends of episodes
    bool keep_tail;     // one more, shorter sequence where full ones leave something over
};

struct Sequences {
    int64_t* order;  // [steps · envs] flat rows t · N + n of the valid steps
    int64_t* start;  // [steps · envs] where in `order` a sequence starts
    int64_t* count;  // [steps · envs] how many steps it has
    int64_t valid = 0, sequences = 0, longest = 0;

    // The sequences of the run order[begin:valid].
    void cut(int64_t begin, const Cuts& cuts) noexcept {
        const int64_t steps = valid - begin;
        if (steps == 0) return;
        const int64_t length = cuts.length ? cuts.length : steps;
        int64_t at = 0, covered = 0;
        for (; at + length <= steps; at += cuts.stride) {
            add(begin + at, length);
            covered = at + length;
            if (covered == steps) break;
        }
        if (covered < steps && (cuts.keep_tail || covered == 0)) add(begin + at, steps - at);
    }

private:
    void add(int64_t at, int64_t steps) noexcept {
        start[sequences] = at;
        count[sequences++] = steps;
        longest = steps > longest ? steps : longest;
    }
};

// Flags are [steps, envs]; `mask` may be null.
inline void find_sequences(Sequences& out, const bool* terminated, const bool* truncated, const bool* mask, int64_t steps,
                           int64_t envs, const Cuts& cuts) noexcept {
    for (int64_t env = 0; env < envs; ++env) {
        int64_t begin = out.valid;
        for (int64_t row = env; row < steps * envs; row += envs) {
            if (mask && !mask[row]) continue;
            out.order[out.valid++] = row;
            if (cuts.split && (terminated[row] || truncated[row])) {
                out.cut(begin, cuts);
                begin = out.valid;
            }
        }
        out.cut(begin, cuts);
    }
}

// The steps of one sequence: rows [length], -1 behind the last step; mask [length]; returns the first row.
inline int64_t sequence_rows(int64_t* rows, bool* mask, const int64_t* from, int64_t steps, int64_t length) noexcept {
    for (int64_t k = 0; k < length; ++k) {
        mask[k] = k < steps;
        rows[k] = mask[k] ? from[k] : -1;
    }
    return *from;
}

}  // namespace recollect
