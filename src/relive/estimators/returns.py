"""Returns of every step: λ-returns, n-step returns and discounted (Monte-Carlo) returns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from relive import kernels
from relive.errors import SchemaError, explain
from relive.estimators.arguments import align, check_same_shape, fraction, native_result
from relive.schema.checks import count, number, same_device


def lambda_return(
    reward: Tensor, next_value: Tensor, terminated: Tensor, truncated: Tensor, *,
    gamma: float, lam: float, mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """TD(λ) returns of every step, [T, N, …] like the reward.

        G[t] = r[t] + γ (1 − terminated[t]) · [(1 − λ) · next_value[t] + λ · G[t+1]]

    where next_value[t] replaces G[t+1] at a truncated step, at the last row and before a masked row. λ = 0 is the
    one-step target, λ = 1 Monte-Carlo. Sutton and Barto, Reinforcement Learning, 2018, chapter 12.

    Args:
        reward: [T], [T, N] or [T, N, …].
        next_value: like reward; V of the observation that t led to, before any reset. Not read where terminated, and
            with λ = 1 only where the chain stops.
        terminated: bool, like reward or its leading axes [T, N]; as in `gae`.
        truncated: bool, like terminated; as in `gae`.
        mask: bool, like terminated; as in `gae`.
        gamma: discount γ in [0, 1].
        lam: λ in [0, 1].
    """
    result = native_result("lambda_return", reward, next_value, terminated, truncated, mask, gamma, lam, None)
    if result is not None:
        return result
    settings = (fraction("gamma", gamma), fraction("lam", lam))
    return _estimate_return("lambda_return", reward, next_value, terminated, truncated, mask, settings)


def n_step_return(
    reward: Tensor, next_value: Tensor, terminated: Tensor, truncated: Tensor, *,
    gamma: float, n: int, mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """n-step returns with a bootstrap, [T, N, …] like the reward.

        G[t] = Σ_{i<k} γ^i r[t+i] + γ^k (1 − terminated[t+k−1]) · next_value[t+k−1]

    with k = min(n, steps to the end of the episode, to the last row, or to the row before a masked one). n = 1 is the
    TD target; n ≥ T is `discounted_return`.

    Args:
        reward: [T], [T, N] or [T, N, …].
        next_value: like reward; V of the observation that t led to, before any reset. Read at a window's last row only.
        terminated: bool, like reward or its leading axes [T, N]; as in `gae`.
        truncated: bool, like terminated; as in `gae`.
        mask: bool, like terminated; as in `gae`.
        gamma: discount γ in [0, 1].
        n: the number of steps to sum, at least 1.
    """
    result = native_result("n_step_return", reward, next_value, terminated, truncated, mask, gamma, n, None)
    if result is not None:
        return result
    settings = (fraction("gamma", gamma), count("n", n, least=1, remedy="Pass the number of steps to sum."))
    return _estimate_return("n_step_return", reward, next_value, terminated, truncated, mask, settings)


def _estimate_return(
    name: str, reward: Any, next_value: Any, terminated: Any, truncated: Any, mask: Any, settings: tuple[float, float]
) -> Tensor:
    values, flags, mask = align(
        {"reward": reward, "next_value": next_value},
        {"terminated": terminated, "truncated": truncated},
        mask,
        cast=False,
    )
    return kernels.estimate(name, 1, [*values, *flags, mask], settings)


def discounted_return(
    reward: Tensor, terminated: Tensor, truncated: Tensor, *,
    gamma: float, last_value: Tensor | float | None = None, next_value: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Monte-Carlo returns of every step, [T, N, …] like the reward: discounted rewards to the end of the episode.

        G[t] = r[t] + γ (1 − terminated[t]) · (G[t+1], or a bootstrap value where the chain stops)

    The bootstrap value of a truncated step is its `next_value`, or 0 without `next_value`. Where the rollout stops
    inside an episode, it is `last_value`, otherwise `next_value[-1]`, otherwise 0.

    Args:
        reward: [T], [T, N] or [T, N, …].
        terminated: bool, like reward or its leading axes [T, N]; as in `gae`.
        truncated: bool, like terminated; as in `gae`.
        mask: bool, like terminated; as in `gae`.
        gamma: discount γ in [0, 1].
        last_value: [N, …], the shape of reward without the time axis (a number if reward is [T]); V of the observation
            after the last row, read where the last row is neither terminated nor truncated.
        next_value: like reward; read at truncated steps, at the last row and before a masked row only.
    """
    gamma = fraction("gamma", gamma)
    values = {"reward": reward} if next_value is None else {"reward": reward, "next_value": next_value}
    (reward, *next_values), flags, mask = align(values, {"terminated": terminated, "truncated": truncated}, mask)
    bootstrap = next_values[0] if next_values else torch.zeros_like(reward)
    if last_value is not None and len(reward):
        ended = torch.logical_or(flags[0][-1], flags[1][-1])
        last = torch.where(ended, bootstrap[-1], _last_value(last_value, reward))
        bootstrap = torch.cat([bootstrap[:-1], last[None]])
    return kernels.estimate("lambda_return", 1, [reward, bootstrap, *flags, mask], (gamma, 1.0))


def _last_value(last_value: Any, reward: Tensor) -> Tensor:
    if not isinstance(last_value, Tensor):
        if reward.ndim > 1:
            expected, got = f"a tensor of shape {tuple(reward.shape[1:])}", type(last_value).__name__
            raise SchemaError(explain("last_value", expected, got, "Pass one value per environment."))
        return torch.full((), number("last_value", last_value), dtype=reward.dtype, device=reward.device)
    check_same_shape("last_value", last_value, "one row of reward", reward.shape[1:])
    same_device("last_value", last_value, reward.device)
    return last_value.detach().to(reward.dtype)
