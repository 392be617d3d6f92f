// PriorityTree: samples in proportion to priorities. Arguments are not converted: False or None is returned if one does
// not fit exactly.
#include "../core/priority_tree.hpp"

#include <nanobind/nanobind.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "arguments.hpp"
#include "tensors.hpp"

namespace relive::bind {
namespace {

constexpr int64_t kMaxTreeLeaves = int64_t{1} << 48;
// Estimated bytes per leaf, a cache line, by which a call decides whether to release the GIL.
constexpr int64_t kBytesPerLeaf = 64;

bool read_vector(nb::handle object, DataType dtype, Array& out) {
    return conversion().read(object.ptr(), out) && out.dtype == dtype && out.ndim == 1 && out.contiguous();
}

class BoundTree {
public:
    PriorityTree tree;

    // `memory` are float64 arrays of the sizes returned by `sizes`: zeros, or the state of an earlier tree.
    BoundTree(nb::tuple memory, int64_t num_leaves)
        : tree(part(memory, 0, num_leaves), part(memory, 1, num_leaves), part(memory, 2, num_leaves),
                reinterpret_cast<TreeSummary*>(part(memory, 3, num_leaves)), num_leaves),
          kept_alive_(std::move(memory)) {}

    // Return the sizes of the arrays of leaves, sums, minima and the summary.
    static nb::tuple sizes(int64_t num_leaves) {
        if (num_leaves < 1 || num_leaves > kMaxTreeLeaves)
            refuse("num_leaves: expected 1 to 2^48, got ", num_leaves);
        const int64_t levels = TreeLevels::size(num_leaves);
        return nb::make_tuple(PriorityTree::padded(num_leaves), levels, levels,
                              static_cast<int64_t>(sizeof(TreeSummary) / sizeof(double)));
    }

    bool set(nb::handle leaves, nb::handle priorities) {
        Array index, values;
        if (!read_vector(leaves, kInt64, index)) return false;
        const int64_t count = index.shape[0];
        double number = 0;
        const bool single = PyFloat_Check(priorities.ptr());
        if (single) number = PyFloat_AsDouble(priorities.ptr());
        else if (!read_vector(priorities, kFloat64, values) || values.shape[0] != count) return false;
        check_leaves(index, 0);
        MaybeReleased released(count * kBytesPerLeaf);
        tree.set(index.as<int64_t>(), single ? &number : values.as<double>(), single ? 0 : 1, count);
        return true;
    }

    nb::object get(nb::handle leaves) const {
        Array index;
        nb::object out;
        if (!read_vector(leaves, kInt64, index)) return nb::none();
        check_leaves(index, 0);
        tree.get(make_vector<double>(out, kFloat64, index.shape[0]), index.as<int64_t>(), index.shape[0]);
        return out;
    }

    // Draw `count` leaves. Returns None if every priority is zero.
    nb::object draw(int64_t count, nb::handle capsule) const {
        nb::object out;
        if (!can_draw(count)) return nb::none();
        draw_into(make_vector<int64_t>(out, kInt64, count), nullptr, count, capsule);
        return out;
    }

    // Draw leaves with weights (smallest / priority)^beta. With `by_smallest`, `smallest` is the smallest positive
    // priority of the tree, else the smallest priority of the drawn leaves.
    nb::object draw_weighted(int64_t count, nb::handle capsule, double beta, bool by_smallest) {
        if (!can_draw(count)) return nb::none();
        TensorPlans plans;
        plans.add(kInt64, 1, &count);
        plans.add(kFloat32, 1, &count);
        require_memory(plans.bytes() + 8 * count);
        const nb::list tensors = make_tensors(plans);
        std::vector<double> priorities(static_cast<size_t>(count));
        draw_into(plans.as<int64_t>(0), priorities.data(), count, capsule);
        double smallest = by_smallest ? tree.smallest() : kNoLeaf;
        if (!by_smallest) for (const double priority : priorities) smallest = std::min(smallest, priority);
        auto* weights = plans.as<float>(1);
        for (size_t i = 0; i < priorities.size(); ++i) weights[i] = get_weight(smallest / priorities[i], beta);
        return nb::make_tuple(tensors[0], tensors[1]);
    }

