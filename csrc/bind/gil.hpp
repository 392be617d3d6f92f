// When Python's global lock is released, and how a call from inside another one is refused.
#pragma once
#include <Python.h>

#include <cstdint>
#include <stdexcept>
#include <vector>

#include "conversion.hpp"

namespace relive::bind {

// For less work a released GIL costs more than it gives: a busy Python thread keeps it for milliseconds.
constexpr int64_t kReleaseBytes = 1 << 16;

struct MaybeReleased {
    explicit MaybeReleased(int64_t bytes, int64_t at_least = kReleaseBytes)
        : state(bytes >= at_least ? PyEval_SaveThread() : nullptr) {}
    MaybeReleased(const MaybeReleased&) = delete;
    ~MaybeReleased() {
        if (state) PyEval_RestoreThread(state);
    }
    PyThreadState* state;
};

// Lets one step be written at a time, and holds the arrays of the step until it is written. An exporter that is written
// in Python may call back while its buffer is taken or released.
class OneWrite {
public:
    OneWrite(bool& is_writing, std::vector<Array>& arrays) : is_writing_(is_writing), arrays_(arrays) {
        if (is_writing_)
            throw std::runtime_error(
                "add: expected one step at a time, got a step from inside the buffer protocol of another. Add it afterwards.");
        is_writing_ = true;
    }
    OneWrite(const OneWrite&) = delete;
    ~OneWrite() {
        for (Array& array : arrays_) array.hold.release();
        is_writing_ = false;
    }

private:
    bool& is_writing_;
    std::vector<Array>& arrays_;
};

}  // namespace relive::bind
