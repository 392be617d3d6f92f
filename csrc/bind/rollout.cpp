// Bindings of a rollout's columns: Columns writes rows, Gather reads items, SequenceIndex and SequenceGather read
// sequences; `shuffle` and `permutation` give their order.
#include "../core/rollout.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "arguments.hpp"
#include "tensors.hpp"

namespace relive::bind {
namespace {

class Columns {
public:
    // `arrays[i]` is [rows, …]. Callers pass a row without its `lead` leading axes of length one (a single environment
    // has no environment axis). For an `optional` column they may pass None, which writes zeros.
    Columns(nb::list arrays, nb::list optional, int lead) : kept_alive_(arrays) {
        if (optional.size() != arrays.size()) refuse("optional: expected one for each column");
        if (lead < 0 || lead > kMaxDims) refuse("lead: expected a number of axes, got ", lead);
        for (size_t i = 0; i < arrays.size(); ++i) {
            const Array array = read_output(arrays[i], "column");
            if (array.ndim < 1 + lead || array.shape[0] < 1) refuse("column: expected at least one row");
            for (int axis = 1; axis <= lead; ++axis)
                if (array.shape[axis] != 1) refuse("column: expected leading axes of length one");
            columns_.emplace_back(array, array.ndim - 1 - lead);
            is_optional_.push_back(nb::cast<bool>(optional[i]));
            rows_ = std::max(rows_, array.shape[0]);
        }
    }

    Columns(const Columns&) = delete;

    // Write one row of the columns `which` (None: all). A column with fewer rows than the others keeps the newest ones.
    // Returns -1, or the position of the first leaf that does not fit: nothing was written then, except that a number
    // too large for its dtype may leave a partial row.
    int64_t write(int64_t row, nb::tuple leaves, nb::handle which) {
        const auto count = ssize(leaves);
        check(row, count, which);
        const OneWrite one_write(is_writing_, arrays_);
        if (writes_.size() < leaves.size()) {
            writes_.resize(leaves.size());
            arrays_.resize(leaves.size());
        }
        int64_t bytes = 0;
        for (int64_t i = 0; i < count; ++i) {
            const int64_t at = which.is_none() ? i : nb::cast<int64_t>(nb::borrow<nb::tuple>(which)[i]);
            if (!plan(PyTuple_GetItem(leaves.ptr(), i), static_cast<size_t>(at), row, static_cast<size_t>(i))) return i;
            bytes += writes_[i].bytes;
        }
        MaybeReleased released(bytes);
        for (int64_t i = 0; i < count; ++i)
            if (!writes_[i].run()) return i;
        return -1;
    }

    // Whether the memory of a tensor has moved, as after `share_memory_`.
    bool have_moved() const {
        for (size_t i = 0; i < columns_.size(); ++i)
            if (conversion().get_address(kept_alive_[i].ptr()) != columns_[i].data) return true;
        return false;
    }

private:
    void check(int64_t row, int64_t count, nb::handle which) const {
        if (row < 0 || row >= rows_) refuse<OutOfRange>("row: expected 0 to ", rows_ - 1, ", got ", row);
        const bool fits = which.is_none() ? count == ssize(columns_)
                                          : PyTuple_Check(which.ptr()) && PyTuple_Size(which.ptr()) == count;
        if (!fits) refuse("leaves: expected ", columns_.size(), ", got ", count);
        if (count > kMaxLeaves) refuse("leaves: expected at most ", kMaxLeaves, ", got ", count);
    }

    bool plan(PyObject* object, size_t at, int64_t row, size_t i) {
        const Column& column = columns_.at(at);
        ColumnWrite& write = writes_[i];
        write.target = column.data + row % column.items * column.bytes;
        write.bytes = column.bytes;
        write.kind = object == Py_None ? ColumnWrite::kZeros : ColumnWrite::kCopy;
        if (object == Py_None) return is_optional_[at];
        if (!read_numbers(object, column.shape, column.ndim, column.dtype, column.bytes, write.numbers))
            return conversion().read(object, arrays_[i]) && write.read_from(arrays_[i], column);
        write.source = write.numbers.data();
        return true;
    }

    std::vector<Column> columns_;
    std::vector<bool> is_optional_;
    std::vector<ColumnWrite> writes_;
    // The leaves of the step that is being written.
    std::vector<Array> arrays_;
    bool is_writing_ = false;
    int64_t rows_ = 0;
    nb::tuple kept_alive_;
};

// Read arrays as columns of at least `items` items. An item of `arrays[i]` has its last `item_ndims[i]` axes.
std::vector<Column> read_columns(nb::list arrays, const std::vector<int>& item_ndims, int64_t items) {
    if (arrays.size() > kMaxLeaves) refuse("sources: expected at most ", kMaxLeaves, ", got ", arrays.size());
    if (arrays.size() != item_ndims.size()) refuse("sources: expected one number of axes for each");
    std::vector<Column> columns;
    for (size_t i = 0; i < arrays.size(); ++i) {
        columns.emplace_back(read_or_throw(arrays[i], "source"), item_ndims[i]);
        if (items < 0 || columns[i].items < items)
            refuse("items: expected at most ", columns[i].items, ", got ", items);
    }
    return columns;
}

class Gather {
public:
    Gather(nb::list arrays, std::vector<int> item_ndims, int64_t items)
        : columns_(read_columns(arrays, item_ndims, items)), items_(items), kept_alive_(nb::tuple(arrays)) {}

