// A sum tree, which samples leaves in proportion to their priorities. Groups of eight entries fill a cache line each.
//
// Level 0 holds the leaves. An entry of level l + 1 is the sum of one group of level l; the top level is a single
// group. Sums are recomputed, never updated by differences, so rounding errors do not grow with the number of updates.
//
// Leaves store the exact priorities. Sums are sums of priorities times a power of two (see `TreeScale`), so that
// neither a million leaves of 1e308 overflow, nor a total of denormal leaves loses digits.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "arrays.hpp"
#include "random.hpp"
#include "ring.hpp"

namespace relive {

// Number of entries per group: as many float64 as fit into a cache line.
constexpr int kFan = 8;
// 22 levels are enough for 8^21 leaves.
constexpr int kMaxLevels = 22;
// The minimum that is stored for a tree in which no leaf is positive.
constexpr double kNoLeaf = std::numeric_limits<double>::infinity();

// Factors by which leaves are multiplied before they are summed. With kNormal the sum of 2^64 leaves of any size is
// finite. With kTiny the sums of tiny leaves are not denormal. A tree switches to kTiny below kTooSmall and back above
// kTooLarge; these bounds are far apart, so that a tree does not switch back and forth.
struct TreeScale {
    static constexpr double kNormal = 0x1p-64, kTiny = 0x1p+512;
    // Lower bound of a total in normal scale.
    static constexpr double kTooSmall = 0x1p-800;
    // Upper bound of a total in tiny scale.
    static constexpr double kTooLarge = 0x1p+300;
    // If the total in normal scale is below kTooSmall, all leaves are below this number.
    static constexpr double kTinyLeaf = 0x1p-700;
};

// Return the scaled sum of a group. Adding pairwise makes four additions independent of each other.
inline double sum_group(const double* group, double scale) noexcept {
    double part[4];
    for (int i = 0; i < 4; ++i) part[i] = group[i] * scale + group[i + 4] * scale;
    return (part[0] + part[2]) + (part[1] + part[3]);
}

// Return the smallest positive entry of a group. The bits of non-negative doubles sort like the doubles. The shift maps
// -0.0 to 0, and the subtraction sorts zero last.
inline double min_positive(const double* group) noexcept {
    uint64_t least = ~uint64_t{0};
    for (int i = 0; i < kFan; ++i) {
        uint64_t bits;
        std::memcpy(&bits, group + i, sizeof bits);
        const uint64_t rank = (bits << 1) - 1;
        least = rank < least ? rank : least;
    }
    least = (least + 1) >> 1;
    double smallest;
    std::memcpy(&smallest, &least, sizeof smallest);
    return least == 0 ? kNoLeaf : smallest;
}

// Return the next smaller double of a positive x.
inline double just_below(double x) noexcept {
    int64_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    --bits;
    std::memcpy(&x, &bits, sizeof bits);
    return x;
}

// Return the entry of a group that contains `point`: the first one whose running sum exceeds it, never one of zero.
// Then `point` is relative to the start of that entry.
//
// Rounding may put the point at or past the end of the group. It is then moved to just before the end, into the last
// nonzero entry.
inline int64_t descend(const double* group, double scale, double& point) noexcept {
    double running[kFan + 1];
    // The leading zero saves a branch for the first entry, which would take a third of the time.
    running[0] = 0;
    for (int i = 0; i < kFan; ++i) running[i + 1] = running[i] + group[i] * scale;
    const double end = just_below(running[kFan]);
    const double inside = point < end ? point : end;
    int64_t passed = 0;
    for (int i = 1; i < kFan; ++i) passed += running[i] <= inside;
    point = inside - running[passed];
    return passed;
}

// One number per group of every level except the top, contiguous in the caller's memory.
class TreeLevels {
public:
    TreeLevels(double* memory, int64_t num_leaves) { size(num_leaves, memory, levels_); }

    // Return the total size, with each level padded to whole groups. Sets pointers to the levels if `levels` is not
    // null.
    static int64_t size(int64_t num_leaves, double* memory = nullptr, double** levels = nullptr) {
        int64_t total = 0;
        for (int64_t level = 1, entries = num_leaves; entries > kFan; ++level) {
            entries = (entries + kFan - 1) / kFan;
            if (levels) levels[level] = memory + total;
            total += (entries + kFan - 1) / kFan * kFan;
        }
        return total;
    }

