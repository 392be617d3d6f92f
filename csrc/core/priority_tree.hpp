// Draws in proportion to priorities: a tree of sums, eight entries per group, one cache line per group.
//
// Level 0 are the leaves. An entry of level l + 1 is the sum of one group of level l; the top level is a single group.
// A sum is never corrected by a difference: every sum above a changed leaf is added up again, so rounding errors do not
// grow with the number of updates.
//
// Leaves keep the priorities exactly as given. The sums are of priorities times a power of two, chosen so that neither
// a million leaves of 1e308 overflow nor a total of denormal leaves loses its digits; see `TreeScale`.
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
constexpr int kMostLevels = 22;  // 8^21 leaves
constexpr double kNoLeaf = std::numeric_limits<double>::infinity();  // the smallest positive leaf if no leaf is positive

// The factor that leaves are multiplied by before they are summed. The usual factor leaves room for 2^64 leaves of any
// size; the faint factor is for trees whose leaves are all so small that the usual sums would be denormal. The bounds at
// which one replaces the other lie far apart, so that a tree near a bound does not switch back and forth.
struct TreeScale {
    static constexpr double kUsual = 0x1p-64, kFaint = 0x1p+512;
    static constexpr double kTooSmall = 0x1p-800;  // for a usual total
    static constexpr double kTooLarge = 0x1p+300;  // for a faint total
    static constexpr double kTiny = 0x1p-700;      // under a usual total that is too small all leaves are below this
};

// Pairwise: four independent additions at once.
inline double sum_of(const double* group, double scale) noexcept {
    double part[4];
    for (int i = 0; i < 4; ++i) part[i] = group[i] * scale + group[i + 4] * scale;
    return (part[0] + part[2]) + (part[1] + part[3]);
}

