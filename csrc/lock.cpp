// A lock in memory that several processes share. When its holder dies, the next one is told and mends what it left.
#include <nanobind/nanobind.h>

#include "bindings.hpp"

#if defined(__linux__)
#include <pthread.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <optional>
#include <random>
#include <thread>
#endif

namespace nb = nanobind;

namespace relive {

#if defined(__linux__)
namespace {

constexpr int64_t kLockBytes = 128;
constexpr long kSliceNanoseconds = 50'000'000;  // how long Ctrl-C may wait

// Calls hold the lock for some microseconds, less than it takes to fall asleep and to be woken.
constexpr std::chrono::microseconds kSpin{60};
// Whoever had the lock last lets one who waits go first, but not for longer than this: that one may be dead.
constexpr std::chrono::microseconds kCourtesy{200};

struct Cell {
    pthread_mutex_t mutex;
    uint8_t is_mended;  // not 1: somebody died as the holder, and nobody has mended yet what that left
    std::atomic<uint32_t> last, wanted;  // who had it last, and who waits for it (one of them); 0: nobody
};
static_assert(sizeof(Cell) <= kLockBytes && std::atomic<uint32_t>::is_always_lock_free);

using Clock = std::chrono::steady_clock;

constexpr double kEver = 1e9;  // seconds; more may be too many nanoseconds to count

class ProcessLock {
public:
    // `memory` is uint8 [128], zeros where `is_new`. `mend` is called by the first holder after one that died.
    // Nobody waits for longer than `patience` seconds: a holder may be stopped, which is not death.
    ProcessLock(nb::object memory, bool is_new, nb::callable mend, double patience)
        : cell_(reinterpret_cast<Cell*>(memory_of<uint8_t>(memory, kUInt8, kLockBytes, "lock"))),
          owner_(std::move(memory)),
          mend_(std::move(mend)),
          patience_(patience) {
        if (!is_new) return;
        pthread_mutexattr_t kind;
        pthread_mutexattr_init(&kind);
        pthread_mutexattr_setpshared(&kind, PTHREAD_PROCESS_SHARED);
        pthread_mutexattr_setrobust(&kind, PTHREAD_MUTEX_ROBUST);
        pthread_mutexattr_settype(&kind, PTHREAD_MUTEX_RECURSIVE);
        pthread_mutex_init(&cell_->mutex, &kind);
        pthread_mutexattr_destroy(&kind);
        cell_->is_mended = 1;
    }

    void enter() {
        if (enter_within(patience_)) return;
        char said[256];
        std::snprintf(said, sizeof said,
                      "shared buffer: expected its lock within %g s, got it held by another process (thread %d) all the "
                      "time. Let that process go on, or end it; RELIVE_LOCK_SECONDS sets how long calls wait.",
                      patience_, owner());
        PyErr_SetString(PyExc_TimeoutError, said);
        throw nb::python_error();
    }

    // False if that takes longer. A wait that has begun goes on for up to a slice.
    bool enter_within(double seconds) {
        if (depth_ == 0 && is_wanted_by_others() && cell_->last.load(std::memory_order_relaxed) == me_) let_others();
        int status = pthread_mutex_trylock(&cell_->mutex);
        std::optional<Clock::time_point> deadline;  // only who waits reads the clock
        while (status == EBUSY || status == ETIMEDOUT) {
            if (status == ETIMEDOUT && PyErr_CheckSignals() != 0) throw nb::python_error();
            if (!deadline) deadline = seconds < kEver ? Clock::now() + nanoseconds(seconds) : Clock::time_point::max();
            if (Clock::now() >= *deadline) return false;
            status = wait();
        }
        if (status == EOWNERDEAD) {
            cell_->is_mended = 0;
            pthread_mutex_consistent(&cell_->mutex);
        } else if (status != 0) {
            throw std::runtime_error("lock: expected the shared memory of a live buffer, got error " + std::to_string(status));
        }
        cell_->last.store(me_, std::memory_order_relaxed);
        ++depth_;
        if (cell_->is_mended) return true;
        try {
            mend_();
        } catch (...) {
            exit();  // the next holder will try again
            throw;
        }
        cell_->is_mended = 1;
        return true;
    }

    void exit() {
        --depth_;
        pthread_mutex_unlock(&cell_->mutex);
    }

private:
    static Clock::duration nanoseconds(double seconds) {
        return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
    }

    int owner() const {
#if defined(__GLIBC__)
        return cell_->mutex.__data.__owner;
#else
        return 0;
#endif
    }

    bool is_wanted_by_others() const {
        const uint32_t who = cell_->wanted.load(std::memory_order_relaxed);
        return who != 0 && who != me_;
    }

    void let_others() {
        nb::gil_scoped_release released;
        const auto until = Clock::now() + kCourtesy;
        while (is_wanted_by_others() && Clock::now() < until) std::this_thread::yield();
        cell_->wanted.store(0, std::memory_order_relaxed);
    }

    int wait() {
        nb::gil_scoped_release released;
        cell_->wanted.store(me_, std::memory_order_relaxed);
        int status = EBUSY;
        for (const auto until = Clock::now() + kSpin; status == EBUSY && Clock::now() < until;) {
            std::this_thread::yield();  // the holder may be waiting for this core
            status = pthread_mutex_trylock(&cell_->mutex);
        }
        if (status == EBUSY) status = sleep();
        if (status != ETIMEDOUT) cell_->wanted.store(0, std::memory_order_relaxed);
        return status;
    }

    int sleep() {
        timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += kSliceNanoseconds;
        until.tv_sec += until.tv_nsec / 1'000'000'000;
        until.tv_nsec %= 1'000'000'000;
        return pthread_mutex_timedlock(&cell_->mutex, &until);
    }

    static uint32_t new_name() {
        std::random_device random;
        return random() | 1;
    }

    Cell* cell_;
    nb::object owner_, mend_;
    double patience_;
    uint32_t me_ = new_name();
    std::atomic<int64_t> depth_{0};  // changed by the holder only; others may see it late, and are then not courteous
};

// For a `with` statement, which nothing comes between entering and being sure to leave: no Ctrl-C either.
class Within {
public:
    Within(ProcessLock& lock, double seconds) : lock_(lock), seconds_(seconds) {}

    bool enter() { return is_mine_ = lock_.enter_within(seconds_); }

    void exit() {
        if (is_mine_) lock_.exit();
    }

private:
    ProcessLock& lock_;
    double seconds_;
    bool is_mine_ = false;
};

}  // namespace

void bind_lock(nb::module_& m) {
    m.attr("LOCK_BYTES") = kLockBytes;
    nb::class_<ProcessLock>(m, "ProcessLock")
        .def(nb::init<nb::object, bool, nb::callable, double>())
        .def("__enter__", &ProcessLock::enter)
        .def("__exit__", [](ProcessLock& self, nb::args) { self.exit(); })
        .def(
            "within", [](ProcessLock& self, double seconds) { return Within(self, seconds); }, nb::keep_alive<0, 1>());
    nb::class_<Within>(m, "Within")
        .def("__enter__", &Within::enter)
        .def("__exit__", [](Within& self, nb::args) { self.exit(); });
}
#else
void bind_lock(nb::module_&) {}
#endif

}  // namespace relive
