// RingMemory: the memory of a replay buffer. Steps are written, rows are drawn and read.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "../core/page_requests.hpp"
#include "../core/ring_checksums.hpp"
#include "../core/ring_slots.hpp"
#include "../core/ring_writer.hpp"
#include "../core/row_batch.hpp"
#include "../core/window_batch.hpp"
#include "completion.hpp"
#include "counting.hpp"
#include "gil.hpp"
#include "ring_arguments.hpp"
#include "tensor_pool.hpp"

namespace relive::bind {
namespace {

constexpr int64_t kLooksCut = INT64_MIN, kLooksReset = INT64_MIN + 1;

// A batch of rows with its tensors. Nothing that comes after its reservation can fail for want of memory.
struct ReservedBatch {
    TensorPlans plans;
    RowBatch rows;
    nb::list out;

    ReservedBatch(const RingMemory& memory, int64_t count, int64_t n)
        : rows(memory, count, n, plans), out(make_tensors(plans)) {
        rows.connect(plans);
    }
    ReservedBatch(const ReservedBatch&) = delete;
    ReservedBatch(ReservedBatch&&) = default;
};

class BoundRing {
public:
    // `columns[i]` is [slots, envs, …]. `stacks[i]` is (k, axis, repeat) or None. `observed` says which columns are
    // observations; `next_columns` are theirs for next observations that are stored beside the rows. `state` has the
    // arrays of RING_STATE by name, and `journal` and `seals` where they are kept.
    BoundRing(nb::list columns, nb::list stacks, std::vector<int> observed, nb::list next_columns, nb::dict state,
              int64_t alive, bool next_step, bool same_step, bool single, int reward, int terminated, int truncated)
        : memory_(read_memory(columns, stacks, std::move(observed), next_columns, state)),
          writer_(memory_),
          requests_(memory_),
          arrays_(writer_.block().size()),
          single_(single),
          owner_(nb::make_tuple(nb::tuple(columns), nb::tuple(next_columns), state.values())) {
        memory_.ring.alive = alive;
        memory_.ring.next_step = next_step;
        memory_.same_step = same_step;
        memory_.reward = reward;
        memory_.terminated = terminated;
        memory_.truncated = truncated;
        check_settings();
    }
    BoundRing(const BoundRing&) = delete;

    // For other bindings over the same memory, which keep this object alive.
    RingMemory& memory() { return memory_; }

    // Writing

    // Write `steps` steps of the environments `env_ids` (None: all). Returns -1 when it is done; i when leaf i (then the
    // next observations' leaves) is no exact fit; -2 - i when the stack of leaf i cannot be rebuilt from stored frames:
    // then nothing was stored. kLooksCut and kLooksReset, each once: it is done, and the chains look broken.
    // `then`, if it is not None, makes the rest of the change: see `complete`.
    int64_t write(nb::tuple values, nb::tuple nexts, nb::handle env_ids, int64_t steps, bool blocks, nb::handle then) {
        const int64_t status = store(values, nexts, env_ids, steps, blocks);
        const bool is_stored = status == -1 || status == kLooksCut || status == kLooksReset;
        if (is_stored && !then.is_none()) complete(then);
        return status;
    }

    // Let these counters count every step that is written from now on.
    void observe(nb::handle counters) {
        Counters& observer = nb::cast<Counters&>(counters);
        if (observer.num_leaves() != static_cast<int64_t>(memory_.leaves.size()) || observer.envs() != memory_.ring.envs)
            throw std::invalid_argument("counters: expected those of the leaves and environments of this memory");
        for (int64_t i = 0; i < observer.num_leaves(); ++i) {
            const Leaf& leaf = memory_.leaves[static_cast<size_t>(i)];
            observer.check_leaf(i, leaf.dtype, leaf.given_bytes / leaf.dtype.bytes());
        }
        counters_ = &observer;
        counters_owner_ = nb::borrow(counters);
    }

