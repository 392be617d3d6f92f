// Arrays in host memory: non-owning views, copies, casts, and gathering items by index.
#pragma once
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#ifdef __GNUC__
#define RELIVE_PREFETCH(address) __builtin_prefetch(address)
#define RELIVE_NOINLINE __attribute__((noinline))
#else
#define RELIVE_PREFETCH(address) static_cast<void>(address)
#define RELIVE_NOINLINE
#endif

namespace relive {

// Return the size of a container as a signed number, like `std::ssize` of C++20.
template <class Container>
constexpr int64_t ssize(const Container& container) {
    return static_cast<int64_t>(container.size());
}

constexpr int kMaxDims = 16;

// Codes of number types, with the values of DLPack.
enum TypeCode : uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kComplex = 5, kBoolean = 6 };

struct DataType {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;

    constexpr int64_t bytes() const { return bits / 8; }
};

constexpr bool operator==(DataType a, DataType b) { return a.code == b.code && a.bits == b.bits; }
constexpr bool operator!=(DataType a, DataType b) { return !(a == b); }

constexpr DataType kFloat32{kFloat, 32, 1}, kFloat64{kFloat, 64, 1}, kInt64{kInt, 64, 1}, kUInt8{kUInt, 8, 1},
    kBool{kBoolean, 8, 1};

struct ArrayView {
    char* data = nullptr;
    DataType dtype{};
    bool is_writable = true;
    int ndim = 0;
    int64_t shape[kMaxDims];
    int64_t strides[kMaxDims];  // in elements

    template <class T>
    T* as() const {
        return reinterpret_cast<T*>(data);
    }

    int64_t itemsize() const { return dtype.bytes(); }

    // The product is unsigned, because the sizes of an empty array may overflow when multiplied.
    int64_t elements() const {
        uint64_t product = 1;
        for (int i = 0; i < ndim; ++i) product *= static_cast<uint64_t>(shape[i]);
        return static_cast<int64_t>(product);
    }

    // Axes of length one may have any stride.
    // An array without elements is contiguous: its strides, which torch and numpy choose differently, are never used.
    bool contiguous() const {
        uint64_t expected = 1;
        for (int i = 0; i < ndim; ++i)
            if (shape[i] == 0) return true;
        for (int i = ndim - 1; i >= 0; --i) {
            if (shape[i] != 1 && static_cast<uint64_t>(strides[i]) != expected) return false;
            expected *= static_cast<uint64_t>(shape[i]);
        }
        return true;
    }

    // Whether the shape is `lead` axes of any length followed by `sizes`. For few axes a loop costs less than memcmp.
    bool ends_with(int lead, int count, const int64_t* sizes) const {
        bool same = ndim == lead + count;
        for (int d = 0; same && d < count; ++d) same = shape[lead + d] == sizes[d];
        return same;
    }
};

inline bool same_shape(const ArrayView& a, const ArrayView& b) { return a.ends_with(0, b.ndim, b.shape); }

// Copy a block. Large blocks bypass the caches, which they would flush.
inline void copy_block(char* out, const char* in, int64_t bytes) noexcept {
#ifdef __SSE2__
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
    std::memcpy(out, in, bytes);
}

// Copy a row in words of 16 bytes; the last word overlaps the one before. For rows of 16 to a few hundred bytes this is
// faster than one call of memcpy.
inline void copy_row(char* out, const char* in, int64_t bytes) noexcept {
    for (int64_t i = 0; i + 16 <= bytes; i += 16) std::memcpy(out + i, in + i, 16);
    std::memcpy(out + bytes - 16, in + bytes - 16, 16);
}

// Whether every byte is 0 or 1. A bool array that was written as bytes may hold other values.
inline bool are_flags(const char* bytes, int64_t count) noexcept {
    unsigned char all = 0;
    for (int64_t i = 0; i < count; ++i) all = static_cast<unsigned char>(all | bytes[i]);
    return all <= 1;
}

// Convert bytes to bools: nonzero is true.
inline void as_flags(char* out, const char* in, int64_t count) noexcept {
    for (int64_t i = 0; i < count; ++i) out[i] = in[i] != 0;
}

// Whether a finite number rounds to an infinite float.
inline bool overflows(double x) noexcept { return std::fabs(x) >= 0x1.ffffffp127 && std::fabs(x) <= DBL_MAX; }

// Cast doubles to floats. Returns false if a finite number became infinite.
inline bool narrow(float* out, const double* in, int64_t count) noexcept {
    int64_t i = 0;
    float largest = 0;
#ifdef __SSE2__
    const __m128 positive = _mm_castsi128_ps(_mm_set1_epi32(0x7fffffff));
    // Two maxima halve the chain of dependent instructions.
    __m128 maxima[2] = {_mm_setzero_ps(), _mm_setzero_ps()};
    for (; i + 8 <= count; i += 8)
        for (int half = 0; half < 2; ++half) {
            const double* from = in + i + 4 * half;
            const __m128 four = _mm_movelh_ps(_mm_cvtpd_ps(_mm_loadu_pd(from)), _mm_cvtpd_ps(_mm_loadu_pd(from + 2)));
            _mm_storeu_ps(out + i + 4 * half, four);
            // The new values are the first operand, because _mm_max_ps ignores a NaN there.
            maxima[half] = _mm_max_ps(_mm_and_ps(four, positive), maxima[half]);
        }
    float lanes[4];
    _mm_storeu_ps(lanes, _mm_max_ps(maxima[0], maxima[1]));
    for (const float lane : lanes) largest = lane > largest ? lane : largest;
#endif
    for (; i < count; ++i) {
        out[i] = static_cast<float>(in[i]);
        largest = std::fabs(out[i]) > largest ? std::fabs(out[i]) : largest;
    }
    if (largest <= FLT_MAX) return true;
    for (i = 0; i < count; ++i)
        if (overflows(in[i])) return false;
    return true;
}

