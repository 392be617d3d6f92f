// Bindings of the sequence index: check every array, then call.
#include "sequences.hpp"

#include <nanobind/nanobind.h>

#include "bindings.hpp"
#include "columns.hpp"
#include "fresh.hpp"

namespace nb = nanobind;

namespace recollect {
namespace {

const bool* flags(nb::handle object, int64_t steps, int64_t envs, const char* what) {
    return memory_of<bool>(object, kBool, steps * envs, what);
}

// Fills order, start and count [T · N]; returns how many valid steps and sequences there are, and the longest one.
nb::tuple find(nb::handle terminated, nb::handle truncated, nb::handle mask, int64_t length, int64_t stride, bool split,
               bool keep_tail, nb::handle order, nb::handle start, nb::handle count) {
    const Array ends = read_or_throw(terminated, "terminated");
    if (ends.ndim != 2 || ends.dtype != kBool) throw std::invalid_argument("terminated: not a matrix of flags");
    // A longer stride would leave steps out, and lead beyond the last one.
    if (length < 0 || stride < 1 || (length && stride > length)) throw std::invalid_argument("length, stride: out of range");
    const int64_t steps = ends.shape[0], envs = ends.shape[1];
    Sequences out{memory_of<int64_t>(order, kInt64, steps * envs, "order"),
                  memory_of<int64_t>(start, kInt64, steps * envs, "start"),
                  memory_of<int64_t>(count, kInt64, steps * envs, "count")};
    const bool* masked = mask.is_none() ? nullptr : flags(mask, steps, envs, "mask");
    const bool* cut_off = flags(truncated, steps, envs, "truncated");
    find_sequences(out, reinterpret_cast<const bool*>(ends.data), cut_off, masked, steps, envs,
                   {length, stride, split, keep_tail});
    return nb::make_tuple(out.valid, out.sequences, out.longest);
}

// Of the sequences `which`: their rows [batch, length], -1 behind the last step of each, the mask that says so, and their
// first rows [batch]; in fresh tensors, or in `out` where tensors cannot be made from C.
nb::object rows(nb::handle order, nb::handle start, nb::handle count, nb::handle which, int64_t length, nb::handle out) {
    const Array list = read_index(order), starts = read_index(start), counts = read_index(count), chosen = read_index(which);
    const auto* at = reinterpret_cast<const int64_t*>(starts.data);
    const auto* steps = reinterpret_cast<const int64_t*>(counts.data);
    const auto* picked = reinterpret_cast<const int64_t*>(chosen.data);
    const int64_t shape[] = {chosen.shape[0], length};
    if (length < 1) throw std::invalid_argument("length: below the smallest");
    if (shape[0] > INT64_MAX / length) throw std::bad_alloc();
    if (counts.shape[0] != starts.shape[0]) throw std::invalid_argument("count: another length than start");
    if (!in_range(picked, shape[0], starts.shape[0])) throw std::out_of_range("which");
    for (int64_t i = 0; i < shape[0]; ++i) {
        const int64_t s = picked[i];
        if (at[s] < 0 || steps[s] < 1 || steps[s] > length || at[s] > list.shape[0] - steps[s]) throw std::out_of_range("start");
    }
    nb::object made = nb::borrow(out);
    if (out.is_none()) {
        Fresh fresh;
        fresh.add(kInt64, 2, shape);
        fresh.add(kBool, 2, shape);
        fresh.add(kInt64, 1, shape);
        made = fresh.make();
    }
    auto* row = memory_of<int64_t>(made[0], kInt64, shape[0] * length, "rows");
    auto* mask = memory_of<bool>(made[1], kBool, shape[0] * length, "mask");
    auto* first = memory_of<int64_t>(made[2], kInt64, shape[0], "first");
    for (int64_t i = 0; i < shape[0]; ++i) {
        const int64_t* from = reinterpret_cast<const int64_t*>(list.data) + at[picked[i]];
        first[i] = sequence_rows(row + i * length, mask + i * length, from, steps[picked[i]], length);
    }
    return made;
}

}  // namespace

void bind_sequences(nb::module_& m) {
    m.def("find_sequences", &find, nb::arg("terminated"), nb::arg("truncated"), nb::arg("mask").none(), nb::arg("length"),
          nb::arg("stride"), nb::arg("split"), nb::arg("keep_tail"), nb::arg("order"), nb::arg("start"), nb::arg("count"));
    m.def("sequence_rows", &rows, nb::arg("order"), nb::arg("start"), nb::arg("count"), nb::arg("which"), nb::arg("length"),
          nb::arg("out").none());
}

}  // namespace recollect
