// Bindings of the ring: writing steps, drawing rows, and reading around them.
#include "step.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <vector>

#include "fresh.hpp"
#include "random.hpp"
#include "seal.hpp"
#include "windows.hpp"

#if defined(__linux__)
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>
#endif

namespace nb = nanobind;

namespace recollect {
namespace {

constexpr int kPatience = 64;                     // batches after one that waited for the disk
constexpr int64_t kMostSteps = int64_t{1} << 31;  // of a window, and windows of a batch: their product fits

// How often this process has waited for a page of a file.
int64_t waits() {
#if defined(__linux__)
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_majflt;
#else
    return 0;
#endif
}

// Ask for the pages of some bytes of a mapped file, without waiting for them.
void ask_for(const char* data, int64_t bytes) {
#if defined(__linux__)
    static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto start = reinterpret_cast<uintptr_t>(data), first = start / page * page;
    madvise(reinterpret_cast<void*>(first), start + static_cast<uintptr_t>(bytes) - first, MADV_WILLNEED);
#else
    static_cast<void>(data), static_cast<void>(bytes);
#endif
}

// Begin to write a range of a file to the disk, without waiting for it.
void write_behind(int file, int64_t offset, int64_t bytes) {
#if defined(__linux__)
    sync_file_range(file, offset, bytes, SYNC_FILE_RANGE_WRITE);
#else
    static_cast<void>(file), static_cast<void>(offset), static_cast<void>(bytes);
#endif
}

// After a call what was cast for it is not kept, unless it is small.
struct Emptied {
    std::vector<Given>& given;
    ~Emptied() {
        for (Given& each : given)
            if (each.scratch.capacity() > (1 << 20)) std::vector<char>().swap(each.scratch);
    }
};

class RingMemory {
public:
    // `columns[i]` is [slots, envs, …]. `stacks[i]` is (k, axis, repeat) or None. `observed` says which columns are
    // observations; `next_columns` are theirs for next observations when those are kept beside the rows.
    RingMemory(nb::list columns, nb::list stacks, std::vector<int> observed, nb::list next_columns, nb::tuple state,
               nb::object journal, nb::object seals, int64_t alive, bool next_step, bool single, int reward, int terminated, int truncated)
        : observed_(std::move(observed)), single_(single), reward_(reward), terminated_(terminated), truncated_(truncated) {
        owner_ = nb::make_tuple(columns, next_columns, state, journal, seals);
        const Array first = read_or_throw(columns[0], "column");
        ring_.slots = first.shape[0];
        ring_.envs = first.shape[1];
        ring_.alive = alive;
        ring_.keeps_next = next_columns.size() > 0;
        ring_.next_step = next_step;
        const int64_t envs = ring_.envs;
        ring_.kind = memory_of<uint8_t>(state[0], kUInt8, ring_.slots * envs, "kind");
        touched_.kind = ring_.kind;
        ring_.first = memory_of<uint8_t>(state[1], kBool, ring_.slots * envs, "first");
        ring_.head = memory_of<int64_t>(state[2], kInt64, envs, "head");
        ring_.open = memory_of<uint8_t>(state[3], kBool, envs, "open");
        ring_.resetting = memory_of<uint8_t>(state[4], kBool, envs, "resetting");
        ring_.count = memory_of<int64_t>(state[5], kInt64, envs, "count");
        ring_.floor = memory_of<int64_t>(state[6], kInt64, envs, "floor");
        if (!journal.is_none()) ring_.journal = memory_of<int64_t>(journal, kInt64, envs, "journal");
        if (!seals.is_none()) seals_ = memory_of<uint64_t>(seals, kInt64, 2 * ring_.slots * envs, "seals");
        if (columns.size() + next_columns.size() > kMostLeaves) throw std::invalid_argument("columns: too many");
        for (size_t i = 0; i < columns.size(); ++i) leaves_.push_back(describe_leaf(columns[i], stacks[i], ring_.slots, envs));
        for (size_t i = 0; i < next_columns.size(); ++i)
            next_columns_.push_back(
                describe_leaf(next_columns[i], stacks[static_cast<size_t>(observed_[i])], ring_.slots, envs).column);
    }

