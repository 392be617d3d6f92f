// The memory of a replay buffer: steps are written (ring_write.cpp), rows are drawn and read (ring_read.cpp).
#pragma once
#include <nanobind/nanobind.h>

#include <vector>

#include "fresh.hpp"
#include "step.hpp"

namespace relive {

// How the steps that one object has written are joined, so that broken chains are noticed; no part of what is stored.
struct Chains {
    int64_t followed = 0;  // steps after one that did not end its episode
    int64_t cut = 0;       // of these, steps that do not start where the one before led to
    int64_t ended = 0;     // ends of episodes that a step was seen after
    int64_t reset = 0;     // of these, ends that lead to the observation of that step and not to their own one
    bool look_cut() const { return may_look_cut(0); }
    bool look_reset() const { return may_look_reset(0); }

    // After so many more steps, or ends, at the worst.
    bool may_look_cut(int64_t more) const { return followed + more >= 64 && 2 * cut + more > followed; }
    bool may_look_reset(int64_t more) const { return reset == ended && ended + more >= 8; }

    nb::tuple told() const { return nb::make_tuple(followed, cut, ended, reset); }

    void count_step(bool joined) {
        ++followed;
        cut += !joined;
    }

    // An end that leads to where the next episode starts. A truncated one may be an episode that simply goes on, unless
    // the environments are known to reset in the same step.
    void count_end(bool leads_to_start, bool surely_over) {
        if (leads_to_start && !surely_over) return;
        ++ended;
        reset += leads_to_start;
    }
};

constexpr int64_t kLooksCut = INT64_MIN, kLooksReset = INT64_MIN + 1;

class RingMemory {
public:
    // `columns[i]` is [slots, envs, …]. `stacks[i]` is (k, axis, repeat) or None. `observed` says which columns are
    // observations; `next_columns` are theirs for next observations when those are kept beside the rows.
    RingMemory(nb::list columns, nb::list stacks, std::vector<int> observed, nb::list next_columns, nb::tuple state,
               nb::object journal, nb::object seals, int64_t alive, bool next_step, bool same_step, bool single, int reward, int terminated,
               int truncated);

    // Write `steps` steps of the environments `env_ids` (None: all). Returns -1 when it is done; i when leaf i (then the
    // next observations' leaves) is no exact fit, -2 - i when the stack of leaf i cannot be rebuilt from what is stored;
    // kLooksCut and kLooksReset, each once, when `chains` would look broken with these steps.
    // Anything but -1 has stored nothing.
    int64_t write(nb::tuple values, nb::tuple nexts, nb::handle env_ids, int64_t steps, bool blocks);

    // (followed, cut, ended, reset) of what was written.
    nb::tuple counted() const { return chains_.told(); }

    // The same with the steps that `write` has returned kLooksCut or kLooksReset for.
    nb::tuple foreseen() const { return foreseen_.told(); }

    void keep_touched(bool on) { keep_touched_ = on; }

    Touched& touched() { return touched_; }

    int64_t stored() const;

    // Seal every row as it is: somebody else than `write` has written them.
    void seal_all();

    // out[slot] = 1 where a row from `since[env]` on and before `until[env]` is not what was sealed. A row that holds only
    // an observation is asked for nothing else.
    void find_broken(nb::handle since, nb::handle until, nb::handle out) const;

    // Before rows of a file that may be larger than memory are read: if batches have waited for the disk lately, ask for
    // all pages of this one at once.
    void fetch(nb::handle slots);

    // `count` slots of transitions, drawn uniformly with replacement, in a fresh tensor or in `out`. None: too few are left
    // to find by chance.
    nb::object draw(int64_t count, nb::handle capsule, nb::object out) const;

    // Of `count` rows that are drawn so `transitions`, or `n_steps` if n > 0; None likewise.
    nb::object sample(int64_t count, nb::handle capsule, int64_t n, double gamma) const;

    // The row id that each slot holds.
    nb::object ids(nb::handle slots, nb::object out) const;

    // The slot after each one in its column.
    nb::object following(nb::handle slots, nb::object out) const;

    // How many more transitions of the same episode follow each slot.
    nb::object ahead(nb::handle slots, nb::object out) const;

    // How many transitions of the same episode precede each slot.
    nb::object behind(nb::handle slots, nb::object out) const;

    // Slots of row ids, -1 for a row that can no longer be drawn; or the position of the first id that was never given to a
    // transition.
    nb::object locate(nb::handle ids, nb::object out) const;

    // Whether every slot still holds the row of this id, and it can be drawn.
    bool holds(nb::handle slots, nb::handle ids) const;

    // The slots of windows around each slot: up to `before` steps, the row itself, the steps after it, then -1; see
    // views/sequence.
    void window(nb::handle slots, int64_t before, int64_t after, bool cross, nb::handle out, nb::handle first) const;

    // Fresh tensors of every leaf at each slot, then of the observations that these rows led to, then the rows' ids.
    nb::list transitions(nb::handle slots) const;

    // The same of n steps as one: the flags and the next observation of the last of them, the sum of their rewards, and
    // after the ids the discount. Rewards are float32 or float64.
    nb::list n_steps(nb::handle slots, int64_t n, double gamma) const;

