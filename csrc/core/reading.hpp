// Reads batches of replayed rows: the read plan, the slots to read, and the copies.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#ifdef __linux__
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>
#endif

#include "ring.hpp"
#include "tensor_plans.hpp"

namespace relive {

// Leaves that are read at the same slots.
struct ReadGroup {
    enum class Anchor {
        // Offsets count from the sampled row.
        kRow,
        // Offsets count from the last step of the n-step window that starts at the row.
        kLast,
        // Offsets count from the next observation of that window's last step.
        kNext,
        // The leaf is read at the first step of a packed sequence.
        kFirst,
        // The leaf is the discounted sum over the n steps.
        kSum,
    };
    static constexpr int kAnchors = 5;

    Anchor anchor;
    // Whether offsets count observations, of which an episode has one more than steps.
    bool of_observations;
    // Whether the batch has a mask of the offsets inside the episode.
    bool is_masked;
    // Whether a leaf has one item per offset for each sampled row, instead of a single item.
    bool has_offsets;
    // Offsets from the anchor; empty for packed sequences, which read every step.
    std::vector<int64_t> offsets = {};
};

// A leaf to read, the column to read from, and the index of its group.
struct LeafRead {
    const Leaf* leaf;
    const char* column;
    size_t group;
};

// A read plan bound to one ring: everything known before rows are sampled.
struct ReadPlan {
    // Padding of steps that are outside the episode or not stored.
    enum class Layout {
        // Each missing step repeats the nearest stored step.
        kNearest,
        // Each missing step is zero.
        kZeros,
        // Stored steps come first, then zeros.
        kPacked,
    };
    static constexpr int kLayouts = 3;

    const RingMemory& memory;
    Layout layout;
    // Whether packed sequences continue into the next episode.
    bool cross;
    bool step_ids;
    // The plan reads at most this many steps before and after a sampled row.
    int64_t before, after;
    // Number of steps per n-step transition; 0 means single steps without sums.
    int64_t n;
    double gamma;
    std::vector<ReadGroup> groups = {};
    std::vector<LeafRead> reads = {};
    // The powers γ^0 to γ^n.
    std::vector<double> powers = {};
    // Whether the plan reads slots that depend on how far the episode extends.
    bool needs_extents = false;

    bool is_packed() const { return layout == Layout::kPacked; }
    // Number of steps of a packed sequence.
    int64_t length() const { return before + 1 + after; }

    // Return the number of items of a leaf per row.
    int64_t width(const ReadGroup& group) const {
        return !group.has_offsets ? 1 : is_packed() ? length() : ssize(group.offsets);
    }

    // Compute `needs_extents` and `powers`. Call after all groups were added.
    void prepare() {
        needs_extents = n > 0;
        for (const ReadGroup& group : groups) needs_extents = needs_extents || (group.has_offsets && !is_packed());
        if (n > 0) powers.push_back(1);
        for (int64_t k = 0; k < n; ++k) powers.push_back(powers.back() * gamma);
    }