    // Set leaves to (priority + eps)^alpha; leaves of -1 are skipped. Returns (bad, skipped): the position of the first
    // invalid priority or -1, and the number of skipped leaves. If a priority is invalid, nothing changes. If a
    // priority exceeds the first item of `numbers`, a list or an array, that item becomes the priority. Returns None if
    // an argument does not fit exactly.
    nb::object update(nb::handle leaves, nb::handle priorities, double alpha, double eps, nb::object numbers) {
        Array index, values;
        if (!read_vector(leaves, kInt64, index) || !conversion().read(priorities.ptr(), values) || values.ndim != 1 ||
            !values.contiguous() || values.shape[0] != index.shape[0])
            return nb::none();
        const auto* rows = index.as<int64_t>();
        const int64_t count = index.shape[0];
        if (values.dtype == kFloat64) return apply(index, {rows, values.as<double>(), count, alpha, eps}, numbers);
        if (values.dtype == kFloat32) return apply(index, {rows, values.as<float>(), count, alpha, eps}, numbers);
        return nb::none();
    }

    // Set the leaves of the slots that a write changed: transitions get `mass`, all other slots get zero.
    void set_written_slots(const ChangedSlots& changed, double mass) {
        const auto count = ssize(changed.slots);
        if (!in_range(changed.slots.data(), count, tree.num_leaves()))
            refuse<OutOfRange>("leaf: expected slots of the tree");
        MaybeReleased released(count * kBytesPerLeaf);
        relive::set_written_slots(tree, changed, mass);
    }

    void rebuild() {
        MaybeReleased released(tree.num_leaves() * static_cast<int64_t>(sizeof(double)));
        tree.rebuild();
    }

private:
    static double* part(nb::tuple memory, size_t which, int64_t num_leaves) {
        if (memory.size() != 4) refuse("memory: expected 4 arrays, got ", memory.size());
        return read_memory<double>(memory[which], kFloat64, nb::cast<int64_t>(sizes(num_leaves)[which]), "memory");
    }

    void check_leaves(const Array& index, int64_t lowest) const {
        if (!in_range(index.as<int64_t>(), index.shape[0], tree.num_leaves(), lowest))
            refuse<OutOfRange>("leaf: expected 0 to ", tree.num_leaves() - 1, ", got one outside");
    }

    nb::object apply(const Array& index, const PriorityUpdate& update, const nb::object& numbers) {
        if (update.bad >= 0) return nb::make_tuple(update.bad, 0);
        check_leaves(index, -1);
        const bool is_largest = update.largest > nb::cast<double>(numbers[0]);
        const auto count = ssize(update.leaves);
        {
            MaybeReleased released(count * kBytesPerLeaf);
            tree.set(update.leaves.data(), update.masses.data(), 1, count);
        }
        if (is_largest) numbers[0] = update.largest;
        return nb::make_tuple(-1, update.skipped);
    }

    bool can_draw(int64_t count) const {
        check_count(count);
        return !tree.empty();
    }

    void draw_into(int64_t* leaves, double* priorities, int64_t count, nb::handle capsule) const {
        const BitGenerator& random = read_generator(capsule);
        MaybeReleased released(count * kBytesPerLeaf);
        tree.draw(leaves, priorities, count, random);
    }

    nb::object kept_alive_;
};

}

void bind_priority_tree(nb::module_& m) {
    nb::class_<BoundTree>(m, "PriorityTree")
        .def(nb::init<nb::tuple, int64_t>())
        .def("set", &BoundTree::set)
        .def("get", &BoundTree::get)
        .def("draw", &BoundTree::draw)
        .def("draw_weighted", &BoundTree::draw_weighted)
        .def("update", &BoundTree::update)
        .def("set_written_slots", &BoundTree::set_written_slots)
        .def("total", [](const BoundTree& self) { return self.tree.total(); })
        .def("smallest", [](BoundTree& self) { return self.tree.smallest(); })
        .def("rebuild", &BoundTree::rebuild)
        .def("deviation", [](const BoundTree& self) { return self.tree.deviation(); })
        .def_static("sizes", &BoundTree::sizes);
}

}
