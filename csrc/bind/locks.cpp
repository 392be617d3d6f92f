// Locks that a signal cannot lose: GuardedLock of threads, ProcessLock of processes. `complete` makes a change whole.
#include <nanobind/nanobind.h>

#include <chrono>
#include <cstdio>
#include <optional>
#include <utility>

#include "../core/process_mutex.hpp"
#include "arguments.hpp"

namespace relive::bind {
namespace {

// `lock` is a threading.RLock. Whoever has taken it calls `guard` first, and has not taken it if that raises. Entering and
// leaving are native calls: an exception from a signal handler comes before or after, never between lock and promise.
class GuardedLock {
public:
    GuardedLock(const nb::object& lock, nb::callable guard)
        : acquire_(lock.attr("acquire")), release_(lock.attr("release")), guard_(std::move(guard)) {}

    void enter() {
        acquire_();
        try {
            guard_();
        } catch (...) {
            exit();
            throw;
        }
    }

    void exit() { release_(); }

private:
    nb::object acquire_, release_, guard_;
};

#if defined(__linux__)
using Clock = std::chrono::steady_clock;
using Status = ProcessMutex::Status;

constexpr double kForever = 1e9;  // seconds; more may be too many nanoseconds to count

// A context manager around a mutex that processes share. After a holder has died, the next one repairs.
class ProcessLock {
public:
    // `memory` is uint8 [128], zeros if `is_new`. `mend` is called by the first holder after one that died. Nobody waits
    // for longer than `patience` seconds: a holder may be stopped, which is not death.
    ProcessLock(nb::object memory, bool is_new, nb::callable mend, double patience)
        : owner_(std::move(memory)),
          mutex_(memory_of<uint8_t>(owner_, kUInt8, ProcessMutex::kBytes, "lock"), is_new),
          mend_(std::move(mend)),
          patience_(patience) {
        if (!(patience >= 0)) refuse("patience: expected seconds, got ", patience);
    }

    void enter() {
        if (enter_within(patience_)) return;
        char message[256];
        std::snprintf(message, sizeof message,
                      "shared buffer: expected its lock within %g s, got it held by another process (thread %d) all the "
                      "time. Let that process go on, or end it; RELIVE_LOCK_SECONDS sets how long calls wait.",
                      patience_, mutex_.holder());
        PyErr_SetString(PyExc_TimeoutError, message);
        throw nb::python_error();
    }

    // False if the lock is not free in time. A wait that has begun goes on for up to a slice.
    bool enter_within(double seconds) {
        if (!wait_within(seconds)) return false;
        if (mutex_.is_repaired()) return true;
        try {
            mend_();
        } catch (...) {
            exit();  // the next holder will try again
            throw;
        }
        mutex_.set_repaired();
        return true;
    }

    void exit() { mutex_.leave(); }

private:
    bool wait_within(double seconds) {
        if (mutex_.owes_a_turn()) {
            nb::gil_scoped_release released;
            mutex_.give_way();
        }
        Status status = mutex_.try_enter();
        std::optional<Clock::time_point> deadline;  // the clock is read only by those who wait
        while (status != Status::kHeld) {
            if (status == Status::kSliceOver && PyErr_CheckSignals() != 0) throw nb::python_error();
            if (!deadline) deadline = deadline_in(seconds);
            if (Clock::now() >= *deadline) return false;
            nb::gil_scoped_release released;
            status = mutex_.wait_a_slice();
        }
        return true;
    }

    static Clock::time_point deadline_in(double seconds) {
        if (!(seconds < kForever)) return Clock::time_point::max();
        if (seconds <= 0) return Clock::now();
        return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
    }

    nb::object owner_;  // the memory
    ProcessMutex mutex_;
    nb::object mend_;  // what repairs the data
    double patience_;
};

// For a `with` statement: no Ctrl-C can come between entering and the promise to leave.
class Within {
public:
    Within(ProcessLock& lock, double seconds) : lock_(lock), seconds_(seconds) {}

    bool enter() {
        if (is_mine_) throw std::runtime_error("lock: expected to be entered once, got entered again. Call within() again.");
        return is_mine_ = lock_.enter_within(seconds_);
    }

    void exit() {
        if (is_mine_) lock_.exit();
        is_mine_ = false;
    }

private:
    ProcessLock& lock_;
    double seconds_;
    bool is_mine_ = false;
};
#endif

}  // namespace

void bind_locks(nb::module_& m) {
    nb::class_<GuardedLock>(m, "GuardedLock")
        .def(nb::init<nb::object, nb::callable>())
        .def("__enter__", &GuardedLock::enter)
        .def("__exit__", [](GuardedLock& self, nb::args) { self.exit(); });
    m.def("complete", [](nb::callable change) { complete(change); });
#if defined(__linux__)
    m.attr("LOCK_BYTES") = ProcessMutex::kBytes;
    nb::class_<ProcessLock>(m, "ProcessLock")
        .def(nb::init<nb::object, bool, nb::callable, double>())
        .def("__enter__", &ProcessLock::enter)
        .def("__exit__", [](ProcessLock& self, nb::args) { self.exit(); })
        .def(
            "within", [](ProcessLock& self, double seconds) { return Within(self, seconds); }, nb::keep_alive<0, 1>());
    nb::class_<Within>(m, "Within")
        .def("__enter__", &Within::enter)
        .def("__exit__", [](Within& self, nb::args) { self.exit(); });
#endif
}

}  // namespace relive::bind