    void add_read(int leaf, int group) {
        const Leaf& read = memory.leaf(leaf);
        const char* column = read.column;
        const bool is_next = groups[group].anchor == ReadGroup::Anchor::kNext;
        for (size_t o = 0; o < memory.next_columns.size(); ++o)
            if (memory.obs_leaves[o] == leaf && is_next) column = memory.next_columns[o];
        reads.push_back({&read, column, static_cast<size_t>(group)});
    }
};

// Write the slots of a row and of the steps after it to `out`. From the first missing step on, the slots are -1.
inline void window_forward(const Ring& ring, int64_t slot, int64_t length, bool cross, int64_t* out) {
    for (int64_t j = 0; j < length; ++j) {
        out[j] = slot;
        if (slot < 0) continue;
        int64_t next = ring.after(slot);
        // Skip the final rows between two episodes; there are two if an episode was cut right after its start.
        for (int skipped = 0; cross && ring.kind[next] == kFinal && skipped < ring.slots; ++skipped)
            next = ring.after(next);
        // Stop at an older row: the slot after the newest final row may hold the oldest row of the ring.
        slot = ring.kind[next] == kTransition && (!cross || ring.get_row(next) > ring.get_row(slot)) ? next : -1;
    }
}

// Return the slot of the step before a row, or -1 if this step is not stored.
inline int64_t preceding_step(const Ring& ring, int64_t slot, bool cross) {
    if (ring.first[slot] && !cross) return -1;
    int64_t previous = ring.before(slot);
    for (int skipped = 0; cross && ring.kind[previous] == kFinal && skipped < ring.slots; ++skipped)
        previous = ring.before(previous);
    const bool older = !cross || ring.get_row(previous) < ring.get_row(slot);
    return older && ring.kind[previous] == kTransition ? previous : -1;
}

// Write `before + after` slots to `out`: up to `before` preceding steps, the row, the following steps, then -1. Returns
// the number of preceding steps.
inline int64_t window_around(const Ring& ring, int64_t slot, int64_t before, int64_t after, bool cross, int64_t* out) {
    int64_t burn_in = 0;
    for (; burn_in < before; ++burn_in) {
        const int64_t previous = preceding_step(ring, slot, cross);
        if (previous < 0) break;
        slot = previous;
    }
    window_forward(ring, slot, burn_in + after, cross, out);
    std::fill(out + burn_in + after, out + before + after, int64_t{-1});
    return burn_in;
}

// Consecutive steps of one environment from a slot on. A slot of -1 means steps that are not stored.
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

// Read the items of a column [slots, envs] for the steps of all runs. Items of steps that are not stored are zero.
inline void read_runs(char* out, const char* column, const std::vector<SlotRun>& runs, int64_t bytes,
                      int64_t envs) noexcept {
    for (const SlotRun& run : runs) {
        const char* in = column + run.slot * bytes;
        if (run.slot < 0) std::memset(out, 0, run.count * bytes);
        else if (envs == 1) std::memcpy(out, in, run.count * bytes);
        else with_size(bytes, [=](auto size) {
            const int64_t each = size ? size : bytes;
            for (int64_t i = 0; i < run.count; ++i) {
                RELIVE_PREFETCH(in + (i + kAhead) * envs * each);
                std::memcpy(out + i * each, in + i * envs * each, each);
            }
        });
        out += run.count * bytes;
    }
}

// Read a leaf at many slots. Only stacked leaves accept -1, which gives zeros.
inline void read_leaf(const Ring& ring, const Leaf& leaf, const char* column, const int64_t* slots, int64_t count,
                      char* out) noexcept {
    if (!leaf.stacked()) return gather(out, column, slots, count, leaf.bytes, ring.num_flat());
    for (int64_t i = 0; i < count; ++i) {
        char* stack = out + i * leaf.input_bytes;
        if (slots[i] < 0) std::memset(stack, 0, leaf.input_bytes);
        else build_stack(ring, leaf, column, slots[i], stack);
    }
}

// Maximum number of steps per window, and of windows per batch, so that the product fits into 64 bits.
constexpr int64_t kMaxSteps = int64_t{1} << 30;

// A batch to read by a plan. The constructor allocates everything that reading needs, so that nothing later can run out
// of memory.
//
// The tensors are in this order: the leaves of the plan, [B, …] or [B, offsets, …]; the row ids; with n > 0 the
// discounts; a mask [B, offsets] per masked group; for packed sequences the masks of trained (not burn-in) and of first
// steps, and with `step_ids` the ids of the steps, -1 for padding.
class PlannedBatch {
    using Anchor = ReadGroup::Anchor;

public:
    TensorPlans plans;

    // Plan the tensors. The caller then allocates them, fills `rows`, and calls `find` and `read`.
    PlannedBatch(const ReadPlan& plan, int64_t count) : plan_(&plan), count_(count) {
        if (count > kMaxSteps * 2) throw OutOfMemory();
        // Upper bound of the number of slots of all groups.
        int64_t slots = count * 8;
        for (const ReadGroup& group : plan.groups) {
            const int64_t width = plan.width(group);
            if (count > 0 && width > kMaxSteps * 16 / count) throw OutOfMemory();
            slots += count * width * (plan.is_packed() ? 5 : 1);
        }
        require_memory(slots * 8);
        for (const LeafRead& read : plan.reads) {
            const ReadGroup& group = plan.groups[read.group];
            const int64_t lead[] = {count, plan.width(group)};
            plans.add(read.leaf->dtype, group.has_offsets ? 2 : 1, lead, read.leaf->ndim, read.leaf->shape, "leaf");
        }
        ids_ = plans.add(kInt64, 1, &count);
        if (plan.n > 0) discount_ = plans.add(kFloat32, 1, &count);
        group_slots_.resize(plan.groups.size());
        for (size_t g = 0; g < group_slots_.size(); ++g) {
            const int64_t shape[] = {count, plan.width(plan.groups[g])};
            if (plan.groups[g].is_masked) group_slots_[g].mask = plans.add(kBool, 2, shape);
        }
        const int64_t steps[] = {count, plan.length()};
        if (plan.is_packed()) {
            train_ = plans.add(kBool, 2, steps);
            is_first_ = plans.add(kBool, 2, steps);
            if (plan.step_ids) step_ids_ = plans.add(kInt64, 2, steps);
            steps_.resize(steps[0] * steps[1]);
        }
        require_memory(plans.bytes() + slots * 8);
        rows_.resize(count);
        extents_.resize(plan.needs_extents || plan.is_packed() ? rows_.size() : 0);
        for (size_t g = 0; g < group_slots_.size(); ++g) {
            const ReadGroup& group = plan.groups[g];
            const bool is_shared = group.has_offsets ? plan.is_packed() && group.anchor == Anchor::kRow
                                                     : group.anchor == Anchor::kRow || group.anchor == Anchor::kSum;
            if (!is_shared) group_slots_[g].slots.resize(count * plan.width(group));
            if (group.has_offsets && plan.is_packed()) group_slots_[g].runs.reserve(steps_.size());
        }
    }
    PlannedBatch(const PlannedBatch&) = delete;
    PlannedBatch(PlannedBatch&&) = default;

