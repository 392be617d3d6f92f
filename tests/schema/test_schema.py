"""Declarations of fields, in every form that a user may write."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

import relive as rl
from relive import Carry, Field, SchemaError
from relive.schema.fields import Schema, declare_fields

spaces = gym.spaces
DECLARED: dict[str, tuple[Any, Any]] = {
    "an int is a vector length": (2, Field((2,))),
    "a numpy int too": (np.int64(2), Field((2,))),
    "an empty tuple is a number": ((), Field(())),
    "a tuple of ints is a shape": ((2, 3), Field((2, 3))),
    "a torch size is a shape": (torch.Size([2, 3]), Field((2, 3))),
    "a field is itself": (Field(3, torch.uint8), Field((3,), torch.uint8)),
    "a numpy dtype is understood": (Field(3, np.int16), Field((3,), torch.int16)),
    "a box keeps its dtype": (spaces.Box(0, 255, (4, 4), np.uint8), Field((4, 4), torch.uint8)),
    "a float64 box becomes float32": (spaces.Box(0, 1, (4,), np.float64), Field((4,))),
    "a discrete space is an int64 number": (spaces.Discrete(5), Field((), torch.int64)),
    "a multi-discrete space": (spaces.MultiDiscrete([2, 3]), Field((2,), torch.int64)),
    "a multi-binary space": (spaces.MultiBinary((2, 3)), Field((2, 3), torch.int8)),
    "a dict nests": ({"a": 2, "b": {"c": ()}}, {"a": Field(2), "b": {"c": Field()}}),
    "a tuple of vectors nests by number": ((Field(3), Field(4)), {"0": Field(3), "1": Field(4)}),
    "a dict space": (spaces.Dict(a=spaces.Discrete(2)), {"a": Field((), torch.int64)}),
    "a tuple space": (spaces.Tuple([spaces.Discrete(2)]), {"0": Field((), torch.int64)}),
}


@pytest.mark.parametrize(("declaration", "expected"), DECLARED.values(), ids=DECLARED)
def test_declarations(declaration: Any, expected: Any) -> None:
    assert declare_fields("obs", declaration) == expected


REFUSED: dict[str, Any] = {
    "a bool": True,
    "a float": 1.5,
    "zero": 0,
    "a negative size": (3, -1),
    "a string": "obs",
    "none": None,
    "an empty dict": {},
    "a name that is no string": {1: 2},
    "a list": [3],
    "text": spaces.Text(4),
    "a sequence space": spaces.Sequence(spaces.Discrete(2)),
    "a nested mistake": {"a": {"b": -1}},
}


@pytest.mark.parametrize("declaration", REFUSED.values(), ids=REFUSED)
def test_what_is_no_declaration_is_refused_by_name(declaration: Any) -> None:
    with pytest.raises(SchemaError, match=r"^obs(\.a\.b)?: expected .*, got .*\. .*\.$"):
        declare_fields("obs", declaration)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, np.object_, "nonsense", None.__class__])
def test_a_dtype_that_cannot_be_stored_is_refused(dtype: Any) -> None:
    with pytest.raises(SchemaError, match="one of the dtypes"):
        Field(2, dtype)


def test_fields_are_equal_by_kind_shape_and_dtype() -> None:
    assert Field(2) == Field((2,), torch.float32)
    assert Field(2) != Field(2, torch.float64)
    assert Carry(2) != Field(2)
    assert hash(Field(2)) == hash(Field((2,)))


def test_leaves_come_in_the_order_of_declaration() -> None:
    schema = Schema({"obs": {"b": Field(1), "a": {"c": Field(2)}}, "reward": Field()})
    assert schema.paths == (("obs", "b"), ("obs", "a", "c"), ("reward",))
    assert schema.leaf_indices == {"obs": (0, 1), "reward": (2,)}
    assert schema.flatten("obs", {"a": {"c": "C"}, "b": "B"}) == ("B", "C")
    assert schema.flatten("obs", None) == (None, None)
    assert not schema.is_flat


@pytest.mark.parametrize(
    "value", [{"b": 1}, {"b": 1, "a": 2, "z": 3}, 5, np.zeros(3)], ids=["few", "many", "int", "array"]
)
def test_other_keys_than_the_declared_ones_are_refused(value: Any) -> None:
    schema = Schema({"obs": {"b": Field(1), "a": Field(1)}})
    with pytest.raises(SchemaError, match=r"^obs: expected the keys \['a', 'b'\], got"):
        schema.flatten("obs", value)


@pytest.mark.parametrize("extra", ["x", [1], 5], ids=["text", "list", "int"])
def test_extra_fields_that_are_no_dict_are_refused(extra: Any) -> None:
    for make in (
        lambda: rl.ReplayBuffer(4, 1, 1, extra=extra),
        lambda: rl.RolloutBuffer(4, 1, obs=1, action=1, extra=extra),
        lambda: rl.DistillationBuffer(4, 1, 1, extra=extra),
    ):
        with pytest.raises(rl.SchemaError, match="extra: expected a dict of fields by name, got"):
            make()


def test_attached_tensors_that_are_no_dict_are_refused() -> None:
    rollout = rl.RolloutBuffer(4, 1, obs=1, action=1)
    with pytest.raises(rl.SchemaError, match="attach: expected a dict of tensors by name, got int"):
        rollout.attach(5)  # pyright: ignore[reportArgumentType]
