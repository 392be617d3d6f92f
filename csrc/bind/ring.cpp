// Bindings of a replay buffer's memory: RingMemory writes steps, draws rows and rewrites leaves, PlanReader reads
// batches.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "../core/reading.hpp"
#include "../core/ring_writer.hpp"
#include "arguments.hpp"
#include "counting.hpp"
#include "tensors.hpp"

namespace relive::bind {
namespace {

// Read the arrays in `state` by name. The journals and checksums may be None or missing: only memory that outlives the
// process has them.
void read_state(nb::dict state, RingMemory& memory) {
    Ring& ring = memory.ring;
    Rewritable& rewritable = memory.rewritable;
    const int64_t slots = ring.num_flat(), envs = ring.envs;
    nb::dict unknown;
    unknown.update(state);
    const auto array = [&](auto*& out, const char* name, DataType dtype, int64_t elements) {
        if (!state.contains(name)) refuse("state: expected an array ", name, ", got none");
        using Element = std::remove_reference_t<decltype(*out)>;
        out = read_memory<Element>(state[name], dtype, elements, name);
        unknown.attr("pop")(name);
    };
    array(ring.kind, "kind", kUInt8, slots);
    array(ring.first, "first", kBool, slots);
    array(ring.head, "head", kInt64, envs);
    array(ring.open, "open", kBool, envs);
    array(ring.resetting, "resetting", kBool, envs);
    array(ring.count, "count", kInt64, envs);
    array(ring.floor, "floor", kInt64, envs);
    const auto array_or_none = [&](auto*& out, const char* name, int64_t elements) {
        if (state.contains(name) && !state[name].is_none()) array(out, name, kInt64, elements);
        else unknown.attr("pop")(name, nb::none());
    };
    array_or_none(ring.journal, "journal", envs);
    array_or_none(ring.checksums, "row_checksums", 2 * slots);
    array_or_none(rewritable.journal, "rewrite_journal", 1 + (rewritable_bytes(memory) + 7) / 8);
    array_or_none(rewritable.checksums, "rewrite_checksums", slots);
    for (auto [name, _] : unknown) refuse("state: expected the arrays of a ring, got ", nb::str(name).c_str());
}

// Make the leaf that is stored in a column [slots, envs, …]; `stack` is (k, axis, repeat) or None.
Leaf make_leaf(nb::handle column, nb::handle stack, int64_t slots, int64_t envs) {
    Leaf leaf(read_output(column, "column"), slots, envs);
    if (stack.is_none()) return leaf;
    const auto parts = nb::cast<nb::tuple>(stack);
    if (parts.size() != 3) refuse("stack: expected (k, axis, repeat)");
    leaf.stack(nb::cast<int64_t>(parts[0]), nb::cast<int>(parts[1]), nb::cast<bool>(parts[2]));
    return leaf;
}

// Check that leaf indices are ascending and in range.
void check_leaf_numbers(const std::vector<int>& numbers, size_t leaves, const char* what) {
    int last = -1;
    for (const int number : numbers) {
        if (number <= last || number >= static_cast<int>(leaves))
            refuse(what, ": expected ascending numbers of columns, got ", number);
        last = number;
    }
}

// Build the memory of a ring from its columns [slots, envs, …], frame stacks, leaf indices and state arrays.
RingMemory make_memory(nb::list columns, nb::list stacks, std::vector<int> obs_leaves, nb::list next_columns,
                       std::vector<int> rewritable, nb::dict state) {
    RingMemory memory;
    const size_t leaves = columns.size();
    if (leaves == 0 || leaves + next_columns.size() > kMaxLeaves) refuse("columns: expected 1 to ", kMaxLeaves);
    if (stacks.size() != leaves) refuse("stacks: expected one for each column");
    check_leaf_numbers(obs_leaves, leaves, "obs_leaves");
    check_leaf_numbers(rewritable, leaves, "rewritable");
    if (next_columns.size() > 0 && next_columns.size() != obs_leaves.size())
        refuse("next_columns: expected one for each observation, or none");
    const Array first = read_or_throw(columns[0], "column");
    if (first.ndim < 2 || first.shape[0] < 1 || first.shape[1] < 1) refuse("column: expected shape [slots, envs, …]");
    const int64_t slots = memory.ring.slots = first.shape[0], envs = memory.ring.envs = first.shape[1];
    memory.ring.stores_next_obs = next_columns.size() > 0;
    for (size_t i = 0; i < leaves; ++i) memory.leaves.push_back(make_leaf(columns[i], stacks[i], slots, envs));
    for (const int o : obs_leaves) memory.leaves[o].is_observation = true;
    for (const int l : rewritable)
        if (memory.leaf(l).is_observation) refuse("rewritable: expected no observations, got ", l);
    for (size_t i = 0; i < next_columns.size(); ++i) {
        const auto o = static_cast<size_t>(obs_leaves[i]);
        const Leaf next = make_leaf(next_columns[i], stacks[o], slots, envs);
        if (next.dtype != memory.leaves[o].dtype || next.bytes != memory.leaves[o].bytes)
            refuse("next_columns: expected the dtype and shape of the observation");
        memory.next_columns.push_back(next.column);
    }
    memory.obs_leaves = std::move(obs_leaves);
    memory.rewritable.leaves = std::move(rewritable);
    read_state(state, memory);
    return memory;
}

// Read slots of the ring; `lowest` is -1 if -1 (no slot) is allowed.
Array read_slots(nb::handle slots, const RingMemory& memory, int64_t lowest = 0) {
    Array in = read_index(slots);
    if (!in_range(in.as<int64_t>(), in.shape[0], memory.ring.num_flat(), lowest))
        refuse<OutOfRange>("slot: expected slots of the ring");
    return in;
}

// Read a leaf of a step from a number, nested lists or tuples of numbers, or an array. Returns false if it does not fit
// exactly.
bool read_input(PyObject* object, const Leaf& leaf, const LeadingAxes& lead, Array& array, InputLeaf& input) {
    int64_t shape[kMaxDims + 2];
    const int ndim = lead.put(shape);
    for (int d = 0; d < leaf.ndim; ++d) shape[ndim + d] = leaf.shape[d];
    const int64_t bytes = leaf.input_bytes * lead.steps * lead.envs;
    if (!read_numbers(object, shape, ndim + leaf.ndim, leaf.dtype, bytes, input.scratch))
        return conversion().read(object, array) && read_array(array, leaf, lead, input);
    input.data = input.source = input.scratch.data();
    input.source_bytes = 0;
    return true;
}

class BoundRing {
public:
    // `columns[i]` is [slots, envs, …]; `stacks[i]` is (k, axis, repeat) or None. `obs_leaves` lists the columns of
    // observations; `next_columns` has a column of next observations for each, or is empty. `rewritable` lists the
    // columns that `rewrite` may change. `state` has the arrays of the ring by name (see `read_state`).
    BoundRing(nb::list columns, nb::list stacks, std::vector<int> obs_leaves, nb::list next_columns,
              std::vector<int> rewritable, nb::dict state, int64_t num_sampleable, bool next_step, bool same_step,
              bool single, int reward, int terminated, int truncated)
        : memory_(make_memory(columns, stacks, std::move(obs_leaves), next_columns, std::move(rewritable), state)),
          writer_(memory_),
          requests_(memory_),
          arrays_(writer_.block.size()),
          single_(single),
          kept_alive_(nb::make_tuple(nb::tuple(columns), nb::tuple(next_columns), state.values())) {
        const Ring& ring = memory_.ring;
        memory_.ring.num_sampleable = num_sampleable;
        memory_.ring.next_step = next_step;
        memory_.same_step = same_step;
        memory_.reward = reward;
        memory_.terminated = terminated;
        memory_.truncated = truncated;
        if (single && ring.envs != 1) refuse("single: expected one environment, got ", ring.envs);
        if (num_sampleable < 1 || num_sampleable > ring.slots)
            refuse<OutOfRange>("num_sampleable: expected 1 to ", ring.slots, ", got ", num_sampleable);
        check_leaf_numbers({reward}, memory_.leaves.size(), "reward");
        for (const int flag : {terminated, truncated}) {
            check_leaf_numbers({flag}, memory_.leaves.size(), "terminated, truncated");
            const Leaf& leaf = memory_.leaf(flag);
            if (leaf.dtype != kBool || leaf.ndim != 0) refuse("terminated, truncated: expected one bool per step");
        }
    }
    BoundRing(const BoundRing&) = delete;

