// The native core as one Python module. Each family binds itself; this file only lists the families.
#include <nanobind/nanobind.h>

#include <stdexcept>
#include <vector>

#include "conversion.hpp"

namespace nb = nanobind;

namespace relive::bind {

Conversion& conversion() {
    static Conversion instance;
    return instance;
}

void bind_columns(nb::module_& m);
void bind_counting(nb::module_& m);
void bind_crc32(nb::module_& m);
void bind_estimators(nb::module_& m);
void bind_flattening(nb::module_& m);
void bind_gather(nb::module_& m);
void bind_guarded_lock(nb::module_& m);
void bind_plan_reader(nb::module_& m);
void bind_process_lock(nb::module_& m);
void bind_ring(nb::module_& m);
void bind_sequences(nb::module_& m);
void bind_priority_tree(nb::module_& m);
void bind_write_back(nb::module_& m);

}  // namespace relive::bind

namespace {

// Objects of these types are read in their own memory: nothing else may pass for one of them.
bool is_type(nb::handle type, const char* module, const char* name) {
    return PyType_Check(type.ptr()) && nb::str(type.attr("__module__")).equal(nb::str(module)) &&
                       nb::str(type.attr("__name__")).equal(nb::str(name));
}

}  // namespace

NB_MODULE(_native, m) {
    using namespace relive::bind;
    m.doc() = "The native core. Arrays are torch tensors, or numpy arrays where torch lacks the exchange API.";
    nb::set_leak_warnings(false);  // a process keeps its arguments to its end, and buffers may be among them
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
    bind_columns(m);
    bind_counting(m);
    bind_crc32(m);
    bind_estimators(m);
    bind_flattening(m);
    bind_gather(m);
    bind_guarded_lock(m);
    bind_plan_reader(m);
    bind_process_lock(m);
    bind_ring(m);
    bind_sequences(m);
    bind_priority_tree(m);
    bind_write_back(m);
}
