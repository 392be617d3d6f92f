// Counters: everything that a buffer counts of its steps, changed in one native call.
#pragma once
#include <nanobind/nanobind.h>

#include <optional>
#include <vector>

#include "../core/counting.hpp"
#include "arguments.hpp"

namespace relive::bind {

class Counters {
public:
    // Whoever reads or writes the arrays holds `lock`. Steps have `num_leaves` leaves of `envs` environments (-1: of any
    // number). `flags` are the leaves (terminated, truncated), or None. `episodes` is None, or (open, ring, counts,
    // rewards, metrics, reasons): arrays, and lists of leaves. Each of `moments` is (count, mean, squares, leaf). Leaves
    // from `num_leaves` on are those that `measure` is given.
    Counters(nb::object lock, int64_t num_leaves, int64_t envs, nb::handle flags, nb::handle episodes, nb::list moments);
    Counters(const Counters&) = delete;

    // Set the numbers of the coming step that are not among its leaves: float64 [envs] each, or None.
    void measure(nb::list numbers);

    // Count the rows from `first` on, `steps` of them, of arrays [rows, envs, …], or None for one that was not given.
    // `resetting` [envs] marks the environments that only reset in the first row, and afterwards in the row to come; None:
    // no row only resets. `then` makes the rest of the change: see `complete`. If counting raises, nothing has changed.
    void count(nb::tuple arrays, int64_t first, int64_t steps, nb::handle env_ids, nb::handle resetting, nb::handle then);

    // For writers of steps, which hold the lock (`Hold`), call `begin`, set all `leaves()` and maybe `steps().resetting`,
    // then call `run`. It throws before anything is counted, or not at all, and does not need the GIL.
    void begin(int64_t steps, int64_t envs, const int64_t* env_ids);
    CountedSteps& steps() { return steps_; }
    std::vector<CountedLeaf>& leaves() { return leaves_; }
    void run();

    int64_t num_leaves() const { return num_leaves_; }
    int64_t envs() const { return envs_; }

    // Throws if a leaf that is counted is not of this kind.
    void check_leaf(int64_t i, DataType dtype, int64_t elements) const;

    class Hold {
    public:
        explicit Hold(const Counters& counters);
        Hold(const Hold&) = delete;
        ~Hold();

    private:
        PyObject* release_;
    };

private:
    void read_episodes(nb::tuple arguments);
    void check_numbers(const std::vector<int>& leaves) const;
    void check_given(int64_t i) const;

    int64_t num_leaves_, envs_;
    int terminated_ = -1, truncated_ = -1;
    std::optional<EpisodeCounter> episodes_;
    std::vector<MomentCounter> moments_;
    std::vector<CountedLeaf> leaves_;
    std::vector<std::vector<double>> measured_;
    CountedSteps steps_{};
    nb::object acquire_, release_, owner_;
};

}  // namespace relive::bind
