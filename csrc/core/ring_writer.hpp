// Writes steps into the ring: reads a block of steps from the caller's memory, checks it and stores it.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "checksums.hpp"
#include "ring.hpp"

namespace relive {

// The items of one leaf passed by the caller, contiguous [steps, environments, …], in the dtype of the column.
struct InputLeaf {
    const char* data;
    // The caller's memory, before any cast.
    const char* source;
    int64_t source_bytes;
    // Copies of the items in the dtype of the column, if they need a cast.
    std::vector<char> scratch;
};

// The leading axes of a leaf: [steps, environments], each only if present.
struct LeadingAxes {
    int64_t steps, envs;
    bool has_steps, has_envs;

    // Write the sizes of the present axes to `shape` and return their number.
    int put(int64_t* shape) const {
        int count = 0;
        if (has_steps) shape[count++] = steps;
        if (has_envs) shape[count++] = envs;
        return count;
    }
};

// Read a leaf from an array, cast if needed. Returns false if shape or dtype do not fit.
inline bool read_array(const ArrayView& array, const Leaf& leaf, const LeadingAxes& axes, InputLeaf& input) {
    int64_t leading[2];
    const int lead = axes.put(leading);
    if (!array.ends_with(lead, leaf.ndim, leaf.shape) || !array.contiguous()) return false;
    for (int d = 0; d < lead; ++d)
        if (array.shape[d] != leading[d]) return false;
    input.data = input.source = array.data;
    input.source_bytes = array.elements() * array.itemsize();
    if (array.dtype == leaf.dtype) {
        if (leaf.dtype != kBool || are_flags(array.data, input.source_bytes)) return true;
        input.scratch.resize(input.source_bytes);
        as_flags(input.scratch.data(), array.data, input.source_bytes);
    } else {
        if (array.dtype != kFloat64 || leaf.dtype != kFloat32) return false;
        const int64_t elements = leaf.input_elements() * axes.steps * axes.envs;
        input.scratch.resize(elements * 4);
        if (!narrow(reinterpret_cast<float*>(input.scratch.data()), array.as<double>(), elements)) return false;
    }
    input.data = input.scratch.data();
    return true;
}

// The steps of one call before they are stored, numbered from 0 to count() - 1 in the order [steps, environments].
class StepBlock {
public:
    explicit StepBlock(const RingMemory& memory)
        : memory_(memory), inputs_(memory.leaves.size() + memory.obs_leaves.size()) {}

    // Begin a call with `steps` steps of all environments, or of the `envs` environments in `env_index`.
    void begin(int64_t steps, const int64_t* env_index = nullptr, int64_t envs = 0) {
        steps_ = steps;
        of_all_envs_ = !env_index;
        envs_ = env_index ? envs : memory_.ring.envs;
        if (env_index) env_index_.assign(env_index, env_index + envs);
        continues_.clear();
    }

    int64_t steps() const { return steps_; }
    int64_t envs() const { return envs_; }
    int64_t count() const { return steps_ * envs_; }
    bool of_all_envs() const { return of_all_envs_; }
    int64_t env_at(int64_t n) const { return of_all_envs_ ? n : env_index_[n]; }
    const int64_t* env_ids() const { return of_all_envs_ ? nullptr : env_index_.data(); }

    // Inputs: all leaves, then the next observations.
    size_t size() const { return inputs_.size(); }
    InputLeaf& input(size_t i) { return inputs_[i]; }

    const char* item(size_t leaf, int64_t bytes, int64_t i) const { return inputs_[leaf].data + i * bytes; }
    const char* obs(size_t o, int64_t i) const {
        return item(static_cast<size_t>(memory_.obs_leaves[o]), memory_.observation(o).input_bytes, i);
    }
    const char* next_obs(size_t o, int64_t i) const {
        return item(memory_.leaves.size() + o, memory_.observation(o).input_bytes, i);
    }

    const char* flags(int leaf) const { return inputs_[leaf].data; }
    bool ended(int64_t i) const { return flags(memory_.terminated)[i] || flags(memory_.truncated)[i]; }

