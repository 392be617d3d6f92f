// Copies of bytes, and the casts that are made while bytes are copied.
#pragma once
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#define RELIVE_STREAMS 1
#endif

namespace relive {

// Copy past the caches: a block that is larger than the caches would only push everything else out of them.
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

// Copy a row of 16 bytes to a few hundred: whole words, and a last word that overlaps. A call of memcpy costs more.
inline void copy_row(char* out, const char* in, int64_t bytes) noexcept {
    for (int64_t i = 0; i + 16 <= bytes; i += 16) std::memcpy(out + i, in + i, 16);
    std::memcpy(out + bytes - 16, in + bytes - 16, 16);
}

// Whether every byte is 0 or 1. The memory of a bool array may hold other bytes, if it was written as bytes.
inline bool are_flags(const char* bytes, int64_t count) noexcept {
    unsigned char all = 0;
    for (int64_t i = 0; i < count; ++i) all = static_cast<unsigned char>(all | bytes[i]);
    return all <= 1;
}

// Bytes as bools: every byte but 0 is true.
inline void as_flags(char* out, const char* in, int64_t count) noexcept {
    for (int64_t i = 0; i < count; ++i) out[i] = in[i] != 0;
}

// Whether a finite number rounds to an infinite float.
inline bool overflows(double x) noexcept { return std::fabs(x) >= 0x1.ffffffp127 && std::fabs(x) <= DBL_MAX; }

// Cast numbers to floats. False if a finite one became infinite. The largest one is found on the way, which costs nothing.
inline bool narrow(float* out, const double* in, int64_t count) noexcept {
    int64_t i = 0;
    float largest = 0;
#ifdef RELIVE_STREAMS
    const __m128 positive = _mm_castsi128_ps(_mm_set1_epi32(0x7fffffff));
    __m128 most[2] = {_mm_setzero_ps(), _mm_setzero_ps()};  // two, which need not wait for each other
    for (; i + 8 <= count; i += 8)
        for (int half = 0; half < 2; ++half) {
            const double* from = in + i + 4 * half;
            const __m128 four = _mm_movelh_ps(_mm_cvtpd_ps(_mm_loadu_pd(from)), _mm_cvtpd_ps(_mm_loadu_pd(from + 2)));
            _mm_storeu_ps(out + i + 4 * half, four);
            most[half] = _mm_max_ps(_mm_and_ps(four, positive), most[half]);  // NaN leaves it as it is
        }
    float lanes[4];
    _mm_storeu_ps(lanes, _mm_max_ps(most[0], most[1]));
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

// Whether every number is finite: of another one the difference from itself is no number.
template <class T>
bool all_finite(const T* in, int64_t count) noexcept {
    int bad = 0;
    for (int64_t i = 0; i < count; ++i) bad |= !(in[i] - in[i] == 0);
    return !bad;
}

}  // namespace relive
