// The loops of the reverse scan over time and columns, for every rule and layout.
#pragma once
#include <cstdint>

#include "reverse_scan_rules.hpp"

namespace relive::scan::RELIVE_SCAN_ISA {

template <class R, class Access, bool kMasked, class Rule, class Job>
RELIVE_INLINE void step_row(const Job& job, const Rule& rule, int64_t t, bool last, int64_t column,
                               typename Rule::Carry* carry, int registers) {
    for (int i = 0; i < registers; ++i)
        rule.step(Row<R, Access, kMasked>(job, t, column + i * R::kLanes, last), carry[i]);
}

// From the last row to the first, `registers` (at most kMost) neighbouring registers of columns.
template <template <class> class Rule, class R, class Access, bool kMasked, int kMost = 1>
RELIVE_INLINE void scan_columns(const Job<typename R::Number>& shared, int64_t column, int registers = 1) {
    const auto job = shared;  // a private copy: no store through an output can change it
    const Rule<R> rule(job);
    typename Rule<R>::Carry carry[kMost];
    for (int i = 0; i < registers; ++i) carry[i] = rule.start(i);
    if (job.steps > 0) step_row<R, Access, kMasked>(job, rule, job.steps - 1, true, column, carry, registers);
    for (int64_t t = job.steps - 2; t >= 0; --t)
        step_row<R, Access, kMasked>(job, rule, t, false, column, carry, registers);
}

// The columns from `column` on, a register at a time. The columns left over are scanned together with the columns before
// them, which then are written twice, with the same numbers.
template <template <class> class Rule, class R, class Access, bool kMasked>
void scan_each(const Job<typename R::Number>& job, int64_t column) noexcept {
    for (; column + R::kLanes <= job.columns; column += R::kLanes) scan_columns<Rule, R, Access, kMasked>(job, column);
    if (column < job.columns) scan_columns<Rule, R, Access, kMasked>(job, job.columns - R::kLanes);
}

// Four registers of columns that stay in machine registers for the whole scan. Returns the first column not done.
template <template <class> class Rule, class R, bool kMasked>
int64_t scan_fours(const Job<typename R::Number>& job, int64_t column) noexcept {
    for (; column + 4 * R::kLanes <= job.columns; column += 4 * R::kLanes)
        scan_columns<Rule, R, Adjacent<4>, kMasked, 4>(job, column, 4);
    return column;
}

// Many columns: whole pieces of rows, since jumping from row to row would waste prefetched memory.
template <template <class> class Rule, class R, bool kMasked>
int64_t scan_wide(const Job<typename R::Number>& job) noexcept {
    constexpr int64_t kMost = kWideBytes / sizeof(typename R::Values);
    int64_t column = 0;
    while (column + R::kLanes <= job.columns) {
        const int64_t left = (job.columns - column) / R::kLanes;
        const int64_t registers = left < kMost ? left : kMost;
        scan_columns<Rule, R, Adjacent<1>, kMasked, kMost>(job, column, static_cast<int>(registers));
        column += registers * R::kLanes;
    }
    return column;
}

template <class T>
bool adjacent(const View<T>& view) {
    return view.data == nullptr || view.col == 1;
}

template <class T>
bool all_adjacent(const Job<T>& job) {
    return adjacent(job.reward) && adjacent(job.value) && adjacent(job.next_value) && adjacent(job.ratio) &&
           adjacent(job.terminated) && adjacent(job.truncated) && adjacent(job.mask) && adjacent(job.first) &&
           adjacent(job.second);
}

template <template <class> class Rule, class T, bool kMasked>
void scan_all(const Job<T>& job) noexcept {
    constexpr int64_t kManyColumns = 512;
    using R = Widest<T>;
    using Single = Register<T, sizeof(T)>;
    const bool wide = job.columns >= kManyColumns || R::kLanes == 1;
    if (!all_adjacent(job))
        job.columns >= R::kLanes ? scan_each<Rule, R, Strided, kMasked>(job, 0)
                                 : scan_each<Rule, Single, Strided, kMasked>(job, 0);
    else if (job.columns >= R::kLanes)
        scan_each<Rule, R, Adjacent<4>, kMasked>(
            job, wide ? scan_wide<Rule, R, kMasked>(job) : scan_fours<Rule, R, kMasked>(job, 0));
#if defined(RELIVE_VECTORS)
    else if (job.columns >= Register<T, 16>::kLanes)
        scan_each<Rule, Register<T, 16>, Adjacent<4>, kMasked>(job, 0);
#endif
    else
        scan_each<Rule, Single, Adjacent<4>, kMasked>(job, 0);
}

template <template <class> class Rule, class T>
void run(const Job<T>& job) noexcept {
    job.mask.data ? scan_all<Rule, T, true>(job) : scan_all<Rule, T, false>(job);
}

template <class T>
Kernels<T> kernels() {
    return {run<Gae, T>, run<LambdaReturn, T>, run<NStepReturn, T>, run<Vtrace, T>};
}

inline Table table() { return {kernels<float>(), kernels<double>()}; }

}  // namespace relive::scan::RELIVE_SCAN_ISA
