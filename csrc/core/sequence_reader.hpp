// Reads batches of sequences out of a rollout's columns.
#pragma once
#include <cstdint>
#include <cstring>
#include <vector>

#include "gather_source.hpp"
#include "prefetch.hpp"
#include "sequences.hpp"

namespace relive {

// Where the steps of padded sequences go: step k of sequence i is item i · sequence + k · step of the output.
struct PaddedLayout {
    const RowRun* runs;
    int64_t count, length, sequence, step;
};

inline void mask_steps(bool* mask, const PaddedLayout& batch) noexcept {
    for (int64_t i = 0; i < batch.count; ++i)
        for (int64_t k = 0; k < batch.length; ++k) mask[i * batch.sequence + k * batch.step] = k < batch.runs[i].steps;
}

constexpr int64_t kStepsAhead = 4;  // more would push each other out of the cache: steps lie a whole row apart

// Copies the items of all steps, then zeros up to `length`. `Bytes` is the size of an item, 0 if `bytes` says it.
template <int64_t Bytes>
inline void gather_steps_as(char* out, const char* items, const PaddedLayout& batch, int64_t bytes, bool near) noexcept {
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

inline void gather_steps(char* out, const char* items, const PaddedLayout& batch, int64_t bytes, int64_t total) noexcept {
    const bool near = total * bytes <= kNear;
    switch (bytes) {
        case 1: return gather_steps_as<1>(out, items, batch, bytes, near);
        case 4: return gather_steps_as<4>(out, items, batch, bytes, near);
        case 8: return gather_steps_as<8>(out, items, batch, bytes, near);
        case 16: return gather_steps_as<16>(out, items, batch, bytes, near);
        default: return gather_steps_as<0>(out, items, batch, bytes, near);
    }
}

// The sequences of one batch. Packed: the longest sequence first, and the rows of all first steps before the second steps.
struct SequenceBatch {
    std::vector<RowRun> runs;
    std::vector<int64_t> packed_rows, packed_sizes;
};

class SequenceReader {
public:
    enum class Layout { kBatchFirst, kTimeFirst, kPacked };

    // `steps` are read at every step of a sequence, `carried` at its first step.
    SequenceReader(const Sequences& found, int64_t rows, int64_t length, Layout layout, std::vector<GatherSource> steps,
                   std::vector<GatherSource> carried);

    SequenceBatch choose(const int64_t* which, int64_t count) const;

    // Plan the tensors of a batch: the steps [B, length, …] (time first: [length, B, …]), which steps start an episode, the
    // mask, the first rows [B], and the carried items [B, …]. Packed: steps are [total, …], and batch sizes replace the mask.
    void plan(const SequenceBatch& batch, TensorPlans& plans) const;

    // Fill the tensors of the plan.
    void read(const SequenceBatch& batch, const TensorPlans& plans) const;

private:
    void pack(SequenceBatch& batch) const;
    void read_padded(const SequenceBatch& batch, const TensorPlans& plans) const;
    void read_packed(const SequenceBatch& batch, const TensorPlans& plans) const;
    void read_carried(const SequenceBatch& batch, const TensorPlans& plans) const;

    const Sequences& found_;
    int64_t rows_, length_;
    Layout layout_;
    std::vector<GatherSource> steps_, carried_;
};

}  // namespace relive
