// The reverse scan, compiled once per instruction set: vector registers, one row of the scan, a rule per estimator, and
// the loops over time and columns.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX2__) || defined(__SSE2__)
#include <immintrin.h>
#endif

#include "reverse_scan.hpp"

// The instruction set that this translation unit is compiled for.
#ifndef RELIVE_SCAN_ISA
#define RELIVE_SCAN_ISA baseline
#endif

// g++ and clang have vector types. Other compilers (or RELIVE_SCALAR) use registers of one number.
#if defined(__GNUC__) && !defined(RELIVE_SCALAR)
#define RELIVE_VECTORS
#endif

// Inlining is forced because the functions of a step must merge into one loop body, but compilers judge them too large.
#if defined(__GNUC__)
#define RELIVE_INLINE inline __attribute__((always_inline))
#else
#define RELIVE_INLINE __forceinline
#endif

namespace relive::scan::RELIVE_SCAN_ISA {

// A register of kBytes: values, conditions of the same width (`condition ? a : b` selects per lane), and the flags of
// its columns as one integer. A register of one value is a plain number.
template <class T, int kBytes>
struct Register;

#define RELIVE_REGISTER(T, BYTES, VALUES, CONDITIONS, FLAGS)     \
    template <>                                                     \
    struct Register<T, BYTES> {                                     \
        using Number = T;                                           \
        using Values = VALUES;                                      \
        using Conditions = CONDITIONS;                              \
        using Flags = FLAGS;                                        \
        static constexpr int kLanes = BYTES / int{sizeof(T)};       \
        static RELIVE_INLINE Conditions conditions(Flags flags); \
    };                                                              \
    RELIVE_INLINE CONDITIONS Register<T, BYTES>::conditions(FLAGS flags)

RELIVE_REGISTER(float, 4, float, int32_t, uint8_t) { return flags != 0; }
RELIVE_REGISTER(double, 8, double, int64_t, uint8_t) { return flags != 0; }

#if defined(RELIVE_VECTORS)
typedef float Floats16 __attribute__((vector_size(16)));
typedef double Doubles16 __attribute__((vector_size(16)));
typedef int32_t Words16 __attribute__((vector_size(16)));
typedef int64_t LongWords16 __attribute__((vector_size(16)));

// Widen flags to lanes. On x86 by intrinsics, because g++ 12 widens vectors of bytes one element at a time.
#if defined(__SSE2__)
RELIVE_INLINE Words16 widen(uint32_t flags) {
    const __m128i zero = _mm_setzero_si128();
    const __m128i pairs = _mm_unpacklo_epi8(_mm_cvtsi32_si128(static_cast<int32_t>(flags)), zero);
    return (Words16)_mm_unpacklo_epi16(pairs, zero);
}
RELIVE_INLINE LongWords16 widen(uint16_t flags) {
    return (LongWords16)_mm_unpacklo_epi32((__m128i)widen(uint32_t{flags}), _mm_setzero_si128());
}
#else
template <class Lanes, class Flags>
RELIVE_INLINE Lanes widen_bytes(Flags flags) {
    typedef uint8_t Bytes __attribute__((vector_size(sizeof(Flags))));
    Bytes bytes;
    std::memcpy(&bytes, &flags, sizeof(bytes));
    return __builtin_convertvector(bytes, Lanes);
}
RELIVE_INLINE Words16 widen(uint32_t flags) { return widen_bytes<Words16>(flags); }
RELIVE_INLINE LongWords16 widen(uint16_t flags) { return widen_bytes<LongWords16>(flags); }
#endif
RELIVE_REGISTER(float, 16, Floats16, Words16, uint32_t) { return widen(flags) != 0; }
RELIVE_REGISTER(double, 16, Doubles16, LongWords16, uint16_t) { return widen(flags) != 0; }
#endif

#if defined(__AVX2__) && defined(RELIVE_VECTORS)
typedef float Floats32 __attribute__((vector_size(32)));
typedef double Doubles32 __attribute__((vector_size(32)));
typedef int32_t Words32 __attribute__((vector_size(32)));
typedef int64_t LongWords32 __attribute__((vector_size(32)));

RELIVE_REGISTER(float, 32, Floats32, Words32, uint64_t) {
    return (Words32)_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(flags))) != 0;
}
RELIVE_REGISTER(double, 32, Doubles32, LongWords32, uint32_t) {
    return (LongWords32)_mm256_cvtepi8_epi64(_mm_cvtsi32_si128(static_cast<int32_t>(flags))) != 0;
}
#endif
#undef RELIVE_REGISTER

