// Drawing rows of the ring, and reading around them.
#include <algorithm>

#include "random.hpp"
#include "ring_memory.hpp"
#include "windows.hpp"

#if defined(__linux__)
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>
#endif

namespace relive {
namespace {

constexpr int kPatience = 64;                     // batches after one that waited for the disk
constexpr int64_t kRare = 16;                     // one transition in so many slots is too rare to look for by chance
constexpr int64_t kMostSteps = int64_t{1} << 30;  // of a window, and windows of a batch: their product fits

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

}  // namespace

int64_t RingMemory::waits() {
#if defined(__linux__)
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_majflt;
#else
    return 0;
#endif
}

void RingMemory::fetch(nb::handle slots) {
    const Array in = read_index(slots);
    check_slots(in);
    fetch_rows(reinterpret_cast<const int64_t*>(in.data), in.shape[0]);
}

bool RingMemory::drawn(int64_t count, nb::handle capsule, int64_t* slots) const {
    auto* random = static_cast<BitGenerator*>(PyCapsule_GetPointer(capsule.ptr(), "BitGenerator"));
    if (!random) throw nb::python_error();
    int64_t window = 0;  // the longest column, in rows since the last clear
    for (int64_t e = 0; e < ring_.envs; ++e) window = std::max(window, ring_.newest(e) + 1 - ring_.floor[e]);
    const bool round = window >= ring_.slots;
    const int64_t range = (round ? ring_.slots : window) * ring_.envs;
    if (stored() <= range / kRare) return false;
    // All that are missing are drawn before any is looked at, so that their cache lines come together.
    for (int64_t found = 0, patience = 1024 + 4 * kRare * count; found < count;) {
        if ((patience -= count - found) < 0) return false;
        for (int64_t i = found; i < count; ++i) {
            slots[i] = round ? random->below_any(range) : recent(random->below_any(range));
            if (slots[i] >= 0) RELIVE_PREFETCH(ring_.kind + slots[i]);
        }
        for (int64_t i = found; i < count; ++i) {
            const int64_t slot = slots[i];
            slots[found] = slot;
            found += slot >= 0 && ring_.kind[slot] == kTransition;
        }
    }
    return true;
}

nb::object RingMemory::draw(int64_t count, nb::handle capsule, nb::object out) const {
    auto* slots = target<int64_t>(out, kInt64, count);
    return drawn(count, capsule, slots) ? out : nb::none();
}

nb::object RingMemory::sample(int64_t count, nb::handle capsule, int64_t n, double gamma) const {
    std::vector<int64_t> slots(static_cast<size_t>(count));
    if (!drawn(count, capsule, slots.data())) return nb::none();
    return n == 0 ? read_rows(slots.data(), slots.data(), count, 0, 0.0) : read_n_steps(slots.data(), count, n, gamma);
}

nb::object RingMemory::ids(nb::handle slots, nb::object out) const {
    return map(slots, out, [this](int64_t slot) { return ring_.id_of(slot); });
}

nb::object RingMemory::following(nb::handle slots, nb::object out) const {
    return map(slots, out, [this](int64_t slot) { return ring_.after(slot); });
}

nb::object RingMemory::ahead(nb::handle slots, nb::object out) const {
    return map(slots, out, [this](int64_t slot) {
        int64_t steps = 0;
        for (int64_t at = ring_.after(slot); ring_.kind[at] == kTransition && steps < ring_.slots; ++steps) at = ring_.after(at);
        return steps;
    });
}

nb::object RingMemory::behind(nb::handle slots, nb::object out) const {
    return map(slots, out, [this](int64_t slot) {
        int64_t steps = 0;
        while (!ring_.first[slot] && ring_.kind[ring_.before(slot)] == kTransition && steps < ring_.slots) {
            slot = ring_.before(slot);
            ++steps;
        }
        return steps;
    });
}

nb::object RingMemory::locate(nb::handle ids, nb::object out) const {
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

bool RingMemory::holds(nb::handle slots, nb::handle ids) const {
    const Array in = checked_slots(slots);
    const auto* from = reinterpret_cast<const int64_t*>(in.data);
    const auto* expected = memory_of<int64_t>(ids, kInt64, in.shape[0], "ids");
    // A younger row on the same slot has an id that is larger by at least this.
    const int64_t envs = ring_.envs, round = ring_.slots * envs;
    for (int64_t i = 0; i < in.shape[0]; ++i) {
        const int64_t env = envs == 1 ? 0 : from[i] % envs, newest = ring_.newest(env) * envs + env;
        if (ring_.kind[from[i]] != kTransition || expected[i] > newest || newest - expected[i] >= round) return false;
    }
    return true;
}

void RingMemory::window(nb::handle slots, int64_t before, int64_t after, bool cross, nb::handle out, nb::handle first) const {
    const Array in = read_index(slots);
    const int64_t count = in.shape[0], length = before + after;
    auto* from = reinterpret_cast<const int64_t*>(in.data);
    auto* to = memory_of<int64_t>(out, kInt64, count * length, "out");
    auto* starts = memory_of<uint8_t>(first, kBool, count * length, "first");
    for (int64_t i = 0; i < count; ++i) {
        window_around(ring_, from[i], before, after, cross, to + i * length);
        for (int64_t j = 0; j < length; ++j) {
            const int64_t slot = to[i * length + j];
            starts[i * length + j] = slot >= 0 && ring_.first[slot];
        }
    }
}

nb::list RingMemory::transitions(nb::handle slots) const {
    const Array in = checked_slots(slots);
    const auto* rows = reinterpret_cast<const int64_t*>(in.data);
    return read_rows(rows, rows, in.shape[0], 0, 0.0);
}

nb::list RingMemory::n_steps(nb::handle slots, int64_t n, double gamma) const {
    const Array in = checked_slots(slots);
    return read_n_steps(reinterpret_cast<const int64_t*>(in.data), in.shape[0], n, gamma);
}

nb::list RingMemory::sequences(nb::handle slots, int64_t before, int64_t after, bool cross, const std::vector<int>& carried) {
    const Array in = checked_slots(slots);
    const int64_t count = in.shape[0];
    if (before > kMostSteps || after > kMostSteps || count > kMostSteps) throw std::bad_alloc();
    const int64_t length = before + after, steps = count * length;
    const auto* drawn = reinterpret_cast<const int64_t*>(in.data);
    std::vector<int64_t> at(static_cast<size_t>(steps)), next(at.size());
    std::vector<int64_t> start(static_cast<size_t>(count)), burn_in(start.size());
    for (int64_t i = 0; i < count; ++i) {
        const auto b = static_cast<size_t>(i);
        burn_in[b] = window_around(ring_, drawn[i], before, after, cross, at.data() + i * length);
        start[b] = at[static_cast<size_t>(i * length)];
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
    ring_.ids_of(drawn, count, ids);
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
    for (int64_t i = 0; i < count; ++i)
        std::memset(train + i * length, 0, static_cast<size_t>(burn_in[static_cast<size_t>(i)]));
    return out;
}

void RingMemory::stack(nb::handle slots, int64_t leaf_index, nb::handle out) const {
    const Array in = read_index(slots);
    const Leaf& leaf = leaves_.at(static_cast<size_t>(leaf_index));
    const Array target = read_or_throw(out, "out");
    if (target.elements() * target.itemsize() != leaf.given_bytes * in.shape[0])
        throw std::invalid_argument("out: expected the bytes of one leaf per row");
    check_slots(in);
    MaybeReleased released(leaf.given_bytes * in.shape[0]);
    read({&leaf, leaf.column, reinterpret_cast<const int64_t*>(in.data), target.data}, in.shape[0]);
}

void RingMemory::fetch_rows(const int64_t* rows, int64_t number) {
    const int64_t count = waits();
    if (count > waits_) cold_ = kPatience;
    waits_ = count;
    if (cold_ == 0) return;
    --cold_;
    MaybeReleased released(kReleaseBytes);
    for (int64_t i = 0; i < number; ++i)
        if (rows[i] >= 0) ask_for_row(rows[i]);
}

void RingMemory::ask_for_row(int64_t flat) const {
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

void RingMemory::plan(Fresh& fresh, const Leaf& leaf, int lead_ndim, const int64_t* lead) {
    if (lead_ndim + leaf.ndim > kMaxDims) throw std::invalid_argument("leaf: expected fewer axes");
    int64_t shape[kMaxDims];
    std::copy(lead, lead + lead_ndim, shape);
    std::copy(leaf.shape, leaf.shape + leaf.ndim, shape + lead_ndim);
    fresh.add(leaf.dtype, lead_ndim + leaf.ndim, shape);
}

void RingMemory::read(const Reading& reading, int64_t count) const noexcept {
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

int64_t RingMemory::recent(int64_t behind) const {
    const int64_t env = behind % ring_.envs, row = ring_.newest(env) - behind / ring_.envs;
    return row < ring_.floor[env] ? -1 : ring_.at(row, env);
}

void RingMemory::check_slots(const Array& slots) const {
    auto* from = reinterpret_cast<const int64_t*>(slots.data);
    for (int64_t i = 0; i < slots.shape[0]; ++i)
        if (from[i] >= ring_.slots * ring_.envs) throw std::out_of_range("slot: expected slots of the ring");
}

template <class F>
nb::object RingMemory::map(nb::handle slots, nb::object out, F f) const {
    const Array in = read_index(slots);
    check_slots(in);
    auto* from = reinterpret_cast<const int64_t*>(in.data);
    auto* to = target<int64_t>(out, kInt64, in.shape[0]);
    for (int64_t i = 0; i < in.shape[0]; ++i) to[i] = from[i] < 0 ? -1 : f(from[i]);
    return out;
}

Array RingMemory::checked_slots(nb::handle slots) const {
    const Array in = read_index(slots);
    if (!in_range(reinterpret_cast<const int64_t*>(in.data), in.shape[0], ring_.slots * ring_.envs))
        throw std::out_of_range("slot: expected slots of the ring");
    return in;
}

int64_t RingMemory::last_of(int64_t slot, int64_t n) const {
    for (int64_t k = 1; k < n; ++k) {
        const int64_t next = ring_.after(slot);
        if (ring_.kind[next] != kTransition) break;
        slot = next;
    }
    return slot;
}

nb::list RingMemory::read_n_steps(const int64_t* rows, int64_t count, int64_t n, double gamma) const {
    std::vector<int64_t> last(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) last[static_cast<size_t>(i)] = last_of(rows[i], n);
    return read_rows(rows, last.data(), count, n, gamma);
}

nb::list RingMemory::read_rows(const int64_t* first, const int64_t* last, int64_t count, int64_t n, double gamma) const {
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
    ring_.ids_of(first, count, ids);
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
void RingMemory::sum_rewards(const Reading& reading, const int64_t* last, int64_t count, double gamma, float* discount) const {
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

}  // namespace relive