    // Return the ring and its columns. Whoever stores the reference must keep this object alive.
    RingMemory& memory() { return memory_; }

    // Write `steps` steps of the environments `env_ids` (None: all). Returns -1 or a `Warning` (each once) if the steps
    // were stored. Otherwise nothing was stored: i if leaf i (next observations follow the leaves) does not fit
    // exactly, -2 - i if the stack of leaf i cannot be rebuilt from single frames. `then` completes the change (see
    // `complete`), or is None.
    int64_t write(nb::tuple values, nb::tuple nexts, nb::handle env_ids, int64_t steps, bool blocks, nb::handle then) {
        const int64_t status = store(values, nexts, env_ids, steps, blocks);
        const bool is_stored = status == -1 || status <= kLooksInfinite;
        if (is_stored && !then.is_none()) complete(then);
        return status;
    }

    // Count every step written from now on with these counters.
    void attach_counters(nb::handle counters) {
        nb::cast<Counters&>(counters).check(memory_);
        counters_ = &nb::cast<Counters&>(counters);
        counters_kept_alive_ = nb::borrow(counters);
    }

    // Return the counts of `Continuity` as (followed, cut, ended, reset, restarted, infinite).
    nb::tuple continuity_counts() const {
        const Continuity& all = writer_.continuity;
        return nb::make_tuple(all.followed, all.cut, all.ended, all.reset, all.restarted, all.infinite);
    }

