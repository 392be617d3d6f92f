// Rows of many environments in one memory: each environment's column is a ring with its own head.
//
// Rows are numbered for ever; row r of environment e is at slot r mod S of its column. A transition's next observation is
// the observation of the row after it, so that every observation is stored once. The kind of a slot says what it holds.
// A flat slot is slot · envs + env.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

#include "ring_state.hpp"

namespace relive {

enum Kind : uint8_t {
    kEmpty = 0,       // nothing, or a row that has expired
    kTransition = 1,  // may be drawn; the row after it holds its next observation
    kFinal = 2,       // only an observation: where an episode ended or was cut
    kPending = 3,     // only an observation: the newest one, waiting for the step that starts there
    kHistory = 4,     // a transition too old to be drawn, kept for the frame stacks of younger ones
};

// Numbers of rows count modulo 2^64, and every number has a slot: a head that was not written by this core leads to a
// wrong row, never out of the memory.
constexpr int64_t plus(int64_t a, int64_t b) { return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b)); }
constexpr int64_t minus(int64_t a, int64_t b) { return static_cast<int64_t>(static_cast<uint64_t>(a) - static_cast<uint64_t>(b)); }
constexpr int64_t times(int64_t a, int64_t b) { return static_cast<int64_t>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b)); }

// The remainder from 0 to divisor - 1.
constexpr int64_t modulo(int64_t number, int64_t divisor) {
    const int64_t rest = number % divisor;
    return rest < 0 ? rest + divisor : rest;
}

// The slots whose kind the last write changed to or from "transition", for samplers that keep a number per slot.
struct Touched {
    std::vector<int64_t> slots;
    const uint8_t* kind;
};

struct Ring : RingState {
    int64_t slots, envs;
    int64_t alive;    // how many of the newest rows may be drawn, the pending one counted
    bool keeps_next;  // next observations are stored beside their rows; there is no pending row
    bool next_step;   // after an end the following row only resets the environment

    int64_t at(int64_t row, int64_t env) const { return modulo(row, slots) * envs + env; }
    int64_t newest(int64_t env) const { return minus(head[env], open[env] ? 0 : 1); }

    // The row that a slot holds: the one of the newest S rows that falls on it.
    int64_t row_of(int64_t flat) const {
        const int64_t slot = flat / envs, env = flat % envs, top = newest(env);
        return minus(top, modulo(minus(top, slot), slots));
    }

    int64_t id_of(int64_t flat) const { return plus(times(row_of(flat), envs), flat % envs); }

    // The ids of many slots; a single environment needs no division for each.
    void ids_of(const int64_t* flat, int64_t count, int64_t* out) const {
        if (envs != 1) {
            for (int64_t i = 0; i < count; ++i) out[i] = id_of(flat[i]);
            return;
        }
        const int64_t top = newest(0), at = modulo(top, slots);
        for (int64_t i = 0; i < count; ++i) out[i] = plus(top, flat[i] - at - (flat[i] > at ? slots : 0));
    }

    int64_t num_flat() const { return slots * envs; }

    int64_t after(int64_t flat) const {
        const int64_t next = flat + envs;
        return next < slots * envs ? next : next - slots * envs;
    }

    int64_t before(int64_t flat) const {
        const int64_t previous = flat - envs;
        return previous >= 0 ? previous : previous + slots * envs;
    }

    // A process may die between any two of its stores, and other processes go on with the memory: the journal says which
    // step was not complete. Only the compiler has to be kept from moving stores across it.
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

}  // namespace relive
