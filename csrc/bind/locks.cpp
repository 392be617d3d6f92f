// Locks that are safe against exceptions from signal handlers: GuardedLock for threads, ProcessLock for processes.
#include <nanobind/nanobind.h>

#include <chrono>
#include <cstdio>
#include <optional>
#include <utility>

#include "../core/process_mutex.hpp"
#include "arguments.hpp"

namespace relive::bind {
namespace {

// A context manager around a threading.RLock. Calls `guard` after locking, and unlocks if it raises. Entering and
// exiting are native calls: a signal handler cannot raise between locking and the start of the `with` body.
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

// Timeouts of more seconds than this are unlimited, because the nanoseconds could overflow.
constexpr double kUnlimited = 1e9;

// A context manager around a mutex shared by processes. The first holder after a dead one repairs the data.
class ProcessLock {
public:
    // `memory` is uint8 [128], zeros if `is_new`. `recover` is called by the first holder after a dead one. Waiting
    // ends after `timeout` seconds: a holder may be stopped without being dead.
    ProcessLock(nb::object memory, bool is_new, nb::callable recover, double timeout)
        : kept_alive_(std::move(memory)),
          mutex_(read_memory<uint8_t>(kept_alive_, kUInt8, ProcessMutex::kBytes, "lock"), is_new),
          recover_(std::move(recover)),
          timeout_(timeout) {
        if (!(timeout >= 0)) refuse("timeout: expected seconds, got ", timeout);
    }

    void enter() {
        if (enter_within(timeout_)) return;
        char message[256];
        std::snprintf(message, sizeof message,
                      "shared buffer: expected its lock within %g s, got it held by another process (thread %d) all "
                      "the time. Resume that process, or end it; RELIVE_LOCK_SECONDS sets how long calls wait.",
                      timeout_, mutex_.holder());
        PyErr_SetString(PyExc_TimeoutError, message);
        throw nb::python_error();
    }

    // Returns false on a timeout. May wait one time slice longer than the timeout.
    bool enter_within(double seconds) {
        if (!wait_within(seconds)) return false;
        if (mutex_.is_repaired()) return true;
        try {
            recover_();
        } catch (...) {
            // The data is not marked as repaired, so the next holder calls `recover` again.
            exit();
            throw;
        }
        mutex_.set_repaired();
        return true;
    }

    void exit() { mutex_.leave(); }

private:
    bool wait_within(double seconds) {
        if (mutex_.must_give_way()) {
            nb::gil_scoped_release released;
            mutex_.give_way();
        }
        Status status = mutex_.try_enter();
        // The deadline is computed only if the lock is not free at once, which saves reading the clock.
        std::optional<Clock::time_point> deadline;
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
        if (!(seconds < kUnlimited)) return Clock::time_point::max();
        if (seconds <= 0) return Clock::now();
        return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
    }

    nb::object kept_alive_;
    ProcessMutex mutex_;
    nb::object recover_;
    double timeout_;
};

// A context manager that enters a ProcessLock with its own timeout; `__enter__` returns whether it is held.
class Within {
public:
    Within(ProcessLock& lock, double seconds) : lock_(lock), seconds_(seconds) {}

    bool enter() {
        if (is_held_)
            throw std::runtime_error("lock: expected to be entered once, got entered again. Call within() again.");
        return is_held_ = lock_.enter_within(seconds_);
    }

    void exit() {
        if (is_held_) lock_.exit();
        is_held_ = false;
    }

private:
    ProcessLock& lock_;
    double seconds_;
    bool is_held_ = false;
};
#endif

}

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

}