    // Read the items index[start:stop] of every column into new tensors [count, …]. `padded`: an index of -1 gives
    // zeros.
    nb::list take(nb::handle index, int64_t start, int64_t stop, bool padded) const {
        const Array rows = read_rows(index, start, stop, padded);
        const int64_t count = stop - start;
        TensorPlans plans;
        for (const Column& column : columns_) column.plan(plans, 1, &count);
        nb::list out = make_tensors(plans);
        char* targets[kMaxLeaves];
        for (size_t i = 0; i < columns_.size(); ++i) targets[i] = plans.data(i);
        run(targets, rows.as<int64_t>() + start, count, padded);
        return out;
    }

    // Read the items into the caller's arrays.
    void take_into(nb::handle index, int64_t start, int64_t stop, nb::list arrays, bool padded) const {
        const Array rows = read_rows(index, start, stop, padded);
        if (arrays.size() != columns_.size()) refuse("out: expected ", columns_.size(), " arrays, got ", arrays.size());
        char* targets[kMaxLeaves];
        std::vector<Array> outputs(columns_.size());
        for (size_t i = 0; i < columns_.size(); ++i) {
            outputs[i] = read_output(arrays[i], "out");
            const Column& column = columns_[i];
            if (outputs[i].dtype != column.dtype || !outputs[i].ends_with(1, column.ndim, column.shape) ||
                outputs[i].shape[0] != stop - start)
                refuse("out: expected the shape and dtype of the source");
            targets[i] = outputs[i].data;
        }
        run(targets, rows.as<int64_t>() + start, stop - start, padded);
    }

private:
    Array read_rows(nb::handle index, int64_t start, int64_t stop, bool padded) const {
        Array array = read_index(index);
        if (start < 0 || stop < start || stop > array.shape[0])
            refuse<OutOfRange>("start, stop: expected a range of the index");
        if (!in_range(array.as<int64_t>() + start, stop - start, items_, padded ? -1 : 0))
            refuse<OutOfRange>("index: expected 0 to ", items_ - 1, ", got one outside");
        return array;
    }

    void run(char* const* targets, const int64_t* rows, int64_t count, bool padded) const {
        int64_t bytes = 0;
        for (const Column& column : columns_) bytes += column.bytes * count;
        MaybeReleased released(bytes);
        const auto read = padded ? gather_padded : gather;
        for (size_t i = 0; i < columns_.size(); ++i)
            read(targets[i], columns_[i].data, rows, count, columns_[i].bytes, items_);
    }

    std::vector<Column> columns_;
    int64_t items_;
    nb::object kept_alive_;
};

constexpr int64_t kMaxShuffled = int64_t{1} << 32;

void shuffle_index(nb::handle index, nb::handle capsule) {
    const Array array = read_index(index);
    if (!array.is_writable) refuse("index: expected memory that can be written");
    if (array.shape[0] >= kMaxShuffled) refuse("index: expected fewer than 2^32 entries, got ", array.shape[0]);
    const BitGenerator& random = read_generator(capsule);
    MaybeReleased released(array.shape[0] * 8);
    shuffle(array.as<int64_t>(), array.shape[0], random);
}

// Return a new tensor with a random permutation of 0 … count - 1.
nb::object permutation(int64_t count, nb::handle capsule) {
    if (count >= kMaxShuffled) refuse("count: expected less than 2^32, got ", count);
    const BitGenerator& random = read_generator(capsule);
    nb::object tensor;
    auto* numbers = make_vector<int64_t>(tensor, kInt64, count);
    MaybeReleased released(count * 8);
    std::iota(numbers, numbers + count, int64_t{0});
    shuffle(numbers, count, random);
    return tensor;
}

struct SequenceIndex {
    int64_t rows;
    Sequences sequences;

