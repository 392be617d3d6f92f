// PlanReader: reads batches of replay rows as a plan says.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "../core/page_requests.hpp"
#include "../core/planned_batch.hpp"
#include "../core/ring_slots.hpp"
#include "gil.hpp"
#include "ring_arguments.hpp"
#include "tensor_pool.hpp"

namespace relive::bind {
namespace {

// A batch with its tensors. Nothing that comes after its reservation can fail for want of memory.
struct ReservedBatch {
    TensorPlans plans;
    PlannedBatch batch;
    nb::list out;

    ReservedBatch(const PlanSources& sources, int64_t count) : batch(sources, count, plans), out(make_tensors(plans)) {
        batch.connect(plans);
    }
    ReservedBatch(const ReservedBatch&) = delete;
    ReservedBatch(ReservedBatch&&) = default;
};

class PlanReader {
public:
    // `reads` are (leaf, group) in the order of the batch. `groups` are (anchor, of_observations, is_masked, offsets), where
    // offsets may be None (see `ReadGroup`), and `layout` is a `ReadPlan::Layout`.
    PlanReader(RingMemory& memory, nb::list reads, nb::list groups, int layout, bool cross, bool step_ids, int64_t before,
               int64_t after, int64_t n, double gamma)
        : sources_(memory, read_plan(memory, reads, groups, layout, cross, step_ids, before, after, n, gamma)),
          requests_(memory) {}
    PlanReader(const PlanReader&) = delete;

    // A batch of `count` rows that are drawn uniformly, in new tensors. None: transitions are too rare to find by chance.
    nb::object sample(int64_t count, nb::handle capsule) {
        ReservedBatch reserved = reserve(count);
        if (!draw_slots(memory(), count, generator_in(capsule), reserved.batch.rows())) return nb::none();
        return read_rows(reserved);
    }

    // Memory for a batch of `count` rows, which `fill` reads.
    ReservedBatch reserve(int64_t count) const {
        check_count(count);
        return {sources_, count};
    }

    nb::list fill(ReservedBatch& reserved, nb::handle slots) {
        if (!reserved.batch.is_of(sources_)) throw std::invalid_argument("batch: expected one that this reader reserved");
        const Array in = read_index(slots);
        if (!in_range(in.as<int64_t>(), in.shape[0], memory().ring.num_flat()))
            throw std::out_of_range("slot: expected slots of the ring");
        if (in.shape[0] != reserved.batch.count()) throw std::invalid_argument("slots: another number than was reserved");
        std::copy_n(in.as<int64_t>(), in.shape[0], reserved.batch.rows());
        return read_rows(reserved);
    }

    // New tensors of the rows at these slots.
    nb::list read(nb::handle slots) {
        ReservedBatch reserved = reserve(read_index(slots).shape[0]);
        return fill(reserved, slots);
    }

private:
    const RingMemory& memory() const { return sources_.memory; }

    nb::list read_rows(ReservedBatch& reserved) {
        const bool requests = memory().ring.checksums && requests_.expects_waits();
        MaybeReleased released(requests ? kReleaseBytes : reserved.plans.bytes());
        reserved.batch.find();
        if (requests) reserved.batch.for_slots([&](const int64_t* slots, int64_t count) { requests_.request(slots, count); });
        reserved.batch.read();
        return reserved.out;
    }

    static ReadPlan read_plan(const RingMemory& memory, nb::list reads, nb::list groups, int layout, bool cross,
                              bool step_ids, int64_t before, int64_t after, int64_t n, double gamma) {
        if (layout < 0 || layout >= ReadPlan::kLayouts)
            throw std::invalid_argument("layout: expected 0 to 2, got " + std::to_string(layout));
        ReadPlan plan{{}, {}, static_cast<ReadPlan::Layout>(layout), cross, step_ids, before, after, n, gamma};
        const int64_t most = plan.is_packed() ? kMostSteps : memory.ring.slots - 1;
        if (before < 0 || after < 0 || before > most || after > most) {
            if (plan.is_packed() && before >= 0 && after >= 0) throw OutOfMemory();
            throw std::out_of_range("before, after: expected 0 to " + std::to_string(most));
        }
        if (n < 0 || n > memory.ring.slots || n > after + 1 || (n > 0 && plan.is_packed()))
            throw std::out_of_range("n: expected at most the steps that are read in their places, got " + std::to_string(n));
        if (step_ids && !plan.is_packed()) throw std::invalid_argument("step_ids: expected packed sequences");
        for (nb::handle each : groups) plan.groups.push_back(read_group(each, plan));
        for (nb::handle each : reads) plan.reads.push_back(read_leaf_read(each, plan, memory));
        if (plan.reads.empty() || plan.reads.size() > 2 * kMostLeaves)
            throw std::invalid_argument("reads: expected 1 to " + std::to_string(2 * kMostLeaves));
        return plan;
    }

