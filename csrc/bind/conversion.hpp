// Views of the memory of Python objects, and torch tensors made from memory.
//
// torch tensors are read and made through DLPack: by its C exchange API (torch 2.10 and later), otherwise by capsules.
// numpy arrays are read directly, and other objects through the buffer protocol. Values are not converted and errors
// not explained here: reading returns false for anything but a plain CPU array, and Python then converts the object or
// raises. An `Array` holds the buffer of its object, because an exporter may otherwise resize or free the memory.
#pragma once
#include <Python.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "../core/arrays.hpp"

// Structs of the DLPack ABI (v1) for exchanging tensors with torch without linking it.
namespace relive::bind::dlpack {

enum DeviceType : int32_t { kCPU = 1 };

static_assert(sizeof(DataType) == 4);

struct Device {
    int32_t type, id;
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
    uint32_t major, minor;
};

struct ManagedTensor {
    Version version;
    void* context;
    void (*deleter)(ManagedTensor*);
    uint64_t flags;
    Tensor tensor;
};

// The content of a capsule "dltensor".
struct CapsuleTensor {
    Tensor tensor;
    void* context;
    void (*deleter)(CapsuleTensor*);
};

// The function table at `torch.Tensor.__dlpack_c_exchange_api__`.
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

}

// Structs of numpy's ABI for reading arrays without its headers; identical in numpy 1 and 2.
//
// The buffer protocol gives the same information, but builds a format string and a table entry per array, which takes
// longer than copying a small step.
namespace relive::bind::numpy {

struct Array {
    PyObject_HEAD
    char* data;
    int ndim;
    Py_ssize_t* shape;
    Py_ssize_t* strides;  // in bytes
    PyObject* base;
    PyObject* descr;
    int flags;
};

struct Descr {
    PyObject_HEAD
    PyObject* type;
    char kind, letter, byteorder, flags;
    int number;
};

constexpr int kContiguous = 0x0001, kAligned = 0x0100, kWriteable = 0x0400;

// Convert numpy's type number to a dtype. Returns false for types other than bool, integers and floats.
inline bool get_dtype(int number, DataType& out) {
    constexpr uint8_t kLong = sizeof(long) * 8;
    constexpr DataType kTypes[] = {kBool, {kInt, 8, 1}, kUInt8, {kInt, 16, 1}, {kUInt, 16, 1}, {kInt, 32, 1},
                                   {kUInt, 32, 1}, {kInt, kLong, 1}, {kUInt, kLong, 1}, kInt64, {kUInt, 64, 1},
                                   kFloat32, kFloat64};
    if (number < 0 || number >= static_cast<int>(sizeof kTypes / sizeof kTypes[0])) return false;
    out = kTypes[number];
    return true;
}

// Read a numpy array directly. Returns false for an array that is not plain, which the buffer protocol may still read.
inline bool read(PyObject* object, ArrayView& out) {
    const auto* array = reinterpret_cast<const Array*>(object);
    const auto* descr = reinterpret_cast<const Descr*>(array->descr);
    if (!(array->flags & kAligned) || (descr->byteorder != '=' && descr->byteorder != '|')) return false;
    if (array->ndim > kMaxDims || !get_dtype(descr->number, out.dtype)) return false;
    out.data = array->data;
    out.is_writable = array->flags & kWriteable;
    out.ndim = array->ndim;
    // Axes of length one and axes of empty arrays may have any stride; normalise them as the buffer protocol does.
    const bool is_contiguous = array->flags & kContiguous;
    // Unsigned, because the product of the sizes of an empty array may overflow.
    uint64_t stride = 1;
    for (int i = array->ndim - 1; i >= 0; --i) {
        out.shape[i] = array->shape[i];
        if (!is_contiguous && array->strides[i] % out.itemsize() != 0) return false;
        out.strides[i] = is_contiguous ? static_cast<int64_t>(stride) : array->strides[i] / out.itemsize();
        stride *= static_cast<uint64_t>(array->shape[i]);
    }
    return true;
}

}

namespace relive::bind {

// The buffer of a Python object, released when this object is destroyed or acquires another one. The caller holds the
// GIL.
class BufferHold {
public:
    BufferHold() { view_.obj = nullptr; }
    BufferHold(BufferHold&& other) noexcept : view_(other.view_) { other.view_.obj = nullptr; }
    BufferHold& operator=(BufferHold&& other) noexcept {
        std::swap(view_, other.view_);
        return *this;
    }
    ~BufferHold() { release(); }

    // Acquire the buffer of an object. Returns null, without a Python error, if it exports no strided buffer.
    const Py_buffer* acquire(PyObject* object) {
        release();
        if (PyObject_GetBuffer(object, &view_, PyBUF_STRIDES | PyBUF_FORMAT) == 0) return &view_;
        PyErr_Clear();
        view_.obj = nullptr;
        return nullptr;
    }

