// The reverse sweep over time that every return and advantage estimator is, on pointers and strides.
//
// Each estimator is a first-order recurrence that runs backwards along a column (one environment):
//     x[t] = a[t] + c[t] · (open[t] ? x[t+1] : 0)
// with open[t] = not ended at t, and row t+1 exists and is no masked row. One sweep walks it; a small rule per estimator
// says what a, c and the outputs are. Time is sequential, so lanes of the vector registers are columns.
//
// Everything that generates code lives in the namespace RELIVE_SWEEP_ISA: the header is compiled once per
// instruction set, and inline code must not be shared between those translation units.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX2__) || defined(__SSE2__)
#include <immintrin.h>
#endif

namespace relive::sweep {

template <class T>
struct View {  // element (t, column) is data[t * row + column * col]
    T* data;
    int64_t row, col;
};

using Flags = View<const uint8_t>;

// One call: what is read, how it is weighted, what is written. A rule leaves alone what it does not need.
template <class T>
struct Job {
    int64_t steps, columns;
    View<const T> reward, value, next_value, ratio;
    Flags terminated, truncated;
    Flags mask;            // data is null without a mask
    View<T> first, second;  // the outputs, in the order the estimator returns them
    T gamma, lam, rho_bar, c_bar;
    int64_t n;
    void* history;  // n-step only: history_bytes(n, columns · sizeof(T)) bytes, aligned to kAlignment
};

template <class T>
struct Kernels {
    using Kernel = void (*)(const Job<T>&) noexcept;
    Kernel gae, lambda_return, n_step_return, vtrace;
};

struct Table {
    Kernels<float> f32;
    Kernels<double> f64;
};

constexpr int64_t kAlignment = 64;
constexpr int64_t kWideBytes = 4096;  // one array's share of a row that is swept at a time: carries stay in L1

constexpr int64_t kFewBytes = 128;    // the same when whole columns are swept: four registers

// What n-step returns carry from row to row: n returns of each column that is swept at a time.
constexpr int64_t history_bytes(int64_t n, int64_t row_bytes) {
    return n * (row_bytes < kFewBytes ? kFewBytes : row_bytes < kWideBytes ? row_bytes : kWideBytes);
}

Table baseline_table();
#ifdef RELIVE_AVX2
Table avx2_table();
#endif

}  // namespace relive::sweep

#ifdef RELIVE_SWEEP_ISA

// g++ and clang have vector types; elsewhere (or with RELIVE_SCALAR) registers hold one number.
#if defined(__GNUC__) && !defined(RELIVE_SCALAR)
#define RELIVE_VECTORS
#endif

// The parts of a step must merge into one loop body: compilers judge them too big to inline and lose the registers.
#if defined(__GNUC__)
#define RELIVE_INLINE inline __attribute__((always_inline))
#else
#define RELIVE_INLINE __forceinline
#endif

namespace relive::sweep::RELIVE_SWEEP_ISA {

// A register of kBytes: values, conditions of the same width (so that `condition ? a : b` selects lane by lane), and the
// flags of as many columns as one integer. A register of one value is a plain number.
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

// Flags to lanes. Written out for x86: g++ 12 widens a vector of bytes one element at a time.
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
RELIVE_INLINE Words16 widen(uint32_t flags) {
    typedef uint8_t Bytes __attribute__((vector_size(4)));
    Bytes bytes;
    std::memcpy(&bytes, &flags, sizeof(bytes));
    return __builtin_convertvector(bytes, Words16);
}
RELIVE_INLINE LongWords16 widen(uint16_t flags) {
    typedef uint8_t Bytes __attribute__((vector_size(2)));
    Bytes bytes;
    std::memcpy(&bytes, &flags, sizeof(bytes));
    return __builtin_convertvector(bytes, LongWords16);
}
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
template <class T>
using Widest = Register<T, 32>;
#elif defined(RELIVE_VECTORS)
template <class T>
using Widest = Register<T, 16>;
#else
template <class T>
using Widest = Register<T, sizeof(T)>;
#endif

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

// How lanes reach memory: neighbouring columns in one piece ...
// Outputs are asked for kAhead rows before they are written: nothing else brings them into the cache in time.
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

// One row of one register's columns: what a rule may read and write there.
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

    // Selected, not multiplied by zero: what lies behind an end may be NaN.
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
    bool reads_open;  // with λ = 1 the next value of a step that goes on counts nothing, be it NaN

    template <class Job>
    RELIVE_INLINE explicit LambdaReturn(const Job& job)
        : gamma(fill<R>(job.gamma)), decay(fill<R>(job.gamma * job.lam)), keep(fill<R>(1 - job.lam)),
          reads_open(job.lam != 1) {}
    RELIVE_INLINE Carry start(int64_t) const { return Values{}; }

