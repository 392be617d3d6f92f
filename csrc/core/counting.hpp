// Counters of what steps bring: the running episodes with a ring of the finished ones, and moments of rows.
#pragma once
#include <cstdint>
#include <vector>

#include "arrays.hpp"

namespace relive {

// The items of one leaf in the order [steps, environments, elements]; null where the steps do not have it.
struct CountedLeaf {
    const char* data;
    DataType dtype;
    int64_t elements;  // of one environment's item
};

// The elements of dtypes that are counted are exact in float64, as far as float64 goes.
bool is_countable(DataType dtype);

struct CountedSteps {
    int64_t steps, envs;
    const int64_t* env_ids;  // [envs]; null: all environments in order
    const CountedLeaf* leaves;
    std::vector<uint8_t> resetting;   // [envs]: the first step only resets; after `find_transitions`: the coming step
    std::vector<uint8_t> transition;  // [steps, envs]; empty: all are
    std::vector<int64_t> played;      // transitions per step

    int64_t env_at(int64_t n) const { return env_ids ? env_ids[n] : n; }
    bool is_transition(int64_t i) const { return transition.empty() || transition[static_cast<size_t>(i)]; }

    // All steps are transitions, unless `resetting` is given: then the step after an end only resets.
    void find_transitions(int terminated, int truncated);
};

class EpisodeCounter {
public:
    double* open;     // [2 + metrics, envs]: return, length and metrics of the running episodes
    double* ring;     // [window + 1, 4 + metrics + reasons]: the row after the window is never read
    int64_t* counts;  // finished episodes, steps
    int64_t envs, window;
    std::vector<int> rewards, metrics, reasons;  // leaves
    int terminated, truncated;

    void check(const CountedSteps& steps) const;  // throws before anything is counted
    void count(const CountedSteps& steps);

private:
    void finish(const CountedSteps& steps, int64_t t);

    std::vector<int64_t> ended_;  // positions in a step
};

class MomentCounter {
public:
    double *rows, *mean, *squares;  // [], [elements], [elements]
    int64_t elements;
    int leaf;

    void check(const CountedSteps& steps) const;
    void count(const CountedSteps& steps);

private:
    std::vector<double> values_, group_mean_, group_squares_;
};

// out[j] = the sum of column j of [count, columns], added in the order of torch's `sum(0)` by one thread.
void sum_rows(const double* rows, int64_t count, int64_t columns, double* out);

}  // namespace relive
