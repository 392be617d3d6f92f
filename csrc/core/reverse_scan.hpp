// The reverse scan over time that computes every return and advantage, on pointers and strides.
//
// Each estimator is a first-order recurrence that runs backwards along a column (one environment):
//     x[t] = a[t] + c[t] · (open[t] ? x[t+1] : 0)
// with open[t] = not ended at t, and row t+1 exists and is not masked out. One scan runs the recurrence; a small rule
// per estimator defines a, c and the outputs. The lanes of a vector register are columns, because time is sequential.
// The code is compiled once per instruction set, each in its own namespace (RELIVE_SCAN_ISA), to keep inline functions
// from being shared between translation units.
#pragma once
#include <cstdint>

namespace relive::scan {

// A matrix [time, column]: element (t, column) is data[t * row + column * col].
template <class T>
struct View {
    T* data;
    int64_t row, col;
};

using Flags = View<const uint8_t>;

// Inputs, parameters and outputs of one call. A rule ignores members that it does not need.
template <class T>
struct Job {
    int64_t steps, columns;
    View<const T> reward, value, next_value, ratio;
    Flags terminated, truncated;
    // The data is null without a mask.
    Flags mask;
    // Outputs in the order of the estimator's results.
    View<T> first, second;
    T gamma, lam, rho_bar, c_bar;
    int64_t n;
    // Memory of history_bytes(n, columns · sizeof(T)) bytes, aligned to kAlignment; only n-step returns need it.
    void* history;
};

// One estimator, for both dtypes.
struct Kernels {
    void (*f32)(const Job<float>&) noexcept;
    void (*f64)(const Job<double>&) noexcept;
};

struct Table {
    Kernels gae, lambda_return, n_step_return, vtrace;
};

constexpr int64_t kAlignment = 64;
// Bytes of a row scanned at a time if there are many columns. The carries then stay in the L1 cache.
constexpr int64_t kWideBytes = 4096;
// Bytes of a row scanned at a time if there are few columns: four registers.
constexpr int64_t kFewBytes = 128;

// Return the bytes of the history of n-step returns: n returns for each column that is scanned at a time.
constexpr int64_t history_bytes(int64_t n, int64_t row_bytes) {
    return n * (row_bytes < kFewBytes ? kFewBytes : row_bytes < kWideBytes ? row_bytes : kWideBytes);
}

#ifdef RELIVE_AVX2
Table avx2_table();
#endif

// Return the kernels of the best instruction set of this machine.
const Table& table();

// Turn AVX2 on or off, for tests. Returns whether it is now in use.
bool use_avx2(bool on);

}
