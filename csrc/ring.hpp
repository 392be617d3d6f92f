// Rows of many environments in one memory: each environment's column is a ring with its own head.
//
// Rows are numbered for ever; row r of environment e is at slot r mod S of its column. A transition's next observation is
// the observation of the row after it, so that every observation is stored once. What a slot holds is its kind.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

namespace relive {

enum Kind : uint8_t {
    kEmpty = 0,       // nothing, or a row that has expired
    kTransition = 1,  // may be drawn; the row after it holds its next observation
    kFinal = 2,       // only an observation: where an episode ended or was cut
    kPending = 3,     // only an observation: the newest one, waiting for the step that starts there
    kHistory = 4,     // a transition too old to be drawn, kept for the frame stacks of younger ones
};

// Numbers of rows count modulo 2^64, and every one of them has a slot: what else than this core has written the heads
// leads to a wrong row, never out of the memory.
constexpr int64_t plus(int64_t a, int64_t b) { return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b)); }
constexpr int64_t minus(int64_t a, int64_t b) { return static_cast<int64_t>(static_cast<uint64_t>(a) - static_cast<uint64_t>(b)); }
constexpr int64_t times(int64_t a, int64_t b) { return static_cast<int64_t>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b)); }

// The remainder from 0 to divisor - 1.
constexpr int64_t modulo(int64_t number, int64_t divisor) {
    const int64_t rest = number % divisor;
    return rest < 0 ? rest + divisor : rest;
}

// The slots whose kind the last write changed to or from "transition", for samplers that keep something a slot.
struct Touched {
    std::vector<int64_t> slots;
    const uint8_t* kind;
};

struct Ring {
    int64_t slots, envs;
    int64_t alive;    // how many of the newest rows may be drawn, the pending one counted
    bool keeps_next;  // next observations are stored beside their rows; there is no pending row
    bool next_step;   // after an end the following row only resets
    uint8_t* kind;    // [slots, envs]
    uint8_t* first;   // [slots, envs] this observation starts an episode
    int64_t* head;    // [envs] the row that is written next
    uint8_t* open;    // [envs] the head row's observation is there already
    uint8_t* resetting;  // [envs]
    int64_t* count;      // [envs] rows that may be drawn
    int64_t* floor;      // [envs] the first row since the last clear
    int64_t* journal;    // [envs] where a step that is being written began: 1 + 2 · head + open, else 0; null: not kept

    int64_t at(int64_t row, int64_t env) const { return modulo(row, slots) * envs + env; }
    int64_t newest(int64_t env) const { return minus(head[env], open[env] ? 0 : 1); }

    // The row that a slot holds: the one of the newest S rows that falls on it.
    int64_t row_of(int64_t flat) const {
        const int64_t slot = flat / envs, env = flat % envs, top = newest(env);
        return minus(top, modulo(minus(top, slot), slots));
    }

    int64_t id_of(int64_t flat) const { return plus(times(row_of(flat), envs), flat % envs); }

    // The ids of many slots; of one environment without a division for each.
    void ids_of(const int64_t* flat, int64_t count, int64_t* out) const {
        if (envs != 1) {
            for (int64_t i = 0; i < count; ++i) out[i] = id_of(flat[i]);
            return;
        }
        const int64_t top = newest(0), at = modulo(top, slots);
        for (int64_t i = 0; i < count; ++i) out[i] = plus(top, flat[i] - at - (flat[i] > at ? slots : 0));
    }

    int64_t after(int64_t flat) const {
        const int64_t next = flat + envs;
        return next < slots * envs ? next : next - slots * envs;
    }

    int64_t before(int64_t flat) const {
        const int64_t previous = flat - envs;
        return previous >= 0 ? previous : previous + slots * envs;
    }

    // A process may die between any two of its stores, and others go on with the memory: the journal says which step was
    // not complete. Only the compiler has to be kept from moving stores across it.
    void begin(int64_t env) {
        if (!journal) return;
        journal[env] = plus(1 + open[env], times(2, head[env]));
        std::atomic_signal_fence(std::memory_order_seq_cst);
    }

    void complete(int64_t env) {
        if (!journal) return;
        std::atomic_signal_fence(std::memory_order_seq_cst);
        journal[env] = 0;
    }

    // Make `row` the newest of its environment: the row that falls out of the window can no longer be drawn.
    void advance(int64_t row, int64_t env, std::vector<int64_t>* touched) {
        const int64_t old = minus(row, alive);
        if (old >= 0) {
            const int64_t flat = at(old, env);
            if (kind[flat] == kTransition) {
                kind[flat] = slots > alive ? kHistory : kEmpty;
                count[env] = minus(count[env], 1);
                if (touched) touched->push_back(flat);
            }
        }
        kind[at(row, env)] = kEmpty;
    }
};

// One leaf of an observation given as a stack of k frames: the stack is [outer, k, inner], a frame [outer, inner].
struct Frames {
    int64_t k = 1;
    int64_t outer = 1;
    int64_t inner = 0;  // bytes
    bool repeat = true;  // what stands before an episode's first frame: that frame, or zeros

    int64_t frame_bytes() const { return outer * inner; }
    int64_t stack_bytes() const { return outer * k * inner; }

    void take(char* frame, const char* stack, int64_t j) const noexcept {
        if (inner == 1 && k == 4) spread<1>(frame, 1, stack + j, 4);  // with shuffles
        else spread(frame, inner, stack + j * inner, k * inner);
    }

    // `follows` where a pixel's four frames are the bytes of one word; no branch, so that it is vectorised.
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

    // Copy the parts of a frame, which lie `step` bytes apart. A size known at compile time is an instruction, not a call.
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

    // Four bytes a pixel, the commonest stack of all; written so that compilers use shuffles.
    void interleave(char* __restrict stack, const char* __restrict a, const char* __restrict b, const char* __restrict c,
                    const char* __restrict d) const noexcept {
        for (int64_t o = 0; o < outer; ++o) {
            stack[4 * o] = a[o];
            stack[4 * o + 1] = b[o];
            stack[4 * o + 2] = c[o];
            stack[4 * o + 3] = d[o];
        }
    }

    // The frame at place j of the stack is `frame` (null: zeros).
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

    // Two stacks of one episode, a step apart: all but the newest frame of `next` are the newer frames of `stack`.
    bool follows(const char* next, const char* stack) const noexcept {
        if (inner == 1 && k == 4) return follows_by_four(next, stack);
        for (int64_t o = 0; o < outer; ++o)
            if (std::memcmp(next + o * k * inner, stack + (o * k + 1) * inner, static_cast<size_t>((k - 1) * inner)) != 0)
                return false;
        return true;
    }
};

// The frames of the stack at a slot, oldest first; null where there was nothing yet and zeros are meant.
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
