// Bindings of the column kernels: read what Python gave, check all of it, then move bytes.
#include "columns.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "bindings.hpp"
#include "random.hpp"
#include "sources.hpp"

namespace nb = nanobind;

namespace relive {
namespace {

// One leaf of the schema: rows of `shape`, one after the other.
struct Column {
    char* data;
    DataType dtype;
    bool optional;  // None writes zeros
    int64_t rows;   // fewer than other columns have: it keeps the newest only
    int ndim;       // of a row, as callers pass it
    int64_t shape[kMaxDims];
    int64_t elements = 1;  // of a row

    int64_t bytes() const { return elements * (dtype.bits / 8); }

    bool takes(const Array& array) const {
        if (array.ndim != ndim) return false;
        for (int i = 0; i < ndim; ++i)
            if (array.shape[i] != shape[i]) return false;
        return array.contiguous();
    }
};

// What is to be written into one column, decided before anything is.
struct Write {
    enum Kind { kZero, kCopy, kNarrow, kScalar } kind;
    char* target;
    const char* source;
    int64_t elements;
    int64_t bytes;
    char scalar[8];

    void run() const noexcept {
        switch (kind) {
            case kZero: std::memset(target, 0, static_cast<size_t>(bytes)); break;
            case kCopy: copy_block(target, source, bytes); break;
            case kScalar: std::memcpy(target, scalar, static_cast<size_t>(bytes)); break;
            case kNarrow:
                narrow(reinterpret_cast<float*>(target), reinterpret_cast<const double*>(source), elements);
                break;
        }
    }
};

class Columns {
public:
    // `arrays[i]` is [rows, …]; a row of it is what a caller passes, but for `lead` leading axes of length one that the
    // caller leaves out (a single environment has no environment axis).
    Columns(nb::list arrays, nb::list optional, int lead) : owner_(arrays) {
        for (size_t i = 0; i < arrays.size(); ++i) {
            const Array array = read_or_throw(arrays[i], "column");
            if (array.ndim < 1 + lead || array.shape[0] < 1)
                throw std::invalid_argument("column: expected at least one row");
            Column column{};
            column.data = array.data;
            column.dtype = array.dtype;
            column.optional = nb::cast<bool>(optional[i]);
            column.ndim = array.ndim - 1 - lead;
            column.elements = 1;
            for (int d = 1; d < array.ndim; ++d) column.elements *= array.shape[d];
            for (int d = 0; d < column.ndim; ++d) column.shape[d] = array.shape[d + 1 + lead];
            column.rows = array.shape[0];
            rows_ = std::max(rows_, column.rows);
            columns_.push_back(column);
        }
    }

    // Write one row of the columns `which`. Returns -1, or the position of the first leaf that is no exact fit; then
    // nothing has been written.
    int64_t write(int64_t row, nb::tuple leaves, nb::handle which) const {
        if (row < 0 || row >= rows_)
            throw std::out_of_range("row: expected 0 to " + std::to_string(rows_ - 1) + ", got " + std::to_string(row));
        const bool all = which.is_none();
        const auto count = static_cast<int64_t>(leaves.size());
        if (all && count != static_cast<int64_t>(columns_.size()))
            throw std::invalid_argument("leaves: expected " + std::to_string(columns_.size()) + ", got " + std::to_string(count));
        if (count > kMostLeaves)
            throw std::invalid_argument("leaves: expected at most " + std::to_string(kMostLeaves) + ", got " + std::to_string(count));
        Write writes[kMostLeaves];
        int64_t bytes = 0;
        for (int64_t i = 0; i < count; ++i) {
            const int64_t at = all ? i : nb::cast<int64_t>(nb::borrow<nb::tuple>(which)[i]);
            const Column& column = columns_.at(static_cast<size_t>(at));
            if (!plan(PyTuple_GetItem(leaves.ptr(), i), column, row, writes[i])) return i;
            bytes += writes[i].bytes;
        }
        MaybeReleased released(bytes);
        for (int64_t i = 0; i < count; ++i) writes[i].run();
        return -1;
    }

private:
    static bool plan(PyObject* object, const Column& column, int64_t row, Write& write) {
        write.bytes = column.bytes();
        write.elements = column.elements;
        write.target = column.data + row % column.rows * write.bytes;
        if (object == Py_None) {
            write.kind = Write::kZero;
            return column.optional;
        }
        if (column.ndim == 0 && read_scalar(object, column.dtype, write.scalar)) {
            write.kind = Write::kScalar;
            return true;
        }
        Array array;
        if (!border().read(object, array) || !column.takes(array)) return false;
        write.source = array.data;
        if (array.dtype == column.dtype) write.kind = Write::kCopy;
        else if (array.dtype == kFloat64 && column.dtype == kFloat32) write.kind = Write::kNarrow;
        else return false;
        return true;
    }

    std::vector<Column> columns_;
    int64_t rows_ = 0;
    nb::object owner_;  // the tensors whose memory the columns are
};

// Reads items out of several arrays at once.
class Gather {
public:
    Gather(nb::list arrays, std::vector<int> item_ndims, int64_t items)
        : sources_(read_sources(arrays, item_ndims, items)), items_(items), owner_(arrays) {}

