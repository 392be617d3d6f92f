// The few structs of the DLPack ABI (v1) that are needed to exchange tensors with torch without linking it.
#pragma once
#include <cstdint>

#include "../core/array_view.hpp"

namespace relive::bind::dlpack {

enum DeviceType : int32_t { kCPU = 1 };

struct Device {
    int32_t type;
    int32_t id;
};

static_assert(sizeof(DataType) == 4);

struct Tensor {
    void* data;
    Device device;
    int32_t ndim;
    DataType dtype;
    int64_t* shape;
    int64_t* strides;  // in elements
    uint64_t byte_offset;
};

struct Version {
    uint32_t major;
    uint32_t minor;
};

struct ManagedTensor {
    Version version;
    void* context;
    void (*deleter)(ManagedTensor*);
    uint64_t flags;
    Tensor tensor;
};

// The table that `torch.Tensor.__dlpack_c_exchange_api__` points to.
struct ExchangeApi {
    Version version;
    void* previous;
    int (*allocate)(Tensor* prototype, ManagedTensor** out, void* error_context,
                    void (*set_error)(void*, const char* kind, const char* message));
    int (*from_object)(void* object, ManagedTensor** out);
    int (*to_object)(ManagedTensor* tensor, void** out);
    int (*borrow)(void* object, Tensor* out);
    int (*current_stream)(int32_t device_type, int32_t device_id, void** out);
};

}  // namespace relive::bind::dlpack
