"""Advantages and returns over time: GAE, V-trace, λ-returns, n-step returns and discounted returns."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from relive import kernels
from relive.errors import SchemaError, explain
from relive.estimators.arguments import align_inputs, check_same_shape
from relive.schema.checks import check_above_zero, check_device, check_fraction, check_int, check_number


def gae(
    reward: Tensor, value: Tensor, next_value: Tensor, terminated: Tensor, truncated: Tensor, *,
    gamma: float, lam: float, mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Generalized advantage estimation: `advantage, return` of every step, each [T, N, …] like the reward.

        δ[t] = r[t] + γ (1 − terminated[t]) · next_value[t] − value[t]
        A[t] = δ[t] + γ λ (1 − (terminated[t] ∨ truncated[t])) · A[t+1],   A[T] = 0
        return[t] = A[t] + value[t]

    Schulman et al., High-Dimensional Continuous Control Using Generalized Advantage Estimation, 2016.

    Args:
        reward: [T], [T, N] or [T, N, …]; the consequence of the action at t.
        value: like reward; V of the observation at t.
        next_value: like reward; V of the observation that t led to, before any reset. Not read where terminated.
        terminated: bool, like reward or its leading axes [T, N]; the episode ended. Takes precedence over truncated.
        truncated: bool, like terminated; the episode was cut off: the step bootstraps from next_value.
        gamma: discount γ in [0, 1].
        lam: λ in [0, 1]; 0 is the TD error, 1 Monte-Carlo minus the value.
        mask: bool, like terminated; rows where it is False are not transitions: they are not read and are 0 in both
            results, and the row before bootstraps from its own next_value.
    """
    result = _try_native("gae", reward, value, next_value, terminated, truncated, mask, gamma, lam)
    if result is not None:
        return result
    settings = (check_fraction("gamma", gamma), check_fraction("lam", lam))
    values, flags, mask = align_inputs(
        {"reward": reward, "value": value, "next_value": next_value},
        {"terminated": terminated, "truncated": truncated},
        mask,
        cast=False,
    )
    return kernels.run_estimator("gae", [*values, *flags, mask], settings)


def vtrace(
    log_ratio: Tensor, reward: Tensor, value: Tensor, next_value: Tensor, terminated: Tensor, truncated: Tensor, *,
    gamma: float, lam: float = 1.0, rho_bar: float = 1.0, c_bar: float = 1.0, mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """V-trace, for data of an older policy: `advantage, return` of every step, each [T, N, …] like the reward.

        ρ[t] = min(rho_bar, π/μ[t]),   c[t] = min(c_bar, π/μ[t])
        δ[t] = r[t] + γ (1 − terminated[t]) · next_value[t] − value[t]
        E[t] = ρ[t] δ[t] + γ λ c[t] (1 − (terminated[t] ∨ truncated[t])) · E[t+1],   E[T] = 0
        return[t] = value[t] + E[t]                          the critic's target
        advantage[t] = ρ[t] · (δ[t] + γ λ (1 − ended[t]) · E[t+1])      for the policy gradient

    With all ratios 1 both results equal the results of `gae`. Espeholt et al., IMPALA, 2018.

    Args:
        log_ratio: like reward; log π(a|s) − log μ(a|s), with π the learner's policy and μ the policy that acted.
        reward: [T], [T, N] or [T, N, …]; the consequence of the action at t.
        value: like reward; as in `gae`.
        next_value: like reward; as in `gae`.
        terminated: bool, like reward or its leading axes [T, N]; as in `gae`.
        truncated: bool, like terminated; as in `gae`.
        gamma: discount γ in [0, 1].
        lam: λ in [0, 1].
        rho_bar: upper bound of the ratio at the step itself, above 0; decides which values the critic converges to.
        c_bar: upper bound of the ratio along the trace, above 0; decides how fast the critic converges.
        mask: bool, like terminated; as in `gae`.
    """
    if type(log_ratio) is Tensor and log_ratio.layout == torch.strided and not torch.compiler.is_compiling():
        ratio = log_ratio.detach().exp()
        arguments = (reward, value, next_value, terminated, truncated, mask, gamma, lam, rho_bar, c_bar)
        result = _try_native("vtrace", ratio, *arguments)
        if result is not None:
            return result
    bounds = check_above_zero("rho_bar", rho_bar), check_above_zero("c_bar", c_bar)
    settings = (check_fraction("gamma", gamma), check_fraction("lam", lam), *bounds)
    (reward, log_ratio, *values), flags, mask = align_inputs(
        {"reward": reward, "log_ratio": log_ratio, "value": value, "next_value": next_value},
        {"terminated": terminated, "truncated": truncated},
        mask,
    )
    return kernels.run_estimator("vtrace", [log_ratio.exp(), reward, *values, *flags, mask], settings)


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
    result = _try_native("lambda_return", reward, next_value, terminated, truncated, mask, gamma, lam)
    if result is not None:
        return result
    settings = (check_fraction("gamma", gamma), check_fraction("lam", lam))
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
    result = _try_native("n_step_return", reward, next_value, terminated, truncated, mask, gamma, n)
    if result is not None:
        return result
    settings = (check_fraction("gamma", gamma), check_int("n", n, min=1, remedy="Pass the number of steps to sum."))
    return _estimate_return("n_step_return", reward, next_value, terminated, truncated, mask, settings)


def _estimate_return(
    name: Literal["lambda_return", "n_step_return"], reward: Any, next_value: Any, terminated: Any, truncated: Any,
    mask: Any, settings: tuple[float, float],
) -> Tensor:  # fmt: skip
    values, flags, mask = align_inputs(
        {"reward": reward, "next_value": next_value},
        {"terminated": terminated, "truncated": truncated},
        mask,
        cast=False,
    )
    return kernels.run_estimator(name, [*values, *flags, mask], settings)


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
    gamma = check_fraction("gamma", gamma)
    values = {"reward": reward} if next_value is None else {"reward": reward, "next_value": next_value}
    (reward, *next_values), flags, mask = align_inputs(values, {"terminated": terminated, "truncated": truncated}, mask)
    bootstrap = next_values[0] if next_values else torch.zeros_like(reward)
    if last_value is not None and len(reward):
        ended = torch.logical_or(flags[0][-1], flags[1][-1])
        last = torch.where(ended, bootstrap[-1], _convert_last_value(last_value, reward))
        bootstrap = torch.cat([bootstrap[:-1], last[None]])
    return kernels.run_estimator("lambda_return", [reward, bootstrap, *flags, mask], (gamma, 1.0))


def _convert_last_value(last_value: Any, reward: Tensor) -> Tensor:
    if not isinstance(last_value, Tensor):
        if reward.ndim > 1:
            expected, got = f"a tensor of shape {tuple(reward.shape[1:])}", type(last_value).__name__
            raise SchemaError(explain("last_value", expected, got, "Pass one value per environment."))
        return torch.full((), check_number("last_value", last_value), dtype=reward.dtype, device=reward.device)
    check_same_shape("last_value", last_value, "one row of reward", reward.shape[1:])
    check_device("last_value", last_value, reward.device)
    return last_value.detach().to(reward.dtype)


def _try_native(estimator: str, *arguments: Any) -> Any:
    """Return the result of the native core; None without a native core, or if an argument does not fit."""
    native = None if torch.compiler.is_compiling() else kernels.native_core()
    return None if native is None else getattr(native, estimator)(*arguments)
