// An array in host memory: a pointer with dtype, shape and strides. It owns nothing.
#pragma once
#include <cstdint>
#include <cstring>

namespace relive {

constexpr int kMaxDims = 16;

// The numbers are DLPack's.
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

    // Unsigned: the sizes of an array without elements may multiply to any number.
    int64_t elements() const {
        uint64_t product = 1;
        for (int i = 0; i < ndim; ++i) product *= static_cast<uint64_t>(shape[i]);
        return static_cast<int64_t>(product);
    }

    // Axes of length one may have any stride.
    bool contiguous() const {
        uint64_t expected = 1;
        for (int i = ndim - 1; i >= 0; --i) {
            if (shape[i] != 1 && static_cast<uint64_t>(strides[i]) != expected) return false;
            expected *= static_cast<uint64_t>(shape[i]);
        }
        return true;
    }
};

inline bool same_shape(const ArrayView& a, const ArrayView& b) {
    return a.ndim == b.ndim && std::memcmp(a.shape, b.shape, sizeof(int64_t) * static_cast<size_t>(a.ndim)) == 0;
}

}  // namespace relive
