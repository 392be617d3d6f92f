// SequenceIndex: the sequences of a rollout. SequenceGather: reads batches of them.
#include "../core/sequences.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <vector>

#include "../core/sequence_reader.hpp"
#include "gather_sources.hpp"
#include "gil.hpp"
#include "tensor_pool.hpp"

namespace relive::bind {
namespace {

struct SequenceIndex {
    int64_t rows;
    Sequences found;

    // The sequences of the first `steps` steps. `terminated` and `truncated` are [at least `steps`, envs], `mask` is
    // [steps, envs] or None, `starting` [envs].
    SequenceIndex(int64_t steps, nb::handle terminated, nb::handle truncated, nb::handle mask, nb::handle starting,
                  int64_t length, int64_t stride, bool split, bool keep_tail) {
        const Array ends = read_or_throw(terminated, "terminated");
        if (ends.ndim != 2 || ends.dtype != kBool)
            throw std::invalid_argument("terminated: expected a matrix of bools");
        if (steps < 0 || steps > ends.shape[0])
            throw std::out_of_range("steps: expected 0 to " + std::to_string(ends.shape[0]) + ", got " + std::to_string(steps));
        // A longer stride would leave steps out, and lead past the last step.
        if (length < 0 || stride < 1 || (length && stride > length))
            throw std::invalid_argument("length, stride: expected 1 <= stride <= length, got " + std::to_string(length) + ", " + std::to_string(stride));
        rows = steps * ends.shape[1];
        require_memory(9 * rows);
        require_memory(ends.shape[0] + ends.shape[1]);
        const Flags flags{ends.as<const uint8_t>(),
                          memory_of<const uint8_t>(truncated, kBool, ends.elements(), "truncated"),
                          mask.is_none() ? nullptr : memory_of<const uint8_t>(mask, kBool, rows, "mask"),
                          memory_of<const uint8_t>(starting, kBool, ends.shape[1], "starting"),
                          steps,
                          ends.shape[1]};
        found = find_sequences(flags, {length, stride, split, keep_tail});
    }
};

class SequenceGather {
public:
    // `steps` are read at every step of a sequence, `carried` at its first step.
    SequenceGather(nb::handle index, int64_t length, const char* layout, nb::list steps, std::vector<int> step_ndims,
                   nb::list carried, std::vector<int> carried_ndims)
        : index_(nb::cast<const SequenceIndex&>(index)),
          reader_(index_.found, index_.rows, length, layout_of(layout), read_sources(steps, step_ndims, index_.rows),
                  read_sources(carried, carried_ndims, index_.rows)),
          owner_(nb::make_tuple(index, nb::tuple(steps), nb::tuple(carried))) {
        if (length < index_.found.longest)
            throw std::invalid_argument("length: expected at least " + std::to_string(index_.found.longest) + ", got " + std::to_string(length));
    }

    // New tensors of the sequences which[start:stop]; see `SequenceReader::plan`.
    nb::list take(nb::handle which, int64_t start, int64_t stop) const {
        const Array chosen = read_index(which);
        if (start < 0 || stop <= start || stop > chosen.shape[0])
            throw std::out_of_range("start, stop: expected a range of the sequences");
        const int64_t* picked = chosen.as<int64_t>() + start;
        const size_t all = index_.found.runs.size();
        if (!in_range(picked, stop - start, static_cast<int64_t>(all)))
            throw std::out_of_range("which: expected 0 to " + std::to_string(all - 1) + ", got one outside");
        const SequenceBatch batch = reader_.choose(picked, stop - start);
        TensorPlans plans;
        reader_.plan(batch, plans);
        nb::list out = make_tensors(plans);
        MaybeReleased released(plans.bytes());
        reader_.read(batch, plans);
        return out;
    }

private:
    static SequenceReader::Layout layout_of(const char* layout) {
        if (std::strcmp(layout, "packed") == 0) return SequenceReader::Layout::kPacked;
        if (std::strcmp(layout, "time_first") == 0) return SequenceReader::Layout::kTimeFirst;
        if (std::strcmp(layout, "batch_first") == 0) return SequenceReader::Layout::kBatchFirst;
        throw std::invalid_argument(std::string("layout: expected packed, time_first or batch_first, got ") + layout);
    }

    const SequenceIndex& index_;
    SequenceReader reader_;
    nb::object owner_;  // the index and the arrays
};

}  // namespace

void bind_sequences(nb::module_& m) {
    nb::class_<SequenceIndex>(m, "SequenceIndex")
        .def(nb::init<int64_t, nb::handle, nb::handle, nb::handle, nb::handle, int64_t, int64_t, bool, bool>(), nb::arg(),
             nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg())
        .def("__len__", [](const SequenceIndex& index) { return index.found.runs.size(); })
        .def_prop_ro("longest", [](const SequenceIndex& index) { return index.found.longest; });
    nb::class_<SequenceGather>(m, "SequenceGather")
        .def(nb::init<nb::handle, int64_t, const char*, nb::list, std::vector<int>, nb::list, std::vector<int>>())
        .def("take", &SequenceGather::take);
}

}  // namespace relive::bind
