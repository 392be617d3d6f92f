// The columns of a rollout: written one row at a time, read item by item or as sequences of steps.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "arrays.hpp"
#include "tensor_plans.hpp"

namespace relive {

// An array [items…, shape…], read or written item by item.
struct Column {
    char* data;
    DataType dtype;
    int64_t items = 1;
    int64_t bytes;
    int ndim;
    int64_t shape[kMaxDims];

    // An item has the last `item_ndim` axes of the array.
    Column(const ArrayView& array, int item_ndim)
        : data(array.data), dtype(array.dtype), bytes(array.itemsize()), ndim(item_ndim) {
        if (ndim < 0 || ndim > array.ndim)
            throw std::invalid_argument("item_ndim: expected 0 to " + std::to_string(array.ndim) + ", got " +
                                        std::to_string(ndim));
        const int lead = array.ndim - ndim;
        for (int d = 0; d < lead; ++d) items *= array.shape[d];
        for (int d = 0; d < ndim; ++d) bytes *= shape[d] = array.shape[lead + d];
    }

    // Plan a tensor [lead…, shape…], whose leading axes have the lengths `lead`.
    void plan(TensorPlans& plans, int lead_ndim, const int64_t* lead) const {
        plans.add(dtype, lead_ndim, lead, ndim, shape, "source");
    }
};

// One row of one column, planned before any row is written.
struct ColumnWrite {
    enum Kind { kZeros, kCopy, kFlags, kNarrow } kind;
    char* target;
    const char* source;
    int64_t bytes;
    // Values of a Python number or list.
    std::vector<char> numbers;

    // Plan to write an array. Returns false if shape or dtype do not fit.
    bool read_from(const ArrayView& array, const Column& column) {
        if (!array.ends_with(0, column.ndim, column.shape) || !array.contiguous()) return false;
        source = array.data;
        if (array.dtype == column.dtype) kind = array.dtype == kBool ? kFlags : kCopy;
        else if (array.dtype == kFloat64 && column.dtype == kFloat32) kind = kNarrow;
        else return false;
        return true;
    }

    // Write the row. Returns false if a finite number became infinite, which makes the row invalid.
    bool run() const noexcept {
        switch (kind) {
            case kZeros: std::memset(target, 0, bytes); break;
            case kCopy: copy_block(target, source, bytes); break;
            case kFlags: as_flags(target, source, bytes); break;
            case kNarrow:
                return narrow(reinterpret_cast<float*>(target), reinterpret_cast<const double*>(source), bytes / 4);
        }
        return true;
    }
};

// The rule that splits a rollout into sequences.
//
// The valid steps are listed environment by environment in time order, and a sequence is a run of this list. The list
// is split after each environment, and with `split` after each episode.
struct SequenceSpec {
    // Number of steps of a full sequence; 0 means as many as possible.
    int64_t length;
    // Number of steps between the starts of two full sequences.
    int64_t stride;
    // Whether sequences end at episode ends.
    bool split;
    // Whether the steps after the last full sequence form a shorter one.
    bool keep_tail;
};

struct Flags {
    const uint8_t* terminated;  // [steps, envs] flags
    const uint8_t* truncated;   // [steps, envs] flags
    // Whether each step is valid; null if all are.
    const uint8_t* mask;  // [steps, envs]
    // Whether the first step starts an episode.
    const uint8_t* starting;  // [envs]
    int64_t steps, envs;
};

// The rows of the steps of a sequence.
struct RowRun {
    const int64_t* rows;
    int64_t steps;
};

struct Sequences {
    // Flat rows t · N + n of the valid steps.
    std::unique_ptr<int64_t[]> order;
    // Whether each step starts an episode.
    std::unique_ptr<bool[]> is_first;  // [steps, envs]
    std::vector<RowRun> runs;
    int64_t longest = 0;