    // Whether every floating-point reward is finite.
    bool has_finite_rewards() const {
        // The leaves of the reward, one per agent, are numbered from `reward` on and precede `terminated`.
        for (int l = memory_.reward; l < memory_.terminated; ++l) {
            const Leaf& leaf = memory_.leaf(l);
            const char* data = inputs_[l].data;
            const int64_t elements = leaf.input_elements() * count();
            if (leaf.dtype == kFloat32 && !all_finite(reinterpret_cast<const float*>(data), elements)) return false;
            if (leaf.dtype == kFloat64 && !all_finite(reinterpret_cast<const double*>(data), elements)) return false;
        }
        return true;
    }

    // Whether observation and next observation of the first step share memory, as if the environment reuses its array.
    bool overlaps(size_t o) const {
        const InputLeaf& a = inputs_[memory_.obs_leaves[o]];
        const InputLeaf& b = inputs_[memory_.leaves.size() + o];
        return a.source < b.source + b.source_bytes / steps_ && b.source < a.source + a.source_bytes / steps_;
    }

    // Check that every frame stack can be rebuilt from single frames. Returns -1, or the index of the first input that
    // cannot. Records which steps continue the preceding step.
    int64_t check_stacks() {
        if (!memory_.has_stacks()) return -1;
        const Ring& ring = memory_.ring;
        continues_.resize(count());
        std::vector<uint8_t> reset(static_cast<size_t>(count()), 0);
        for (int64_t i = 0; i < count(); ++i) {
            const int64_t env = env_at(i % envs_), before = i - envs_;
            const bool start = i >= envs_ && reset[before];
            reset[i] = ring.next_step && (i < envs_ ? ring.resetting[env] : !start && ended(before));
            // A dummy step needs no check, because its observation was checked with the previous step.
            if (reset[i]) continue;
            const bool continues = i < envs_ ? ring.open[env] && starts_with(ring.at(ring.head[env], env), i)
                                             : !start && !ended(before) && continues_block(i);
            // A step after a dummy step starts with the observation of this row, but its frame stack starts anew.
            continues_[i] = continues || (start && continues_block(i));
            int64_t bad = continues ? -1 : find_unpadded(i);
            if (bad < 0) bad = find_unstackable(i);
            if (bad >= 0) return bad;
        }
        return -1;
    }

    // Whether step i starts with the observation stored at a slot.
    bool starts_with(int64_t flat, int64_t i) const {
        for (size_t o = 0; o < memory_.obs_leaves.size(); ++o)
            if (differ(o, observation_at(o, flat, rebuilt_), obs(o, i))) return false;
        return true;
    }

    // Whether step i starts with the observation of the pending row of its environment.
    bool continues_pending(int64_t row, int64_t env, int64_t i) const {
        return continues_.empty() ? starts_with(memory_.ring.at(row, env), i) : continues_[i] != 0;
    }

    // Whether two slots hold different observations. Stacked leaves are compared as whole stacks.
    bool observations_differ(int64_t flat, int64_t next) const {
        std::vector<char> stack, next_stack;
        for (size_t o = 0; o < memory_.obs_leaves.size(); ++o)
            if (differ(o, observation_at(o, flat, stack), observation_at(o, next, next_stack))) return true;
        return false;
    }

    // Free the memory of large casts.
    void release_casts() {
        for (InputLeaf& each : inputs_)
            if (each.scratch.capacity() > (1 << 20)) std::vector<char>().swap(each.scratch);
    }

private:
    // Return the observation at a slot: a pointer into its column, or to `rebuilt` if the observation is stacked.
    const char* observation_at(size_t o, int64_t flat, std::vector<char>& rebuilt) const {
        const Leaf& leaf = memory_.observation(o);
        if (!leaf.stacked()) return leaf.at(flat);
        rebuilt.resize(leaf.input_bytes);
        build_stack(memory_.ring, leaf, leaf.column, flat, rebuilt.data());
        return rebuilt.data();
    }

    bool differ(size_t o, const char* a, const char* b) const {
        return std::memcmp(a, b, memory_.observation(o).input_bytes) != 0;
    }