// Whether every value is finite. x - x is 0 only for finite x.
template <class T>
bool all_finite(const T* in, int64_t count) noexcept {
    int bad = 0;
    for (int64_t i = 0; i < count; ++i) bad |= !(in[i] - in[i] == 0);
    return !bad;
}

// Call `work` with the size as a compile-time constant if it is a common one, else with 0. Copies of a constant size
// compile to one or two instructions.
template <class Work>
inline void with_size(int64_t bytes, Work work) {
    switch (bytes) {
        case 1: return work(std::integral_constant<int64_t, 1>{});
        case 2: return work(std::integral_constant<int64_t, 2>{});
        case 4: return work(std::integral_constant<int64_t, 4>{});
        case 8: return work(std::integral_constant<int64_t, 8>{});
        case 16: return work(std::integral_constant<int64_t, 16>{});
        case 32: return work(std::integral_constant<int64_t, 32>{});
        default: return work(std::integral_constant<int64_t, 0>{});
    }
}

// Number of items between a prefetch and the copy of the prefetched item.
constexpr int64_t kAhead = 24;
// Arrays of at most this many bytes stay in the cache and need no prefetch.
constexpr int64_t kNear = 1 << 22;
// Rows of at most this many bytes are copied by `copy_row`, longer rows by memcpy.
constexpr int64_t kShortRow = 96;

// Prefetch the first 1024 bytes of an item; the hardware prefetcher continues from there.
inline void prefetch_item(const char* item, int64_t bytes) noexcept {
    for (int64_t offset = 0; offset < bytes && offset < 1024; offset += 64) RELIVE_PREFETCH(item + offset);
}

// Set out[i] = items[index[i]] for every i. There are `total` items of `bytes` bytes, and the caller has checked the
// index.
inline void gather(char* out, const char* items, const int64_t* index, int64_t count, int64_t bytes,
                   int64_t total) noexcept {
    // Number of copies that also prefetch a later item.
    const int64_t ahead = total * bytes <= kNear ? 0 : count - kAhead;
    with_size(bytes, [=](auto size) {
        constexpr int64_t kBytes = decltype(size)::value;
        int64_t i = 0;
        if constexpr (kBytes > 0) {
            for (; i < ahead; ++i) {
                RELIVE_PREFETCH(items + index[i + kAhead] * kBytes);
                std::memcpy(out + i * kBytes, items + index[i] * kBytes, kBytes);
            }
            for (; i < count; ++i) std::memcpy(out + i * kBytes, items + index[i] * kBytes, kBytes);
        } else {
            for (; i < count; ++i) {
                if (i < ahead) {
                    prefetch_item(items + index[i + kAhead] * bytes, bytes);
                    RELIVE_PREFETCH(items + index[i + kAhead] * bytes + bytes - 1);
                }
                const char* item = items + index[i] * bytes;
                if (bytes >= 16 && bytes <= kShortRow) copy_row(out + i * bytes, item, bytes);
                else std::memcpy(out + i * bytes, item, bytes);
            }
        }
    });
}

// Gather items like `gather`, with zeros for an index of -1. Consecutive items, such as the steps of a sequence, are
// copied at once.
inline void gather_padded(char* out, const char* items, const int64_t* index, int64_t count, int64_t bytes,
                          int64_t total) noexcept {
    const int64_t ahead = total * bytes <= kNear ? 0 : count - kAhead;
    with_size(bytes, [=](auto size) {
        const int64_t each = size ? size : bytes;
        for (int64_t i = 0, stop = 0; i < count; i = stop) {
            stop = i + 1;
            if (i < ahead && index[i + kAhead] >= 0) RELIVE_PREFETCH(items + index[i + kAhead] * each);
            if (index[i] < 0) {
                std::memset(out + i * each, 0, each);
                continue;
            }
            while (stop < count && index[stop] == index[stop - 1] + 1) ++stop;
            if (stop == i + 1) std::memcpy(out + i * each, items + index[i] * each, each);
            else std::memcpy(out + i * each, items + index[i] * each, (stop - i) * each);
        }
    });
}

// Whether every index is in [lowest, items).
inline bool in_range(const int64_t* index, int64_t count, int64_t items, int64_t lowest = 0) noexcept {
    // Indices below `lowest` become huge unsigned numbers, so that one comparison finds them too.
    uint64_t largest = 0;
    for (int64_t i = 0; i < count; ++i) {
        const uint64_t value = static_cast<uint64_t>(index[i]) - static_cast<uint64_t>(lowest);
        largest = value > largest ? value : largest;
    }
    return count == 0 || largest < static_cast<uint64_t>(items - lowest);
}

}
