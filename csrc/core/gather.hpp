// Reads many items of an array at once, by their numbers.
#pragma once
#include <cstdint>
#include <cstring>

#include "copy.hpp"
#include "prefetch.hpp"

namespace relive {

constexpr int64_t kAhead = 24;      // how many items ahead of the copy the prefetch runs
constexpr int64_t kNear = 1 << 22;  // arrays up to this size stay in the cache: no prefetch is needed
constexpr int64_t kShortRow = 96;   // bytes; a longer row is worth a call of memcpy

// Copies of a size known at compile time become one or two instructions.
template <int64_t Bytes>
inline void gather_fixed(char* out, const char* items, const int64_t* index, int64_t count, bool near) noexcept {
    int64_t i = 0;
    for (; !near && i + kAhead < count; ++i) {
        RELIVE_PREFETCH(items + index[i + kAhead] * Bytes);
        std::memcpy(out + i * Bytes, items + index[i] * Bytes, Bytes);
    }
    for (; i < count; ++i) std::memcpy(out + i * Bytes, items + index[i] * Bytes, Bytes);
}

inline void gather_any(char* out, const char* items, const int64_t* index, int64_t count, int64_t bytes, bool near) noexcept {
    const int64_t lines = bytes < 1024 ? bytes : 1024;  // after that the hardware prefetches by itself
    for (int64_t i = 0; i < count; ++i) {
        if (!near && i + kAhead < count) {
            const char* next = items + index[i + kAhead] * bytes;
            for (int64_t offset = 0; offset < lines; offset += 64) RELIVE_PREFETCH(next + offset);
            RELIVE_PREFETCH(next + bytes - 1);
        }
        const char* item = items + index[i] * bytes;
        if (bytes >= 16 && bytes <= kShortRow) copy_row(out + i * bytes, item, bytes);
        else std::memcpy(out + i * bytes, item, static_cast<size_t>(bytes));
    }
}

// out[i] = items[index[i]], each of `total` items `bytes` long. The index has been range-checked.
inline void gather(char* out, const char* items, const int64_t* index, int64_t count, int64_t bytes, int64_t total) noexcept {
    const bool near = total * bytes <= kNear;
    switch (bytes) {
        case 1: return gather_fixed<1>(out, items, index, count, near);
        case 2: return gather_fixed<2>(out, items, index, count, near);
        case 4: return gather_fixed<4>(out, items, index, count, near);
        case 8: return gather_fixed<8>(out, items, index, count, near);
        case 16: return gather_fixed<16>(out, items, index, count, near);
        case 32: return gather_fixed<32>(out, items, index, count, near);
        default: return gather_any(out, items, index, count, bytes, near);
    }
}

// Like `gather`, but an index of -1 gives zeros. Items that follow each other, as the steps of a replayed sequence do,
// are copied at once; the steps of a rollout's sequence lie apart. `Bytes` is the size of an item, 0 if `bytes` says it.
template <int64_t Bytes>
inline void gather_padded_as(char* out, const char* items, const int64_t* index, int64_t count, int64_t bytes,
                             bool near) noexcept {
    if (Bytes) bytes = Bytes;
    for (int64_t i = 0, stop = 0; i < count; i = stop) {
        stop = i + 1;
        if (!near && i + kAhead < count && index[i + kAhead] >= 0) RELIVE_PREFETCH(items + index[i + kAhead] * bytes);
        if (index[i] < 0) {
            std::memset(out + i * bytes, 0, static_cast<size_t>(bytes));
            continue;
        }
        while (stop < count && index[stop] == index[stop - 1] + 1) ++stop;
        if (stop == i + 1) std::memcpy(out + i * bytes, items + index[i] * bytes, static_cast<size_t>(bytes));
        else std::memcpy(out + i * bytes, items + index[i] * bytes, static_cast<size_t>((stop - i) * bytes));
    }
}

inline void gather_padded(char* out, const char* items, const int64_t* index, int64_t count, int64_t bytes,
                          int64_t total) noexcept {
    const bool near = total * bytes <= kNear;
    switch (bytes) {
        case 1: return gather_padded_as<1>(out, items, index, count, bytes, near);
        case 4: return gather_padded_as<4>(out, items, index, count, bytes, near);
        case 8: return gather_padded_as<8>(out, items, index, count, bytes, near);
        case 16: return gather_padded_as<16>(out, items, index, count, bytes, near);
        default: return gather_padded_as<0>(out, items, index, count, bytes, near);
    }
}

// Every index is in [lowest, items).
inline bool in_range(const int64_t* index, int64_t count, int64_t items, int64_t lowest = 0) noexcept {
    uint64_t largest = 0;  // a value below the lowest is a huge unsigned one
    for (int64_t i = 0; i < count; ++i) {
        const uint64_t value = static_cast<uint64_t>(index[i]) - static_cast<uint64_t>(lowest);
        largest = value > largest ? value : largest;
    }
    return count == 0 || largest < static_cast<uint64_t>(items - lowest);
}

}  // namespace relive
