// Checksums of the rows of a ring: one of a row's observation, one of its leaves that may be written again, one of
// everything else in the row.
#pragma once
#include <cstdint>

#include "ring_memory.hpp"

namespace relive {

// Store the checksums of a written row, if the ring keeps any. A pending row has that of its observation already.
void compute_checksums(const RingMemory& memory, int64_t flat, int64_t row, bool of_observation, bool of_rest);

inline void store_checksums(const RingMemory& memory, int64_t flat, int64_t row, bool of_observation, bool of_rest) {
    if (memory.ring.checksums) compute_checksums(memory, flat, row, of_observation, of_rest);
}

// The checksum of the leaves of a row that may be written again.
uint64_t checksum_of_rewritable(const RingMemory& memory, int64_t flat, int64_t row);

inline void store_rewritable_checksum(const RingMemory& memory, int64_t flat, int64_t row) {
    if (memory.rewritable.checksums) memory.rewritable.checksums[flat] = checksum_of_rewritable(memory, flat, row);
}

// Store the checksums of every row as it is, after rows were written directly.
void store_all_checksums(const RingMemory& memory);

// broken[slot] = 1 if a row from `since[env]` on and before `until[env]` differs from its checksums. Of a row that holds
// only an observation, only that is compared; leaves that may be written again are not (see `find_torn_rows`).
void find_broken_rows(const RingMemory& memory, const int64_t* since, const int64_t* until, uint8_t* broken);

}  // namespace relive
