// Blocks of memory that were freed last, kept for the next request of their size.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <mutex>

namespace relive {

// A block that was just freed is still in the processor's cache, and its pages exist. An allocator would hand out another
// block first, or give the pages back.
class BlockCache {
public:
    // `bytes` is a multiple of 64. Null if there is no memory.
    void* take(size_t bytes) {
        void* memory = keeps(bytes) ? find(bytes) : nullptr;
        return memory ? memory : std::aligned_alloc(64, bytes);
    }

    void give_back(void* memory, size_t bytes) {
        if (!keeps(bytes)) return std::free(memory);
        // Never wait for the mutex: in a forked child its holder may not exist.
        const std::unique_lock<std::mutex> held(mutex_, std::try_to_lock);
        if (!held) return std::free(memory);
        if (kept_ == kMostKept) {
            std::free(blocks_[0].memory);
            std::copy(blocks_ + 1, blocks_ + kept_--, blocks_);
        }
        blocks_[kept_++] = {memory, bytes};
    }

    static BlockCache& instance() {
        static BlockCache* instance = new BlockCache;  // never destroyed: tensors may outlive the module
        return *instance;
    }

private:
    static constexpr size_t kSmallest = 1 << 16, kLargest = 1 << 22, kMostKept = 4;

    static bool keeps(size_t bytes) { return bytes >= kSmallest && bytes <= kLargest; }

    void* find(size_t bytes) {
        const std::unique_lock<std::mutex> held(mutex_, std::try_to_lock);
        if (!held) return nullptr;
        for (size_t i = kept_; i-- > 0;)
            if (blocks_[i].bytes == bytes) {
                void* memory = blocks_[i].memory;
                std::copy(blocks_ + i + 1, blocks_ + kept_--, blocks_ + i);
                return memory;
            }
        return nullptr;
    }

    struct Block {
        void* memory;
        size_t bytes;
    };

    std::mutex mutex_;
    Block blocks_[kMostKept];
    size_t kept_ = 0;
};

}  // namespace relive
