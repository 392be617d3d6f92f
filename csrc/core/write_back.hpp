// Writes leaves of stored rows again. A process that dies meanwhile leaves each row as it was or as it was to become.
#pragma once
#include <cstdint>
#include <vector>

#include "ring_memory.hpp"

namespace relive {

// The bytes of the rewritable leaves of a row.
int64_t rewritable_bytes(const RingMemory& memory);

// Write row i of `given[l]` to slot i of the rewritable leaf l, in order: of a slot that comes twice, the last row stays.
// A slot below 0 and a null pointer are passed over.
void write_back(RingMemory& memory, const int64_t* slots, int64_t count, const std::vector<const char*>& given);

// Complete the row that a process died writing, if any.
void finish_write_back(RingMemory& memory);

// torn[slot] = 1 if the rewritable leaves of a row that may be drawn differ from their checksum.
void find_torn_rows(const RingMemory& memory, uint8_t* torn);

}  // namespace relive
