// The native core as one Python module. Each part binds itself; this file only lists the parts.
#include <nanobind/nanobind.h>

#include "border.hpp"

namespace nb = nanobind;

namespace recollect {

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
#ifdef RECOLLECT_SANITIZE
void bind_plant(nb::module_& m);
#endif

}  // namespace recollect

NB_MODULE(_native, m) {
    using recollect::border;
    m.def("set_torch", [](nb::handle tensor_type, nb::handle parameter_type) {
        border().set_torch(tensor_type.inc_ref().ptr(), parameter_type.inc_ref().ptr());
    });
    m.def("exchange", [] { return border().exchange(); });
    m.def("set_exchange", [](bool on) { border().set_exchange(on); });
    recollect::bind_columns(m);
    recollect::bind_estimators(m);
    recollect::bind_lock(m);
    recollect::bind_ring(m);
    recollect::bind_sequences(m);
    recollect::bind_tree(m);
#ifdef RECOLLECT_SANITIZE
    recollect::bind_plant(m);
#endif
}