    bool belongs_to(const ReadPlan& plan) const { return plan_ == &plan; }
    int64_t count() const { return count_; }
    int64_t* rows() { return rows_.data(); }

    // Find the slots of all steps that the plan reads.
    void find() {
        const Ring& ring = plan().memory.ring;
        if (plan().needs_extents) find_extents(ring);
        if (plan().is_packed()) find_sequences(ring);
        for (size_t g = 0; g < group_slots_.size(); ++g) {
            const ReadGroup& group = plan().groups[g];
            if (!group.has_offsets) find_items(ring, group, group_slots_[g]);
            else if (plan().is_packed()) find_steps(ring, group, group_slots_[g]);
            else find_offsets(ring, group, group_slots_[g]);
        }
    }

    // Read every leaf. Call `find` first.
    void read() const {
        const Ring& ring = plan().memory.ring;
        ring.get_ids(rows_.data(), count_, plans.as<int64_t>(ids_));
        for (size_t i = 0; i < plan().reads.size(); ++i) {
            const LeafRead& read = plan().reads[i];
            char* out = plans.data(i);
            const ReadGroup& group = plan().groups[read.group];
            const GroupSlots& target = group_slots_[read.group];
            const Leaf& leaf = *read.leaf;
            const int64_t items = count_ * plan().width(group);
            if (group.anchor == Anchor::kSum) leaf.dtype == kFloat32 ? sum<float>(read, out) : sum<double>(read, out);
            else if (!group.has_offsets || leaf.stacked()) read_leaf(ring, leaf, read.column, target.at, items, out);
            else if (plan().is_packed()) read_runs(out, read.column, target.runs, leaf.bytes, ring.envs);
            else gather_padded(out, read.column, target.at, items, leaf.bytes, ring.num_flat());
        }
        for (size_t i = 0; i < extents_.size() && plan().n > 0; ++i)
            plans.as<float>(discount_)[i] = static_cast<float>(plan().powers[extents_[i].last + 1]);
        if (plan().is_packed()) mark_steps();
    }

    // Call `visit(slots, count)` for the slots to read, -1 for padding. Slots of next observations are not visited.
    template <class Visit>
    void for_slots(Visit visit) const {
        visit(rows_.data(), count_);
        visit(steps_.data(), ssize(steps_));
        for (size_t g = 0; g < group_slots_.size() && !plan().is_packed(); ++g)
            if (plan().groups[g].has_offsets)
                visit(group_slots_[g].at, static_cast<int64_t>(group_slots_[g].slots.size()));
    }

private:
    // The stored steps of the episode around a sampled row, as many as the offsets of the plan need.
    struct Extent {
        // Number of steps before and after the row.
        int64_t preceding, following;
        // Distance of the last of the n steps from the row, and the slot of this step.
        int64_t last, last_slot;
    };

    // The slots at which the leaves of one `ReadGroup` are read for this batch.
    struct GroupSlots {
        // Points to `slots`, or to slots that several groups share.
        const int64_t* at = nullptr;
        std::vector<int64_t> slots;
        // Consecutive slots as runs, for packed sequences.
        std::vector<SlotRun> runs;
        // Position of the group's mask among the tensors of the batch; 0 without a mask.
        size_t mask = 0;
    };

    const ReadPlan& plan() const { return *plan_; }

