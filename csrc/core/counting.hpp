// Statistics of written steps: running and finished episodes, and moments (mean and variance) of leaves.
#pragma once
#include <cstdint>
#include <vector>

#include "arrays.hpp"

namespace relive {

// The items of one leaf, [steps, environments, elements]; null data if the steps lack it.
struct CountedLeaf {
    const char* data;
    DataType dtype;
    int64_t elements;  // number of elements per item
};

// Whether elements of the dtype can be converted to float64.
bool is_countable(DataType dtype);

struct CountedSteps {
    int64_t steps, envs;
    const int64_t* env_ids;  // [envs]; null: all environments in order
    const CountedLeaf* leaves;
    std::vector<uint8_t> resetting;   // [envs] whether the first step is a reset; set by `find_transitions` for the step after the last
    std::vector<uint8_t> transition;  // [steps, envs]; empty: all steps are transitions
    std::vector<int64_t> played;      // number of transitions in each step

    int64_t env_at(int64_t n) const { return env_ids ? env_ids[n] : n; }
    bool is_transition(int64_t i) const { return transition.empty() || transition[static_cast<size_t>(i)]; }

    // Fill `transition` and `played`. With `resetting`, the step after an episode end only resets; otherwise all steps are
    // transitions.
    void find_transitions(int terminated, int truncated);
};

class EpisodeCounter {
public:
    double* open;     // [2 + metrics, envs] return, length and metrics of running episodes
    double* ring;     // [window + 1, 4 + metrics + reasons] finished episodes; the last row is scratch, never read
    int64_t* counts;  // [2] number of finished episodes, number of steps
    int64_t envs, window;
    std::vector<int> rewards, metrics, reasons;  // indices of the leaves with rewards, metrics and reasons
    int terminated, truncated;

    void check(const CountedSteps& steps) const;  // throws if counters would overflow; call before `count`
    void count(const CountedSteps& steps);

private:
    void finish(const CountedSteps& steps, int64_t t);

    std::vector<int64_t> ended_;  // positions, within a step, of environments whose episode ends
};

class MomentCounter {
public:
    double *rows, *mean, *squares;  // count [], mean and squared deviations [elements]
    int64_t elements;
    int leaf;

    void check(const CountedSteps& steps) const;
    void count(const CountedSteps& steps);

private:
    std::vector<double> values_, group_mean_, group_squares_;
};

// out[j] = sum of column j of rows [count, columns], in the summation order of single-threaded `torch.sum(0)`.
void sum_rows(const double* rows, int64_t count, int64_t columns, double* out);

}  // namespace relive
