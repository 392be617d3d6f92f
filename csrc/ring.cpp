// Bindings of the ring.
#include <nanobind/stl/vector.h>

#include "ring_memory.hpp"

#if defined(__linux__)
#include <fcntl.h>
#endif

namespace relive {
namespace {

// Begin to write a range of a file to the disk, without waiting for it.
void write_behind(int file, int64_t offset, int64_t bytes) {
#if defined(__linux__)
    sync_file_range(file, offset, bytes, SYNC_FILE_RANGE_WRITE);
#else
    static_cast<void>(file), static_cast<void>(offset), static_cast<void>(bytes);
#endif
}

}  // namespace

void bind_ring(nb::module_& m) {
    m.attr("MOST_FRAMES") = kMostFrames;
    m.attr("LOOKS_CUT") = kLooksCut;
    m.attr("LOOKS_RESET") = kLooksReset;
    nb::class_<Touched>(m, "Touched").def_ro("slots", &Touched::slots);
    nb::class_<RingMemory>(m, "RingMemory")
        .def(nb::init<nb::list, nb::list, std::vector<int>, nb::list, nb::tuple, nb::object, nb::object, int64_t, bool, bool, bool, int, int, int>(),
             nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg(),
             nb::arg(), nb::arg(), nb::arg(), nb::arg())
        .def("write", &RingMemory::write, nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg())
        .def("seal_all", &RingMemory::seal_all)
        .def("find_broken", &RingMemory::find_broken)
        .def("fetch", &RingMemory::fetch)
        .def_static("write_behind", &write_behind)
        .def("counted", &RingMemory::counted)
        .def("foreseen", &RingMemory::foreseen)
        .def("keep_touched", &RingMemory::keep_touched)
        .def_prop_ro("touched", &RingMemory::touched, nb::rv_policy::reference_internal)
        .def("stored", &RingMemory::stored)
        .def("draw", &RingMemory::draw, nb::arg(), nb::arg(), nb::arg().none())
        .def("ids", &RingMemory::ids, nb::arg(), nb::arg().none())
        .def("following", &RingMemory::following, nb::arg(), nb::arg().none())
        .def("ahead", &RingMemory::ahead, nb::arg(), nb::arg().none())
        .def("behind", &RingMemory::behind, nb::arg(), nb::arg().none())
        .def("locate", &RingMemory::locate, nb::arg(), nb::arg().none())
        .def("holds", &RingMemory::holds)
        .def("n_steps", &RingMemory::n_steps)
        .def("sequences", &RingMemory::sequences)
        .def("window", &RingMemory::window)
        .def("sample", &RingMemory::sample)
        .def("transitions", &RingMemory::transitions)
        .def("stack", &RingMemory::stack);
}

}  // namespace relive
