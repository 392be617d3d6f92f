// Checksums of rows that outlive their process: they show whether the bytes that are read are those that were written.
#pragma once
#include <cstdint>
#include <cstring>

namespace relive {

// One-to-one in both arguments, so that a change of a single word always changes the result. The rotation brings high bits
// down; without it two changes of high bits would cancel each other.
inline uint64_t mix(uint64_t state, uint64_t word) {
    const uint64_t product = (state ^ word) * 0x9E3779B97F4A7C15u;
    return (product << 29) | (product >> 35);
}

inline uint64_t word_at(const char* data, int64_t bytes) {
    uint64_t word = 0;
    std::memcpy(&word, data, static_cast<size_t>(bytes));
    return word;
}

// Mix all bytes in; 128 or more of them in four lanes, which a processor works on at once.
inline uint64_t mix_bytes(uint64_t state, const char* data, int64_t bytes) {
    int64_t i = 0;
    if (bytes >= 128) {
        uint64_t lanes[4] = {state, state + 1, state + 2, state + 3};
        for (; i + 32 <= bytes; i += 32)
            for (int lane = 0; lane < 4; ++lane) {
                uint64_t word;
                std::memcpy(&word, data + i + 8 * lane, 8);
                lanes[lane] = mix(lanes[lane], word);
            }
        for (const uint64_t lane : lanes) state = mix(state, lane);
    }
    for (; i + 8 <= bytes; i += 8) state = mix(state, word_at(data + i, 8));
    return i < bytes ? mix(state, word_at(data + i, bytes - i)) : state;
}

}  // namespace relive