    int64_t store(nb::tuple& values, nb::tuple& nexts, nb::handle env_ids, int64_t steps, bool blocks) {
        const OneWrite one_write(is_writing_, arrays_);
        StepBlock& block = writer_.block();
        begin(block, env_ids, steps, blocks);
        if (values.size() != memory_.leaves.size() || nexts.size() != memory_.observed.size())
            throw std::invalid_argument("leaves: expected one for each column");
        if (block.envs() == 0) return -1;
        const LeadingAxes lead{steps, block.envs(), blocks, !single_};
        int64_t bytes = 0;
        for (size_t i = 0; i < block.size(); ++i) {
            const bool is_next = i >= memory_.leaves.size();
            const size_t place = is_next ? i - memory_.leaves.size() : i;
            const Leaf& leaf = is_next ? memory_.observation(place) : memory_.leaves[place];
            PyObject* object = PyTuple_GetItem((is_next ? nexts : values).ptr(), static_cast<Py_ssize_t>(place));
            if (!read_given(object, leaf, lead, arrays_[i], block.given(i))) return static_cast<int64_t>(i);
            bytes += leaf.given_bytes;
        }
        for (size_t o = 0; o < memory_.observed.size(); ++o)
            if (block.overlaps(o)) return static_cast<int64_t>(memory_.leaves.size() + o);
        const int64_t bad = writer_.check_stacks();
        if (bad >= 0) return -2 - bad;
        const CastsForgotten forgotten{block};
        std::optional<Counters::Hold> hold;
        if (counters_) hold.emplace(*counters_);
        MaybeReleased released(bytes * block.count());
        if (counters_) count();  // may refuse the steps
        writer_.write();
        const Doubt doubt = writer_.chains().doubt();
        if (doubt == Doubt::kNone) return -1;
        return doubt == Doubt::kLooksCut ? kLooksCut : kLooksReset;
    }

    // (followed, cut, ended, reset) of the steps that were written.
    nb::tuple counted() {
        const Chains& chains = writer_.chains().counted();
        return nb::make_tuple(chains.followed, chains.cut, chains.ended, chains.reset);
    }

    void keep_touched(bool on) { writer_.keep_touched(on); }
    Touched& touched() { return writer_.touched(); }
    int64_t stored() const { return memory_.stored(); }

    // Store the checksums of every row as it is, after rows were written directly.
    void seal_all() {
        MaybeReleased released(kReleaseBytes);
        store_all_checksums(memory_);
    }

    // out[slot] = 1 if a row from `since[env]` on and before `until[env]` differs from its checksums.
    void find_broken(nb::handle since, nb::handle until, nb::handle out) const {
        const auto* first = memory_of<const int64_t>(since, kInt64, memory_.ring.envs, "since");
        const auto* end = memory_of<const int64_t>(until, kInt64, memory_.ring.envs, "until");
        auto* broken = memory_of<uint8_t>(out, kBool, memory_.ring.num_flat(), "out");
        MaybeReleased released(kReleaseBytes);
        find_broken_rows(memory_, first, end, broken);
    }

    // Drawing

    // `count` slots of transitions, drawn uniformly with replacement, in a new tensor or in `out`. None: transitions are
    // too rare to find by chance.
    nb::object draw(int64_t count, nb::handle capsule, nb::object out) const {
        auto* slots = target<int64_t>(out, kInt64, count);
        return draw_slots(memory_, count, generator_in(capsule), slots) ? out : nb::none();
    }

    // `transitions`, or `n_steps` if n > 0, of `count` drawn rows; None likewise.
    nb::object sample(int64_t count, nb::handle capsule, int64_t n, double gamma) const {
        ReservedBatch batch = reserve(count, n);
        if (!draw_slots(memory_, count, generator_in(capsule), batch.rows.slots())) return nb::none();
        return read_rows(batch, gamma);
    }

    // Memory for `count` rows, which `fill` reads: as `n_steps` does if n > 0, else as `transitions` does.
    ReservedBatch reserve(int64_t count, int64_t n) const {
        check_count(count);
        if (n < 0) throw std::out_of_range("n: expected at least 0, got " + std::to_string(n));
        if (n > 0) check_summed(memory_);
        return {memory_, count, n};
    }

    nb::list fill(ReservedBatch& batch, nb::handle slots, double gamma) const {
        const Array in = read_slots(slots);
        if (!batch.rows.is_of(memory_)) throw std::invalid_argument("batch: expected one that this memory reserved");
        if (in.shape[0] != batch.rows.count()) throw std::invalid_argument("slots: another number than was reserved");
        std::copy_n(in.as<int64_t>(), in.shape[0], batch.rows.slots());
        return read_rows(batch, gamma);
    }

