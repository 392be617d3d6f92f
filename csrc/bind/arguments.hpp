// Reads and checks Python arguments, releases the GIL for long calls, and makes changes atomic for signal handlers.
#pragma once
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "../core/random.hpp"
#include "conversion.hpp"

namespace nb = nanobind;

namespace relive::bind {

constexpr int64_t kMaxLeaves = 128;

// Raise a ValueError (with `OutOfRange` an IndexError) whose message is the concatenation of the parts.
using OutOfRange = std::out_of_range;

template <class Error = std::invalid_argument, class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
    std::string message;
    const auto add = [&message](const auto& part) {
        if constexpr (std::is_arithmetic_v<std::decay_t<decltype(part)>>) message += std::to_string(part);
        else message += part;
    };
    (add(parts), ...);
    throw Error(message);
}

inline Array read_or_throw(nb::handle object, const char* what) {
    Array array;
    if (!conversion().read(object.ptr(), array)) refuse(what, ": expected a plain array in host memory");
    if (!array.contiguous()) refuse(what, ": expected contiguous memory");
    return array;
}

inline Array read_output(nb::handle object, const char* what) {
    Array array = read_or_throw(object, what);
    if (!array.is_writable) refuse(what, ": expected memory that can be written");
    return array;
}

inline Array read_index(nb::handle object) {
    Array array = read_or_throw(object, "index");
    if (array.dtype != kInt64 || array.ndim != 1) refuse("index: expected a vector of int64");
    return array;
}

// Check dtype and size of an array and return its memory, writable unless T is const. The caller keeps the array alive.
template <class T>
T* read_memory(nb::handle object, DataType dtype, int64_t elements, const char* what) {
    const Array array = std::is_const_v<T> ? read_or_throw(object, what) : read_output(object, what);
    if (array.dtype != dtype || array.elements() != elements)
        refuse(what, ": expected ", elements, " elements of the declared dtype, got ", array.elements());
    return array.as<T>();
}

inline void check_count(int64_t count) {
    if (count < 0) refuse<OutOfRange>("count: expected at least 0, got ", count);
}

// Store an integer as an element of `dtype`. Returns false if it could lose digits.
inline bool store_integer(int64_t value, DataType dtype, char* out) {
    // The largest number up to which float64 represents every integer.
    constexpr int64_t kExact = int64_t{1} << 53;
    const auto store = [out](auto element) {
        std::memcpy(out, &element, sizeof element);
        return true;
    };
    const auto fits = [value](int64_t min, int64_t max) { return value >= min && value <= max; };
    if (dtype == kFloat32) return fits(-kExact, kExact) && store(static_cast<float>(value));
    if (dtype == kFloat64) return fits(-kExact, kExact) && store(static_cast<double>(value));
    if (dtype == kInt64) return store(value);
    if (dtype == kUInt8) return fits(0, UINT8_MAX) && store(static_cast<uint8_t>(value));
    if (dtype == DataType{kInt, 32, 1}) return fits(INT32_MIN, INT32_MAX) && store(static_cast<int32_t>(value));
    return false;
}

// Store a Python number as an element of `dtype`, cast as in numpy and torch. Returns false if the types could lose
// digits.
inline bool read_scalar(PyObject* object, DataType dtype, char* out) {
    if (PyFloat_Check(object)) {
        const double value = PyFloat_AsDouble(object);
        if (dtype == kFloat32 && overflows(value)) return false;
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

// Store the numbers of nested lists or tuples of this shape at `out` and advance it. Returns false if one could lose
// digits.
inline bool read_numbers(PyObject* object, const int64_t* shape, int ndim, DataType dtype, char*& out) {
    if (ndim == 0) {
        if (!read_scalar(object, dtype, out)) return false;
        out += dtype.bytes();
        return true;
    }
    const bool is_list = PyList_CheckExact(object);
    if (!is_list && !PyTuple_CheckExact(object)) return false;
    if ((is_list ? PyList_Size(object) : PyTuple_Size(object)) != shape[0]) return false;
    for (Py_ssize_t i = 0; i < shape[0]; ++i) {
        PyObject* item = is_list ? PyList_GetItem(object, i) : PyTuple_GetItem(object, i);
        if (!read_numbers(item, shape + 1, ndim - 1, dtype, out)) return false;
    }
    return true;
}

// Read the numbers of a leaf of `bytes` bytes into `out`. Returns false for anything but numbers and lists of numbers.
inline bool read_numbers(PyObject* object, const int64_t* shape, int ndim, DataType dtype, int64_t bytes,
                         std::vector<char>& out) {
    if (ndim > 0 && !PyList_CheckExact(object) && !PyTuple_CheckExact(object)) return false;
    out.resize(std::max<int64_t>(8, bytes));
    char* end = out.data();
    return read_numbers(object, shape, ndim, dtype, end);
}

// Return the C interface of a numpy bit generator from its capsule.
inline const BitGenerator& read_generator(nb::handle capsule) {
    auto* random = static_cast<BitGenerator*>(PyCapsule_GetPointer(capsule.ptr(), "BitGenerator"));
    if (!random) throw nb::python_error();
    return *random;
}

// For fewer bytes, releasing the GIL costs more than it gains, because a busy Python thread keeps the GIL for
// milliseconds.
constexpr int64_t kReleaseBytes = 1 << 16;

// An object that releases the GIL while it exists, if the call processes at least `min_bytes` bytes.
struct MaybeReleased {
    explicit MaybeReleased(int64_t bytes, int64_t min_bytes = kReleaseBytes)
        : state(bytes >= min_bytes ? PyEval_SaveThread() : nullptr) {}
    MaybeReleased(const MaybeReleased&) = delete;
    ~MaybeReleased() {
        if (state) PyEval_RestoreThread(state);
    }
    PyThreadState* state;
};

// Guards a write against reentrance, and releases the arrays of the step afterwards. A buffer exporter written in
// Python may call back while its buffer is acquired or released.
class OneWrite {
public:
    OneWrite(bool& is_writing, std::vector<Array>& arrays) : is_writing_(is_writing), arrays_(arrays) {
        if (is_writing_)
            throw std::runtime_error(
                "add: expected one step at a time, got a step from inside the buffer protocol of another. "
                "Add it afterwards.");
        is_writing_ = true;
    }
    OneWrite(const OneWrite&) = delete;
    ~OneWrite() {
        for (Array& array : arrays_) array.hold.release();
        is_writing_ = false;
    }

private:
    bool& is_writing_;
    std::vector<Array>& arrays_;
};

constexpr int kMaxTries = 16;

// Call `change` until it returns, at most kMaxTries times, then raise its first exception.
//
// Python runs signal handlers between Python instructions, never inside a native call. A native call is therefore
// atomic, and a Python function that completes its change is called again if a signal handler raised inside of it. This
// is safe because `change` only assigns.
inline void complete(nb::handle change) {
    std::optional<nb::python_error> first;
    for (int tries = 1;; ++tries) {
        try {
            change();
            break;
        } catch (nb::python_error& error) {
            if (!first) first.emplace(std::move(error));
            if (tries == kMaxTries) break;
        }
    }
    if (first) throw std::move(*first);
}

}
