// Random draws from a numpy bit generator. The struct is part of numpy's documented C interface.
#pragma once
#include <cstdint>
#include <utility>

namespace relive {

struct BitGenerator {
    void* state;
    uint64_t (*next_uint64)(void*);
    uint32_t (*next_uint32)(void*);
    double (*next_double)(void*);
    uint64_t (*next_raw)(void*);

    // Draw uniformly from [0, bound) without bias: multiply, shift, and reject a few draws (Lemire, 2019).
    uint32_t below(uint32_t bound) const noexcept {
        uint64_t product = static_cast<uint64_t>(next_uint32(state)) * bound;
        if (static_cast<uint32_t>(product) < bound) {
            const uint32_t threshold = (0u - bound) % bound;
            while (static_cast<uint32_t>(product) < threshold)
                product = static_cast<uint64_t>(next_uint32(state)) * bound;
        }
        return static_cast<uint32_t>(product >> 32);
    }

    // Draw uniformly from [0, bound) for any bound. Above 2^32 the bias of a single 64-bit draw is below 2^-32.
    int64_t below_any(int64_t bound) const noexcept {
        if (bound <= int64_t{0xFFFFFFFF}) return below(static_cast<uint32_t>(bound));
        return static_cast<int64_t>(next_uint64(state) % static_cast<uint64_t>(bound));
    }
};

// Fisher–Yates shuffle in place.
inline void shuffle(int64_t* values, int64_t count, const BitGenerator& random) noexcept {
    for (int64_t i = count - 1; i > 0; --i) std::swap(values[i], values[random.below(static_cast<uint32_t>(i + 1))]);
}

}
