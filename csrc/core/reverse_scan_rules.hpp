// The estimators as rules of the reverse scan: what each computes at one row.
#pragma once
#include <cstdint>

#include "reverse_scan_row.hpp"

namespace relive::scan::RELIVE_SCAN_ISA {

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
    bool reads_open;  // with λ = 1 the next value of a step that goes on has no weight, even if it is NaN

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

// Carries the returns of 1, 2, … n steps of the following row: each becomes the next longer return of this row.
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

}  // namespace relive::scan::RELIVE_SCAN_ISA
