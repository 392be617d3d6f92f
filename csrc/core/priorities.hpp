// Priorities of rows: their masses in the tree, and the importance weights of draws.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "priority_tree.hpp"
#include "ring.hpp"

namespace relive {

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

inline void weigh(float* weights, const std::vector<double>& priorities, double smallest, double beta) {
    for (size_t i = 0; i < priorities.size(); ++i) weights[i] = weight_of(smallest / priorities[i], beta);
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
        size_t kept = 0;
        for (int64_t i = 0; i < count; ++i) {
            const double priority = priorities[i], mass = mass_of(priority + eps, alpha);
            if (!(priority >= 0 && std::isfinite(priority) && std::isfinite(mass))) {
                bad = i;
                return;
            }
            if (rows[i] < 0) continue;
            largest = std::max(largest, priority);
            masses[kept] = mass;
            leaves[kept++] = rows[i];
        }
        skipped = count - static_cast<int64_t>(kept);
        leaves.resize(kept);
    }
};

// Set the leaves of the slots that a write touched: to `mass` if a transition is there now, else to zero.
inline void mark_touched(PriorityTree& tree, const Touched& touched, double mass) {
    std::vector<double> values(touched.slots.size());
    for (size_t i = 0; i < values.size(); ++i) values[i] = touched.kind[touched.slots[i]] == kTransition ? mass : 0.0;
    tree.set(touched.slots.data(), values.data(), 1, static_cast<int64_t>(values.size()));
}

}  // namespace relive
