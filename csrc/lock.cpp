// A lock in memory that several processes share. When its holder dies, the next one is told and mends what it left.
#include <nanobind/nanobind.h>

#include "bindings.hpp"

#if defined(__linux__)
#include <pthread.h>

#include <cerrno>
#include <ctime>
#endif

namespace nb = nanobind;

namespace recollect {

#if defined(__linux__)
namespace {

constexpr int64_t kLockBytes = 128;
constexpr long kSliceNanoseconds = 50'000'000;  // how long Ctrl-C may wait

struct Cell {
    pthread_mutex_t mutex;
    uint8_t is_mended;  // not 1: somebody died as the holder, and nobody has mended yet what that left
};
static_assert(sizeof(Cell) <= kLockBytes);

class ProcessLock {
public:
    // `memory` is uint8 [128], zeros where `is_new`. `mend` is called by the first holder after one that died.
    ProcessLock(nb::object memory, bool is_new, nb::callable mend)
        : cell_(reinterpret_cast<Cell*>(memory_of<uint8_t>(memory, kUInt8, kLockBytes, "lock"))),
          owner_(std::move(memory)),
          mend_(std::move(mend)) {
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
        int status = pthread_mutex_trylock(&cell_->mutex);
        while (status == EBUSY || status == ETIMEDOUT) {
            if (status == ETIMEDOUT && PyErr_CheckSignals() != 0) throw nb::python_error();
            status = wait();
        }
        if (status == EOWNERDEAD) {
            cell_->is_mended = 0;
            pthread_mutex_consistent(&cell_->mutex);
        } else if (status != 0) {
            throw std::runtime_error("lock: not one of this process");
        }
        if (cell_->is_mended) return;
        try {
            mend_();
        } catch (...) {
            pthread_mutex_unlock(&cell_->mutex);  // the next holder will try again
            throw;
        }
        cell_->is_mended = 1;
    }

    void exit() { pthread_mutex_unlock(&cell_->mutex); }

private:
    int wait() {
        nb::gil_scoped_release released;
        timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += kSliceNanoseconds;
        until.tv_sec += until.tv_nsec / 1'000'000'000;
        until.tv_nsec %= 1'000'000'000;
        return pthread_mutex_timedlock(&cell_->mutex, &until);
    }

    Cell* cell_;
    nb::object owner_, mend_;
};

}  // namespace

void bind_lock(nb::module_& m) {
    m.attr("LOCK_BYTES") = kLockBytes;
    nb::class_<ProcessLock>(m, "ProcessLock")
        .def(nb::init<nb::object, bool, nb::callable>())
        .def("__enter__", &ProcessLock::enter)
        .def("__exit__", [](ProcessLock& self, nb::args) { self.exit(); });
}
#else
void bind_lock(nb::module_&) {}
#endif

}  // namespace recollect
