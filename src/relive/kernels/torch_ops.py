"""Estimators and n-step sums in torch ops: for every device, inside `torch.compile`, and without a native core.

Every estimator is a first-order recurrence backwards in time, `x[t] = a[t] + c[t] · (open[t] ? x[t+1] : 0)`. It is
solved by doubling: each round extends the sums from k to 2k rows by one shifted addition. T steps take log2(T) rounds
of a few launches, without synchronisation. Values after an end are masked, not multiplied by zero: they may be NaN.

Arguments are checked by the callers: one shape and dtype, bool flags of that shape, `mask` or None.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor


def gae(
    reward: Tensor, value: Tensor, next_value: Tensor, terminated: Tensor, truncated: Tensor, mask: Tensor | None,
    gamma: float, lam: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    open_ = _find_open_steps(terminated, truncated, mask)
    advantage = _solve_recurrence(_td_error(reward, value, next_value, terminated, gamma), gamma * lam, open_)
    invalid = _invert_mask(mask)
    return _zero_invalid(advantage, invalid), _zero_invalid(advantage + value, invalid)


def lambda_return(
    reward: Tensor, next_value: Tensor, terminated: Tensor, truncated: Tensor, mask: Tensor | None,
    gamma: float, lam: float,
) -> Tensor:  # fmt: skip
    open_ = _find_open_steps(terminated, truncated, mask)
    bootstrap = next_value.masked_fill(terminated, 0)
    # With λ = 1 the next value of an open step has weight 0 and is replaced by 0, because it may be NaN.
    weighted_bootstrap = (
        torch.where(open_, bootstrap * (1 - lam), bootstrap) if lam != 1 else bootstrap.masked_fill(open_, 0)
    )
    return_ = _solve_recurrence(torch.add(reward, weighted_bootstrap, alpha=gamma), gamma * lam, open_)
    return _zero_invalid(return_, _invert_mask(mask))


def n_step_return(
    reward: Tensor, next_value: Tensor, terminated: Tensor, truncated: Tensor, mask: Tensor | None,
    gamma: float, n: int,
) -> Tensor:  # fmt: skip
    linked = _find_open_steps(terminated, truncated, mask)
    # The return of one step. The loop prepends n - 1 steps, k = 1, 2, 4, … at once: the binary digits of n - 1.
    return_ = torch.add(reward, next_value.masked_fill(terminated, 0), alpha=gamma)
    # `piece` is the reward sum of k steps where a step is linked to the step k rows later, and the return elsewhere.
    piece = torch.where(linked, reward, return_)
    k, remaining = 1, min(n, max(len(reward), 1)) - 1
    while remaining:
        if remaining & 1:
            return_ = _add_later_rows(piece, gamma**k, return_, linked, k)
        remaining >>= 1
        if remaining:
            piece, linked = _add_later_rows(piece, gamma**k, piece, linked, k), _extend_links(linked, k)
            k *= 2
    return _zero_invalid(return_, _invert_mask(mask))


def vtrace(
    ratio: Tensor, reward: Tensor, value: Tensor, next_value: Tensor, terminated: Tensor, truncated: Tensor,
    mask: Tensor | None, gamma: float, lam: float, rho_bar: float, c_bar: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    open_ = _find_open_steps(terminated, truncated, mask)
    rho, decay = ratio.clamp(max=rho_bar), ratio.clamp(max=c_bar) * (gamma * lam)
    delta = _td_error(reward, value, next_value, terminated, gamma)
    value_corrections = _solve_recurrence(rho * delta, decay, open_)
    advantage = rho * _add_later_rows(delta, gamma * lam, value_corrections, open_, 1)
    invalid = _invert_mask(mask)
    return _zero_invalid(advantage, invalid), _zero_invalid(value_corrections + value, invalid)


def add_axes(flags: Tensor, like: Tensor) -> Tensor:
    """View flags with trailing axes of length one, to broadcast against `like`, which has further axes at its end."""
    return flags.view(*flags.shape, *(1,) * (like.ndim - flags.ndim))


def sum_n_step_rewards(
    rewards: Sequence[Tensor], is_over: Tensor, num_missing: Tensor, gamma: float
) -> tuple[list[Tensor], Tensor]:
    """Return Σ_{i<k} γ^i r[i] of rewards [n, B, …], in their dtype and order, and γ^k as float32 [B].

    `is_over` [n, B] is False for the first k steps of each row, at least one, and `num_missing` [B] = n − k.
    """
    factors, discounts = discount_powers(gamma, len(is_over), is_over.device)
    sums = [_sum_in_order(reward, factors.view(-1, *(1,) * (reward.ndim - 1)), is_over) for reward in rewards]
    return sums, discounts.index_select(0, num_missing)


def _sum_in_order(reward: Tensor, factors: Tensor, is_over: Tensor) -> Tensor:
    # Missing rewards are filled with -0.0, the neutral element of addition: 0.0 would turn a sum of -0.0 into 0.0.
    reward = reward.masked_fill(add_axes(is_over, reward), -0.0)
    if reward.dtype.is_floating_point:
        # One launch computes each product in float64 and rounds it once.
        terms = torch.mul(reward, factors, out=torch.empty_like(reward))
    else:
        terms = (reward * factors).to(reward.dtype)
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def _find_open_steps(terminated: Tensor, truncated: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mask of steps t whose recurrence continues at t + 1: no end at t, and row t + 1 is valid."""
    open_ = torch.logical_or(terminated, truncated).logical_not_()
    if mask is not None:
        open_ = open_.logical_and_(mask.roll(-1, 0))
    open_[-1:].fill_(False)
    return open_


