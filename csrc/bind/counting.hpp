// Counters update all statistics of a buffer in one native call per step.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "../core/counting.hpp"
#include "../core/ring_writer.hpp"
#include "arguments.hpp"

namespace relive::bind {

class Counters {
public:
    // `lock` protects the arrays. Steps have `num_leaves` leaves of `envs` environments (-1: any number). `flags` are
    // the leaves (terminated, truncated), or None. `episodes` is None or (open, ring, counts, rewards, metrics,
    // reasons): three arrays and three lists of leaves. Each of `moments` is (count, mean, squares, leaf). Leaves from
    // `num_leaves` on are the numbers passed to `measure`.
    Counters(nb::object lock, int64_t num_leaves, int64_t envs, nb::handle flags, nb::handle episodes, nb::list moments)
        : num_leaves_(num_leaves), envs_(envs), acquire_(lock.attr("acquire")), release_(lock.attr("release")) {
        if (num_leaves < 1 || num_leaves > kMaxLeaves || envs < -1 || envs == 0 || envs > kMaxLength)
            refuse<OutOfRange>("num_leaves, envs: expected some, or -1 for any number of environments");
        if (!flags.is_none()) {
            const auto pair = nb::cast<std::vector<int>>(flags);
            if (pair.size() != 2) refuse("flags: expected the leaves terminated and truncated");
            check_numbers(pair, num_leaves);
            terminated_ = pair[0], truncated_ = pair[1];
        }
        leaves_.assign(2 * kMaxLeaves, CountedLeaf{nullptr, kFloat64, 1});
        if (!episodes.is_none()) read_episodes(nb::cast<nb::tuple>(episodes));
        for (nb::handle each : moments) {
            const auto parts = nb::cast<nb::tuple>(each);
            if (parts.size() != 4) refuse("moments: expected (count, mean, squares, leaf)");
            MomentCounter moment;
            moment.elements = read_output(parts[1], "mean").elements();
            moment.rows = read_memory<double>(parts[0], kFloat64, 1, "count");
            moment.mean = read_memory<double>(parts[1], kFloat64, moment.elements, "mean");
            moment.squares = read_memory<double>(parts[2], kFloat64, moment.elements, "squares");
            moment.leaf = nb::cast<int>(parts[3]);
            check_numbers({moment.leaf}, num_leaves);
            moments_.push_back(std::move(moment));
        }
        kept_alive_ = nb::make_tuple(lock, nb::borrow(episodes), nb::tuple(moments));
    }
    Counters(const Counters&) = delete;

    // Set extra numbers of the next step, float64 [envs] or None each.
    void measure(nb::list numbers) {
        if (ssize(numbers) > kMaxLeaves) refuse("measured: expected fewer");
        std::vector<std::vector<double>> read(numbers.size());
        for (size_t i = 0; i < numbers.size(); ++i) {
            if (numbers[i].is_none()) continue;
            const Array array = read_or_throw(numbers[i], "measured");
            if (array.dtype != kFloat64) refuse("measured: expected float64");
            read[i].assign(array.as<double>(), array.as<double>() + array.elements());
        }
        measured_ = std::move(read);
    }

