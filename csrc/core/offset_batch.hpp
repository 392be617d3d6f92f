// A batch of rows in which some leaves are read at several steps around each row, each at offsets of its own.
#pragma once
#include <cstdint>
#include <vector>

#include "leaf_reading.hpp"
#include "ring_memory.hpp"
#include "tensor_plans.hpp"

namespace relive {

// Leaves that are read at the same offsets from each drawn row.
struct OffsetGroup {
    // What is counted: steps of the row's episode; its observations, of which there is one more; or its observations from
    // the one on that the row, or the last of its n steps, led to.
    enum class Of { kSteps, kObservations, kNextObservations };

    std::vector<int64_t> offsets;
    Of of;
    bool has_next() const { return of != Of::kSteps; }
};

struct OffsetPlan {
    std::vector<OffsetGroup> groups;
    std::vector<int> leaf_groups, next_groups;  // of each leaf, and of each next observation; -1: read once per row
    bool zeros;                                 // for what lies outside the episode, instead of the nearest step
    int64_t n;                                  // 0: transitions; more: so many steps as one
    double gamma;
};

// The tensors: every leaf [B, …], or [B, offsets, …] if it belongs to a group; the next observations likewise; the rows'
// ids; with n > 0 the discounts; and for each group which of its offsets lie in the episode [B, offsets]. With n > 0 the
// flags and next observations of no group are those of the last of up to n steps, and so are rewards summed.
class OffsetBatch {
public:
    OffsetBatch(const RingMemory& memory, const OffsetPlan& plan, const int64_t* drawn, int64_t count, TensorPlans& plans);
    OffsetBatch(const OffsetBatch&) = delete;

    // The slots of a group [B, offsets]; -1 gives zeros.
    const std::vector<int64_t>& slots(size_t group) const { return slots_[group]; }

    void read(const TensorPlans& plans) const;

private:
    // How far a row's episode is stored, as far as any offset goes.
    struct Extent {
        int64_t preceding, ahead, last;
    };

    void find_reach();
    Extent extent_of(const Ring& ring, int64_t slot) const;
    void find_slots(size_t group);
    const int64_t* last() const { return plan_.n > 0 ? last_.data() : drawn_; }
    void read_once(const Leaf& leaf, const int64_t* slots, char* out) const;
    void read_group(const Leaf& leaf, int group, char* out) const;

    const RingMemory& memory_;
    const OffsetPlan& plan_;
    const int64_t* drawn_;
    int64_t count_;
    int64_t before_ = 0, after_ = 0;             // how many steps any offset goes back and forward
    std::vector<Extent> extents_;                // [count]
    std::vector<int64_t> last_, next_;           // [count] slots
    std::vector<std::vector<int64_t>> slots_;    // of each group [count, offsets]
    std::vector<std::vector<uint8_t>> inside_;   // likewise: not padding
};

}  // namespace relive
