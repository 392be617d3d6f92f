// Samples in proportion to priorities: a sum tree with groups of eight entries, one cache line each.
//
// Level 0 holds the leaves. An entry of level l + 1 is the sum of one group of level l; the top level is a single group.
// Sums are recomputed, never updated by differences: rounding errors do not grow with the number of updates.
//
// Leaves store the exact priorities. Sums are of priorities times a power of two (see `TreeScale`): neither a million
// leaves of 1e308 overflow, nor does a total of denormal leaves lose digits.
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

constexpr int kFan = 8;          // float64 entries in a cache line
constexpr int kMaxLevels = 22;  // enough for 8^21 leaves
constexpr double kNoLeaf = std::numeric_limits<double>::infinity();  // returned as the smallest positive leaf if no leaf is positive

// The factor of leaves in sums. The normal factor leaves room for 2^64 leaves of any size; the tiny factor is for trees
// whose sums would otherwise be denormal. The bounds for switching are far apart: a tree near one does not switch back and
// forth.
struct TreeScale {
    static constexpr double kNormal = 0x1p-64, kTiny = 0x1p+512;
    static constexpr double kTooSmall = 0x1p-800;   // lower bound of a total in normal scale
    static constexpr double kTooLarge = 0x1p+300;   // upper bound of a total in tiny scale
    static constexpr double kTinyLeaf = 0x1p-700;   // if the normal total is below kTooSmall, all leaves are below this
};

// Sum of a group, pairwise: four independent additions at a time.
inline double sum_group(const double* group, double scale) noexcept {
    double part[4];
    for (int i = 0; i < 4; ++i) part[i] = group[i] * scale + group[i + 4] * scale;
    return (part[0] + part[2]) + (part[1] + part[3]);
}

// Smallest positive entry of a group. The bits of non-negative doubles sort like the doubles. The shift maps -0.0 to 0, and
// the subtraction sorts zero last.
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

// The next smaller double of a positive x.
inline double just_below(double x) noexcept {
    int64_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    --bits;
    std::memcpy(&x, &bits, sizeof bits);
    return x;
}

// Return the entry of a group that contains `point`: the first one whose running sum exceeds it, never one of zero. Then
// `point` is relative to the start of that entry.
//
// Rounding may put the point at or past the end of the group. It is then moved to just before the end, into the last
// nonzero entry.
inline int64_t descend(const double* group, double scale, double& point) noexcept {
    double running[kFan + 1];
    running[0] = 0;  // a branch for the first entry would take a third of the time
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

    // Total size, with each level padded to whole groups. Sets pointers to the levels if `levels` is not null.
    static int64_t size(int64_t num_leaves, double* memory = nullptr, double** levels = nullptr) {
        int64_t total = 0;
        for (int64_t level = 1, entries = num_leaves; entries > kFan; ++level) {
            entries = (entries + kFan - 1) / kFan;
            if (levels) levels[level] = memory + total;
            total += (entries + kFan - 1) / kFan * kFan;
        }
        return total;
    }

    double* operator[](int level) const { return levels_[level]; }  // the lowest level is 1

private:
    double* levels_[kMaxLevels + 1] = {};
};

// State of the whole tree, in the caller's memory.
struct TreeSummary {
    double root;        // sum of all leaves, scaled
    double scale;       // scale of the sums; 0 in a new tree
    double tiny;        // nonzero if a positive leaf may vanish in normal scale
    double has_minima;  // nonzero if the minima are kept up to date
};

class PriorityTree {
public:
    // Use memory of the caller, which trees of other processes may share: zeros, or the state of an earlier tree. `leaves`
    // is padded to whole groups; `sums` and `minima` have `TreeLevels::size` numbers.
    PriorityTree(double* leaves, double* sums, double* minima, TreeSummary* summary, int64_t num_leaves)
        : leaves_(leaves), sums_(sums, num_leaves), minima_(minima, num_leaves), summary_(*summary) {
        if (summary_.scale == 0) summary_.scale = TreeScale::kNormal;
        entries_[0] = num_leaves;
        for (; entries_[top_] > kFan; ++top_) entries_[top_ + 1] = groups(top_);
    }

    // Number of leaves padded to whole groups.
    static int64_t padded(int64_t num_leaves) { return (num_leaves + kFan - 1) / kFan * kFan; }

    int64_t num_leaves() const { return entries_[0]; }
    bool empty() const { return !(summary_.root > 0); }

    // Infinite if the true sum exceeds float64. Draws are unaffected.
    double total() const { return summary_.root / summary_.scale; }

