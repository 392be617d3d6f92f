// What is read around each row of a batch.
#pragma once
#include <cstdint>
#include <vector>

namespace relive {

// Leaves that are read at the same places.
struct ReadGroup {
    enum class Anchor {
        kRow,    // the drawn row
        kLast,   // the last of up to n steps from the row on
        kNext,   // the observation that the last step led to
        kFirst,  // the first step of a packed sequence
        kSum,    // all of these n steps, as their discounted sum
    };
    static constexpr int kAnchors = 5;

    Anchor anchor;
    bool of_observations;          // offsets count observations, of which an episode has one more than steps
    bool is_masked;                // the batch says which offsets are real
    bool has_offsets;              // else one item per row
    std::vector<int64_t> offsets;  // from the anchor on; of packed sequences all, and not listed
};

struct LeafRead {
    int leaf;
    int group;
};

struct ReadPlan {
    // Where a batch has what lies outside the episode, or was not stored.
    enum class Layout {
        kNearest,  // every offset in its place; the nearest step is repeated
        kZeros,    // every offset in its place; zeros
        kPacked,   // the steps that there are first, then zeros
    };
    static constexpr int kLayouts = 3;

    std::vector<LeafRead> reads;  // in the order of the batch
    std::vector<ReadGroup> groups;
    Layout layout;
    bool cross;  // packed sequences go on into the next episode
    bool step_ids;
    int64_t before, after;  // how many steps before and after a row any offset needs
    int64_t n;              // how many steps are one; 0: single steps, without sums
    double gamma;

    bool is_packed() const { return layout == Layout::kPacked; }
    int64_t width(const ReadGroup& group) const {
        return is_packed() ? before + 1 + after : static_cast<int64_t>(group.offsets.size());
    }
};

}  // namespace relive
