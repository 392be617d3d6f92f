// Columns of rows that are written one row of all columns at a time.
#pragma once
#include <cstdint>
#include <cstring>
#include <vector>

#include "array_view.hpp"
#include "copy.hpp"

namespace relive {

// One leaf of the schema: rows of `shape`, one after the other.
struct Column {
    char* data;
    DataType dtype;
    bool optional;  // None writes zeros
    int64_t rows;   // a column that has fewer rows than the others keeps the newest
    int ndim;       // of a row, as callers pass it
    int64_t shape[kMaxDims];
    int64_t elements;  // of a row

    int64_t row_bytes() const { return elements * dtype.bytes(); }
    char* row(int64_t number) const { return data + number % rows * row_bytes(); }

    bool has_row_shape(const ArrayView& array) const {
        if (array.ndim != ndim) return false;
        for (int i = 0; i < ndim; ++i)
            if (array.shape[i] != shape[i]) return false;
        return array.contiguous();
    }
};

// A column over an array [rows, 1…, shape…]: callers leave out the `lead` axes of length one (a single environment has
// no environment axis).
inline Column column_over(const ArrayView& array, bool optional, int lead) {
    Column column{};
    column.data = array.data;
    column.dtype = array.dtype;
    column.optional = optional;
    column.rows = array.shape[0];
    column.ndim = array.ndim - 1 - lead;
    column.elements = 1;
    for (int d = 1; d < array.ndim; ++d) column.elements *= array.shape[d];
    for (int d = 0; d < column.ndim; ++d) column.shape[d] = array.shape[d + 1 + lead];
    return column;
}

// One row of one column, planned before any row is written.
struct ColumnWrite {
    enum Kind { kZeros, kCopy, kFlags, kNarrow, kNumber } kind;
    char* target;
    const char* source;
    int64_t elements;
    int64_t bytes;
    char number[8];
    std::vector<char> numbers;  // of a list

    void aim(const Column& column, int64_t row) {
        bytes = column.row_bytes();
        elements = column.elements;
        target = column.row(row);
    }

    // False if the array is no exact fit.
    bool read_from(const ArrayView& array, const Column& column) {
        if (!column.has_row_shape(array)) return false;
        source = array.data;
        if (array.dtype == column.dtype) kind = array.dtype == kBool ? kFlags : kCopy;
        else if (array.dtype == kFloat64 && column.dtype == kFloat32) kind = kNarrow;
        else return false;
        return true;
    }

    void run() const noexcept {
        switch (kind) {
            case kZeros: std::memset(target, 0, static_cast<size_t>(bytes)); break;
            case kCopy: copy_block(target, source, bytes); break;
            case kFlags: as_flags(target, source, bytes); break;
            case kNumber: std::memcpy(target, number, static_cast<size_t>(bytes)); break;
            case kNarrow:
                narrow(reinterpret_cast<float*>(target), reinterpret_cast<const double*>(source), elements);
                break;
        }
    }
};

}  // namespace relive
