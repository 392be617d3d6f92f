// Which steps of a rollout make which sequences.
//
// A rollout's valid steps are listed environment by environment in time order; a sequence is a run of that list. The list
// is cut at the end of each environment, and at the end of each episode if sequences may not cross episodes.
#pragma once
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

namespace relive {

struct Cuts {
    int64_t length;  // of a full sequence; 0: as long as possible
    int64_t stride;  // between the starts of full sequences
    bool split;      // at the ends of episodes
    bool keep_tail;  // one more, shorter sequence of the steps that full sequences leave over
};

struct Flags {
    const uint8_t* terminated;  // [steps, envs]
    const uint8_t* truncated;   // [steps, envs]
    const uint8_t* mask;        // [steps, envs] which steps are valid; null: all
    const uint8_t* starting;    // [envs] environments whose first step starts an episode
    int64_t steps, envs;
};

// The rows of a sequence's steps.
struct RowRun {
    const int64_t* rows;
    int64_t steps;
};

struct Sequences {
    std::unique_ptr<int64_t[]> order;   // flat rows t · N + n of the valid steps
    std::unique_ptr<bool[]> is_first;   // [steps, envs] steps that start an episode
    std::vector<RowRun> runs;
    int64_t longest = 0;

    // Add the sequences of a run of steps.
    void cut(const int64_t* rows, int64_t steps, const Cuts& cuts) {
        if (steps == 0) return;
        const int64_t length = cuts.length ? cuts.length : steps;
        int64_t at = 0, covered = 0;
        for (; at + length <= steps; at += cuts.stride) {
            add(rows + at, length);
            covered = at + length;
            if (covered == steps) break;
        }
        if (covered < steps && (cuts.keep_tail || covered == 0)) add(rows + at, steps - at);
    }

private:
    void add(const int64_t* rows, int64_t steps) {
        runs.push_back({rows, steps});
        longest = steps > longest ? steps : longest;
    }
};

inline Sequences find_sequences(const Flags& flags, const Cuts& cuts) {
    const int64_t steps = flags.steps, envs = flags.envs, rows = steps * envs;
    Sequences found;
    found.order.reset(new int64_t[static_cast<size_t>(rows)]);
    found.is_first.reset(new bool[static_cast<size_t>(rows + envs)]);
    // A step starts an episode if the one before ended, or only reset.
    bool* after = found.is_first.get() + envs;
    for (int64_t env = 0; env < envs; ++env) found.is_first[static_cast<size_t>(env)] = flags.starting[env] != 0;
    for (int64_t row = 0; row < rows; ++row) after[row] = (flags.terminated[row] | flags.truncated[row]) != 0;
    const std::unique_ptr<bool[]> ended(new bool[static_cast<size_t>(steps)]);  // of the valid steps of an environment
    int64_t* next = found.order.get();
    for (int64_t env = 0; env < envs; ++env) {
        int64_t valid = 0;
        for (int64_t row = env; row < rows; row += envs) {
            next[valid] = row;
            ended[valid] = after[row];
            valid += !flags.mask || flags.mask[row] != 0;
        }
        int64_t begin = 0;
        while (const void* end = cuts.split ? std::memchr(ended.get() + begin, 1, static_cast<size_t>(valid - begin)) : nullptr) {
            const int64_t stop = static_cast<const bool*>(end) - ended.get() + 1;
            found.cut(next + begin, stop - begin, cuts);
            begin = stop;
        }
        found.cut(next + begin, valid - begin, cuts);
        next += valid;
    }
    for (int64_t row = 0; flags.mask && row < rows; ++row) after[row] = !flags.mask[row];
    return found;
}

}  // namespace relive
