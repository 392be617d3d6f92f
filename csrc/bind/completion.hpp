// Changes that an exception from a signal handler cannot leave half-done.
//
// Python runs signal handlers between the instructions of Python functions, never inside of a native call. So a native
// call is one change, and a Python function that follows it is called again from here when it was interrupted.
#pragma once
#include <nanobind/nanobind.h>

#include <optional>

namespace relive::bind {

namespace nb = nanobind;

constexpr int kMostTries = 16;

// Call `change` until it returns, then raise the first exception that it raised. All that it does are assignments, so
// that a second call leads to the same. One that always raises is given up.
inline void complete(nb::handle change) {
    std::optional<nb::python_error> first;
    for (int tries = 1;; ++tries) {
        try {
            change();
            break;
        } catch (nb::python_error& error) {
            if (!first) first.emplace(std::move(error));
            if (tries == kMostTries) break;
        }
    }
    if (first) throw std::move(*first);
}

}  // namespace relive::bind