    // Slots and rows. A slot of -1 gives -1.

    // The row id that each slot holds.
    nb::object ids(nb::handle slots, nb::object out) const {
        return ask(slots, out, [&](int64_t slot) { return memory_.ring.id_of(slot); });
    }

    // The slot after each slot in its column.
    nb::object following(nb::handle slots, nb::object out) const {
        return ask(slots, out, [&](int64_t slot) { return memory_.ring.after(slot); });
    }

    // How many more transitions of the same episode follow each slot.
    nb::object ahead(nb::handle slots, nb::object out) const {
        return ask(slots, out, [&](int64_t slot) { return steps_following(memory_.ring, slot); });
    }

    // How many transitions of the same episode precede each slot.
    nb::object behind(nb::handle slots, nb::object out) const {
        return ask(slots, out, [&](int64_t slot) { return steps_preceding(memory_.ring, slot); });
    }

    // Slots of row ids, -1 for a row that can no longer be drawn; or the position of the first id that was never given to
    // a transition.
    nb::object locate(nb::handle ids, nb::object out) const {
        const Array in = read_index(ids);
        auto* slots = target<int64_t>(out, kInt64, in.shape[0]);
        const int64_t bad = relive::locate(memory_.ring, in.as<int64_t>(), in.shape[0], slots);
        return bad < 0 ? out : nb::object(nb::int_(bad));
    }

    // Whether every slot still holds the row of this id, and it can be drawn.
    bool holds(nb::handle slots, nb::handle ids) const {
        const Array in = read_slots(slots);
        const auto* expected = memory_of<const int64_t>(ids, kInt64, in.shape[0], "ids");
        return hold(memory_.ring, in.as<int64_t>(), expected, in.shape[0]);
    }

    // The slots of windows around each slot: up to `before` steps, the row itself, the steps after it, then -1.
    void window(nb::handle slots, int64_t before, int64_t after, bool cross, nb::handle out, nb::handle first) const {
        const Array in = read_slots_or_none(slots);
        const int64_t count = in.shape[0];
        check_windows(before, after, count);
        auto* found = memory_of<int64_t>(out, kInt64, count * (before + after), "out");
        auto* starts = memory_of<uint8_t>(first, kBool, count * (before + after), "first");
        find_windows(memory_.ring, in.as<int64_t>(), count, before, after, cross, found, starts);
    }

    // Reading

    // Before rows of a file that may be larger than memory are read: if batches have waited for the disk lately, request
    // all pages of this one at once.
    void fetch(nb::handle slots) {
        const Array in = read_slots_or_none(slots);
        request_pages(in.as<int64_t>(), in.shape[0]);
    }

    // New tensors of every leaf at each slot, then of the observations that these rows led to, then the rows' ids.
    nb::list transitions(nb::handle slots) const { return n_steps(slots, 0, 0.0); }

    // The same of n steps as one: the flags and the next observation of the last of them, the sum of their rewards, and
    // after the ids the discount. Rewards are float32 or float64.
    nb::list n_steps(nb::handle slots, int64_t n, double gamma) const {
        ReservedBatch batch = reserve(read_index(slots).shape[0], n);
        return fill(batch, slots, gamma);
    }

    // New tensors of windows (see `window` and `WindowBatch`).
    nb::list sequences(nb::handle slots, int64_t before, int64_t after, bool cross, const std::vector<int>& carried) {
        const Array in = read_slots(slots);
        check_windows(before, after, in.shape[0]);
        WindowBatch batch(memory_, in.as<int64_t>(), in.shape[0], before, after, cross, carried);
        if (memory_.ring.checksums) request_pages(batch.slots().data(), static_cast<int64_t>(batch.slots().size()));
        TensorPlans plans;
        batch.plan(plans);
        nb::list out = make_tensors(plans);
        MaybeReleased released(plans.bytes());
        batch.read(plans);
        return out;
    }

