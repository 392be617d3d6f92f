// Moving rows: one step into every column at once, and many items out of every column at once.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#define RELIVE_STREAMS 1
#endif
#if defined(__GNUC__) || defined(__clang__)
#define RELIVE_PREFETCH(address) __builtin_prefetch(address)
#else
#define RELIVE_PREFETCH(address) static_cast<void>(address)
#endif

namespace relive {

// A copy past the caches: what is larger than they are would only push everything else out of them.
inline void copy_block(char* out, const char* in, int64_t bytes) noexcept {
#ifdef RELIVE_STREAMS
    if (bytes >= (1 << 18) && reinterpret_cast<uintptr_t>(out) % 16 == 0) {
        int64_t i = 0;
        for (; i + 64 <= bytes; i += 64)
            for (int64_t part = 0; part < 64; part += 16)
                _mm_stream_si128(reinterpret_cast<__m128i*>(out + i + part),
                                 _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i + part)));
        _mm_sfence();
        out += i;
        in += i;
        bytes -= i;
    }
#endif
    std::memcpy(out, in, static_cast<size_t>(bytes));
}

// A row of 16 bytes to a few hundred: whole words, and a last one that overlaps. A call of memcpy costs more.
inline void copy_row(char* out, const char* in, int64_t bytes) noexcept {
    for (int64_t i = 0; i + 16 <= bytes; i += 16) std::memcpy(out + i, in + i, 16);
    std::memcpy(out + bytes - 16, in + bytes - 16, 16);
}

constexpr int64_t kAhead = 24;         // rows that are fetched before they are needed
constexpr int64_t kNear = 1 << 22;     // memory of this size stays in the cache: nothing to fetch
constexpr int64_t kShortRow = 96;       // bytes; longer ones are worth the call

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
    const int64_t lines = bytes < 1024 ? bytes : 1024;  // beyond that the hardware has seen the stream
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

// The same where an index of -1 gives zeros. Rows that follow each other, as the steps of a replayed sequence do, are
// copied at once; the steps of a rollout's sequence lie apart. `Bytes` is the size of an item, 0 if only known here.
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
        const auto value = static_cast<uint64_t>(index[i] - lowest);
        largest = value > largest ? value : largest;
    }
    return count == 0 || largest < static_cast<uint64_t>(items - lowest);
}

// Whether all of these bytes are bools. Whoever makes an array of bools of bytes may leave others there.
inline bool are_flags(const char* bytes, int64_t count) noexcept {
    unsigned char all = 0;
    for (int64_t i = 0; i < count; ++i) all = static_cast<unsigned char>(all | bytes[i]);
    return all <= 1;
}

// Bytes as bools: what is not 0 is true.
inline void as_flags(char* out, const char* in, int64_t count) noexcept {
    for (int64_t i = 0; i < count; ++i) out[i] = in[i] != 0;
}

inline void narrow(float* out, const double* in, int64_t count) noexcept {
    for (int64_t i = 0; i < count; ++i) out[i] = static_cast<float>(in[i]);
}

}  // namespace relive
