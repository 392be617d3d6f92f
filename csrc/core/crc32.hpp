// CRC-32 as in zip and PNG files (reflected polynomial 0xEDB88320), with carry-less multiplication instructions.
#pragma once
#if defined(__x86_64__) && defined(__GNUC__)
#define RELIVE_CRC32
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace relive::crc {

#define RELIVE_TARGET __attribute__((target("sse4.1,pclmul")))

// The polynomial is reflected: the lowest bit is the coefficient of x^31.
constexpr uint32_t kPolynomial = 0xEDB88320u;

// Return x^n modulo the polynomial, reflected and shifted by one, for products of reflected factors.
constexpr int64_t power(int n) {
    // The reflected polynomial x^0 = 1.
    uint32_t remainder = 0x80000000u;
    for (int i = 0; i < n; ++i) remainder = (remainder >> 1) ^ ((remainder & 1) ? kPolynomial : 0);
    return static_cast<int64_t>(remainder) << 1;
}

constexpr int64_t kModulus = (static_cast<int64_t>(kPolynomial) << 1) | 1;

// Return ⌊x^64 / polynomial⌋, reflected: the factor of Barrett reduction.
constexpr int64_t quotient() {
    const uint64_t modulus = 0x104C11DB7u;
    uint64_t remainder = 0, bits = 0;
    for (int i = 64; i >= 0; --i) {
        remainder = (remainder << 1) | (i == 64);
        if (remainder >> 32) {
            remainder ^= modulus;
            bits |= uint64_t{1} << i;
        }
    }
    uint64_t reflected = 0;
    for (int i = 0; i <= 32; ++i) reflected |= ((bits >> i) & 1) << (32 - i);
    return static_cast<int64_t>(reflected);
}

// Shift 128 bits by the distance encoded in `powers` and add `next`.
RELIVE_TARGET inline __m128i fold(__m128i bits, __m128i powers, __m128i next) {
    const __m128i low = _mm_clmulepi64_si128(bits, powers, 0x00), high = _mm_clmulepi64_si128(bits, powers, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

RELIVE_TARGET inline __m128i load(const unsigned char* data) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data));
}

// Reduce 128 bits to their 32-bit remainder.
RELIVE_TARGET inline uint32_t reduce(__m128i bits) {
    const __m128i low_half = _mm_setr_epi32(-1, 0, -1, 0);
    __m128i rest = _mm_clmulepi64_si128(bits, _mm_set_epi64x(power(96), 0), 0x10);
    bits = _mm_xor_si128(_mm_srli_si128(bits, 8), rest);
    rest = _mm_clmulepi64_si128(_mm_and_si128(bits, low_half), _mm_set_epi64x(0, power(64)), 0x00);
    bits = _mm_xor_si128(_mm_srli_si128(bits, 4), rest);
    const __m128i barrett = _mm_set_epi64x(quotient(), kModulus);
    rest = _mm_clmulepi64_si128(_mm_and_si128(bits, low_half), barrett, 0x10);
    rest = _mm_clmulepi64_si128(_mm_and_si128(rest, low_half), barrett, 0x00);
    return static_cast<uint32_t>(_mm_extract_epi32(_mm_xor_si128(bits, rest), 1));
}

constexpr size_t kLane = 16, kLanes = 4, kStride = kLane * kLanes;

// Process at least kStride bytes. Afterwards `data` and `bytes` describe the remainder of less than 16 bytes.
RELIVE_TARGET inline uint32_t crc_lanes(uint32_t state, const unsigned char*& data, size_t& bytes) {
    const __m128i far = _mm_set_epi64x(power(512 - 32), power(512 + 32));
    const __m128i near = _mm_set_epi64x(power(128 - 32), power(128 + 32));
    __m128i lanes[kLanes];
    for (size_t i = 0; i < kLanes; ++i) lanes[i] = load(data + kLane * i);
    lanes[0] = _mm_xor_si128(lanes[0], _mm_cvtsi32_si128(static_cast<int>(state)));
    for (data += kStride, bytes -= kStride; bytes >= kStride; data += kStride, bytes -= kStride)
        for (size_t i = 0; i < kLanes; ++i) lanes[i] = fold(lanes[i], far, load(data + kLane * i));
    __m128i whole = lanes[0];
    for (size_t i = 1; i < kLanes; ++i) whole = fold(whole, near, lanes[i]);
    for (; bytes >= kLane; data += kLane, bytes -= kLane) whole = fold(whole, near, load(data));
    return reduce(whole);
}

// Whether this machine has the instructions that `crc32` needs. If not, `crc32` must not be called.
inline bool has_fast_crc32() { return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1"); }

// Continue a checksum: `previous` is the checksum of the preceding bytes, 0 if there are none.
inline uint32_t crc32(uint32_t previous, const unsigned char* data, size_t bytes) {
    uint32_t state = ~previous;
    if (bytes >= kStride) state = crc_lanes(state, data, bytes);
    for (; bytes; ++data, --bytes) {
        state ^= *data;
        for (int bit = 0; bit < 8; ++bit) state = (state >> 1) ^ ((state & 1) ? kPolynomial : 0);
    }
    return ~state;
}

#undef RELIVE_TARGET

}
#endif
