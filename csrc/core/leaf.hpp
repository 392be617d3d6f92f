// A leaf as callers give it for one environment, and the column [slots, envs, …] that stores it.
#pragma once
#include <cstdint>
#include <stdexcept>

#include "array_view.hpp"
#include "frames.hpp"

namespace relive {

struct Leaf {
    char* column;
    DataType dtype;
    int64_t bytes;  // of one environment's item in the column
    int ndim;       // of one environment's item as given, with its frames
    int64_t shape[kMaxDims];
    int64_t given_bytes;
    Frames frames;

    bool stacked() const { return frames.k > 1; }
    char* at(int64_t flat) const { return column + flat * bytes; }
};

// How many frames a leaf stacks, along which axis, and how it is padded.
struct Stacking {
    int64_t k;
    int axis;
    bool repeat;
};

inline void stack_leaf(Leaf& leaf, const Stacking& stacking) {
    const int axis = stacking.axis;
    if (stacking.k < 1 || stacking.k > kMostFrames || axis < 0 || axis > leaf.ndim)
        throw std::invalid_argument("stack: expected fewer frames along an axis of the leaf");
    leaf.frames.k = stacking.k;
    leaf.frames.repeat = stacking.repeat;
    leaf.frames.inner = leaf.dtype.bytes();
    for (int d = 0; d < leaf.ndim; ++d) (d < axis ? leaf.frames.outer : leaf.frames.inner) *= leaf.shape[d];
    for (int d = leaf.ndim; d > axis; --d) leaf.shape[d] = leaf.shape[d - 1];
    leaf.shape[axis] = stacking.k;
    ++leaf.ndim;
    leaf.given_bytes = leaf.bytes * stacking.k;
}

// The leaf of a column [slots, envs, …]; `stacking` may be null.
inline Leaf leaf_over(const ArrayView& column, const Stacking* stacking, int64_t slots, int64_t envs) {
    if (column.ndim < 2 || column.shape[0] != slots || column.shape[1] != envs)
        throw std::invalid_argument("column: expected shape [slots, envs, …]");
    Leaf leaf{};
    leaf.column = column.data;
    leaf.dtype = column.dtype;
    leaf.bytes = column.itemsize();
    leaf.ndim = column.ndim - 2;
    for (int d = 0; d < leaf.ndim; ++d) {
        leaf.shape[d] = column.shape[d + 2];
        leaf.bytes *= leaf.shape[d];
    }
    leaf.given_bytes = leaf.bytes;
    if (stacking) stack_leaf(leaf, *stacking);
    return leaf;
}

}  // namespace relive