    // Write `steps` steps of the environments `env_ids` (None: all). Returns -1 when it is done; i when leaf i (then the
    // next observations' leaves) is no exact fit, -2 - i when the stack of leaf i cannot be rebuilt from what is stored.
    // Anything but -1 has changed nothing.
    int64_t write(nb::tuple values, nb::tuple nexts, nb::handle env_ids, int64_t steps, bool blocks) {
        const int64_t envs = count_envs(env_ids);
        const size_t total = leaves_.size() + observed_.size();
        if (values.size() != leaves_.size() || nexts.size() != observed_.size()) throw std::invalid_argument("leaves");
        if (given_.size() != total) given_.resize(total);
        const Lead lead{steps, envs, blocks, single_};
        int64_t bytes = 0;
        for (size_t i = 0; i < total; ++i) {
            const bool is_next = i >= leaves_.size();
            const Leaf& leaf = is_next ? leaves_[static_cast<size_t>(observed_[i - leaves_.size()])] : leaves_[i];
            PyObject* object = is_next ? PyTuple_GetItem(nexts.ptr(), static_cast<Py_ssize_t>(i - leaves_.size()))
                                       : PyTuple_GetItem(values.ptr(), static_cast<Py_ssize_t>(i));
            if (!read_given(object, leaf, lead, given_[i])) return static_cast<int64_t>(i);
            bytes += leaf.given_bytes * envs * steps;
        }
        for (size_t o = 0; o < observed_.size() && !blocks; ++o)
            if (overlap(o)) return static_cast<int64_t>(leaves_.size() + o);
        touched_.slots.clear();
        const int64_t bad = check_stacks(steps, envs);
        if (bad != -1) return bad;
        const Emptied emptied{given_};
        MaybeReleased released(bytes);
        for (int64_t t = 0; t < steps; ++t) {
            if (write_together(t)) continue;
            for (int64_t i = 0; i < envs; ++i) write_one(env_index_.empty() ? i : env_index_[static_cast<size_t>(i)], t * envs + i);
        }
        return -1;
    }

    void keep_touched(bool on) { keep_touched_ = on; }

    Touched& touched() { return touched_; }

    int64_t stored() const {
        int64_t sum = 0;
        for (int64_t e = 0; e < ring_.envs; ++e) sum += ring_.count[e];
        return sum;
    }

    // Seal every row as it is: somebody else than `write` has written them.
    void seal_all() {
        MaybeReleased released(kReleaseBytes);
        for (int64_t flat = 0; flat < ring_.slots * ring_.envs && seals_; ++flat) {
            seals_[2 * flat] = seal_of_observation(flat, ring_.row_of(flat));
            seals_[2 * flat + 1] = seal_of_rest(flat, ring_.row_of(flat));
        }
    }

    // out[slot] = 1 where a row from `since[env]` on and before `until[env]` is not what was sealed. A row that holds only
    // an observation is asked for nothing else.
    void find_broken(nb::handle since, nb::handle until, nb::handle out) const {
        const auto* rows = memory_of<int64_t>(since, kInt64, ring_.envs, "since");
        const auto* ends = memory_of<int64_t>(until, kInt64, ring_.envs, "until");
        auto* broken = memory_of<uint8_t>(out, kBool, ring_.slots * ring_.envs, "out");
        MaybeReleased released(kReleaseBytes);
        for (int64_t flat = 0; flat < ring_.slots * ring_.envs && seals_; ++flat) {
            const int64_t row = ring_.row_of(flat);
            const uint8_t kind = ring_.kind[flat];
            broken[flat] = 0;
            if (kind == kEmpty || row < rows[flat % ring_.envs] || row >= ends[flat % ring_.envs]) continue;
            broken[flat] = seals_[2 * flat] != seal_of_observation(flat, row) ||
                           ((kind == kTransition || kind == kHistory) && seals_[2 * flat + 1] != seal_of_rest(flat, row));
        }
    }

    // Before rows of a file that may be larger than memory are read: if batches have waited for the disk lately, ask for
    // all pages of this one at once.
    void fetch(nb::handle slots) {
        const Array in = read_index(slots);
        check_slots(in);
        fetch_rows(reinterpret_cast<const int64_t*>(in.data), in.shape[0]);
    }

    // `count` slots of transitions, drawn uniformly with replacement, in a fresh tensor or in `out`. None: too few are left
    // to find by chance.
    nb::object draw(int64_t count, nb::handle capsule, nb::object out) const {
        auto* random = static_cast<BitGenerator*>(PyCapsule_GetPointer(capsule.ptr(), "BitGenerator"));
        if (!random) throw nb::python_error();
        auto* slots = target<int64_t>(out, kInt64, count);
        int64_t window = 0;  // the longest column, in rows since the last clear
        for (int64_t e = 0; e < ring_.envs; ++e) window = std::max(window, ring_.newest(e) + 1 - ring_.floor[e]);
        const bool round = window >= ring_.slots;
        const int64_t range = (round ? ring_.slots : window) * ring_.envs;
        if (range == 0) return nb::none();
        int64_t misses = 0;
        const int64_t patience = 64 + 16 * count;
        for (int64_t i = 0; i < count;) {
            const int64_t slot = round ? random->below_any(range) : recent(random->below_any(range));
            const bool hit = slot >= 0 && ring_.kind[slot] == kTransition;
            if (hit) slots[i] = slot;
            i += hit;
            misses += !hit;
            if (misses > patience) return nb::none();
        }
        return out;
    }

    // The row id that each slot holds.
    nb::object ids(nb::handle slots, nb::object out) const {
        return map(slots, out, [this](int64_t slot) { return ring_.id_of(slot); });
    }

    // The slot after each one in its column.
    nb::object following(nb::handle slots, nb::object out) const {
        return map(slots, out, [this](int64_t slot) { return ring_.after(slot); });
    }

    // How many more transitions of the same episode follow each slot.
    nb::object ahead(nb::handle slots, nb::object out) const {
        return map(slots, out, [this](int64_t slot) {
            int64_t steps = 0;
            for (int64_t at = ring_.after(slot); ring_.kind[at] == kTransition && steps < ring_.slots; ++steps) at = ring_.after(at);
            return steps;
        });
    }

