// Which leaves of a stored row may be written again, and what makes that safe where the memory outlives a process.
#pragma once
#include <cstdint>
#include <vector>

namespace relive {

struct Rewritable {
    std::vector<int> leaves;  // ascending; none of them is an observation

    // Kept only where the memory outlives a process; else null.
    uint64_t* checksums = nullptr;  // [slots, envs] of these leaves of a row, which the row's other checksums leave out
    int64_t* journal = nullptr;     // 1 + the slot that is being written (0: none), then the new bytes of its leaves
};

}  // namespace relive
