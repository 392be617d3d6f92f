// Frame stacks: an observation is given as k stacked frames and stored as single frames.
#pragma once
#include <cstdint>
#include <cstring>

#include "ring.hpp"

namespace relive {

constexpr int kMostFrames = 64;

// The stack is [outer, k, inner], a frame [outer, inner].
struct Frames {
    int64_t k = 1;
    int64_t outer = 1;
    int64_t inner = 0;  // bytes
    bool repeat = true;  // the padding before an episode's first frame is that frame, else zeros

    int64_t frame_bytes() const { return outer * inner; }
    int64_t stack_bytes() const { return outer * k * inner; }

    void take(char* frame, const char* stack, int64_t j) const noexcept {
        if (inner == 1 && k == 4) spread<1>(frame, 1, stack + j, 4);  // with shuffles
        else spread(frame, inner, stack + j * inner, k * inner);
    }

    // `follows` if a pixel's four frames are the bytes of one word; without a branch, so that it is vectorised.
    bool follows_by_four(const char* next, const char* stack) const noexcept {
        char differs = 0;
        for (int64_t o = 0; o < 4 * outer; o += 4)
            differs = static_cast<char>(differs | (next[o] ^ stack[o + 1]) | (next[o + 1] ^ stack[o + 2]) |
                                        (next[o + 2] ^ stack[o + 3]));
        return differs == 0;
    }

    // Build a stack from its k frames, oldest first (null: zeros).
    void put_all(char* stack, const char* const* frames) const noexcept {
        if (inner == 1 && k == 4 && frames[0] && frames[1] && frames[2])
            return interleave(stack, frames[0], frames[1], frames[2], frames[3]);
        for (int64_t j = 0; j < k; ++j) {
            if (frames[j]) put(stack, frames[j], j);
            else for (int64_t o = 0; o < outer; ++o) std::memset(stack + (o * k + j) * inner, 0, static_cast<size_t>(inner));
        }
    }

    void put(char* stack, const char* frame, int64_t j) const noexcept {
        spread(stack + j * inner, k * inner, frame, inner);
    }

    // Copy the parts of a frame, which lie `step` bytes apart. A size known at compile time needs no call of memcpy.
    template <int64_t Inner>
    void spread(char* __restrict out, int64_t out_step, const char* __restrict in, int64_t in_step) const noexcept {
        const auto bytes = static_cast<size_t>(Inner ? Inner : inner);
        for (int64_t o = 0; o < outer; ++o) std::memcpy(out + o * out_step, in + o * in_step, bytes);
    }

    void spread(char* out, int64_t out_step, const char* in, int64_t in_step) const noexcept {
        switch (inner) {
            case 1: return spread<1>(out, out_step, in, in_step);
            case 4: return spread<4>(out, out_step, in, in_step);
            default: return spread<0>(out, out_step, in, in_step);
        }
    }

    // Four bytes per pixel, the commonest stack; written so that compilers use shuffles.
    void interleave(char* __restrict stack, const char* __restrict a, const char* __restrict b, const char* __restrict c,
                    const char* __restrict d) const noexcept {
        for (int64_t o = 0; o < outer; ++o) {
            stack[4 * o] = a[o];
            stack[4 * o + 1] = b[o];
            stack[4 * o + 2] = c[o];
            stack[4 * o + 3] = d[o];
        }
    }

    // Whether frame j of the stack is `frame` (null: zeros).
    bool holds(const char* stack, const char* frame, int64_t j) const noexcept {
        if (inner == 1) {
            unsigned char differs = 0;
            for (int64_t o = 0; o < outer; ++o)
                differs = static_cast<unsigned char>(differs | (stack[o * k + j] ^ (frame ? frame[o] : 0)));
            return differs == 0;
        }
        for (int64_t o = 0; o < outer; ++o) {
            const char* part = stack + (o * k + j) * inner;
            if (frame) {
                if (std::memcmp(part, frame + o * inner, static_cast<size_t>(inner)) != 0) return false;
            } else {
                for (int64_t b = 0; b < inner; ++b)
                    if (part[b] != 0) return false;
            }
        }
        return true;
    }

    // Whether two stacks are a step apart: all but the newest frame of `next` are the newer frames of `stack`.
    bool follows(const char* next, const char* stack) const noexcept {
        if (inner == 1 && k == 4) return follows_by_four(next, stack);
        for (int64_t o = 0; o < outer; ++o)
            if (std::memcmp(next + o * k * inner, stack + (o * k + 1) * inner, static_cast<size_t>((k - 1) * inner)) != 0)
                return false;
        return true;
    }
};

// The frames of the stack at a slot, oldest first; null for padding with zeros.
inline void frames_at(const Ring& ring, const char* column, const Frames& frames, int64_t flat, const char** out) {
    out[frames.k - 1] = column + flat * frames.frame_bytes();
    bool started = false;
    for (int64_t j = frames.k - 2; j >= 0; --j) {
        started = started || ring.first[flat];
        if (!started) flat = ring.before(flat);
        out[j] = started && !frames.repeat ? nullptr : column + flat * frames.frame_bytes();
    }
}

}  // namespace relive
