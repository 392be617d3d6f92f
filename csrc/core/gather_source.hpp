// An array [items…, shape…] that is read item by item.
#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "gather.hpp"
#include "tensor_plans.hpp"

namespace relive {

struct GatherSource {
    char* data;
    DataType dtype;
    int64_t items;
    int64_t bytes;  // of an item
    int ndim;       // of an item
    int64_t shape[kMaxDims];

    // Plan a tensor [lead…, shape…].
    void plan(TensorPlans& plans, int lead_ndim, const int64_t* lead) const {
        plans.add(dtype, lead_ndim, lead, ndim, shape, "source");
    }

    bool matches(const ArrayView& array, int64_t count) const {
        bool fits = array.dtype == dtype && array.ndim == ndim + 1 && array.shape[0] == count;
        for (int d = 0; fits && d < ndim; ++d) fits = array.shape[d + 1] == shape[d];
        return fits;
    }
};

// An item has the last `item_ndim` axes of the array, which holds at least `items` of them.
inline GatherSource source_of(const ArrayView& array, int item_ndim, int64_t items) {
    if (item_ndim < 0 || item_ndim > array.ndim)
        throw std::invalid_argument("item_ndim: expected 0 to " + std::to_string(array.ndim) + ", got " + std::to_string(item_ndim));
    GatherSource source{array.data, array.dtype, 1, array.itemsize(), item_ndim, {}};
    const int lead = array.ndim - item_ndim;
    for (int d = 0; d < lead; ++d) source.items *= array.shape[d];
    if (items < 0 || source.items < items)
        throw std::invalid_argument("items: expected at most " + std::to_string(source.items) + ", got " + std::to_string(items));
    for (int d = 0; d < item_ndim; ++d) {
        source.shape[d] = array.shape[lead + d];
        source.bytes *= source.shape[d];
    }
    return source;
}

// Read the items `rows` of every source, the first `items` of which may be asked for. `padded`: -1 gives zeros.
inline void gather_all(const std::vector<GatherSource>& sources, char* const* targets, const int64_t* rows, int64_t count,
                       int64_t items, bool padded) noexcept {
    const auto read = padded ? gather_padded : gather;
    for (size_t i = 0; i < sources.size(); ++i) read(targets[i], sources[i].data, rows, count, sources[i].bytes, items);
}

}  // namespace relive
