// crc32: zlib's checksum of an object's buffer, only where the machine computes it faster than zlib.
#include "../core/crc32.hpp"

#include <nanobind/nanobind.h>

#include "gil.hpp"

namespace nb = nanobind;

namespace relive::bind {
namespace {

struct Bytes {
    explicit Bytes(nb::handle data) {
        if (PyObject_GetBuffer(data.ptr(), &view, PyBUF_SIMPLE) != 0) throw nb::python_error();
    }
    Bytes(const Bytes&) = delete;
    ~Bytes() { PyBuffer_Release(&view); }
    Py_buffer view;
};

uint32_t checksum(nb::handle data, uint32_t before) {
    const Bytes bytes(data);
    const MaybeReleased released(bytes.view.len);
    return crc32(before, static_cast<const unsigned char*>(bytes.view.buf), static_cast<size_t>(bytes.view.len));
}

}  // namespace

void bind_crc32(nb::module_& m) {
    if (has_fast_crc32()) m.def("crc32", &checksum, nb::arg(), nb::arg() = 0);
}

}  // namespace relive::bind