    void track_changes(bool on) { writer_.tracks_changes = on; }
    void watch_cuts(bool on) { writer_.continuity.watches_cuts = on; }
    ChangedSlots& changed_slots() { return writer_.changed; }
    int64_t stored() const { return memory_.ring.stored(); }

    // Recompute the checksums of every row, after rows were written directly.
    void recompute_checksums() {
        MaybeReleased released(kReleaseBytes);
        store_all_checksums(memory_);
    }

    // Set out[slot] to 1 if its row is in [since[env], until[env]) and differs from its checksums, else to 0.
    void find_damaged(nb::handle since, nb::handle until, nb::handle out) const {
        const auto* first = read_memory<const int64_t>(since, kInt64, memory_.ring.envs, "since");
        const auto* end = read_memory<const int64_t>(until, kInt64, memory_.ring.envs, "until");
        auto* damaged = read_memory<uint8_t>(out, kBool, memory_.ring.num_flat(), "out");
        MaybeReleased released(kReleaseBytes);
        find_damaged_rows(memory_, first, end, damaged);
    }

    // Whether every invariant of the ring holds.
    bool is_valid() const {
        MaybeReleased released(kReleaseBytes);
        const auto flags = [this](int leaf) { return reinterpret_cast<const uint8_t*>(memory_.leaf(leaf).column); };
        return memory_.ring.is_valid(flags(memory_.terminated), flags(memory_.truncated),
                                     !memory_.rewritable.leaves.empty());
    }

    // Draw `count` slots of transitions uniformly with replacement. Returns None if transitions are too rare to find by
    // chance.
    nb::object draw(int64_t count, nb::handle capsule) const {
        nb::object out;
        auto* slots = make_vector<int64_t>(out, kInt64, count);
        return memory_.ring.draw(count, read_generator(capsule), slots) ? out : nb::none();
    }

    // Return a method's result for each slot: the row id, or the number of transitions before or after the slot in its
    // episode. A slot of -1 gives -1.
    template <int64_t (Ring::*kMethod)(int64_t) const>
    nb::object map_slots(nb::handle slots) const {
        const Array in = read_slots(slots, memory_, -1);
        nb::object out;
        auto* results = make_vector<int64_t>(out, kInt64, in.shape[0]);
        const Ring& ring = memory_.ring;
        for (int64_t i = 0; i < in.shape[0]; ++i) {
            const int64_t slot = in.as<int64_t>()[i];
            results[i] = slot < 0 ? -1 : (ring.*kMethod)(slot);
        }
        return out;
    }