    // Count `steps` rows from `first` on of arrays [rows, envs, …]; None for a missing leaf. `resetting` [envs] marks
    // environments that only reset in the first row, and is updated for the row after the last; None: no row only
    // resets. `then` completes the change (see `complete`). If counting raises, nothing has changed.
    void count(nb::tuple arrays, int64_t first, int64_t steps, nb::handle env_ids, nb::handle resetting,
               nb::handle then) {
        if (ssize(arrays) != num_leaves_) refuse("arrays: expected one for each leaf");
        if (first < 0 || first > kMaxLength || steps < 1 || steps > (terminated_ < 0 ? 1 : kMaxLength))
            refuse<OutOfRange>("rows: expected rows of the arrays, and only one without flags");
        Array ids;
        int64_t envs = envs_;
        if (!env_ids.is_none()) {
            ids = read_index(env_ids);
            envs = ids.shape[0];
            if (!in_range(ids.as<int64_t>(), envs, std::max<int64_t>(envs_, 0)))
                refuse<OutOfRange>("env_ids: expected environments");
        }
        std::vector<Array> read(arrays.size());
        std::vector<CountedLeaf> leaves(arrays.size(), CountedLeaf{nullptr, kFloat64, 1});
        int64_t bytes = 0;
        for (size_t i = 0; i < read.size(); ++i) {
            if (nb::handle(arrays[i]).is_none()) {
                check_missing(static_cast<int64_t>(i));
                continue;
            }
            read[i] = read_or_throw(arrays[i], "array");
            const Array& array = read[i];
            if (array.ndim >= 2 && envs < 0) envs = array.shape[1];
            if (array.ndim < 2 || array.shape[1] != envs || array.shape[0] - steps < first)
                refuse("array: expected [rows, envs, …]");
            CountedLeaf& leaf = leaves[i];
            leaf.dtype = array.dtype;
            // `item` has the shape of one environment's values but no memory: it only counts their elements.
            ArrayView item;
            item.ndim = array.ndim - 2;
            std::copy_n(array.shape + 2, item.ndim, item.shape);
            leaf.elements = item.elements();
            check_leaf(static_cast<int64_t>(i), leaf.dtype, leaf.elements);
            const int64_t row_bytes = envs * leaf.elements * array.itemsize();
            leaf.data = array.data + first * row_bytes;
            bytes += steps * row_bytes;
        }
        uint8_t* reset_flags = nullptr;
        if (!resetting.is_none()) reset_flags = read_memory<uint8_t>(resetting, kBool, envs, "resetting");
        if (envs > 0) {
            const Hold hold(*this);
            begin(steps, envs, env_ids.is_none() ? nullptr : ids.as<int64_t>());
            std::copy(leaves.begin(), leaves.end(), leaves_.begin());
            if (reset_flags) steps_.resetting.assign(reset_flags, reset_flags + envs);
            MaybeReleased released(bytes);
            run();
            std::copy(steps_.resetting.begin(), steps_.resetting.end(), reset_flags);
        }
        if (!then.is_none()) complete(then);
    }

    // Throw if these counters cannot count the leaves of this memory.
    void check(const RingMemory& memory) const {
        if (num_leaves_ != ssize(memory.leaves) || envs_ != memory.ring.envs)
            refuse("counters: expected those of the leaves and environments of this memory");
        for (int64_t i = 0; i < num_leaves_; ++i) {
            const Leaf& leaf = memory.leaves[i];
            check_leaf(i, leaf.dtype, leaf.input_elements());
        }
    }

    // Count the steps of a block before it is written. `check` has accepted the memory, and the caller holds the lock,
    // not necessarily the GIL. If this throws, nothing was counted.
    void count(StepBlock& block, const RingMemory& memory) {
        begin(block.steps(), block.envs(), block.env_ids());
        for (size_t i = 0; i < memory.leaves.size(); ++i) {
            const Leaf& leaf = memory.leaves[i];
            leaves_[i] = {block.input(i).data, leaf.dtype, leaf.input_elements()};
        }
        for (int64_t n = 0; n < block.envs() && memory.ring.next_step; ++n)
            steps_.resetting.push_back(memory.ring.resetting[block.env_at(n)]);
        run();
    }

    // Holds the lock of the counters while it exists.
    class Hold {
    public:
        explicit Hold(const Counters& counters) : release_(counters.release_.ptr()) {
            PyObject* result = PyObject_CallNoArgs(counters.acquire_.ptr());
            if (!result) throw nb::python_error();
            Py_DECREF(result);
        }
        Hold(const Hold&) = delete;
        ~Hold() {
            PyObject* result = PyObject_CallNoArgs(release_);
            if (!result) PyErr_WriteUnraisable(release_);
            Py_XDECREF(result);
        }

    private:
        PyObject* release_;
    };

private:
    static constexpr int64_t kMaxLength = int64_t{1} << 40;

    static bool is_in(const std::vector<int>& leaves, int64_t i) {
        return std::find(leaves.begin(), leaves.end(), i) != leaves.end();
    }

