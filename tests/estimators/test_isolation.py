"""Estimators read nothing after an end, in masked rows or in other episodes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from relive import estimators as rl
from tests.conftest import running
from tests.estimators.calls import SETTINGS, assert_equal, call, every_backend, every_estimator, sample
from tests.strategies import Rollout, rollouts

quick = settings(max_examples=40, deadline=None)
poison = st.sampled_from([torch.nan, torch.inf, -torch.inf])
NUMBERS = ("reward", "value", "next_value", "log_ratio")


def wide(flag: Tensor, like: Tensor) -> Tensor:
    return flag[(..., *(None,) * (like.ndim - flag.ndim))].expand(like.shape)


@every_backend
@every_estimator
@quick
@given(rollout=rollouts(), bad=poison)
def test_masked_rows_are_never_read_and_come_out_as_zero(
    backend_name: str, name: str, rollout: Rollout, bad: float
) -> None:
    generator = torch.Generator().manual_seed(len(rollout.reward))
    mask = torch.rand(rollout.terminated.shape, generator=generator) < 0.7
    masked = ~wide(mask, rollout.reward)
    clean = {**rollout.tensors, "mask": mask}
    dirty = {k: x.masked_fill(masked, bad) if x is not None and k in NUMBERS else x for k, x in clean.items()}
    for flag in ("terminated", "truncated"):
        dirty[flag] = clean[flag] ^ ~mask  # pyright: ignore[reportOptionalOperand]
    with running(backend_name):
        for mine, want in zip(call(name, dirty, **SETTINGS[name]), call(name, clean, **SETTINGS[name]), strict=True):
            assert_equal(mine, want)
            assert not mine[masked].any()


@every_backend
@every_estimator
def test_the_row_before_a_masked_row_bootstraps_from_its_own_next_value(backend_name: str, name: str) -> None:
    tensors = sample(6, 3, dtype=torch.float64, ends=0.0)
    mask = torch.ones(6, 3, dtype=torch.bool)
    mask[3] = False
    with running(backend_name):
        got = call(name, {**tensors, "mask": mask}, **SETTINGS[name])
        alone = call(name, {k: None if x is None else x[:3] for k, x in tensors.items()}, **SETTINGS[name])
        after = call(name, {k: None if x is None else x[4:] for k, x in tensors.items()}, **SETTINGS[name])
    for mine, first, last in zip(got, alone, after, strict=True):
        torch.testing.assert_close(mine, torch.cat([first, torch.zeros(1, 3).double(), last]))


@every_backend
@every_estimator
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("ending", ["terminated", "truncated"])
def test_a_bad_number_stays_in_its_episode(backend_name: str, name: str, ending: str, bad: float) -> None:
    tensors = sample(9, 10, ends=0.0)
    ends = torch.zeros(9, 10, dtype=torch.bool)
    # The episodes are the rows 0–2, 3–5 and 6–8.
    ends[2] = ends[5] = True
    tensors[ending] = ends
    dirty = {k: None if x is None else x.clone() for k, x in tensors.items()}
    for number in NUMBERS:
        dirty[number][4, 1:] = bad  # pyright: ignore[reportOptionalSubscript]
    with running(backend_name):
        got, want = call(name, dirty, **SETTINGS[name]), call(name, tensors, **SETTINGS[name])
    for mine, clean in zip(got, want, strict=True):
        assert torch.equal(mine[[0, 1, 2, 6, 7, 8]], clean[[0, 1, 2, 6, 7, 8]])
        assert torch.equal(mine[:, 0], clean[:, 0])


@every_backend
@every_estimator
def test_the_next_value_of_a_terminated_step_is_never_read(backend_name: str, name: str) -> None:
    tensors = sample(7, 9, ends=0.3)
    terminated = tensors["terminated"]
    assert terminated is not None
    dirty = {**tensors, "next_value": tensors["next_value"].masked_fill(terminated, torch.nan)}  # pyright: ignore[reportOptionalMemberAccess]
    with running(backend_name):
        for mine, want in zip(call(name, dirty, **SETTINGS[name]), call(name, tensors, **SETTINGS[name]), strict=True):
            assert torch.equal(mine, want)


@every_backend
def test_monte_carlo_reads_next_values_only_where_the_chain_stops(backend_name: str) -> None:
    reward, none = torch.ones(4, 2), torch.zeros(4, 2, dtype=torch.bool)
    truncated = none.clone()
    truncated[1, 0] = True
    next_value = torch.full((4, 2), torch.nan)
    next_value[1, 0] = 2.0
    next_value[3] = 4.0
    with running(backend_name):
        got = rl.discounted_return(reward, none, truncated, gamma=0.5, next_value=next_value)
        assert got.tolist() == [[2, 2.125], [2, 2.25], [2.5, 2.5], [3, 3]]
        assert torch.equal(got, rl.n_step_return(reward, next_value, none, truncated, gamma=0.5, n=4))


@every_backend
@every_estimator
def test_inputs_stay_as_they_are(backend_name: str, name: str) -> None:
    tensors = {**sample(6, 9), "mask": torch.rand(6, 9) < 0.8}
    before = {k: x.clone() for k, x in tensors.items() if x is not None}
    with running(backend_name):
        outputs = call(name, tensors, **SETTINGS[name])
    for key, tensor in before.items():
        assert torch.equal(tensor, tensors[key])  # pyright: ignore[reportArgumentType]
    memory = {x.data_ptr() for x in tensors.values() if x is not None}
    assert not memory & {output.data_ptr() for output in outputs}


@every_backend
@every_estimator
def test_no_gradient_flows(backend_name: str, name: str) -> None:
    tensors = sample(6, 9)
    for number in NUMBERS:
        tensors[number].requires_grad_()  # pyright: ignore[reportOptionalMemberAccess]
    with running(backend_name):
        for output in call(name, tensors, **SETTINGS[name]):
            assert not output.requires_grad


def test_no_gradient_flows_through_statistics() -> None:
    x, done = torch.randn(4, 2, requires_grad=True), torch.zeros(4, 2, dtype=torch.bool)
    assert not rl.normalize(x).requires_grad
    assert not rl.explained_variance(x, x).requires_grad
    assert not rl.discounted_return(x, done, done, gamma=0.9, last_value=x[0]).requires_grad
    assert not any(output.requires_grad for output in rl.group_advantage(x, done, group_size=2))


@every_backend
@every_estimator
def test_parameters_and_lazily_negated_tensors_count_with_their_values(backend_name: str, name: str) -> None:
    tensors = sample(6, 9)
    odd = {**tensors, "reward": torch.nn.Parameter(tensors["reward"])}  # pyright: ignore[reportArgumentType]
    odd["next_value"] = torch.complex(torch.zeros(6, 9), -tensors["next_value"]).conj().imag  # pyright: ignore[reportOptionalOperand]
    assert odd["next_value"].is_neg()
    with running(backend_name):
        for mine, want in zip(call(name, odd, **SETTINGS[name]), call(name, tensors, **SETTINGS[name]), strict=True):
            assert torch.equal(mine, want)