    // Return the slots of row ids, -1 for rows that can no longer be sampled; or the position of the first id that was
    // never issued to a transition.
    nb::object locate(nb::handle ids) const {
        const Array in = read_index(ids);
        nb::object out;
        auto* slots = make_vector<int64_t>(out, kInt64, in.shape[0]);
        const int64_t bad = memory_.ring.locate(in.as<int64_t>(), in.shape[0], slots);
        return bad < 0 ? out : nb::object(nb::int_(bad));
    }

    // Whether every slot still holds the row with its id, and the row can be sampled.
    bool holds(nb::handle slots, nb::handle ids) const {
        const Array in = read_slots(slots, memory_);
        const auto* expected = read_memory<const int64_t>(ids, kInt64, in.shape[0], "ids");
        return memory_.ring.holds(in.as<int64_t>(), expected, in.shape[0]);
    }

    // Request the pages of these rows at once, if recent batches waited for the disk, as with files larger than memory.
    void fetch(nb::handle slots) {
        const Array in = read_slots(slots, memory_, -1);
        if (!requests_.expects_waits()) return;
        MaybeReleased released(kReleaseBytes);
        requests_.request(in.as<int64_t>(), in.shape[0]);
    }

    // Rebuild the frame stacks of a leaf at each slot. A slot of -1 gives zeros.
    void stack(nb::handle slots, int64_t leaf_index, nb::handle out) const {
        const Leaf& leaf = memory_.leaves.at(static_cast<size_t>(leaf_index));
        const Array in = read_slots(slots, memory_, leaf.stacked() ? -1 : 0);
        const Array stacks = read_output(out, "out");
        if (stacks.elements() * stacks.itemsize() != leaf.input_bytes * in.shape[0])
            refuse("out: expected the bytes of one leaf per row");
        MaybeReleased released(leaf.input_bytes * in.shape[0]);
        read_leaf(memory_.ring, leaf, leaf.column, in.as<int64_t>(), in.shape[0], stacks.data);
    }

    // Write rows [count, …] of each rewritable leaf (None: unchanged) to slots [count]. Slots of -1 are skipped.
    void rewrite(nb::handle slots, nb::tuple values) {
        const Array index = read_slots(slots, memory_, -1);
        const int64_t count = index.shape[0];
        if (values.size() != memory_.rewritable.leaves.size()) refuse("values: expected one for each leaf");
        std::vector<Array> arrays(values.size());
        std::vector<const char*> sources(values.size(), nullptr);
        for (size_t l = 0; l < values.size(); ++l) {
            if (values[l].is_none()) continue;
            const Leaf& leaf = memory_.leaf(memory_.rewritable.leaves[l]);
            const Array& array = arrays[l] = read_or_throw(values[l], "values");
            if (array.dtype != leaf.dtype || !array.ends_with(1, leaf.ndim, leaf.shape) || array.shape[0] != count)
                refuse("values: expected rows of the leaf, one for each slot");
            sources[l] = array.data;
        }
        MaybeReleased released(count * rewritable_bytes(memory_));
        rewrite_rows(memory_, index.as<int64_t>(), count, sources);
    }

    // Complete the rewrite that a killed process left in the journal, if any.
    void finish_rewrite() { finish_rewriting(memory_); }

    // Set out[slot] to 1 if it holds a transition whose rewritable leaves differ from their checksum, else to 0.
    void find_torn(nb::handle out) const {
        auto* torn = read_memory<uint8_t>(out, kBool, memory_.ring.num_flat(), "out");
        MaybeReleased released(kReleaseBytes);
        find_torn_rows(memory_, torn);
    }

private:
    struct ReleaseCasts {
        StepBlock& block;
        ~ReleaseCasts() { block.release_casts(); }
    };