    // How many transitions of the same episode precede each slot.
    nb::object behind(nb::handle slots, nb::object out) const {
        return map(slots, out, [this](int64_t slot) {
            int64_t steps = 0;
            while (!ring_.first[slot] && ring_.kind[ring_.before(slot)] == kTransition && steps < ring_.slots) {
                slot = ring_.before(slot);
                ++steps;
            }
            return steps;
        });
    }

    // Slots of row ids, -1 for a row that can no longer be drawn; or the position of the first id that was never given to a
    // transition.
    nb::object locate(nb::handle ids, nb::object out) const {
        const Array in = read_index(ids);
        auto* from = reinterpret_cast<const int64_t*>(in.data);
        auto* to = target<int64_t>(out, kInt64, in.shape[0]);
        for (int64_t i = 0; i < in.shape[0]; ++i) {
            if (from[i] < 0) return nb::int_(i);
            const int64_t env = from[i] % ring_.envs, row = from[i] / ring_.envs;
            if (row >= ring_.head[env]) return nb::int_(i);
            const bool in_window = row > ring_.newest(env) - ring_.alive;
            const int64_t flat = ring_.at(row, env);
            if (in_window && ring_.kind[flat] == kFinal) return nb::int_(i);
            to[i] = in_window && ring_.kind[flat] == kTransition ? flat : -1;
        }
        return out;
    }

    // The slots of windows [before | drawn row | after] around each slot, -1 where there is no step; see views/sequence.
    void window(nb::handle slots, int64_t before, int64_t after, bool cross, nb::handle out, nb::handle first) const {
        const Array in = read_index(slots);
        const int64_t count = in.shape[0], length = before + after;
        auto* from = reinterpret_cast<const int64_t*>(in.data);
        auto* to = memory_of<int64_t>(out, kInt64, count * length, "out");
        auto* starts = memory_of<uint8_t>(first, kBool, count * length, "first");
        for (int64_t i = 0; i < count; ++i) {
            window_forward(ring_, from[i], after, cross, to + i * length + before);
            window_backward(ring_, from[i], before, cross, to + i * length);
            for (int64_t j = 0; j < length; ++j) {
                const int64_t slot = to[i * length + j];
                starts[i * length + j] = slot >= 0 && ring_.first[slot];
            }
        }
    }

    // Fresh tensors of every leaf at each slot, then of the observations that these rows led to, then the rows' ids.
    nb::list transitions(nb::handle slots) const {
        const Array in = checked_slots(slots);
        const auto* rows = reinterpret_cast<const int64_t*>(in.data);
        return read_rows(rows, rows, in.shape[0], 0, 0.0);
    }

    // The same of n steps as one: the flags and the next observation of the last of them, the sum of their rewards, and
    // after the ids the discount. Rewards are float32 or float64.
    nb::list n_steps(nb::handle slots, int64_t n, double gamma) const {
        const Array in = checked_slots(slots);
        const auto* rows = reinterpret_cast<const int64_t*>(in.data);
        std::vector<int64_t> last(static_cast<size_t>(in.shape[0]));
        for (int64_t i = 0; i < in.shape[0]; ++i) last[static_cast<size_t>(i)] = last_of(rows[i], n);
        return read_rows(rows, last.data(), in.shape[0], n, gamma);
    }

