// Fresh torch tensors, several at once.
//
// Making a tensor costs more than filling a small one. The small tensors of a batch therefore share one block of memory,
// which lives as long as any of them; each has a storage of its own. Large ones are allocated by torch, one by one, so
// that keeping the rewards of a batch does not keep its images.
#pragma once
#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "bindings.hpp"

namespace recollect {

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
        const std::unique_ptr<Block, Block::Drop> block(shared_ ? Block::make(shared_, shared_bytes_) : nullptr);
        char* next = block ? block->memory(shared_) : nullptr;
        size_t entry = 0;
        for (Plan& plan : plans_) {
            PyObject* tensor = nullptr;
            if (plan.shared) {
                plan.data = next;
                next += round_up(plan.bytes);
                tensor = border().adopt(block->describe(entry++, plan.data, plan.dtype, plan.ndim, plan.shape));
            } else {
                tensor = border().empty(plan.dtype, plan.ndim, plan.shape, &plan.data);
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

        static constexpr int64_t kHeader = 64;

        static Block* make(size_t count, int64_t bytes) {
            const int64_t size = kHeader + round_up(static_cast<int64_t>(count * sizeof(Entry))) + bytes;
            void* memory = std::aligned_alloc(64, static_cast<size_t>(round_up(size)));
            if (!memory) throw std::bad_alloc();
            auto* block = new (memory) Block{};
            block->alive = 1;  // the maker's, until every tensor has its own
            return block;
        }

        struct Drop {
            void operator()(Block* block) const {
                if (block->alive.fetch_sub(1, std::memory_order_acq_rel) == 1) std::free(block);
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

}  // namespace recollect