    // Rebuild the frame stacks of column `leaf` at each slot; a slot of -1 gives zeros.
    void stack(nb::handle slots, int64_t leaf_index, nb::handle out) const {
        const Array in = read_slots_or_none(slots);
        const Leaf& leaf = memory_.leaves.at(static_cast<size_t>(leaf_index));
        if (!leaf.stacked()) read_slots(slots);  // has no zeros to give
        const Array stacks = read_output(out, "out");
        if (stacks.elements() * stacks.itemsize() != leaf.given_bytes * in.shape[0])
            throw std::invalid_argument("out: expected the bytes of one leaf per row");
        MaybeReleased released(leaf.given_bytes * in.shape[0]);
        read_leaf(memory_.ring, {&leaf, leaf.column, in.as<int64_t>(), stacks.data}, in.shape[0]);
    }

private:
    struct CastsForgotten {
        StepBlock& block;
        ~CastsForgotten() { block.forget_casts(); }
    };

    void check_settings() const {
        const Ring& ring = memory_.ring;
        if (single_ && ring.envs != 1) throw std::invalid_argument("single: expected one environment, got " + std::to_string(ring.envs));
        if (ring.alive < 1 || ring.alive > ring.slots)
            throw std::out_of_range("alive: expected 1 to " + std::to_string(ring.slots) + ", got " + std::to_string(ring.alive));
        check_leaf_numbers({memory_.reward}, memory_.leaves.size(), "reward");
        for (const int flag : {memory_.terminated, memory_.truncated}) {
            check_leaf_numbers({flag}, memory_.leaves.size(), "terminated, truncated");
            const Leaf& leaf = memory_.leaves[static_cast<size_t>(flag)];
            if (leaf.dtype != kBool || leaf.ndim != 0) throw std::invalid_argument("terminated, truncated: expected one bool per step");
        }
    }

    // Count the steps of the block, before they are written.
    void count() {
        StepBlock& block = writer_.block();
        counters_->begin(block.steps(), block.envs(), block.env_ids());
        for (size_t i = 0; i < memory_.leaves.size(); ++i) {
            const Leaf& leaf = memory_.leaves[i];
            counters_->leaves()[i] = {block.given(i).data, leaf.dtype, leaf.given_bytes / leaf.dtype.bytes()};
        }
        if (memory_.ring.next_step)
            for (int64_t n = 0; n < block.envs(); ++n) counters_->steps().resetting.push_back(memory_.ring.resetting[block.env_at(n)]);
        counters_->run();
    }

    void begin(StepBlock& block, nb::handle env_ids, int64_t steps, bool blocks) const {
        if (steps < 1 || (!blocks && steps != 1))
            throw std::out_of_range("steps: expected 1, or the steps of a block, got " + std::to_string(steps));
        if (env_ids.is_none()) return block.begin(steps);
        const Array array = read_index(env_ids);
        const auto* ids = array.as<int64_t>();
        const int64_t envs = memory_.ring.envs;
        if (single_ && array.shape[0] != 1) throw std::invalid_argument("env_ids: expected one, got " + std::to_string(array.shape[0]));
        for (int64_t i = 0; i < array.shape[0]; ++i)
            if (ids[i] < 0 || ids[i] >= envs)
                throw std::out_of_range("env_ids: expected 0 to " + std::to_string(envs - 1) + ", got " + std::to_string(ids[i]));
        block.begin(steps, ids, array.shape[0]);
    }

    // Find the bytes of a leaf; false if they are no exact fit.
    static bool read_given(PyObject* object, const Leaf& leaf, const LeadingAxes& lead, Array& array, GivenLeaf& given) {
        return read_numbers_of(object, leaf, lead, given) || (conversion().read(object, array) && accept(array, leaf, lead, given));
    }

    // The same of a number, or of numbers in lists or tuples.
    static bool read_numbers_of(PyObject* object, const Leaf& leaf, const LeadingAxes& lead, GivenLeaf& given) {
        int64_t shape[kMaxDims + 2];
        int ndim = 0;
        if (lead.has_steps) shape[ndim++] = lead.steps;
        if (lead.has_envs) shape[ndim++] = lead.envs;
        for (int axis = 0; axis < leaf.ndim; ++axis) shape[ndim++] = leaf.shape[axis];
        if (ndim > 0 && !PyList_CheckExact(object) && !PyTuple_CheckExact(object)) return false;
        given.scratch.resize(static_cast<size_t>(std::max<int64_t>(8, leaf.given_bytes * lead.steps * lead.envs)));
        char* end = given.scratch.data();
        if (!read_numbers(object, shape, ndim, leaf.dtype, end)) return false;
        given.data = given.source = given.scratch.data();
        given.source_bytes = 0;
        return true;
    }

