#include "step_block.hpp"

#include <cstring>

#include "copy.hpp"

namespace relive {

int LeadingAxes::count_in(const ArrayView& array) const {
    int lead = 0;
    if (has_steps) {
        if (array.ndim < 1 || array.shape[0] != steps) return -1;
        lead = 1;
    }
    if (has_envs) {
        if (array.ndim < lead + 1 || array.shape[lead] != envs) return -1;
        ++lead;
    }
    return lead;
}

bool accept(const ArrayView& array, const Leaf& leaf, const LeadingAxes& axes, GivenLeaf& given) {
    const int lead = axes.count_in(array);
    if (lead < 0 || array.ndim != lead + leaf.ndim) return false;
    for (int d = 0; d < leaf.ndim; ++d)
        if (array.shape[lead + d] != leaf.shape[d]) return false;
    if (!array.contiguous()) return false;
    given.data = given.source = array.data;
    given.source_bytes = array.elements() * array.itemsize();
    if (array.dtype == leaf.dtype) {
        if (leaf.dtype != kBool || are_flags(array.data, given.source_bytes)) return true;
        given.scratch.resize(static_cast<size_t>(given.source_bytes));
        as_flags(given.scratch.data(), array.data, given.source_bytes);
    } else {
        if (array.dtype != kFloat64 || leaf.dtype != kFloat32) return false;
        const int64_t elements = leaf.given_bytes / 4 * axes.steps * axes.envs;
        given.scratch.resize(static_cast<size_t>(elements) * 4);
        if (!narrow(reinterpret_cast<float*>(given.scratch.data()), array.as<double>(), elements)) return false;
    }
    given.data = given.scratch.data();
    return true;
}

void StepBlock::begin(int64_t steps) {
    of_all_envs_ = true;
    steps_ = steps;
    envs_ = memory_.ring.envs;
    continues_.clear();
}

void StepBlock::begin(int64_t steps, const int64_t* env_index, int64_t envs) {
    begin(steps);
    of_all_envs_ = false;
    env_index_.assign(env_index, env_index + envs);
    envs_ = envs;
}

bool StepBlock::has_finite_rewards() const {
    for (int l = memory_.reward; l < memory_.terminated; ++l) {  // one leaf per agent
        const Leaf& leaf = memory_.leaves[static_cast<size_t>(l)];
        const char* data = given_[static_cast<size_t>(l)].data;
        const int64_t elements = leaf.given_bytes / leaf.dtype.bytes() * count();
        if (leaf.dtype == kFloat32 && !all_finite(reinterpret_cast<const float*>(data), elements)) return false;
        if (leaf.dtype == kFloat64 && !all_finite(reinterpret_cast<const double*>(data), elements)) return false;
    }
    return true;
}

bool StepBlock::overlaps(size_t o) const {
    const GivenLeaf& a = given_[static_cast<size_t>(memory_.observed[o])];
    const GivenLeaf& b = given_[memory_.leaves.size() + o];
    return a.source < b.source + b.source_bytes / steps_ && b.source < a.source + a.source_bytes / steps_;
}

bool StepBlock::starts_with(int64_t flat, int64_t i) const {
    for (size_t o = 0; o < memory_.observed.size(); ++o) {
        const Leaf& leaf = memory_.observation(o);
        const char* held = leaf.at(flat);
        if (leaf.stacked()) {
            rebuilt_.resize(static_cast<size_t>(leaf.given_bytes));
            build_stack(memory_.ring, leaf, leaf.column, flat, rebuilt_.data());
            held = rebuilt_.data();
        }
        if (std::memcmp(held, obs(o, i), static_cast<size_t>(leaf.given_bytes)) != 0) return false;
    }
    return true;
}

bool StepBlock::continues_block(int64_t i) const {
    for (size_t o = 0; o < memory_.observed.size(); ++o) {
        const auto bytes = static_cast<size_t>(memory_.observation(o).given_bytes);
        if (std::memcmp(obs(o, i), next_obs(o, i - envs_), bytes) != 0) return false;
    }
    return true;
}

void StepBlock::forget_casts() {
    for (GivenLeaf& each : given_)
        if (each.scratch.capacity() > (1 << 20)) std::vector<char>().swap(each.scratch);
}

// The leaf whose stack is more than its newest frame and padding, as a stack at the start of an episode must be; or -1.
int64_t StepBlock::unpadded(int64_t i) const {
    for (size_t o = 0; o < memory_.observed.size(); ++o) {
        const Leaf& leaf = memory_.observation(o);
        if (!leaf.stacked()) continue;
        std::vector<char> newest(static_cast<size_t>(leaf.bytes));
        leaf.frames.take(newest.data(), obs(o, i), leaf.frames.k - 1);
        for (int64_t j = 0; j < leaf.frames.k - 1; ++j)
            if (!leaf.frames.holds(obs(o, i), leaf.frames.repeat ? newest.data() : nullptr, j)) return memory_.observed[o];
    }
    return -1;
}

// The next observation that does not follow the observation of step i; or -1.
int64_t StepBlock::unstackable(int64_t i) const {
    for (size_t o = 0; o < memory_.observed.size(); ++o) {
        const Leaf& leaf = memory_.observation(o);
        if (leaf.stacked() && !leaf.frames.follows(next_obs(o, i), obs(o, i)))
            return static_cast<int64_t>(memory_.leaves.size() + o);
    }
    return -1;
}

int64_t StepBlock::check_stacks() {
    if (!memory_.has_stacks()) return -1;
    const Ring& ring = memory_.ring;
    continues_.resize(static_cast<size_t>(count()));
    std::vector<uint8_t> reset(static_cast<size_t>(count()), 0);
    for (int64_t i = 0; i < count(); ++i) {
        const int64_t env = env_of(i), before = i - envs_;
        const bool start = i >= envs_ && reset[static_cast<size_t>(before)];
        reset[static_cast<size_t>(i)] = ring.next_step && (i < envs_ ? ring.resetting[env] : !start && ended(before));
        if (reset[static_cast<size_t>(i)]) continue;  // its observation is not stored
        const bool continues = i < envs_ ? ring.open[env] && starts_with(ring.at(ring.head[env], env), i)
                                         : !start && !ended(before) && continues_block(i);
        // A step after a reset row continues it too, though its stack starts anew.
        continues_[static_cast<size_t>(i)] = continues || (start && continues_block(i));
        int64_t bad = continues ? -1 : unpadded(i);
        if (bad < 0) bad = unstackable(i);
        if (bad >= 0) return bad;
    }
    return -1;
}

}  // namespace relive