    // The ring is passed by value, because stores cannot alias a copy, which then stays in registers.
    void find_extents(Ring ring) {
        const int64_t before = plan().before, after = plan().after, most = std::max<int64_t>(plan().n, 1) - 1;
        for (size_t i = 0; i < rows_.size(); ++i) {
            Extent extent{0, 0, 0, rows_[i]};
            // Stop at the first row that is not a transition, because such a row separates any two episodes.
            for (int64_t at = rows_[i]; extent.preceding < before; ++extent.preceding) {
                at = ring.before(at);
                if (ring.kind[at] != kTransition) break;
            }
            for (; extent.last < most; ++extent.last) {
                const int64_t next = ring.after(extent.last_slot);
                if (ring.kind[next] != kTransition) break;
                extent.last_slot = next;
            }
            extent.following = extent.last;
            for (int64_t at = extent.last_slot; extent.last == most && extent.following < after; ++extent.following) {
                at = ring.after(at);
                if (ring.kind[at] != kTransition) break;
            }
            extents_[i] = extent;
        }
    }

    void find_sequences(Ring ring) {
        const int64_t length = plan().length();
        for (int64_t i = 0; i < count_; ++i) {
            const auto b = static_cast<size_t>(i);
            extents_[b].preceding =
                window_around(ring, rows_[b], plan().before, plan().after + 1, plan().cross, &steps_[i * length]);
        }
    }

    // Find the slots of a group with one item per row.
    void find_items(Ring ring, const ReadGroup& group, GroupSlots& target) const {
        target.at = target.slots.empty() ? rows_.data() : target.slots.data();
        const auto length = static_cast<size_t>(plan().length());
        if (group.anchor == Anchor::kFirst && plan().is_packed())
            for (size_t i = 0; i < target.slots.size(); ++i) target.slots[i] = steps_[i * length];
        else if (plan().n > 0)
            for (size_t i = 0; i < target.slots.size(); ++i) target.slots[i] = extents_[i].last_slot;
        else if (!target.slots.empty())
            std::copy(rows_.begin(), rows_.end(), target.slots.begin());
        if (group.anchor == Anchor::kNext && !ring.stores_next_obs)
            for (int64_t& slot : target.slots) slot = ring.after(slot);
    }

    // Find the slots and runs of a group of packed sequences.
    void find_steps(Ring ring, const ReadGroup& group, GroupSlots& target) const {
        target.at = target.slots.empty() ? steps_.data() : target.slots.data();
        for (size_t i = 0; i < target.slots.size(); ++i)
            target.slots[i] = steps_[i] < 0 ? -1 : group.anchor == Anchor::kNext ? ring.after(steps_[i]) : steps_[i];
        target.runs.clear();
        find_runs(ring, target.at, ssize(steps_), target.runs);
    }

    // Find the slots of a group with offsets, and fill its mask.
    void find_offsets(Ring ring, const ReadGroup& group, GroupSlots& target) const {
        const auto size = ssize(group.offsets);
        const auto [first, last] = std::minmax_element(group.offsets.begin(), group.offsets.end());
        const int64_t *offsets = group.offsets.data(), earliest = *first, latest = *last, envs = ring.envs;
        const bool zeros = plan().layout == ReadPlan::Layout::kZeros;
        int64_t* slot = target.slots.data();
        target.at = slot;
        char* real = target.mask ? plans.data(target.mask) : nullptr;
        for (int64_t i = 0; i < count_; ++i, slot += size, real += real ? size : 0) {
            const Extent extent = extents_[i];
            const int64_t row = rows_[i], origin = group.anchor == Anchor::kNext ? extent.last + 1 : 0;
            const int64_t most = extent.following + (group.of_observations ? 1 : 0), from = row + origin * envs;
            const bool whole = origin + earliest >= -extent.preceding && origin + latest <= most;
            // If all offsets are inside the episode and no slot wraps around the ring, each slot is a plain sum.
            if (whole && from + earliest * envs >= 0 && from + latest * envs < ring.num_flat()) {
                for (int64_t j = 0; j < size; ++j) slot[j] = from + offsets[j] * envs;
                if (real) std::memset(real, 1, size);
                continue;
            }
            for (int64_t j = 0; j < size; ++j) {
                const int64_t step = origin + offsets[j], nearest = std::min(std::max(step, -extent.preceding), most);
                if (real) real[j] = step == nearest;
                slot[j] = zeros && step != nearest ? -1 : ring.shift(row, nearest);
            }
        }
    }

    void mark_steps() const {
        const Ring ring = plan().memory.ring;
        const int64_t length = plan().length();
        char *train = plans.data(train_), *is_first = plans.data(is_first_);
        for (size_t i = 0; i < steps_.size(); ++i) train[i] = steps_[i] >= 0;
        for (const GroupSlots& target : group_slots_)
            if (target.mask) std::memcpy(plans.data(target.mask), train, steps_.size());
        for (int64_t i = 0; i < count_; ++i)
            std::memset(train + i * length, 0, extents_[static_cast<size_t>(i)].preceding);
        for (size_t i = 0; i < steps_.size(); ++i) is_first[i] = steps_[i] >= 0 && ring.first[steps_[i]];
        auto* step_ids = plans.as<int64_t>(step_ids_);
        for (size_t i = 0; i < steps_.size() && plan().step_ids; ++i)
            step_ids[i] = steps_[i] < 0 ? -1 : ring.get_id(steps_[i]);
    }

