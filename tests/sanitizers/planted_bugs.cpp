// Planted bugs, compiled into sanitizer builds of the native core. A sanitizer that misses them would miss others too.
#include <cstdint>
#include <limits>
#include <thread>
#include <vector>

#define PLANTED extern "C" __attribute__((visibility("default"))) int64_t

// Increment one number in two threads without a lock.
PLANTED race() {
    int64_t count = 0;
    const auto work = [&count] {
        for (int i = 0; i < 1000; ++i) ++count;
    };
    std::thread first(work), second(work);
    first.join();
    second.join();
    return count;
}

// Read one element past the end of a heap block.
PLANTED bounds() {
    const std::vector<int64_t> values(4);
    volatile size_t past = values.size();
    return values.data()[past];
}

PLANTED overflow() {
    volatile int64_t largest = std::numeric_limits<int64_t>::max();
    return largest + 1;
}
