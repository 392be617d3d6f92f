// Bindings of the sequence index: check every array, then call.
#include "sequences.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <vector>

#include "sources.hpp"

namespace nb = nanobind;

namespace relive {
namespace {

// The sequences of a rollout, found once.
struct SequenceIndex {
    int64_t rows;
    Sequences found;

    // Of the first `steps` steps; flags are [at least as many, envs], `mask` [steps, envs] or None, `starting` [envs].
    SequenceIndex(int64_t steps, nb::handle terminated, nb::handle truncated, nb::handle mask, nb::handle starting,
                  int64_t length, int64_t stride, bool split, bool keep_tail) {
        const Array ends = read_or_throw(terminated, "terminated");
        if (ends.ndim != 2 || ends.dtype != kBool)
            throw std::invalid_argument("terminated: expected a matrix of bools");
        if (steps < 0 || steps > ends.shape[0])
            throw std::out_of_range("steps: expected 0 to " + std::to_string(ends.shape[0]) + ", got " + std::to_string(steps));
        // A longer stride would leave steps out, and lead beyond the last one.
        if (length < 0 || stride < 1 || (length && stride > length))
            throw std::invalid_argument("length, stride: expected 1 <= stride <= length, got " + std::to_string(length) + ", " + std::to_string(stride));
        rows = steps * ends.shape[1];
        const Flags flags{reinterpret_cast<const bool*>(ends.data),
                          memory_of<bool>(truncated, kBool, ends.elements(), "truncated"),
                          mask.is_none() ? nullptr : memory_of<bool>(mask, kBool, rows, "mask"),
                          memory_of<bool>(starting, kBool, ends.shape[1], "starting"),
                          steps,
                          ends.shape[1]};
        found = find_sequences(flags, {length, stride, split, keep_tail});
    }
};

// Reads batches of sequences out of a rollout's columns.
class SequenceGather {
public:
    // `steps` are read at every step of a sequence, `carried` at its first one: of row r, item kept[i][r] of carried[i],
    // or item r where kept[i] is None.
    SequenceGather(nb::handle index, int64_t length, const char* layout, nb::list steps, std::vector<int> step_ndims,
                   nb::list carried, std::vector<int> carried_ndims, nb::list kept)
        : index_(nb::cast<const SequenceIndex&>(index)), length_(length), packed_(std::strcmp(layout, "packed") == 0),
          time_first_(std::strcmp(layout, "time_first") == 0), steps_(read_sources(steps, step_ndims, index_.rows)),
          carried_(read_sources(carried, carried_ndims, 0)), owner_(nb::make_tuple(index, steps, carried, kept)) {
        if (length < index_.found.longest)
            throw std::invalid_argument("length: expected at least " + std::to_string(index_.found.longest) + ", got " + std::to_string(length));
        if (kept.size() != carried.size())
            throw std::invalid_argument("kept: expected " + std::to_string(carried.size()) + ", got " + std::to_string(kept.size()));
        for (nb::handle places : kept) {
            const Array array = places.is_none() ? Array{} : read_index(places);
            if (array.data && array.shape[0] < index_.rows)
                throw std::invalid_argument("kept: expected " + std::to_string(index_.rows) + " rows, got " + std::to_string(array.shape[0]));
            kept_.push_back(reinterpret_cast<const int64_t*>(array.data));
        }
        steps_.push_back({reinterpret_cast<char*>(index_.found.is_first.get()), kBool, index_.rows, 1, 0, {}});
    }

    // Fresh tensors of the sequences which[start:stop]: their steps [B, length, …] (time first: [length, B, …]), which of
    // these start an episode, the mask, the first rows [B], and what is carried [B, …]. Packed, steps are [total, …], all first ones before the second
    // ones and the longest sequence first, and there are batch sizes in place of a mask.
    nb::list take(nb::handle which, int64_t start, int64_t stop) const {
        const Array chosen = read_index(which);
        if (start < 0 || stop <= start || stop > chosen.shape[0])
            throw std::out_of_range("start, stop: expected a range of the sequences");
        const int64_t* picked = reinterpret_cast<const int64_t*>(chosen.data) + start;
        const std::vector<Run>& all = index_.found.runs;
        if (!in_range(picked, stop - start, static_cast<int64_t>(all.size())))
            throw std::out_of_range("which: expected 0 to " + std::to_string(all.size() - 1) + ", got one outside");
        std::vector<Run> runs;
        runs.reserve(static_cast<size_t>(stop - start));
        for (int64_t i = 0; i < stop - start; ++i) runs.push_back(all[static_cast<size_t>(picked[i])]);
        return packed_ ? packed(runs) : padded(runs);
    }

private:
    nb::list padded(const std::vector<Run>& runs) const {
        const auto count = static_cast<int64_t>(runs.size());
        const int64_t shape[] = {time_first_ ? length_ : count, time_first_ ? count : length_};
        Fresh fresh;
        nb::list out = make(fresh, 2, shape, kBool, 2, shape, runs);
        const Padded batch{runs.data(), count, length_, time_first_ ? 1 : length_, time_first_ ? count : 1};
        MaybeReleased released(fresh.bytes());
        for (size_t s = 0; s < steps_.size(); ++s)
            gather_steps(fresh.data(s), steps_[s].data, batch, steps_[s].bytes, index_.rows);
        mask_steps(reinterpret_cast<bool*>(fresh.data(steps_.size())), batch);
        read_carried(fresh, runs);
        return out;
    }