def _td_error(reward: Tensor, value: Tensor, next_value: Tensor, terminated: Tensor, gamma: float) -> Tensor:
    return torch.add(reward - value, next_value.masked_fill(terminated, 0), alpha=gamma)


def _solve_recurrence(x: Tensor, decay: float | Tensor, linked: Tensor) -> Tensor:
    """Solve y[t] = x[t] + decay[t] · (linked[t] ? y[t + 1] : 0). The last row must not be linked."""
    k = 1
    while k < len(x):
        x = _add_later_rows(x, decay, x, linked, k)
        if 2 * k < len(x):
            decay = decay * decay.roll(-k, 0) if isinstance(decay, Tensor) else decay * decay
            linked = _extend_links(linked, k)
        k *= 2
    return x


def _add_later_rows(x: Tensor, decay: float | Tensor, later: Tensor, linked: Tensor, k: int) -> Tensor:
    """Return x[t] + decay[t] · later[t + k] where t is linked to t + k, x[t] elsewhere."""
    shifted = later.roll(-k, 0)
    extended = torch.addcmul(x, decay, shifted) if isinstance(decay, Tensor) else torch.add(x, shifted, alpha=decay)
    return torch.where(linked, extended, x)


def _extend_links(linked: Tensor, k: int) -> Tensor:
    """Extend links over k rows to 2k rows. Rows that `roll` wraps around do not count, as the last row has no link."""
    return torch.logical_and(linked, linked.roll(-k, 0))


def _invert_mask(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.logical_not()


def _zero_invalid(output: Tensor, invalid: Tensor | None) -> Tensor:
    return output if invalid is None else output.masked_fill(invalid, 0)


# The constant tensors below are cached per device, because making one is a launch. They are made outside inference
# mode, because tensors made inside of it cannot be used everywhere.


@lru_cache(maxsize=256)
@torch.inference_mode(False)
def cached_arange(start: int, stop: int, step: int, device: torch.device) -> Tensor:
    """Return `torch.arange(start, stop, step)`, int64 [L]."""
    return torch.arange(start, stop, step, device=device)


@lru_cache(maxsize=256)
@torch.inference_mode(False)
def discount_powers(gamma: float, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return γ^0 to γ^(count−1) as float64 [count], and γ^count down to γ^0 as float32 [count + 1]."""
    factors = [1.0]
    for _ in range(count):
        factors.append(factors[-1] * gamma)
    ascending = torch.tensor(factors[:-1], dtype=torch.float64, device=device)
    return ascending, torch.tensor(factors[::-1], dtype=torch.float64, device=device).float()


@lru_cache(maxsize=256)
@torch.inference_mode(False)
def run_end_offsets(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return two tensors [3, 1] that locate three rows of a run of up to `count` steps.

    The rows are the first step, the final state and the last step. If m steps are missing at the end of the run, the
    offsets of these rows from the first step are the first tensor plus m times the second one.
    """
    offsets = torch.tensor([[0], [count], [count - 1]], device=device)
    return offsets, torch.tensor([[0], [-1], [-1]], device=device)
