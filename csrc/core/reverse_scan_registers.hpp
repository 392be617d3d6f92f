// Vector registers of the reverse scan: values, conditions and flags of neighbouring columns.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX2__) || defined(__SSE2__)
#include <immintrin.h>
#endif

#include "reverse_scan.hpp"

// The instruction set that this translation unit is compiled for.
#ifndef RELIVE_SCAN_ISA
#define RELIVE_SCAN_ISA baseline
#endif

// g++ and clang have vector types; elsewhere (or with RELIVE_SCALAR) registers hold one number.
#if defined(__GNUC__) && !defined(RELIVE_SCALAR)
#define RELIVE_VECTORS
#endif

// The parts of a step must merge into one loop body: compilers judge them too big to inline and lose the registers.
#if defined(__GNUC__)
#define RELIVE_INLINE inline __attribute__((always_inline))
#else
#define RELIVE_INLINE __forceinline
#endif

namespace relive::scan::RELIVE_SCAN_ISA {

// A register of kBytes: values, conditions of the same width (so that `condition ? a : b` selects lane by lane), and the
// flags of as many columns as one integer. A register of one value is a plain number.
template <class T, int kBytes>
struct Register;

#define RELIVE_REGISTER(T, BYTES, VALUES, CONDITIONS, FLAGS)     \
    template <>                                                     \
    struct Register<T, BYTES> {                                     \
        using Number = T;                                           \
        using Values = VALUES;                                      \
        using Conditions = CONDITIONS;                              \
        using Flags = FLAGS;                                        \
        static constexpr int kLanes = BYTES / int{sizeof(T)};       \
        static RELIVE_INLINE Conditions conditions(Flags flags); \
    };                                                              \
    RELIVE_INLINE CONDITIONS Register<T, BYTES>::conditions(FLAGS flags)

RELIVE_REGISTER(float, 4, float, int32_t, uint8_t) { return flags != 0; }
RELIVE_REGISTER(double, 8, double, int64_t, uint8_t) { return flags != 0; }

#if defined(RELIVE_VECTORS)
typedef float Floats16 __attribute__((vector_size(16)));
typedef double Doubles16 __attribute__((vector_size(16)));
typedef int32_t Words16 __attribute__((vector_size(16)));
typedef int64_t LongWords16 __attribute__((vector_size(16)));

// Flags to lanes. Written out for x86: g++ 12 widens a vector of bytes one element at a time.
#if defined(__SSE2__)
RELIVE_INLINE Words16 widen(uint32_t flags) {
    const __m128i zero = _mm_setzero_si128();
    const __m128i pairs = _mm_unpacklo_epi8(_mm_cvtsi32_si128(static_cast<int32_t>(flags)), zero);
    return (Words16)_mm_unpacklo_epi16(pairs, zero);
}
RELIVE_INLINE LongWords16 widen(uint16_t flags) {
    return (LongWords16)_mm_unpacklo_epi32((__m128i)widen(uint32_t{flags}), _mm_setzero_si128());
}
#else
RELIVE_INLINE Words16 widen(uint32_t flags) {
    typedef uint8_t Bytes __attribute__((vector_size(4)));
    Bytes bytes;
    std::memcpy(&bytes, &flags, sizeof(bytes));
    return __builtin_convertvector(bytes, Words16);
}
RELIVE_INLINE LongWords16 widen(uint16_t flags) {
    typedef uint8_t Bytes __attribute__((vector_size(2)));
    Bytes bytes;
    std::memcpy(&bytes, &flags, sizeof(bytes));
    return __builtin_convertvector(bytes, LongWords16);
}
#endif
RELIVE_REGISTER(float, 16, Floats16, Words16, uint32_t) { return widen(flags) != 0; }
RELIVE_REGISTER(double, 16, Doubles16, LongWords16, uint16_t) { return widen(flags) != 0; }
#endif

#if defined(__AVX2__) && defined(RELIVE_VECTORS)
typedef float Floats32 __attribute__((vector_size(32)));
typedef double Doubles32 __attribute__((vector_size(32)));
typedef int32_t Words32 __attribute__((vector_size(32)));
typedef int64_t LongWords32 __attribute__((vector_size(32)));

RELIVE_REGISTER(float, 32, Floats32, Words32, uint64_t) {
    return (Words32)_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(flags))) != 0;
}
RELIVE_REGISTER(double, 32, Doubles32, LongWords32, uint32_t) {
    return (LongWords32)_mm256_cvtepi8_epi64(_mm_cvtsi32_si128(static_cast<int32_t>(flags))) != 0;
}
#endif
#undef RELIVE_REGISTER

#if defined(__AVX2__) && defined(RELIVE_VECTORS)
template <class T>
using Widest = Register<T, 32>;
#elif defined(RELIVE_VECTORS)
template <class T>
using Widest = Register<T, 16>;
#else
template <class T>
using Widest = Register<T, sizeof(T)>;
#endif

template <class R>
RELIVE_INLINE typename R::Values fill(typename R::Number x) {
    return typename R::Values{} + x;
}

RELIVE_INLINE void prefetch_to_write(uintptr_t address) {
#if defined(__GNUC__)
    __builtin_prefetch(reinterpret_cast<const void*>(address), 1);
#else
    static_cast<void>(address);
#endif
}

}  // namespace relive::scan::RELIVE_SCAN_ISA