    // Return the memory of a level; the lowest level is 1.
    double* operator[](int level) const { return levels_[level]; }

private:
    double* levels_[kMaxLevels + 1] = {};
};

// State of the whole tree, in the caller's memory.
struct TreeSummary {
    // Sum of all leaves times `scale`.
    double root;
    // Factor of the leaves in all sums; 0 in a new tree.
    double scale;
    // Nonzero if a positive leaf may vanish in normal scale.
    double tiny;
    // Nonzero if updates maintain the minima.
    double has_minima;
};

class PriorityTree {
public:
    // Use memory of the caller, which trees of other processes may share. It has zeros or the state of an earlier tree.
    // `leaves` is padded to whole groups; `sums` and `minima` have `TreeLevels::size` numbers.
    PriorityTree(double* leaves, double* sums, double* minima, TreeSummary* summary, int64_t num_leaves)
        : leaves_(leaves), sums_(sums, num_leaves), minima_(minima, num_leaves), summary_(*summary) {
        if (summary_.scale == 0) summary_.scale = TreeScale::kNormal;
        entries_[0] = num_leaves;
        for (; entries_[top_level_] > kFan; ++top_level_) entries_[top_level_ + 1] = groups(top_level_);
    }

    // Return the number of leaves, rounded up to whole groups.
    static int64_t padded(int64_t num_leaves) { return (num_leaves + kFan - 1) / kFan * kFan; }

    int64_t num_leaves() const { return entries_[0]; }
    bool empty() const { return !(summary_.root > 0); }

    // Return the sum of all leaves. A sum that exceeds float64 is infinite, which does not affect draws.
    double total() const { return summary_.root / summary_.scale; }

    // Return the smallest positive leaf. The first call builds minima, which updates maintain from then on. They double
    // the cost of an update, and most trees never need them.
    double smallest() {
        if (summary_.has_minima == 0) renew_all_minima();
        summary_.has_minima = 1;
        return min_positive(minima_at(top_level_));
    }

    // Set leaf `index[i]` to `values[i * stride]`; the last value wins if a leaf occurs twice.
    void set(const int64_t* index, const double* values, int64_t stride, int64_t count) noexcept {
        for (int64_t start = 0; start < count; start += kChunk)
            set_chunk(index + start, values + start * stride, stride, chunk(count - start));
        summary_.root = sum_group(sums_at(top_level_), scale_at(top_level_));
        rescale();
    }

    void get(double* out, const int64_t* index, int64_t count) const noexcept {
        for (int64_t i = 0; i < count; ++i) {
            if (i + kAhead < count) RELIVE_PREFETCH(leaves_ + index[i + kAhead]);
            out[i] = leaves_[index[i]];
        }
    }

    // Draw the i-th leaf from the i-th of `count` equal slices of the total, which must be positive. Writes the
    // priorities of the leaves to `priorities` unless null.
    void draw(int64_t* out, double* priorities, int64_t count, const BitGenerator& random) const noexcept {
        const double slice = summary_.root / static_cast<double>(count);
        double points[kChunk];
        for (int64_t start = 0; start < count; start += kChunk) {
            const int size = chunk(count - start);
            for (int i = 0; i < size; ++i)
                points[i] = (static_cast<double>(start + i) + random.next_double(random.state)) * slice;
            draw_chunk(out + start, points, size);
        }
        if (priorities) get(priorities, out, count);
    }

    // Recompute everything from the leaves, after they were written directly.
    void rebuild() noexcept {
        sum_all(TreeScale::kNormal);
        if (summary_.has_minima != 0) renew_all_minima();
        // A small total may have lost tiny leaves, so it sets the flag; `rescale` clears the flag if all leaves are
        // zero.
        summary_.tiny = summary_.root < TreeScale::kTooSmall;
        rescale();
    }