    // Fresh tensors [count, …], one for each source, of the items index[start:stop]. `padded`: an index of -1 gives zeros.
    nb::list take(nb::handle index, int64_t start, int64_t stop, bool padded) const {
        const int64_t* rows = checked(index, start, stop, padded);
        const int64_t count = stop - start;
        Fresh fresh;
        for (const Source& source : sources_) source.plan(fresh, 1, &count);
        nb::list out = fresh.make();
        char* targets[kMostLeaves];
        for (size_t i = 0; i < sources_.size(); ++i) targets[i] = fresh.data(i);
        run(targets, rows, count, padded);
        return out;
    }

    // The same into arrays of the caller's.
    void take_into(nb::handle index, int64_t start, int64_t stop, nb::list arrays, bool padded) const {
        const int64_t* rows = checked(index, start, stop, padded);
        if (arrays.size() != sources_.size())
            throw std::invalid_argument("out: expected " + std::to_string(sources_.size()) + " arrays, got " + std::to_string(arrays.size()));
        char* targets[kMostLeaves];
        for (size_t i = 0; i < sources_.size(); ++i) {
            const Array array = read_or_throw(arrays[i], "out");
            const Source& source = sources_[i];
            bool fits = array.dtype == source.dtype && array.ndim == source.ndim + 1 && array.shape[0] == stop - start;
            for (int d = 0; fits && d < source.ndim; ++d) fits = array.shape[d + 1] == source.shape[d];
            if (!fits) throw std::invalid_argument("out: expected the shape and dtype of the source");
            targets[i] = array.data;
        }
        run(targets, rows, stop - start, padded);
    }

private:
    const int64_t* checked(nb::handle index, int64_t start, int64_t stop, bool padded) const {
        const Array array = read_index(index);
        if (start < 0 || stop < start || stop > array.shape[0])
            throw std::out_of_range("start, stop: expected a range of the index");
        const int64_t* rows = reinterpret_cast<const int64_t*>(array.data) + start;
        if (!in_range(rows, stop - start, items_, padded ? -1 : 0))
            throw std::out_of_range("index: expected 0 to " + std::to_string(items_ - 1) + ", got one outside");
        return rows;
    }

    void run(char* const* targets, const int64_t* rows, int64_t count, bool padded) const {
        int64_t bytes = 0;
        for (const Source& source : sources_) bytes += source.bytes * count;
        MaybeReleased released(bytes);
        const auto copy = padded ? gather_padded : gather;
        for (size_t i = 0; i < sources_.size(); ++i) copy(targets[i], sources_[i].data, rows, count, sources_[i].bytes, items_);
    }

    std::vector<Source> sources_;
    int64_t items_;
    nb::object owner_;
};

// Whether all of these are plain arrays on the host, in one piece each.
bool reads(nb::list arrays) {
    Array array;
    for (nb::handle object : arrays)
        if (!border().read(object.ptr(), array) || !array.contiguous()) return false;
    return arrays.size() <= kMostLeaves;
}

BitGenerator& generator_in(nb::handle capsule) {
    auto* random = static_cast<BitGenerator*>(PyCapsule_GetPointer(capsule.ptr(), "BitGenerator"));
    if (!random) throw nb::python_error();
    return *random;
}

void shuffle_index(nb::handle index, nb::handle capsule) {
    const Array array = read_index(index);
    if (array.shape[0] >= (int64_t{1} << 32))
        throw std::invalid_argument("index: expected fewer than 2^32 entries, got " + std::to_string(array.shape[0]));
    BitGenerator& random = generator_in(capsule);
    MaybeReleased released(array.shape[0] * 8);
    shuffle(reinterpret_cast<int64_t*>(array.data), array.shape[0], random);
}

// A fresh tensor of 0 … count - 1, shuffled.
nb::object permutation(int64_t count, nb::handle capsule) {
    if (count >= (int64_t{1} << 32))
        throw std::invalid_argument("count: expected less than 2^32, got " + std::to_string(count));
    BitGenerator& random = generator_in(capsule);
    nb::object made = nb::none();
    auto* numbers = target<int64_t>(made, kInt64, count);
    MaybeReleased released(count * 8);
    std::iota(numbers, numbers + count, int64_t{0});
    shuffle(numbers, count, random);
    return made;
}

}  // namespace

void bind_columns(nb::module_& m) {
    m.attr("MOST_LEAVES") = kMostLeaves;
    m.attr("MOST_AXES") = kMaxDims;
    nb::class_<Columns>(m, "Columns")
        .def(nb::init<nb::list, nb::list, int>())
        .def("write", &Columns::write, nb::arg("row"), nb::arg("leaves"), nb::arg("which").none() = nb::none());
    nb::class_<Gather>(m, "Gather")
        .def(nb::init<nb::list, std::vector<int>, int64_t>())
        .def("take", &Gather::take, nb::arg("index"), nb::arg("start"), nb::arg("stop"), nb::arg("padded") = false)
        .def("take_into", &Gather::take_into, nb::arg("index"), nb::arg("start"), nb::arg("stop"), nb::arg("out"),
             nb::arg("padded") = false);
    m.def("reads", &reads);
    m.def("shuffle", &shuffle_index);
    m.def("permutation", &permutation);
}

}  // namespace relive