// Bits of doubles that are not negative sort like the doubles do. Shifted, -0.0 is 0 too; less one, zero comes last.
inline double smallest_of(const double* group) noexcept {
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

// The next smaller double of a positive one.
inline double just_below(double x) noexcept {
    int64_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    --bits;
    std::memcpy(&x, &bits, sizeof bits);
    return x;
}

// The entry of a group that `point` falls into: the first entry whose running sum exceeds it. An entry of zero does not
// raise the running sum and so is never the first. `point` becomes its distance from the start of that entry.
//
// Rounding may put the point at the end of the group or past it. It is then moved to just before the end, which lies in
// the last entry that is not zero.
inline int64_t descend(const double* group, double scale, double& point) noexcept {
    double running[kFan + 1];
    running[0] = 0;  // no case of its own for the first entry: that branch cost a third of the time
    for (int i = 0; i < kFan; ++i) running[i + 1] = running[i] + group[i] * scale;
    const double end = just_below(running[kFan]);
    const double inside = point < end ? point : end;
    int64_t passed = 0;
    for (int i = 1; i < kFan; ++i) passed += running[i] <= inside;
    point = inside - running[passed];
    return passed;
}

// One number per group of every level but the top, in one piece of the caller's memory.
class TreeLevels {
public:
    TreeLevels(double* memory, int64_t num_leaves) { size(num_leaves, memory, levels_); }

    // How many numbers there are, with each level padded to whole groups.
    static int64_t size(int64_t num_leaves, double* memory = nullptr, double** levels = nullptr) {
        int64_t total = 0;
        for (int64_t level = 1, entries = num_leaves; entries > kFan; ++level) {
            entries = (entries + kFan - 1) / kFan;
            if (levels) levels[level] = memory + total;
            total += (entries + kFan - 1) / kFan * kFan;
        }
        return total;
    }

    double* operator[](int level) const { return levels_[level]; }  // from 1 on

private:
    double* levels_[kMostLevels + 1] = {};
};

// What is known about the whole tree.
struct TreeSummary {
    double root;       // the total, scaled
    double scale;      // of the sums; 0 before there are any
    double tiny;       // not 0: there may be a positive leaf that is zero in the usual scale
    double has_least;  // not 0: the minima are kept up to date
};

class PriorityTree {
public:
    // All memory is the caller's and may be shared with trees of other processes: zeros at first, or what they left.
    // `leaves` are padded to whole groups; `sums` and `least` are `TreeLevels::size` long.
    PriorityTree(double* leaves, double* sums, double* least, TreeSummary* summary, int64_t num_leaves)
        : leaves_(leaves), sums_(sums, num_leaves), least_(least, num_leaves), summary_(*summary) {
        if (summary_.scale == 0) summary_.scale = TreeScale::kUsual;
        entries_[0] = num_leaves;
        for (; entries_[top_] > kFan; ++top_) entries_[top_ + 1] = groups(top_);
    }

    // The leaves, padded to whole groups.
    static int64_t padded(int64_t num_leaves) { return (num_leaves + kFan - 1) / kFan * kFan; }

    int64_t num_leaves() const { return entries_[0]; }
    bool empty() const { return !(summary_.root > 0); }

    // Infinite if the true sum exceeds float64; draws are right all the same.
    double total() const { return summary_.root / summary_.scale; }

    // The smallest positive leaf. The minima are built at the first call and kept up to date from then on: they double the
    // cost of an update, and most trees never need them.
    double smallest() {
        if (summary_.has_least == 0) renew_all_least();
        summary_.has_least = 1;
        return smallest_of(least_of(top_));
    }

    // Set leaf `index[i]` to `values[i * stride]`; the last value wins if a leaf occurs twice.
    void set(const int64_t* index, const double* values, int64_t stride, int64_t count) noexcept {
        for (int64_t start = 0; start < count; start += kChunk)
            set_chunk(index + start, values + start * stride, stride, chunk(count - start));
        summary_.root = sum_of(sums_of(top_), scale_of(top_));
        rescale();
    }

    void get(double* out, const int64_t* index, int64_t count) const noexcept {
        for (int64_t i = 0; i < count; ++i) {
            if (i + kAhead < count) RELIVE_PREFETCH(leaves_ + index[i + kAhead]);
            out[i] = leaves_[index[i]];
        }
    }

    // The i-th draw falls into the i-th of `count` equal slices of the total, which is not zero. `priorities` gets the
    // leaves' values, unless it is null.
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

    // Compute everything again from the leaves, after they were written directly.
    void rebuild() noexcept {
        sum_all(TreeScale::kUsual);
        if (summary_.has_least != 0) renew_all_least();
        summary_.tiny = summary_.root < TreeScale::kTooSmall;  // as far as is known
        rescale();
    }

    // The largest relative difference between a stored sum and the sum of the leaves; infinite for a wrong minimum.
    double deviation() const {
        std::vector<double> memory(static_cast<size_t>(TreeLevels::size(num_leaves())));
        const TreeLevels expected(memory.data(), num_leaves());
        double worst = 0;
        for (int level = 0; level < top_; ++level) {
            const double* entries = level == 0 ? leaves_ : expected[level];
            for (int64_t group = 0; group < groups(level); ++group) {
                expected[level + 1][group] = sum_of(entries + group * kFan, scale_of(level));
                worst = worse(worst, sums_[level + 1][group], expected[level + 1][group]);
                if (summary_.has_least != 0 && least_[level + 1][group] != smallest_of(least_of(level) + group * kFan)) worst = kNoLeaf;
            }
        }
        return worse(worst, summary_.root, sum_of(top_ == 0 ? leaves_ : expected[top_], scale_of(top_)));
    }

private:
    static constexpr int kChunk = 256;  // the leaves of a pass stay in the first cache until the next pass
    static constexpr int kAhead = 24;   // a cache miss lasts about this many iterations

    static int chunk(int64_t rest) { return static_cast<int>(rest < kChunk ? rest : kChunk); }

    static double worse(double worst, double stored, double expected) {
        if (stored == expected) return worst;
        const double difference = (stored > expected ? stored - expected : expected - stored) / expected;
        return difference <= worst ? worst : difference > worst ? difference : kNoLeaf;  // NaN is the worst
    }

    int64_t groups(int level) const { return (entries_[level] + kFan - 1) / kFan; }
    double* sums_of(int level) const { return level == 0 ? leaves_ : sums_[level]; }
    double* least_of(int level) const { return level == 0 ? leaves_ : least_[level]; }
    double scale_of(int level) const { return level == 0 ? summary_.scale : 1; }

    // Renew the numbers of the groups `which` of a level, or of its first `count` groups if `which` is null.
    template <class Reduce>
    static void renew(double* out, const double* entries, const int64_t* which, int64_t count, Reduce reduce) noexcept {
        for (int64_t i = 0; i < count; ++i) {
            const int64_t group = which ? which[i] : i;
            out[group] = reduce(entries + group * kFan);
        }
    }

    void renew_sums(int level, const int64_t* which, int64_t count) noexcept {
        const double scale = scale_of(level);
        renew(sums_[level + 1], sums_of(level), which, count, [scale](const double* group) { return sum_of(group, scale); });
    }

    void renew_least(int level, const int64_t* which, int64_t count) noexcept {
        renew(least_[level + 1], least_of(level), which, count, [](const double* group) { return smallest_of(group); });
    }

    void renew_all_least() noexcept {
        for (int level = 0; level < top_; ++level) renew_least(level, nullptr, groups(level));
    }

    void set_chunk(const int64_t* index, const double* values, int64_t stride, int count) noexcept {
        int64_t touched[kChunk];
        int size = 0;
        for (int i = 0; i < count; ++i) {
            if (i + kAhead < count) RELIVE_PREFETCH(leaves_ + index[i + kAhead]);
            const double value = values[i * stride];
            leaves_[index[i]] = value;
            if (value > 0 && value < TreeScale::kTiny) summary_.tiny = 1;
            // Stratified draws come back sorted, so that comparing with the previous group finds nearly every repetition;
            // renewing a group twice is harmless.
            const int64_t group = index[i] / kFan;
            if (size > 0 && touched[size - 1] == group) continue;
            touched[size++] = group;
            if (top_ > 0) RELIVE_PREFETCH(sums_[1] + group);
        }
        for (int level = 0; level < top_; ++level) size = renew_above(level, touched, size);
    }

    // Renew the sums above the touched groups of a level. `touched` becomes the groups that this changes, one level up.
    int renew_above(int level, int64_t* touched, int size) noexcept {
        const bool all = size >= groups(level);
        if (all) size = static_cast<int>(groups(level));
        renew_sums(level, all ? nullptr : touched, size);
        if (summary_.has_least != 0) renew_least(level, all ? nullptr : touched, size);
        int above = 0;
        for (int i = 0; i < size; ++i) {
            const int64_t group = (all ? i : touched[i]) / kFan;
            if (above == 0 || touched[above - 1] != group) touched[above++] = group;
        }
        return above;
    }

    // The whole chunk goes down one level before any draw goes further: the next groups are fetched meanwhile.
    void draw_chunk(int64_t* out, double* points, int count) const noexcept {
        for (int i = 0; i < count; ++i) out[i] = 0;
        for (int level = top_; level > 0; --level) {
            const double *entries = sums_[level], *below = sums_of(level - 1);
            for (int i = 0; i < count; ++i) {
                out[i] = out[i] * kFan + descend(entries + out[i] * kFan, 1, points[i]);
                RELIVE_PREFETCH(below + out[i] * kFan);
            }
        }
        for (int i = 0; i < count; ++i) {
            out[i] = out[i] * kFan + descend(leaves_ + out[i] * kFan, summary_.scale, points[i]);
            // Only if leaves were changed without a rebuild: the draw is then wrong, but in range.
            if (out[i] >= num_leaves()) out[i] = num_leaves() - 1;
        }
    }

    void sum_all(double scale) noexcept {
        summary_.scale = scale;
        for (int level = 0; level < top_; ++level) renew_sums(level, nullptr, groups(level));
        summary_.root = sum_of(sums_of(top_), scale_of(top_));
    }

    void rescale() noexcept {
        if (summary_.scale == TreeScale::kFaint && !(summary_.root <= TreeScale::kTooLarge)) sum_all(TreeScale::kUsual);
        if (summary_.scale == TreeScale::kUsual && summary_.tiny != 0 && summary_.root < TreeScale::kTooSmall) {
            sum_all(TreeScale::kFaint);
            if (summary_.root > 0) return;
            summary_.scale = TreeScale::kUsual;  // all zero, in either scale
            summary_.tiny = 0;
        }
    }

    double* leaves_;
    int top_ = 0;  // the level that is a single group
    int64_t entries_[kMostLevels + 1];
    TreeLevels sums_, least_;
    TreeSummary& summary_;
};

// x^alpha, but zero only for zero: a positive priority can always be drawn.
inline double mass_of(double x, double alpha) {
    if (x == 0) return 0;
    const double mass = std::pow(x, alpha);
    return mass > 0 || mass != mass ? mass : std::numeric_limits<double>::denorm_min();
}

// The weight ratio^beta of a draw, in (0, 1]: a weight too small for a float is the smallest float, since a weight of zero
// would hide the row.
inline float weight_of(double ratio, double beta) {
    const double exact = ratio > 1e-30 ? std::pow(static_cast<float>(ratio), static_cast<float>(beta)) : std::pow(ratio, beta);
    return std::max(static_cast<float>(exact), std::numeric_limits<float>::min());
}

// New masses of some leaves, computed and checked before the tree is changed.
struct PriorityUpdate {
    int64_t bad = -1;  // the position of the first invalid priority
    int64_t skipped = 0;
    double largest = 0;  // the largest priority of a leaf that is not skipped
    std::vector<int64_t> leaves;
    std::vector<double> masses;

    // Masses (priority + eps)^alpha. A negative row is skipped.
    template <class T>
    PriorityUpdate(const int64_t* rows, const T* priorities, int64_t count, double alpha, double eps)
        : leaves(static_cast<size_t>(count)), masses(static_cast<size_t>(count)) {
        size_t used = 0;
        for (int64_t i = 0; i < count; ++i) {
            const double priority = priorities[i], mass = mass_of(priority + eps, alpha);
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

// Set the leaves of the slots that a write touched: to `mass` if a transition is there now, else to zero.
inline void mark_touched(PriorityTree& tree, const Touched& touched, double mass) {
    std::vector<double> values(touched.slots.size());
    for (size_t i = 0; i < values.size(); ++i) values[i] = touched.kind[touched.slots[i]] == kTransition ? mass : 0.0;
    tree.set(touched.slots.data(), values.data(), 1, static_cast<int64_t>(values.size()));
}

}  // namespace relive
