"""Every backend and every memory layout gives the numbers of the written-out recurrence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from relive import estimators, kernels
from tests.conftest import running
from tests.estimators.calls import (
    ARGUMENTS,
    SETTINGS,
    assert_equal,
    call,
    every_backend,
    every_estimator,
    expected,
    sample,
)
from tests.reference import estimators as reference
from tests.strategies import Rollout, discounts, laid_out, rollouts

quick = settings(max_examples=60, deadline=None)


def check(name: str, rollout: Rollout, backend_name: str, **values: float) -> None:
    with running(backend_name):
        got = call(name, rollout.tensors, **values)
    for mine, wanted in zip(got, expected(name, rollout, **values), strict=True):
        assert mine.dtype == rollout.reward.dtype
        assert_equal(mine, wanted)


BARS = st.sampled_from([0.5, 1.0, 3.0])
RANGES: dict[str, dict[str, Any]] = {
    "gae": {"gamma": discounts, "lam": discounts},
    "lambda_return": {"gamma": discounts, "lam": discounts},
    "n_step_return": {"gamma": discounts, "n": st.integers(1, 14)},
    "vtrace": {"gamma": discounts, "lam": discounts, "rho_bar": BARS, "c_bar": BARS},
}


@every_backend
@every_estimator
@quick
@given(rollout=rollouts(), data=st.data())
def test_every_estimator_matches_its_formula(
    name: str, backend_name: str, rollout: Rollout, data: st.DataObject
) -> None:
    check(name, rollout, backend_name, **data.draw(st.fixed_dictionaries(RANGES[name])))


# Widths around the registers (1, 2, 4, 8, 32 lanes), the switch to whole rows (512) and the pieces of rows (1024).
WIDTHS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 31, 32, 33, 63, 65, 511, 512, 513, 1024, 1030, 2051)


@every_backend
@every_estimator
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_width_matches_one_column_at_a_time(name: str, dtype: torch.dtype, backend_name: str) -> None:
    with running(backend_name):
        for width in WIDTHS:
            tensors = sample(5, width, dtype=dtype, ends=0.2, seed=width)
            tensors["mask"] = torch.rand(5, width) < 0.8 if width % 2 else None
            got = call(name, tensors, **SETTINGS[name])
            some = {0, 1, width // 2, width - 1} & set(range(width))
            for i in some:
                column = {k: None if x is None else x[:, i].contiguous() for k, x in tensors.items()}
                for mine, alone in zip(got, call(name, column, **SETTINGS[name]), strict=True):
                    assert_equal(mine[:, i], alone)


@every_estimator
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_instruction_set_gives_the_same_numbers(name: str, dtype: torch.dtype) -> None:
    native = kernels.native_core()
    if native is None or not native.set_avx2(True):
        pytest.skip("this machine has one instruction set")
    for width in (1, 2, 3, 4, 7, 9, 33, 513):
        for layout in ("contiguous", "env-major"):
            tensors = {k: None if x is None else laid_out(x, layout) for k, x in sample(6, width, dtype=dtype).items()}
            tensors["mask"] = torch.rand(6, width) < 0.8
            fast = call(name, tensors, **SETTINGS[name])
            try:
                assert not native.set_avx2(False)
                plain = call(name, tensors, **SETTINGS[name])
            finally:
                native.set_avx2(True)
            for mine, other in zip(fast, plain, strict=True):
                assert_equal(mine, other)


@every_estimator
@pytest.mark.parametrize("layout", ["contiguous", "env-major", "strided"])
def test_the_native_core_takes_any_strides_without_a_copy(name: str, layout: str) -> None:
    native = kernels.native_core()
    if native is None:
        pytest.skip("this install has no native core (no compiler)")
    tensors = {k: None if x is None else laid_out(x, layout) for k, x in sample(6, 11).items()}
    arguments = [tensors[k] for k in ARGUMENTS[name]]
    if name == "vtrace":
        arguments[0] = laid_out(arguments[0].exp(), layout)  # pyright: ignore[reportOptionalMemberAccess]
    assert getattr(native, name)(*arguments, None, *SETTINGS[name].values()) is not None


@every_estimator
def test_a_long_rollout_agrees_between_the_backends(name: str) -> None:
    tensors = sample(300, 3, dtype=torch.float64, ends=0.01)
    native = call(name, tensors, **{**SETTINGS[name], "gamma": 0.999})
    with kernels.force_torch():
        for mine, other in zip(native, call(name, tensors, **{**SETTINGS[name], "gamma": 0.999}), strict=True):
            assert_equal(mine, other)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 31, 32, 33, 64, 99, 100, 101, 10**30])
@every_backend
def test_every_window_length_matches_the_written_out_sum(backend_name: str, n: int) -> None:
    rollout = Rollout(sample(100, 2, dtype=torch.float64, ends=0.01), "contiguous")
    check("n_step_return", rollout, backend_name, gamma=0.97, n=n)


def monte_carlo(tensors: dict[str, Tensor | None], known: Tensor, gamma: float) -> Tensor:
    return reference.by_column(reference.lambda_return, {**tensors, "next_value": known}, gamma=gamma, lam=1.0)[0]


@every_backend
@quick
@given(rollout=rollouts(), gamma=discounts, with_last=st.booleans(), with_next=st.booleans())
def test_discounted_return_matches_the_written_out_sum(
    backend_name: str, rollout: Rollout, gamma: float, with_last: bool, with_next: bool
) -> None:
    reward = rollout.reward
    last_value = torch.full(reward.shape[1:], 3.0) if with_last else None
    known = rollout.next_value.clone() if with_next else torch.zeros_like(reward)
    # `last_value` follows the last row unless an episode ended there.
    if with_last:
        ended = (rollout.terminated | rollout.truncated)[-1]
        ended = ended[(..., *(None,) * (known[-1].ndim - ended.ndim))].expand_as(known[-1])
        known[-1] = torch.where(ended, known[-1], torch.full_like(known[-1], 3.0))
    with running(backend_name):
        got = estimators.discounted_return(
            reward, rollout.terminated, rollout.truncated, gamma=gamma, mask=rollout.mask,
            last_value=last_value, next_value=rollout.next_value if with_next else None,
        )  # fmt: skip
    assert_equal(got, monte_carlo(rollout.tensors, known, gamma))


@every_backend
@quick
@given(
    steps=st.integers(1, 8), groups=st.integers(1, 3), size=st.integers(2, 4), gamma=discounts,
    first=st.booleans(), masked=st.booleans(), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_group_advantage_matches_the_written_out_statistics(
    backend_name: str, steps: int, groups: int, size: int, gamma: float, first: bool, masked: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    reward = torch.randn(steps, groups * size, generator=generator, dtype=torch.float64)
    done = torch.rand(steps, groups * size, generator=generator) < 0.3
    mask = torch.rand(steps, groups * size, generator=generator) < (0.7 if masked else 2)
    # The rewards of masked rows are NaN, because such rows must not be read.
    reward = torch.where(mask, reward, torch.nan)
    values = {"group_size": size, "gamma": gamma, "first_episode_only": first, "eps": 1e-2}
    with running(backend_name):
        got = estimators.group_advantage(reward, done, **values, mask=mask if masked else None)
    wanted = reference.group_advantage(reward, done, **values, mask=mask)
    assert torch.equal(got[1], wanted[1])
    assert_equal(got[0], wanted[0])
    assert_equal(got[2], wanted[2])


@every_backend
@pytest.mark.parametrize("own_flags", [False, True])
def test_group_advantage_compares_every_agent_with_the_same_agent_of_its_group(
    backend_name: str, own_flags: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    # Env-major memory behind an axis of agents: nothing is contiguous.
    reward = torch.randn(3, 8, 12, generator=generator, dtype=torch.float64).permute(2, 1, 0)
    shape = (3, 8, 12) if own_flags else (8, 12)
    done, mask = (torch.rand(shape, generator=generator) < rate for rate in (0.2, 0.8))
    done, mask = (flag.permute(2, 1, 0) if own_flags else flag.T for flag in (done, mask))
    values = {"group_size": 4, "gamma": 0.9, "first_episode_only": False, "eps": 1e-2}
    with running(backend_name):
        got = estimators.group_advantage(reward, done, **values, mask=mask)
    for agent in range(3):
        flags = [flag[..., agent] if own_flags else flag for flag in (done, mask)]
        wanted = reference.group_advantage(reward[..., agent], flags[0], **values, mask=flags[1])
        assert torch.equal(got[1][..., agent], wanted[1])
        assert_equal(got[0][..., agent], wanted[0])
        assert_equal(got[2][..., agent], wanted[2])


@every_backend
@every_estimator
def test_no_steps_or_no_environments_give_empty_results(name: str, backend_name: str) -> None:
    with running(backend_name):
        for shape in ((0, 3), (3, 0), (0,), (2, 3, 0)):
            for output in call(name, sample(*shape), **SETTINGS[name]):
                assert output.shape == shape
