// A leaf of a step, read from what a caller passed.
#pragma once
#include <algorithm>

#include "../core/step_block.hpp"
#include "arguments.hpp"

namespace relive::bind {

// Find the bytes of a number, or of numbers in lists or tuples; false if they are no exact fit.
inline bool read_numbers_of(PyObject* object, const Leaf& leaf, const LeadingAxes& lead, GivenLeaf& given) {
    int64_t shape[kMaxDims + 2];
    int ndim = 0;
    if (lead.has_steps) shape[ndim++] = lead.steps;
    if (lead.has_envs) shape[ndim++] = lead.envs;
    for (int axis = 0; axis < leaf.ndim; ++axis) shape[ndim++] = leaf.shape[axis];
    if (ndim > 0 && !PyList_CheckExact(object) && !PyTuple_CheckExact(object)) return false;
    given.scratch.resize(static_cast<size_t>(std::max<int64_t>(8, leaf.given_bytes * lead.steps * lead.envs)));
    char* end = given.scratch.data();
    if (!read_numbers(object, shape, ndim, leaf.dtype, end)) return false;
    given.data = given.source = given.scratch.data();
    given.source_bytes = 0;
    return true;
}

// The same of any value.
inline bool read_given(PyObject* object, const Leaf& leaf, const LeadingAxes& lead, Array& array, GivenLeaf& given) {
    return read_numbers_of(object, leaf, lead, given) || (conversion().read(object, array) && accept(array, leaf, lead, given));
}

}  // namespace relive::bind
