// Statistics of written steps: running and finished episodes, and moments (mean and variance) of leaves.
#pragma once
#include <cstdint>
#include <vector>

#include "arrays.hpp"

namespace relive {

// The items of one leaf, [steps, environments, elements]; `data` is null if the steps lack the leaf.
struct CountedLeaf {
    const char* data;
    DataType dtype;
    int64_t elements;
};

// Whether elements of the dtype can be converted to float64.
bool is_countable(DataType dtype);

struct CountedSteps {
    int64_t steps, envs;
    // Numbers of the environments; null means all environments in order.
    const int64_t* env_ids;  // [envs]
    const CountedLeaf* leaves;
    // Whether each environment only resets in the first step; after `find_transitions`, in the step after the last one.
    std::vector<uint8_t> resetting;  // [envs]
    // Whether each step is a transition; empty if all are.
    std::vector<uint8_t> transition;  // [steps, envs]
    // Number of transitions in each step.
    std::vector<int64_t> num_transitions;  // [steps]

    int64_t env_at(int64_t n) const { return env_ids ? env_ids[n] : n; }
    bool is_transition(int64_t i) const { return transition.empty() || transition[i]; }

    // Fill `transition` and `num_transitions`. With `resetting`, the step after an episode end only resets; without,
    // every step is a transition.
    void find_transitions(int terminated, int truncated);
};

class EpisodeCounter {
public:
    // Running episodes: the return so far, the length so far, and the metrics so far.
    double* open;  // [2 + metrics, envs]
    // Finished episodes. The last row is scratch memory that is never read.
    double* ring;  // [window + 1, 4 + metrics + reasons]
    // Number of finished episodes, and number of steps.
    int64_t* counts;  // [2]
    int64_t envs, window;
    // Indices of the leaves with rewards, metrics and reasons.
    std::vector<int> rewards, metrics, reasons;
    int terminated, truncated;

    // Throw if a counter would overflow. To be called before `count`.
    void check(const CountedSteps& steps) const;
    void count(const CountedSteps& steps);

private:
    void finish(const CountedSteps& steps, int64_t t);

    // The environments whose episode ends in the current step, as positions within the step.
    std::vector<int64_t> ended_;
};

class MomentCounter {
public:
    // Number of rows [], mean [elements] and sum of squared deviations [elements].
    double *rows, *mean, *squares;
    int64_t elements;
    int leaf;

    void check(const CountedSteps& steps) const;
    void count(const CountedSteps& steps);

private:
    std::vector<double> values_, group_mean_, group_squares_;
};

}