    // Set out[i] = Σ γ^j r[j] over the steps from row i to its last step, added in order.
    template <class T>
    void sum(const LeafRead& read, char* out) const {
        const auto* rewards = reinterpret_cast<const T*>(read.column);
        auto* sums = reinterpret_cast<T*>(out);
        const int64_t width = read.leaf->bytes / static_cast<int64_t>(sizeof(T));
        const Ring ring = plan().memory.ring;
        const double* powers = plan().powers.data();
        for (size_t i = 0; i < extents_.size(); ++i, sums += width) {
            int64_t slot = rows_[i];
            for (int64_t w = 0; w < width; ++w) sums[w] = rewards[slot * width + w];
            for (int64_t k = 1; k <= extents_[i].last; ++k) {
                slot = ring.after(slot);
                for (int64_t w = 0; w < width; ++w) sums[w] += static_cast<T>(powers[k] * rewards[slot * width + w]);
            }
        }
    }

    const ReadPlan* plan_;
    int64_t count_;
    std::vector<int64_t> rows_;
    std::vector<Extent> extents_;
    // Slots of packed sequences.
    std::vector<int64_t> steps_;  // [B, before + 1 + after]
    std::vector<GroupSlots> group_slots_;
    // Indices of the tensors of the batch.
    size_t ids_, discount_ = 0, train_ = 0, is_first_ = 0, step_ids_ = 0;
};

#ifdef __linux__
// Start writing a range of a file to disk, without waiting.
inline void start_writing(int file, int64_t offset, int64_t bytes) {
    sync_file_range(file, offset, bytes, SYNC_FILE_RANGE_WRITE);
}

// Request the pages of a range of a mapped file, without waiting.
inline void request_bytes(const char* data, int64_t bytes) {
    static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto start = reinterpret_cast<uintptr_t>(data), first = start / page * page;
    madvise(reinterpret_cast<void*>(first), start + static_cast<uintptr_t>(bytes) - first, MADV_WILLNEED);
}

// Return the number of page faults of this process that waited for the disk.
inline int64_t count_major_faults() {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_majflt;
}
#else
inline void start_writing(int, int64_t, int64_t) {}
inline void request_bytes(const char*, int64_t) {}
inline int64_t count_major_faults() { return 0; }
#endif

// Requests the pages of a batch before it is read, if recent batches waited for the disk.
class PageRequests {
public:
    explicit PageRequests(const RingMemory& memory) : memory_(memory) {}

    // Whether to request the pages of the next batch, because a page fault waited for the disk within the last batches.
    bool expects_waits() {
        const int64_t faults = count_major_faults();
        if (faults > last_faults_) batches_left_ = kBatchesAfterWait;
        last_faults_ = faults;
        if (batches_left_ == 0) return false;
        --batches_left_;
        return true;
    }

    // Request the pages of the rows at these slots and of their next observations. -1 is skipped.
    void request(const int64_t* slots, int64_t count) const {
        for (int64_t i = 0; i < count; ++i)
            if (slots[i] >= 0) request_row(slots[i]);
    }

private:
    static constexpr int kBatchesAfterWait = 64;

    void request_row(int64_t flat) const {
        const Ring& ring = memory_.ring;
        const int64_t next = ring.stores_next_obs ? flat : ring.after(flat);
        // If the next row is in the next slot, one request covers both rows.
        const bool adjacent = next == flat + 1;
        for (const Leaf& leaf : memory_.leaves) {
            for (int64_t frame = leaf.frames.k, at = flat; frame > 1; --frame) {
                at = ring.before(at);
                request_bytes(leaf.at(at), leaf.bytes);
            }
            request_bytes(leaf.at(flat), leaf.bytes * (adjacent ? 2 : 1));
        }
        for (size_t o = 0; o < memory_.obs_leaves.size(); ++o) {
            const Leaf& leaf = memory_.observation(o);
            if (ring.stores_next_obs) request_bytes(memory_.next_columns[o] + flat * leaf.bytes, leaf.bytes);
            else if (!adjacent) request_bytes(leaf.at(next), leaf.bytes);
        }
    }

    const RingMemory& memory_;
    int64_t last_faults_ = count_major_faults();
    int batches_left_ = 0;
};

}
