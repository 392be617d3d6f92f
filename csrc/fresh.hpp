// Fresh torch tensors, several at once.
//
// Making a tensor costs more than filling a small one. The small tensors of a batch therefore share one block of memory,
// which lives as long as any of them; each has a storage of its own. Large ones have a block each, so that keeping the
// rewards of a batch does not keep its images.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "bindings.hpp"

namespace relive {

// The blocks that were freed last, for the next ones of their size: they are still in the cache, and their pages are there.
// An allocator would hand out others first, or give them back.
class Spares {
public:
    void* take(size_t bytes) {
        void* memory = keeps(bytes) ? find(bytes) : nullptr;
        return memory ? memory : std::aligned_alloc(64, bytes);
    }

    void give(void* memory, size_t bytes) {
        if (!keeps(bytes)) return std::free(memory);
        const std::unique_lock<std::mutex> held(mutex_, std::try_to_lock);  // nobody waits: a forked child might for ever
        if (!held) return std::free(memory);
        if (kept_ == kMost) {
            std::free(spares_[0].memory);
            std::copy(spares_ + 1, spares_ + kept_--, spares_);
        }
        spares_[kept_++] = {memory, bytes};
    }

    static Spares& all() {
        static Spares* instance = new Spares;  // never destroyed: tensors may outlive the module
        return *instance;
    }

private:
    static constexpr size_t kSmallest = 1 << 16, kLargest = 1 << 22, kMost = 4;

    static bool keeps(size_t bytes) { return bytes >= kSmallest && bytes <= kLargest; }

    void* find(size_t bytes) {
        const std::unique_lock<std::mutex> held(mutex_, std::try_to_lock);
        if (!held) return nullptr;
        for (size_t i = kept_; i-- > 0;)
            if (spares_[i].bytes == bytes) {
                void* memory = spares_[i].memory;
                std::copy(spares_ + i + 1, spares_ + kept_--, spares_ + i);
                return memory;
            }
        return nullptr;
    }

    struct Spare {
        void* memory;
        size_t bytes;
    };

    std::mutex mutex_;
    Spare spares_[kMost];
    size_t kept_ = 0;
};

class Fresh {
public:
    // Plan one more tensor. Its memory is in `data(i)` once `make` has been called.
    void add(DataType dtype, int ndim, const int64_t* shape) {
        Plan plan{dtype, ndim, {}, 0, false, nullptr};
        plan.bytes = dtype.bits / 8;
        for (int d = 0; d < ndim; ++d) {
            plan.shape[d] = shape[d];
            if (shape[d] < 0 || (shape[d] > 0 && plan.bytes > kMostBytes / shape[d])) throw std::bad_alloc();
            plan.bytes *= shape[d];
        }
        total_ += round_up(plan.bytes);
        if (total_ > kMostBytes) throw std::bad_alloc();
        plan.shared = shared_bytes_ + round_up(plan.bytes) <= kSharedBytes;
        if (plan.shared) {
            ++shared_;
            shared_bytes_ += round_up(plan.bytes);
        }
        plans_.push_back(plan);
    }

    nanobind::list make() {
        nanobind::list out;
        std::unique_ptr<Block, Block::Drop> block;
        char* next = nullptr;
        size_t entry = 0;
        for (Plan& plan : plans_) {
            PyObject* tensor = nullptr;
            if (plan.shared) {
                if (!block) {
                    block.reset(Block::make(shared_, shared_bytes_));
                    next = block->memory(shared_);
                }
                plan.data = next;
                next += round_up(plan.bytes);
                tensor = border().adopt(block->describe(entry++, plan.data, plan.dtype, plan.ndim, plan.shape));
            } else {
                const std::unique_ptr<Block, Block::Drop> own(Block::make(1, plan.bytes));
                plan.data = own->memory(1);
                tensor = border().adopt(own->describe(0, plan.data, plan.dtype, plan.ndim, plan.shape));
            }
            if (!tensor) throw nanobind::python_error();
            out.append(nanobind::steal(tensor));
        }
        return out;
    }

    char* data(size_t i) const { return plans_[i].data; }
    int64_t bytes() const { return total_; }

private:
    static constexpr int64_t kSharedBytes = 1 << 17;
    static constexpr int64_t kMostBytes = int64_t{1} << 48;  // more than any address space: sums of it cannot wrap

    static constexpr int64_t round_up(int64_t bytes) { return (bytes + 63) / 64 * 64; }

    struct Plan {
        DataType dtype;
        int ndim;
        int64_t shape[kMaxDims];
        int64_t bytes;
        bool shared;
        char* data;
    };

    // One allocation: this header, a description of each tensor, their memory.
    struct Block {
        struct Entry {
            dlpack::ManagedTensor tensor;
            int64_t shape[kMaxDims];
            int64_t strides[kMaxDims];
        };

        std::atomic<int64_t> alive;
        size_t size;

        static constexpr int64_t kHeader = 64;

        static Block* make(size_t count, int64_t bytes) {
            const auto size = static_cast<size_t>(
                round_up(kHeader + round_up(static_cast<int64_t>(count * sizeof(Entry))) + bytes));
            void* memory = Spares::all().take(size);
            if (!memory) throw std::bad_alloc();
            auto* block = new (memory) Block{};
            block->alive = 1;  // the maker's, until every tensor has its own
            block->size = size;
            return block;
        }

        struct Drop {
            void operator()(Block* block) const {
                if (block->alive.fetch_sub(1, std::memory_order_acq_rel) == 1) Spares::all().give(block, block->size);
            }
        };

        Entry* entries() { return reinterpret_cast<Entry*>(reinterpret_cast<char*>(this) + kHeader); }

        char* memory(size_t count) {
            return reinterpret_cast<char*>(entries()) + round_up(static_cast<int64_t>(count * sizeof(Entry)));
        }

        dlpack::ManagedTensor* describe(size_t i, char* data, DataType dtype, int ndim, const int64_t* shape) {
            Entry& entry = entries()[i];
            int64_t stride = 1;
            for (int d = ndim - 1; d >= 0; --d) {
                entry.shape[d] = shape[d];
                entry.strides[d] = stride;
                stride *= shape[d];
            }
            entry.tensor = {{1, 0}, this, release, 0, {data, {dlpack::kCPU, 0}, ndim, dtype, entry.shape, entry.strides, 0}};
            alive.fetch_add(1, std::memory_order_relaxed);
            return &entry.tensor;
        }

        static void release(dlpack::ManagedTensor* tensor) { Drop{}(static_cast<Block*>(tensor->context)); }
    };

    std::vector<Plan> plans_;
    size_t shared_ = 0;
    int64_t shared_bytes_ = 0, total_ = 0;
};

// The memory to write `count` numbers to: a fresh tensor's, or that of `out` where tensors cannot be made from C.
template <class T>
T* target(nanobind::object& out, DataType dtype, int64_t count) {
    if (!out.is_none()) return memory_of<T>(out, dtype, count, "out");
    Fresh fresh;
    fresh.add(dtype, 1, &count);
    out = fresh.make()[0];
    return reinterpret_cast<T*>(fresh.data(0));
}

}  // namespace relive