    void release() {
        // PyBuffer_Release also sets view_.obj to null, so another call of `release` does nothing.
        if (view_.obj) PyBuffer_Release(&view_);
    }

private:
    Py_buffer view_;
};

// An array and, for objects that were read by the buffer protocol, the `Py_buffer` that keeps the memory in place.
// Tensors and numpy arrays need none: the caller holds a reference, and numpy refuses to resize a referenced array by
// default.
struct Array : ArrayView {
    BufferHold hold;
};

class Conversion {
public:
    // Store the two classes of torch whose instances are read: Tensor and Parameter. Instances of other subclasses are
    // not read, because they may redefine what their data means.
    void set_torch(PyObject* tensor_type, PyObject* parameter_type) {
        tensor_type_ = tensor_type;
        parameter_type_ = parameter_type;
        is_neg_ = PyUnicode_InternFromString("is_neg");
        is_conj_ = PyUnicode_InternFromString("is_conj");
        PyObject* capsule = PyObject_GetAttrString(tensor_type, "__dlpack_c_exchange_api__");
        if (capsule) {
            api_ = static_cast<dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
            Py_DECREF(capsule);
            if (api_ && (api_->version.major != 1 || !api_->borrow)) api_ = nullptr;
        }
        PyErr_Clear();
        PyObject* module = PyImport_ImportModule("torch.utils.dlpack");
        to_dlpack_ = module ? PyObject_GetAttrString(module, "to_dlpack") : nullptr;
        from_dlpack_ = module ? PyObject_GetAttrString(module, "from_dlpack") : nullptr;
        Py_XDECREF(module);
        PyErr_Clear();
    }

    // Store the class numpy.ndarray, whose instances are then read directly. If reading one of `probes` directly gives
    // another view than the buffer protocol, the class is not stored, and arrays are read through the buffer protocol.
    void set_numpy(PyObject* array_type, PyObject* const* probes, size_t count) {
        for (size_t i = 0; i < count; ++i) {
            Array direct, buffered;
            if (reinterpret_cast<PyObject*>(Py_TYPE(probes[i])) != array_type || !numpy::read(probes[i], direct) ||
                !read_buffer(probes[i], buffered) || !are_equal(direct, buffered))
                return;
        }
        array_type_ = array_type;
    }

    bool reads_numpy() const { return array_type_ != nullptr; }

    bool exchange() const { return api_ != nullptr && exchange_on_; }
    void set_exchange(bool on) { exchange_on_ = on; }

    // Read a plain CPU array. Returns false, without a Python error, for any other object. `out` borrows the object's
    // memory and holds its buffer. An exporter written in Python runs during this call and again when the buffer is
    // released.
    bool read(PyObject* object, Array& out) const {
        PyTypeObject* type = Py_TYPE(object);
        if (reinterpret_cast<PyObject*>(type) == tensor_type_ || reinterpret_cast<PyObject*>(type) == parameter_type_)
            return read_tensor(object, out);
        if (reinterpret_cast<PyObject*>(type) == array_type_ && numpy::read(object, out)) return true;
        return read_buffer(object, out);
    }

    // Return the address of a torch tensor, or null if the tensor is not in host memory.
    const char* get_address(PyObject* tensor) const {
        const char* address = nullptr;
        borrow(tensor, [&](const dlpack::Tensor& t) {
            if (t.device.type == dlpack::kCPU) address = static_cast<const char*>(t.data) + t.byte_offset;
            return true;
        });
        return address;
    }

    // Make a torch tensor that takes over the memory. Returns a new reference, or null with a Python error set.
    PyObject* adopt(dlpack::ManagedTensor* tensor) const {
        void* object = nullptr;
        if (exchange()) return api_->to_object(tensor, &object) == 0 ? static_cast<PyObject*>(object) : nullptr;
        auto* content = new dlpack::CapsuleTensor{tensor->tensor, tensor, delete_tensor};
        PyObject* capsule = PyCapsule_New(content, kCapsule, delete_capsule);
        if (!capsule) return delete_tensor(content), nullptr;
        PyObject* result = PyObject_CallOneArg(from_dlpack_, capsule);
        Py_DECREF(capsule);
        return result;
    }

private:
    static bool are_equal(const Array& a, const Array& b) {
        return a.data == b.data && a.dtype == b.dtype && same_shape(a, b) &&
               std::equal(a.strides, a.strides + a.ndim, b.strides);
    }

    static constexpr const char* kCapsule = "dltensor";

    static void delete_tensor(dlpack::CapsuleTensor* tensor) {
        auto* managed = static_cast<dlpack::ManagedTensor*>(tensor->context);
        managed->deleter(managed);
        delete tensor;
    }

    // Free the tensor of a capsule, unless torch has taken the tensor over, which renames the capsule.
    static void delete_capsule(PyObject* capsule) {
        if (!PyCapsule_IsValid(capsule, kCapsule)) return;
        auto* tensor = static_cast<dlpack::CapsuleTensor*>(PyCapsule_GetPointer(capsule, kCapsule));
        tensor->deleter(tensor);
    }