    // Whether step i starts with the next observation of the preceding step in the same block.
    bool continues_block(int64_t i) const {
        for (size_t o = 0; o < memory_.obs_leaves.size(); ++o)
            if (differ(o, obs(o, i), next_obs(o, i - envs_))) return false;
        return true;
    }

    // At the start of an episode, all frames of a stack except the newest one must be padding. Return the first leaf
    // that breaks this rule, or -1.
    int64_t find_unpadded(int64_t i) const {
        std::vector<char> newest, padded;
        for (size_t o = 0; o < memory_.obs_leaves.size(); ++o) {
            const Leaf& leaf = memory_.observation(o);
            if (!leaf.stacked()) continue;
            newest.resize(leaf.bytes);
            padded.resize(leaf.input_bytes);
            leaf.frames.copy_frame(newest.data(), obs(o, i), leaf.frames.k - 1);
            const char* frames[kMaxFrames];
            std::fill_n(frames, leaf.frames.k - 1, leaf.frames.repeat ? newest.data() : nullptr);
            frames[leaf.frames.k - 1] = newest.data();
            leaf.frames.build(padded.data(), frames);
            if (differ(o, padded.data(), obs(o, i))) return memory_.obs_leaves[o];
        }
        return -1;
    }

    // Return the first next observation whose stack does not follow the observation of step i; or -1.
    int64_t find_unstackable(int64_t i) const {
        for (size_t o = 0; o < memory_.obs_leaves.size(); ++o) {
            const Leaf& leaf = memory_.observation(o);
            if (leaf.stacked() && !leaf.frames.follows(next_obs(o, i), obs(o, i)))
                return static_cast<int64_t>(memory_.leaves.size() + o);
        }
        return -1;
    }

    const RingMemory& memory_;
    int64_t steps_ = 0, envs_ = 0;
    std::vector<InputLeaf> inputs_;
    bool of_all_envs_ = true;
    std::vector<int64_t> env_index_;
    // Whether each step continues the preceding one; empty without stacked leaves.
    std::vector<uint8_t> continues_;
    mutable std::vector<char> rebuilt_;
};

// Warnings about suspicious data, returned by a write that has stored its steps. Except for kNoWarning, the values are
// below every other status of a write.
enum Warning : int64_t { kNoWarning = -1, kLooksCut = INT64_MIN, kLooksReset, kLooksRestarted, kLooksInfinite };

// Counts how consecutive steps are connected. The counters belong to one writer and are not stored.
struct Continuity {
    // Number of steps after a step that did not end its episode.
    int64_t followed = 0;
    // Number of steps in `followed` that do not start with the preceding next observation.
    int64_t cut = 0;
    // Number of episode ends with a following step.
    int64_t ended = 0;
    // Number of ends in `ended` whose next observation is the first observation of the following episode.
    int64_t reset = 0;
    // Number of steps after a reset that the caller did not announce with a cut.
    int64_t restarted = 0;
    // Number of writes with an infinite or NaN reward.
    int64_t infinite = 0;

    // Whether unannounced cuts count as restarts: in episode statistics they merge two episodes.
    bool watches_cuts = false;

    // Count a step that should start with the pending observation: a dummy step, or a step within an episode.
    void count_start(bool continues, bool is_reset_row) {
        followed += !is_reset_row;
        cut += !is_reset_row && !continues;
        restarted += !continues && (is_reset_row || watches_cuts);
    }

    // Count an episode end. `leads_to_start` means that its next observation is the first one of the next episode. A
    // truncated episode may continue so, unless environments are known to reset in the same step.
    void count_end(bool leads_to_start, bool surely_over) {
        if (leads_to_start && !surely_over) return;
        ++ended;
        reset += leads_to_start;
    }

    // Return a warning that was not returned before, or kNoWarning.
    Warning next_warning() {
        // Restarts are reported only if most steps are connected: in modified observations, restarts look like cuts.
        const bool looks[] = {followed >= 64 && 2 * cut > followed, ended >= 8 && reset == ended,
                              restarted > 0 && 2 * cut < followed, infinite > 0};
        for (int i = 0; i < 4; ++i) {
            if (!looks[i] || warned_[i]) continue;
            warned_[i] = true;
            return static_cast<Warning>(kLooksCut + i);
        }
        return kNoWarning;
    }

private:
    bool warned_[4] = {};
};

class RingWriter {
public:
    // The steps to write. The caller fills the block, checks it, then calls `write`.
    StepBlock block;
    Continuity continuity;
    ChangedSlots changed;
    bool tracks_changes = false;

