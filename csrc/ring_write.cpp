// Writing steps into the ring, and sealing rows.
#include <algorithm>

#include "ring_memory.hpp"
#include "seal.hpp"

namespace relive {
namespace {

// After a call what was cast for it is not kept, unless it is small.
struct Emptied {
    std::vector<Given>& given;
    ~Emptied() {
        for (Given& each : given)
            if (each.scratch.capacity() > (1 << 20)) std::vector<char>().swap(each.scratch);
    }
};

}  // namespace

RingMemory::RingMemory(nb::list columns, nb::list stacks, std::vector<int> observed, nb::list next_columns, nb::tuple state,
           nb::object journal, nb::object seals, int64_t alive, bool next_step, bool same_step, bool single, int reward, int terminated, int truncated)
    : observed_(std::move(observed)), same_step_(same_step), single_(single), reward_(reward), terminated_(terminated), truncated_(truncated) {
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
    if (columns.size() + next_columns.size() > kMostLeaves)
        throw std::invalid_argument("columns: expected at most " + std::to_string(kMostLeaves));
    for (size_t i = 0; i < columns.size(); ++i) leaves_.push_back(describe_leaf(columns[i], stacks[i], ring_.slots, envs));
    for (size_t i = 0; i < next_columns.size(); ++i)
        next_columns_.push_back(
            describe_leaf(next_columns[i], stacks[static_cast<size_t>(observed_[i])], ring_.slots, envs).column);
}

int64_t RingMemory::write(nb::tuple values, nb::tuple nexts, nb::handle env_ids, int64_t steps, bool blocks) {
    const int64_t envs = count_envs(env_ids);
    const size_t total = leaves_.size() + observed_.size();
    if (values.size() != leaves_.size() || nexts.size() != observed_.size())
        throw std::invalid_argument("leaves: expected one for each column");
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
    if (may_doubt(steps * envs)) {
        const int64_t doubtful = doubt(steps, envs);
        if (doubtful != -1) return doubtful;
    }
    for (int64_t t = 0; t < steps; ++t) {
        if (write_together(t)) continue;
        for (int64_t i = 0; i < envs; ++i) write_one(env_index_.empty() ? i : env_index_[static_cast<size_t>(i)], t * envs + i);
    }
    return -1;
}

int64_t RingMemory::stored() const {
    int64_t sum = 0;
    for (int64_t e = 0; e < ring_.envs; ++e) sum += ring_.count[e];
    return sum;
}

void RingMemory::seal_all() {
    MaybeReleased released(kReleaseBytes);
    for (int64_t flat = 0; flat < ring_.slots * ring_.envs && seals_; ++flat) {
        seals_[2 * flat] = seal_of_observation(flat, ring_.row_of(flat));
        seals_[2 * flat + 1] = seal_of_rest(flat, ring_.row_of(flat));
    }
}

void RingMemory::find_broken(nb::handle since, nb::handle until, nb::handle out) const {
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

uint64_t RingMemory::seal_of_observation(int64_t flat, int64_t row) const {
    uint64_t state = stir(stir(1, static_cast<uint64_t>(row)), ring_.first[flat]);
    for (const int o : observed_) {
        const Leaf& leaf = leaves_[static_cast<size_t>(o)];
        state = stir_all(state, leaf.column + flat * leaf.bytes, leaf.bytes);
    }
    return state;
}

uint64_t RingMemory::seal_of_rest(int64_t flat, int64_t row) const {
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

void RingMemory::seal(int64_t flat, int64_t row, bool observation, bool rest) {
    if (!seals_) return;
    if (observation) seals_[2 * flat] = seal_of_observation(flat, row);
    if (rest) seals_[2 * flat + 1] = seal_of_rest(flat, row);
}

int64_t RingMemory::count_envs(nb::handle env_ids) {
    env_index_.clear();
    if (env_ids.is_none()) return ring_.envs;
    const Array array = read_index(env_ids);
    auto* ids = reinterpret_cast<const int64_t*>(array.data);
    for (int64_t i = 0; i < array.shape[0]; ++i) {
        if (ids[i] < 0 || ids[i] >= ring_.envs)
            throw std::out_of_range("env_ids: expected 0 to " + std::to_string(ring_.envs - 1) + ", got " + std::to_string(ids[i]));
        env_index_.push_back(ids[i]);
    }
    return array.shape[0];
}

bool RingMemory::overlap(size_t o) const {
    const Given& a = given_[static_cast<size_t>(observed_[o])];
    const Given& b = given_[leaves_.size() + o];
    return a.source < b.source + b.source_bytes && b.source < a.source + a.source_bytes;
}

bool RingMemory::continuous(int64_t flat, int64_t i) const {
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

int64_t RingMemory::unpadded(int64_t i) const {
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

int64_t RingMemory::check_stacks(int64_t steps, int64_t envs) {
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

bool RingMemory::ended(int64_t i) const {
    return given_[static_cast<size_t>(terminated_)].data[i] || given_[static_cast<size_t>(truncated_)].data[i];
}

bool RingMemory::joins(int64_t i, int64_t envs) const {
    for (size_t o = 0; o < observed_.size(); ++o) {
        const Leaf& leaf = leaves_[static_cast<size_t>(observed_[o])];
        if (std::memcmp(item(static_cast<size_t>(observed_[o]), leaf.given_bytes, i),
                        item(leaves_.size() + o, leaf.given_bytes, i - envs), static_cast<size_t>(leaf.given_bytes)) != 0)
            return false;
    }
    return true;
}

void RingMemory::store(const Leaf& leaf, char* column, int64_t flat, const char* given) const {
    if (leaf.stacked()) leaf.frames.take(column + flat * leaf.bytes, given, leaf.frames.k - 1);
    else std::memcpy(column + flat * leaf.bytes, given, static_cast<size_t>(leaf.bytes));
}

bool RingMemory::goes_on(int64_t row, int64_t env, int64_t i) const {
    return joined_.empty() ? continuous(ring_.at(row, env), i) : joined_[static_cast<size_t>(i)] != 0;
}

bool RingMemory::write_together(int64_t t) {
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
    if (open) chains_.followed += envs;
    else for (int64_t e = 0; e < envs; ++e) count_end(e, first + e, chains_);
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

void RingMemory::copy_step(const Leaf& leaf, int64_t flat, const char* given) const {
    copy_block(leaf.column + flat * leaf.bytes, given, leaf.bytes * ring_.envs);
}

void RingMemory::write_one(int64_t env, int64_t i) {
    std::vector<int64_t>* touched = keep_touched_ ? &touched_.slots : nullptr;
    const bool reset = ring_.next_step && ring_.resetting[env];
    int64_t row = ring_.head[env];
    bool open = ring_.open[env];
    const bool joined = !open || reset || goes_on(row, env, i);
    if (!open) count_end(env, i, chains_);
    else if (!reset) chains_.count_step(joined);
    ring_.begin(env);
    if (!joined) {
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

void RingMemory::count_end(int64_t env, int64_t i, Chains& chains) const {
    const int64_t row = ring_.head[env] - 2;  // the step that ended; after it lies the observation that it led to
    if (ring_.next_step || ring_.keeps_next || row < ring_.floor[env]) return;
    const int64_t flat = ring_.at(row, env), final = ring_.at(row + 1, env);
    const bool is_step = ring_.kind[flat] == kTransition || ring_.kind[flat] == kHistory;
    if (ring_.kind[final] != kFinal || !is_step || ring_.first[flat]) return;
    const bool terminated = leaves_[static_cast<size_t>(terminated_)].column[flat];
    if (!terminated && !leaves_[static_cast<size_t>(truncated_)].column[flat]) return;  // cut
    const bool leads_away = std::any_of(observed_.begin(), observed_.end(), [&](int o) {
        const Leaf& leaf = leaves_[static_cast<size_t>(o)];
        const char *own = leaf.column + flat * leaf.bytes, *last = leaf.column + final * leaf.bytes;
        return std::memcmp(own, last, static_cast<size_t>(leaf.bytes)) != 0;
    });
    chains.count_end(leads_away && continuous(final, i), terminated || same_step_);
}

bool RingMemory::leads_to_start(int64_t i, int64_t envs) const {
    if (!joins(i, envs)) return false;
    for (size_t o = 0; o < observed_.size(); ++o) {
        const Leaf& leaf = leaves_[static_cast<size_t>(observed_[o])];
        if (std::memcmp(item(static_cast<size_t>(observed_[o]), leaf.given_bytes, i - envs),
                        item(leaves_.size() + o, leaf.given_bytes, i - envs), static_cast<size_t>(leaf.given_bytes)) != 0)
            return true;
    }
    return false;
}

Chains RingMemory::foresee(int64_t steps, int64_t envs) const {
    Chains chains = chains_;
    // Of the step before in each column: it only resets; it starts an episode.
    std::vector<uint8_t> reset(static_cast<size_t>(envs), 0), starts(reset.size(), 0);
    for (int64_t i = 0; i < steps * envs; ++i) {
        const auto n = static_cast<size_t>(i % envs);
        const int64_t env = env_index_.empty() ? i % envs : env_index_[n], before = i - envs;
        const bool later = before >= 0, after_end = later && ended(before) && !reset[n];
        const bool resets = ring_.next_step && (later ? after_end : ring_.resetting[env]);
        const bool open = later ? ring_.next_step || !after_end : ring_.open[env];
        bool joined = false;
        if (open && !resets) {
            joined = !joined_.empty() ? joined_[static_cast<size_t>(i)]
                     : later          ? joins(i, envs)
                                      : continuous(ring_.at(ring_.head[env], env), i);
            chains.count_step(joined);
        } else if (!later) {
            if (!open) count_end(env, i, chains);
        } else if (!ring_.next_step && !starts[n]) {
            const bool terminated = given_[static_cast<size_t>(terminated_)].data[before];
            chains.count_end(leads_to_start(i, envs), terminated || same_step_);
        }
        starts[n] = !joined && !resets;
        reset[n] = resets;
    }
    return chains;
}

int64_t RingMemory::most_ends(int64_t steps, int64_t envs) const {
    int64_t closed = 0;
    for (int64_t i = 0; i < envs; ++i) closed += !ring_.open[env_index_.empty() ? i : env_index_[static_cast<size_t>(i)]];
    return closed + (steps - 1) * envs;
}

int64_t RingMemory::doubt(int64_t steps, int64_t envs) {
    const bool may_cut = !told_cut_ && chains_.may_look_cut(steps * envs);
    const bool may_reset = !told_reset_ && !ring_.next_step && chains_.may_look_reset(most_ends(steps, envs));
    if (!may_cut && !may_reset) return -1;
    foreseen_ = foresee(steps, envs);
    if (may_cut && foreseen_.look_cut()) {
        told_cut_ = true;
        return kLooksCut;
    }
    if (may_reset && foreseen_.look_reset()) {
        told_reset_ = true;
        return kLooksReset;
    }
    return -1;
}

}  // namespace relive