    // Fresh tensors of windows (see `window`): every leaf that is not carried [B, L, …], the observations that these steps
    // led to, which steps are real, which of them are no burn-in, which start an episode, the `carried` leaves at the first
    // step [B, …], the ids of the drawn rows.
    nb::list sequences(nb::handle slots, int64_t before, int64_t after, bool cross, const std::vector<int>& carried);

    // Rebuild the frame stacks of column `leaf` at each slot; a slot of -1 gives zeros.
    void stack(nb::handle slots, int64_t leaf_index, nb::handle out) const;

private:
    // Writing

    uint64_t seal_of_observation(int64_t flat, int64_t row) const;

    uint64_t seal_of_rest(int64_t flat, int64_t row) const;

    // What a written row is sealed with; its observation was sealed before if it was pending.
    void seal(int64_t flat, int64_t row, bool observation, bool rest);

    int64_t count_envs(nb::handle env_ids);

    // An observation and its next one in the same memory are one observation: the environment reuses its array.
    bool overlap(size_t o) const;

    const char* item(size_t given, int64_t bytes, int64_t i) const { return given_[given].data + i * bytes; }

    // The given observation is the one that the pending row already holds.
    bool continuous(int64_t flat, int64_t i) const;

    // An observation that starts an episode must be a stack of its newest frame and padding.
    int64_t unpadded(int64_t i) const;

    // Before anything is written: every given stack can be rebuilt from single frames. Returns -1, or -2 - leaf.
    int64_t check_stacks(int64_t steps, int64_t envs);

    bool ended(int64_t i) const;

    // Inside a block: step i starts where step i - envs led to.
    bool joins(int64_t i, int64_t envs) const;

    void store(const Leaf& leaf, char* column, int64_t flat, const char* given) const;

    bool goes_on(int64_t row, int64_t env, int64_t i) const;

    // All environments have the same head: a step of all of them is one copy a leaf. Returns whether it was done.
    bool write_together(int64_t t);

    void copy_step(const Leaf& leaf, int64_t flat, const char* given) const;

    void write_one(int64_t env, int64_t i);

    // Count the end that step i follows, if it follows one that is still stored. An episode of one step tells nothing: a
    // bandit may well pass the next context as the next observation.
    void count_end(int64_t env, int64_t i, Chains& chains) const;

    // Of step i and the one before it in a block: it leads to where step i starts, and not to where it started itself.
    bool leads_to_start(int64_t i, int64_t envs) const;

    // What `chains_` will be after these steps.
    Chains foresee(int64_t steps, int64_t envs) const;

    // At most so many steps of a call follow an end.
    int64_t most_ends(int64_t steps, int64_t envs) const;

    // Before anything is written: whether `doubt` has to look at the steps, as it hardly ever has.
    bool may_doubt(int64_t count) const {
        return !ring_.keeps_next && ((!told_cut_ && chains_.may_look_cut(count)) ||
                                     (!told_reset_ && !ring_.next_step && chains_.may_look_reset(count)));
    }

    // kLooksCut, kLooksReset or -1.
    int64_t doubt(int64_t steps, int64_t envs);

    // Reading

    // Fill `slots` with `count` that are drawn uniformly; false if too few are left to find by chance.
    bool drawn(int64_t count, nb::handle capsule, int64_t* slots) const;

    // How often this process has waited for a page of a file.
    static int64_t waits();

    void fetch_rows(const int64_t* rows, int64_t number);

    // A row and what it led to.
    void ask_for_row(int64_t flat) const;

    // One leaf to be read: from which column, at which slots, into what.
    struct Reading {
        const Leaf* leaf;
        const char* column;
        const int64_t* slots;
        char* out;
    };

    // Plan a fresh tensor [lead…, …] for a leaf.
    static void plan(Fresh& fresh, const Leaf& leaf, int lead_ndim, const int64_t* lead);

    void read(const Reading& reading, int64_t count) const noexcept;

    // The slot of the row `behind / envs` rows before the newest of environment `behind % envs`; -1 before the last clear.
    int64_t recent(int64_t behind) const;

    void check_slots(const Array& slots) const;

    template <class F>
    nb::object map(nb::handle slots, nb::object out, F f) const;

    Array checked_slots(nb::handle slots) const;

    // The slot of the last of up to n steps: an episode's end or the newest row comes first.
    int64_t last_of(int64_t slot, int64_t n) const;

    nb::list read_n_steps(const int64_t* rows, int64_t count, int64_t n, double gamma) const;

    // Read every leaf at `first`, the flags and the next observations at `last`; n > 0: rewards are summed in between.
    nb::list read_rows(const int64_t* first, const int64_t* last, int64_t count, int64_t n, double gamma) const;

    template <class T>
    void sum_rewards(const Reading& reading, const int64_t* last, int64_t count, double gamma, float* discount) const;

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
    Chains chains_, foreseen_;
    bool told_cut_ = false, told_reset_ = false;
    bool same_step_;  // environments are known to reset in the step that ends an episode
    std::vector<uint8_t> joined_;        // of stacks: which steps of this call go on where the one before led to
    mutable std::vector<char> rebuilt_;  // a stack, for comparison
    bool keep_touched_ = false;
    bool single_;  // one environment without an axis
    int reward_, terminated_, truncated_;  // their columns
    nb::object owner_;
};

}  // namespace relive
