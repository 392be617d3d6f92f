// Arguments as the core takes them: read, or refused.
#pragma once
#include <nanobind/nanobind.h>

#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "../core/random.hpp"
#include "conversion.hpp"

namespace nb = nanobind;

namespace relive::bind {

constexpr int64_t kMostLeaves = 128;

inline Array read_or_throw(nb::handle object, const char* what) {
    Array array;
    if (!conversion().read(object.ptr(), array))
        throw std::invalid_argument(std::string(what) + ": expected a plain array in host memory");
    if (!array.contiguous()) throw std::invalid_argument(std::string(what) + ": expected contiguous memory");
    return array;
}

inline Array read_output(nb::handle object, const char* what) {
    Array array = read_or_throw(object, what);
    if (!array.is_writable) throw std::invalid_argument(std::string(what) + ": expected memory that can be written");
    return array;
}

inline Array read_index(nb::handle object) {
    Array array = read_or_throw(object, "index");
    if (array.dtype != kInt64 || array.ndim != 1) throw std::invalid_argument("index: expected a vector of int64");
    return array;
}

// The memory of an array that must have this dtype and this many elements, to be written unless T is const. Only the pointer is returned: the array is one
// of the core's own, and the caller keeps it alive.
template <class T>
T* memory_of(nb::handle object, DataType dtype, int64_t elements, const char* what) {
    const Array array = std::is_const_v<T> ? read_or_throw(object, what) : read_output(object, what);
    if (array.dtype != dtype || array.elements() != elements)
        throw std::invalid_argument(std::string(what) + ": expected " + std::to_string(elements) + " elements of the declared dtype, got " +
                                    std::to_string(array.elements()));
    return array.as<T>();
}

inline void check_count(int64_t count) {
    if (count < 0) throw std::out_of_range("count: expected at least 0, got " + std::to_string(count));
}

// Store an integer as an element of `dtype`; false if it could lose digits.
inline bool store_integer(int64_t value, DataType dtype, char* out) {
    constexpr int64_t kExact = int64_t{1} << 53;  // float64 has every integer up to here
    const auto store = [out](auto element) {
        std::memcpy(out, &element, sizeof element);
        return true;
    };
    const auto fits = [value](int64_t least, int64_t most) { return value >= least && value <= most; };
    if (dtype == kFloat32) return fits(-kExact, kExact) && store(static_cast<float>(value));
    if (dtype == kFloat64) return fits(-kExact, kExact) && store(static_cast<double>(value));
    if (dtype == kInt64) return store(value);
    if (dtype == kUInt8) return fits(0, UINT8_MAX) && store(static_cast<uint8_t>(value));
    if (dtype == DataType{kInt, 32, 1}) return fits(INT32_MIN, INT32_MAX) && store(static_cast<int32_t>(value));
    return false;
}

// A Python number as an element of `dtype`, as numpy and torch would cast it; false for a pair of types that could lose
// digits.
inline bool read_scalar(PyObject* object, DataType dtype, char* out) {
    if (PyFloat_Check(object)) {
        const double value = PyFloat_AsDouble(object);
        const float narrowed = static_cast<float>(value);
        if (dtype == kFloat32) std::memcpy(out, &narrowed, sizeof narrowed);
        else if (dtype == kFloat64) std::memcpy(out, &value, sizeof value);
        else return false;
        return true;
    }
    if (PyBool_Check(object)) {
        if (dtype != kBool) return store_integer(object == Py_True, dtype, out);
        *out = object == Py_True;
        return true;
    }
    if (!PyLong_CheckExact(object)) return false;
    int overflow = 0;
    const int64_t value = PyLong_AsLongLongAndOverflow(object, &overflow);
    return !overflow && store_integer(value, dtype, out);
}

// The numbers in nested lists or tuples of this shape, one after the other at `out`, which moves on; false likewise.
inline bool read_numbers(PyObject* object, const int64_t* shape, int ndim, DataType dtype, char*& out) {
    if (ndim == 0) {
        if (!read_scalar(object, dtype, out)) return false;
        out += dtype.bytes();
        return true;
    }
    const bool is_list = PyList_CheckExact(object);
    if (!is_list && !PyTuple_CheckExact(object)) return false;
    if ((is_list ? PyList_Size(object) : PyTuple_Size(object)) != shape[0]) return false;
    for (Py_ssize_t i = 0; i < shape[0]; ++i)
        if (!read_numbers(is_list ? PyList_GetItem(object, i) : PyTuple_GetItem(object, i), shape + 1, ndim - 1, dtype, out)) return false;
    return true;
}

// The generator in the capsule of a numpy bit generator.
inline const BitGenerator& generator_in(nb::handle capsule) {
    auto* random = static_cast<BitGenerator*>(PyCapsule_GetPointer(capsule.ptr(), "BitGenerator"));
    if (!random) throw nb::python_error();
    return *random;
}

}  // namespace relive::bind