    template <class Row>
    RELIVE_INLINE void step(const Row& row, Carry& carry) const {
        const Values bootstrap = row.bootstrap();
        const Values held = reads_open ? keep * bootstrap : Values{};
        carry = row.read(row.job.reward) + gamma * (row.open ? held : bootstrap) + decay * row.if_open(carry);
        row.write(row.job.first, carry);
    }
};

// Carries the returns of 1, 2, … n steps of the row after: each becomes the next longer one of this row.
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
        const Values behind = decay * row.if_open(carry);
        carry = rho * delta + c * behind;
        row.write(row.job.first, rho * (delta + behind));
        row.write(row.job.second, carry + value);
    }
};

template <class R, class Access, bool kMasked, class Rule, class Job>
RELIVE_INLINE void step_row(const Job& job, const Rule& rule, int64_t t, bool last, int64_t column,
                               typename Rule::Carry* carry, int registers) {
    for (int i = 0; i < registers; ++i)
        rule.step(Row<R, Access, kMasked>(job, t, column + i * R::kLanes, last), carry[i]);
}

// From the last row to the first, `registers` (at most kMost) neighbouring registers of columns.
template <template <class> class Rule, class R, class Access, bool kMasked, int kMost = 1>
RELIVE_INLINE void sweep(const Job<typename R::Number>& shared, int64_t column, int registers = 1) {
    const auto job = shared;  // a private copy: no store through an output can change it
    const Rule<R> rule(job);
    typename Rule<R>::Carry carry[kMost];
    for (int i = 0; i < registers; ++i) carry[i] = rule.start(i);
    if (job.steps > 0) step_row<R, Access, kMasked>(job, rule, job.steps - 1, true, column, carry, registers);
    for (int64_t t = job.steps - 2; t >= 0; --t)
        step_row<R, Access, kMasked>(job, rule, t, false, column, carry, registers);
}

// The columns from `column` on, a register at a time. What is left over is swept together with the columns before it,
// which then are written twice, with the same numbers.
template <template <class> class Rule, class R, class Access, bool kMasked>
void sweep_each(const Job<typename R::Number>& job, int64_t column) noexcept {
    for (; column + R::kLanes <= job.columns; column += R::kLanes) sweep<Rule, R, Access, kMasked>(job, column);
    if (column < job.columns) sweep<Rule, R, Access, kMasked>(job, job.columns - R::kLanes);
}

// Four registers of columns that stay in the machine's for the whole sweep. Returns the first column not done.
template <template <class> class Rule, class R, bool kMasked>
int64_t sweep_fours(const Job<typename R::Number>& job, int64_t column) noexcept {
    for (; column + 4 * R::kLanes <= job.columns; column += 4 * R::kLanes)
        sweep<Rule, R, Adjacent<4>, kMasked, 4>(job, column, 4);
    return column;
}

// Many columns: whole pieces of rows, since hopping from row to row would waste what the memory prefetches.
template <template <class> class Rule, class R, bool kMasked>
int64_t sweep_wide(const Job<typename R::Number>& job) noexcept {
    constexpr int64_t kMost = kWideBytes / sizeof(typename R::Values);
    int64_t column = 0;
    while (column + R::kLanes <= job.columns) {
        const int64_t left = (job.columns - column) / R::kLanes;
        const int64_t registers = left < kMost ? left : kMost;
        sweep<Rule, R, Adjacent<1>, kMasked, kMost>(job, column, static_cast<int>(registers));
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
void sweep_all(const Job<T>& job) noexcept {
    constexpr int64_t kManyColumns = 512;
    using R = Widest<T>;
    using Single = Register<T, sizeof(T)>;
    const bool wide = job.columns >= kManyColumns || R::kLanes == 1;
    if (!all_adjacent(job))
        job.columns >= R::kLanes ? sweep_each<Rule, R, Strided, kMasked>(job, 0)
                                 : sweep_each<Rule, Single, Strided, kMasked>(job, 0);
    else if (job.columns >= R::kLanes)
        sweep_each<Rule, R, Adjacent<4>, kMasked>(
            job, wide ? sweep_wide<Rule, R, kMasked>(job) : sweep_fours<Rule, R, kMasked>(job, 0));
#if defined(RELIVE_VECTORS)
    else if (job.columns >= Register<T, 16>::kLanes)
        sweep_each<Rule, Register<T, 16>, Adjacent<4>, kMasked>(job, 0);
#endif
    else
        sweep_each<Rule, Single, Adjacent<4>, kMasked>(job, 0);
}

template <template <class> class Rule, class T>
void run(const Job<T>& job) noexcept {
    job.mask.data ? sweep_all<Rule, T, true>(job) : sweep_all<Rule, T, false>(job);
}

template <class T>
Kernels<T> kernels() {
    return {run<Gae, T>, run<LambdaReturn, T>, run<NStepReturn, T>, run<Vtrace, T>};
}

inline Table table() { return {kernels<float>(), kernels<double>()}; }

}  // namespace relive::sweep::RELIVE_SWEEP_ISA
#endif
