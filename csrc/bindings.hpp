// What every binding file needs: arguments read or refused, and the GIL released where that pays.
#pragma once
#include <nanobind/nanobind.h>

#include <cstring>
#include <stdexcept>
#include <string>

#include "border.hpp"

namespace relive {

constexpr DataType kFloat32{dlpack::kFloat, 32, 1}, kFloat64{dlpack::kFloat, 64, 1}, kInt64{dlpack::kInt, 64, 1},
    kUInt8{dlpack::kUInt, 8, 1}, kBool{dlpack::kBool, 8, 1};

constexpr int64_t kMostLeaves = 128;

// Below this a released GIL costs more than it gives: a busy Python thread keeps it for milliseconds.
constexpr int64_t kReleaseBytes = 1 << 16;

struct MaybeReleased {
    explicit MaybeReleased(int64_t bytes) : state(bytes >= kReleaseBytes ? PyEval_SaveThread() : nullptr) {}
    ~MaybeReleased() {
        if (state) PyEval_RestoreThread(state);
    }
    PyThreadState* state;
};

inline Array read_or_throw(nanobind::handle object, const char* what) {
    Array array;
    if (!border().read(object.ptr(), array))
        throw std::invalid_argument(std::string(what) + ": expected a plain array in host memory");
    if (!array.contiguous()) throw std::invalid_argument(std::string(what) + ": expected contiguous memory");
    return array;
}

inline Array read_index(nanobind::handle object) {
    Array array = read_or_throw(object, "index");
    if (array.dtype != kInt64 || array.ndim != 1) throw std::invalid_argument("index: expected a vector of int64");
    return array;
}

// The memory of an array that must have this dtype and this many elements.
template <class T>
T* memory_of(nanobind::handle object, DataType dtype, int64_t elements, const char* what) {
    const Array array = read_or_throw(object, what);
    if (array.dtype != dtype || array.elements() != elements)
        throw std::invalid_argument(std::string(what) + ": expected " + std::to_string(elements) + " elements of the declared dtype, got " +
                                    std::to_string(array.elements()));
    return reinterpret_cast<T*>(array.data);
}

// A Python number as an element of `dtype`; only the pairs that can lose nothing.
inline bool read_scalar(PyObject* object, DataType dtype, char* out) {
    if (PyBool_Check(object)) {
        if (dtype != kBool) return false;
        *out = object == Py_True;
    } else if (PyFloat_Check(object)) {
        const double value = PyFloat_AsDouble(object);
        const float narrowed = static_cast<float>(value);
        if (dtype == kFloat32) std::memcpy(out, &narrowed, sizeof narrowed);
        else if (dtype == kFloat64) std::memcpy(out, &value, sizeof value);
        else return false;
    } else if (PyLong_CheckExact(object)) {
        int overflow = 0;
        const int64_t value = PyLong_AsLongLongAndOverflow(object, &overflow);
        if (overflow || dtype != kInt64) return false;
        std::memcpy(out, &value, sizeof value);
    } else {
        return false;
    }
    return true;
}

}  // namespace relive
