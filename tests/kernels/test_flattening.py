"""Steps are flattened natively and by the schema, with the same leaves."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relive import kernels
from relive.errors import SchemaError
from relive.kernels.steps import StepFlattener
from relive.schema.fields import Field, Schema, Tree, declare_fields

NAMES = ("obs", "action", "reward")
BACKENDS = ["native", "torch"] if kernels.native_core() is not None else ["torch"]

trees = st.recursive(
    st.just(Field()),
    lambda parts: st.one_of(
        st.dictionaries(st.text("abc", min_size=1, max_size=2), parts, min_size=1, max_size=3),
        st.lists(parts, min_size=1, max_size=3).map(lambda each: {str(i): part for i, part in enumerate(each)}),
    ),
    max_leaves=6,
)


def make_flattening(schema: Schema, backend: str, positional: int) -> StepFlattener:
    if backend == "native":
        return StepFlattener(schema, schema.names[:positional], schema.names[positional:])
    with kernels.force("torch"):
        return StepFlattener(schema, schema.names[:positional], schema.names[positional:])


def draw_value(draw: st.DrawFn, tree: Tree) -> Any:
    if isinstance(tree, Field):
        return object()
    parts = {name: draw_value(draw, part) for name, part in draw(st.permutations(list(tree.items())))}
    kinds: list[Any] = [dict, OrderedDict, UserDict]
    if all(str(i) in tree for i in range(len(tree))):
        kinds += [
            lambda named: tuple(named[str(i)] for i in range(len(named))),
            lambda named: [named[str(i)] for i in range(len(named))],
        ]
    return draw(st.sampled_from(kinds))(parts)


@pytest.mark.parametrize("backend", BACKENDS)
@given(st.data())
def test_the_leaves_equal_those_of_the_schema(backend: str, data: st.DataObject) -> None:
    schema = Schema({name: data.draw(trees, name) for name in NAMES})
    positional = data.draw(st.integers(0, 3))
    values = [data.draw(st.none() | st.composite(draw_value)(schema.trees[name])) for name in NAMES]
    given_names = [name for name in NAMES[positional:] if data.draw(st.booleans(), f"pass {name}")]
    extra = {name: values[NAMES.index(name)] for name in given_names}
    values[positional:] = [extra.get(name) for name in NAMES[positional:]]

    leaves = make_flattening(schema, backend, positional)(tuple(values[:positional]), extra)

    expected = [leaf for name, value in zip(NAMES, values, strict=True) for leaf in schema.flatten(name, value)]
    assert all(leaf is other for leaf, other in zip(leaves, expected, strict=True))


WRONG_VALUES: dict[str, tuple[Any, str]] = {
    "a key is missing": ({"a": 1}, r"obs: expected the keys \['a', 'b'\], got the keys \['a'\]"),
    "a key is too many": ({"a": 1, "b": {"0": 1, "1": 2}, "c": 3}, r"got the keys \['a', 'b', 'c'\]"),
    "a key is another": ({"a": 1, "c": {"0": 1, "1": 2}}, r"got the keys \['a', 'c'\]"),
    "a leaf is None": ({"a": None, "b": (1, 2)}, r"obs\.a: expected a value, got None"),
    "an inner field is None": ({"a": 1, "b": None}, r"obs\.b: expected the keys \['0', '1'\], got None"),
    "a tuple is too short": ({"a": 1, "b": (1,)}, r"obs\.b: expected the keys \['0', '1'\], got the keys \['0'\]"),
    "a tuple is given for names": ((1, (1, 2)), r"obs: expected the keys \['a', 'b'\], got the keys \['0', '1'\]"),
    "an array is given": (7, r"obs: expected the keys \['a', 'b'\], got int"),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("value", "message"), WRONG_VALUES.values(), ids=WRONG_VALUES)
def test_a_value_that_is_not_as_declared_is_explained(backend: str, value: Any, message: str) -> None:
    schema = Schema({"obs": declare_fields("obs", {"a": (), "b": (Field(), Field())})})
    with pytest.raises(SchemaError, match=message):
        make_flattening(schema, backend, 1)((value,), {})


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_unknown_name_is_explained(backend: str) -> None:
    schema = Schema({"obs": Field(), "cost": Field()})
    with pytest.raises(SchemaError, match="prize: expected a declared field"):
        make_flattening(schema, backend, 1)((1,), {"prize": 2})


@pytest.mark.parametrize("backend", BACKENDS)
def test_items_of_a_dict_subclass_are_read_by_its_methods(backend: str) -> None:
    class Doubled(dict[str, int]):
        def __getitem__(self, key: str) -> int:
            return 2 * super().__getitem__(key)

    schema = Schema({"obs": declare_fields("obs", {"a": (), "b": ()})})
    assert make_flattening(schema, backend, 1)((Doubled(a=1, b=2),), {}) == (2, 4)


@pytest.mark.skipif(kernels.native_core() is None, reason="there is no native core")
def test_plain_dicts_are_flattened_natively() -> None:
    flattener = kernels.native_core().Flattener({"obs": {"a": None, "b": {"0": None, "1": None}}}, {"cost": None})
    assert flattener.flatten(({"b": (2, 3), "a": 1},), {"cost": 4}) == (1, 2, 3, 4)
    assert flattener.flatten((None,), {}) == (None, None, None, None)
    assert flattener.flatten(({"a": 1},), {}) is None
    assert flattener.flatten(({"a": 1, "b": [2, 3]},), {"prize": 4}) is None
    assert flattener.flatten((), {}) is None