    explicit RingWriter(RingMemory& memory) : block(memory), memory_(memory), ring_(memory.ring) {
        changed.kind = ring_.kind;
    }

    // Write all steps of the block. The caller has checked the block and emptied `changed`.
    void write() {
        const bool may_copy = ring_.envs > 1 && block.of_all_envs() && !ring_.stores_next_obs && !memory_.has_stacks();
        continuity.infinite += !block.has_finite_rewards();
        for (int64_t t = 0; t < block.steps(); ++t) {
            if (may_copy && all_continue(t)) {
                write_all_envs(t);
                continue;
            }
            for (int64_t n = 0; n < block.envs(); ++n) write_one(block.env_at(n), t * block.envs() + n);
        }
    }

private:
    std::vector<int64_t>* changed_slots() { return tracks_changes ? &changed.slots : nullptr; }

    // Count the episode end before step i if it is still stored. Episodes of one step are ignored: a bandit may
    // legitimately pass the next context as the next observation.
    void count_end(int64_t env, int64_t i) {
        // `row` is the row of the episode's last step; the following row holds the final observation.
        const int64_t row = minus(ring_.head[env], 2);
        if (ring_.next_step || ring_.stores_next_obs || row < ring_.floor[env]) return;
        const int64_t flat = ring_.at(row, env), final = ring_.at(plus(row, 1), env);
        const bool is_step = ring_.kind[flat] == kTransition || ring_.kind[flat] == kHistory;
        if (ring_.kind[final] != kFinal || !is_step || ring_.first[flat]) return;
        const bool terminated = memory_.leaf(memory_.terminated).column[flat];
        // A step that is neither terminated nor truncated was cut, which does not count as an end.
        if (!terminated && !memory_.leaf(memory_.truncated).column[flat]) return;
        const bool leads_to_start = block.observations_differ(flat, final) && block.starts_with(final, i);
        continuity.count_end(leads_to_start, terminated || memory_.same_step);
    }

    // Whether all environments have the same head, and either all continue their episodes or all start one.
    bool all_continue(int64_t t) const {
        const int64_t envs = ring_.envs, row = ring_.head[0], flat = ring_.at(row, 0);
        const bool open = ring_.open[0];
        for (int64_t e = 0; e < envs; ++e)
            if (ring_.head[e] != row || static_cast<bool>(ring_.open[e]) != open || ring_.resetting[e]) return false;
        for (size_t o = 0; o < memory_.obs_leaves.size() && open; ++o) {
            const Leaf& leaf = memory_.observation(o);
            if (std::memcmp(leaf.at(flat), block.obs(o, t * envs), leaf.bytes * envs) != 0) return false;
        }
        return true;
    }