    void read_episodes(nb::tuple arguments) {
        if (arguments.size() != 6 || terminated_ < 0 || envs_ < 0)
            refuse("episodes: expected (open, ring, counts, rewards, metrics, reasons) of steps with flags");
        EpisodeCounter episodes;
        episodes.rewards = nb::cast<std::vector<int>>(arguments[3]);
        episodes.metrics = nb::cast<std::vector<int>>(arguments[4]);
        episodes.reasons = nb::cast<std::vector<int>>(arguments[5]);
        check_numbers(episodes.rewards, num_leaves_);
        for (const auto* leaves : {&episodes.metrics, &episodes.reasons}) check_numbers(*leaves, 2 * kMaxLeaves);
        const auto metrics = ssize(episodes.metrics), reasons = ssize(episodes.reasons);
        const Array ring = read_output(arguments[1], "ring");
        if (ring.ndim != 2 || ring.shape[0] < 2 || ring.shape[0] > kMaxLength)
            refuse("ring: expected [window + 1, columns]");
        episodes.envs = envs_;
        episodes.window = ring.shape[0] - 1;
        episodes.terminated = terminated_, episodes.truncated = truncated_;
        episodes.open = read_memory<double>(arguments[0], kFloat64, (2 + metrics) * envs_, "open");
        episodes.ring = read_memory<double>(arguments[1], kFloat64, ring.shape[0] * (4 + metrics + reasons), "ring");
        episodes.counts = read_memory<int64_t>(arguments[2], kInt64, 2, "counts");
        episodes_ = std::move(episodes);
    }

    static void check_numbers(const std::vector<int>& leaves, int64_t end) {
        for (const int leaf : leaves)
            if (leaf < 0 || leaf >= end) refuse<OutOfRange>("leaf: expected 0 to ", end - 1, ", got ", leaf);
    }

    void check_leaf(int64_t i, DataType dtype, int64_t elements) const {
        const auto expect = [&](bool is_right, const char* what) {
            if (!is_right) refuse("leaf ", i, ": expected ", what);
        };
        if (i == terminated_ || i == truncated_) expect(dtype == kBool && elements == 1, "one bool");
        if (episodes_ && is_in(episodes_->rewards, i)) expect(is_countable(dtype), "numbers");
        if (episodes_ && (is_in(episodes_->metrics, i) || is_in(episodes_->reasons, i)))
            expect(is_countable(dtype) && elements == 1, "one number");
        for (const MomentCounter& moment : moments_)
            if (moment.leaf == i)
                expect(is_countable(dtype) && elements == moment.elements, "numbers of the declared shape");
    }

    // Throw if leaf i, for which the caller passed None, is required: a flag of episode ends, or a reward.
    void check_missing(int64_t i) const {
        if (i == terminated_ || i == truncated_ || (episodes_ && is_in(episodes_->rewards, i)))
            refuse("leaf ", i, ": expected an array, got None");
    }

    void begin(int64_t steps, int64_t envs, const int64_t* env_ids) {
        steps_.steps = steps;
        steps_.envs = envs;
        steps_.env_ids = env_ids;
        steps_.resetting.clear();
        steps_.leaves = leaves_.data();
    }

    void run() {
        for (size_t i = 0; i < measured_.size(); ++i) {
            const std::vector<double>& numbers = measured_[i];
            const bool fits = ssize(numbers) == steps_.steps * steps_.envs;
            if (!numbers.empty() && !fits) refuse("measured: expected a number for each environment");
            const char* data = fits ? reinterpret_cast<const char*>(numbers.data()) : nullptr;
            leaves_[static_cast<size_t>(num_leaves_) + i].data = data;
        }
        steps_.find_transitions(terminated_, truncated_);
        if (episodes_) episodes_->check(steps_);
        for (const MomentCounter& moment : moments_) moment.check(steps_);
        if (episodes_) episodes_->count(steps_);
        for (MomentCounter& moment : moments_) moment.count(steps_);
    }

    int64_t num_leaves_, envs_;
    int terminated_ = -1, truncated_ = -1;
    std::optional<EpisodeCounter> episodes_;
    std::vector<MomentCounter> moments_;
    std::vector<CountedLeaf> leaves_;
    std::vector<std::vector<double>> measured_;
    CountedSteps steps_{};
    nb::object acquire_, release_, kept_alive_;
};

inline void bind_counting(nb::module_& m) {
    using Count = void (Counters::*)(nb::tuple, int64_t, int64_t, nb::handle, nb::handle, nb::handle);
    nb::class_<Counters>(m, "Counters")
        .def(nb::init<nb::object, int64_t, int64_t, nb::handle, nb::handle, nb::list>(), nb::arg("lock"),
             nb::arg("num_leaves"), nb::arg("envs"), nb::arg("flags").none(), nb::arg("episodes").none(),
             nb::arg("moments"))
        .def("measure", &Counters::measure, nb::arg("numbers"))
        .def("count", static_cast<Count>(&Counters::count), nb::arg("arrays"), nb::arg("first"), nb::arg("steps"),
             nb::arg("env_ids").none(), nb::arg("resetting").none(), nb::arg("then").none());
}

}
