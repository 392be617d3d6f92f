// Which steps of a rollout make which sequences, and what they hold.
//
// A rollout's valid steps are listed environment by environment in time order; a sequence is a run of that list. What
// cuts the list: the end of an environment, and of an episode where sequences may not cross it.
#pragma once
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "columns.hpp"

namespace relive {

struct Cuts {
    int64_t length;     // of a full sequence; 0: as long as what is cut
    int64_t stride;     // between the starts of full sequences
    bool split;         // at the ends of episodes
    bool keep_tail;     // one more, shorter sequence where full ones leave something over
};

struct Flags {
    const bool* terminated;  // [steps, envs]
    const bool* truncated;   // [steps, envs]
    const bool* mask;        // [steps, envs] which steps are valid; null: all
    const bool* starting;    // [envs] whose first step starts an episode
    int64_t steps, envs;
};

// The rows of a sequence's steps.
struct RowRun {
    const int64_t* rows;
    int64_t steps;
};

struct Sequences {
    std::unique_ptr<int64_t[]> order;   // flat rows t · N + n of the valid steps
    std::unique_ptr<bool[]> is_first;   // [steps, envs] which of them start an episode
    std::vector<RowRun> runs;
    int64_t longest = 0;

    // The sequences of so many steps in a row.
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
    std::memcpy(found.is_first.get(), flags.starting, static_cast<size_t>(envs));
    for (int64_t row = 0; row < rows; ++row) after[row] = flags.terminated[row] | flags.truncated[row];
    const std::unique_ptr<bool[]> ended(new bool[static_cast<size_t>(steps)]);  // of the valid steps of an environment
    int64_t* next = found.order.get();
    for (int64_t env = 0; env < envs; ++env) {
        int64_t valid = 0;
        for (int64_t row = env; row < rows; row += envs) {
            next[valid] = row;
            ended[valid] = after[row];
            valid += !flags.mask || flags.mask[row];
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

// Where the steps of a batch of sequences go: step k of sequence i is item i · sequence + k · step of `length` a sequence.
struct Padded {
    const RowRun* runs;
    int64_t count, length, sequence, step;
};

inline void mask_steps(bool* mask, const Padded& batch) noexcept {
    for (int64_t i = 0; i < batch.count; ++i)
        for (int64_t k = 0; k < batch.length; ++k) mask[i * batch.sequence + k * batch.step] = k < batch.runs[i].steps;
}

constexpr int64_t kStepsAhead = 4;  // more would push each other out of the cache: steps lie a whole row apart

// Copies the items of all steps, and zeros behind the last ones. `Bytes` is the size of an item, 0 if only known here.
template <int64_t Bytes>
inline void gather_steps_as(char* out, const char* items, const Padded& batch, int64_t bytes, bool near) noexcept {
    if (Bytes) bytes = Bytes;
    for (int64_t i = 0; i < batch.count; ++i) {
        const RowRun run = batch.runs[i];
        char* target = out + i * batch.sequence * bytes;
        int64_t k = 0;
        for (; k < run.steps; ++k, target += batch.step * bytes) {
            if (!near && k + kStepsAhead < run.steps) {
                const char* next = items + run.rows[k + kStepsAhead] * bytes;
                for (int64_t line = 0; line < bytes && line < 1024; line += 64) RELIVE_PREFETCH(next + line);
            }
            std::memcpy(target, items + run.rows[k] * bytes, static_cast<size_t>(bytes));
        }
        for (; k < batch.length; ++k, target += batch.step * bytes) std::memset(target, 0, static_cast<size_t>(bytes));
    }
}

inline void gather_steps(char* out, const char* items, const Padded& batch, int64_t bytes, int64_t total) noexcept {
    const bool near = total * bytes <= kNear;
    switch (bytes) {
        case 1: return gather_steps_as<1>(out, items, batch, bytes, near);
        case 4: return gather_steps_as<4>(out, items, batch, bytes, near);
        case 8: return gather_steps_as<8>(out, items, batch, bytes, near);
        case 16: return gather_steps_as<16>(out, items, batch, bytes, near);
        default: return gather_steps_as<0>(out, items, batch, bytes, near);
    }
}

}  // namespace relive
