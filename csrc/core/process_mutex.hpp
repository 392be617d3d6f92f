// A mutex in memory that several processes share. When its holder dies, the next holder is told to repair the data.
#pragma once
#if defined(__linux__)
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <cstdint>

namespace relive {

class ProcessMutex {
public:
    static constexpr int64_t kBytes = 128;

    enum class Status { kHeld, kBusy, kSliceOver };

    // `memory` has kBytes bytes, zeros if `is_new`.
    ProcessMutex(void* memory, bool is_new);
    ProcessMutex(const ProcessMutex&) = delete;

    // Leaves the mutex if it is still held: the memory may be freed, and the list of a thread's mutexes leads through it.
    ~ProcessMutex();

    // Take the mutex, or report that another thread or process holds it.
    Status try_enter();

    // Wait for the mutex: spin, then sleep for a slice of time that bounds how long Ctrl-C has to wait.
    Status wait_a_slice();

    void leave();

    // Whether this object had the mutex last and another one waits for it. Then call `give_way` before entering.
    bool owes_a_turn() const;

    // Let a waiting process go first, but only for a short time: it may be dead.
    void give_way();

    // False: a holder died, and nobody has repaired its data yet. For the holder only.
    bool is_repaired() const { return cell_->is_repaired; }
    void set_repaired() { cell_->is_repaired = 1; }

    // The thread that holds the mutex, or 0 where that is not known.
    int holder() const;

private:
    struct Cell {
        pthread_mutex_t mutex;
        uint8_t is_repaired;
        std::atomic<uint32_t> last, wanted;  // who had it last, and one of those who wait for it; 0: nobody
    };
    static_assert(sizeof(Cell) <= kBytes && std::atomic<uint32_t>::is_always_lock_free);

    Status taken(int status);
    bool is_wanted_by_others() const;
    int sleep();
    static uint32_t new_name();

    Cell* cell_;
    uint32_t name_ = new_name();
    std::atomic<int64_t> depth_{0};  // changed by the holder only; other threads may see it late and then not give way
};

}  // namespace relive
#endif