    void begin(nb::handle env_ids, int64_t steps, bool blocks) {
        if (steps < 1 || (!blocks && steps != 1))
            refuse<OutOfRange>("steps: expected 1, or the steps of a block, got ", steps);
        if (env_ids.is_none()) return writer_.block.begin(steps);
        const Array array = read_index(env_ids);
        const auto* ids = array.as<int64_t>();
        const int64_t envs = memory_.ring.envs;
        if (single_ && array.shape[0] != 1) refuse("env_ids: expected one, got ", array.shape[0]);
        for (int64_t i = 0; i < array.shape[0]; ++i)
            if (ids[i] < 0 || ids[i] >= envs) refuse<OutOfRange>("env_ids: expected 0 to ", envs - 1, ", got ", ids[i]);
        writer_.block.begin(steps, ids, array.shape[0]);
    }

    int64_t store(nb::tuple& values, nb::tuple& nexts, nb::handle env_ids, int64_t steps, bool blocks) {
        const OneWrite one_write(is_writing_, arrays_);
        StepBlock& block = writer_.block;
        begin(env_ids, steps, blocks);
        const size_t leaves = memory_.leaves.size();
        if (values.size() != leaves || nexts.size() != memory_.obs_leaves.size())
            refuse("leaves: expected one for each column");
        if (block.envs() == 0) return -1;
        const LeadingAxes lead{steps, block.envs(), blocks, !single_};
        int64_t bytes = 0;
        for (size_t i = 0; i < block.size(); ++i) {
            const bool is_next = i >= leaves;
            const size_t position = is_next ? i - leaves : i;
            const Leaf& leaf = is_next ? memory_.observation(position) : memory_.leaves[position];
            PyObject* object = PyTuple_GetItem((is_next ? nexts : values).ptr(), static_cast<Py_ssize_t>(position));
            if (!read_input(object, leaf, lead, arrays_[i], block.input(i))) return static_cast<int64_t>(i);
            bytes += leaf.input_bytes;
        }
        for (size_t o = 0; o < memory_.obs_leaves.size(); ++o)
            if (block.overlaps(o)) return static_cast<int64_t>(leaves + o);
        writer_.changed.slots.clear();
        const int64_t bad = block.check_stacks();
        if (bad >= 0) return -2 - bad;
        const ReleaseCasts release{block};
        std::optional<Counters::Hold> hold;
        if (counters_) hold.emplace(*counters_);
        MaybeReleased released(bytes * block.count());
        // Steps are counted before they are written: if a counter would overflow, `count` throws, and nothing has
        // changed.
        if (counters_) counters_->count(block, memory_);
        writer_.write();
        return writer_.continuity.next_warning();
    }

    RingMemory memory_;
    RingWriter writer_;
    PageRequests requests_;
    // The leaves of the step that is being written.
    std::vector<Array> arrays_;
    bool is_writing_ = false;
    // Whether callers pass values without an environment axis, because there is one environment.
    bool single_;
    Counters* counters_ = nullptr;
    nb::object kept_alive_, counters_kept_alive_;
};

// A planned batch with its allocated tensors, so that reading the batch cannot run out of memory.
struct ReservedBatch {
    PlannedBatch batch;
    nb::list out;

