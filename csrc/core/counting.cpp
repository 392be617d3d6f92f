#include "counting.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

namespace relive {
namespace {

// The largest number up to which float64 represents every integer.
constexpr int64_t kMaxCount = int64_t{1} << 53;

template <class T>
double element(const char* data, int64_t i) {
    return static_cast<double>(reinterpret_cast<const T*>(data)[i]);
}

// Convert a float16, which has 5 exponent bits and 10 fraction bits.
double half(const char* data, int64_t i) {
    const uint16_t bits = reinterpret_cast<const uint16_t*>(data)[i];
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const double finite = std::ldexp(exponent ? fraction + 1024 : fraction, std::max(exponent, 1) - 25);
    const double magnitude = exponent < 31 ? finite : fraction ? std::nan("") : HUGE_VAL;
    return bits >> 15 ? -magnitude : magnitude;
}

// Convert a bfloat16, which is the upper half of a float32.
double bfloat(const char* data, int64_t i) {
    const uint32_t bits = static_cast<uint32_t>(reinterpret_cast<const uint16_t*>(data)[i]) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

using Load = double (*)(const char*, int64_t);

// Return the conversion of an element to float64, or null for dtypes without one.
Load get_load(DataType dtype) {
    switch (dtype.code * 256 + dtype.bits) {
        case kBoolean * 256 + 8:
        case kUInt * 256 + 8: return element<uint8_t>;
        case kUInt * 256 + 16: return element<uint16_t>;
        case kUInt * 256 + 32: return element<uint32_t>;
        case kUInt * 256 + 64: return element<uint64_t>;
        case kInt * 256 + 8: return element<int8_t>;
        case kInt * 256 + 16: return element<int16_t>;
        case kInt * 256 + 32: return element<int32_t>;
        case kInt * 256 + 64: return element<int64_t>;
        case kFloat * 256 + 16: return half;
        case kBfloat * 256 + 16: return bfloat;
        case kFloat * 256 + 32: return element<float>;
        case kFloat * 256 + 64: return element<double>;
        default: return nullptr;
    }
}

// Return the sum of the elements of item i.
double sum_item(const CountedLeaf& leaf, int64_t i) {
    const Load load = get_load(leaf.dtype);
    double sum = 0.0;
    for (int64_t k = i * leaf.elements; k < (i + 1) * leaf.elements; ++k) sum += load(leaf.data, k);
    return sum;
}

template <class T>
void widen(const char* data, int64_t count, double* out) {
    for (int64_t i = 0; i < count; ++i) out[i] = element<T>(data, i);
}

void widen(const CountedLeaf& leaf, int64_t count, double* out) {
    if (leaf.dtype == kFloat32) return widen<float>(leaf.data, count, out);
    if (leaf.dtype == kFloat64) return widen<double>(leaf.data, count, out);
    if (leaf.dtype == kUInt8) return widen<uint8_t>(leaf.data, count, out);
    const Load load = get_load(leaf.dtype);
    for (int64_t i = 0; i < count; ++i) out[i] = load(leaf.data, i);
}

// Sum W adjacent columns of rows that are `stride` apart. R rows at a time are added to independent sums, because
// additions to one sum would wait for each other.
template <int W, int R>
void sum_columns(const double* rows, int64_t count, int64_t stride, double* out) {
    double sums[R][W] = {};
    int64_t i = 0;
    for (; i + R <= count; i += R)
        for (int r = 0; r < R; ++r)
            for (int k = 0; k < W; ++k) sums[r][k] += rows[(i + r) * stride + k];
    for (; i < count; ++i)
        for (int k = 0; k < W; ++k) sums[0][k] += rows[i * stride + k];
    for (int r = 1; r < R; ++r)
        for (int k = 0; k < W; ++k) sums[0][k] += sums[r][k];
    std::copy_n(sums[0], W, out);
}

// Set out[j] to the sum of column j of rows [count, columns].
void sum_rows(const double* rows, int64_t count, int64_t columns, double* out) {
    int64_t j = 0;
    for (; j + 16 <= columns; j += 16) sum_columns<16, 1>(rows + j, count, columns, out + j);
    for (; j + 4 <= columns; j += 4) sum_columns<4, 4>(rows + j, count, columns, out + j);
    for (; j < columns; ++j) sum_columns<1, 8>(rows + j, count, columns, out + j);
}

}

bool is_countable(DataType dtype) { return get_load(dtype) != nullptr; }

void CountedSteps::find_transitions(int terminated, int truncated) {
    transition.clear();
    num_transitions.assign(steps, envs);
    if (resetting.empty()) return;
    transition.resize(steps * envs);
    for (int64_t i = 0; i < steps * envs; ++i) {
        uint8_t& resets = resetting[i % envs];
        const bool ended = terminated >= 0 && (leaves[terminated].data[i] || leaves[truncated].data[i]);
        transition[i] = !resets;
        num_transitions[i / envs] -= resets != 0;
        resets = ended && !resets;
    }
}

void EpisodeCounter::check(const CountedSteps& steps) const {
    int64_t before = counts[1];
    for (const int64_t added : steps.num_transitions) {
        if (before > kMaxCount - envs)
            throw std::overflow_error("update: expected at most 2^53 steps, got " + std::to_string(before) + " and " +
                                      std::to_string(envs) + " more. Call clear().");
        before += added;
    }
}

void EpisodeCounter::count(const CountedSteps& steps) {
    const CountedLeaf* leaves = steps.leaves;
    for (int64_t t = 0; t < steps.steps; ++t) {
        ended_.clear();
        for (int64_t n = 0; n < steps.envs; ++n) {
            const int64_t i = t * steps.envs + n, env = steps.env_at(n);
            if (!steps.is_transition(i)) continue;
            double reward = 0.0;
            for (const int leaf : rewards) reward += sum_item(leaves[leaf], i);
            open[env] += reward;
            open[envs + env] += 1.0;
            for (size_t m = 0; m < metrics.size(); ++m)
                if (leaves[metrics[m]].data)
                    open[(2 + static_cast<int64_t>(m)) * envs + env] += sum_item(leaves[metrics[m]], i);
            if (leaves[terminated].data[i] || leaves[truncated].data[i]) ended_.push_back(n);
        }
        counts[1] += steps.num_transitions[t];
        if (!ended_.empty()) finish(steps, t);
    }
}

// Store the episodes that end in step t, ordered by environment. Of more episodes than fit into the window, the last
// stay.
void EpisodeCounter::finish(const CountedSteps& steps, int64_t t) {
    if (steps.env_ids)
        std::sort(ended_.begin(), ended_.end(),
                  [&](int64_t a, int64_t b) { return steps.env_ids[a] < steps.env_ids[b]; });
    const auto finished = ssize(ended_), sums = static_cast<int64_t>(2 + metrics.size());
    for (int64_t rank = 0; rank < finished; ++rank) {
        const int64_t n = ended_[rank], env = steps.env_at(n), i = t * steps.envs + n;
        const auto number = static_cast<uint64_t>(counts[0]) + static_cast<uint64_t>(rank);
        const auto newest = static_cast<int64_t>(number % static_cast<uint64_t>(window));
        const int64_t slot = rank < finished - window ? window : newest;
        double* row = ring + slot * (2 + sums + ssize(reasons));
        *row++ = static_cast<double>(counts[1]);
        for (int64_t sum = 0; sum < sums; ++sum) {
            *row++ = open[sum * envs + env];
            open[sum * envs + env] = 0.0;
        }
        *row++ = steps.leaves[terminated].data[i] != 0;
        for (const int reason : reasons) {
            const CountedLeaf& leaf = steps.leaves[reason];
            *row++ = leaf.data && sum_item(leaf, i) != 0.0;
        }
    }
    counts[0] += finished;
}

void MomentCounter::check(const CountedSteps& steps) const {
    int64_t more = 0;
    for (const int64_t added : steps.num_transitions) more += added;
    if (!steps.leaves[leaf].data || *rows + static_cast<double>(more) < static_cast<double>(kMaxCount)) return;
    const auto before = static_cast<int64_t>(std::min(*rows, 1e18));
    throw std::overflow_error("update: expected fewer than 2^53 rows, got " + std::to_string(before) + " and " +
                              std::to_string(more) + " more. Call clear().");
}

void MomentCounter::count(const CountedSteps& steps) {
    const CountedLeaf& input = steps.leaves[leaf];
    if (!input.data) return;
    const int64_t all = steps.steps * steps.envs;
    values_.resize(all * elements);
    group_mean_.resize(elements);
    group_squares_.resize(elements);
    double* values = values_.data();
    widen(input, all * elements, values);
    double added = 0.0;
    for (int64_t i = 0; i < all; ++i) {
        added += steps.is_transition(i);
        if (!steps.is_transition(i)) std::fill_n(values + i * elements, elements, 0.0);
    }
    sum_rows(values, all, elements, group_mean_.data());
    for (double& each : group_mean_) each /= std::max(added, 1.0);
    for (int64_t i = 0; i < all; ++i)
        for (int64_t j = 0; j < elements && steps.is_transition(i); ++j) {
            const double apart = values[i * elements + j] - group_mean_[j];
            values[i * elements + j] = apart * apart;
        }
    sum_rows(values, all, elements, group_squares_.data());
    const double before = *rows, share = added / std::max(before + added, 1.0);
    for (int64_t j = 0; j < elements; ++j) {
        const double apart = group_mean_[j] - mean[j];
        mean[j] = mean[j] + apart * share;
        squares[j] = squares[j] + group_squares_[j] + apart * apart * (before * share);
    }
    *rows = before + added;
    if (values_.capacity() > (1 << 17)) std::vector<double>().swap(values_);
}

}