    // Split consecutive steps into sequences, and add the sequences.
    void add_run(const int64_t* rows, int64_t steps, const SequenceSpec& spec) {
        if (steps == 0) return;
        const int64_t length = spec.length ? spec.length : steps;
        int64_t at = 0, covered = 0;
        for (; at + length <= steps; at += spec.stride) {
            add(rows + at, length);
            covered = at + length;
            if (covered == steps) break;
        }
        if (covered < steps && (spec.keep_tail || covered == 0)) add(rows + at, steps - at);
    }

private:
    void add(const int64_t* rows, int64_t steps) {
        runs.push_back({rows, steps});
        longest = steps > longest ? steps : longest;
    }
};

inline Sequences find_sequences(const Flags& flags, const SequenceSpec& spec) {
    const int64_t steps = flags.steps, envs = flags.envs, rows = steps * envs;
    Sequences sequences;
    sequences.order.reset(new int64_t[rows]);
    sequences.is_first.reset(new bool[rows + envs]);
    // `after[row]` is the flag `is_first` of the next step: it starts an episode if this step ended one or was a reset.
    bool* after = sequences.is_first.get() + envs;
    for (int64_t env = 0; env < envs; ++env) sequences.is_first[env] = flags.starting[env] != 0;
    for (int64_t row = 0; row < rows; ++row) after[row] = (flags.terminated[row] | flags.truncated[row]) != 0;
    // Whether each valid step of one environment ends an episode.
    const std::unique_ptr<bool[]> ended(new bool[steps]);
    int64_t* next = sequences.order.get();
    for (int64_t env = 0; env < envs; ++env) {
        int64_t valid = 0;
        for (int64_t row = env; row < rows; row += envs) {
            next[valid] = row;
            ended[valid] = after[row];
            valid += !flags.mask || flags.mask[row] != 0;
        }
        int64_t begin = 0;
        while (const void* end = spec.split ? std::memchr(ended.get() + begin, 1, valid - begin) : nullptr) {
            const int64_t stop = static_cast<const bool*>(end) - ended.get() + 1;
            sequences.add_run(next + begin, stop - begin, spec);
            begin = stop;
        }
        sequences.add_run(next + begin, valid - begin, spec);
        next += valid;
    }
    for (int64_t row = 0; flags.mask && row < rows; ++row) after[row] = !flags.mask[row];
    return sequences;
}

// Reads batches of sequences.
class SequenceReader {
public:
    enum class Layout { kBatchFirst, kTimeFirst, kPacked };

    // The sequences of one batch. Packed: longest sequence first, with the rows of all first steps, then of all second
    // steps, and so on.
    struct Batch {
        std::vector<RowRun> runs;
        std::vector<int64_t> packed_rows, packed_sizes;
    };

    // Read the columns `steps` at every step of a sequence, `initial_states` only at its first step.
    SequenceReader(const Sequences& sequences, int64_t rows, int64_t length, Layout layout, std::vector<Column> steps,
                   std::vector<Column> initial_states)
        : sequences_(sequences), rows_(rows), length_(length), layout_(layout), steps_(std::move(steps)),
          initial_states_(std::move(initial_states)) {
        ArrayView is_first;
        is_first.data = reinterpret_cast<char*>(sequences.is_first.get());
        is_first.dtype = kBool;
        steps_.emplace_back(is_first, 0);
    }

    Batch choose(const int64_t* which, int64_t count) const {
        Batch batch;
        std::vector<RowRun>& runs = batch.runs;
        for (int64_t i = 0; i < count; ++i) runs.push_back(sequences_.runs[which[i]]);
        if (layout_ != Layout::kPacked) return batch;
        std::stable_sort(runs.begin(), runs.end(), [](const RowRun& a, const RowRun& b) { return a.steps > b.steps; });
        for (int64_t k = 0; k < runs.front().steps; ++k) {
            const size_t before = batch.packed_rows.size();
            for (auto run = runs.begin(); run != runs.end() && run->steps > k; ++run)
                batch.packed_rows.push_back(run->rows[k]);
            batch.packed_sizes.push_back(static_cast<int64_t>(batch.packed_rows.size() - before));
        }
        return batch;
    }

