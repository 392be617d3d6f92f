// Columns that are read item by item.
#pragma once
#include <vector>

#include "bindings.hpp"
#include "fresh.hpp"

namespace relive {

// An array [items…, shape…], seen as a flat list of items.
struct Source {
    char* data;
    DataType dtype;
    int64_t items;
    int64_t bytes;  // of an item
    int ndim;       // of an item
    int64_t shape[kMaxDims];

    // Plan a fresh tensor [lead…, shape…].
    void plan(Fresh& fresh, int lead_ndim, const int64_t* lead) const {
        if (lead_ndim + ndim > kMaxDims) throw std::invalid_argument("source: expected fewer axes");
        int64_t whole[kMaxDims];
        std::memcpy(whole, lead, sizeof(int64_t) * static_cast<size_t>(lead_ndim));
        std::memcpy(whole + lead_ndim, shape, sizeof(int64_t) * static_cast<size_t>(ndim));
        fresh.add(dtype, lead_ndim + ndim, whole);
    }
};

// `item_ndims[i]` is how many axes an item of `arrays[i]` has; each array has at least `items` of them.
inline std::vector<Source> read_sources(nanobind::list arrays, const std::vector<int>& item_ndims, int64_t items) {
    if (arrays.size() > kMostLeaves)
        throw std::invalid_argument("sources: expected at most " + std::to_string(kMostLeaves) + ", got " + std::to_string(arrays.size()));
    if (arrays.size() != item_ndims.size())
        throw std::invalid_argument("sources: expected one number of axes for each");
    std::vector<Source> sources;
    for (size_t i = 0; i < arrays.size(); ++i) {
        const Array array = read_or_throw(arrays[i], "source");
        Source source{array.data, array.dtype, 1, array.itemsize(), item_ndims[i], {}};
        const int lead = array.ndim - source.ndim;
        for (int d = 0; d < lead; ++d) source.items *= array.shape[d];
        if (source.items < items)
            throw std::invalid_argument("items: expected at most " + std::to_string(source.items) + ", got " + std::to_string(items));
        for (int d = 0; d < source.ndim; ++d) {
            source.shape[d] = array.shape[lead + d];
            source.bytes *= source.shape[d];
        }
        sources.push_back(source);
    }
    return sources;
}

}  // namespace relive
