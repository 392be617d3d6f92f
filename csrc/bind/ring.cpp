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
#include "../core/leaf_reading.hpp"
#include "completion.hpp"
#include "counting.hpp"
#include "gil.hpp"
#include "given_leaf.hpp"
#include "ring_arguments.hpp"
#include "tensor_pool.hpp"

namespace relive::bind {
namespace {

constexpr int64_t kLooksCut = INT64_MIN, kLooksReset = INT64_MIN + 1;
constexpr int64_t kLooksRestarted = INT64_MIN + 2, kLooksInfinite = INT64_MIN + 3;

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
    // then nothing was stored. kLooks…, each once: it is done, and looks wrong.
    // `then`, if it is not None, makes the rest of the change: see `complete`.
    int64_t write(nb::tuple values, nb::tuple nexts, nb::handle env_ids, int64_t steps, bool blocks, nb::handle then) {
        const int64_t status = store(values, nexts, env_ids, steps, blocks);
        const bool is_stored = status == -1 || (status >= kLooksCut && status <= kLooksInfinite);
        if (is_stored && !then.is_none()) complete(then);
        return status;
    }

    // Let these counters count every step that is written from now on.
    void observe(nb::handle counters) {
        nb::cast<Counters&>(counters).check(memory_);
        counters_ = &nb::cast<Counters&>(counters);
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
        if (counters_) counters_->count(block, memory_);  // may refuse the steps
        writer_.chains().count_rewards(block.has_finite_rewards());
        writer_.write();
        const Doubt doubt = writer_.chains().doubt();
        if (doubt == Doubt::kNone) return -1;
        return kLooksCut + (static_cast<int64_t>(doubt) - static_cast<int64_t>(Doubt::kLooksCut));
    }

    // (followed, cut, ended, reset, restarted, infinite) of the steps that were written.
    nb::tuple counted() {
        const Chains& chains = writer_.chains().counted();
        return nb::make_tuple(chains.followed, chains.cut, chains.ended, chains.reset, chains.restarted, chains.infinite);
    }

    void keep_touched(bool on) { writer_.keep_touched(on); }
    void watch_cuts(bool on) { writer_.chains().watch_cuts(on); }
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

    // Slots and rows. A slot of -1 gives -1.

    // The row id that each slot holds.
    nb::object ids(nb::handle slots, nb::object out) const {
        return ask(slots, out, [&](int64_t slot) { return memory_.ring.id_of(slot); });
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

    // Reading

    // Before rows of a file that may be larger than memory are read: if batches have waited for the disk lately, request
    // all pages of this one at once.
    void fetch(nb::handle slots) {
        const Array in = read_slots_or_none(slots);
        request_pages(in.as<int64_t>(), in.shape[0]);
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
        .def("ids", &BoundRing::ids, nb::arg(), nb::arg().none())
        .def("ahead", &BoundRing::ahead, nb::arg(), nb::arg().none())
        .def("behind", &BoundRing::behind, nb::arg(), nb::arg().none())
        .def("locate", &BoundRing::locate, nb::arg(), nb::arg().none())
        .def("holds", &BoundRing::holds)
        .def("fetch", &BoundRing::fetch)
        .def("stack", &BoundRing::stack);
}

}  // namespace

void bind_ring(nb::module_& m) {
    m.attr("MOST_FRAMES") = kMostFrames;
    m.attr("LOOKS_CUT") = kLooksCut;
    m.attr("LOOKS_RESET") = kLooksReset;
    m.attr("LOOKS_RESTARTED") = kLooksRestarted;
    m.attr("LOOKS_INFINITE") = kLooksInfinite;
    m.attr("RING_STATE") = ring_state_names();
    nb::class_<Touched>(m, "Touched").def_ro("slots", &Touched::slots);
    nb::class_<RingMemory>(m, "CoreMemory");
    nb::class_<BoundRing> ring(m, "RingMemory");
    ring
        .def(nb::init<nb::list, nb::list, std::vector<int>, nb::list, nb::dict, int64_t, bool, bool, bool, int, int, int>())
        .def("write", &BoundRing::write, nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg().none())
        .def("observe", &BoundRing::observe)
        .def("counted", &BoundRing::counted)
        .def("watch_cuts", &BoundRing::watch_cuts)
        .def("keep_touched", &BoundRing::keep_touched)
        .def_prop_ro("touched", &BoundRing::touched, nb::rv_policy::reference_internal)
        .def_prop_ro("memory", &BoundRing::memory, nb::rv_policy::reference_internal)
        .def("seal_all", &BoundRing::seal_all)
        .def("find_broken", &BoundRing::find_broken)
        .def_static("write_behind", &start_writing);
    bind_reading(ring);
}

}  // namespace relive::bind
