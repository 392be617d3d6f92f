// Makes the torch tensors of a plan. Small tensors share one block of memory, but each has its own torch storage.
#pragma once
#include <nanobind/nanobind.h>

#include <atomic>
#include <memory>
#include <new>

#include "../core/tensor_plans.hpp"
#include "arguments.hpp"

namespace relive::bind {

// A block of memory with this header, a DLPack description per tensor, and the tensors. It is freed with its last
// tensor.
class TensorBlock {
public:
    static TensorBlock* make(size_t count, int64_t bytes) {
        const auto size = static_cast<size_t>(round_up(kHeader + descriptions_bytes(count) + bytes));
        void* memory = BlockCache::instance().allocate(size);
        if (!memory) throw OutOfMemory();
        auto* block = new (memory) TensorBlock;
        block->size_ = size;
        return block;
    }

    // Drops a reference to a block. The code that makes the block holds one reference, and each tensor holds one.
    struct Release {
        void operator()(TensorBlock* block) const {
            if (block->references_.fetch_sub(1, std::memory_order_acq_rel) == 1)
                BlockCache::instance().give_back(block, block->size_);
        }
    };

    char* memory(size_t count) { return reinterpret_cast<char*>(descriptions()) + descriptions_bytes(count); }

    // Describe tensor `i` for torch, which drops the reference to this block when the tensor is freed.
    dlpack::ManagedTensor* describe(size_t i, const TensorPlan& plan) {
        Description& description = descriptions()[i];
        int64_t stride = 1;
        for (int d = plan.ndim - 1; d >= 0; --d) {
            description.shape[d] = plan.shape[d];
            description.strides[d] = stride;
            stride *= plan.shape[d];
        }
        const dlpack::Tensor tensor{plan.data, {dlpack::kCPU, 0}, plan.ndim, plan.dtype, description.shape,
                                    description.strides, 0};
        description.tensor = {{1, 0}, this, release, 0, tensor};
        references_.fetch_add(1, std::memory_order_relaxed);
        return &description.tensor;
    }

private:
    struct Description {
        dlpack::ManagedTensor tensor;
        int64_t shape[kMaxDims];
        int64_t strides[kMaxDims];
    };

    static constexpr int64_t kHeader = 64;

    static constexpr int64_t round_up(int64_t bytes) { return TensorPlans::round_up(bytes); }
    static constexpr int64_t descriptions_bytes(size_t count) {
        return round_up(static_cast<int64_t>(count * sizeof(Description)));
    }
    static void release(dlpack::ManagedTensor* tensor) { Release{}(static_cast<TensorBlock*>(tensor->context)); }

    Description* descriptions() { return reinterpret_cast<Description*>(reinterpret_cast<char*>(this) + kHeader); }

    std::atomic<int64_t> references_{1};
    size_t size_ = 0;
};

using OwnedBlock = std::unique_ptr<TensorBlock, TensorBlock::Release>;

inline nb::list make_tensors(TensorPlans& plans) {
    nb::list out;
    OwnedBlock shared;
    char* next = nullptr;
    size_t described = 0;
    for (TensorPlan& plan : plans.plans()) {
        PyObject* tensor = nullptr;
        if (plan.in_shared_block) {
            if (!shared) {
                shared.reset(TensorBlock::make(plans.num_shared(), plans.shared_bytes()));
                next = shared->memory(plans.num_shared());
            }
            plan.data = next;
            next += TensorPlans::round_up(plan.bytes);
            tensor = conversion().adopt(shared->describe(described++, plan));
        } else {
            const OwnedBlock own(TensorBlock::make(1, plan.bytes));
            plan.data = own->memory(1);
            tensor = conversion().adopt(own->describe(0, plan));
        }
        if (!tensor) throw nb::python_error();
        out.append(nb::steal(tensor));
    }
    return out;
}

// Make a tensor of `count` numbers and return its memory.
template <class T>
T* make_vector(nb::object& tensor, DataType dtype, int64_t count) {
    check_count(count);
    TensorPlans plans;
    plans.add(dtype, 1, &count);
    tensor = make_tensors(plans)[0];
    return plans.as<T>(0);
}

}
