// Gather: reads items out of several arrays at once. `shuffle` and `permutation`: the order in which they are read.
#include "../core/gather.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <numeric>
#include <vector>

#include "gather_sources.hpp"
#include "gil.hpp"
#include "tensor_pool.hpp"

namespace relive::bind {
namespace {

class Gather {
public:
    Gather(nb::list arrays, std::vector<int> item_ndims, int64_t items)
        : sources_(read_sources(arrays, item_ndims, items)), items_(items), owner_(nb::tuple(arrays)) {}

    // New tensors [count, …], one for each source, of the items index[start:stop]. `padded`: an index of -1 gives zeros.
    nb::list take(nb::handle index, int64_t start, int64_t stop, bool padded) const {
        const Array rows = checked(index, start, stop, padded);
        const int64_t count = stop - start;
        TensorPlans plans;
        for (const GatherSource& source : sources_) source.plan(plans, 1, &count);
        nb::list out = make_tensors(plans);
        char* targets[kMostLeaves];
        for (size_t i = 0; i < sources_.size(); ++i) targets[i] = plans.data(i);
        run(targets, rows.as<int64_t>() + start, count, padded);
        return out;
    }

    // The same into arrays of the caller.
    void take_into(nb::handle index, int64_t start, int64_t stop, nb::list arrays, bool padded) const {
        const Array rows = checked(index, start, stop, padded);
        if (arrays.size() != sources_.size())
            throw std::invalid_argument("out: expected " + std::to_string(sources_.size()) + " arrays, got " + std::to_string(arrays.size()));
        char* targets[kMostLeaves];
        std::vector<Array> held(sources_.size());
        for (size_t i = 0; i < sources_.size(); ++i) {
            held[i] = read_output(arrays[i], "out");
            if (!sources_[i].matches(held[i], stop - start))
                throw std::invalid_argument("out: expected the shape and dtype of the source");
            targets[i] = held[i].data;
        }
        run(targets, rows.as<int64_t>() + start, stop - start, padded);
    }

private:
    Array checked(nb::handle index, int64_t start, int64_t stop, bool padded) const {
        Array array = read_index(index);
        if (start < 0 || stop < start || stop > array.shape[0])
            throw std::out_of_range("start, stop: expected a range of the index");
        if (!in_range(array.as<int64_t>() + start, stop - start, items_, padded ? -1 : 0))
            throw std::out_of_range("index: expected 0 to " + std::to_string(items_ - 1) + ", got one outside");
        return array;
    }

    void run(char* const* targets, const int64_t* rows, int64_t count, bool padded) const {
        int64_t bytes = 0;
        for (const GatherSource& source : sources_) bytes += source.bytes * count;
        MaybeReleased released(bytes);
        gather_all(sources_, targets, rows, count, items_, padded);
    }

    std::vector<GatherSource> sources_;
    int64_t items_;
    nb::object owner_;  // the arrays
};

// Whether all of these are contiguous plain arrays in host memory.
bool reads(nb::list arrays) {
    Array array;
    for (nb::handle object : arrays)
        if (!conversion().read(object.ptr(), array) || !array.contiguous()) return false;
    return arrays.size() <= kMostLeaves;
}

constexpr int64_t kMostShuffled = int64_t{1} << 32;

void shuffle_index(nb::handle index, nb::handle capsule) {
    const Array array = read_index(index);
    read_output(index, "index");
    if (array.shape[0] >= kMostShuffled)
        throw std::invalid_argument("index: expected fewer than 2^32 entries, got " + std::to_string(array.shape[0]));
    const BitGenerator& random = generator_in(capsule);
    MaybeReleased released(array.shape[0] * 8);
    shuffle(array.as<int64_t>(), array.shape[0], random);
}

// A new tensor of 0 … count - 1, shuffled.
nb::object permutation(int64_t count, nb::handle capsule) {
    if (count >= kMostShuffled)
        throw std::invalid_argument("count: expected less than 2^32, got " + std::to_string(count));
    const BitGenerator& random = generator_in(capsule);
    nb::object made = nb::none();
    auto* numbers = target<int64_t>(made, kInt64, count);
    MaybeReleased released(count * 8);
    std::iota(numbers, numbers + count, int64_t{0});
    shuffle(numbers, count, random);
    return made;
}

}  // namespace

void bind_gather(nb::module_& m) {
    nb::class_<Gather>(m, "Gather")
        .def(nb::init<nb::list, std::vector<int>, int64_t>())
        .def("take", &Gather::take, nb::arg("index"), nb::arg("start"), nb::arg("stop"), nb::arg("padded") = false)
        .def("take_into", &Gather::take_into, nb::arg("index"), nb::arg("start"), nb::arg("stop"), nb::arg("out"),
             nb::arg("padded") = false);
    m.def("reads", &reads);
    m.def("shuffle", &shuffle_index);
    m.def("permutation", &permutation);
}

}  // namespace relive::bind
