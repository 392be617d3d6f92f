// Checksums of rows in memory that outlives the process, and crash-safe rewriting of leaves: after a kill each row has
// either its old or its new values.
//
// A row has three checksums: of its observation, of its rewritable leaves, and of everything else.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

#include "ring.hpp"

namespace relive {

// Mix a word into a state. The result is one-to-one in both arguments, so a change of one word always changes it.
// Without the rotation, changes of the highest bits of two words would cancel.
inline uint64_t mix(uint64_t state, uint64_t word) {
    const uint64_t product = (state ^ word) * 0x9E3779B97F4A7C15u;
    return (product << 29) | (product >> 35);
}

inline uint64_t word_at(const char* data, int64_t bytes) {
    uint64_t word = 0;
    std::memcpy(&word, data, bytes);
    return word;
}

// Mix bytes into a state. Blocks of at least 128 bytes are mixed in four lanes, whose multiplications do not wait for
// each other; the lanes are then mixed into the state.
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

inline uint64_t compute_observation_checksum(const RingMemory& memory, int64_t flat, int64_t row) {
    uint64_t state = mix(mix(1, static_cast<uint64_t>(row)), memory.ring.first[flat]);
    for (size_t o = 0; o < memory.obs_leaves.size(); ++o) {
        const Leaf& leaf = memory.observation(o);
        state = mix_bytes(state, leaf.at(flat), leaf.bytes);
    }
    return state;
}

inline uint64_t compute_rest_checksum(const RingMemory& memory, int64_t flat, int64_t row) {
    uint64_t state = mix(2, static_cast<uint64_t>(row));
    const std::vector<int>& rewritable = memory.rewritable.leaves;
    for (int l = 0; l < static_cast<int>(memory.leaves.size()); ++l) {
        const Leaf& leaf = memory.leaf(l);
        const bool is_rewritable = std::find(rewritable.begin(), rewritable.end(), l) != rewritable.end();
        if (!leaf.is_observation && !is_rewritable) state = mix_bytes(state, leaf.at(flat), leaf.bytes);
    }
    for (size_t o = 0; o < memory.next_columns.size(); ++o) {
        const int64_t bytes = memory.observation(o).bytes;
        state = mix_bytes(state, memory.next_columns[o] + flat * bytes, bytes);
    }
    return state;
}

inline uint64_t compute_rewritable_checksum(const RingMemory& memory, int64_t flat, int64_t row) {
    uint64_t state = mix(3, static_cast<uint64_t>(row));
    for (const int l : memory.rewritable.leaves)
        state = mix_bytes(state, memory.leaf(l).at(flat), memory.leaf(l).bytes);
    return state;
}

inline void store_rewritable_checksum(const RingMemory& memory, int64_t flat, int64_t row) {
    if (memory.rewritable.checksums) memory.rewritable.checksums[flat] = compute_rewritable_checksum(memory, flat, row);
}

// The function is not inlined, because most rings have no checksums, and its code would slow down writing small rows.
RELIVE_NOINLINE inline void compute_checksums(const RingMemory& memory, int64_t flat, int64_t row, bool of_observation,
                                               bool of_rest) {
    uint64_t* checksums = memory.ring.checksums;
    if (of_observation) checksums[2 * flat] = compute_observation_checksum(memory, flat, row);
    if (of_rest) checksums[2 * flat + 1] = compute_rest_checksum(memory, flat, row);
    if (of_rest) store_rewritable_checksum(memory, flat, row);
}

// Store the checksums of a written row if the ring has checksums. The observation of a pending row already has one.
inline void store_checksums(const RingMemory& memory, int64_t flat, int64_t row, bool of_observation, bool of_rest) {
    if (memory.ring.checksums) compute_checksums(memory, flat, row, of_observation, of_rest);
}

// Recompute the checksums of every row, after rows were written directly.
inline void store_all_checksums(const RingMemory& memory) {
    const Ring& ring = memory.ring;
    for (int64_t flat = 0; flat < ring.num_flat() && ring.checksums; ++flat)
        store_checksums(memory, flat, ring.get_row(flat), true, true);
}

// Set damaged[slot] = 1 if a row in [since[env], until[env]) differs from its checksums, otherwise 0. If a row holds
// only an observation, only the checksum of the observation is compared. Rewritable leaves are not compared (see
// `find_torn_rows`).
inline void find_damaged_rows(const RingMemory& memory, const int64_t* since, const int64_t* until, uint8_t* damaged) {
    const Ring& ring = memory.ring;
    for (int64_t flat = 0; flat < ring.num_flat() && ring.checksums; ++flat) {
        const int64_t row = ring.get_row(flat), env = flat % ring.envs;
        const uint8_t kind = ring.kind[flat];
        damaged[flat] = 0;
        if (kind == kEmpty || row < since[env] || row >= until[env]) continue;
        const bool is_step = kind == kTransition || kind == kHistory;
        damaged[flat] = ring.checksums[2 * flat] != compute_observation_checksum(memory, flat, row) ||
                       (is_step && ring.checksums[2 * flat + 1] != compute_rest_checksum(memory, flat, row));
    }
}

// Set torn[slot] = 1 if the slot holds a transition whose rewritable leaves differ from their checksum, otherwise 0.
inline void find_torn_rows(const RingMemory& memory, uint8_t* torn) {
    const Ring& ring = memory.ring;
    const uint64_t* checksums = memory.rewritable.checksums;
    for (int64_t flat = 0; flat < ring.num_flat(); ++flat)
        torn[flat] = ring.kind[flat] == kTransition && checksums &&
                     checksums[flat] != compute_rewritable_checksum(memory, flat, ring.get_row(flat));
}

// Return the number of bytes of the rewritable leaves of a row.
inline int64_t rewritable_bytes(const RingMemory& memory) {
    int64_t bytes = 0;
    for (const int l : memory.rewritable.leaves) bytes += memory.leaf(l).bytes;
    return bytes;
}

// Keep the compiler from moving stores. The processor needs no fence, because after a kill completed stores are visible
// in program order.
inline void keep_order() { std::atomic_signal_fence(std::memory_order_seq_cst); }

// Complete the rewrite that a killed process left in the journal, if any.
inline void finish_rewriting(RingMemory& memory) {
    int64_t* journal = memory.rewritable.journal;
    if (!journal || *journal < 1 || *journal > memory.ring.num_flat()) return;
    const int64_t flat = *journal - 1;
    const char* entry = reinterpret_cast<const char*>(journal + 1);
    for (const int l : memory.rewritable.leaves) {
        const Leaf& leaf = memory.leaf(l);
        std::memcpy(leaf.at(flat), entry, leaf.bytes);
        entry += leaf.bytes;
    }
    store_rewritable_checksum(memory, flat, memory.ring.get_row(flat));
    keep_order();
    *journal = 0;
}

// Write row i of `values[l]` to slot `slots[i]` of the rewritable leaf l, in order: the last row wins if a slot
// repeats. Negative slots and null values are skipped. With a journal, the new bytes of a row are recorded before they
// are stored.
inline void rewrite_rows(RingMemory& memory, const int64_t* slots, int64_t count,
                         const std::vector<const char*>& values) {
    int64_t* journal = memory.rewritable.journal;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t flat = slots[i];
        if (flat < 0) continue;
        char* entry = journal ? reinterpret_cast<char*>(journal + 1) : nullptr;
        for (size_t l = 0; l < values.size(); ++l) {
            const Leaf& leaf = memory.leaf(memory.rewritable.leaves[l]);
            const char* source = values[l] ? values[l] + i * leaf.bytes : leaf.at(flat);
            char* target = journal ? entry : leaf.at(flat);
            if (target != source) std::memcpy(target, source, leaf.bytes);
            if (journal) entry += leaf.bytes;
        }
        if (!journal) continue;
        keep_order();
        *journal = 1 + flat;
        keep_order();
        finish_rewriting(memory);
    }
}

}
