// The CRC-32 of zip and PNG files (reflected polynomial 0xEDB88320) at the speed of memory, where the processor multiplies
// without carries.
#pragma once
#include <cstddef>
#include <cstdint>

namespace relive {

// Whether this machine has the instruction; without it `crc32` must not be called.
bool has_fast_crc32();

// The checksum of bytes that follow others, whose checksum is `before` (0 where none do).
uint32_t crc32(uint32_t before, const unsigned char* data, size_t bytes);

}  // namespace relive
