// The few structs of the DLPack ABI (v1) that are needed to meet a torch tensor without linking torch.
#pragma once
#include <cstdint>

namespace relive::dlpack {

enum DeviceType : int32_t { kCPU = 1 };
enum TypeCode : uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kComplex = 5, kBool = 6 };

struct Device {
    int32_t type;
    int32_t id;
};

struct DataType {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
};

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

}  // namespace relive::dlpack
