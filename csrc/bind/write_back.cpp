// WriteBack: the leaves of a ring's rows that may be written again.
#include "../core/write_back.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "arguments.hpp"
#include "gil.hpp"

namespace relive::bind {
namespace {

class BoundWriteBack {
public:
    // `leaves` are numbers of columns, ascending; `checksums` [slots, envs] and `journal` are kept where the memory
    // outlives a process. From now on the checksums of rows leave these columns out.
    BoundWriteBack(RingMemory& memory, std::vector<int> leaves, nb::object checksums, nb::object journal)
        : memory_(memory), owner_(nb::make_tuple(checksums, journal)) {
        check(leaves);
        int64_t bytes = 0;
        for (const int leaf : leaves) bytes += memory_.leaves[static_cast<size_t>(leaf)].bytes;
        const int64_t words = 1 + (bytes + 7) / 8;
        if (!checksums.is_none()) checksums_ = memory_of<uint64_t>(checksums, kInt64, memory_.ring.num_flat(), "checksums");
        if (!journal.is_none()) journal_ = memory_of<int64_t>(journal, kInt64, words, "journal");
        memory_.rewritable.leaves = std::move(leaves);
        memory_.rewritable.checksums = checksums_;
        memory_.rewritable.journal = journal_;
    }
    BoundWriteBack(const BoundWriteBack&) = delete;

    // The ring may outlive the arrays.
    ~BoundWriteBack() {
        Rewritable& rewritable = memory_.rewritable;
        if (rewritable.checksums == checksums_) rewritable.checksums = nullptr;
        if (rewritable.journal == journal_) rewritable.journal = nullptr;
    }

    // Write rows [count, …] of each leaf (None: it stays as it is) to slots [count]; a slot of -1 is passed over.
    void write(nb::handle slots, nb::tuple values) {
        const Array index = read_index(slots);
        const int64_t count = index.shape[0];
        if (!in_range(index.as<int64_t>(), count, memory_.ring.num_flat()))
            throw std::out_of_range("slot: expected slots of the ring, or -1");
        if (values.size() != memory_.rewritable.leaves.size())
            throw std::invalid_argument("values: expected one for each leaf");
        std::vector<Array> arrays(values.size());
        std::vector<const char*> given(values.size(), nullptr);
        for (size_t l = 0; l < values.size(); ++l) {
            if (values[l].is_none()) continue;
            arrays[l] = read_or_throw(values[l], "values");
            require_fit(arrays[l], memory_.leaves[static_cast<size_t>(memory_.rewritable.leaves[l])], count);
            given[l] = arrays[l].data;
        }
        MaybeReleased released(count * rewritable_bytes(memory_));
        write_back(memory_, index.as<int64_t>(), count, given);
    }

    // Complete the row that a process died writing, if any.
    void finish() { finish_write_back(memory_); }

    // out[slot] = 1 if the leaves of a row differ from their checksum.
    void find_torn(nb::handle out) const {
        auto* torn = memory_of<uint8_t>(out, kBool, memory_.ring.num_flat(), "out");
        MaybeReleased released(kReleaseBytes);
        find_torn_rows(memory_, torn);
    }

private:
    void check(const std::vector<int>& leaves) const {
        int last = -1;
        for (const int leaf : leaves) {
            const bool known = leaf > last && leaf < static_cast<int>(memory_.leaves.size());
            if (!known || std::count(memory_.observed.begin(), memory_.observed.end(), leaf))
                throw std::invalid_argument("leaves: expected ascending numbers of columns that are no observations");
            last = leaf;
        }
    }

    static bool in_range(const int64_t* slots, int64_t count, int64_t end) {
        return std::all_of(slots, slots + count, [end](int64_t slot) { return slot >= -1 && slot < end; });
    }

    static void require_fit(const Array& array, const Leaf& leaf, int64_t count) {
        bool fits = array.dtype == leaf.dtype && array.ndim == leaf.ndim + 1 && array.shape[0] == count;
        for (int d = 0; fits && d < leaf.ndim; ++d) fits = array.shape[d + 1] == leaf.shape[d];
        if (!fits) throw std::invalid_argument("values: expected rows of the leaf, one for each slot");
    }

    RingMemory& memory_;
    uint64_t* checksums_ = nullptr;
    int64_t* journal_ = nullptr;
    nb::object owner_;  // the arrays
};

}  // namespace

void bind_write_back(nb::module_& m) {
    nb::class_<BoundWriteBack>(m, "WriteBack")
        .def(nb::init<RingMemory&, std::vector<int>, nb::object, nb::object>(), nb::keep_alive<1, 2>(), nb::arg(), nb::arg(),
             nb::arg().none(), nb::arg().none())
        .def("write", &BoundWriteBack::write)
        .def("finish", &BoundWriteBack::finish)
        .def("find_torn", &BoundWriteBack::find_torn);
}

}  // namespace relive::bind