    ReservedBatch(const ReadPlan& plan, int64_t count) : batch(plan, count), out(make_tensors(batch.plans)) {}
    ReservedBatch(const ReservedBatch&) = delete;
    ReservedBatch(ReservedBatch&&) = default;
};

class PlanReader {
public:
    // `reads` are pairs (leaf, group) in the order of the batch. `groups` are tuples (anchor, of_observations,
    // is_masked, offsets or None), see `ReadGroup`; `layout` is a `ReadPlan::Layout`.
    PlanReader(BoundRing& ring, nb::list reads, nb::list groups, int layout, bool cross, bool step_ids, int64_t before,
               int64_t after, int64_t n, double gamma)
        : plan_{ring.memory(), static_cast<ReadPlan::Layout>(layout), cross, step_ids, before, after, n, gamma},
          requests_(ring.memory()) {
        if (layout < 0 || layout >= ReadPlan::kLayouts) refuse("layout: expected 0 to 2, got ", layout);
        const bool is_packed = plan_.is_packed();
        const int64_t slots = plan_.memory.ring.slots, max_steps = is_packed ? kMaxSteps : slots - 1;
        if (before < 0 || after < 0 || before > max_steps || after > max_steps) {
            if (is_packed && before >= 0 && after >= 0) throw OutOfMemory();
            refuse<OutOfRange>("before, after: expected 0 to ", max_steps);
        }
        if (n < 0 || n > slots || n > after + 1 || (n > 0 && is_packed))
            refuse<OutOfRange>("n: expected at most the steps that are read in their places, got ", n);
        if (step_ids && !is_packed) refuse("step_ids: expected packed sequences");
        for (nb::handle each : groups) add_group(nb::cast<nb::tuple>(each));
        for (nb::handle each : reads) add_read(nb::cast<nb::tuple>(each));
        if (plan_.reads.empty() || plan_.reads.size() > 2 * kMaxLeaves) refuse("reads: expected 1 to ", 2 * kMaxLeaves);
        plan_.prepare();
    }
    PlanReader(const PlanReader&) = delete;

    // Draw `count` rows uniformly and read them into new tensors. Returns None if transitions are too rare to find by
    // chance.
    nb::object sample(int64_t count, nb::handle capsule) {
        ReservedBatch reserved = reserve(count);
        if (!plan_.memory.ring.draw(count, read_generator(capsule), reserved.batch.rows())) return nb::none();
        return read_rows(reserved);
    }

    // Allocate a batch of `count` rows for `fill`.
    ReservedBatch reserve(int64_t count) const {
        check_count(count);
        return {plan_, count};
    }

    // Read the rows at these slots into a reserved batch.
    nb::list fill(ReservedBatch& reserved, nb::handle slots) {
        if (!reserved.batch.belongs_to(plan_)) refuse("batch: expected one that this reader reserved");
        const Array in = read_slots(slots, plan_.memory);
        if (in.shape[0] != reserved.batch.count()) refuse("slots: another number than was reserved");
        std::copy_n(in.as<int64_t>(), in.shape[0], reserved.batch.rows());
        return read_rows(reserved);
    }

    // Read the rows at these slots into new tensors.
    nb::list read(nb::handle slots) {
        ReservedBatch reserved = reserve(read_index(slots).shape[0]);
        return fill(reserved, slots);
    }

private:
    static constexpr int64_t kMaxOffset = (int64_t{1} << 31) - 1;

    nb::list read_rows(ReservedBatch& reserved) {
        const bool requests = plan_.memory.ring.checksums && requests_.expects_waits();
        MaybeReleased released(requests ? kReleaseBytes : reserved.batch.plans.bytes());
        reserved.batch.find();
        if (requests)
            reserved.batch.for_slots([&](const int64_t* slots, int64_t count) { requests_.request(slots, count); });
        reserved.batch.read();
        return reserved.out;
    }

    void add_group(nb::tuple parts) {
        using Anchor = ReadGroup::Anchor;
        if (parts.size() != 4) refuse("groups: expected (anchor, of_observations, is_masked, offsets)");
        const int anchor = nb::cast<int>(parts[0]);
        if (anchor < 0 || anchor >= ReadGroup::kAnchors) refuse("groups: expected an anchor from 0 to 4, got ", anchor);
        ReadGroup group{static_cast<Anchor>(anchor), nb::cast<bool>(parts[1]), nb::cast<bool>(parts[2]),
                        !parts[3].is_none()};
        const bool may_move = group.anchor == Anchor::kRow || group.anchor == Anchor::kNext;
        if ((group.has_offsets && !may_move) || (group.is_masked && !group.has_offsets))
            refuse("groups: expected offsets from the row or the next observation on");
        if (group.anchor == Anchor::kSum && plan_.n == 0) refuse("groups: expected n to sum");
        if (group.has_offsets && !plan_.is_packed()) {
            group.offsets = nb::cast<std::vector<int64_t>>(parts[3]);
            if (group.offsets.empty()) refuse("groups: expected at least one offset, got none");
            for (const int64_t offset : group.offsets)
                if (offset < -kMaxOffset || offset > kMaxOffset)
                    refuse<OutOfRange>("groups: expected offsets below 2^31, got ", offset);
        }
        plan_.groups.push_back(std::move(group));
    }

