#include "counting.hpp"

#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "completion.hpp"
#include "gil.hpp"

namespace relive::bind {
namespace {

constexpr int64_t kMostAgents = 8;  // numpy adds up fewer numbers than these one by one
constexpr int64_t kMostLength = int64_t{1} << 40;

bool is_in(const std::vector<int>& leaves, int64_t i) { return std::find(leaves.begin(), leaves.end(), i) != leaves.end(); }

}  // namespace

Counters::Counters(nb::object lock, int64_t num_leaves, int64_t envs, nb::handle flags, nb::handle episodes, nb::list moments)
    : num_leaves_(num_leaves), envs_(envs), acquire_(lock.attr("acquire")), release_(lock.attr("release")) {
    if (num_leaves < 1 || num_leaves > kMostLeaves || envs < -1 || envs == 0 || envs > kMostLength)
        throw std::out_of_range("num_leaves, envs: expected some, or -1 for any number of environments");
    if (!flags.is_none()) {
        const auto pair = nb::cast<std::vector<int>>(flags);
        if (pair.size() != 2) throw std::invalid_argument("flags: expected the leaves terminated and truncated");
        check_numbers(pair);
        if (std::max(pair[0], pair[1]) >= num_leaves) throw std::invalid_argument("flags: expected leaves of a step");
        terminated_ = pair[0], truncated_ = pair[1];
    }
    leaves_.assign(static_cast<size_t>(2 * kMostLeaves), CountedLeaf{nullptr, kFloat64, 1});
    if (!episodes.is_none()) read_episodes(nb::cast<nb::tuple>(episodes));
    for (nb::handle each : moments) {
        const auto parts = nb::cast<nb::tuple>(each);
        if (parts.size() != 4) throw std::invalid_argument("moments: expected (count, mean, squares, leaf)");
        MomentCounter moment;
        moment.elements = read_output(parts[1], "mean").elements();
        moment.rows = memory_of<double>(parts[0], kFloat64, 1, "count");
        moment.mean = memory_of<double>(parts[1], kFloat64, moment.elements, "mean");
        moment.squares = memory_of<double>(parts[2], kFloat64, moment.elements, "squares");
        moment.leaf = nb::cast<int>(parts[3]);
        check_numbers({moment.leaf});
        moments_.push_back(std::move(moment));
    }
    owner_ = nb::make_tuple(lock, nb::borrow(episodes), nb::tuple(moments));
}

void Counters::read_episodes(nb::tuple arguments) {
    if (arguments.size() != 6 || terminated_ < 0 || envs_ < 0)
        throw std::invalid_argument("episodes: expected (open, ring, counts, rewards, metrics, reasons) of steps with flags");
    EpisodeCounter episodes;
    episodes.rewards = nb::cast<std::vector<int>>(arguments[3]);
    episodes.metrics = nb::cast<std::vector<int>>(arguments[4]);
    episodes.reasons = nb::cast<std::vector<int>>(arguments[5]);
    for (const auto* leaves : {&episodes.rewards, &episodes.metrics, &episodes.reasons}) check_numbers(*leaves);
    for (const int reward : episodes.rewards)
        if (reward >= num_leaves_) throw std::invalid_argument("rewards: expected leaves of a step");
    const auto metrics = static_cast<int64_t>(episodes.metrics.size()), reasons = static_cast<int64_t>(episodes.reasons.size());
    const Array ring = read_output(arguments[1], "ring");
    if (ring.ndim != 2 || ring.shape[0] < 2 || ring.shape[0] > kMostLength) throw std::invalid_argument("ring: expected [window + 1, columns]");
    episodes.envs = envs_;
    episodes.window = ring.shape[0] - 1;
    episodes.terminated = terminated_, episodes.truncated = truncated_;
    episodes.open = memory_of<double>(arguments[0], kFloat64, (2 + metrics) * envs_, "open");
    episodes.ring = memory_of<double>(arguments[1], kFloat64, ring.shape[0] * (4 + metrics + reasons), "ring");
    episodes.counts = memory_of<int64_t>(arguments[2], kInt64, 2, "counts");
    episodes_ = std::move(episodes);
}

void Counters::check_numbers(const std::vector<int>& leaves) const {
    for (const int leaf : leaves)
        if (leaf < 0 || leaf >= 2 * kMostLeaves) throw std::out_of_range("leaf: expected a leaf's number, got " + std::to_string(leaf));
}

void Counters::check_leaf(int64_t i, DataType dtype, int64_t elements) const {
    const auto expect = [&](bool is_right, const char* what) {
        if (!is_right) throw std::invalid_argument("leaf " + std::to_string(i) + ": expected " + what);
    };
    if (i == terminated_ || i == truncated_) expect(dtype == kBool && elements == 1, "one bool");
    if (episodes_ && is_in(episodes_->rewards, i)) expect(is_countable(dtype) && elements < kMostAgents, "few numbers");
    if (episodes_ && (is_in(episodes_->metrics, i) || is_in(episodes_->reasons, i)))
        expect(is_countable(dtype) && elements == 1, "one number");
    for (const MomentCounter& moment : moments_)
        if (moment.leaf == i) expect(is_countable(dtype) && elements == moment.elements, "numbers of the declared shape");
}

void Counters::measure(nb::list numbers) {
    if (static_cast<int64_t>(numbers.size()) > kMostLeaves) throw std::invalid_argument("measured: expected fewer");
    std::vector<std::vector<double>> read(numbers.size());
    for (size_t i = 0; i < numbers.size(); ++i) {
        if (numbers[i].is_none()) continue;
        const Array array = read_or_throw(numbers[i], "measured");
        if (array.dtype != kFloat64) throw std::invalid_argument("measured: expected float64");
        read[i].assign(array.as<double>(), array.as<double>() + array.elements());
    }
    measured_ = std::move(read);
}

void Counters::begin(int64_t steps, int64_t envs, const int64_t* env_ids) {
    steps_.steps = steps;
    steps_.envs = envs;
    steps_.env_ids = env_ids;
    steps_.resetting.clear();
    steps_.leaves = leaves_.data();
}

void Counters::run() {
    for (size_t i = 0; i < measured_.size(); ++i) {
        const std::vector<double>& numbers = measured_[i];
        const bool fits = static_cast<int64_t>(numbers.size()) == steps_.steps * steps_.envs;
        if (!numbers.empty() && !fits) throw std::invalid_argument("measured: expected a number for each environment");
        leaves_[static_cast<size_t>(num_leaves_) + i].data = fits ? reinterpret_cast<const char*>(numbers.data()) : nullptr;
    }
    steps_.find_transitions(terminated_, truncated_);
    if (episodes_) episodes_->check(steps_);
    for (const MomentCounter& moment : moments_) moment.check(steps_);
    if (episodes_) episodes_->count(steps_);
    for (MomentCounter& moment : moments_) moment.count(steps_);
}

void Counters::count(nb::tuple arrays, int64_t first, int64_t steps, nb::handle env_ids, nb::handle resetting, nb::handle then) {
    if (static_cast<int64_t>(arrays.size()) != num_leaves_) throw std::invalid_argument("arrays: expected one for each leaf");
    if (first < 0 || first > kMostLength || steps < 1 || steps > (terminated_ < 0 ? 1 : kMostLength))
        throw std::out_of_range("rows: expected rows of the arrays, and only one without flags");
    Array ids;
    int64_t envs = envs_;
    if (!env_ids.is_none()) {
        ids = read_index(env_ids);
        envs = ids.shape[0];
        for (int64_t n = 0; n < envs; ++n)
            if (ids.as<int64_t>()[n] < 0 || ids.as<int64_t>()[n] >= envs_) throw std::out_of_range("env_ids: expected environments");
    }
    std::vector<Array> read(arrays.size());
    std::vector<CountedLeaf> leaves(arrays.size(), CountedLeaf{nullptr, kFloat64, 1});
    int64_t bytes = 0;
    for (size_t i = 0; i < read.size(); ++i) {
        if (nb::handle(arrays[i]).is_none()) {
            check_given(static_cast<int64_t>(i));
            continue;
        }
        read[i] = read_or_throw(arrays[i], "array");
        const Array& array = read[i];
        if (array.ndim >= 2 && envs < 0) envs = array.shape[1];
        if (array.ndim < 2 || array.shape[1] != envs || array.shape[0] - steps < first)
            throw std::invalid_argument("array: expected [rows, envs, …]");
        CountedLeaf& leaf = leaves[i];
        leaf.dtype = array.dtype;
        for (int axis = 2; axis < array.ndim; ++axis) leaf.elements *= array.shape[axis];
        check_leaf(static_cast<int64_t>(i), leaf.dtype, leaf.elements);
        const int64_t row_bytes = envs * leaf.elements * array.itemsize();
        leaf.data = array.data + first * row_bytes;
        bytes += steps * row_bytes;
    }
    uint8_t* coming = resetting.is_none() ? nullptr : memory_of<uint8_t>(resetting, kBool, envs, "resetting");
    if (envs > 0) {
        const Hold hold(*this);
        begin(steps, envs, env_ids.is_none() ? nullptr : ids.as<int64_t>());
        std::copy(leaves.begin(), leaves.end(), leaves_.begin());
        if (coming) steps_.resetting.assign(coming, coming + envs);
        MaybeReleased released(bytes);
        run();
        std::copy(steps_.resetting.begin(), steps_.resetting.end(), coming);
    }
    if (!then.is_none()) complete(then);
}

// Throws if steps cannot be counted without leaf i.
void Counters::check_given(int64_t i) const {
    if (i == terminated_ || i == truncated_ || (episodes_ && is_in(episodes_->rewards, i)))
        throw std::invalid_argument("leaf " + std::to_string(i) + ": expected an array, got None");
}

Counters::Hold::Hold(const Counters& counters) : release_(counters.release_.ptr()) {
    PyObject* taken = PyObject_CallNoArgs(counters.acquire_.ptr());
    if (!taken) throw nb::python_error();
    Py_DECREF(taken);
}

Counters::Hold::~Hold() {
    PyObject* given_back = PyObject_CallNoArgs(release_);
    if (!given_back) PyErr_WriteUnraisable(release_);
    Py_XDECREF(given_back);
}

void bind_counting(nb::module_& m) {
    nb::class_<Counters>(m, "Counters")
        .def(nb::init<nb::object, int64_t, int64_t, nb::handle, nb::handle, nb::list>(), nb::arg("lock"), nb::arg("num_leaves"), nb::arg("envs"),
             nb::arg("flags").none(), nb::arg("episodes").none(), nb::arg("moments"))
        .def("measure", &Counters::measure, nb::arg("numbers"))
        .def("count", &Counters::count, nb::arg("arrays"), nb::arg("first"), nb::arg("steps"), nb::arg("env_ids").none(),
             nb::arg("resetting").none(), nb::arg("then").none());
}

}  // namespace relive::bind
