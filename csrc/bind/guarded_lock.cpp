// GuardedLock: a re-entrant lock of threads that a signal cannot lose. complete: see completion.hpp.
#include <nanobind/nanobind.h>

#include <utility>

#include "completion.hpp"

namespace relive::bind {
namespace {

// `lock` is a threading.RLock. Whoever has taken it calls `guard` first, and has not taken it if that raises. Entering and
// leaving are native calls: an exception from a signal handler comes before or after, never between lock and promise.
class GuardedLock {
public:
    GuardedLock(const nb::object& lock, nb::callable guard)
        : acquire_(lock.attr("acquire")), release_(lock.attr("release")), guard_(std::move(guard)) {}

    void enter() {
        acquire_();
        try {
            guard_();
        } catch (...) {
            exit();
            throw;
        }
    }

    void exit() { release_(); }

private:
    nb::object acquire_, release_, guard_;
};

}  // namespace

void bind_guarded_lock(nb::module_& m) {
    nb::class_<GuardedLock>(m, "GuardedLock")
        .def(nb::init<nb::object, nb::callable>())
        .def("__enter__", &GuardedLock::enter)
        .def("__exit__", [](GuardedLock& self, nb::args) { self.exit(); });
    m.def("complete", [](nb::callable change) { complete(change); });
}

}  // namespace relive::bind
