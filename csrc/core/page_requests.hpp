// Requests to the operating system for pages of mapped files: read these soon, write these soon.
#pragma once
#include <cstdint>

#include "ring_memory.hpp"

namespace relive {

// Begin to write a range of a file to the disk, without waiting for it.
void start_writing(int file, int64_t offset, int64_t bytes);

// Requests the pages of a batch before it is read, if batches have waited for the disk lately.
class PageRequests {
public:
    explicit PageRequests(const RingMemory& memory) : memory_(memory) {}

    // Whether this batch should be requested: a page fault has waited for the disk not many batches ago.
    bool expects_waits();

    // Request the rows at these slots and what they led to; -1 is no row.
    void request(const int64_t* slots, int64_t count) const;

private:
    static int64_t count_waits();
    void request_row(int64_t flat) const;

    const RingMemory& memory_;
    int64_t waits_ = count_waits();  // that are known of
    int batches_left_ = 0;           // how many more batches are requested before they are read
};

}  // namespace relive