    // Fresh tensors of windows (see `window`): every leaf that is not carried [B, L, …], the observations that these steps
    // led to, which steps are real, which of them are no burn-in, which start an episode, the `carried` leaves at the first
    // real step [B, …], the ids of the drawn rows.
    nb::list sequences(nb::handle slots, int64_t before, int64_t after, bool cross, const std::vector<int>& carried) {
        const Array in = checked_slots(slots);
        const int64_t count = in.shape[0], length = before + after, steps = count * length;
        if (before > kMostSteps || after > kMostSteps || count > kMostSteps) throw std::bad_alloc();
        const auto* drawn = reinterpret_cast<const int64_t*>(in.data);
        std::vector<int64_t> at(static_cast<size_t>(steps)), next(at.size()), start(static_cast<size_t>(count));
        for (int64_t i = 0; i < count; ++i) {
            int64_t* window = at.data() + i * length;
            window_forward(ring_, drawn[i], after, cross, window + before);
            window_backward(ring_, drawn[i], before, cross, window);
            start[static_cast<size_t>(i)] = *std::find_if(window, window + length, [](int64_t slot) { return slot >= 0; });
        }
        for (size_t i = 0; i < at.size(); ++i) next[i] = at[i] < 0 ? -1 : ring_.after(at[i]);
        if (seals_) fetch_rows(at.data(), steps);
        std::vector<Reading> readings, starts;
        for (size_t l = 0; l < leaves_.size(); ++l) {
            const bool once = std::find(carried.begin(), carried.end(), static_cast<int>(l)) != carried.end();
            (once ? starts : readings).push_back({&leaves_[l], leaves_[l].column, once ? start.data() : at.data(), nullptr});
        }
        for (const int o : observed_) {
            const Leaf& leaf = leaves_[static_cast<size_t>(o)];
            readings.push_back({&leaf, leaf.column, next.data(), nullptr});
        }
        const int64_t lead[] = {count, length};
        Fresh fresh;
        for (const Reading& reading : readings) plan(fresh, *reading.leaf, 2, lead);
        for (int mark = 0; mark < 3; ++mark) fresh.add(kBool, 2, lead);
        for (const Reading& reading : starts) plan(fresh, *reading.leaf, 1, lead);
        fresh.add(kInt64, 1, lead);
        nb::list out = fresh.make();
        size_t made = 0;
        for (Reading& reading : readings) reading.out = fresh.data(made++);
        char *mask = fresh.data(made), *train = fresh.data(made + 1), *is_first = fresh.data(made + 2);
        made += 3;
        for (Reading& reading : starts) reading.out = fresh.data(made++);
        auto* ids = reinterpret_cast<int64_t*>(fresh.data(made));
        MaybeReleased released(fresh.bytes());
        for (int64_t i = 0; i < count; ++i) ids[i] = ring_.id_of(drawn[i]);
        const std::vector<Run> runs = runs_of(ring_, at.data(), steps), next_runs = runs_of(ring_, next.data(), steps);
        for (const Reading& reading : readings) {
            const bool is_next = reading.slots == next.data();
            if (reading.leaf->stacked()) read(reading, steps);
            else read_runs(reading.out, reading.column, is_next ? next_runs : runs, reading.leaf->bytes, ring_.envs);
        }
        for (const Reading& reading : starts) read(reading, count);
        read_runs(is_first, reinterpret_cast<const char*>(ring_.first), runs, 1, ring_.envs);
        for (int64_t i = 0; i < steps; ++i) mask[i] = at[static_cast<size_t>(i)] >= 0;
        std::memcpy(train, mask, static_cast<size_t>(steps));
        for (int64_t i = 0; i < count; ++i) std::memset(train + i * length, 0, static_cast<size_t>(before));
        return out;
    }

    // Rebuild the frame stacks of column `leaf` at each slot; a slot of -1 gives zeros.
    void stack(nb::handle slots, int64_t leaf_index, nb::handle out) const {
        const Array in = read_index(slots);
        const Leaf& leaf = leaves_.at(static_cast<size_t>(leaf_index));
        const Array target = read_or_throw(out, "out");
        if (target.elements() * target.itemsize() != leaf.given_bytes * in.shape[0]) throw std::invalid_argument("out");
        check_slots(in);
        MaybeReleased released(leaf.given_bytes * in.shape[0]);
        read({&leaf, leaf.column, reinterpret_cast<const int64_t*>(in.data), target.data}, in.shape[0]);
    }

private:
    uint64_t seal_of_observation(int64_t flat, int64_t row) const {
        uint64_t state = stir(stir(1, static_cast<uint64_t>(row)), ring_.first[flat]);
        for (const int o : observed_) {
            const Leaf& leaf = leaves_[static_cast<size_t>(o)];
            state = stir_all(state, leaf.column + flat * leaf.bytes, leaf.bytes);
        }
        return state;
    }

    uint64_t seal_of_rest(int64_t flat, int64_t row) const {
        uint64_t state = stir(2, static_cast<uint64_t>(row));
        size_t next = 0;
        for (size_t l = 0; l < leaves_.size(); ++l) {
            const bool observation = next < observed_.size() && static_cast<size_t>(observed_[next]) == l;
            next += observation;
            if (!observation) state = stir_all(state, leaves_[l].column + flat * leaves_[l].bytes, leaves_[l].bytes);
        }
        for (size_t o = 0; o < next_columns_.size(); ++o) {
            const int64_t bytes = leaves_[static_cast<size_t>(observed_[o])].bytes;
            state = stir_all(state, next_columns_[o] + flat * bytes, bytes);
        }
        return state;
    }

    // What a written row is sealed with; its observation was sealed before if it was pending.
    void seal(int64_t flat, int64_t row, bool observation, bool rest) {
        if (!seals_) return;
        if (observation) seals_[2 * flat] = seal_of_observation(flat, row);
        if (rest) seals_[2 * flat + 1] = seal_of_rest(flat, row);
    }

    void fetch_rows(const int64_t* rows, int64_t number) {
        const int64_t count = waits();
        if (count > waits_) cold_ = kPatience;
        waits_ = count;
        if (cold_ == 0) return;
        --cold_;
        MaybeReleased released(kReleaseBytes);
        for (int64_t i = 0; i < number; ++i)
            if (rows[i] >= 0) ask_for_row(rows[i]);
    }

