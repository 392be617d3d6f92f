// Arguments as the core takes them: read, or refused.
#pragma once
#include <nanobind/nanobind.h>

#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "../core/copy.hpp"
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

// A Python number as an element of `dtype`; false for a pair of types that could lose digits.
inline bool read_scalar(PyObject* object, DataType dtype, char* out) {
    if (PyBool_Check(object)) {
        if (dtype != kBool) return false;
        *out = object == Py_True;
    } else if (PyFloat_Check(object)) {
        const double value = PyFloat_AsDouble(object);
        if (dtype == kFloat32 && overflows(value)) return false;
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

// The generator in the capsule of a numpy bit generator.
inline const BitGenerator& generator_in(nb::handle capsule) {
    auto* random = static_cast<BitGenerator*>(PyCapsule_GetPointer(capsule.ptr(), "BitGenerator"));
    if (!random) throw nb::python_error();
    return *random;
}

}  // namespace relive::bind
