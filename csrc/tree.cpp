// The priority tree as Python sees it. Nothing is converted: what does not fit exactly is answered by False or None.
#include "tree.hpp"

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "columns.hpp"
#include "fresh.hpp"
#include "random.hpp"
#include "ring.hpp"

namespace nb = nanobind;

namespace relive {
namespace {

constexpr int64_t kBytesTouched = 64;  // a leaf's cache line, for the question of releasing the GIL

bool vector_of(nb::handle object, DataType dtype, Array& out) {
    return border().read(object.ptr(), out) && out.dtype == dtype && out.ndim == 1 && out.contiguous();
}

class PriorityTree {
public:
    // `memory` are float64 arrays of the sizes that `sizes` says, zeros or what other trees in this memory left.
    PriorityTree(nb::tuple memory, int64_t num_leaves)
        : tree_(checked(memory, 0, num_leaves), checked(memory, 1, num_leaves), checked(memory, 2, num_leaves),
                reinterpret_cast<tree::Summary*>(checked(memory, 3, num_leaves)), num_leaves),
          owner_(std::move(memory)) {}

    // How many numbers the leaves, their sums, their minima and the summary take.
    static nb::tuple sizes(int64_t num_leaves) {
        if (num_leaves < 1)
            throw std::invalid_argument("num_leaves: expected at least 1, got " + std::to_string(num_leaves));
        const int64_t levels = tree::Levels::size(num_leaves);
        return nb::make_tuple((num_leaves + tree::kFan - 1) / tree::kFan * tree::kFan, levels, levels,
                              static_cast<int64_t>(sizeof(tree::Summary) / sizeof(double)));
    }

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

    // Leaves, and the weight (smallest / priority)^beta of each: the smallest of these leaves, or of all.
    nb::object draw_weighted(int64_t count, nb::handle capsule, double beta, bool by_smallest) {
        if (!can_draw(count)) return nb::none();
        Fresh fresh;
        fresh.add(kInt64, 1, &count);
        fresh.add(kFloat32, 1, &count);
        const nb::list made = fresh.make();
        auto* leaves = reinterpret_cast<int64_t*>(fresh.data(0));
        std::vector<double> priorities(static_cast<size_t>(count));
        run(leaves, priorities.data(), count, capsule);
        double smallest = by_smallest ? tree_.smallest() : std::numeric_limits<double>::infinity();
        if (!by_smallest) for (const double priority : priorities) smallest = std::min(smallest, priority);
        auto* weights = reinterpret_cast<float*>(fresh.data(1));
        for (int64_t i = 0; i < count; ++i) weights[i] = weight(smallest / priorities[static_cast<size_t>(i)], beta);
        return nb::make_tuple(made[0], made[1]);
    }

    // Set leaves to (priority + eps)^alpha; a leaf of -1 is passed over. Returns (bad, skipped, largest): the position of
    // the first priority that is none (then nothing has changed) or -1, how many were passed over, and the largest given.
    // None: no exact fit.
    nb::object update(nb::handle leaves, nb::handle priorities, double alpha, double eps) {
        Array index, values;
        if (!vector_of(leaves, kInt64, index) || !border().read(priorities.ptr(), values) || values.ndim != 1 ||
            !values.contiguous() || values.shape[0] != index.shape[0])
            return nb::none();
        if (values.dtype == kFloat64) return update_from<double>(index, values, alpha, eps);
        return values.dtype == kFloat32 ? update_from<float>(index, values, alpha, eps) : nb::object(nb::none());
    }

    // Set the leaves of the slots that were touched to `mass` where they hold a transition by now, else to zero.
    void mark(const Touched& touched, double mass) {
        const auto count = static_cast<int64_t>(touched.slots.size());
        if (!in_range(touched.slots.data(), count, tree_.num_leaves(), 0))
            throw std::out_of_range("leaf: expected slots of the tree");
        std::vector<double> values(touched.slots.size());
        for (size_t i = 0; i < values.size(); ++i) values[i] = touched.kind[touched.slots[i]] == kTransition ? mass : 0.0;
        MaybeReleased released(count * kBytesTouched);
        tree_.set(touched.slots.data(), values.data(), 1, count);
    }

    double total() const { return tree_.total(); }
    double smallest() { return tree_.smallest(); }
    double deviation() const { return tree_.deviation(); }