    // Return the largest relative error of a stored sum; infinity for a wrong minimum.
    double deviation() const {
        std::vector<double> memory(static_cast<size_t>(TreeLevels::size(num_leaves())));
        const TreeLevels expected(memory.data(), num_leaves());
        double worst = 0;
        for (int level = 0; level < top_level_; ++level) {
            const double* entries = level == 0 ? leaves_ : expected[level];
            for (int64_t group = 0; group < groups(level); ++group) {
                expected[level + 1][group] = sum_group(entries + group * kFan, scale_at(level));
                worst = worse(worst, sums_[level + 1][group], expected[level + 1][group]);
                const double smallest = min_positive(minima_at(level) + group * kFan);
                if (summary_.has_minima != 0 && minima_[level + 1][group] != smallest) worst = kNoLeaf;
            }
        }
        const double* top = top_level_ == 0 ? leaves_ : expected[top_level_];
        return worse(worst, summary_.root, sum_group(top, scale_at(top_level_)));
    }

private:
    // Number of leaves per pass over the levels, so few that they stay in the L1 cache until the next pass.
    static constexpr int kChunk = 256;
    // Number of iterations between a prefetch and its use. A cache miss takes about as many.
    static constexpr int kAhead = 24;

    static int chunk(int64_t rest) { return static_cast<int>(rest < kChunk ? rest : kChunk); }

    static double worse(double worst, double stored, double expected) {
        if (stored == expected) return worst;
        const double difference = (stored > expected ? stored - expected : expected - stored) / expected;
        // A difference of NaN fails both comparisons, and counts as infinite.
        return difference <= worst ? worst : difference > worst ? difference : kNoLeaf;
    }

    int64_t groups(int level) const { return (entries_[level] + kFan - 1) / kFan; }
    double* sums_at(int level) const { return level == 0 ? leaves_ : sums_[level]; }
    double* minima_at(int level) const { return level == 0 ? leaves_ : minima_[level]; }
    double scale_at(int level) const { return level == 0 ? summary_.scale : 1; }

    // Recompute one number for each of the `count` groups of a level; null means the first `count` groups.
    template <class Reduce>
    static void renew(double* out, const double* entries, const int64_t* groups, int64_t count,
                      Reduce reduce) noexcept {
        for (int64_t i = 0; i < count; ++i) {
            const int64_t group = groups ? groups[i] : i;
            out[group] = reduce(entries + group * kFan);
        }
    }

    void renew_sums(int level, const int64_t* groups, int64_t count) noexcept {
        const double scale = scale_at(level);
        renew(sums_[level + 1], sums_at(level), groups, count,
              [scale](const double* group) { return sum_group(group, scale); });
    }

    void renew_minima(int level, const int64_t* groups, int64_t count) noexcept {
        renew(minima_[level + 1], minima_at(level), groups, count,
              [](const double* group) { return min_positive(group); });
    }

    void renew_all_minima() noexcept {
        for (int level = 0; level < top_level_; ++level) renew_minima(level, nullptr, groups(level));
    }

    void set_chunk(const int64_t* index, const double* values, int64_t stride, int count) noexcept {
        int64_t changed[kChunk];
        int size = 0;
        for (int i = 0; i < count; ++i) {
            if (i + kAhead < count) RELIVE_PREFETCH(leaves_ + index[i + kAhead]);
            const double value = values[i * stride];
            leaves_[index[i]] = value;
            if (value > 0 && value < TreeScale::kTinyLeaf) summary_.tiny = 1;
            // Leaves of a draw are sorted, so comparing with the previous group finds nearly all duplicates.
            // Recomputing a group twice is harmless.
            const int64_t group = index[i] / kFan;
            if (size > 0 && changed[size - 1] == group) continue;
            changed[size++] = group;
            if (top_level_ > 0) RELIVE_PREFETCH(sums_[1] + group);
        }
        for (int level = 0; level < top_level_; ++level) size = renew_above(level, changed, size);
    }

    // Recompute the sums above the changed groups of a level. Replaces `changed` with the changed groups one level up
    // and returns their number.
    int renew_above(int level, int64_t* changed, int size) noexcept {
        const bool all = size >= groups(level);
        if (all) size = static_cast<int>(groups(level));
        renew_sums(level, all ? nullptr : changed, size);
        if (summary_.has_minima != 0) renew_minima(level, all ? nullptr : changed, size);
        int above = 0;
        for (int i = 0; i < size; ++i) {
            const int64_t group = (all ? i : changed[i]) / kFan;
            if (above == 0 || changed[above - 1] != group) changed[above++] = group;
        }
        return above;
    }

