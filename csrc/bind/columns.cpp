// Columns: writes one row of a rollout's columns.
#include "../core/columns.hpp"

#include <nanobind/nanobind.h>

#include <algorithm>
#include <vector>

#include "arguments.hpp"
#include "gil.hpp"

namespace relive::bind {
namespace {

class Columns {
public:
    // `arrays[i]` is [rows, …]. A row of it is what a caller passes, without the `lead` leading axes of length one.
    Columns(nb::list arrays, nb::list optional, int lead) : owner_(arrays) {
        if (optional.size() != arrays.size()) throw std::invalid_argument("optional: expected one for each column");
        if (lead < 0 || lead > kMaxDims) throw std::invalid_argument("lead: expected a number of axes, got " + std::to_string(lead));
        for (size_t i = 0; i < arrays.size(); ++i) {
            const Array array = read_output(arrays[i], "column");
            if (array.ndim < 1 + lead || array.shape[0] < 1)
                throw std::invalid_argument("column: expected at least one row");
            for (int axis = 1; axis <= lead; ++axis)
                if (array.shape[axis] != 1) throw std::invalid_argument("column: expected leading axes of length one");
            columns_.push_back(column_over(array, nb::cast<bool>(optional[i]), lead));
            addresses_.push_back(array.data);
            rows_ = std::max(rows_, columns_.back().rows);
        }
    }

    Columns(const Columns&) = delete;

    // Write one row of the columns `which` (None: all). Returns -1, or the position of the first leaf that is no exact
    // fit; then nothing has been written.
    int64_t write(int64_t row, nb::tuple leaves, nb::handle which) {
        const auto count = static_cast<int64_t>(leaves.size());
        check(row, count, which);
        const OneWrite one_write(is_writing_, arrays_);
        if (writes_.size() < leaves.size()) {
            writes_.resize(leaves.size());
            arrays_.resize(leaves.size());
        }
        int64_t bytes = 0;
        for (int64_t i = 0; i < count; ++i) {
            const int64_t at = which.is_none() ? i : nb::cast<int64_t>(nb::borrow<nb::tuple>(which)[static_cast<size_t>(i)]);
            if (!plan(PyTuple_GetItem(leaves.ptr(), i), columns_.at(static_cast<size_t>(at)), row, static_cast<size_t>(i)))
                return i;
            bytes += writes_[static_cast<size_t>(i)].bytes;
        }
        MaybeReleased released(bytes);
        for (int64_t i = 0; i < count; ++i) writes_[static_cast<size_t>(i)].run();
        return -1;
    }

    // Whether a tensor has other memory than it had, as after `share_memory_`.
    bool have_moved() const {
        for (size_t i = 0; i < addresses_.size(); ++i)
            if (conversion().address_of(owner_[i].ptr()) != addresses_[i]) return true;
        return false;
    }

private:
    void check(int64_t row, int64_t count, nb::handle which) const {
        if (row < 0 || row >= rows_)
            throw std::out_of_range("row: expected 0 to " + std::to_string(rows_ - 1) + ", got " + std::to_string(row));
        if (which.is_none() ? count != static_cast<int64_t>(columns_.size()) : !PyTuple_Check(which.ptr()) || PyTuple_Size(which.ptr()) != count)
            throw std::invalid_argument("leaves: expected " + std::to_string(columns_.size()) + ", got " + std::to_string(count));
        if (count > kMostLeaves)
            throw std::invalid_argument("leaves: expected at most " + std::to_string(kMostLeaves) + ", got " + std::to_string(count));
    }

    bool plan(PyObject* object, const Column& column, int64_t row, size_t i) {
        ColumnWrite& write = writes_[i];
        write.aim(column, row);
        if (object == Py_None) {
            write.kind = ColumnWrite::kZeros;
            return column.optional;
        }
        if (column.ndim == 0 && read_scalar(object, column.dtype, write.number)) {
            write.kind = ColumnWrite::kNumber;
            return true;
        }
        if (read_lists(object, column, write)) return true;
        return conversion().read(object, arrays_[i]) && write.read_from(arrays_[i], column);
    }

    static bool read_lists(PyObject* object, const Column& column, ColumnWrite& write) {
        if (!PyList_CheckExact(object) && !PyTuple_CheckExact(object)) return false;
        write.numbers.resize(static_cast<size_t>(column.row_bytes()));
        char* end = write.numbers.data();
        write.source = end;
        write.kind = ColumnWrite::kCopy;
        return read_numbers(object, column.shape, column.ndim, column.dtype, end);
    }

    std::vector<Column> columns_;
    std::vector<ColumnWrite> writes_;
    std::vector<Array> arrays_;  // hold the leaves of a step until it is written
    bool is_writing_ = false;
    std::vector<const char*> addresses_;
    int64_t rows_ = 0;
    nb::tuple owner_;  // the tensors whose memory the columns are
};

}  // namespace

void bind_columns(nb::module_& m) {
    m.attr("MOST_LEAVES") = kMostLeaves;
    m.attr("MOST_AXES") = kMaxDims;
    nb::class_<Columns>(m, "Columns")
        .def(nb::init<nb::list, nb::list, int>())
        .def("write", &Columns::write, nb::arg("row"), nb::arg("leaves"), nb::arg("which").none() = nb::none())
        .def("have_moved", &Columns::have_moved);
}

}  // namespace relive::bind