    void rebuild() {
        MaybeReleased released(tree_.num_leaves() * static_cast<int64_t>(sizeof(double)));
        tree_.rebuild();
    }

private:
    static double* checked(nb::tuple memory, size_t which, int64_t num_leaves) {
        return memory_of<double>(memory[which], kFloat64, nb::cast<int64_t>(sizes(num_leaves)[which]), "memory");
    }

    const int64_t* in_bounds(const Array& index) const {
        const auto* rows = reinterpret_cast<const int64_t*>(index.data);
        if (!in_range(rows, index.shape[0], tree_.num_leaves(), 0)) throw outside();
        return rows;
    }

    std::out_of_range outside() const {
        return std::out_of_range("leaf: expected 0 to " + std::to_string(tree_.num_leaves() - 1) + ", got one outside");
    }

    // In (0, 1]: what is too small for a float is the smallest float, since a weight of zero would hide the row.
    static float weight(double ratio, double beta) {
        const double exact = ratio > 1e-30 ? std::pow(static_cast<float>(ratio), static_cast<float>(beta)) : std::pow(ratio, beta);
        return std::max(static_cast<float>(exact), std::numeric_limits<float>::min());
    }

    // x^alpha, but zero only for zero: what is positive can be drawn.
    static double mass_of(double x, double alpha) {
        if (x == 0) return 0;
        const double mass = std::pow(x, alpha);
        return mass > 0 || mass != mass ? mass : std::numeric_limits<double>::denorm_min();
    }

    template <class T>
    nb::object update_from(const Array& index, const Array& values, double alpha, double eps) {
        const auto* rows = reinterpret_cast<const int64_t*>(index.data);
        const auto* given = reinterpret_cast<const T*>(values.data);
        const int64_t count = index.shape[0];
        double largest = 0;
        std::vector<double> masses(static_cast<size_t>(count));
        for (int64_t i = 0; i < count; ++i) {
            const double priority = given[i], mass = mass_of(priority + eps, alpha);
            if (!(priority >= 0 && std::isfinite(priority) && std::isfinite(mass))) return nb::make_tuple(i, 0, 0.0);
            if (rows[i] >= 0) largest = std::max(largest, priority);
            masses[static_cast<size_t>(i)] = mass;
        }
        if (!in_range(rows, count, tree_.num_leaves(), -1)) throw outside();
        std::vector<int64_t> kept(static_cast<size_t>(count));
        size_t size = 0;
        for (int64_t i = 0; i < count; ++i) {
            if (rows[i] < 0) continue;
            masses[size] = masses[static_cast<size_t>(i)];
            kept[size++] = rows[i];
        }
        {
            MaybeReleased released(static_cast<int64_t>(size) * kBytesTouched);
            tree_.set(kept.data(), masses.data(), 1, static_cast<int64_t>(size));
        }
        return nb::make_tuple(-1, count - static_cast<int64_t>(size), largest);
    }

    bool can_draw(int64_t count) const {
        if (count < 0) throw std::out_of_range("count: expected at least 0, got " + std::to_string(count));
        return !tree_.empty();
    }

    void run(int64_t* leaves, double* priorities, int64_t count, nb::handle capsule) const {
        auto* random = static_cast<BitGenerator*>(PyCapsule_GetPointer(capsule.ptr(), "BitGenerator"));
        if (!random) throw nb::python_error();
        MaybeReleased released(count * kBytesTouched);
        tree_.draw(leaves, priorities, count, *random);
    }

    tree::Tree tree_;
    nb::object owner_;  // the memory
};

}  // namespace

void bind_tree(nb::module_& m) {
    const auto none = nb::none();
    nb::class_<PriorityTree>(m, "PriorityTree")
        .def(nb::init<nb::tuple, int64_t>())
        .def("set", &PriorityTree::set)
        .def("get", &PriorityTree::get, nb::arg("leaves"), nb::arg("out").none() = none)
        .def("draw", &PriorityTree::draw, nb::arg("count"), nb::arg("capsule"), nb::arg("out").none() = none)
        .def("draw_with_priorities", &PriorityTree::draw_with_priorities, nb::arg("count"), nb::arg("capsule"),
             nb::arg("out").none() = none, nb::arg("priorities").none() = none)
        .def("draw_weighted", &PriorityTree::draw_weighted)
        .def("update", &PriorityTree::update)
        .def("mark", &PriorityTree::mark)
        .def("total", &PriorityTree::total)
        .def("smallest", &PriorityTree::smallest)
        .def("rebuild", &PriorityTree::rebuild)
        .def("deviation", &PriorityTree::deviation)
        .def_static("sizes", &PriorityTree::sizes);
}

}  // namespace relive