    // Smallest positive leaf. Minima are built at the first call and maintained from then on: they double the cost of an
    // update, and most trees never need them.
    double smallest() {
        if (summary_.has_minima == 0) renew_all_minima();
        summary_.has_minima = 1;
        return min_positive(minima_at(top_));
    }

    // Set leaf `index[i]` to `values[i * stride]`; the last value wins if a leaf occurs twice.
    void set(const int64_t* index, const double* values, int64_t stride, int64_t count) noexcept {
        for (int64_t start = 0; start < count; start += kChunk)
            set_chunk(index + start, values + start * stride, stride, chunk(count - start));
        summary_.root = sum_group(sums_at(top_), scale_at(top_));
        rescale();
    }

    void get(double* out, const int64_t* index, int64_t count) const noexcept {
        for (int64_t i = 0; i < count; ++i) {
            if (i + kAhead < count) RELIVE_PREFETCH(leaves_ + index[i + kAhead]);
            out[i] = leaves_[index[i]];
        }
    }

    // Stratified draw: the i-th leaf from the i-th of `count` equal slices of the total, which must be positive. Writes the
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
        summary_.tiny = summary_.root < TreeScale::kTooSmall;  // may be true although no leaf vanishes
        rescale();
    }

    // Largest relative error of a stored sum; infinite for a wrong minimum.
    double deviation() const {
        std::vector<double> memory(static_cast<size_t>(TreeLevels::size(num_leaves())));
        const TreeLevels expected(memory.data(), num_leaves());
        double worst = 0;
        for (int level = 0; level < top_; ++level) {
            const double* entries = level == 0 ? leaves_ : expected[level];
            for (int64_t group = 0; group < groups(level); ++group) {
                expected[level + 1][group] = sum_group(entries + group * kFan, scale_at(level));
                worst = worse(worst, sums_[level + 1][group], expected[level + 1][group]);
                if (summary_.has_minima != 0 && minima_[level + 1][group] != min_positive(minima_at(level) + group * kFan)) worst = kNoLeaf;
            }
        }
        return worse(worst, summary_.root, sum_group(top_ == 0 ? leaves_ : expected[top_], scale_at(top_)));
    }

