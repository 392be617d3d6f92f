// gae, lambda_return, n_step_return, vtrace: check that every argument fits exactly, allocate, call the reverse scan.
//
// Every function takes its tensors (and a mask or None), its numbers, and `out`: None, or the arrays to write when
// tensors cannot be made from C. It returns None if an argument is no exact fit; Python then converts or explains.
#include <nanobind/nanobind.h>

#include <memory>
#include <new>

#include "../core/reverse_scan.hpp"
#include "arguments.hpp"
#include "tensors.hpp"

namespace relive::bind {
namespace {

using scan::Job;
using scan::Kernels;
using scan::table;
using scan::View;

// About 20 µs of work: memory is read in order.
constexpr int64_t kScanReleaseBytes = int64_t{1} << 20;

bool number(nb::handle object, double& out) {
    if (!PyFloat_Check(object.ptr()) && !PyLong_CheckExact(object.ptr())) return false;
    out = PyFloat_AsDouble(object.ptr());
    if (out == -1.0 && PyErr_Occurred()) {
        PyErr_Clear();
        return false;
    }
    return true;
}

bool fraction(nb::handle object, double& out) { return number(object, out) && out >= 0 && out <= 1; }
bool positive(nb::handle object, double& out) { return number(object, out) && out > 0; }

// The array as rows of columns, if the axes after time collapse to one stride.
template <class T>
bool as_columns(const Array& array, View<T>& out) {
    int64_t stride = 1, expected = 0;
    bool found = false;
    for (int axis = array.ndim - 1; axis > 0; --axis) {
        if (array.shape[axis] == 1) continue;
        if (!found) stride = array.strides[axis];
        if (found && array.strides[axis] != expected) return false;
        expected = array.strides[axis] * array.shape[axis];
        found = true;
    }
    out = {reinterpret_cast<T*>(array.data), array.strides[0], stride};
    return true;
}

bool is_float(DataType dtype) { return dtype == kFloat32 || dtype == kFloat64; }

// The tensors of a call, in the order of Python's arguments; null handles for tensors that the estimator does not take.
struct Tensors {
    nb::handle reward, value, next_value, ratio, terminated, truncated, mask;
};

// `conversion` reads numpy arrays too; estimators take them only as stand-ins for tensors, together with `out`.
bool any_buffer(const Tensors& tensors) {
    for (nb::handle object : {tensors.reward, tensors.value, tensors.next_value, tensors.ratio, tensors.terminated,
                              tensors.truncated, tensors.mask})
        if (object.is_valid() && PyObject_CheckBuffer(object.ptr())) return true;
    return false;
}

// The arrays of a job, held for as long as it runs.
struct Inputs {
    Array value, next_value, ratio, terminated, truncated, mask;
};

struct Settings {
    double gamma = 0, lam = 0, rho_bar = 0, c_bar = 0;
    int64_t n = 0;
};

template <class T>
bool read_numbers(nb::handle object, const Array& like, View<const T>& out, Array& array) {
    if (!object.is_valid()) return true;
    return conversion().read(object.ptr(), array) && array.dtype == like.dtype && same_shape(array, like) &&
           as_columns(array, out);
}

bool read_flags(nb::handle object, const Array& like, scan::Flags& out, Array& array) {
    if (object.is_none()) return true;
    return conversion().read(object.ptr(), array) && array.dtype == kBool && same_shape(array, like) &&
           as_columns(array, out);
}

template <class T>
bool fill_job(const Tensors& tensors, const Array& reward, const Settings& settings, Job<T>& job, Inputs& held) {
    job.steps = reward.shape[0];
    job.columns = 1;
    for (int axis = 1; axis < reward.ndim; ++axis) job.columns *= reward.shape[axis];
    job.gamma = static_cast<T>(settings.gamma);
    job.lam = static_cast<T>(settings.lam);
    job.rho_bar = static_cast<T>(settings.rho_bar);
    job.c_bar = static_cast<T>(settings.c_bar);
    job.n = settings.n;
    return as_columns(reward, job.reward) && read_numbers(tensors.value, reward, job.value, held.value) &&
           read_numbers(tensors.next_value, reward, job.next_value, held.next_value) &&
           read_numbers(tensors.ratio, reward, job.ratio, held.ratio) && !tensors.terminated.is_none() &&
           read_flags(tensors.terminated, reward, job.terminated, held.terminated) && !tensors.truncated.is_none() &&
           read_flags(tensors.truncated, reward, job.truncated, held.truncated) &&
           read_flags(tensors.mask, reward, job.mask, held.mask);
}

// One or two outputs: new tensors, or the arrays of the caller.
template <class T>
class Outputs {
public:
    Outputs(int count, const Array& like, nb::handle given) : count_(count) {
        View<T>* views[] = {&first, &second};
        if (given.is_none()) {
            ready_ = conversion().exchange();
            if (ready_) make(like, views);
            return;
        }
        ready_ = true;
        for (int i = 0; i < count; ++i) ready_ = ready_ && take(i, like, given, *views[i]);
    }

    bool ready() const { return ready_; }
    nb::object result() const { return count_ == 1 ? made_[0] : nb::object(nb::make_tuple(made_[0], made_[1])); }

    View<T> first{}, second{};

private:
    void make(const Array& like, View<T>* const* views) {
        TensorPlans plans;
        for (int i = 0; i < count_; ++i) plans.add(like.dtype, like.ndim, like.shape);
        const nb::list tensors = make_tensors(plans);
        int64_t columns = 1;
        for (int axis = 1; axis < like.ndim; ++axis) columns *= like.shape[axis];
        for (int i = 0; i < count_; ++i) {
            made_[i] = tensors[static_cast<size_t>(i)];
            *views[i] = {reinterpret_cast<T*>(plans.data(static_cast<size_t>(i))), columns, 1};
        }
    }