    // A row and what it led to.
    void ask_for_row(int64_t flat) const {
        const int64_t next = ring_.keeps_next ? flat : ring_.after(flat);
        for (const Leaf& leaf : leaves_) {
            for (int64_t frame = leaf.frames.k, at = flat; frame > 1; --frame) {
                at = ring_.before(at);
                ask_for(leaf.column + at * leaf.bytes, leaf.bytes);
            }
            const bool joined = next == flat + 1;  // one request for both
            ask_for(leaf.column + flat * leaf.bytes, leaf.bytes * (joined ? 2 : 1));
        }
        for (size_t o = 0; o < observed_.size(); ++o) {
            const Leaf& leaf = leaves_[static_cast<size_t>(observed_[o])];
            if (ring_.keeps_next) ask_for(next_columns_[o] + flat * leaf.bytes, leaf.bytes);
            else if (next != flat + 1) ask_for(leaf.column + next * leaf.bytes, leaf.bytes);
        }
    }

    // One leaf to be read: from which column, at which slots, into what.
    struct Reading {
        const Leaf* leaf;
        const char* column;
        const int64_t* slots;
        char* out;
    };

    // Plan a fresh tensor [lead…, …] for a leaf.
    static void plan(Fresh& fresh, const Leaf& leaf, int lead_ndim, const int64_t* lead) {
        if (lead_ndim + leaf.ndim > kMaxDims) throw std::invalid_argument("leaf: an axis too many");
        int64_t shape[kMaxDims];
        std::copy(lead, lead + lead_ndim, shape);
        std::copy(leaf.shape, leaf.shape + leaf.ndim, shape + lead_ndim);
        fresh.add(leaf.dtype, lead_ndim + leaf.ndim, shape);
    }

    void read(const Reading& reading, int64_t count) const noexcept {
        const Leaf& leaf = *reading.leaf;
        if (!leaf.stacked()) {
            gather(reading.out, reading.column, reading.slots, count, leaf.bytes, ring_.slots * ring_.envs);
            return;
        }
        for (int64_t i = 0; i < count; ++i) {
            char* stack = reading.out + i * leaf.given_bytes;
            if (reading.slots[i] < 0) {
                std::memset(stack, 0, static_cast<size_t>(leaf.given_bytes));
                continue;
            }
            const char* frames[kMostFrames];
            frames_at(ring_, reading.column, leaf.frames, reading.slots[i], frames);
            leaf.frames.put_all(stack, frames);
        }
    }

    // The slot of the row `behind / envs` rows before the newest of environment `behind % envs`; -1 before the last clear.
    int64_t recent(int64_t behind) const {
        const int64_t env = behind % ring_.envs, row = ring_.newest(env) - behind / ring_.envs;
        return row < ring_.floor[env] ? -1 : ring_.at(row, env);
    }

    void check_slots(const Array& slots) const {
        auto* from = reinterpret_cast<const int64_t*>(slots.data);
        for (int64_t i = 0; i < slots.shape[0]; ++i)
            if (from[i] >= ring_.slots * ring_.envs) throw std::out_of_range("slot");
    }

    template <class F>
    nb::object map(nb::handle slots, nb::object out, F f) const {
        const Array in = read_index(slots);
        check_slots(in);
        auto* from = reinterpret_cast<const int64_t*>(in.data);
        auto* to = target<int64_t>(out, kInt64, in.shape[0]);
        for (int64_t i = 0; i < in.shape[0]; ++i) to[i] = from[i] < 0 ? -1 : f(from[i]);
        return out;
    }

    Array checked_slots(nb::handle slots) const {
        const Array in = read_index(slots);
        if (!in_range(reinterpret_cast<const int64_t*>(in.data), in.shape[0], ring_.slots * ring_.envs))
            throw std::out_of_range("slot");
        return in;
    }

    // The slot of the last of up to n steps: an episode's end or the newest row comes first.
    int64_t last_of(int64_t slot, int64_t n) const {
        for (int64_t k = 1; k < n; ++k) {
            const int64_t next = ring_.after(slot);
            if (ring_.kind[next] != kTransition) break;
            slot = next;
        }
        return slot;
    }

    // Read every leaf at `first`, the flags and the next observations at `last`; n > 0: rewards are summed in between.
    nb::list read_rows(const int64_t* first, const int64_t* last, int64_t count, int64_t n, double gamma) const {
        std::vector<int64_t> next(static_cast<size_t>(ring_.keeps_next ? 0 : count));
        for (size_t i = 0; i < next.size(); ++i) next[i] = ring_.after(last[i]);
        std::vector<Reading> readings;
        for (size_t l = 0; l < leaves_.size(); ++l) {
            const bool end = static_cast<int>(l) == terminated_ || static_cast<int>(l) == truncated_;
            readings.push_back({&leaves_[l], leaves_[l].column, end ? last : first, nullptr});
        }
        for (size_t o = 0; o < observed_.size(); ++o) {
            const Leaf& leaf = leaves_[static_cast<size_t>(observed_[o])];
            const int64_t* index = ring_.keeps_next ? last : next.data();
            readings.push_back({&leaf, ring_.keeps_next ? next_columns_[o] : leaf.column, index, nullptr});
        }
        Fresh fresh;
        for (const Reading& reading : readings) plan(fresh, *reading.leaf, 1, &count);
        fresh.add(kInt64, 1, &count);
        if (n > 0) fresh.add(kFloat32, 1, &count);
        nb::list out = fresh.make();
        for (size_t i = 0; i < readings.size(); ++i) readings[i].out = fresh.data(i);
        auto* ids = reinterpret_cast<int64_t*>(fresh.data(readings.size()));
        MaybeReleased released(fresh.bytes());
        for (int64_t i = 0; i < count; ++i) ids[i] = ring_.id_of(first[i]);
        for (size_t i = 0; i < readings.size(); ++i)
            if (n == 0 || static_cast<int>(i) != reward_) read(readings[i], count);
        if (n > 0) {
            const Reading& rewards = readings[static_cast<size_t>(reward_)];
            auto* discount = reinterpret_cast<float*>(fresh.data(readings.size() + 1));
            if (rewards.leaf->dtype == kFloat32) sum_rewards<float>(rewards, last, count, gamma, discount);
            else sum_rewards<double>(rewards, last, count, gamma, discount);
        }
        return out;
    }

