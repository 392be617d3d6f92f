// Flattener: collects the leaves of a step from nested dicts and tuples by their declared keys.
#include <nanobind/nanobind.h>

#include <stdexcept>
#include <vector>

namespace nb = nanobind;

namespace relive::bind {
namespace {

// A declared field: a leaf, or a group of nested fields.
struct Field {
    nb::object key;
    std::vector<Field> parts;
    // Whether the nested fields are named "0", "1", …; callers may then pass a tuple or a list too.
    bool numbered = true;
    Py_ssize_t leaves = 1;
};

// Calls Py_LeaveRecursiveCall at the end of its scope, after a successful Py_EnterRecursiveCall.
struct Depth {
    ~Depth() { Py_LeaveRecursiveCall(); }
};

Field read_field(nb::handle key, nb::handle tree) {
    Field field{nb::borrow(key), {}, true, 1};
    if (tree.is_none()) return field;
    field.leaves = 0;
    if (Py_EnterRecursiveCall(" in a tree of fields") != 0) throw nb::python_error();
    const Depth depth;
    for (auto [name, part] : nb::cast<nb::dict>(tree)) {
        field.numbered = field.numbered && nb::str(name).equal(nb::str(nb::int_(field.parts.size())));
        field.parts.push_back(read_field(name, part));
        field.leaves += field.parts.back().leaves;
    }
    if (field.parts.empty()) throw std::invalid_argument("fields: expected at least one, got none");
    return field;
}

class Flattener {
public:
    // `positional` and `named` map field names to None for a leaf, or to a dict of nested fields.
    Flattener(nb::dict positional, nb::dict named)
        : ordered_dict_(nb::module_::import_("collections").attr("OrderedDict")) {
        for (auto [name, tree] : positional) positional_.push_back(read_field(name, tree));
        for (auto [name, tree] : named) named_.push_back(read_field(name, tree));
        for (const auto* fields : {&positional_, &named_})
            for (const Field& field : *fields) leaves_ += field.leaves;
    }

    // Return the leaves of all fields as a tuple, with None for each leaf of a field that is None or missing. Returns
    // None if a name or key is not declared, or if a nested value is not a dict, tuple or list.
    nb::object flatten(nb::tuple values, nb::dict named) const {
        Leaves out{nb::steal(PyTuple_New(leaves_))};
        if (values.size() != positional_.size()) return nb::none();
        for (size_t i = 0; i < positional_.size(); ++i)
            if (!collect(PyTuple_GetItem(values.ptr(), static_cast<Py_ssize_t>(i)), positional_[i], out))
                return nb::none();
        Py_ssize_t num_named = 0;
        for (const Field& field : named_) {
            PyObject* value = find(named.ptr(), field);
            if (value) ++num_named;
            if (!collect(value ? value : Py_None, field, out)) return nb::none();
        }
        return num_named == PyDict_Size(named.ptr()) ? out.tuple : nb::none();
    }

private:
    struct Leaves {
        nb::object tuple;
        Py_ssize_t count = 0;
        void add(PyObject* leaf) {
            Py_INCREF(leaf);
            PyTuple_SetItem(tuple.ptr(), count++, leaf);
        }
    };

    static PyObject* find(PyObject* dict, const Field& field) {
        PyObject* value = PyDict_GetItemWithError(dict, field.key.ptr());
        if (!value && PyErr_Occurred()) throw nb::python_error();
        return value;
    }

    bool collect(PyObject* value, const Field& field, Leaves& out) const {
        if (field.parts.empty()) {
            out.add(value);
        } else if (value == Py_None) {
            for (Py_ssize_t i = 0; i < field.leaves; ++i) out.add(Py_None);
        } else {
            return collect_parts(value, field, out);
        }
        return true;
    }

    bool collect_parts(PyObject* value, const Field& field, Leaves& out) const {
        const auto size = static_cast<Py_ssize_t>(field.parts.size());
        const bool is_dict = PyDict_CheckExact(value) || nb::handle(value).type().is(ordered_dict_);
        const bool is_tuple = PyTuple_CheckExact(value), is_list = PyList_CheckExact(value);
        if (is_dict ? PyDict_Size(value) != size
                    : !field.numbered || !(is_tuple || is_list) || PySequence_Size(value) != size)
            return false;
        for (Py_ssize_t i = 0; i < size; ++i) {
            const Field& part = field.parts[i];
            PyObject* inner = nullptr;
            if (is_dict) inner = find(value, part);
            else inner = is_tuple ? PyTuple_GetItem(value, i) : PyList_GetItem(value, i);
            // The item may be missing, because a key with an `__eq__` in Python may have shortened the list.
            if (!inner) PyErr_Clear();
            if (!inner || inner == Py_None) return false;
            if (part.parts.empty()) {
                out.add(inner);
                continue;
            }
            // A reference is held, because a key with an `__eq__` in Python may remove the value from its dict.
            const nb::object held = nb::borrow(inner);
            if (!collect_parts(inner, part, out)) return false;
        }
        return true;
    }

    std::vector<Field> positional_, named_;
    nb::object ordered_dict_;
    Py_ssize_t leaves_ = 0;
};

}

void bind_flattening(nb::module_& m) {
    nb::class_<Flattener>(m, "Flattener").def(nb::init<nb::dict, nb::dict>()).def("flatten", &Flattener::flatten);
}

}
