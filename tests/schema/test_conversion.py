"""Values that a caller may pass for a field, and messages for refused values."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import relive as rl
from relive import Field, Prioritized, ReplayBuffer, RolloutBuffer, SchemaError
from relive.schema.conversion import convert
from relive.schema.fields import DTYPES

CPU = torch.device("cpu")
EXPECTED = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


class Subclass(torch.Tensor):
    pass


ACCEPTED: dict[str, Any] = {
    "float32": EXPECTED.clone(),
    "float64": EXPECTED.double(),
    "float16": EXPECTED.half(),
    "bfloat16": EXPECTED.bfloat16(),
    "int64": EXPECTED.long(),
    "uint8": EXPECTED.to(torch.uint8),
    "a gradient": EXPECTED.clone().requires_grad_(),
    "a parameter": torch.nn.Parameter(EXPECTED.clone()),
    "a subclass": EXPECTED.clone().as_subclass(Subclass),
    "transposed": EXPECTED.T.contiguous().T,
    "strided": torch.stack([EXPECTED, EXPECTED], -1)[..., 0],
    "negated lazily": torch._neg_view(-EXPECTED),
    "the imaginary part of a conjugate": torch.complex(EXPECTED, -EXPECTED).conj().imag,
    "numpy": EXPECTED.numpy(),
    "numpy float64": EXPECTED.double().numpy(),
    "numpy negative strides": EXPECTED.numpy()[::-1].copy()[::-1],
    "numpy fortran order": np.asfortranarray(EXPECTED.numpy()),
    "numpy read-only": read_only(EXPECTED.numpy().copy()),
    "numpy big-endian": EXPECTED.numpy().astype(">f4"),
    "numpy long double": EXPECTED.numpy().astype(np.longdouble),
    "lists": EXPECTED.tolist(),
    "lists of ints": [[1, 2, 3], [4, 5, 6]],
    "a tuple of arrays": tuple(EXPECTED.numpy()),
    "a list of tensors": list(EXPECTED),
}


@pytest.mark.parametrize("value", ACCEPTED.values(), ids=ACCEPTED)
def test_what_means_the_same_is_accepted(value: Any) -> None:
    tensor = convert("obs", Field(3), value, (2,), CPU)
    assert type(tensor) is torch.Tensor
    assert not tensor.requires_grad
    assert tensor.is_contiguous()
    assert tensor.dtype == torch.float32
    assert torch.equal(tensor, EXPECTED)


REFUSED: dict[str, tuple[Any, str]] = {
    "one axis more": (np.zeros((2, 3, 1)), "shape (2, 3) for 2 environments, got (2, 3, 1). Squeeze the last axis."),
    "one axis more in front": (
        np.zeros((1, 2, 3)),
        "shape (2, 3) for 2 environments, got (1, 2, 3). Squeeze the first",
    ),
    "one environment": (
        np.zeros(3),
        "shape (2, 3) for 2 environments, got (3,). Pass a row for each of the environments.",
    ),
    "transposed": (np.zeros((3, 2)), "shape (2, 3) for 2 environments, got (3, 2). Pass the declared shape."),
    "a number": (1.0, "shape (2, 3) for 2 environments, got ()."),
    "complex": (np.zeros((2, 3), complex), "float32, got complex128."),
    "objects": (np.full((2, 3), None), "numbers or bools, got dtype object."),
    "strings": ([["a"] * 3] * 2, "numbers or bools, got dtype <U1."),
    "ragged": ([[1.0], [1.0, 2.0]], "an array, got list."),
    "nothing": (None, "a value, got None. Pass the field or stage it."),
    "another device": (torch.zeros(2, 3, device="meta"), "a tensor on cpu, got meta. Call .to('cpu')."),
    "eight-bit floats": (torch.zeros(2, 3).to(torch.float8_e4m3fn), "numbers or bools, got torch.float8_e4m3fn."),
    "sparse": (torch.zeros(2, 3).to_sparse(), "a dense tensor, got torch.sparse_coo. Call .to_dense()."),
}


@pytest.mark.parametrize(("value", "words"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused_with_a_remedy(value: Any, words: str) -> None:
    with pytest.raises(SchemaError) as caught:
        convert("obs", Field(3), value, (2,), CPU)
    assert str(caught.value).startswith(f"obs: expected {words}")


@given(st.sampled_from(list(DTYPES)), st.sampled_from(list(DTYPES)))
def test_a_cast_is_accepted_exactly_when_it_keeps_the_meaning(have: torch.dtype, want: torch.dtype) -> None:
    rank = {torch.bool: 0}
    kinds = [rank.get(d, 3 if d.is_complex else 2 if d.is_floating_point else 1) for d in (have, want)]
    value = torch.ones(2).to(have)
    if kinds[0] <= kinds[1]:
        assert torch.equal(convert("x", Field((), want), value, (2,), CPU), torch.ones(2).to(want))
    else:
        with pytest.raises(SchemaError, match="^x: expected"):
            convert("x", Field((), want), value, (2,), CPU)


@pytest.mark.parametrize(
    ("value", "dtype"), [(256, torch.uint8), (-1, torch.uint8), (2**31, torch.int32), (-129, torch.int8)]
)
def test_an_integer_that_does_not_fit_is_refused(value: int, dtype: torch.dtype) -> None:
    with pytest.raises(SchemaError, match=r"expected integers in \[.*Declare a wider dtype"):
        convert("x", Field((), dtype), np.array([value, 0]), (2,), CPU)


def test_the_remedy_of_a_common_mistake_is_what_to_write() -> None:
    replay = rl.ReplayBuffer(10, obs=1, action=())
    replay.add([0], 0.0, 1.0, terminated=False, truncated=False, next_obs=[1])
    rollout = rl.RolloutBuffer(1, 2, obs=1, action=(), autoreset="SAME_STEP")
    rollout.add(np.zeros((2, 1)), [0, 0], [1, 1], [False] * 2, [False] * 2, value=[0, 0])
    for call, remedy in (
        (lambda: replay[0:3], r"index: .* got slice.* replay\.ids\(\)"),
        (lambda: replay["obs"], r"index: .* got 'obs'.* replay\[ids\]\[name\]"),
        (lambda: rl.ReplayBuffer.for_env("CartPole-v1", 10), r"for_env: .* got 'CartPole-v1'\. Pass gym\.make"),
        (lambda: rl.ReplayBuffer(10, 1, (), extra={"h": rl.Carry}), r"extra\.h: .*Pass Carry\(shape\)"),  # pyright: ignore[reportArgumentType]
        (lambda: rollout.compute_advantage([0, 0], final_value=[0, 0, 0]), r"Pass critic\(rollout\.final_obs\)"),
        (lambda: replay.add([1], 0.0, 1.0, False, False, [2], env_ids=[0]), "Leave env_ids out"),
    ):
        with pytest.raises(rl.SchemaError, match=remedy):
            call()


def test_one_environment_without_an_axis_takes_numbers() -> None:
    assert convert("x", Field(), 1, (), CPU).tolist() == 1.0
    with pytest.raises(SchemaError, match=r"shape \(\), got \(1,\)"):
        convert("x", Field(), [1.0], (), CPU)


def test_no_ids_at_all_are_ids_of_no_rows() -> None:
    replay = ReplayBuffer(8, 1, (), sampler=Prioritized())
    replay.add([0.0], 0.0, 0.0, False, False, [1.0])
    assert replay.update_priority(np.arange(3)[np.zeros(3, np.bool_)], np.zeros(0)) == 0


NUMBERS = st.one_of(
    st.booleans(),
    st.integers(-3, 300),
    st.sampled_from([2**31, -(2**31) - 1, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64]),
    st.floats(width=64),
    st.sampled_from([np.float64(0.1), np.float32(0.1), np.int64(7), np.bool_(True), None, "x", [1.0]]),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool])
@given(rows=st.lists(st.lists(NUMBERS, min_size=2, max_size=2), min_size=2, max_size=2), as_tuples=st.booleans())
def test_numbers_in_lists_are_stored_as_they_are_converted(dtype: torch.dtype, rows: Any, as_tuples: bool) -> None:
    """The native core agrees with `convert`: both buffers store the converted numbers, or refuse the same values."""
    given_ = tuple(map(tuple, rows)) if as_tuples else rows
    field, flat, ends = Field(2, dtype), np.zeros(2, np.float32), np.zeros(2, bool)
    replay = ReplayBuffer(4, obs=(), action=field, num_envs=2)
    rollout = RolloutBuffer(1, 2, obs=(), action=field)
    try:
        expected = convert("action", field, given_, (2,), CPU)
    except SchemaError as refused:
        with pytest.raises(SchemaError, match=re.escape(str(refused))):
            replay.add(flat, given_, flat, ends, ends, flat + 1)
        with pytest.raises(SchemaError, match=re.escape(str(refused))):
            rollout.add(flat, given_, flat, ends, ends)
        return
    replay.add(flat, given_, flat, ends, ends, flat + 1)
    rollout.add(flat, given_, flat, ends, ends)
    for stored in (replay.columns["action"][0], rollout["action"][0]):
        assert torch.equal(stored.contiguous().view(torch.uint8), expected.view(torch.uint8))
