#include "process_mutex.hpp"

#if defined(__linux__)
#include <cerrno>
#include <cstring>
#include <ctime>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>

namespace relive {
namespace {

using Clock = std::chrono::steady_clock;

constexpr long kSliceNanoseconds = 50'000'000;

// Calls hold the mutex for some microseconds, less than it takes to fall asleep and to be woken.
constexpr std::chrono::microseconds kSpin{60};
constexpr std::chrono::microseconds kLongestTurn{200};

}  // namespace

ProcessMutex::ProcessMutex(void* memory, bool is_new) : cell_(static_cast<Cell*>(memory)) {
    if (reinterpret_cast<uintptr_t>(memory) % alignof(Cell) != 0) throw std::invalid_argument("lock: expected aligned memory");
    if (!is_new) {
        static constexpr char kZeros[sizeof(pthread_mutex_t)] = {};
        if (std::memcmp(&cell_->mutex, kZeros, sizeof kZeros) == 0) throw std::invalid_argument("lock: expected the memory of a lock");
        return;
    }
    pthread_mutexattr_t kind;
    pthread_mutexattr_init(&kind);
    pthread_mutexattr_setpshared(&kind, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&kind, PTHREAD_MUTEX_ROBUST);
    pthread_mutexattr_settype(&kind, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&cell_->mutex, &kind);
    pthread_mutexattr_destroy(&kind);
    cell_->is_repaired = 1;
}

ProcessMutex::Status ProcessMutex::try_enter() { return taken(pthread_mutex_trylock(&cell_->mutex)); }

ProcessMutex::Status ProcessMutex::wait_a_slice() {
    cell_->wanted.store(name_, std::memory_order_relaxed);
    int status = EBUSY;
    for (const auto until = Clock::now() + kSpin; status == EBUSY && Clock::now() < until;) {
        std::this_thread::yield();  // the holder may be waiting for this core
        status = pthread_mutex_trylock(&cell_->mutex);
    }
    if (status == EBUSY) status = sleep();
    if (status != ETIMEDOUT) cell_->wanted.store(0, std::memory_order_relaxed);
    return taken(status);
}

ProcessMutex::~ProcessMutex() {
    for (; depth_ > 0; --depth_) pthread_mutex_unlock(&cell_->mutex);
}

void ProcessMutex::leave() {
    if (depth_ == 0) throw std::runtime_error("lock: expected to be held when it is left");
    --depth_;
    pthread_mutex_unlock(&cell_->mutex);
}

bool ProcessMutex::owes_a_turn() const {
    return depth_ == 0 && is_wanted_by_others() && cell_->last.load(std::memory_order_relaxed) == name_;
}

void ProcessMutex::give_way() {
    const auto until = Clock::now() + kLongestTurn;
    while (is_wanted_by_others() && Clock::now() < until) std::this_thread::yield();
    cell_->wanted.store(0, std::memory_order_relaxed);
}

int ProcessMutex::holder() const {
#if defined(__GLIBC__)
    return cell_->mutex.__data.__owner;
#else
    return 0;
#endif
}

ProcessMutex::Status ProcessMutex::taken(int status) {
    if (status == EBUSY) return Status::kBusy;
    if (status == ETIMEDOUT) return Status::kSliceOver;
    if (status == EOWNERDEAD) {
        cell_->is_repaired = 0;
        pthread_mutex_consistent(&cell_->mutex);
    } else if (status != 0) {
        throw std::runtime_error("lock: expected the shared memory of a live buffer, got error " + std::to_string(status));
    }
    cell_->last.store(name_, std::memory_order_relaxed);
    ++depth_;
    return Status::kHeld;
}

bool ProcessMutex::is_wanted_by_others() const {
    const uint32_t name = cell_->wanted.load(std::memory_order_relaxed);
    return name != 0 && name != name_;
}

int ProcessMutex::sleep() {
    timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += kSliceNanoseconds;
    until.tv_sec += until.tv_nsec / 1'000'000'000;
    until.tv_nsec %= 1'000'000'000;
    return pthread_mutex_timedlock(&cell_->mutex, &until);
}

uint32_t ProcessMutex::new_name() {
    std::random_device random;
    return random() | 1;
}

}  // namespace relive
#endif
