// A mutex in memory shared by several processes. If its holder dies, the next holder must repair the data.
#pragma once
#if defined(__linux__)
#include <pthread.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>

namespace relive {

class ProcessMutex {
public:
    static constexpr int64_t kBytes = 128;

    enum class Status { kHeld, kBusy, kSliceOver };

    // Use kBytes bytes at `memory`, zeros if `is_new`.
    ProcessMutex(void* memory, bool is_new) : cell_(static_cast<Cell*>(memory)) {
        if (reinterpret_cast<uintptr_t>(memory) % alignof(Cell) != 0)
            throw std::invalid_argument("lock: expected aligned memory");
        if (!is_new) {
            static constexpr char kZeros[sizeof(pthread_mutex_t)] = {};
            if (std::memcmp(&cell_->mutex, kZeros, sizeof kZeros) == 0)
                throw std::invalid_argument("lock: expected the memory of a lock");
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
    ProcessMutex(const ProcessMutex&) = delete;

    // Unlock the mutex if it is still held. The mutex is in the thread's list of robust mutexes, and its memory may be
    // freed.
    ~ProcessMutex() {
        for (; depth_ > 0; --depth_) pthread_mutex_unlock(&cell_->mutex);
    }

    // Try to lock without waiting.
    Status try_enter() { return to_status(pthread_mutex_trylock(&cell_->mutex)); }

    // Wait for the mutex: spin, then sleep for one time slice, which bounds the response time to Ctrl-C.
    Status wait_a_slice() {
        cell_->wanted.store(name_, std::memory_order_relaxed);
        int status = EBUSY;
        for (const auto until = Clock::now() + kSpin; status == EBUSY && Clock::now() < until;) {
            // Yield, because the holder may be waiting for this processor core.
            std::this_thread::yield();
            status = pthread_mutex_trylock(&cell_->mutex);
        }
        if (status == EBUSY) status = sleep();
        if (status != ETIMEDOUT) cell_->wanted.store(0, std::memory_order_relaxed);
        return to_status(status);
    }

    void leave() {
        if (depth_ == 0) throw std::runtime_error("lock: expected to be held when it is left");
        --depth_;
        pthread_mutex_unlock(&cell_->mutex);
    }

    // Whether another object waits for the mutex, and this object held it last. If so, call `give_way` before locking.
    bool must_give_way() const {
        return depth_ == 0 && is_wanted_by_others() && cell_->last.load(std::memory_order_relaxed) == name_;
    }

    // Let a waiting process lock first. The wait is short, because the process may be dead.
    void give_way() {
        const auto until = Clock::now() + kMaxGiveWay;
        while (is_wanted_by_others() && Clock::now() < until) std::this_thread::yield();
        cell_->wanted.store(0, std::memory_order_relaxed);
    }

    // Whether the data is valid: false after a holder died, until the data is repaired. Only the holder may call
    // `is_repaired` and `set_repaired`.
    bool is_repaired() const { return cell_->is_repaired; }
    void set_repaired() { cell_->is_repaired = 1; }

    // Thread id of the holder; 0 if unknown.
    int holder() const {
#if defined(__GLIBC__)
        return cell_->mutex.__data.__owner;
#else
        return 0;
#endif
    }

private:
    using Clock = std::chrono::steady_clock;

    static constexpr long kSliceNanoseconds = 50'000'000;
    // A thread spins before it sleeps, because the mutex is usually held for a few microseconds, less than a thread
    // needs to sleep and wake up.
    static constexpr std::chrono::microseconds kSpin{60}, kMaxGiveWay{200};

    struct Cell {
        pthread_mutex_t mutex;
        uint8_t is_repaired;
        // Random names of the object that held the mutex last and of one waiting object; 0 if there is none.
        std::atomic<uint32_t> last, wanted;
    };
    static_assert(sizeof(Cell) <= kBytes && std::atomic<uint32_t>::is_always_lock_free);

    Status to_status(int status) {
        if (status == EBUSY) return Status::kBusy;
        if (status == ETIMEDOUT) return Status::kSliceOver;
        if (status == EOWNERDEAD) {
            cell_->is_repaired = 0;
            pthread_mutex_consistent(&cell_->mutex);
        } else if (status != 0) {
            throw std::runtime_error("lock: expected the shared memory of a live buffer, got error " +
                                     std::to_string(status));
        }
        cell_->last.store(name_, std::memory_order_relaxed);
        ++depth_;
        return Status::kHeld;
    }

    bool is_wanted_by_others() const {
        const uint32_t name = cell_->wanted.load(std::memory_order_relaxed);
        return name != 0 && name != name_;
    }

    int sleep() {
        timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += kSliceNanoseconds;
        until.tv_sec += until.tv_nsec / 1'000'000'000;
        until.tv_nsec %= 1'000'000'000;
        return pthread_mutex_timedlock(&cell_->mutex, &until);
    }

    Cell* cell_;
    uint32_t name_ = std::random_device()() | 1;
    // Number of times that this object has locked the mutex. Only the holder writes it; another thread that reads an
    // old value merely skips `give_way`.
    std::atomic<int64_t> depth_{0};
};

}
#endif
