#include "ring_checksums.hpp"

#include "checksum.hpp"

namespace relive {
namespace {

uint64_t checksum_of_observation(const RingMemory& memory, int64_t flat, int64_t row) {
    uint64_t state = mix(mix(1, static_cast<uint64_t>(row)), memory.ring.first[flat]);
    for (size_t o = 0; o < memory.observed.size(); ++o) {
        const Leaf& leaf = memory.observation(o);
        state = mix_bytes(state, leaf.at(flat), leaf.bytes);
    }
    return state;
}

uint64_t checksum_of_rest(const RingMemory& memory, int64_t flat, int64_t row) {
    uint64_t state = mix(2, static_cast<uint64_t>(row));
    const std::vector<int>&observed = memory.observed, &rewritable = memory.rewritable.leaves;
    size_t next = 0, next_rewritable = 0;
    for (size_t l = 0; l < memory.leaves.size(); ++l) {
        const bool is_observed = next < observed.size() && static_cast<size_t>(observed[next]) == l;
        const bool is_rewritable = next_rewritable < rewritable.size() && static_cast<size_t>(rewritable[next_rewritable]) == l;
        next += is_observed;
        next_rewritable += is_rewritable;
        if (!is_observed && !is_rewritable) state = mix_bytes(state, memory.leaves[l].at(flat), memory.leaves[l].bytes);
    }
    for (size_t o = 0; o < memory.next_columns.size(); ++o) {
        const int64_t bytes = memory.observation(o).bytes;
        state = mix_bytes(state, memory.next_columns[o] + flat * bytes, bytes);
    }
    return state;
}

}  // namespace

uint64_t checksum_of_rewritable(const RingMemory& memory, int64_t flat, int64_t row) {
    uint64_t state = mix(3, static_cast<uint64_t>(row));
    for (const int l : memory.rewritable.leaves) {
        const Leaf& leaf = memory.leaves[static_cast<size_t>(l)];
        state = mix_bytes(state, leaf.at(flat), leaf.bytes);
    }
    return state;
}

void compute_checksums(const RingMemory& memory, int64_t flat, int64_t row, bool of_observation, bool of_rest) {
    uint64_t* checksums = memory.ring.checksums;
    if (of_observation) checksums[2 * flat] = checksum_of_observation(memory, flat, row);
    if (of_rest) checksums[2 * flat + 1] = checksum_of_rest(memory, flat, row);
    if (of_rest) store_rewritable_checksum(memory, flat, row);
}

void store_all_checksums(const RingMemory& memory) {
    const Ring& ring = memory.ring;
    for (int64_t flat = 0; flat < ring.num_flat() && ring.checksums; ++flat)
        compute_checksums(memory, flat, ring.row_of(flat), true, true);
}

void find_broken_rows(const RingMemory& memory, const int64_t* since, const int64_t* until, uint8_t* broken) {
    const Ring& ring = memory.ring;
    for (int64_t flat = 0; flat < ring.num_flat() && ring.checksums; ++flat) {
        const int64_t row = ring.row_of(flat), env = flat % ring.envs;
        const uint8_t kind = ring.kind[flat];
        broken[flat] = 0;
        if (kind == kEmpty || row < since[env] || row >= until[env]) continue;
        const bool is_step = kind == kTransition || kind == kHistory;
        broken[flat] = ring.checksums[2 * flat] != checksum_of_observation(memory, flat, row) ||
                       (is_step && ring.checksums[2 * flat + 1] != checksum_of_rest(memory, flat, row));
    }
}

}  // namespace relive
