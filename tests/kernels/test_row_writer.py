"""A row is written whole or not at all, on every backend."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from relive import Field, SchemaError, kernels
from relive.kernels.reader import make_reader
from relive.rollout.storage import Storage
from relive.schema.fields import DTYPES, Schema
from relive.storage import Memory

ROWS, ENVS = 3, 2


def make(*fields: Field, num_envs: int | None = ENVS, **optional: Field) -> Storage:
    schema = Schema({**{f"x{i}": field for i, field in enumerate(fields)}, **optional})
    return Storage(schema, ROWS, num_envs, Memory.of("cpu"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_stored_exactly(backend: str, dtype: torch.dtype) -> None:
    storage = make(Field(3, dtype), Field((), dtype))
    values = torch.arange(6).view(2, 3).to(dtype), torch.arange(2).to(dtype)
    storage.write_row(1, values)
    rows = make_reader(storage.tensors, 2, ROWS * ENVS).take(torch.tensor([ENVS, ENVS + 1]), 0, 2)
    for column, value, read in zip(storage.tensors, values, rows, strict=True):
        assert torch.equal(column[1], value)
        assert torch.equal(read, value)
        assert not column[0].any()
        assert not column[2].any()


def test_numpy_and_torch_leave_the_same_bytes(backend: str) -> None:
    storage = make(Field(3), Field((), torch.bool))
    flags = np.array([True, False])
    for row, convert in enumerate((np.asarray, torch.as_tensor)):
        storage.write_row(row, (convert(np.arange(6.0).reshape(2, 3) / 3), convert(flags)))
    assert torch.equal(storage.tensors[0][0], storage.tensors[0][1])
    assert torch.equal(storage.tensors[1][0], storage.tensors[1][1])


def test_numbers_fill_a_single_environment(backend: str) -> None:
    storage = make(Field(), Field((), torch.bool), Field((), torch.int64), Field((), torch.float64), num_envs=None)
    storage.write_row(0, (np.float64(0.5), True, 7, 0.1))
    storage.write_row(1, (1, np.bool_(True), np.int32(7), np.float32(0.5)))
    assert [column[:2, 0].tolist() for column in storage.tensors] == [[0.5, 1.0], [True, True], [7, 7], [0.1, 0.5]]


def test_an_optional_field_left_out_is_zero_and_never_stale(backend: str) -> None:
    storage = make(Field(), value=Field(2))
    storage.write_row(0, (np.ones(2), np.ones((2, 2))))
    storage.write_row(0, (np.ones(2), None))
    assert not storage.tensors[1][0].any()
    with pytest.raises(SchemaError, match="x0: expected a value, got None"):
        storage.write_row(0, (None, None))


def test_some_columns_can_be_written_alone(backend: str) -> None:
    storage = make(Field(), Field(), Field())
    storage.write_row(0, (np.ones(2), np.full(2, 2.0)), (2, 0))
    assert [column[0].tolist() for column in storage.tensors] == [[2.0, 2.0], [0.0, 0.0], [1.0, 1.0]]


broken = st.sampled_from(
    [None, np.zeros(3), "text", np.zeros((2, 1)), torch.zeros(2, device="meta"), np.zeros(2, complex)]
)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 3), broken, st.sampled_from(["native", "torch"]))
def test_a_refused_row_leaves_every_column_as_it_was(position: int, wrong: Any, how: str) -> None:
    storage = make(Field(), Field(), Field(), Field())
    good = [np.full(2, float(i + 1)) for i in range(4)]
    storage.write_row(1, tuple(good))
    before = [column.clone() for column in storage.tensors]
    bad: list[Any] = [np.full(2, 9.0) for _ in range(4)]
    bad[position] = wrong
    with kernels.force_torch() if how == "torch" else nullcontext(), pytest.raises(SchemaError, match=f"^x{position}:"):
        storage.write_row(1, tuple(bad))
    assert all(torch.equal(column, old) for column, old in zip(storage.tensors, before, strict=True))


def test_the_torch_path_dispatches_one_copy_per_step() -> None:
    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls += 1
            return func(*args, **(kwargs or {}))

    storage = make(*[Field(3)] * 7)
    leaves = tuple(torch.zeros(2, 3) for _ in range(7))
    with kernels.force_torch():
        storage.write_row(0, leaves)
        with Count() as count:
            storage.write_row(1, leaves)
    assert count.calls <= 2


@pytest.mark.skipif(kernels.native_core() is None, reason="this install has no native core (no compiler)")
def test_the_native_core_checks_its_arguments() -> None:
    native = kernels.native_core()
    column = torch.zeros(3, 2)
    columns = native.Columns([column], [False], 0)
    with pytest.raises(IndexError):
        columns.write(3, (torch.zeros(2),))
    with pytest.raises(IndexError):
        columns.write(-1, (torch.zeros(2),))
    with pytest.raises(ValueError, match="leaves: expected 1, got 2"):
        columns.write(0, (torch.zeros(2), torch.zeros(2)))
    with pytest.raises(IndexError):
        columns.write(0, (torch.zeros(2),), (1,))
    for rowless in (torch.zeros(0, 2), torch.zeros(())):
        with pytest.raises(ValueError, match="expected at least one row"):
            native.Columns([rowless, column], [False, False], 0)
    gather = native.Gather([column], [0], 6)
    for index in ([6], [-1], [2**40]):
        with pytest.raises(IndexError):
            gather.take(torch.tensor(index), 0, 1)
    with pytest.raises(IndexError):
        gather.take(torch.tensor([0]), 0, 2)
    with pytest.raises(ValueError, match="int64"):
        gather.take(torch.tensor([0.0]), 0, 1)
    with pytest.raises(ValueError, match="items: expected at most 6, got 7"):
        native.Gather([column], [0], 7)
    with pytest.raises(ValueError, match="expected the shape and dtype of the source"):
        gather.take_into(torch.tensor([0]), 0, 1, [torch.zeros(2)])
