"""Advantages over a critic: generalized advantage estimation and V-trace."""

from __future__ import annotations

import torch
from torch import Tensor

from relive import kernels
from relive.estimators.arguments import align, fraction, native_result
from relive.schema.checks import above_zero


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
    result = native_result("gae", reward, value, next_value, terminated, truncated, mask, gamma, lam, None)
    if result is not None:
        return result
    settings = (fraction("gamma", gamma), fraction("lam", lam))
    values, flags, mask = align(
        {"reward": reward, "value": value, "next_value": next_value},
        {"terminated": terminated, "truncated": truncated},
        mask,
        cast=False,
    )
    return kernels.estimate("gae", 2, [*values, *flags, mask], settings)


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
        others = (reward, value, next_value, terminated, truncated, mask, gamma, lam, rho_bar, c_bar, None)
        result = native_result("vtrace", ratio, *others)
        if result is not None:
            return result
    bounds = above_zero("rho_bar", rho_bar), above_zero("c_bar", c_bar)
    settings = (fraction("gamma", gamma), fraction("lam", lam), *bounds)
    (reward, log_ratio, *values), flags, mask = align(
        {"reward": reward, "log_ratio": log_ratio, "value": value, "next_value": next_value},
        {"terminated": terminated, "truncated": truncated},
        mask,
    )
    return kernels.estimate("vtrace", 2, [log_ratio.exp(), reward, *values, *flags, mask], settings)
