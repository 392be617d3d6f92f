"""Assignments to the attributes of the adapters' buffers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from relive.compat.views import WriteThroughDict, copy_into_memory
from relive.errors import SchemaError


def make_tensors(number: float) -> Any:
    return {"a": torch.full((2, 3), number), "b": torch.full((2,), int(number))}


@pytest.mark.parametrize(
    ("memory", "value"),
    [
        (torch.zeros(2), [1, 2]),
        (torch.zeros(2), np.array([1.0, 2.0])),
        (torch.zeros(2, dtype=torch.uint8), torch.tensor([0.0, 255.0])),
        (torch.zeros(2, dtype=torch.bool), torch.tensor([0, 1])),
        (np.zeros(2, np.float32), torch.tensor([1, 2])),
        (np.zeros(2, np.int8), np.array([-128.0, 127.0])),
    ],
)
def test_equal_numbers_of_another_type_are_written(memory: Any, value: Any) -> None:
    copy_into_memory("x", memory, value)
    assert memory.tolist() == list(value)


KINDS: dict[str, Any] = {
    "dict": dict,
    "TensorDict": lambda parts: TensorDict(parts, [2]),
    "tuple": lambda parts: tuple(parts.values()),
    "list": lambda parts: list(parts.values()),
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_every_part_of_a_tree_is_written_or_the_assignment_is_refused(make: Any) -> None:
    memory, value = make(make_tensors(0)), make(make_tensors(7))
    copy_into_memory("x", memory, value)
    parts = memory if isinstance(memory, tuple | list) else memory.values()
    assert [part.unique().tolist() for part in parts] == [[7], [7]]
    for other in ({"a": torch.zeros(2, 3)}, {**make_tensors(1), "c": torch.zeros(2)}, [torch.zeros(2, 3)], None):
        with pytest.raises(SchemaError, match=r"x: expected the keys \[.*\], got .* Assign every part"):
            copy_into_memory("x", memory, other)


@pytest.mark.parametrize(
    ("memory", "value", "message"),
    [
        (torch.zeros(2, dtype=torch.int64), torch.tensor([1.0, 0.5]), "numbers of torch.int64, got others"),
        (torch.zeros(1, dtype=torch.uint8), torch.tensor([256]), "numbers of torch.uint8, got others, of torch.int64"),
        (np.zeros(1, np.uint8), np.array([256]), "numbers of uint8, got others, of int64"),
        (np.zeros(1, np.bool_), np.array([2]), "numbers of bool, got others, of int64"),
        (torch.zeros(2, 1), torch.zeros(2), r"shape \(2, 1\), got \(2,\). Assign every step"),
        (np.zeros((2, 1)), 1.0, r"shape \(2, 1\), got \(\). Assign every step"),
        (None, torch.zeros(2), "a field of this buffer, got one without memory"),
    ],
)  # fmt: skip
def test_numbers_that_would_change_and_other_shapes_are_refused(memory: Any, value: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=f"x: expected {message}"):
        copy_into_memory("x", memory, value)
    assert memory is None or not memory.any()


def test_assigning_to_a_key_of_a_dict_writes_the_memory() -> None:
    memory = make_tensors(0)
    view = WriteThroughDict("x", memory)
    view["a"] = torch.ones(2, 3)
    view.update(b=[2, 2])
    view["a"] *= 3
    assert memory["a"].eq(3).all()
    assert memory["b"].eq(2).all()
    with pytest.raises(KeyError, match="x: expected one of"):
        view["c"] = torch.zeros(2)


@pytest.mark.parametrize("memory", [torch.zeros(2), np.zeros(2)], ids=["torch", "numpy"])
@pytest.mark.parametrize("value", [None, "x", object()], ids=["None", "text", "object"])
def test_values_without_numbers_are_refused(memory: Any, value: Any) -> None:
    with pytest.raises(SchemaError, match=r"x: expected .*shape \(2,\), got"):
        copy_into_memory("x", memory, value)


def test_a_part_that_does_not_fit_leaves_the_other_parts_unchanged() -> None:
    memory = make_tensors(0)
    with pytest.raises(SchemaError, match=r"x\.b: expected shape \(2,\)"):
        copy_into_memory("x", memory, {"a": torch.ones(2, 3), "b": torch.ones(5)})
    assert not memory["a"].any()


def test_the_message_names_the_type_of_a_number_that_is_assigned_to_a_dict() -> None:
    with pytest.raises(SchemaError, match=r"expected the keys \['a', 'b'\], got int"):
        copy_into_memory("x", make_tensors(0), 0)