    // Descend level by level for the whole chunk, so that the next groups are prefetched meanwhile.
    void draw_chunk(int64_t* out, double* points, int count) const noexcept {
        for (int i = 0; i < count; ++i) out[i] = 0;
        for (int level = top_level_; level > 0; --level) {
            const double *entries = sums_[level], *below = sums_at(level - 1);
            for (int i = 0; i < count; ++i) {
                out[i] = out[i] * kFan + descend(entries + out[i] * kFan, 1, points[i]);
                RELIVE_PREFETCH(below + out[i] * kFan);
            }
        }
        for (int i = 0; i < count; ++i) {
            out[i] = out[i] * kFan + descend(leaves_ + out[i] * kFan, summary_.scale, points[i]);
            // If leaves were changed without `rebuild`, the draw is wrong but stays in range.
            if (out[i] >= num_leaves()) out[i] = num_leaves() - 1;
        }
    }

    void sum_all(double scale) noexcept {
        summary_.scale = scale;
        for (int level = 0; level < top_level_; ++level) renew_sums(level, nullptr, groups(level));
        summary_.root = sum_group(sums_at(top_level_), scale_at(top_level_));
    }

    void rescale() noexcept {
        if (summary_.scale == TreeScale::kTiny && !(summary_.root <= TreeScale::kTooLarge)) sum_all(TreeScale::kNormal);
        if (summary_.scale == TreeScale::kNormal && summary_.tiny != 0 && summary_.root < TreeScale::kTooSmall) {
            sum_all(TreeScale::kTiny);
            if (summary_.root > 0) return;
            // If the total is zero in the scale for tiny priorities too, all leaves are zero.
            summary_.scale = TreeScale::kNormal;
            summary_.tiny = 0;
        }
    }

    double* leaves_;
    int top_level_ = 0;
    int64_t entries_[kMaxLevels + 1];
    TreeLevels sums_, minima_;
    TreeSummary& summary_;
};

// Return x^alpha, positive for positive x, so that such a priority can always be drawn.
inline double get_mass(double x, double alpha) {
    if (x == 0) return 0;
    const double mass = std::pow(x, alpha);
    return mass > 0 || mass != mass ? mass : std::numeric_limits<double>::denorm_min();
}

// Return the importance weight ratio^beta, in (0, 1]. A weight that underflows becomes the smallest normal float,
// because a weight of zero would drop the row.
inline float get_weight(double ratio, double beta) {
    const float weight = ratio > 1e-30 ? std::pow(static_cast<float>(ratio), static_cast<float>(beta))
                                       : static_cast<float>(std::pow(ratio, beta));
    return std::max(weight, std::numeric_limits<float>::min());
}

// New masses of leaves, computed and checked before the tree changes.
struct PriorityUpdate {
    // Position of the first invalid priority, or -1.
    int64_t bad = -1;
    int64_t skipped = 0;
    // Largest priority of a leaf that is not skipped.
    double largest = 0;
    std::vector<int64_t> leaves;
    std::vector<double> masses;

    // Compute the masses (priority + eps)^alpha. Entries with a negative leaf are skipped.
    template <class T>
    PriorityUpdate(const int64_t* rows, const T* priorities, int64_t count, double alpha, double eps)
        : leaves(static_cast<size_t>(count)), masses(static_cast<size_t>(count)) {
        size_t used = 0;
        for (int64_t i = 0; i < count; ++i) {
            const double priority = priorities[i], mass = get_mass(priority + eps, alpha);
            if (!(priority >= 0 && std::isfinite(priority) && std::isfinite(mass))) {
                bad = i;
                return;
            }
            if (rows[i] < 0) continue;
            largest = std::max(largest, priority);
            masses[used] = mass;
            leaves[used++] = rows[i];
        }
        skipped = count - static_cast<int64_t>(used);
        leaves.resize(used);
    }
};

// Set the leaves of the slots that a write changed: transitions get `mass`, all other slots get zero.
inline void set_written_slots(PriorityTree& tree, const ChangedSlots& changed, double mass) {
    std::vector<double> values(changed.slots.size());
    for (size_t i = 0; i < values.size(); ++i) values[i] = changed.kind[changed.slots[i]] == kTransition ? mass : 0.0;
    tree.set(changed.slots.data(), values.data(), 1, ssize(values));
}

}
