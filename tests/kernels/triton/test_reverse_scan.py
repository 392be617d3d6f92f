"""Advantages and returns in one launch, against the native core bit for bit.

The tests of the estimators run this kernel too, against written-out recurrences on all layouts that Hypothesis draws.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from relive import kernels
from relive.estimators import gae
from tests.estimators.calls import SETTINGS, call, sample
from tests.kernels.triton.interpreter import in_every_order, interpreted
from tests.kernels.triton.launches import Launches
from tests.strategies import LAYOUTS, laid_out
from tests.tiers import select

RULES = ("gae", "lambda_return", "vtrace")


def rollout(*axes: int, dtype: torch.dtype, layout: str = "contiguous", masked: bool = True) -> dict[str, Any]:
    tensors = sample(*axes, dtype=dtype, ends=0.2, seed=sum(axes))
    if masked:
        tensors["mask"] = torch.rand(*axes, generator=torch.Generator().manual_seed(1)) < 0.8
    return {name: None if x is None else laid_out(x, layout) for name, x in tensors.items()}


@pytest.fixture
def _no_fused_multiply_add() -> Iterator[None]:
    """The native core with a rounding after each operation, where a machine has another instruction set."""
    native = kernels.native()
    if native is None:
        pytest.skip("this install has no native core (no compiler)")
    before = native.set_avx2(True)
    native.set_avx2(False)
    yield
    native.set_avx2(before)


@pytest.mark.usefixtures("_no_fused_multiply_add")
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(
    ("axes", "dtype", "layout"),
    select(
        ((5, 70), torch.float32, "env-major"),
        ((4, 3, 2), torch.float64, "contiguous"),
        of=[
            (axes, dtype, layout)
            for axes in ((1, 1), (5, 70), (4, 3, 2), (7,), (24, 130))
            for dtype in (torch.float32, torch.float64)
            for layout in LAYOUTS
            if layout != "expanded flags" or len(axes) > 2
        ],
    ),
)
def test_the_bits_are_those_of_the_native_core(
    name: str, axes: tuple[int, ...], dtype: torch.dtype, layout: str
) -> None:
    tensors = rollout(*axes, dtype=dtype, layout=layout)
    expected = call(name, tensors, **SETTINGS[name])
    with interpreted():
        found = call(name, tensors, **SETTINGS[name])
    for mine, native in zip(found, expected, strict=True):
        assert mine.dtype == native.dtype
        assert mine.is_contiguous()
        assert torch.equal(mine.view(torch.uint8), native.contiguous().view(torch.uint8))


def test_programs_in_any_order_give_the_same() -> None:
    tensors = rollout(3, 200, dtype=torch.float32)
    with interpreted():
        in_every_order(lambda: call("gae", tensors, **SETTINGS["gae"]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("per_agent", [False, True])
def test_one_launch_whatever_is_given(dtype: torch.dtype, per_agent: bool) -> None:
    tensors = {name: x[..., ::2] for name, x in rollout(4, 6, 4, dtype=dtype, layout="env-major").items()}
    if not per_agent:  # flags [T, N] of rewards [T, N, A]
        tensors |= {name: tensors[name][..., 0] for name in ("terminated", "truncated", "mask")}
    with interpreted(), Launches() as launches:
        found = call("gae", tensors, **SETTINGS["gae"])
    assert launches.names == ["reverse_scan_kernel"]
    wide = {
        name: x if x.dtype == torch.bool else x.to(torch.promote_types(dtype, torch.float32))
        for name, x in tensors.items()
    }
    for mine, native in zip(found, call("gae", wide, **SETTINGS["gae"]), strict=True):
        torch.testing.assert_close(mine, native, rtol=1e-5, atol=1e-5)


def test_no_steps_and_no_environments_launch_nothing() -> None:
    for axes in ((0, 4), (4, 0), (0,)):
        tensors = rollout(*axes, dtype=torch.float32, masked=False)
        with interpreted(), Launches() as launches:
            found = call("gae", tensors, **SETTINGS["gae"])
        assert launches.names == []
        assert [mine.shape for mine in found] == [axes, axes]


def test_the_golden_numbers() -> None:
    reward, value = torch.tensor([10.0, 0, 0, 100, 0]), torch.tensor([1.0, 2, 3, 4, 5])
    next_value = torch.tensor([2.0, 3, 4, 5, 0])
    ends, never = torch.tensor([0, 0, 1, 0, 0]).bool(), torch.zeros(5, dtype=torch.bool)
    with interpreted():
        advantage, _ = gae(reward, value, next_value, ends, never, gamma=0.9, lam=0.8)
        _, return_ = gae(
            torch.ones(3), torch.tensor([0.0, 0, 10]), torch.tensor([0.0, 10, 0]), ends[1:4], never[:3], gamma=1, lam=1
        )
    torch.testing.assert_close(advantage, torch.tensor([9.7488, -1.46, -3, 96.9, -5]))
    assert return_.tolist() == [2, 1, 1]
