// Bugs on purpose, compiled into sanitizer builds only: a sanitizer that misses them would miss others too.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <limits>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace nb = nanobind;

namespace relive::bind {
namespace {

// Two threads increment one number without a lock.
int64_t race() {
    int64_t count = 0;
    const auto work = [&count] {
        for (int i = 0; i < 1000; ++i) ++count;
    };
    std::thread first(work), second(work);
    first.join();
    second.join();
    return count;
}

// One element past the end of a heap block.
int64_t bounds() {
    const std::vector<int64_t> values(4);
    volatile size_t past = values.size();
    return values.data()[past];
}

int64_t overflow() {
    volatile int64_t largest = std::numeric_limits<int64_t>::max();
    return largest + 1;
}

}  // namespace

void bind_planted_bugs(nb::module_& m) {
    m.def("plant", [](const std::string& what) {
        if (what == "race") return race();
        if (what == "bounds") return bounds();
        if (what == "overflow") return overflow();
        throw std::invalid_argument("plant: race, bounds or overflow");
    });
}

}  // namespace relive::bind
