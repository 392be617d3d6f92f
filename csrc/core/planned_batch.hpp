// A batch of rows, read as a plan says.
#pragma once
#include <cstdint>
#include <vector>

#include "leaf_reading.hpp"
#include "read_plan.hpp"
#include "ring_memory.hpp"
#include "tensor_plans.hpp"
#include "windows.hpp"

namespace relive {

// A plan for one memory: what is known before any row is drawn.
struct PlanSources {
    // A leaf to read: from which column, and the group that says where.
    struct Source {
        const Leaf* leaf;
        const char* column;
        size_t group;
    };

    PlanSources(const RingMemory& memory, ReadPlan plan);

    const RingMemory& memory;
    ReadPlan plan;
    std::vector<Source> sources;  // in the order of the batch
    std::vector<double> powers;   // γ^0 to γ^n
    bool needs_extents;           // something is read that depends on how far an episode goes
};

// Allocates everything that reading needs, so that nothing after it can fail for want of memory.
//
// The tensors: every leaf of the plan, [B, …] or [B, offsets, …]; the rows' ids; with n > 0 the discounts; for each masked
// group which of its offsets are real [B, offsets]; for packed sequences which steps are no burn-in, and which start an
// episode; the ids of their steps, -1 where there is none.
class PlannedBatch {
public:
    // Plan the tensors. Call `connect` once they are made, fill `rows`, then `find` and `read`.
    PlannedBatch(const PlanSources& sources, int64_t count, TensorPlans& plans);
    PlannedBatch(const PlannedBatch&) = delete;
    PlannedBatch(PlannedBatch&&) = default;

    void connect(const TensorPlans& plans);

    bool is_of(const PlanSources& sources) const { return sources_ == &sources; }
    int64_t count() const { return count_; }
    int64_t* rows() { return rows_.data(); }

    // Find the slots of everything that is read.
    void find();

    // Read every leaf; `find` was called.
    void read() const;

    // Call `visit(slots, count)` for the slots that are read; -1 is none. What rows lead to comes with them.
    template <class Visit>
    void for_slots(Visit visit) const {
        visit(rows_.data(), count_);
        visit(steps_.data(), static_cast<int64_t>(steps_.size()));
        for (size_t g = 0; g < places_.size() && !plan().is_packed(); ++g)
            if (plan().groups[g].has_offsets) visit(places_[g].at, static_cast<int64_t>(places_[g].slots.size()));
    }

private:
    // How far a row's episode is stored, as far as any offset goes; how far its last of n steps is ahead, and its slot.
    struct Extent {
        int64_t preceding, ahead, last, last_slot;
    };

    // Where a group is read.
    struct Place {
        const int64_t* at = nullptr;
        std::vector<int64_t> slots;  // unless they are those of others
        std::vector<SlotRun> runs;   // of packed sequences
        char* mask = nullptr;
    };

    const ReadPlan& plan() const { return sources_->plan; }
    Extent extent_of(const Ring& ring, int64_t row) const;
    void find_sequences(const Ring& ring);
    void find_items(const Ring& ring, const ReadGroup& group, Place& place) const;
    void find_offsets(const Ring& ring, const ReadGroup& group, Place& place) const;
    void find_steps(const Ring& ring, const ReadGroup& group, Place& place) const;
    void mark_steps() const;
    template <class T>
    void sum(const PlanSources::Source& source, char* out) const;

    const PlanSources* sources_;
    int64_t count_;
    std::vector<int64_t> rows_;
    std::vector<Extent> extents_;  // of each row
    std::vector<int64_t> steps_;   // slots of packed sequences [B, before + 1 + after]
    std::vector<Place> places_;    // of each group
    std::vector<char*> outs_;      // of each leaf that is read
    int64_t *ids_ = nullptr, *step_ids_ = nullptr;
    float* discount_ = nullptr;
    char *train_ = nullptr, *is_first_ = nullptr;
};

}  // namespace relive
