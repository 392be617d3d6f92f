// Plans of the tensors that a call returns: dtype and shape before allocation, memory afterwards.
//
// Allocating a tensor costs more than filling a small one. The small tensors of a batch therefore share one block,
// which lives as long as any of them. Each large tensor has its own block: a caller who keeps the rewards of a batch
// does not keep its images.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "arrays.hpp"

namespace relive {

struct OutOfMemory : std::bad_alloc {
    const char* what() const noexcept override {
        return "memory: expected room for the whole result, got less. Ask for fewer rows or shorter sequences.";
    }
};

// Throw OutOfMemory if the system has less memory available. Linux would allocate it anyway, and kill the process when
// the pages are first written. Requests of at most 1 GiB are not checked.
inline void require_memory(int64_t bytes) {
    if (bytes <= int64_t{1} << 30) return;
#ifdef __linux__
    std::FILE* file = std::fopen("/proc/meminfo", "r");
    if (!file) return;
    char line[128];
    long long kilobytes = -1;
    while (kilobytes < 0 && std::fgets(line, sizeof line, file))
        if (std::sscanf(line, "MemAvailable: %lld", &kilobytes) != 1) kilobytes = -1;
    std::fclose(file);
    if (kilobytes >= 0 && bytes / 1024 > kilobytes) throw OutOfMemory();
#endif
}

struct TensorPlan {
    DataType dtype;
    int ndim;
    int64_t shape[kMaxDims];
    int64_t bytes;
    bool in_shared_block;
    // Null until the tensor is allocated.
    char* data;
};

class TensorPlans {
public:
    static constexpr int64_t round_up(int64_t bytes) { return (bytes + 63) / 64 * 64; }

    // Plan another tensor and return its index i. Its memory is `data(i)` once the tensors are allocated.
    size_t add(DataType dtype, int ndim, const int64_t* shape) {
        TensorPlan plan{dtype, ndim, {}, dtype.bytes(), false, nullptr};
        // Axes of length 0 do not make the product 0, because the strides of an empty tensor must not overflow either.
        bool is_empty = false;
        for (int d = 0; d < ndim; ++d) {
            plan.shape[d] = shape[d];
            if (shape[d] < 0 || (shape[d] > 0 && plan.bytes > kMaxBytes / shape[d])) throw OutOfMemory();
            plan.bytes *= shape[d] ? shape[d] : 1;
            is_empty = is_empty || shape[d] == 0;
        }
        if (is_empty) plan.bytes = 0;
        total_ += round_up(plan.bytes);
        if (total_ > kMaxBytes) throw OutOfMemory();
        require_memory(total_);
        plan.in_shared_block = shared_bytes_ + round_up(plan.bytes) <= kSharedBytes;
        if (plan.in_shared_block) {
            ++num_shared_;
            shared_bytes_ += round_up(plan.bytes);
        }
        plans_.push_back(plan);
        return plans_.size() - 1;
    }

    // Plan a tensor [lead…, shape…]. `what` names it in the error for too many axes.
    size_t add(DataType dtype, int lead_ndim, const int64_t* lead, int ndim, const int64_t* shape, const char* what) {
        if (lead_ndim + ndim > kMaxDims) throw std::invalid_argument(std::string(what) + ": expected fewer axes");
        int64_t whole[kMaxDims];
        std::copy_n(shape, ndim, std::copy_n(lead, lead_ndim, whole));
        return add(dtype, lead_ndim + ndim, whole);
    }

    std::vector<TensorPlan>& plans() { return plans_; }
    char* data(size_t i) const { return plans_[i].data; }
    template <class T>
    T* as(size_t i) const {
        return reinterpret_cast<T*>(plans_[i].data);
    }
    int64_t bytes() const { return total_; }
    size_t num_shared() const { return num_shared_; }
    int64_t shared_bytes() const { return shared_bytes_; }

private:
    static constexpr int64_t kSharedBytes = 1 << 17;
    // More bytes than any address space has, and few enough that sums of such sizes cannot overflow.
    static constexpr int64_t kMaxBytes = int64_t{1} << 48;

    std::vector<TensorPlan> plans_;
    size_t num_shared_ = 0;
    int64_t shared_bytes_ = 0, total_ = 0;
};

// Reuses freed blocks, which are still in the processor's cache and have mapped pages. malloc would rather return
// another block, or unmap the pages.
class BlockCache {
public:
    // Allocate `bytes`, a multiple of 64. Returns null if memory is exhausted.
    void* allocate(size_t bytes) {
        void* memory = is_cached(bytes) ? find(bytes) : nullptr;
        return memory ? memory : std::aligned_alloc(64, bytes);
    }

    void give_back(void* memory, size_t bytes) {
        if (!is_cached(bytes)) return std::free(memory);
        // This never waits for the mutex, because in a forked child its holder may not exist.
        const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
        if (!lock) return std::free(memory);
        if (count_ == kMaxBlocks) {
            std::free(blocks_[0].memory);
            std::copy(blocks_ + 1, blocks_ + count_--, blocks_);
        }
        blocks_[count_++] = {memory, bytes};
    }

    static BlockCache& instance() {
        // The cache is never freed, because tensors may outlive the module.
        static BlockCache* instance = new BlockCache;
        return *instance;
    }

private:
    static constexpr size_t kSmallest = 1 << 16, kLargest = 1 << 22, kMaxBlocks = 4;

    static bool is_cached(size_t bytes) { return bytes >= kSmallest && bytes <= kLargest; }

    void* find(size_t bytes) {
        const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
        if (!lock) return nullptr;
        for (size_t i = count_; i-- > 0;)
            if (blocks_[i].bytes == bytes) {
                void* memory = blocks_[i].memory;
                std::copy(blocks_ + i + 1, blocks_ + count_--, blocks_ + i);
                return memory;
            }
        return nullptr;
    }

    struct Block {
        void* memory;
        size_t bytes;
    };

    std::mutex mutex_;
    Block blocks_[kMaxBlocks];
    size_t count_ = 0;
};

}