private:
    static constexpr int kChunk = 256;  // leaves per pass: they stay in the L1 cache until the next pass
    static constexpr int kAhead = 24;   // prefetch distance: a cache miss takes about this many iterations

    static int chunk(int64_t rest) { return static_cast<int>(rest < kChunk ? rest : kChunk); }

    static double worse(double worst, double stored, double expected) {
        if (stored == expected) return worst;
        const double difference = (stored > expected ? stored - expected : expected - stored) / expected;
        return difference <= worst ? worst : difference > worst ? difference : kNoLeaf;  // NaN counts as infinite
    }

    int64_t groups(int level) const { return (entries_[level] + kFan - 1) / kFan; }
    double* sums_at(int level) const { return level == 0 ? leaves_ : sums_[level]; }
    double* minima_at(int level) const { return level == 0 ? leaves_ : minima_[level]; }
    double scale_at(int level) const { return level == 0 ? summary_.scale : 1; }

    // Recompute the numbers of the groups `which` of a level, or of its first `count` groups if `which` is null.
    template <class Reduce>
    static void renew(double* out, const double* entries, const int64_t* which, int64_t count, Reduce reduce) noexcept {
        for (int64_t i = 0; i < count; ++i) {
            const int64_t group = which ? which[i] : i;
            out[group] = reduce(entries + group * kFan);
        }
    }

    void renew_sums(int level, const int64_t* which, int64_t count) noexcept {
        const double scale = scale_at(level);
        renew(sums_[level + 1], sums_at(level), which, count, [scale](const double* group) { return sum_group(group, scale); });
    }

    void renew_minima(int level, const int64_t* which, int64_t count) noexcept {
        renew(minima_[level + 1], minima_at(level), which, count, [](const double* group) { return min_positive(group); });
    }

    void renew_all_minima() noexcept {
        for (int level = 0; level < top_; ++level) renew_minima(level, nullptr, groups(level));
    }

    void set_chunk(const int64_t* index, const double* values, int64_t stride, int count) noexcept {
        int64_t touched[kChunk];
        int size = 0;
        for (int i = 0; i < count; ++i) {
            if (i + kAhead < count) RELIVE_PREFETCH(leaves_ + index[i + kAhead]);
            const double value = values[i * stride];
            leaves_[index[i]] = value;
            if (value > 0 && value < TreeScale::kTinyLeaf) summary_.tiny = 1;
            // Stratified draws are sorted: comparing with the previous group finds nearly all duplicates. Recomputing a
            // group twice is harmless.
            const int64_t group = index[i] / kFan;
            if (size > 0 && touched[size - 1] == group) continue;
            touched[size++] = group;
            if (top_ > 0) RELIVE_PREFETCH(sums_[1] + group);
        }
        for (int level = 0; level < top_; ++level) size = renew_above(level, touched, size);
    }

    // Recompute the sums above the touched groups of a level. Replaces `touched` with the touched groups one level up and
    // returns their number.
    int renew_above(int level, int64_t* touched, int size) noexcept {
        const bool all = size >= groups(level);
        if (all) size = static_cast<int>(groups(level));
        renew_sums(level, all ? nullptr : touched, size);
        if (summary_.has_minima != 0) renew_minima(level, all ? nullptr : touched, size);
        int above = 0;
        for (int i = 0; i < size; ++i) {
            const int64_t group = (all ? i : touched[i]) / kFan;
            if (above == 0 || touched[above - 1] != group) touched[above++] = group;
        }
        return above;
    }

    // Descend level by level for the whole chunk: the next groups are prefetched meanwhile.
    void draw_chunk(int64_t* out, double* points, int count) const noexcept {
        for (int i = 0; i < count; ++i) out[i] = 0;
        for (int level = top_; level > 0; --level) {
            const double *entries = sums_[level], *below = sums_at(level - 1);
            for (int i = 0; i < count; ++i) {
                out[i] = out[i] * kFan + descend(entries + out[i] * kFan, 1, points[i]);
                RELIVE_PREFETCH(below + out[i] * kFan);
            }
        }
        for (int i = 0; i < count; ++i) {
            out[i] = out[i] * kFan + descend(leaves_ + out[i] * kFan, summary_.scale, points[i]);
            // Reached only if leaves were changed without `rebuild`: keep the wrong draw in range.
            if (out[i] >= num_leaves()) out[i] = num_leaves() - 1;
        }
    }

    void sum_all(double scale) noexcept {
        summary_.scale = scale;
        for (int level = 0; level < top_; ++level) renew_sums(level, nullptr, groups(level));
        summary_.root = sum_group(sums_at(top_), scale_at(top_));
    }

    void rescale() noexcept {
        if (summary_.scale == TreeScale::kTiny && !(summary_.root <= TreeScale::kTooLarge)) sum_all(TreeScale::kNormal);
        if (summary_.scale == TreeScale::kNormal && summary_.tiny != 0 && summary_.root < TreeScale::kTooSmall) {
            sum_all(TreeScale::kTiny);
            if (summary_.root > 0) return;
            summary_.scale = TreeScale::kNormal;  // if the total is zero, all leaves are zero
            summary_.tiny = 0;
        }
    }

    double* leaves_;
    int top_ = 0;  // level of the top group
    int64_t entries_[kMaxLevels + 1];
    TreeLevels sums_, minima_;
    TreeSummary& summary_;
};

// x^alpha, positive for positive x: such a priority can always be drawn.
inline double get_mass(double x, double alpha) {
    if (x == 0) return 0;
    const double mass = std::pow(x, alpha);
    return mass > 0 || mass != mass ? mass : std::numeric_limits<double>::denorm_min();
}

// The importance weight ratio^beta, in (0, 1]. Underflow gives the smallest normal float: a weight of zero would drop the
// row.
inline float get_weight(double ratio, double beta) {
    const double exact = ratio > 1e-30 ? std::pow(static_cast<float>(ratio), static_cast<float>(beta)) : std::pow(ratio, beta);
    return std::max(static_cast<float>(exact), std::numeric_limits<float>::min());
}

// New masses of leaves, computed and checked before the tree changes.
struct PriorityUpdate {
    int64_t bad = -1;  // position of the first invalid priority
    int64_t skipped = 0;
    double largest = 0;  // largest priority of a leaf that is not skipped
    std::vector<int64_t> leaves;
    std::vector<double> masses;

    // Compute the masses (priority + eps)^alpha. Negative rows are skipped.
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

// Set the leaves of the slots touched by a write: `mass` for transitions, otherwise zero.
inline void mark_touched(PriorityTree& tree, const Touched& touched, double mass) {
    std::vector<double> values(touched.slots.size());
    for (size_t i = 0; i < values.size(); ++i) values[i] = touched.kind[touched.slots[i]] == kTransition ? mass : 0.0;
    tree.set(touched.slots.data(), values.data(), 1, static_cast<int64_t>(values.size()));
}

}  // namespace relive