    template <class T>
    void sum_rewards(const Reading& reading, const int64_t* last, int64_t count, double gamma, float* discount) const {
        const auto* rewards = reinterpret_cast<const T*>(reading.column);
        auto* out = reinterpret_cast<T*>(reading.out);
        const int64_t width = reading.leaf->bytes / static_cast<int64_t>(sizeof(T));
        for (int64_t i = 0; i < count; ++i) {
            int64_t slot = reading.slots[i];
            double factor = 1;
            for (int64_t w = 0; w < width; ++w) out[i * width + w] = rewards[slot * width + w];
            while (slot != last[i]) {
                slot = ring_.after(slot);
                factor *= gamma;
                for (int64_t w = 0; w < width; ++w) out[i * width + w] += static_cast<T>(factor * rewards[slot * width + w]);
            }
            discount[i] = static_cast<float>(factor * gamma);
        }
    }

    int64_t count_envs(nb::handle env_ids) {
        env_index_.clear();
        if (env_ids.is_none()) return ring_.envs;
        const Array array = read_index(env_ids);
        auto* ids = reinterpret_cast<const int64_t*>(array.data);
        for (int64_t i = 0; i < array.shape[0]; ++i) {
            if (ids[i] < 0 || ids[i] >= ring_.envs) throw std::out_of_range("env_ids");
            env_index_.push_back(ids[i]);
        }
        return array.shape[0];
    }

    // An observation and its next one in the same memory are one observation: the environment reuses its array.
    bool overlap(size_t o) const {
        const Given& a = given_[static_cast<size_t>(observed_[o])];
        const Given& b = given_[leaves_.size() + o];
        return a.source < b.source + b.source_bytes && b.source < a.source + a.source_bytes;
    }

    const char* item(size_t given, int64_t bytes, int64_t i) const { return given_[given].data + i * bytes; }

    // The given observation is the one that the pending row already holds.
    bool continuous(int64_t flat, int64_t i) const {
        for (const int o : observed_) {
            const Leaf& leaf = leaves_[static_cast<size_t>(o)];
            const char* obs = item(static_cast<size_t>(o), leaf.given_bytes, i);
            if (!leaf.stacked()) {
                if (std::memcmp(leaf.column + flat * leaf.bytes, obs, static_cast<size_t>(leaf.bytes)) != 0) return false;
                continue;
            }
            const char* frames[kMostFrames];
            frames_at(ring_, leaf.column, leaf.frames, flat, frames);
            rebuilt_.resize(static_cast<size_t>(leaf.given_bytes));
            leaf.frames.put_all(rebuilt_.data(), frames);
            if (std::memcmp(rebuilt_.data(), obs, rebuilt_.size()) != 0) return false;
        }
        return true;
    }

    // An observation that starts an episode must be a stack of its newest frame and padding.
    int64_t unpadded(int64_t i) const {
        for (const int o : observed_) {
            const Leaf& leaf = leaves_[static_cast<size_t>(o)];
            if (!leaf.stacked()) continue;
            const char* obs = item(static_cast<size_t>(o), leaf.given_bytes, i);
            std::vector<char> newest(static_cast<size_t>(leaf.bytes));
            leaf.frames.take(newest.data(), obs, leaf.frames.k - 1);
            for (int64_t j = 0; j < leaf.frames.k - 1; ++j)
                if (!leaf.frames.holds(obs, leaf.frames.repeat ? newest.data() : nullptr, j)) return o;
        }
        return -1;
    }

