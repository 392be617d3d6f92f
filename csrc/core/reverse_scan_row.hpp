// One row of the reverse scan: which steps end an episode, and how their numbers are loaded and stored.
#pragma once
#include <cstdint>
#include <cstring>

#include "reverse_scan_registers.hpp"

namespace relive::scan::RELIVE_SCAN_ISA {

// How lanes are loaded and stored: neighbouring columns in one piece ...
// Outputs are prefetched kAhead rows before they are written: nothing else brings them into the cache in time.
template <int kAhead>
struct Adjacent {
    template <class Lanes, class T>
    static RELIVE_INLINE Lanes load(View<const T> view, int64_t t, int64_t column) {
        Lanes lanes;
        std::memcpy(&lanes, view.data + t * view.row + column, sizeof(lanes));
        return lanes;
    }
    template <class Lanes, class T>
    static RELIVE_INLINE void store(View<T> view, int64_t t, int64_t column, Lanes lanes) {
        const int64_t ahead = ((t - kAhead) * view.row + column) * int64_t{sizeof(T)};
        prefetch_to_write(reinterpret_cast<uintptr_t>(view.data) + static_cast<uintptr_t>(ahead));
        std::memcpy(view.data + t * view.row + column, &lanes, sizeof(lanes));
    }
};

// ... or columns at any stride, one by one.
struct Strided {
    template <class Lanes, class T>
    static RELIVE_INLINE Lanes load(View<const T> view, int64_t t, int64_t column) {
        constexpr int kLanes = sizeof(Lanes) / sizeof(T);
        T gathered[kLanes];
        const T* first = view.data + t * view.row + column * view.col;
        for (int i = 0; i < kLanes; ++i) gathered[i] = first[i * view.col];
        Lanes lanes;
        std::memcpy(&lanes, gathered, sizeof(lanes));
        return lanes;
    }
    template <class Lanes, class T>
    static RELIVE_INLINE void store(View<T> view, int64_t t, int64_t column, Lanes lanes) {
        constexpr int kLanes = sizeof(Lanes) / sizeof(T);
        T gathered[kLanes];
        std::memcpy(gathered, &lanes, sizeof(lanes));
        T* first = view.data + t * view.row + column * view.col;
        for (int i = 0; i < kLanes; ++i) first[i * view.col] = gathered[i];
    }
};

// One row of one register's columns, as a rule reads and writes it.
template <class R, class Access, bool kMasked>
struct Row {
    using T = typename R::Number;
    using Values = typename R::Values;
    using Conditions = typename R::Conditions;

    const Job<T>& job;
    int64_t t, column;
    Conditions terminated, open, valid;

    RELIVE_INLINE Row(const Job<T>& job_, int64_t t_, int64_t column_, bool last)
        : job(job_), t(t_), column(column_), valid{} {
        const auto ends = flags(job.terminated, t);
        const Conditions ended = R::conditions(static_cast<typename R::Flags>(ends | flags(job.truncated, t)));
        terminated = R::conditions(ends);
        open = last ? Conditions{} : ended == 0;
        if constexpr (kMasked) {
            valid = R::conditions(flags(job.mask, t));
            if (!last) open &= R::conditions(flags(job.mask, t + 1));
        }
    }

    RELIVE_INLINE typename R::Flags flags(Flags view, int64_t at) const {
        return Access::template load<typename R::Flags>(view, at, column);
    }
    RELIVE_INLINE Values read(View<const T> view) const { return Access::template load<Values>(view, t, column); }

    // Selected, not multiplied by zero: the value after an end may be NaN.
    RELIVE_INLINE Values bootstrap() const { return terminated ? Values{} : read(job.next_value); }
    RELIVE_INLINE Values if_open(Values x) const { return open ? x : Values{}; }

    RELIVE_INLINE void write(View<T> view, Values x) const {
        if constexpr (kMasked) x = valid ? x : Values{};
        Access::store(view, t, column, x);
    }
};

}  // namespace relive::scan::RELIVE_SCAN_ISA