    // Plan the tensors of a batch: the steps [B, length, …] (time first: [length, B, …]) with `is_first` last, the
    // mask, the first rows [B], and the initial states [B, …]. Packed: steps are [total, …], and batch sizes replace
    // the mask.
    void plan(const Batch& batch, TensorPlans& plans) const {
        const bool packed = layout_ == Layout::kPacked, time_first = layout_ == Layout::kTimeFirst;
        const auto count = ssize(batch.runs), total = ssize(batch.packed_rows);
        const int64_t shape[] = {packed ? total : time_first ? length_ : count, time_first ? count : length_};
        const auto longest = ssize(batch.packed_sizes);
        for (const Column& column : steps_) column.plan(plans, packed ? 1 : 2, shape);
        if (packed) plans.add(kInt64, 1, &longest);
        else plans.add(kBool, 2, shape);
        plans.add(kInt64, 1, &count);
        for (const Column& column : initial_states_) column.plan(plans, 1, &count);
    }

    // Fill the tensors of the plan.
    void read(const Batch& batch, const TensorPlans& plans) const {
        const std::vector<int64_t>&rows = batch.packed_rows, &sizes = batch.packed_sizes;
        // Index of the tensor of the mask or of the batch sizes. The tensors of the first rows and of the initial
        // states follow.
        const size_t after = steps_.size();
        for (size_t s = 0; s < after; ++s) {
            if (layout_ != Layout::kPacked) read_steps(batch.runs, steps_[s], plans.data(s));
            else gather(plans.data(s), steps_[s].data, rows.data(), ssize(rows), steps_[s].bytes, rows_);
        }
        if (layout_ == Layout::kPacked) std::memcpy(plans.data(after), sizes.data(), sizes.size() * sizeof(int64_t));
        else mask_steps(batch.runs, plans.data(after));
        auto* first = reinterpret_cast<int64_t*>(plans.data(after + 1));
        const auto count = ssize(batch.runs);
        for (int64_t i = 0; i < count; ++i) first[i] = *batch.runs[i].rows;
        for (size_t c = 0; c < initial_states_.size(); ++c)
            gather(plans.data(after + 2 + c), initial_states_[c].data, first, count, initial_states_[c].bytes, rows_);
    }

private:
    // Number of steps between a prefetch and its use. With more, prefetched lines would evict each other.
    static constexpr int64_t kStepsAhead = 4;

    // Call `visit(run, first, stride)` for every sequence. Its k-th step is item first + k · stride of the output.
    template <class Visit>
    void for_runs(const std::vector<RowRun>& runs, Visit visit) const {
        const bool time_first = layout_ == Layout::kTimeFirst;
        const auto count = ssize(runs);
        for (int64_t i = 0; i < count; ++i)
            visit(runs[i], time_first ? i : i * length_, time_first ? count : 1);
    }

    void mask_steps(const std::vector<RowRun>& runs, char* mask) const noexcept {
        for_runs(runs, [&](RowRun run, int64_t first, int64_t stride) {
            for (int64_t k = 0; k < length_; ++k) mask[first + k * stride] = k < run.steps;
        });
    }

    // Copy the items of all steps, and pad with zeros up to `length`.
    void read_steps(const std::vector<RowRun>& runs, const Column& column, char* out) const noexcept {
        const bool near = rows_ * column.bytes <= kNear;
        with_size(column.bytes, [&, out](auto size) {
            const int64_t bytes = size ? size : column.bytes, length = length_;
            const char* items = column.data;
            for_runs(runs, [=](RowRun run, int64_t first, int64_t stride) {
                char* target = out + first * bytes;
                int64_t k = 0;
                for (; k < run.steps; ++k, target += stride * bytes) {
                    if (!near && k + kStepsAhead < run.steps)
                        prefetch_item(items + run.rows[k + kStepsAhead] * bytes, bytes);
                    std::memcpy(target, items + run.rows[k] * bytes, bytes);
                }
                for (; k < length; ++k, target += stride * bytes) std::memset(target, 0, bytes);
            });
        });
    }

    const Sequences& sequences_;
    int64_t rows_, length_;
    Layout layout_;
    std::vector<Column> steps_, initial_states_;
};

}