#if defined(__AVX2__) && defined(RELIVE_VECTORS)
constexpr int kRegisterBytes = 32;
#elif defined(RELIVE_VECTORS)
constexpr int kRegisterBytes = 16;
#else
constexpr int kRegisterBytes = 0;
#endif
template <class T>
using Widest = Register<T, kRegisterBytes ? kRegisterBytes : int{sizeof(T)}>;

template <class R>
RELIVE_INLINE typename R::Values fill(typename R::Number x) {
    return typename R::Values{} + x;
}

RELIVE_INLINE void prefetch_to_write(uintptr_t address) {
#if defined(__GNUC__)
    __builtin_prefetch(reinterpret_cast<const void*>(address), 1);
#else
    static_cast<void>(address);
#endif
}

// Loads and stores the lanes of adjacent columns as one block of memory. Outputs are prefetched kAhead rows in advance,
// because the hardware prefetcher does not run backwards in time.
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

// Loads and stores lanes of columns with any stride, one by one.
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

// One row of the columns of a register, as seen by a rule.
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

    // Select the next value instead of multiplying it by zero, because the next value after an end may be NaN.
    RELIVE_INLINE Values bootstrap() const { return terminated ? Values{} : read(job.next_value); }
    RELIVE_INLINE Values if_open(Values x) const { return open ? x : Values{}; }

    RELIVE_INLINE void write(View<T> view, Values x) const {
        if constexpr (kMasked) x = valid ? x : Values{};
        Access::store(view, t, column, x);
    }
};

template <class R>
struct Gae {
    using Values = typename R::Values;
    using Carry = Values;
    Values gamma, decay;

    template <class Job>
    RELIVE_INLINE explicit Gae(const Job& job) : gamma(fill<R>(job.gamma)), decay(fill<R>(job.gamma * job.lam)) {}
    RELIVE_INLINE Carry start(int64_t) const { return Values{}; }

    template <class Row>
    RELIVE_INLINE void step(const Row& row, Carry& carry) const {
        const Values value = row.read(row.job.value);
        const Values delta = row.read(row.job.reward) - value + gamma * row.bootstrap();
        carry = delta + decay * row.if_open(carry);
        row.write(row.job.first, carry);
        row.write(row.job.second, carry + value);
    }
};

template <class R>
struct LambdaReturn {
    using Values = typename R::Values;
    using Carry = Values;
    Values gamma, decay, keep;
    // False for λ = 1: the next values of open steps then have weight 0 and are not read, because they may be NaN.
    bool reads_open;

    template <class Job>
    RELIVE_INLINE explicit LambdaReturn(const Job& job)
        : gamma(fill<R>(job.gamma)), decay(fill<R>(job.gamma * job.lam)), keep(fill<R>(1 - job.lam)),
          reads_open(job.lam != 1) {}
    RELIVE_INLINE Carry start(int64_t) const { return Values{}; }

    template <class Row>
    RELIVE_INLINE void step(const Row& row, Carry& carry) const {
        const Values bootstrap = row.bootstrap();
        const Values weighted = reads_open ? keep * bootstrap : Values{};
        carry = row.read(row.job.reward) + gamma * (row.open ? weighted : bootstrap) + decay * row.if_open(carry);
        row.write(row.job.first, carry);
    }
};

// Carries the returns over 1, 2, … n steps from the following row: its return over k steps gives this row's over k + 1.
template <class R>
struct NStepReturn {
    using Values = typename R::Values;
    using Carry = Values*;
    Values gamma;
    int64_t n;
    Values* history;

    template <class Job>
    RELIVE_INLINE explicit NStepReturn(const Job& job)
        : gamma(fill<R>(job.gamma)), n(job.n), history(static_cast<Values*>(job.history)) {}
    RELIVE_INLINE Carry start(int64_t i) const { return history + i * n; }

    template <class Row>
    RELIVE_INLINE void step(const Row& row, Carry& longer) const {
        const Values reward = row.read(row.job.reward);
        const Values one_step = reward + gamma * row.bootstrap();
        for (int64_t k = n - 1; k > 0; --k) longer[k] = row.open ? reward + gamma * longer[k - 1] : one_step;
        longer[0] = one_step;
        row.write(row.job.first, longer[n - 1]);
    }
};