    bool take(int i, const Array& like, nb::handle given, View<T>& view) {
        made_[i] = nb::borrow(given[i]);
        Array& array = held_[i];
        return conversion().read(made_[i].ptr(), array) && array.is_writable && array.dtype == like.dtype && same_shape(array, like) &&
               as_columns(array, view);
    }

    int count_;
    bool ready_ = false;
    nb::object made_[2];
    Array held_[2];
};

// Memory for the returns that an n-step scan carries; false if there is none. Other scans need none.
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

template <class T>
nb::object estimate_as(typename Kernels<T>::Kernel kernel, int outputs, const Tensors& tensors, const Array& reward,
                       const Settings& settings, nb::handle out) {
    Job<T> job{};
    Inputs held;
    if (!fill_job(tensors, reward, settings, job, held)) return nb::none();
    std::unique_ptr<char[]> history;
    if (!allocate_history(job, history)) return nb::none();
    Outputs<T> results(outputs, reward, out);
    if (!results.ready()) return nb::none();
    job.first = results.first;
    job.second = results.second;
    {
        MaybeReleased released(job.steps * job.columns * int64_t{5 * sizeof(T)}, kScanReleaseBytes);
        kernel(job);
    }
    return results.result();
}

struct Kernel {  // the same estimator for both dtypes
    Kernels<float>::Kernel f32;
    Kernels<double>::Kernel f64;
};

nb::object estimate(Kernel kernel, int outputs, const Tensors& tensors, const Settings& settings, nb::handle out) {
    Array reward;
    if (out.is_none() && any_buffer(tensors)) return nb::none();
    if (!conversion().read(tensors.reward.ptr(), reward) || reward.ndim == 0 || !is_float(reward.dtype)) return nb::none();
    return reward.dtype.bits == 32 ? estimate_as<float>(kernel.f32, outputs, tensors, reward, settings, out)
                                   : estimate_as<double>(kernel.f64, outputs, tensors, reward, settings, out);
}

nb::object gae(nb::handle reward, nb::handle value, nb::handle next_value, nb::handle terminated, nb::handle truncated,
               nb::handle mask, nb::handle gamma, nb::handle lam, nb::handle out) {
    const Tensors tensors{reward, value, next_value, {}, terminated, truncated, mask};
    Settings settings;
    if (!fraction(gamma, settings.gamma) || !fraction(lam, settings.lam)) return nb::none();
    return estimate({table().f32.gae, table().f64.gae}, 2, tensors, settings, out);
}

nb::object lambda_return(nb::handle reward, nb::handle next_value, nb::handle terminated, nb::handle truncated,
                         nb::handle mask, nb::handle gamma, nb::handle lam, nb::handle out) {
    const Tensors tensors{reward, {}, next_value, {}, terminated, truncated, mask};
    Settings settings;
    if (!fraction(gamma, settings.gamma) || !fraction(lam, settings.lam)) return nb::none();
    return estimate({table().f32.lambda_return, table().f64.lambda_return}, 1, tensors, settings, out);
}

nb::object n_step_return(nb::handle reward, nb::handle next_value, nb::handle terminated, nb::handle truncated,
                         nb::handle mask, nb::handle gamma, nb::handle n, nb::handle out) {
    const Tensors tensors{reward, {}, next_value, {}, terminated, truncated, mask};
    Settings settings;
    double steps = 0;
    if (!fraction(gamma, settings.gamma) || !PyLong_CheckExact(n.ptr()) || !positive(n, steps)) return nb::none();
    Array array;
    if (!conversion().read(reward.ptr(), array) || array.ndim == 0) return nb::none();
    if (steps >= static_cast<double>(array.shape[0])) {  // the last row cuts every window: Monte-Carlo
        settings.lam = 1;
        return estimate({table().f32.lambda_return, table().f64.lambda_return}, 1, tensors, settings, out);
    }
    settings.n = static_cast<int64_t>(steps);
    return estimate({table().f32.n_step_return, table().f64.n_step_return}, 1, tensors, settings, out);
}

nb::object vtrace(nb::handle ratio, nb::handle reward, nb::handle value, nb::handle next_value, nb::handle terminated,
                  nb::handle truncated, nb::handle mask, nb::handle gamma, nb::handle lam, nb::handle rho_bar,
                  nb::handle c_bar, nb::handle out) {
    const Tensors tensors{reward, value, next_value, ratio, terminated, truncated, mask};
    Settings settings;
    if (!fraction(gamma, settings.gamma) || !fraction(lam, settings.lam) || !positive(rho_bar, settings.rho_bar) ||
        !positive(c_bar, settings.c_bar))
        return nb::none();
    return estimate({table().f32.vtrace, table().f64.vtrace}, 2, tensors, settings, out);
}

// Every argument may be None: Python explains what does not fit.
template <class... Args>
void define(nb::module_& m, const char* name, nb::object (*function)(Args...)) {
    m.def(name, function, (static_cast<void>(sizeof(Args)), nb::arg().none())...);
}

}  // namespace

void bind_estimators(nb::module_& m) {
    define(m, "gae", gae);
    define(m, "lambda_return", lambda_return);
    define(m, "n_step_return", n_step_return);
    define(m, "vtrace", vtrace);
    m.def("set_avx2", &scan::use_avx2);
}

}  // namespace relive::bind
