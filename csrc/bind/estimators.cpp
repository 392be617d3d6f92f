// gae, lambda_return, n_step_return, vtrace: check arguments, allocate outputs, call the reverse scan.
//
// Every function takes its tensors (and a mask or None) and its numbers. It returns None if an argument does not fit
// exactly; Python then converts the argument or raises.
#include <nanobind/nanobind.h>

#include <memory>
#include <new>

#include "../core/reverse_scan.hpp"
#include "arguments.hpp"
#include "tensors.hpp"

namespace relive::bind {
namespace {

using scan::Job;
using scan::table;
using scan::View;

// A scan of fewer bytes takes less than about 20 µs and keeps the GIL.
constexpr int64_t kScanReleaseBytes = int64_t{1} << 20;

bool read_number(nb::handle object, double& out) {
    if (!PyFloat_Check(object.ptr()) && !PyLong_CheckExact(object.ptr())) return false;
    out = PyFloat_AsDouble(object.ptr());
    if (out == -1.0 && PyErr_Occurred()) {
        PyErr_Clear();
        return false;
    }
    return true;
}

bool read_fraction(nb::handle object, double& out) { return read_number(object, out) && out >= 0 && out <= 1; }
bool read_positive(nb::handle object, double& out) { return read_number(object, out) && out > 0; }

// View an array as [time, columns]. Returns false if the axes after time do not collapse to one stride.
template <class T>
bool as_columns(const Array& array, View<T>& out) {
    int64_t stride = 1, expected = 0;
    bool has_stride = false;
    for (int axis = array.ndim - 1; axis > 0; --axis) {
        if (array.shape[axis] == 1) continue;
        if (!has_stride) stride = array.strides[axis];
        if (has_stride && array.strides[axis] != expected) return false;
        expected = array.strides[axis] * array.shape[axis];
        has_stride = true;
    }
    out = {reinterpret_cast<T*>(array.data), array.strides[0], stride};
    return true;
}

// The tensors of a call; null handles for inputs that the estimator lacks.
struct Tensors {
    nb::handle reward, value, next_value, ratio, terminated, truncated, mask;

