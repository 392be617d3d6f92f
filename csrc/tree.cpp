// The priority tree as Python sees it. Nothing is converted: what does not fit exactly is answered by False or None.
#include "tree.hpp"

#include <nanobind/nanobind.h>

#include <stdexcept>
#include <utility>

#include "bindings.hpp"
#include "columns.hpp"
#include "random.hpp"

namespace nb = nanobind;

namespace recollect {
namespace {

constexpr int64_t kBytesTouched = 64;  // a leaf's cache line, for the question of releasing the GIL

bool vector_of(nb::handle object, DataType dtype, Array& out) {
    return border().read(object.ptr(), out) && out.dtype == dtype && out.ndim == 1 && out.contiguous();
}

// The memory to write `count` numbers to: a fresh tensor's, or that of `out` where tensors cannot be made from C.
template <class T>
T* target(nb::object& out, DataType dtype, int64_t count) {
    char* data = nullptr;
    if (out.is_none()) {
        PyObject* tensor = border().empty(dtype, 1, &count, &data);
        if (!tensor) throw nb::python_error();
        out = nb::steal(tensor);
        return reinterpret_cast<T*>(data);
    }
    Array array;
    if (!vector_of(out, dtype, array) || array.shape[0] != count)
        throw std::invalid_argument("out: another shape or dtype");
    return reinterpret_cast<T*>(array.data);
}

class PriorityTree {
public:
    // `memory` is float64 zeros, at least `num_leaves` rounded up to whole groups.
    PriorityTree(nb::object memory, int64_t num_leaves)
        : tree_(checked(memory, num_leaves), num_leaves), owner_(std::move(memory)) {}

    bool set(nb::handle leaves, nb::handle priorities) {
        Array index, values;
        if (!vector_of(leaves, kInt64, index)) return false;
        const int64_t count = index.shape[0];
        double number = 0;
        const bool single = PyFloat_Check(priorities.ptr());
        if (single) number = PyFloat_AsDouble(priorities.ptr());
        else if (!vector_of(priorities, kFloat64, values) || values.shape[0] != count) return false;
        const int64_t* rows = in_bounds(index);
        MaybeReleased released(count * kBytesTouched);
        tree_.set(rows, single ? &number : reinterpret_cast<const double*>(values.data), single ? 0 : 1, count);
        return true;
    }

    nb::object get(nb::handle leaves, nb::object out) const {
        Array index;
        if (!vector_of(leaves, kInt64, index)) return nb::none();
        const int64_t* rows = in_bounds(index);
        double* values = target<double>(out, kFloat64, index.shape[0]);
        tree_.get(values, rows, index.shape[0]);
        return out;
    }

    // None when every priority is zero.
    nb::object draw(int64_t count, nb::handle capsule, nb::object out) const {
        if (!can_draw(count)) return nb::none();
        run(target<int64_t>(out, kInt64, count), nullptr, count, capsule);
        return out;
    }

    nb::object draw_with_priorities(int64_t count, nb::handle capsule, nb::object out, nb::object priorities) const {
        if (!can_draw(count)) return nb::none();
        int64_t* leaves = target<int64_t>(out, kInt64, count);
        run(leaves, target<double>(priorities, kFloat64, count), count, capsule);
        return nb::make_tuple(out, priorities);
    }

    double total() const { return tree_.total(); }
    double smallest() { return tree_.smallest(); }
    double deviation() const { return tree_.deviation(); }

    void rebuild() {
        MaybeReleased released(tree_.num_leaves() * static_cast<int64_t>(sizeof(double)));
        tree_.rebuild();
    }

private:
    static double* checked(nb::handle memory, int64_t num_leaves) {
        Array array;
        if (num_leaves < 1 || !vector_of(memory, kFloat64, array) ||
            array.shape[0] / tree::kFan < (num_leaves - 1) / tree::kFan + 1)
            throw std::invalid_argument("memory: too small, or not float64");
        return reinterpret_cast<double*>(array.data);
    }

    const int64_t* in_bounds(const Array& index) const {
        const auto* rows = reinterpret_cast<const int64_t*>(index.data);
        if (!in_range(rows, index.shape[0], tree_.num_leaves(), 0)) throw std::out_of_range("leaf: outside the tree");
        return rows;
    }

    bool can_draw(int64_t count) const {
        if (count < 0) throw std::out_of_range("count");
        return !tree_.empty();
    }

    void run(int64_t* leaves, double* priorities, int64_t count, nb::handle capsule) const {
        auto* random = static_cast<BitGenerator*>(PyCapsule_GetPointer(capsule.ptr(), "BitGenerator"));
        if (!random) throw nb::python_error();
        MaybeReleased released(count * kBytesTouched);
        tree_.draw(leaves, priorities, count, *random);
    }

    tree::Tree tree_;
    nb::object owner_;  // the memory of the leaves
};

}  // namespace

void bind_tree(nb::module_& m) {
    const auto none = nb::none();
    nb::class_<PriorityTree>(m, "PriorityTree")
        .def(nb::init<nb::object, int64_t>())
        .def("set", &PriorityTree::set)
        .def("get", &PriorityTree::get, nb::arg("leaves"), nb::arg("out").none() = none)
        .def("draw", &PriorityTree::draw, nb::arg("count"), nb::arg("capsule"), nb::arg("out").none() = none)
        .def("draw_with_priorities", &PriorityTree::draw_with_priorities, nb::arg("count"), nb::arg("capsule"),
             nb::arg("out").none() = none, nb::arg("priorities").none() = none)
        .def("total", &PriorityTree::total)
        .def("smallest", &PriorityTree::smallest)
        .def("rebuild", &PriorityTree::rebuild)
        .def("deviation", &PriorityTree::deviation)
        .def_ro_static("GROUP", &tree::kFan);
}

}  // namespace recollect
