// Fresh torch tensors, several at once.
//
// Making a tensor costs more than filling a small one. The tensors of a small batch therefore share one block of memory,
// which lives as long as any of them; each has a storage of its own. Large ones are allocated by torch, one by one, so
// that keeping the rewards of a batch does not keep its images.
#pragma once
#include <atomic>
#include <cstdlib>
#include <new>
#include <vector>

#include "bindings.hpp"

namespace recollect {

class Fresh {
public:
    // Plan one more tensor. Its memory is in `data(i)` once `make` has been called.
    void add(DataType dtype, int ndim, const int64_t* shape) {
        Plan plan{dtype, ndim, {}, 0, nullptr};
        plan.bytes = dtype.bits / 8;
        for (int d = 0; d < ndim; ++d) {
            plan.shape[d] = shape[d];
            if (shape[d] < 0 || (shape[d] > 0 && plan.bytes > kMostBytes / shape[d])) throw std::bad_alloc();
            plan.bytes *= shape[d];
        }
        total_ += round_up(plan.bytes);
        if (total_ > kMostBytes) throw std::bad_alloc();
        plans_.push_back(plan);
    }

    nanobind::list make() {
        nanobind::list out;
        Block* block = total_ <= kSharedBytes && !plans_.empty() ? Block::make(plans_.size(), total_) : nullptr;
        char* next = block ? block->memory(plans_.size()) : nullptr;
        for (size_t i = 0; i < plans_.size(); ++i) {
            Plan& plan = plans_[i];
            PyObject* tensor = nullptr;
            if (block) {
                plan.data = next;
                next += round_up(plan.bytes);
                tensor = border().adopt(block->describe(i, plan.data, plan.dtype, plan.ndim, plan.shape));
            } else {
                tensor = border().empty(plan.dtype, plan.ndim, plan.shape, &plan.data);
            }
            if (!tensor) throw nanobind::python_error();
            out.append(nanobind::steal(tensor));
        }
        return out;
    }

    char* data(size_t i) const { return plans_[i].data; }

private:
    static constexpr int64_t kSharedBytes = 1 << 17;
    static constexpr int64_t kMostBytes = int64_t{1} << 48;  // more than any address space: sums of it cannot wrap

    static constexpr int64_t round_up(int64_t bytes) { return (bytes + 63) / 64 * 64; }

    struct Plan {
        DataType dtype;
        int ndim;
        int64_t shape[kMaxDims];
        int64_t bytes;
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

        static constexpr int64_t kHeader = 64;

        static Block* make(size_t count, int64_t bytes) {
            const int64_t size = kHeader + round_up(static_cast<int64_t>(count * sizeof(Entry))) + bytes;
            void* memory = std::aligned_alloc(64, static_cast<size_t>(round_up(size)));
            if (!memory) throw std::bad_alloc();
            auto* block = new (memory) Block{};
            block->alive = static_cast<int64_t>(count);
            return block;
        }

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
            return &entry.tensor;
        }

        static void release(dlpack::ManagedTensor* tensor) {
            auto* block = static_cast<Block*>(tensor->context);
            if (block->alive.fetch_sub(1, std::memory_order_acq_rel) == 1) std::free(block);
        }
    };

    std::vector<Plan> plans_;
    int64_t total_ = 0;
};

}  // namespace recollect