    static ReadGroup read_group(nb::handle each, const ReadPlan& plan) {
        const auto given = nb::cast<nb::tuple>(each);
        if (given.size() != 4) throw std::invalid_argument("groups: expected (anchor, of_observations, is_masked, offsets)");
        const int anchor = nb::cast<int>(given[0]);
        if (anchor < 0 || anchor >= ReadGroup::kAnchors)
            throw std::invalid_argument("groups: expected an anchor from 0 to 4, got " + std::to_string(anchor));
        ReadGroup group{static_cast<ReadGroup::Anchor>(anchor), nb::cast<bool>(given[1]), nb::cast<bool>(given[2]),
                        !given[3].is_none(), {}};
        const bool may_move = group.anchor == ReadGroup::Anchor::kRow || group.anchor == ReadGroup::Anchor::kNext;
        if ((group.has_offsets && !may_move) || (group.is_masked && !group.has_offsets))
            throw std::invalid_argument("groups: expected offsets from the row or the next observation on");
        if (group.anchor == ReadGroup::Anchor::kSum && plan.n == 0) throw std::invalid_argument("groups: expected n to sum");
        if (!group.has_offsets || plan.is_packed()) return group;
        group.offsets = nb::cast<std::vector<int64_t>>(given[3]);
        if (group.offsets.empty()) throw std::invalid_argument("groups: expected at least one offset, got none");
        for (const int64_t offset : group.offsets)
            if (offset < -kMostOffset || offset > kMostOffset)
                throw std::out_of_range("groups: expected offsets below 2^31, got " + std::to_string(offset));
        return group;
    }

    static LeafRead read_leaf_read(nb::handle each, const ReadPlan& plan, const RingMemory& memory) {
        const auto given = nb::cast<nb::tuple>(each);
        if (given.size() != 2) throw std::invalid_argument("reads: expected (leaf, group)");
        const LeafRead read{nb::cast<int>(given[0]), nb::cast<int>(given[1])};
        if (read.leaf < 0 || read.leaf >= static_cast<int>(memory.leaves.size()))
            throw std::out_of_range("reads: expected a leaf, got " + std::to_string(read.leaf));
        if (read.group < 0 || read.group >= static_cast<int>(plan.groups.size()))
            throw std::out_of_range("reads: expected a group, got " + std::to_string(read.group));
        const DataType dtype = memory.leaves[static_cast<size_t>(read.leaf)].dtype;
        const bool is_summed = plan.groups[static_cast<size_t>(read.group)].anchor == ReadGroup::Anchor::kSum;
        if (is_summed && dtype != kFloat32 && dtype != kFloat64)
            throw std::invalid_argument("reads: expected float32 or float64 to sum");
        return read;
    }

    static constexpr int64_t kMostOffset = (int64_t{1} << 31) - 1;

    PlanSources sources_;
    PageRequests requests_;
};

}  // namespace

void bind_plan_reader(nb::module_& m) {
    nb::class_<ReservedBatch>(m, "Batch");
    nb::class_<PlanReader>(m, "PlanReader")
        .def(nb::init<RingMemory&, nb::list, nb::list, int, bool, bool, int64_t, int64_t, int64_t, double>(),
             nb::keep_alive<1, 2>())
        .def("sample", &PlanReader::sample)
        .def("reserve", &PlanReader::reserve, nb::keep_alive<0, 1>())
        .def("fill", &PlanReader::fill)
        .def("read", &PlanReader::read);
}

}  // namespace relive::bind