    // Whether an argument is no tensor but an object with a buffer, which the estimators refuse.
    bool have_buffer() const {
        for (nb::handle object : {reward, value, next_value, ratio, terminated, truncated, mask})
            if (object.is_valid() && PyObject_CheckBuffer(object.ptr())) return true;
        return false;
    }
};

struct Settings {
    double gamma = 0, lam = 0, rho_bar = 0, c_bar = 0;
    int64_t n = 0;
};

// Read a tensor of the reward's shape. `held` keeps its memory in place.
template <class T>
bool read_like(nb::handle object, const Array& reward, DataType dtype, View<T>& out, Array& held) {
    return conversion().read(object.ptr(), held) && held.dtype == dtype && same_shape(held, reward) &&
           as_columns(held, out);
}

template <class T>
bool read_tensors(const Tensors& tensors, const Array& reward, Job<T>& job, Array* held) {
    if (!as_columns(reward, job.reward)) return false;
    const std::pair<nb::handle, View<const T>*> numbers[] = {
        {tensors.value, &job.value}, {tensors.next_value, &job.next_value}, {tensors.ratio, &job.ratio}};
    for (auto [object, view] : numbers)
        if (object.is_valid() && !read_like(object, reward, reward.dtype, *view, *held++)) return false;
    return read_like(tensors.terminated, reward, kBool, job.terminated, held[0]) &&
           read_like(tensors.truncated, reward, kBool, job.truncated, held[1]) &&
           (tensors.mask.is_none() || read_like(tensors.mask, reward, kBool, job.mask, held[2]));
}

// Allocate the history of an n-step scan; other scans need none. Returns false if memory is exhausted.
template <class T>
bool allocate_history(Job<T>& job, std::unique_ptr<char[]>& memory) {
    if (job.n == 0 || job.columns == 0) return true;
    const auto bytes = static_cast<size_t>(scan::history_bytes(job.n, job.columns * int64_t{sizeof(T)}));
    memory.reset(new (std::nothrow) char[bytes + scan::kAlignment]);
    if (!memory) return false;
    const auto start = reinterpret_cast<uintptr_t>(memory.get()) + scan::kAlignment - 1;
    job.history = reinterpret_cast<void*>(start - start % scan::kAlignment);
    return true;
}

// Make `count` tensors for the outputs. Returns one tensor, or a tuple of two.
template <class T>
nb::object make_outputs(int count, const Array& reward, Job<T>& job) {
    TensorPlans plans;
    for (int i = 0; i < count; ++i) plans.add(reward.dtype, reward.ndim, reward.shape);
    const nb::list tensors = make_tensors(plans);
    job.first = {plans.as<T>(0), job.columns, 1};
    if (count == 1) return tensors[0];
    job.second = {plans.as<T>(1), job.columns, 1};
    return nb::make_tuple(tensors[0], tensors[1]);
}

template <class T>
nb::object estimate_as(void (*kernel)(const Job<T>&) noexcept, int outputs, const Tensors& tensors, const Array& reward,
                       const Settings& settings) {
    Job<T> job{};
    job.steps = reward.shape[0];
    job.columns = 1;
    for (int axis = 1; axis < reward.ndim; ++axis) job.columns *= reward.shape[axis];
    job.gamma = static_cast<T>(settings.gamma);
    job.lam = static_cast<T>(settings.lam);
    job.rho_bar = static_cast<T>(settings.rho_bar);
    job.c_bar = static_cast<T>(settings.c_bar);
    job.n = settings.n;
    Array inputs[6];
    std::unique_ptr<char[]> history;
    if (!read_tensors(tensors, reward, job, inputs) || !allocate_history(job, history)) return nb::none();
    nb::object results = make_outputs(outputs, reward, job);
    {
        const MaybeReleased released(job.steps * job.columns * int64_t{5 * sizeof(T)}, kScanReleaseBytes);
        kernel(job);
    }
    return results;
}

nb::object estimate(scan::Kernels kernels, int outputs, const Tensors& tensors, const Settings& settings) {
    Array reward;
    if (tensors.have_buffer()) return nb::none();
    if (!conversion().read(tensors.reward.ptr(), reward) || reward.ndim == 0) return nb::none();
    if (reward.dtype == kFloat32) return estimate_as(kernels.f32, outputs, tensors, reward, settings);
    if (reward.dtype == kFloat64) return estimate_as(kernels.f64, outputs, tensors, reward, settings);
    return nb::none();
}

nb::object gae(nb::handle reward, nb::handle value, nb::handle next_value, nb::handle terminated, nb::handle truncated,
               nb::handle mask, nb::handle gamma, nb::handle lam) {
    const Tensors tensors{reward, value, next_value, {}, terminated, truncated, mask};
    Settings settings;
    if (!read_fraction(gamma, settings.gamma) || !read_fraction(lam, settings.lam)) return nb::none();
    return estimate(table().gae, 2, tensors, settings);
}

nb::object lambda_return(nb::handle reward, nb::handle next_value, nb::handle terminated, nb::handle truncated,
                         nb::handle mask, nb::handle gamma, nb::handle lam) {
    const Tensors tensors{reward, {}, next_value, {}, terminated, truncated, mask};
    Settings settings;
    if (!read_fraction(gamma, settings.gamma) || !read_fraction(lam, settings.lam)) return nb::none();
    return estimate(table().lambda_return, 1, tensors, settings);
}

nb::object n_step_return(nb::handle reward, nb::handle next_value, nb::handle terminated, nb::handle truncated,
                         nb::handle mask, nb::handle gamma, nb::handle n) {
    const Tensors tensors{reward, {}, next_value, {}, terminated, truncated, mask};
    Settings settings;
    double steps = 0;
    if (!read_fraction(gamma, settings.gamma) || !PyLong_CheckExact(n.ptr()) || !read_positive(n, steps))
        return nb::none();
    Array array;
    if (!conversion().read(reward.ptr(), array) || array.ndim == 0) return nb::none();
    // If n is at least the number of rows, no window ends before the last row, so the returns are λ-returns with λ = 1.
    if (steps >= static_cast<double>(array.shape[0])) {
        settings.lam = 1;
        return estimate(table().lambda_return, 1, tensors, settings);
    }
    settings.n = static_cast<int64_t>(steps);
    return estimate(table().n_step_return, 1, tensors, settings);
}

nb::object vtrace(nb::handle ratio, nb::handle reward, nb::handle value, nb::handle next_value, nb::handle terminated,
                  nb::handle truncated, nb::handle mask, nb::handle gamma, nb::handle lam, nb::handle rho_bar,
                  nb::handle c_bar) {
    const Tensors tensors{reward, value, next_value, ratio, terminated, truncated, mask};
    Settings settings;
    if (!read_fraction(gamma, settings.gamma) || !read_fraction(lam, settings.lam) ||
        !read_positive(rho_bar, settings.rho_bar) || !read_positive(c_bar, settings.c_bar))
        return nb::none();
    return estimate(table().vtrace, 2, tensors, settings);
}

// Bind a function that accepts None for every argument, because the caller in Python raises the errors.
template <class... Args>
void define(nb::module_& m, const char* name, nb::object (*function)(Args...)) {
    m.def(name, function, (static_cast<void>(sizeof(Args)), nb::arg().none())...);
}

}

void bind_estimators(nb::module_& m) {
    define(m, "gae", gae);
    define(m, "lambda_return", lambda_return);
    define(m, "n_step_return", n_step_return);
    define(m, "vtrace", vtrace);
    m.def("set_avx2", &scan::use_avx2);
}

}