    // Find the sequences of the first `steps` steps. `terminated` and `truncated` are [at least `steps`, envs], `mask`
    // is [steps, envs] or None, `starting` is [envs].
    SequenceIndex(int64_t steps, nb::handle terminated, nb::handle truncated, nb::handle mask, nb::handle starting,
                  int64_t length, int64_t stride, bool split, bool keep_tail) {
        const Array ends = read_or_throw(terminated, "terminated");
        if (ends.ndim != 2 || ends.dtype != kBool) refuse("terminated: expected a matrix of bools");
        if (steps < 0 || steps > ends.shape[0])
            refuse<OutOfRange>("steps: expected 0 to ", ends.shape[0], ", got ", steps);
        // A stride longer than `length` would skip steps and run past the last one.
        if (length < 0 || stride < 1 || (length && stride > length))
            refuse("length, stride: expected 1 <= stride <= length, got ", length, ", ", stride);
        rows = steps * ends.shape[1];
        require_memory(9 * rows);
        require_memory(ends.shape[0] + ends.shape[1]);
        const Flags flags{ends.as<const uint8_t>(),
                          read_memory<const uint8_t>(truncated, kBool, ends.elements(), "truncated"),
                          mask.is_none() ? nullptr : read_memory<const uint8_t>(mask, kBool, rows, "mask"),
                          read_memory<const uint8_t>(starting, kBool, ends.shape[1], "starting"),
                          steps,
                          ends.shape[1]};
        sequences = find_sequences(flags, {length, stride, split, keep_tail});
    }
};

class SequenceGather {
public:
    // Read `steps` at every step of a sequence, `initial_states` only at its first step.
    SequenceGather(nb::handle index, int64_t length, const char* layout, nb::list steps, std::vector<int> step_ndims,
                   nb::list initial_states, std::vector<int> initial_ndims)
        : index_(nb::cast<const SequenceIndex&>(index)),
          reader_(index_.sequences, index_.rows, length, read_layout(layout),
                  read_columns(steps, step_ndims, index_.rows),
                  read_columns(initial_states, initial_ndims, index_.rows)),
          kept_alive_(nb::make_tuple(index, nb::tuple(steps), nb::tuple(initial_states))) {
        if (length < index_.sequences.longest)
            refuse("length: expected at least ", index_.sequences.longest, ", got ", length);
    }

    // Return new tensors with the sequences whose numbers are `which[start:stop]`, in the order of
    // `SequenceReader::plan`.
    nb::list take(nb::handle which, int64_t start, int64_t stop) const {
        const Array index = read_index(which);
        if (start < 0 || stop <= start || stop > index.shape[0])
            refuse<OutOfRange>("start, stop: expected a range of the sequences");
        const int64_t* numbers = index.as<int64_t>() + start;
        const auto all = ssize(index_.sequences.runs);
        if (!in_range(numbers, stop - start, all))
            refuse<OutOfRange>("which: expected 0 to ", all - 1, ", got one outside");
        const SequenceReader::Batch batch = reader_.choose(numbers, stop - start);
        TensorPlans plans;
        reader_.plan(batch, plans);
        nb::list out = make_tensors(plans);
        MaybeReleased released(plans.bytes());
        reader_.read(batch, plans);
        return out;
    }

private:
    static SequenceReader::Layout read_layout(const char* layout) {
        if (std::strcmp(layout, "packed") == 0) return SequenceReader::Layout::kPacked;
        if (std::strcmp(layout, "time_first") == 0) return SequenceReader::Layout::kTimeFirst;
        if (std::strcmp(layout, "batch_first") == 0) return SequenceReader::Layout::kBatchFirst;
        refuse("layout: expected packed, time_first or batch_first, got ", layout);
    }

    const SequenceIndex& index_;
    SequenceReader reader_;
    nb::object kept_alive_;
};

}

void bind_rollout(nb::module_& m) {
    m.attr("MAX_LEAVES") = kMaxLeaves;
    m.attr("MAX_AXES") = kMaxDims;
    nb::class_<Columns>(m, "Columns")
        .def(nb::init<nb::list, nb::list, int>())
        .def("write", &Columns::write, nb::arg("row"), nb::arg("leaves"), nb::arg("which").none() = nb::none())
        .def("have_moved", &Columns::have_moved);
    nb::class_<Gather>(m, "Gather")
        .def(nb::init<nb::list, std::vector<int>, int64_t>())
        .def("take", &Gather::take, nb::arg("index"), nb::arg("start"), nb::arg("stop"), nb::arg("padded") = false)
        .def("take_into", &Gather::take_into, nb::arg("index"), nb::arg("start"), nb::arg("stop"), nb::arg("out"),
             nb::arg("padded") = false);
    m.def("shuffle", &shuffle_index);
    m.def("permutation", &permutation);
    nb::class_<SequenceIndex>(m, "SequenceIndex")
        .def(nb::init<int64_t, nb::handle, nb::handle, nb::handle, nb::handle, int64_t, int64_t, bool, bool>(),
             nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg())
        .def("__len__", [](const SequenceIndex& index) { return index.sequences.runs.size(); })
        .def_prop_ro("longest", [](const SequenceIndex& index) { return index.sequences.longest; });
    nb::class_<SequenceGather>(m, "SequenceGather")
        .def(nb::init<nb::handle, int64_t, const char*, nb::list, std::vector<int>, nb::list, std::vector<int>>())
        .def("take", &SequenceGather::take);
}

}
