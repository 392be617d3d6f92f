#include "write_back.hpp"

#include <atomic>
#include <cstring>

#include "ring_checksums.hpp"

namespace relive {
namespace {

// Only the compiler has to be kept from moving stores: whoever goes on after a kill sees them in the order of the program.
void keep_order() { std::atomic_signal_fence(std::memory_order_seq_cst); }

const Leaf& leaf_at(const RingMemory& memory, size_t l) { return memory.leaves[static_cast<size_t>(memory.rewritable.leaves[l])]; }

void copy(char* out, const char* in, const Leaf& leaf) { std::memcpy(out, in, static_cast<size_t>(leaf.bytes)); }

char* journal_bytes(const RingMemory& memory) { return reinterpret_cast<char*>(memory.rewritable.journal + 1); }

// Note the new bytes of a row: from then on, it will be written.
void note(RingMemory& memory, int64_t flat, int64_t i, const std::vector<const char*>& given) {
    char* noted = journal_bytes(memory);
    for (size_t l = 0; l < given.size(); ++l) {
        const Leaf& leaf = leaf_at(memory, l);
        copy(noted, given[l] ? given[l] + i * leaf.bytes : leaf.at(flat), leaf);
        noted += leaf.bytes;
    }
    keep_order();
    *memory.rewritable.journal = 1 + flat;
    keep_order();
}

}  // namespace

int64_t rewritable_bytes(const RingMemory& memory) {
    int64_t bytes = 0;
    for (size_t l = 0; l < memory.rewritable.leaves.size(); ++l) bytes += leaf_at(memory, l).bytes;
    return bytes;
}

void finish_write_back(RingMemory& memory) {
    int64_t* journal = memory.rewritable.journal;
    if (!journal || *journal < 1 || *journal > memory.ring.num_flat()) return;
    const int64_t flat = *journal - 1;
    const char* noted = journal_bytes(memory);
    for (size_t l = 0; l < memory.rewritable.leaves.size(); ++l) {
        const Leaf& leaf = leaf_at(memory, l);
        copy(leaf.at(flat), noted, leaf);
        noted += leaf.bytes;
    }
    store_rewritable_checksum(memory, flat, memory.ring.row_of(flat));
    keep_order();
    *journal = 0;
}

void write_back(RingMemory& memory, const int64_t* slots, int64_t count, const std::vector<const char*>& given) {
    for (int64_t i = 0; i < count; ++i) {
        const int64_t flat = slots[i];
        if (flat < 0) continue;
        if (memory.rewritable.journal) {
            note(memory, flat, i, given);
            finish_write_back(memory);
            continue;
        }
        for (size_t l = 0; l < given.size(); ++l) {
            const Leaf& leaf = leaf_at(memory, l);
            if (given[l]) copy(leaf.at(flat), given[l] + i * leaf.bytes, leaf);
        }
    }
}

void find_torn_rows(const RingMemory& memory, uint8_t* torn) {
    const Ring& ring = memory.ring;
    for (int64_t flat = 0; flat < ring.num_flat(); ++flat) {
        torn[flat] = ring.kind[flat] == kTransition && memory.rewritable.checksums &&
                     memory.rewritable.checksums[flat] != checksum_of_rewritable(memory, flat, ring.row_of(flat));
    }
}

}  // namespace relive
