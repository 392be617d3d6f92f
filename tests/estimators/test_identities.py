"""Identities between the estimators, for any data."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from relive import estimators as rl
from tests.conftest import running
from tests.estimators.calls import assert_equal, every_backend
from tests.strategies import Rollout, discounts, rollouts

quick = settings(max_examples=40, deadline=None)


def wide(flag: Tensor | None, like: Tensor) -> Tensor:
    """Return a flag or mask in the reward's shape; a missing mask is True everywhere."""
    if flag is None:
        return torch.ones_like(like, dtype=torch.bool)
    return flag[(..., *(None,) * (like.ndim - flag.ndim))].expand(like.shape)


def parts(rollout: Rollout) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return rollout.reward, rollout.value, rollout.next_value, rollout.terminated, rollout.truncated


@every_backend
@quick
@given(rollout=rollouts(), gamma=discounts)
def test_gae_with_lambda_zero_is_the_td_error(backend_name: str, rollout: Rollout, gamma: float) -> None:
    reward, value, next_value, terminated, truncated = parts(rollout)
    with running(backend_name):
        got, _ = rl.gae(reward, value, next_value, terminated, truncated, gamma=gamma, lam=0.0, mask=rollout.mask)
    error = reward + gamma * torch.where(wide(terminated, reward), 0.0, next_value) - value
    assert_equal(got, torch.where(wide(rollout.mask, reward), error, 0.0))


@every_backend
@quick
@given(rollout=rollouts(), gamma=discounts)
def test_gae_with_lambda_one_and_continuous_values_is_monte_carlo(
    backend_name: str, rollout: Rollout, gamma: float
) -> None:
    reward, value, _, terminated, truncated = parts(rollout)
    next_value = torch.cat([value[1:], torch.full_like(value[:1], 2.0)])
    with running(backend_name):
        _, got = rl.gae(reward, value, next_value, terminated, truncated, gamma=gamma, lam=1.0, mask=rollout.mask)
        want = rl.discounted_return(
            reward, terminated, truncated, gamma=gamma, next_value=next_value, mask=rollout.mask
        )
    assert_equal(got, want)


@every_backend
@quick
@given(rollout=rollouts(), gamma=discounts, lam=discounts)
def test_the_return_of_gae_is_the_lambda_return_when_values_continue(
    backend_name: str, rollout: Rollout, gamma: float, lam: float
) -> None:
    reward, value, _, terminated, truncated = parts(rollout)
    next_value = torch.cat([value[1:], torch.full_like(value[:1], 2.0)])
    with running(backend_name):
        _, got = rl.gae(reward, value, next_value, terminated, truncated, gamma=gamma, lam=lam, mask=rollout.mask)
        want = rl.lambda_return(reward, next_value, terminated, truncated, gamma=gamma, lam=lam, mask=rollout.mask)
    assert_equal(got, want)


@every_backend
@quick
@given(rollout=rollouts(), gamma=discounts, lam=discounts)
def test_vtrace_at_ratio_one_is_gae(backend_name: str, rollout: Rollout, gamma: float, lam: float) -> None:
    on_policy = torch.zeros_like(rollout.reward)
    with running(backend_name):
        got = rl.vtrace(on_policy, *parts(rollout), gamma=gamma, lam=lam, mask=rollout.mask)
        want = rl.gae(*parts(rollout), gamma=gamma, lam=lam, mask=rollout.mask)
    for mine, theirs in zip(got, want, strict=True):
        assert_equal(mine, theirs)


@every_backend
@quick
@given(rollout=rollouts(), gamma=discounts, more=st.integers(0, 3))
def test_n_steps_to_the_end_of_the_rollout_are_monte_carlo(
    backend_name: str, rollout: Rollout, gamma: float, more: int
) -> None:
    reward, _, next_value, terminated, truncated = parts(rollout)
    with running(backend_name):
        got = rl.n_step_return(
            reward, next_value, terminated, truncated, gamma=gamma, n=len(reward) + more, mask=rollout.mask
        )
        want = rl.discounted_return(
            reward, terminated, truncated, gamma=gamma, next_value=next_value, mask=rollout.mask
        )
    assert_equal(got, want)


@every_backend
@quick
@given(rollout=rollouts(), gamma=discounts)
def test_one_step_is_the_lambda_return_with_lambda_zero(backend_name: str, rollout: Rollout, gamma: float) -> None:
    reward, _, next_value, terminated, truncated = parts(rollout)
    with running(backend_name):
        got = rl.n_step_return(reward, next_value, terminated, truncated, gamma=gamma, n=1, mask=rollout.mask)
        want = rl.lambda_return(reward, next_value, terminated, truncated, gamma=gamma, lam=0.0, mask=rollout.mask)
    assert_equal(got, want)