    nb::list read_rows(ReservedBatch& batch, double gamma) const {
        batch.rows.find_ends();
        MaybeReleased released(batch.plans.bytes());
        batch.rows.read(gamma);
        return batch.out;
    }

    void request_pages(const int64_t* slots, int64_t count) {
        if (!requests_.expects_waits()) return;
        MaybeReleased released(kReleaseBytes);
        requests_.request(slots, count);
    }

    template <class Ask>
    nb::object ask(nb::handle slots, nb::object out, Ask question) const {
        const Array in = read_slots_or_none(slots);
        for_slots(in.as<int64_t>(), in.shape[0], target<int64_t>(out, kInt64, in.shape[0]), question);
        return out;
    }

    // Slots of the ring, or -1 for no slot.
    Array read_slots_or_none(nb::handle slots) const { return read_slots(slots, -1); }

    Array read_slots(nb::handle slots, int64_t lowest = 0) const {
        Array in = read_index(slots);
        if (!in_range(in.as<int64_t>(), in.shape[0], memory_.ring.num_flat(), lowest))
            throw std::out_of_range("slot: expected slots of the ring");
        return in;
    }

    RingMemory memory_;
    RingWriter writer_;
    PageRequests requests_;
    std::vector<Array> arrays_;  // hold the leaves of a step until it is written
    bool is_writing_ = false;
    bool single_;  // one environment without an axis
    Counters* counters_ = nullptr;
    nb::object owner_, counters_owner_;  // the arrays, and the counters
};

void bind_reading(nb::class_<BoundRing>& ring) {
    ring
        .def("stored", &BoundRing::stored)
        .def("draw", &BoundRing::draw, nb::arg(), nb::arg(), nb::arg().none())
        .def("sample", &BoundRing::sample)
        .def("reserve", &BoundRing::reserve, nb::keep_alive<0, 1>())
        .def("fill", &BoundRing::fill)
        .def("ids", &BoundRing::ids, nb::arg(), nb::arg().none())
        .def("following", &BoundRing::following, nb::arg(), nb::arg().none())
        .def("ahead", &BoundRing::ahead, nb::arg(), nb::arg().none())
        .def("behind", &BoundRing::behind, nb::arg(), nb::arg().none())
        .def("locate", &BoundRing::locate, nb::arg(), nb::arg().none())
        .def("holds", &BoundRing::holds)
        .def("window", &BoundRing::window)
        .def("fetch", &BoundRing::fetch)
        .def("transitions", &BoundRing::transitions)
        .def("n_steps", &BoundRing::n_steps)
        .def("sequences", &BoundRing::sequences)
        .def("stack", &BoundRing::stack);
}

}  // namespace

void bind_ring(nb::module_& m) {
    m.attr("MOST_FRAMES") = kMostFrames;
    m.attr("LOOKS_CUT") = kLooksCut;
    m.attr("LOOKS_RESET") = kLooksReset;
    m.attr("RING_STATE") = ring_state_names();
    nb::class_<Touched>(m, "Touched").def_ro("slots", &Touched::slots);
    nb::class_<ReservedBatch>(m, "Batch");
    nb::class_<RingMemory>(m, "CoreMemory");
    nb::class_<BoundRing> ring(m, "RingMemory");
    ring
        .def(nb::init<nb::list, nb::list, std::vector<int>, nb::list, nb::dict, int64_t, bool, bool, bool, int, int, int>())
        .def("write", &BoundRing::write, nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg().none())
        .def("observe", &BoundRing::observe)
        .def("counted", &BoundRing::counted)
        .def("keep_touched", &BoundRing::keep_touched)
        .def_prop_ro("touched", &BoundRing::touched, nb::rv_policy::reference_internal)
        .def_prop_ro("memory", &BoundRing::memory, nb::rv_policy::reference_internal)
        .def("seal_all", &BoundRing::seal_all)
        .def("find_broken", &BoundRing::find_broken)
        .def_static("write_behind", &start_writing);
    bind_reading(ring);
}

}  // namespace relive::bind
