"""The native core takes the state of a ring as arrays by name."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from relive import kernels
from relive.replay.ring import TRANSITION

pytestmark = pytest.mark.skipif(kernels.native_core() is None, reason="this install has no native core (no compiler)")

SLOTS, ENVS = 5, 2
PER_ENV = (ENVS,)
PER_SLOT = (SLOTS, ENVS)
SHAPES = {
    "kind": (PER_SLOT, torch.uint8),
    "first": (PER_SLOT, torch.bool),
    "head": (PER_ENV, torch.int64),
    "open": (PER_ENV, torch.bool),
    "resetting": (PER_ENV, torch.bool),
    "count": (PER_ENV, torch.int64),
    "floor": (PER_ENV, torch.int64),
}
OPTIONAL_SHAPES = {"journal": (PER_ENV, torch.int64), "row_checksums": ((*PER_SLOT, 2), torch.int64)}


def make_zeros(shapes: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}


def make_columns() -> list[torch.Tensor]:
    """Return columns of obs, reward, terminated and truncated."""
    dtypes = (torch.float32, torch.float32, torch.bool, torch.bool)
    return [torch.zeros(SLOTS, ENVS, dtype=dtype) for dtype in dtypes]


def make_ring(state: dict[str, Any], rewritable: list[int] | None = None, columns: Any = None) -> Any:
    columns = make_columns() if columns is None else columns
    return kernels.native_core().RingMemory(
        columns, [None] * 4, [0], [], rewritable or [], state, SLOTS, False, False, False, 1, 2, 3
    )


def make_step(t: int) -> tuple[Any, ...]:
    """Return the arguments of a write: in both environments observation t leads to t + 1."""
    obs, ends = torch.full((ENVS,), float(t)), torch.zeros(ENVS, dtype=torch.bool)
    leaves, nexts = (obs, obs, ends, ends), (obs + 1,)
    return leaves, nexts, None, 1, False, None


def test_arrays_by_name_are_written_whatever_their_order() -> None:
    state = make_zeros(SHAPES)
    ring = make_ring(dict(reversed(state.items())))
    assert [ring.write(*make_step(t)) for t in range(2)] == [-1, -1]
    assert state["head"].tolist() == [2, 2]
    assert state["count"].tolist() == [2, 2]
    assert (state["kind"] == TRANSITION).nonzero().tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert state["first"][0].tolist() == [True, True]
    assert state["open"].tolist() == [True, True]


def test_arrays_that_only_durable_memory_keeps_are_written_too() -> None:
    state = make_zeros(SHAPES | OPTIONAL_SHAPES)
    ring = make_ring(state)
    assert [ring.write(*make_step(t)) for t in (0, 1, 7)] == [-1, -1, -1]
    assert state["row_checksums"].count_nonzero() > 0


def test_arrays_that_only_durable_memory_keeps_may_be_none_or_missing() -> None:
    for optional_arrays in ({}, {"journal": None, "row_checksums": None}):
        state = make_zeros(SHAPES)
        assert make_ring(state | optional_arrays).write(*make_step(0)) == -1
        assert state["head"].tolist() == [1, 1]


@pytest.mark.parametrize("name", SHAPES)
def test_a_missing_array_is_named(name: str) -> None:
    state = make_zeros(SHAPES)
    del state[name]
    with pytest.raises(ValueError, match=f"state: expected an array {name}, got none"):
        make_ring(state)


def test_an_unknown_array_is_named() -> None:
    with pytest.raises(ValueError, match="state: .* got heads"):
        make_ring(make_zeros(SHAPES | {"heads": (PER_ENV, torch.int64)}))


@pytest.mark.parametrize("name", [*SHAPES, *OPTIONAL_SHAPES])
def test_an_array_of_another_size_is_named(name: str) -> None:
    state = make_zeros(SHAPES | OPTIONAL_SHAPES)
    state[name] = state[name][:-1].contiguous()
    with pytest.raises(ValueError, match=f"{name}: expected .* elements"):
        make_ring(state)


def test_the_ring_keeps_its_arrays_alive_when_the_caller_changes_its_dict() -> None:
    state = make_zeros(SHAPES)
    arrays = [weakref.ref(array) for array in state.values()]
    ring = make_ring(state)
    state.clear()
    assert all(array() is not None for array in arrays)
    assert ring.write(*make_step(0)) == -1
