// The memory of a ring, read from the arrays that Python allocated.
#pragma once
#include <cstring>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "../core/ring_memory.hpp"
#include "arguments.hpp"

namespace relive::bind {

#define RELIVE_NAME(name, type, dtype, extent) #name,
constexpr const char* kRingStateNames[] = {RELIVE_RING_STATE(RELIVE_NAME)};
#undef RELIVE_NAME

// Kept only where the memory outlives a process.
constexpr const char *kJournal = "journal", *kChecksums = "seals";

inline nb::tuple ring_state_names() {
    nb::list names;
    for (const char* name : kRingStateNames) names.append(name);
    return nb::tuple(names);
}

inline void check_state_names(nb::dict state) {
    for (const char* name : kRingStateNames)
        if (!state.contains(name)) throw std::invalid_argument(std::string("state: expected an array ") + name + ", got none");
    for (auto [name, array] : state) {
        const char* given = nb::cast<const char*>(name);
        bool known = std::strcmp(given, kJournal) == 0 || std::strcmp(given, kChecksums) == 0;
        for (const char* expected : kRingStateNames) known = known || std::strcmp(given, expected) == 0;
        if (!known) throw std::invalid_argument(std::string("state: expected the names in RING_STATE, journal and seals, got ") + given);
    }
}

// The arrays of a state by their names; `journal` and `seals` may be None or missing.
inline RingState read_state(nb::dict state, int64_t slots, int64_t envs) {
    check_state_names(state);
    RingState read;
    const auto elements = [&](Extent extent) { return extent == Extent::kPerSlot ? slots * envs : envs; };
#define RELIVE_READ(name, type, dtype, extent) \
    read.name = memory_of<type>(state[#name], dtype, elements(Extent::extent), #name);
    RELIVE_RING_STATE(RELIVE_READ)
#undef RELIVE_READ
    const auto is_kept = [&](const char* name) { return state.contains(name) && !state[name].is_none(); };
    if (is_kept(kJournal)) read.journal = memory_of<int64_t>(state[kJournal], kInt64, envs, kJournal);
    if (is_kept(kChecksums)) read.checksums = memory_of<uint64_t>(state[kChecksums], kInt64, 2 * slots * envs, kChecksums);
    return read;
}

// The leaf of a column [slots, envs, …]; `stack` is (k, axis, repeat) or None.
inline Leaf read_leaf_of(nb::handle column, nb::handle stack, int64_t slots, int64_t envs) {
    const Array array = read_output(column, "column");
    if (stack.is_none()) return leaf_over(array, nullptr, slots, envs);
    const auto given = nb::cast<nb::tuple>(stack);
    if (given.size() != 3) throw std::invalid_argument("stack: expected (k, axis, repeat)");
    const Stacking stacking{nb::cast<int64_t>(given[0]), nb::cast<int>(given[1]), nb::cast<bool>(given[2])};
    return leaf_over(array, &stacking, slots, envs);
}

// Numbers of leaves, ascending.
inline void check_leaf_numbers(const std::vector<int>& numbers, size_t leaves, const char* what) {
    int last = -1;
    for (const int number : numbers) {
        if (number <= last || number >= static_cast<int>(leaves))
            throw std::invalid_argument(std::string(what) + ": expected ascending numbers of columns, got " + std::to_string(number));
        last = number;
    }
}

// Columns [slots, envs, …], with what they stack (see `read_leaf_of`); `observed` are those of observations. The ring knows
// its arrays and its shape.
inline RingMemory read_memory(nb::list columns, nb::list stacks, std::vector<int> observed, nb::list next_columns, nb::dict state) {
    RingMemory memory;
    if (columns.size() == 0 || columns.size() + next_columns.size() > kMostLeaves)
        throw std::invalid_argument("columns: expected 1 to " + std::to_string(kMostLeaves));
    if (stacks.size() != columns.size()) throw std::invalid_argument("stacks: expected one for each column");
    check_leaf_numbers(observed, columns.size(), "observed");
    if (next_columns.size() > 0 && next_columns.size() != observed.size())
        throw std::invalid_argument("next_columns: expected one for each observation, or none");
    const Array first = read_or_throw(columns[0], "column");
    if (first.ndim < 2 || first.shape[0] < 1 || first.shape[1] < 1)
        throw std::invalid_argument("column: expected shape [slots, envs, …]");
    const int64_t slots = first.shape[0], envs = first.shape[1];
    static_cast<RingState&>(memory.ring) = read_state(state, slots, envs);
    memory.ring.slots = slots;
    memory.ring.envs = envs;
    memory.ring.keeps_next = next_columns.size() > 0;
    memory.observed = std::move(observed);
    for (size_t i = 0; i < columns.size(); ++i) memory.leaves.push_back(read_leaf_of(columns[i], stacks[i], slots, envs));
    for (size_t i = 0; i < next_columns.size(); ++i) {
        const auto o = static_cast<size_t>(memory.observed[i]);
        const Leaf next = read_leaf_of(next_columns[i], stacks[o], slots, envs);
        if (next.dtype != memory.leaves[o].dtype || next.bytes != memory.leaves[o].bytes)
            throw std::invalid_argument("next_columns: expected the dtype and shape of the observation");
        memory.next_columns.push_back(next.column);
    }
    return memory;
}

}  // namespace relive::bind
