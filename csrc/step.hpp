// A step as callers give it: its leaves found in memory and cast, before any of them is stored.
#pragma once
#include <nanobind/nanobind.h>

#include <vector>

#include "bindings.hpp"
#include "columns.hpp"
#include "ring.hpp"

namespace relive {

namespace nb = nanobind;

constexpr int kMostFrames = 64;

// A leaf as callers give it for one environment, and the column [slots, envs, …] where it is kept.
struct Leaf {
    char* column;
    DataType dtype;
    int64_t bytes;  // of one environment's item in the column
    int ndim;       // of one environment's item as given (with its frames)
    int64_t shape[kMaxDims];
    int64_t given_bytes;
    Frames frames;
    bool stacked() const { return frames.k > 1; }
};

// What one call gives for one leaf: exact dtype, contiguous, items in the order [steps, environments].
struct Given {
    const char* data;
    const char* source;  // the caller's memory, before any cast
    int64_t source_bytes;
    std::vector<char> scratch;
};

// What stands before a leaf's own shape: [steps, environments], each where it is given.
struct Lead {
    int64_t steps, envs;
    bool blocks;  // several steps, in an axis of their own
    bool single;  // one environment, without an axis
};

// The leaf of a column [slots, envs, …]; `stack` is (k, axis, repeat) or None.
inline Leaf describe_leaf(nb::handle object, nb::handle stack, int64_t slots, int64_t envs) {
    const Array array = read_or_throw(object, "column");
    if (array.ndim < 2 || array.shape[0] != slots || array.shape[1] != envs)
        throw std::invalid_argument("column: expected shape [slots, envs, …]");
    Leaf leaf{};
    leaf.column = array.data;
    leaf.dtype = array.dtype;
    leaf.bytes = array.itemsize();
    for (int d = 2; d < array.ndim; ++d) leaf.bytes *= array.shape[d];
    leaf.ndim = array.ndim - 2;
    for (int d = 0; d < leaf.ndim; ++d) leaf.shape[d] = array.shape[d + 2];
    if (!stack.is_none()) {
        const nb::tuple described = nb::borrow<nb::tuple>(stack);
        const int axis = nb::cast<int>(described[1]);
        leaf.frames.k = nb::cast<int64_t>(described[0]);
        leaf.frames.repeat = nb::cast<bool>(described[2]);
        if (leaf.frames.k > kMostFrames || axis < 0 || axis > leaf.ndim)
            throw std::invalid_argument("stack: expected fewer frames along an axis of the leaf");
        leaf.frames.inner = array.itemsize();
        for (int d = 0; d < leaf.ndim; ++d) (d < axis ? leaf.frames.outer : leaf.frames.inner) *= leaf.shape[d];
        for (int d = leaf.ndim; d > axis; --d) leaf.shape[d] = leaf.shape[d - 1];
        leaf.shape[axis] = leaf.frames.k;
        ++leaf.ndim;
    }
    leaf.given_bytes = leaf.bytes * leaf.frames.k;
    return leaf;
}

// A Python number for a leaf of single numbers.
inline bool read_number(PyObject* object, const Leaf& leaf, Given& given) {
    given.scratch.resize(8);
    if (!read_scalar(object, leaf.dtype, given.scratch.data())) return false;
    given.data = given.source = given.scratch.data();
    given.source_bytes = 0;
    return true;
}

// Find the bytes of one leaf, [steps, envs] items of it; narrow float64 into scratch. Nothing is written yet.
inline bool read_given(PyObject* object, const Leaf& leaf, const Lead& given_lead, Given& given) {
    Array array;
    if (given_lead.single && !given_lead.blocks && leaf.ndim == 0 && read_number(object, leaf, given)) return true;
    if (!border().read(object, array) || !array.contiguous()) return false;
    int lead = 0;
    if (given_lead.blocks) {
        if (array.ndim < 1 || array.shape[0] != given_lead.steps) return false;
        lead = 1;
    }
    if (!given_lead.single) {
        if (array.ndim < lead + 1 || array.shape[lead] != given_lead.envs) return false;
        ++lead;
    }
    if (array.ndim != lead + leaf.ndim) return false;
    for (int d = 0; d < leaf.ndim; ++d)
        if (array.shape[lead + d] != leaf.shape[d]) return false;
    given.data = given.source = array.data;
    given.source_bytes = array.elements() * array.itemsize();
    if (array.dtype == leaf.dtype) return true;
    if (array.dtype != kFloat64 || leaf.dtype != kFloat32) return false;
    const int64_t elements = leaf.given_bytes / 4 * given_lead.steps * given_lead.envs;
    given.scratch.resize(static_cast<size_t>(elements) * 4);
    narrow(reinterpret_cast<float*>(given.scratch.data()), reinterpret_cast<const double*>(array.data), elements);
    given.data = given.scratch.data();
    return true;
}

}  // namespace relive
