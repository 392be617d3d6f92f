// The sources of a gather, read from a list of arrays.
#pragma once
#include <vector>

#include "../core/gather_source.hpp"
#include "arguments.hpp"

namespace relive::bind {

// An item of `arrays[i]` has its last `item_ndims[i]` axes; each array has at least `items` of them.
inline std::vector<GatherSource> read_sources(nb::list arrays, const std::vector<int>& item_ndims, int64_t items) {
    if (arrays.size() > kMostLeaves)
        throw std::invalid_argument("sources: expected at most " + std::to_string(kMostLeaves) + ", got " + std::to_string(arrays.size()));
    if (arrays.size() != item_ndims.size())
        throw std::invalid_argument("sources: expected one number of axes for each");
    std::vector<GatherSource> sources;
    for (size_t i = 0; i < arrays.size(); ++i)
        sources.push_back(source_of(read_or_throw(arrays[i], "source"), item_ndims[i], items));
    return sources;
}

}  // namespace relive::bind
