#include "page_requests.hpp"

#if defined(__linux__)
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>
#endif

namespace relive {
namespace {

constexpr int kBatchesAfterWait = 64;

// Request the pages of some bytes of a mapped file, without waiting for them.
void request_bytes(const char* data, int64_t bytes) {
#if defined(__linux__)
    static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto start = reinterpret_cast<uintptr_t>(data), first = start / page * page;
    madvise(reinterpret_cast<void*>(first), start + static_cast<uintptr_t>(bytes) - first, MADV_WILLNEED);
#else
    static_cast<void>(data), static_cast<void>(bytes);
#endif
}

}  // namespace

void start_writing(int file, int64_t offset, int64_t bytes) {
#if defined(__linux__)
    sync_file_range(file, offset, bytes, SYNC_FILE_RANGE_WRITE);
#else
    static_cast<void>(file), static_cast<void>(offset), static_cast<void>(bytes);
#endif
}

// How often this process has waited for a page of a file.
int64_t PageRequests::count_waits() {
#if defined(__linux__)
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_majflt;
#else
    return 0;
#endif
}

bool PageRequests::expects_waits() {
    const int64_t waits = count_waits();
    if (waits > waits_) batches_left_ = kBatchesAfterWait;
    waits_ = waits;
    if (batches_left_ == 0) return false;
    --batches_left_;
    return true;
}

void PageRequests::request(const int64_t* slots, int64_t count) const {
    for (int64_t i = 0; i < count; ++i)
        if (slots[i] >= 0) request_row(slots[i]);
}

void PageRequests::request_row(int64_t flat) const {
    const Ring& ring = memory_.ring;
    const int64_t next = ring.keeps_next ? flat : ring.after(flat);
    for (const Leaf& leaf : memory_.leaves) {
        for (int64_t frame = leaf.frames.k, at = flat; frame > 1; --frame) {
            at = ring.before(at);
            request_bytes(leaf.at(at), leaf.bytes);
        }
        const bool adjacent = next == flat + 1;  // one request for both
        request_bytes(leaf.at(flat), leaf.bytes * (adjacent ? 2 : 1));
    }
    for (size_t o = 0; o < memory_.observed.size(); ++o) {
        const Leaf& leaf = memory_.observation(o);
        if (ring.keeps_next) request_bytes(memory_.next_columns[o] + flat * leaf.bytes, leaf.bytes);
        else if (next != flat + 1) request_bytes(leaf.at(next), leaf.bytes);
    }
}

}  // namespace relive
