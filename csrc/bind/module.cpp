// The Python module `_native`: its settings and bindings.
#include <nanobind/nanobind.h>

#include <stdexcept>
#include <vector>

#include "../core/crc32.hpp"
#include "arguments.hpp"

namespace relive::bind {

Conversion& conversion() {
    static Conversion instance;
    return instance;
}

void bind_estimators(nb::module_& m);
void bind_flattening(nb::module_& m);
void bind_locks(nb::module_& m);
void bind_priority_tree(nb::module_& m);
void bind_ring(nb::module_& m);
void bind_rollout(nb::module_& m);

}

namespace {

// Whether `type` is the class `name` of `module`. Instances are read as memory of a known layout, so other classes are
// refused.
bool is_type(nb::handle type, const char* module, const char* name) {
    return PyType_Check(type.ptr()) && nb::str(type.attr("__module__")).equal(nb::str(module)) &&
                       nb::str(type.attr("__name__")).equal(nb::str(name));
}

#ifdef RELIVE_CRC32
// Return the CRC-32 of an object's buffer. `previous` is the CRC-32 of the preceding bytes.
uint32_t checksum(nb::handle data, uint32_t previous) {
    Py_buffer view;
    if (PyObject_GetBuffer(data.ptr(), &view, PyBUF_SIMPLE) != 0) throw nb::python_error();
    uint32_t sum = 0;
    {
        const relive::bind::MaybeReleased released(view.len);
        sum = relive::crc::crc32(previous, static_cast<const unsigned char*>(view.buf), static_cast<size_t>(view.len));
    }
    PyBuffer_Release(&view);
    return sum;
}
#endif

}

NB_MODULE(_native, m) {
    using namespace relive::bind;
    m.doc() = "The native core. Arrays are torch tensors or objects with a buffer, such as numpy arrays.";
    // nanobind would report buffers that exist until the process ends as leaks, which they are not.
    nb::set_leak_warnings(false);
    m.def("set_torch", [](nb::handle tensor_type, nb::handle parameter_type) {
        if (!is_type(tensor_type, "torch", "Tensor") || !is_type(parameter_type, "torch.nn.parameter", "Parameter"))
            throw std::invalid_argument("types: expected torch.Tensor and torch.nn.Parameter");
        conversion().set_torch(tensor_type.inc_ref().ptr(), parameter_type.inc_ref().ptr());
    });
    m.def("set_numpy", [](nb::handle array_type, nb::list probes) {
        if (!is_type(array_type, "numpy", "ndarray")) return;
        std::vector<PyObject*> arrays;
        for (nb::handle probe : probes) arrays.push_back(probe.ptr());
        conversion().set_numpy(array_type.inc_ref().ptr(), arrays.data(), arrays.size());
    });
    m.def("reads_numpy", [] { return conversion().reads_numpy(); });
    m.def("exchange", [] { return conversion().exchange(); });
    m.def("set_exchange", [](bool on) { conversion().set_exchange(on); });
#ifdef RELIVE_CRC32
    if (relive::crc::has_fast_crc32()) m.def("crc32", &checksum, nb::arg(), nb::arg() = 0);
#endif
    bind_estimators(m);
    bind_flattening(m);
    bind_locks(m);
    bind_priority_tree(m);
    bind_ring(m);
    bind_rollout(m);
}
