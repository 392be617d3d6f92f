#include "offset_batch.hpp"

#include <algorithm>
#include <cstring>
#include <new>

#include "n_step_sums.hpp"

namespace relive {
namespace {

// The slot `steps` rows after a slot, fewer than the ring has.
int64_t shifted(const Ring& ring, int64_t slot, int64_t steps) {
    const int64_t flat = slot + steps * ring.envs, all = ring.num_flat();
    return flat < 0 ? flat + all : flat < all ? flat : flat - all;
}

}  // namespace

OffsetBatch::OffsetBatch(const RingMemory& memory, const OffsetPlan& plan, const int64_t* drawn, int64_t count,
                         TensorPlans& plans)
    : memory_(memory), plan_(plan), drawn_(drawn), count_(count) {
    if (count > kMostSteps * 2) throw OutOfMemory();
    const auto plan_leaf_of = [&](const Leaf& leaf, int group) {
        const int64_t lead[] = {count, group < 0 ? 0 : static_cast<int64_t>(plan.groups[static_cast<size_t>(group)].offsets.size())};
        plan_leaf(plans, leaf, group < 0 ? 1 : 2, lead);
    };
    for (size_t l = 0; l < memory.leaves.size(); ++l) plan_leaf_of(memory.leaves[l], plan.leaf_groups[l]);
    for (size_t o = 0; o < memory.observed.size(); ++o) plan_leaf_of(memory.observation(o), plan.next_groups[o]);
    plans.add(kInt64, 1, &count);
    if (plan.n > 0) plans.add(kFloat32, 1, &count);
    for (const OffsetGroup& group : plan.groups) {
        const int64_t shape[] = {count, static_cast<int64_t>(group.offsets.size())};
        plans.add(kBool, 2, shape);
    }
    require_memory(plans.bytes() + count * 5 * 8);
    find_reach();
    const Ring ring = memory.ring;  // a copy: no store can change it, so that it stays in registers
    extents_.reserve(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) {
        extents_.push_back(extent_of(ring, drawn[i]));
        next_.push_back(shifted(ring, drawn[i], extents_.back().last + 1));
        if (plan.n > 0) last_.push_back(shifted(ring, drawn[i], extents_.back().last));
    }
    slots_.resize(plan.groups.size());
    inside_.resize(plan.groups.size());
    for (size_t g = 0; g < plan.groups.size(); ++g) find_slots(g);
}

void OffsetBatch::find_reach() {
    const int64_t last = std::max<int64_t>(plan_.n, 1) - 1;
    after_ = last;
    for (const OffsetGroup& group : plan_.groups) {
        const auto [least, most] = std::minmax_element(group.offsets.begin(), group.offsets.end());
        const bool is_next = group.of == OffsetGroup::Of::kNextObservations;
        before_ = std::max(before_, -*least - (is_next ? 1 : 0));
        after_ = std::max(after_, *most + (is_next ? last : group.has_next() ? -1 : 0));
    }
    before_ = std::min(before_, memory_.ring.slots - 1);
    after_ = std::min(after_, memory_.ring.slots - 1);
}

OffsetBatch::Extent OffsetBatch::extent_of(const Ring& ring, int64_t slot) const {
    Extent found{0, 0, 0};
    // Between two episodes there is always a row that is no transition.
    for (int64_t at = slot; found.preceding < before_; ++found.preceding) {
        at = ring.before(at);
        if (ring.kind[at] != kTransition) break;
    }
    for (int64_t at = slot; found.ahead < after_; ++found.ahead) {
        at = ring.after(at);
        if (ring.kind[at] != kTransition) break;
    }
    found.last = plan_.n > 0 ? std::min(plan_.n - 1, found.ahead) : 0;
    return found;
}

void OffsetBatch::find_slots(size_t group) {
    const OffsetGroup& wanted = plan_.groups[group];
    const auto size = static_cast<int64_t>(wanted.offsets.size());
    if (count_ > 0 && size > kMostSteps * 8 / count_) throw OutOfMemory();
    require_memory(count_ * size * 9);
    std::vector<int64_t>& slots = slots_[group];
    std::vector<uint8_t>& inside = inside_[group];
    slots.resize(static_cast<size_t>(count_ * size));
    inside.resize(slots.size());
    const Ring ring = memory_.ring;
    const auto [first, last] = std::minmax_element(wanted.offsets.begin(), wanted.offsets.end());
    const int64_t *offsets = wanted.offsets.data(), earliest = *first, latest = *last, envs = ring.envs;
    int64_t* slot = slots.data();
    uint8_t* real = inside.data();
    for (int64_t i = 0; i < count_; ++i, slot += size, real += size) {
        const Extent extent = extents_[static_cast<size_t>(i)];
        const int64_t origin = wanted.of == OffsetGroup::Of::kNextObservations ? extent.last + 1 : 0;
        const int64_t most = extent.ahead + (wanted.has_next() ? 1 : 0), from = drawn_[i] + origin * envs;
        const bool whole = origin + earliest >= -extent.preceding && origin + latest <= most;
        if (whole && from + earliest * envs >= 0 && from + latest * envs < ring.num_flat()) {  // nothing to pad or wrap
            for (int64_t j = 0; j < size; ++j) slot[j] = from + offsets[j] * envs;
            std::memset(real, 1, static_cast<size_t>(size));
            continue;
        }
        for (int64_t j = 0; j < size; ++j) {
            const int64_t step = origin + offsets[j], nearest = std::min(std::max(step, -extent.preceding), most);
            real[j] = step == nearest;
            slot[j] = plan_.zeros && step != nearest ? -1 : shifted(ring, drawn_[i], nearest);
        }
    }
}

void OffsetBatch::read(const TensorPlans& plans) const {
    size_t made = 0;
    const bool sums = plan_.n > 0;
    const auto reward = static_cast<size_t>(memory_.reward);
    for (size_t l = 0; l < memory_.leaves.size(); ++l, ++made) {
        const bool is_end = static_cast<int>(l) == memory_.terminated || static_cast<int>(l) == memory_.truncated;
        if (plan_.leaf_groups[l] >= 0) read_group(memory_.leaves[l], plan_.leaf_groups[l], plans.data(made));
        else if (!sums || l != reward) read_once(memory_.leaves[l], is_end ? last() : drawn_, plans.data(made));
    }
    for (size_t o = 0; o < memory_.observed.size(); ++o, ++made) {
        if (plan_.next_groups[o] >= 0) read_group(memory_.observation(o), plan_.next_groups[o], plans.data(made));
        else read_once(memory_.observation(o), next_.data(), plans.data(made));
    }
    memory_.ring.ids_of(drawn_, count_, reinterpret_cast<int64_t*>(plans.data(made++)));
    if (sums) {
        auto* discount = reinterpret_cast<float*>(plans.data(made++));
        const Leaf& leaf = memory_.leaves[reward];
        if (plan_.leaf_groups[reward] >= 0) multiply_discounts(memory_.ring, drawn_, last(), count_, plan_.gamma, discount);
        else sum_rewards(memory_.ring, {&leaf, leaf.column, drawn_, plans.data(reward)}, last(), count_, plan_.gamma, discount);
    }
    for (const std::vector<uint8_t>& inside : inside_)
        if (!inside.empty()) std::memcpy(plans.data(made++), inside.data(), inside.size());
}

void OffsetBatch::read_once(const Leaf& leaf, const int64_t* slots, char* out) const {
    read_leaf(memory_.ring, {&leaf, leaf.column, slots, out}, count_);
}

void OffsetBatch::read_group(const Leaf& leaf, int group, char* out) const {
    const std::vector<int64_t>& slots = slots_[static_cast<size_t>(group)];
    const auto count = static_cast<int64_t>(slots.size());
    if (leaf.stacked()) read_leaf(memory_.ring, {&leaf, leaf.column, slots.data(), out}, count);
    else gather_padded(out, leaf.column, slots.data(), count, leaf.bytes, memory_.ring.num_flat());
}

}  // namespace relive
