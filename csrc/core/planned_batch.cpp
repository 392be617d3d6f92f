#include "planned_batch.hpp"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

namespace relive {
namespace {

using Anchor = ReadGroup::Anchor;
using Layout = ReadPlan::Layout;

// The slot `steps` rows after a slot, fewer than the ring has.
int64_t shifted(const Ring& ring, int64_t slot, int64_t steps) {
    const int64_t flat = slot + steps * ring.envs, all = ring.num_flat();
    return flat < 0 ? flat + all : flat < all ? flat : flat - all;
}

}  // namespace

PlanSources::PlanSources(const RingMemory& ring_memory, ReadPlan read_plan) : memory(ring_memory), plan(std::move(read_plan)) {
    needs_extents = plan.n > 0;
    for (const ReadGroup& group : plan.groups) needs_extents = needs_extents || (group.has_offsets && !plan.is_packed());
    for (const LeafRead& read : plan.reads) {
        const Leaf& leaf = memory.leaves[static_cast<size_t>(read.leaf)];
        const auto group = static_cast<size_t>(read.group);
        const char* column = leaf.column;
        for (size_t o = 0; o < memory.next_columns.size(); ++o)
            if (memory.observed[o] == read.leaf && plan.groups[group].anchor == Anchor::kNext) column = memory.next_columns[o];
        sources.push_back({&leaf, column, group});
    }
    if (plan.n > 0) powers.push_back(1);
    for (int64_t k = 0; k < plan.n; ++k) powers.push_back(powers.back() * plan.gamma);
}

PlannedBatch::PlannedBatch(const PlanSources& sources, int64_t count, TensorPlans& plans) : sources_(&sources), count_(count) {
    const ReadPlan& plan = sources.plan;
    if (count > kMostSteps * 2) throw OutOfMemory();
    int64_t slots = count * 8;  // of all places, at most
    for (const ReadGroup& group : plan.groups) {
        const int64_t width = group.has_offsets ? plan.width(group) : 1;
        if (count > 0 && width > kMostSteps * 16 / count) throw OutOfMemory();
        slots += count * width * (plan.is_packed() ? 5 : 1);
    }
    require_memory(slots * 8);
    for (const PlanSources::Source& source : sources.sources) {
        const ReadGroup& group = plan.groups[source.group];
        const int64_t lead[] = {count, plan.width(group)};
        plan_leaf(plans, *source.leaf, group.has_offsets ? 2 : 1, lead);
    }
    plans.add(kInt64, 1, &count);
    if (plan.n > 0) plans.add(kFloat32, 1, &count);
    for (const ReadGroup& group : plan.groups) {
        const int64_t shape[] = {count, plan.width(group)};
        if (group.is_masked) plans.add(kBool, 2, shape);
    }
    const int64_t steps[] = {count, plan.before + 1 + plan.after};
    if (plan.is_packed()) {
        for (int mark = 0; mark < 2; ++mark) plans.add(kBool, 2, steps);
        if (plan.step_ids) plans.add(kInt64, 2, steps);
        steps_.resize(static_cast<size_t>(steps[0] * steps[1]));
    }
    require_memory(plans.bytes() + slots * 8);
    rows_.resize(static_cast<size_t>(count));
    extents_.resize(sources.needs_extents || plan.is_packed() ? rows_.size() : 0);
    outs_.resize(sources.sources.size());
    places_.resize(plan.groups.size());
    for (size_t g = 0; g < places_.size(); ++g) {
        const ReadGroup& group = plan.groups[g];
        const bool is_shared = group.has_offsets ? plan.is_packed() && group.anchor == Anchor::kRow
                                                 : group.anchor == Anchor::kRow || group.anchor == Anchor::kSum;
        if (!is_shared) places_[g].slots.resize(static_cast<size_t>(count * (group.has_offsets ? plan.width(group) : 1)));
        if (group.has_offsets && plan.is_packed()) places_[g].runs.reserve(steps_.size());
    }
}

void PlannedBatch::connect(const TensorPlans& plans) {
    size_t made = 0;
    for (char*& out : outs_) out = plans.data(made++);
    ids_ = reinterpret_cast<int64_t*>(plans.data(made++));
    if (plan().n > 0) discount_ = reinterpret_cast<float*>(plans.data(made++));
    for (size_t g = 0; g < places_.size(); ++g)
        if (plan().groups[g].is_masked) places_[g].mask = plans.data(made++);
    if (!plan().is_packed()) return;
    train_ = plans.data(made++);
    is_first_ = plans.data(made++);
    if (plan().step_ids) step_ids_ = reinterpret_cast<int64_t*>(plans.data(made));
}

void PlannedBatch::find() {
    const Ring ring = sources_->memory.ring;  // a copy: no store can change it, so that it stays in registers
    if (sources_->needs_extents)
        for (int64_t i = 0; i < count_; ++i) extents_[static_cast<size_t>(i)] = extent_of(ring, rows_[static_cast<size_t>(i)]);
    if (plan().is_packed()) find_sequences(ring);
    for (size_t g = 0; g < places_.size(); ++g) {
        const ReadGroup& group = plan().groups[g];
        if (!group.has_offsets) find_items(ring, group, places_[g]);
        else if (plan().is_packed()) find_steps(ring, group, places_[g]);
        else find_offsets(ring, group, places_[g]);
    }
}

PlannedBatch::Extent PlannedBatch::extent_of(const Ring& ring, int64_t row) const {
    const int64_t before = plan().before, after = plan().after, most = std::max<int64_t>(plan().n, 1) - 1;
    Extent extent{0, 0, 0, row};
    // Between two episodes there is always a row that is no transition.
    for (int64_t at = row; extent.preceding < before; ++extent.preceding) {
        at = ring.before(at);
        if (ring.kind[at] != kTransition) break;
    }
    for (int64_t next = ring.after(row); extent.last < most && ring.kind[next] == kTransition; next = ring.after(next)) {
        extent.last_slot = next;
        ++extent.last;
    }
    extent.ahead = extent.last;
    if (extent.last < most) return extent;
    for (int64_t at = extent.last_slot; extent.ahead < after; ++extent.ahead) {
        at = ring.after(at);
        if (ring.kind[at] != kTransition) break;
    }
    return extent;
}

void PlannedBatch::find_sequences(const Ring& ring) {
    const int64_t length = plan().before + 1 + plan().after;
    for (int64_t i = 0; i < count_; ++i) {
        const auto b = static_cast<size_t>(i);
        extents_[b].preceding =
            window_around(ring, rows_[b], plan().before, plan().after + 1, plan().cross, steps_.data() + i * length);
    }
}

// The slots of one item per row.
void PlannedBatch::find_items(const Ring& ring, const ReadGroup& group, Place& place) const {
    place.at = place.slots.empty() ? rows_.data() : place.slots.data();
    const auto length = static_cast<size_t>(plan().before + 1 + plan().after);
    if (group.anchor == Anchor::kFirst && plan().is_packed())
        for (size_t i = 0; i < place.slots.size(); ++i) place.slots[i] = steps_[i * length];
    else if (plan().n > 0)
        for (size_t i = 0; i < place.slots.size(); ++i) place.slots[i] = extents_[i].last_slot;
    else if (!place.slots.empty())
        std::copy(rows_.begin(), rows_.end(), place.slots.begin());
    if (group.anchor == Anchor::kNext && !ring.keeps_next)
        for (int64_t& slot : place.slots) slot = ring.after(slot);
}

// The slots of packed sequences, and the runs that they are read in.
void PlannedBatch::find_steps(const Ring& ring, const ReadGroup& group, Place& place) const {
    place.at = place.slots.empty() ? steps_.data() : place.slots.data();
    for (size_t i = 0; i < place.slots.size(); ++i)
        place.slots[i] = steps_[i] < 0 ? -1 : group.anchor == Anchor::kNext ? ring.after(steps_[i]) : steps_[i];
    place.runs.clear();
    find_runs(ring, place.at, static_cast<int64_t>(steps_.size()), place.runs);
}

// The slots of offsets in their places, and which of them are real.
void PlannedBatch::find_offsets(const Ring& ring, const ReadGroup& group, Place& place) const {
    const auto size = static_cast<int64_t>(group.offsets.size());
    const auto [first, last] = std::minmax_element(group.offsets.begin(), group.offsets.end());
    const int64_t *offsets = group.offsets.data(), earliest = *first, latest = *last, envs = ring.envs;
    const bool zeros = plan().layout == Layout::kZeros;
    int64_t* slot = place.slots.data();
    place.at = slot;
    char* real = place.mask;
    for (int64_t i = 0; i < count_; ++i, slot += size, real += real ? size : 0) {
        const Extent extent = extents_[static_cast<size_t>(i)];
        const int64_t row = rows_[static_cast<size_t>(i)], origin = group.anchor == Anchor::kNext ? extent.last + 1 : 0;
        const int64_t most = extent.ahead + (group.of_observations ? 1 : 0), from = row + origin * envs;
        const bool whole = origin + earliest >= -extent.preceding && origin + latest <= most;
        if (whole && from + earliest * envs >= 0 && from + latest * envs < ring.num_flat()) {  // nothing to pad or wrap
            for (int64_t j = 0; j < size; ++j) slot[j] = from + offsets[j] * envs;
            if (real) std::memset(real, 1, static_cast<size_t>(size));
            continue;
        }
        for (int64_t j = 0; j < size; ++j) {
            const int64_t step = origin + offsets[j], nearest = std::min(std::max(step, -extent.preceding), most);
            if (real) real[j] = step == nearest;
            slot[j] = zeros && step != nearest ? -1 : shifted(ring, row, nearest);
        }
    }
}

void PlannedBatch::read() const {
    const Ring& ring = sources_->memory.ring;
    ring.ids_of(rows_.data(), count_, ids_);
    for (size_t i = 0; i < sources_->sources.size(); ++i) {
        const PlanSources::Source& source = sources_->sources[i];
        const ReadGroup& group = plan().groups[source.group];
        const Place& place = places_[source.group];
        const Leaf& leaf = *source.leaf;
        char* out = outs_[i];
        const int64_t items = group.has_offsets ? count_ * plan().width(group) : count_;
        if (group.anchor == Anchor::kSum) leaf.dtype == kFloat32 ? sum<float>(source, out) : sum<double>(source, out);
        else if (!group.has_offsets || leaf.stacked()) read_leaf(ring, {&leaf, source.column, place.at, out}, items);
        else if (plan().is_packed()) read_runs(out, source.column, place.runs, leaf.bytes, ring.envs);
        else gather_padded(out, source.column, place.at, items, leaf.bytes, ring.num_flat());
    }
    if (discount_)
        for (size_t i = 0; i < extents_.size(); ++i)
            discount_[i] = static_cast<float>(sources_->powers[static_cast<size_t>(extents_[i].last + 1)]);
    if (plan().is_packed()) mark_steps();
}

void PlannedBatch::mark_steps() const {
    const Ring ring = sources_->memory.ring;
    const int64_t length = plan().before + 1 + plan().after;
    for (size_t i = 0; i < steps_.size(); ++i) train_[i] = steps_[i] >= 0;
    for (const Place& place : places_)
        if (place.mask) std::memcpy(place.mask, train_, steps_.size());
    for (int64_t i = 0; i < count_; ++i)
        std::memset(train_ + i * length, 0, static_cast<size_t>(extents_[static_cast<size_t>(i)].preceding));
    for (size_t i = 0; i < steps_.size(); ++i) is_first_[i] = steps_[i] >= 0 && ring.first[steps_[i]];
    if (step_ids_)
        for (size_t i = 0; i < steps_.size(); ++i) step_ids_[i] = steps_[i] < 0 ? -1 : ring.id_of(steps_[i]);
}

// out[i] = Σ γ^j r of the steps from each row to its last one, in their order.
template <class T>
void PlannedBatch::sum(const PlanSources::Source& source, char* out) const {
    const auto* rewards = reinterpret_cast<const T*>(source.column);
    auto* sums = reinterpret_cast<T*>(out);
    const int64_t width = source.leaf->bytes / static_cast<int64_t>(sizeof(T));
    const Ring ring = sources_->memory.ring;
    const double* powers = sources_->powers.data();
    for (size_t i = 0; i < extents_.size(); ++i, sums += width) {
        int64_t slot = rows_[i];
        for (int64_t w = 0; w < width; ++w) sums[w] = rewards[slot * width + w];
        for (int64_t k = 1; k <= extents_[i].last; ++k) {
            slot = ring.after(slot);
            for (int64_t w = 0; w < width; ++w) sums[w] += static_cast<T>(powers[k] * rewards[slot * width + w]);
        }
    }
}

}  // namespace relive
