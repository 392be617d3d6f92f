// The few structs of numpy's ABI that are needed to read an array without its headers; they are alike in numpy 1 and 2.
//
// The buffer protocol says the same, but makes a format string and an entry in a table for every array: for a small step
// that takes longer than the copy.
#pragma once
#include <Python.h>

#include "../core/array_view.hpp"

namespace relive::bind::numpy {

struct Array {
    PyObject_HEAD
    char* data;
    int ndim;
    Py_ssize_t* shape;
    Py_ssize_t* strides;  // in bytes
    PyObject* base;
    PyObject* descr;
    int flags;
};

struct Descr {
    PyObject_HEAD
    PyObject* type;
    char kind;
    char letter;
    char byteorder;
    char flags;
    int number;
};

constexpr int kContiguous = 0x0001, kAligned = 0x0100, kWriteable = 0x0400;

// The dtype of numpy's number for it; false for what is not a plain number.
inline bool dtype_of(int number, DataType& out) {
    constexpr uint8_t kLong = sizeof(long) * 8;
    constexpr DataType kTypes[] = {kBool,           {kInt, 8, 1},      kUInt8,            {kInt, 16, 1},
                                   {kUInt, 16, 1},  {kInt, 32, 1},     {kUInt, 32, 1},    {kInt, kLong, 1},
                                   {kUInt, kLong, 1}, kInt64,          {kUInt, 64, 1},    kFloat32,
                                   kFloat64};
    if (number < 0 || number >= static_cast<int>(sizeof kTypes / sizeof kTypes[0])) return false;
    out = kTypes[number];
    return true;
}

// False if the array is not plain, which the buffer protocol then says more about.
inline bool read(PyObject* object, ArrayView& out) {
    const auto* array = reinterpret_cast<const Array*>(object);
    const auto* descr = reinterpret_cast<const Descr*>(array->descr);
    if (!(array->flags & kAligned) || (descr->byteorder != '=' && descr->byteorder != '|')) return false;
    if (array->ndim > kMaxDims || !dtype_of(descr->number, out.dtype)) return false;
    out.data = array->data;
    out.is_writable = array->flags & kWriteable;
    out.ndim = array->ndim;
    // An axis of an empty array, or of length one, may have any stride; the buffer protocol gives it the usual one too.
    const bool is_contiguous = array->flags & kContiguous;
    uint64_t stride = 1;  // the sizes of an empty array may multiply to any number
    for (int i = array->ndim - 1; i >= 0; --i) {
        out.shape[i] = array->shape[i];
        if (!is_contiguous && array->strides[i] % out.itemsize() != 0) return false;
        out.strides[i] = is_contiguous ? static_cast<int64_t>(stride) : array->strides[i] / out.itemsize();
        stride *= static_cast<uint64_t>(array->shape[i]);
    }
    return true;
}

}  // namespace relive::bind::numpy
