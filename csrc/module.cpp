// The native core as one Python module. Each part binds itself; this file only lists the parts.
#include <nanobind/nanobind.h>

#include "border.hpp"

namespace nb = nanobind;

namespace relive {

Border& border() {
    static Border instance;
    return instance;
}

void bind_columns(nb::module_& m);
void bind_estimators(nb::module_& m);
void bind_lock(nb::module_& m);
void bind_ring(nb::module_& m);
void bind_sequences(nb::module_& m);
void bind_tree(nb::module_& m);
#ifdef RELIVE_SANITIZE
void bind_plant(nb::module_& m);
#endif

}  // namespace relive

NB_MODULE(_native, m) {
    using relive::border;
    m.def("set_torch", [](nb::handle tensor_type, nb::handle parameter_type) {
        border().set_torch(tensor_type.inc_ref().ptr(), parameter_type.inc_ref().ptr());
    });
    m.def("exchange", [] { return border().exchange(); });
    m.def("set_exchange", [](bool on) { border().set_exchange(on); });
    relive::bind_columns(m);
    relive::bind_estimators(m);
    relive::bind_lock(m);
    relive::bind_ring(m);
    relive::bind_sequences(m);
    relive::bind_tree(m);
#ifdef RELIVE_SANITIZE
    relive::bind_plant(m);
#endif
}