    void add_read(nb::tuple pair) {
        if (pair.size() != 2) refuse("reads: expected (leaf, group)");
        const int leaf = nb::cast<int>(pair[0]), group = nb::cast<int>(pair[1]);
        if (leaf < 0 || leaf >= static_cast<int>(plan_.memory.leaves.size()))
            refuse<OutOfRange>("reads: expected a leaf, got ", leaf);
        if (group < 0 || group >= static_cast<int>(plan_.groups.size()))
            refuse<OutOfRange>("reads: expected a group, got ", group);
        const DataType dtype = plan_.memory.leaf(leaf).dtype;
        const bool is_summed = plan_.groups[group].anchor == ReadGroup::Anchor::kSum;
        if (is_summed && dtype != kFloat32 && dtype != kFloat64) refuse("reads: expected float32 or float64 to sum");
        plan_.add_read(leaf, group);
    }

    ReadPlan plan_;
    PageRequests requests_;
};

}

void bind_ring(nb::module_& m) {
    bind_counting(m);
    m.attr("MAX_FRAMES") = kMaxFrames;
    m.attr("LOOKS_CUT") = static_cast<int64_t>(kLooksCut);
    m.attr("LOOKS_RESET") = static_cast<int64_t>(kLooksReset);
    m.attr("LOOKS_RESTARTED") = static_cast<int64_t>(kLooksRestarted);
    m.attr("LOOKS_INFINITE") = static_cast<int64_t>(kLooksInfinite);
    nb::class_<ChangedSlots>(m, "ChangedSlots").def_ro("slots", &ChangedSlots::slots);
    nb::class_<BoundRing>(m, "RingMemory")
        .def(nb::init<nb::list, nb::list, std::vector<int>, nb::list, std::vector<int>, nb::dict, int64_t, bool, bool,
                      bool, int, int, int>())
        .def("write", &BoundRing::write, nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg().none())
        .def("attach_counters", &BoundRing::attach_counters)
        .def("continuity_counts", &BoundRing::continuity_counts)
        .def("watch_cuts", &BoundRing::watch_cuts)
        .def("track_changes", &BoundRing::track_changes)
        .def_prop_ro("changed_slots", &BoundRing::changed_slots, nb::rv_policy::reference_internal)
        .def("recompute_checksums", &BoundRing::recompute_checksums)
        .def("find_damaged", &BoundRing::find_damaged)
        .def_static("write_behind", &start_writing)
        .def("is_valid", &BoundRing::is_valid)
        .def("stored", &BoundRing::stored)
        .def("draw", &BoundRing::draw)
        .def("ids", &BoundRing::map_slots<&Ring::get_id>)
        .def("count_following", &BoundRing::map_slots<&Ring::count_following>)
        .def("count_preceding", &BoundRing::map_slots<&Ring::count_preceding>)
        .def("locate", &BoundRing::locate)
        .def("holds", &BoundRing::holds)
        .def("fetch", &BoundRing::fetch)
        .def("stack", &BoundRing::stack)
        .def("rewrite", &BoundRing::rewrite)
        .def("finish_rewrite", &BoundRing::finish_rewrite)
        .def("find_torn", &BoundRing::find_torn);
    nb::class_<ReservedBatch>(m, "Batch");
    nb::class_<PlanReader>(m, "PlanReader")
        .def(nb::init<BoundRing&, nb::list, nb::list, int, bool, bool, int64_t, int64_t, int64_t, double>(),
             nb::keep_alive<1, 2>())
        .def("sample", &PlanReader::sample)
        .def("reserve", &PlanReader::reserve, nb::keep_alive<0, 1>())
        .def("fill", &PlanReader::fill)
        .def("read", &PlanReader::read);
}

}