    // Write a step of all environments with one copy per leaf.
    void write_all_envs(int64_t t) {
        // Stores cannot alias a copy of the ring, so its pointers stay in registers.
        Ring ring = ring_;
        const int64_t envs = ring.envs, row = ring.head[0], next = plus(row, 1), first_step = t * envs;
        const int64_t flat = ring.at(row, 0), next_flat = ring.at(next, 0);
        const bool open = ring.open[0];
        if (open) continuity.followed += envs;
        else for (int64_t e = 0; e < envs; ++e) count_end(e, first_step + e);
        std::vector<int64_t>* slots = changed_slots();
        for (int64_t e = 0; e < envs; ++e) ring.begin(e);
        for (int64_t e = 0; e < envs && !open; ++e) ring.advance(row, e, slots);
        for (int64_t e = 0; e < envs; ++e) ring.advance(next, e, slots);
        for (size_t l = 0; l < memory_.leaves.size(); ++l) {
            const Leaf& leaf = memory_.leaves[l];
            if (!(leaf.is_observation && open))
                copy_block(leaf.at(flat), block.item(l, leaf.bytes, first_step), leaf.bytes * envs);
        }
        for (size_t o = 0; o < memory_.obs_leaves.size(); ++o) {
            const Leaf& leaf = memory_.observation(o);
            copy_block(leaf.at(next_flat), block.next_obs(o, first_step), leaf.bytes * envs);
        }
        const char* terminated = block.flags(memory_.terminated) + first_step;
        const char* truncated = block.flags(memory_.truncated) + first_step;
        for (int64_t e = 0; e < envs; ++e) {
            const bool end = terminated[e] || truncated[e], closes = end && !ring.next_step;
            if (!open) ring.first[flat + e] = 1;
            ring.first[next_flat + e] = 0;
            store_checksums(memory_, flat + e, row, !open, true);
            store_checksums(memory_, next_flat + e, next, true, false);
            ring.kind[flat + e] = kTransition;
            ring.kind[next_flat + e] = closes ? kFinal : kPending;
            ring.resetting[e] = end && ring.next_step;
            ring.head[e] = plus(next, closes);
            ring.open[e] = !closes;
            ring.count[e] = plus(ring.count[e], 1);
            if (slots) slots->push_back(flat + e);
            ring.complete(e);
        }
    }

    static void store(const Leaf& leaf, char* column, int64_t flat, const char* item) {
        if (leaf.stacked()) leaf.frames.copy_frame(column + flat * leaf.bytes, item, leaf.frames.k - 1);
        else std::memcpy(column + flat * leaf.bytes, item, leaf.bytes);
    }

    void store_next_obs(int64_t flat, int64_t i) {
        for (size_t o = 0; o < memory_.obs_leaves.size(); ++o) {
            const Leaf& leaf = memory_.observation(o);
            store(leaf, ring_.stores_next_obs ? memory_.next_columns[o] : leaf.column, flat, block.next_obs(o, i));
        }
    }

    void write_one(int64_t env, int64_t i) {
        std::vector<int64_t>* slots = changed_slots();
        const bool reset = ring_.next_step && ring_.resetting[env];
        int64_t row = ring_.head[env];
        // Whether the head row already holds its observation.
        bool open = ring_.open[env];
        const bool continues = !open || reset || block.continues_pending(row, env, i);
        if (!open) count_end(env, i);
        else continuity.count_start(reset ? block.starts_with(ring_.at(row, env), i) : continues, reset);
        ring_.begin(env);
        if (!continues) {
            ring_.kind[ring_.at(row, env)] = kFinal;
            row = plus(row, 1);
            open = false;
        }
        if (!open) ring_.advance(row, env, slots);
        const int64_t flat = ring_.at(row, env);
        for (size_t l = 0; l < memory_.leaves.size(); ++l) {
            const Leaf& leaf = memory_.leaves[l];
            if (!(leaf.is_observation && open)) store(leaf, leaf.column, flat, block.item(l, leaf.input_bytes, i));
        }
        if (!open) ring_.first[flat] = 1;
        ring_.kind[flat] = reset ? kFinal : kTransition;
        ring_.count[env] = plus(ring_.count[env], !reset);
        if (slots && !reset) slots->push_back(flat);
        const bool end = block.ended(i) && !reset;
        if (ring_.next_step) ring_.resetting[env] = end;
        if (ring_.stores_next_obs) {
            store_next_obs(flat, i);
            store_checksums(memory_, flat, row, !open, true);
            ring_.head[env] = plus(row, 1);
            return ring_.complete(env);
        }
        const int64_t next = plus(row, 1), next_flat = ring_.at(next, env);
        ring_.advance(next, env, slots);
        store_next_obs(next_flat, i);
        store_checksums(memory_, flat, row, !open, true);
        ring_.first[next_flat] = reset;
        store_checksums(memory_, next_flat, next, true, false);
        const bool closes = end && !ring_.next_step;
        ring_.kind[next_flat] = closes ? kFinal : kPending;
        ring_.head[env] = plus(next, closes);
        ring_.open[env] = !closes;
        ring_.complete(env);
    }

    RingMemory& memory_;
    Ring& ring_;
};

}