    nb::list packed(std::vector<Run>& runs) const {
        std::stable_sort(runs.begin(), runs.end(), [](const Run& a, const Run& b) { return a.steps > b.steps; });
        const int64_t longest = runs.front().steps;
        std::vector<int64_t> rows, sizes(static_cast<size_t>(longest));
        for (int64_t k = 0; k < longest; ++k)
            for (auto run = runs.begin(); run != runs.end() && run->steps > k; ++run) {
                rows.push_back(run->rows[k]);
                ++sizes[static_cast<size_t>(k)];
            }
        const auto total = static_cast<int64_t>(rows.size());
        Fresh fresh;
        nb::list out = make(fresh, 1, &total, kInt64, 1, &longest, runs);
        MaybeReleased released(fresh.bytes());
        std::memcpy(fresh.data(steps_.size()), sizes.data(), sizes.size() * sizeof(int64_t));
        for (size_t s = 0; s < steps_.size(); ++s)
            gather(fresh.data(s), steps_[s].data, rows.data(), total, steps_[s].bytes, index_.rows);
        read_carried(fresh, runs);
        return out;
    }

    nb::list make(Fresh& fresh, int ndim, const int64_t* shape, DataType sizes, int sizes_ndim, const int64_t* sizes_shape,
                  const std::vector<Run>& runs) const {
        const auto count = static_cast<int64_t>(runs.size());
        for (const Source& source : steps_) source.plan(fresh, ndim, shape);
        fresh.add(sizes, sizes_ndim, sizes_shape);
        fresh.add(kInt64, 1, &count);
        for (const Source& source : carried_) source.plan(fresh, 1, &count);
        return fresh.make();
    }

    void read_carried(const Fresh& fresh, const std::vector<Run>& runs) const {
        auto* first = reinterpret_cast<int64_t*>(fresh.data(steps_.size() + 1));
        for (size_t i = 0; i < runs.size(); ++i) first[i] = *runs[i].rows;
        const auto count = static_cast<int64_t>(runs.size());
        std::vector<int64_t> items(runs.size());
        for (size_t c = 0; c < carried_.size(); ++c) {
            for (size_t i = 0; i < items.size(); ++i) items[i] = kept_[c] ? kept_[c][first[i]] : first[i];
            const Source& source = carried_[c];
            if (!in_range(items.data(), count, source.items))
                throw std::out_of_range("kept: expected 0 to " + std::to_string(source.items - 1) + ", got one outside");
            gather(fresh.data(steps_.size() + 2 + c), source.data, items.data(), count, source.bytes, source.items);
        }
    }

    const SequenceIndex& index_;
    int64_t length_;
    bool packed_, time_first_;
    std::vector<Source> steps_, carried_;
    std::vector<const int64_t*> kept_;
    nb::object owner_;
};

}  // namespace

void bind_sequences(nb::module_& m) {
    nb::class_<SequenceIndex>(m, "SequenceIndex")
        .def(nb::init<int64_t, nb::handle, nb::handle, nb::handle, nb::handle, int64_t, int64_t, bool, bool>(), nb::arg(),
             nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg())
        .def("__len__", [](const SequenceIndex& index) { return index.found.runs.size(); })
        .def_prop_ro("longest", [](const SequenceIndex& index) { return index.found.longest; });
    nb::class_<SequenceGather>(m, "SequenceGather")
        .def(nb::init<nb::handle, int64_t, const char*, nb::list, std::vector<int>, nb::list, std::vector<int>, nb::list>())
        .def("take", &SequenceGather::take);
}

}  // namespace relive
