// Questions about slots of a ring: which may be drawn, which row they hold, what lies around them.
#pragma once
#include <cstdint>

#include "random.hpp"
#include "ring_memory.hpp"

namespace relive {

// Draw `count` slots of transitions uniformly with replacement. False if transitions are too rare to find by chance.
bool draw_slots(const RingMemory& memory, int64_t count, const BitGenerator& random, int64_t* slots);

// How many more transitions of the same episode follow a slot.
int64_t steps_following(const Ring& ring, int64_t flat);

// How many transitions of the same episode precede a slot.
int64_t steps_preceding(const Ring& ring, int64_t flat);

// The slots of row ids, -1 for a row that can no longer be drawn. Returns -1, or the position of the first id that was
// never given to a transition.
int64_t locate(const Ring& ring, const int64_t* ids, int64_t count, int64_t* slots);

// Whether every slot still holds the row of this id, and it can be drawn.
bool hold(const Ring& ring, const int64_t* slots, const int64_t* ids, int64_t count);

// out[i] = ask(slots[i]), and -1 for a slot of -1.
template <class Ask>
void for_slots(const int64_t* slots, int64_t count, int64_t* out, Ask ask) {
    for (int64_t i = 0; i < count; ++i) out[i] = slots[i] < 0 ? -1 : ask(slots[i]);
}

}  // namespace relive