template <class R>
struct Vtrace {
    using Values = typename R::Values;
    using Carry = Values;
    Values gamma, decay, rho_bar, c_bar;

    template <class Job>
    RELIVE_INLINE explicit Vtrace(const Job& job)
        : gamma(fill<R>(job.gamma)), decay(fill<R>(job.gamma * job.lam)), rho_bar(fill<R>(job.rho_bar)),
          c_bar(fill<R>(job.c_bar)) {}
    RELIVE_INLINE Carry start(int64_t) const { return Values{}; }

    template <class Row>
    RELIVE_INLINE void step(const Row& row, Carry& carry) const {
        const Values value = row.read(row.job.value), ratio = row.read(row.job.ratio);
        const Values rho = ratio > rho_bar ? rho_bar : ratio, c = ratio > c_bar ? c_bar : ratio;
        const Values delta = row.read(row.job.reward) - value + gamma * row.bootstrap();
        const Values later = decay * row.if_open(carry);
        carry = rho * delta + c * later;
        row.write(row.job.first, rho * (delta + later));
        row.write(row.job.second, carry + value);
    }
};

template <class R, class Access, bool kMasked, class Rule, class Job>
RELIVE_INLINE void step_row(const Job& job, const Rule& rule, int64_t t, bool last, int64_t column,
                               typename Rule::Carry* carry, int registers) {
    for (int i = 0; i < registers; ++i)
        rule.step(Row<R, Access, kMasked>(job, t, column + i * R::kLanes, last), carry[i]);
}

// Scan `registers` (at most kMax) adjacent registers of columns from the last row to the first.
template <template <class> class Rule, class R, class Access, bool kMasked, int kMax = 1>
RELIVE_INLINE void scan_columns(const Job<typename R::Number>& shared, int64_t column, int registers = 1) {
    // Stores to outputs cannot alias a copy of the job, so its members stay in registers.
    const auto job = shared;
    const Rule<R> rule(job);
    typename Rule<R>::Carry carry[kMax];
    for (int i = 0; i < registers; ++i) carry[i] = rule.start(i);
    if (job.steps > 0) step_row<R, Access, kMasked>(job, rule, job.steps - 1, true, column, carry, registers);
    for (int64_t t = job.steps - 2; t >= 0; --t)
        step_row<R, Access, kMasked>(job, rule, t, false, column, carry, registers);
}

// Scan the columns from `column` on, a register at a time. The last register may overlap the previous one, whose
// columns are then written twice with the same numbers.
template <template <class> class Rule, class R, class Access, bool kMasked>
void scan_each(const Job<typename R::Number>& job, int64_t column) noexcept {
    for (; column + R::kLanes <= job.columns; column += R::kLanes) scan_columns<Rule, R, Access, kMasked>(job, column);
    if (column < job.columns) scan_columns<Rule, R, Access, kMasked>(job, job.columns - R::kLanes);
}

// Scan four registers of columns at a time, held in machine registers. Returns the first remaining column.
template <template <class> class Rule, class R, bool kMasked>
int64_t scan_fours(const Job<typename R::Number>& job, int64_t column) noexcept {
    for (; column + 4 * R::kLanes <= job.columns; column += 4 * R::kLanes)
        scan_columns<Rule, R, Adjacent<4>, kMasked, 4>(job, column, 4);
    return column;
}

// Scan many columns, a long section of each row at a time, because short sections would waste prefetched memory.
// Returns the first remaining column.
template <template <class> class Rule, class R, bool kMasked>
int64_t scan_wide(const Job<typename R::Number>& job) noexcept {
    constexpr int64_t kMax = kWideBytes / sizeof(typename R::Values);
    int64_t column = 0;
    while (column + R::kLanes <= job.columns) {
        const int64_t left = (job.columns - column) / R::kLanes;
        const int64_t registers = left < kMax ? left : kMax;
        scan_columns<Rule, R, Adjacent<1>, kMasked, kMax>(job, column, static_cast<int>(registers));
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

template <template <class> class Rule>
constexpr Kernels kKernels{run<Rule, float>, run<Rule, double>};

inline Table table() { return {kKernels<Gae>, kKernels<LambdaReturn>, kKernels<NStepReturn>, kKernels<Vtrace>}; }

}