    // Before anything is written: every given stack can be rebuilt from single frames. Returns -1, or -2 - leaf.
    int64_t check_stacks(int64_t steps, int64_t envs) {
        joined_.clear();
        if (std::none_of(observed_.begin(), observed_.end(), [this](int o) { return leaves_[static_cast<size_t>(o)].stacked(); }))
            return -1;
        joined_.resize(static_cast<size_t>(steps * envs));
        std::vector<uint8_t> reset(static_cast<size_t>(steps * envs), 0);
        for (int64_t i = 0; i < steps * envs; ++i) {
            const int64_t env = env_index_.empty() ? i % envs : env_index_[static_cast<size_t>(i % envs)];
            const auto before = static_cast<size_t>(i - envs);
            const bool start = i >= envs && reset[before];
            reset[static_cast<size_t>(i)] = ring_.next_step && (i < envs ? ring_.resetting[env] : !start && ended(i - envs));
            if (reset[static_cast<size_t>(i)]) continue;  // its observation is not stored
            const bool joined = i < envs ? ring_.open[env] && continuous(ring_.at(ring_.head[env], env), i)
                                         : !start && !ended(i - envs) && joins(i, envs);
            // What follows a reset row is found where that row led to, too, though its stack starts anew.
            joined_[static_cast<size_t>(i)] = joined || (start && joins(i, envs));
            if (!joined) {
                const int64_t leaf = unpadded(i);
                if (leaf >= 0) return -2 - leaf;
            }
            for (size_t o = 0; o < observed_.size(); ++o) {
                const Leaf& leaf = leaves_[static_cast<size_t>(observed_[o])];
                const char* obs = item(static_cast<size_t>(observed_[o]), leaf.given_bytes, i);
                const char* next = item(leaves_.size() + o, leaf.given_bytes, i);
                if (leaf.stacked() && !leaf.frames.follows(next, obs)) return -2 - static_cast<int64_t>(leaves_.size() + o);
            }
        }
        return -1;
    }

    bool ended(int64_t i) const {
        return given_[static_cast<size_t>(terminated_)].data[i] || given_[static_cast<size_t>(truncated_)].data[i];
    }

    // Inside a block: step i starts where step i - envs led to.
    bool joins(int64_t i, int64_t envs) const {
        for (size_t o = 0; o < observed_.size(); ++o) {
            const Leaf& leaf = leaves_[static_cast<size_t>(observed_[o])];
            if (std::memcmp(item(static_cast<size_t>(observed_[o]), leaf.given_bytes, i),
                            item(leaves_.size() + o, leaf.given_bytes, i - envs), static_cast<size_t>(leaf.given_bytes)) != 0)
                return false;
        }
        return true;
    }

    void store(const Leaf& leaf, char* column, int64_t flat, const char* given) const {
        if (leaf.stacked()) leaf.frames.take(column + flat * leaf.bytes, given, leaf.frames.k - 1);
        else std::memcpy(column + flat * leaf.bytes, given, static_cast<size_t>(leaf.bytes));
    }

    bool goes_on(int64_t row, int64_t env, int64_t i) const {
        return joined_.empty() ? continuous(ring_.at(row, env), i) : joined_[static_cast<size_t>(i)] != 0;
    }

    // All environments have the same head: a step of all of them is one copy a leaf. Returns whether it was done.
    bool write_together(int64_t t) {
        const int64_t envs = ring_.envs, row = ring_.head[0];
        const bool open = ring_.open[0];
        if (envs == 1 || !env_index_.empty() || ring_.keeps_next || !joined_.empty()) return false;
        for (int64_t e = 0; e < envs; ++e)
            if (ring_.head[e] != row || static_cast<bool>(ring_.open[e]) != open || ring_.resetting[e]) return false;
        const int64_t flat = ring_.at(row, 0), first = t * envs;
        for (const int o : observed_) {
            const Leaf& leaf = leaves_[static_cast<size_t>(o)];
            const auto bytes = static_cast<size_t>(leaf.bytes * envs);
            const char* given = item(static_cast<size_t>(o), leaf.bytes, first);
            if (open && std::memcmp(leaf.column + flat * leaf.bytes, given, bytes) != 0) return false;
        }
        std::vector<int64_t>* touched = keep_touched_ ? &touched_.slots : nullptr;
        for (int64_t e = 0; e < envs; ++e) ring_.begin(e);
        for (int64_t e = 0; e < envs && !open; ++e) ring_.advance(row, e, touched);
        for (int64_t e = 0; e < envs; ++e) ring_.advance(row + 1, e, touched);
        for (size_t l = 0; l < leaves_.size(); ++l) {
            const bool observation = std::find(observed_.begin(), observed_.end(), static_cast<int>(l)) != observed_.end();
            if (!(observation && open)) copy_step(leaves_[l], flat, item(l, leaves_[l].bytes, first));
        }
        const int64_t ahead = ring_.at(row + 1, 0);
        for (size_t o = 0; o < observed_.size(); ++o) {
            const Leaf& leaf = leaves_[static_cast<size_t>(observed_[o])];
            copy_step(leaf, ahead, item(leaves_.size() + o, leaf.bytes, first));
        }
        for (int64_t e = 0; e < envs; ++e) {
            const bool end = ended(first + e), closes = end && !ring_.next_step;
            if (!open) ring_.first[flat + e] = 1;
            ring_.first[ahead + e] = 0;
            seal(flat + e, row, !open, true);
            seal(ahead + e, row + 1, true, false);
            ring_.kind[flat + e] = kTransition;
            ring_.kind[ahead + e] = closes ? kFinal : kPending;
            ring_.resetting[e] = end && ring_.next_step;
            ring_.head[e] = row + 1 + closes;
            ring_.open[e] = !closes;
            ++ring_.count[e];
            if (touched) touched->push_back(flat + e);
            ring_.complete(e);
        }
        return true;
    }

