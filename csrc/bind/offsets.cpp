// OffsetReader: reads batches of replay rows in which some leaves have steps around each row, at offsets of their own.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "../core/offset_batch.hpp"
#include "../core/page_requests.hpp"
#include "gil.hpp"
#include "ring_arguments.hpp"
#include "tensor_pool.hpp"

namespace relive::bind {
namespace {

class OffsetReader {
public:
    // Columns, stacks, `observed` and `state` as RingMemory has them; next observations are those of the following rows.
    // `groups` are (what is counted, offsets), where 0 counts steps, 1 observations, 2 next observations. A leaf, or a next
    // observation, has the number of its group, or -1.
    OffsetReader(nb::list columns, nb::list stacks, std::vector<int> observed, nb::dict state, int reward, int terminated,
                 int truncated, nb::list groups, std::vector<int> leaf_groups, std::vector<int> next_groups, bool zeros,
                 int64_t n, double gamma)
        : memory_(read_memory(columns, stacks, std::move(observed), nb::list(), state)),
          plan_{read_groups(groups), std::move(leaf_groups), std::move(next_groups), zeros, std::min(n, memory_.ring.slots), gamma},
          requests_(memory_),
          owner_(nb::make_tuple(nb::tuple(columns), state.values())) {
        memory_.reward = reward;
        memory_.terminated = terminated;
        memory_.truncated = truncated;
        check_groups(plan_.leaf_groups, memory_.leaves.size(), "leaf_groups");
        check_groups(plan_.next_groups, memory_.observed.size(), "next_groups");
        if (n < 0) throw std::invalid_argument("n: expected at least 0, got " + std::to_string(n));
        check_reward();
    }
    OffsetReader(const OffsetReader&) = delete;

    // New tensors of the rows at these slots; see `OffsetBatch`.
    nb::list read(nb::handle slots) {
        const Array in = read_index(slots);
        if (!in_range(in.as<int64_t>(), in.shape[0], memory_.ring.num_flat()))
            throw std::out_of_range("slot: expected slots of the ring");
        TensorPlans plans;
        OffsetBatch batch(memory_, plan_, in.as<int64_t>(), in.shape[0], plans);
        if (memory_.ring.checksums && requests_.expects_waits()) request(in, batch);
        nb::list out = make_tensors(plans);
        MaybeReleased released(plans.bytes());
        batch.read(plans);
        return out;
    }

private:
    static std::vector<OffsetGroup> read_groups(nb::list groups) {
        std::vector<OffsetGroup> read;
        for (nb::handle each : groups) {
            const auto group = nb::cast<nb::tuple>(each);
            if (group.size() != 2) throw std::invalid_argument("groups: expected (what is counted, offsets)");
            const int of = nb::cast<int>(group[0]);
            if (of < 0 || of > 2) throw std::invalid_argument("groups: expected 0, 1 or 2, got " + std::to_string(of));
            read.push_back({nb::cast<std::vector<int64_t>>(group[1]), static_cast<OffsetGroup::Of>(of)});
            if (read.back().offsets.empty()) throw std::invalid_argument("groups: expected at least one offset, got none");
            for (const int64_t offset : read.back().offsets)
                if (offset < -kMostOffset || offset > kMostOffset)
                    throw std::out_of_range("groups: expected offsets below 2^31, got " + std::to_string(offset));
        }
        return read;
    }

    void check_groups(const std::vector<int>& groups, size_t expected, const char* what) const {
        if (groups.size() != expected) throw std::invalid_argument(std::string(what) + ": expected one for each leaf");
        for (const int group : groups)
            if (group < -1 || group >= static_cast<int>(plan_.groups.size()))
                throw std::out_of_range(std::string(what) + ": expected a group or -1, got " + std::to_string(group));
    }

    void check_reward() const {
        if (memory_.reward < 0 || memory_.reward >= static_cast<int>(memory_.leaves.size()))
            throw std::out_of_range("reward: expected a leaf, got " + std::to_string(memory_.reward));
        const auto reward = static_cast<size_t>(memory_.reward);
        if (plan_.n > 0 && plan_.leaf_groups[reward] < 0) check_summed(memory_);
    }

    // Request the pages of a batch of a file that may be larger than memory.
    void request(const Array& drawn, const OffsetBatch& batch) const {
        MaybeReleased released(kReleaseBytes);
        requests_.request(drawn.as<int64_t>(), drawn.shape[0]);
        for (size_t g = 0; g < plan_.groups.size(); ++g)
            requests_.request(batch.slots(g).data(), static_cast<int64_t>(batch.slots(g).size()));
    }

    static constexpr int64_t kMostOffset = (int64_t{1} << 31) - 1;

    RingMemory memory_;
    OffsetPlan plan_;
    PageRequests requests_;
    nb::object owner_;  // the arrays
};

}  // namespace

void bind_offsets(nb::module_& m) {
    nb::class_<OffsetReader>(m, "OffsetReader")
        .def(nb::init<nb::list, nb::list, std::vector<int>, nb::dict, int, int, int, nb::list, std::vector<int>, std::vector<int>,
                      bool, int64_t, double>())
        .def("read", &OffsetReader::read);
}

}  // namespace relive::bind
