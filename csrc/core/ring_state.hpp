// The arrays that say what a ring holds. They live in the caller's memory: on the heap, shared, or in files.
#pragma once
#include <cstdint>

#include "array_view.hpp"

namespace relive {

enum class Extent { kPerSlot, kPerEnv };  // [slots, envs] or [envs]

// The state of a ring, field by field in the order that Python sees it: name, C++ type, dtype, extent. The struct, the
// names in Python and the checks of the arrays are all made from this list.
#define RELIVE_RING_STATE(FIELD)                                                                        \
    FIELD(kind, uint8_t, kUInt8, kPerSlot)     /* what the slot holds: a `Kind` */                      \
    FIELD(first, uint8_t, kBool, kPerSlot)     /* this observation starts an episode */                 \
    FIELD(head, int64_t, kInt64, kPerEnv)      /* the row that is written next */                       \
    FIELD(open, uint8_t, kBool, kPerEnv)       /* the head row's observation is stored already */       \
    FIELD(resetting, uint8_t, kBool, kPerEnv)  /* the next step only resets the environment */          \
    FIELD(count, int64_t, kInt64, kPerEnv)     /* rows that may be drawn */                             \
    FIELD(floor, int64_t, kInt64, kPerEnv)     /* the first row since the last clear */

struct RingState {
#define RELIVE_DECLARE(name, type, dtype, extent) type* name = nullptr;
    RELIVE_RING_STATE(RELIVE_DECLARE)
#undef RELIVE_DECLARE

    // Kept only where the memory outlives a process; else null.
    int64_t* journal = nullptr;  // [envs] where an unfinished step began: 1 + 2 · head + open; 0: no unfinished step
    uint64_t* checksums = nullptr;  // [slots, envs, 2] of a row's observation, and of everything else in the row
};

}  // namespace relive