    void copy_step(const Leaf& leaf, int64_t flat, const char* given) const {
        copy_block(leaf.column + flat * leaf.bytes, given, leaf.bytes * ring_.envs);
    }

    void write_one(int64_t env, int64_t i) {
        std::vector<int64_t>* touched = keep_touched_ ? &touched_.slots : nullptr;
        const bool reset = ring_.next_step && ring_.resetting[env];
        int64_t row = ring_.head[env];
        bool open = ring_.open[env];
        ring_.begin(env);
        if (open && !reset && !goes_on(row, env, i)) {
            ring_.kind[ring_.at(row, env)] = kFinal;
            ++row;
            open = false;
        }
        if (!open) ring_.advance(row, env, touched);
        const int64_t flat = ring_.at(row, env);
        size_t next = 0;
        for (size_t l = 0; l < leaves_.size(); ++l) {
            const bool observation = next < observed_.size() && static_cast<size_t>(observed_[next]) == l;
            next += observation;
            // A pending row has its observation already; the one that only resets is no transition.
            if (observation && open) continue;
            store(leaves_[l], leaves_[l].column, flat, item(l, leaves_[l].given_bytes, i));
        }
        if (!open) ring_.first[flat] = 1;
        ring_.kind[flat] = reset ? kFinal : kTransition;
        ring_.count[env] += !reset;
        if (touched && !reset) touched->push_back(flat);
        const bool end = ended(i) && !reset;
        if (ring_.next_step) ring_.resetting[env] = end;
        const int64_t ahead = ring_.keeps_next ? row : row + 1;
        if (!ring_.keeps_next) ring_.advance(ahead, env, touched);
        for (size_t o = 0; o < observed_.size(); ++o) {
            const Leaf& leaf = leaves_[static_cast<size_t>(observed_[o])];
            char* column = ring_.keeps_next ? next_columns_[o] : leaf.column;
            store(leaf, column, ring_.at(ahead, env), item(leaves_.size() + o, leaf.given_bytes, i));
        }
        seal(flat, row, !open, true);
        if (ring_.keeps_next) {
            ring_.head[env] = row + 1;
            ring_.complete(env);
            return;
        }
        ring_.first[ring_.at(ahead, env)] = reset;
        seal(ring_.at(ahead, env), ahead, true, false);
        const bool closes = end && !ring_.next_step;
        ring_.kind[ring_.at(ahead, env)] = closes ? kFinal : kPending;
        ring_.head[env] = ahead + closes;
        ring_.open[env] = !closes;
        ring_.complete(env);
    }

    Ring ring_{};
    uint64_t* seals_ = nullptr;  // [slots, envs, 2] of a row's observation and of everything else; null: not kept
    int64_t waits_ = waits();    // that are known of
    int cold_ = 0;               // how many more batches are fetched before they are read
    std::vector<Leaf> leaves_;
    std::vector<int> observed_;
    std::vector<char*> next_columns_;
    std::vector<Given> given_;
    std::vector<int64_t> env_index_;
    Touched touched_;
    std::vector<uint8_t> joined_;        // of stacks: which steps of this call go on where the one before led to
    mutable std::vector<char> rebuilt_;  // a stack, for comparison
    bool keep_touched_ = false;
    bool single_;  // one environment without an axis
    int reward_, terminated_, truncated_;  // their columns
    nb::object owner_;
};

}  // namespace

void bind_ring(nb::module_& m) {
    m.attr("MOST_FRAMES") = kMostFrames;
    nb::class_<Touched>(m, "Touched").def_ro("slots", &Touched::slots);
    nb::class_<RingMemory>(m, "RingMemory")
        .def(nb::init<nb::list, nb::list, std::vector<int>, nb::list, nb::tuple, nb::object, nb::object, int64_t, bool, bool, int, int, int>(),
             nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg(),
             nb::arg(), nb::arg(), nb::arg())
        .def("write", &RingMemory::write, nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg())
        .def("seal_all", &RingMemory::seal_all)
        .def("find_broken", &RingMemory::find_broken)
        .def("fetch", &RingMemory::fetch)
        .def_static("write_behind", &write_behind)
        .def("keep_touched", &RingMemory::keep_touched)
        .def_prop_ro("touched", &RingMemory::touched, nb::rv_policy::reference_internal)
        .def("stored", &RingMemory::stored)
        .def("draw", &RingMemory::draw, nb::arg(), nb::arg(), nb::arg().none())
        .def("ids", &RingMemory::ids, nb::arg(), nb::arg().none())
        .def("following", &RingMemory::following, nb::arg(), nb::arg().none())
        .def("ahead", &RingMemory::ahead, nb::arg(), nb::arg().none())
        .def("behind", &RingMemory::behind, nb::arg(), nb::arg().none())
        .def("locate", &RingMemory::locate, nb::arg(), nb::arg().none())
        .def("n_steps", &RingMemory::n_steps)
        .def("sequences", &RingMemory::sequences)
        .def("window", &RingMemory::window)
        .def("transitions", &RingMemory::transitions)
        .def("stack", &RingMemory::stack);
}

}  // namespace recollect
