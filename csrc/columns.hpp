// Moving rows: one step into every column at once, and many items out of every column at once.
#pragma once
#include <cstdint>
#include <cstring>

namespace recollect {

// Copies of a size known at compile time become one or two instructions; the others are a call to memcpy.
template <int64_t Bytes>
inline void gather_fixed(char* out, const char* items, const int64_t* index, int64_t count) noexcept {
    constexpr int64_t ahead = 32;
    for (int64_t i = 0; i < count; ++i) {
        if (i + ahead < count) __builtin_prefetch(items + index[i + ahead] * Bytes);
        std::memcpy(out + i * Bytes, items + index[i] * Bytes, Bytes);
    }
}

inline void gather_any(char* out, const char* items, const int64_t* index, int64_t count, int64_t bytes) noexcept {
    constexpr int64_t ahead = 16, line = 64;
    const int64_t lines = bytes < 1024 ? bytes : 1024;  // beyond that the hardware has seen the stream
    for (int64_t i = 0; i < count; ++i) {
        if (i + ahead < count) {
            const char* next = items + index[i + ahead] * bytes;
            for (int64_t offset = 0; offset < lines; offset += line) __builtin_prefetch(next + offset);
        }
        std::memcpy(out + i * bytes, items + index[i] * bytes, static_cast<size_t>(bytes));
    }
}

// out[i] = items[index[i]], each item `bytes` long. The index has been range-checked.
inline void gather(char* out, const char* items, const int64_t* index, int64_t count, int64_t bytes) noexcept {
    switch (bytes) {
        case 1: return gather_fixed<1>(out, items, index, count);
        case 2: return gather_fixed<2>(out, items, index, count);
        case 4: return gather_fixed<4>(out, items, index, count);
        case 8: return gather_fixed<8>(out, items, index, count);
        case 16: return gather_fixed<16>(out, items, index, count);
        case 32: return gather_fixed<32>(out, items, index, count);
        default: return gather_any(out, items, index, count, bytes);
    }
}

// The same where an index of -1 gives zeros.
inline void gather_padded(char* out, const char* items, const int64_t* index, int64_t count, int64_t bytes) noexcept {
    constexpr int64_t ahead = 16;
    for (int64_t i = 0; i < count; ++i) {
        if (i + ahead < count && index[i + ahead] >= 0) __builtin_prefetch(items + index[i + ahead] * bytes);
        if (index[i] >= 0) std::memcpy(out + i * bytes, items + index[i] * bytes, static_cast<size_t>(bytes));
        else std::memset(out + i * bytes, 0, static_cast<size_t>(bytes));
    }
}

// Every index is in [lowest, items).
inline bool in_range(const int64_t* index, int64_t count, int64_t items, int64_t lowest = 0) noexcept {
    uint64_t largest = 0;  // a value below the lowest is a huge unsigned one
    for (int64_t i = 0; i < count; ++i) {
        const auto value = static_cast<uint64_t>(index[i] - lowest);
        largest = value > largest ? value : largest;
    }
    return count == 0 || largest < static_cast<uint64_t>(items - lowest);
}

inline void narrow(float* out, const double* in, int64_t count) noexcept {
    for (int64_t i = 0; i < count; ++i) out[i] = static_cast<float>(in[i]);
}

}  // namespace recollect