    // Return `visit(tensor)` for the DLPack description of a torch tensor, or false, without a Python error, for a
    // tensor without one, such as a meta or sparse tensor.
    template <class Visit>
    bool borrow(PyObject* object, Visit visit) const {
        dlpack::Tensor tensor;
        if (exchange()) {
            if (api_->borrow(object, &tensor) == 0) return visit(tensor);
            PyErr_Clear();
            return false;
        }
        PyObject* capsule = PyObject_CallOneArg(to_dlpack_, object);
        void* description = capsule ? PyCapsule_GetPointer(capsule, kCapsule) : nullptr;
        const bool result = description && visit(static_cast<dlpack::CapsuleTensor*>(description)->tensor);
        Py_XDECREF(capsule);
        PyErr_Clear();
        return result;
    }

    static bool truth(PyObject* object, PyObject* method) {
        PyObject* result = PyObject_VectorcallMethod(method, &object, 1, nullptr);
        const bool yes = result != Py_False;
        Py_XDECREF(result);
        if (!result) PyErr_Clear();
        return yes;
    }

    bool read_tensor(PyObject* object, Array& out) const {
        return borrow(object, [&](const dlpack::Tensor& t) { return read_description(object, t, out); });
    }

    bool read_description(PyObject* object, const dlpack::Tensor& t, Array& out) const {
        if (t.device.type != dlpack::kCPU || t.ndim > kMaxDims || t.dtype.lanes != 1) return false;
        if (t.ndim > 0 && !t.strides) return false;
        // A lazily negated or conjugated tensor is refused, because its memory does not contain its values.
        if (t.dtype.code == kFloat && truth(object, is_neg_)) return false;
        if (t.dtype.code == kComplex && (truth(object, is_neg_) || truth(object, is_conj_))) return false;
        out.data = static_cast<char*>(t.data) + t.byte_offset;
        out.is_writable = true;
        out.dtype = t.dtype;
        out.ndim = t.ndim;
        std::copy_n(t.shape, t.ndim, out.shape);
        std::copy_n(t.strides, t.ndim, out.strides);
        return true;
    }

    // Convert a buffer's format. Returns false if the item size does not match the format letter (C sizes; `l`: 4 or
    // 8).
    static bool get_dtype(const char* format, int64_t itemsize, DataType& out) {
        if (!format) format = "B";
        // The format of a big-endian array starts with '>', which is refused here; Python then converts the array.
        if (format[0] == '@' || format[0] == '=' || format[0] == '<') ++format;
        const bool complex = format[0] == 'Z';
        if (complex) ++format;
        if (format[0] == 0 || format[1] != 0) return false;
        uint8_t code = kInt;
        int64_t size = 0;
        switch (format[0]) {
            case '?': code = kBoolean, size = 1; break;
            case 'B': code = kUInt; [[fallthrough]];
            case 'b': size = 1; break;
            case 'H': code = kUInt; [[fallthrough]];
            case 'h': size = 2; break;
            case 'I': code = kUInt; [[fallthrough]];
            case 'i': size = 4; break;
            case 'L': code = kUInt; [[fallthrough]];
            case 'l': size = itemsize == 4 ? 4 : 8; break;
            case 'Q': code = kUInt; [[fallthrough]];
            case 'q': size = 8; break;
            case 'e': code = kFloat, size = 2; break;
            case 'f': code = kFloat, size = 4; break;
            case 'd': code = kFloat, size = 8; break;
            default: return false;
        }
        if (complex && code != kFloat) return false;
        if (complex) code = kComplex, size *= 2;
        out = {code, static_cast<uint8_t>(itemsize * 8), 1};
        return itemsize == size;
    }

    static bool read_buffer(PyObject* object, Array& out) {
        if (!PyObject_CheckBuffer(object)) return false;
        const Py_buffer* view = out.hold.acquire(object);
        if (!view || view->ndim > kMaxDims || view->suboffsets) return false;
        // ctypes and some numpy scalars return no strides although strides were requested. These objects are refused
        // here and converted by Python, because their format may be ambiguous, as the format of a datetime64 is.
        if (view->ndim > 0 && (!view->shape || !view->strides)) return false;
        if (!get_dtype(view->format, view->itemsize, out.dtype)) return false;
        if (reinterpret_cast<uintptr_t>(view->buf) % static_cast<size_t>(view->itemsize) != 0) return false;
        out.data = static_cast<char*>(view->buf);
        out.is_writable = !view->readonly;
        out.ndim = view->ndim;
        for (int i = 0; i < view->ndim; ++i) {
            out.shape[i] = view->shape[i];
            if (view->strides[i] % view->itemsize != 0) return false;
            out.strides[i] = view->strides[i] / view->itemsize;
        }
        return true;
    }

    PyObject* tensor_type_ = nullptr;
    PyObject* parameter_type_ = nullptr;
    PyObject* array_type_ = nullptr;
    PyObject* is_neg_ = nullptr;
    PyObject* is_conj_ = nullptr;
    PyObject* to_dlpack_ = nullptr;
    PyObject* from_dlpack_ = nullptr;
    dlpack::ExchangeApi* api_ = nullptr;
    bool exchange_on_ = true;
};

// Return the only instance of `Conversion`, which module.cpp defines.
Conversion& conversion();

}
