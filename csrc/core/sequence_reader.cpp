#include "sequence_reader.hpp"

#include <algorithm>
#include <utility>

namespace relive {

SequenceReader::SequenceReader(const Sequences& found, int64_t rows, int64_t length, Layout layout,
                               std::vector<GatherSource> steps, std::vector<GatherSource> carried)
    : found_(found), rows_(rows), length_(length), layout_(layout), steps_(std::move(steps)),
      carried_(std::move(carried)) {
    steps_.push_back({reinterpret_cast<char*>(found.is_first.get()), kBool, rows, 1, 0, {}});
}

SequenceBatch SequenceReader::choose(const int64_t* which, int64_t count) const {
    SequenceBatch batch;
    batch.runs.reserve(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) batch.runs.push_back(found_.runs[static_cast<size_t>(which[i])]);
    if (layout_ == Layout::kPacked) pack(batch);
    return batch;
}

void SequenceReader::pack(SequenceBatch& batch) const {
    std::vector<RowRun>& runs = batch.runs;
    std::stable_sort(runs.begin(), runs.end(), [](const RowRun& a, const RowRun& b) { return a.steps > b.steps; });
    const int64_t longest = runs.front().steps;
    batch.packed_sizes.resize(static_cast<size_t>(longest));
    for (int64_t k = 0; k < longest; ++k)
        for (auto run = runs.begin(); run != runs.end() && run->steps > k; ++run) {
            batch.packed_rows.push_back(run->rows[k]);
            ++batch.packed_sizes[static_cast<size_t>(k)];
        }
}

void SequenceReader::plan(const SequenceBatch& batch, TensorPlans& plans) const {
    const auto count = static_cast<int64_t>(batch.runs.size());
    if (layout_ == Layout::kPacked) {
        const auto total = static_cast<int64_t>(batch.packed_rows.size());
        const auto longest = static_cast<int64_t>(batch.packed_sizes.size());
        for (const GatherSource& source : steps_) source.plan(plans, 1, &total);
        plans.add(kInt64, 1, &longest);
    } else {
        const bool time_first = layout_ == Layout::kTimeFirst;
        const int64_t shape[] = {time_first ? length_ : count, time_first ? count : length_};
        for (const GatherSource& source : steps_) source.plan(plans, 2, shape);
        plans.add(kBool, 2, shape);
    }
    plans.add(kInt64, 1, &count);
    for (const GatherSource& source : carried_) source.plan(plans, 1, &count);
}

void SequenceReader::read(const SequenceBatch& batch, const TensorPlans& plans) const {
    if (layout_ == Layout::kPacked) read_packed(batch, plans);
    else read_padded(batch, plans);
    read_carried(batch, plans);
}

void SequenceReader::read_padded(const SequenceBatch& batch, const TensorPlans& plans) const {
    const auto count = static_cast<int64_t>(batch.runs.size());
    const bool time_first = layout_ == Layout::kTimeFirst;
    const PaddedLayout layout{batch.runs.data(), count, length_, time_first ? 1 : length_, time_first ? count : 1};
    for (size_t s = 0; s < steps_.size(); ++s)
        gather_steps(plans.data(s), steps_[s].data, layout, steps_[s].bytes, rows_);
    mask_steps(reinterpret_cast<bool*>(plans.data(steps_.size())), layout);
}

void SequenceReader::read_packed(const SequenceBatch& batch, const TensorPlans& plans) const {
    const std::vector<int64_t>&rows = batch.packed_rows, &sizes = batch.packed_sizes;
    std::memcpy(plans.data(steps_.size()), sizes.data(), sizes.size() * sizeof(int64_t));
    for (size_t s = 0; s < steps_.size(); ++s)
        gather(plans.data(s), steps_[s].data, rows.data(), static_cast<int64_t>(rows.size()), steps_[s].bytes, rows_);
}

void SequenceReader::read_carried(const SequenceBatch& batch, const TensorPlans& plans) const {
    const std::vector<RowRun>& runs = batch.runs;
    auto* first = reinterpret_cast<int64_t*>(plans.data(steps_.size() + 1));
    for (size_t i = 0; i < runs.size(); ++i) first[i] = *runs[i].rows;
    const auto count = static_cast<int64_t>(runs.size());
    for (size_t c = 0; c < carried_.size(); ++c)
        gather(plans.data(steps_.size() + 2 + c), carried_[c].data, first, count, carried_[c].bytes, rows_);
}

}  // namespace relive
