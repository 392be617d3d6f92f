"""Normalisation of advantages, over a group of episodes or over all steps, and the explained variance of a critic."""

from __future__ import annotations

import torch
from torch import Tensor

from relive import kernels
from relive.errors import SchemaError, explain
from relive.estimators.arguments import align_inputs
from relive.schema.checks import check_fraction, check_int, check_number


def group_advantage(
    reward: Tensor, done: Tensor, *,
    group_size: int, gamma: float = 1.0, first_episode_only: bool = True, eps: float = 1e-8, mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Group-relative advantages (GRPO): `seq_return, seq_mask, advantage`, each [T, N, …] like the reward.

        R[t] = r[t] + γ (1 − done[t]) · R[t+1],   R[T] = 0
        seq_mask[t] = mask[t] and no earlier step of this environment was done     (mask, without first_episode_only)
        advantage[t] = (R[t] − m[t]) / (s[t] + eps) · seq_mask[t]

    with m and s the mean and population standard deviation of R at t over the environments of the group that seq_mask
    keeps. Agents, on axes after N, are compared separately. Shao et al., DeepSeekMath, 2024.

    A rollout attaches the results and needs no critic; every term of the loss is weighted by seq_mask:

        done = rollout["terminated"] | rollout["truncated"]
        seq_return, seq_mask, advantage = group_advantage(rollout["reward"], done, group_size=8, mask=rollout["mask"])
        rollout.attach(seq_return=seq_return, seq_mask=seq_mask, advantage=advantage)
        for batch in rollout.minibatches(256):
            loss = (batch["seq_mask"] * …).sum() / batch["seq_mask"].sum().clamp(min=1)

    Args:
        reward: [T, N] or [T, N, …].
        done: bool, like reward or its leading axes [T, N]; this step, which still counts, ended the episode. There is
            no bootstrap.
        group_size: number of adjacent environments with the same start, at least 2 and a divisor of N.
        gamma: discount γ in [0, 1].
        first_episode_only: whether each environment counts only up to its first end.
        eps: added to the deviation, so that groups of equal returns give 0.
        mask: bool, like done; rows where it is False are not transitions (dummy steps): they are not read, and are 0 in
            every result.
    """
    gamma, eps = check_fraction("gamma", gamma), check_number("eps", eps)
    size = check_int("group_size", group_size, min=2, remedy="Pass how many neighbouring environments form a group.")
    (reward,), (done,), mask = align_inputs({"reward": reward}, {"done": done}, mask)
    if reward.ndim < 2:
        expected = "shape [T, N] or [T, N, …]"
        raise SchemaError(explain("reward", expected, tuple(reward.shape), "Pass one reward per environment."))
    steps, envs, *agents = reward.shape
    if envs % size:
        expected, remedy = f"a divisor of {envs} environments", "Choose a group_size that divides them."
        raise SchemaError(explain("group_size", expected, size, remedy))
    all_false = torch.zeros_like(done)
    zeros = torch.zeros_like(reward)
    seq_return = kernels.run_estimator("lambda_return", [reward, zeros, done, all_false, mask], (gamma, 1.0))
    seq_mask = all_false.logical_not() if mask is None else mask.clone()
    if first_episode_only:
        ends = done & seq_mask
        seq_mask &= ends.cumsum(0) == ends
    groups = (steps, envs // size, size, *agents)
    centered, group_sizes = _subtract_mean(seq_return.reshape(groups), seq_mask.reshape(groups), 2)
    deviation = (centered.square().sum(2, keepdim=True) / group_sizes.clamp(min=1)).sqrt()
    return seq_return, seq_mask, (centered / (deviation + eps)).reshape(reward.shape)


def normalize(x: Tensor, mask: Tensor | None = None, *, eps: float = 1e-8, correction: int = 1) -> Tensor:
    """`x` with mean 0 and standard deviation 1 over all its entries, in its shape [T, N, …].

        (x − mean) / (std + eps)

    with the deviation of `torch.std`. A single entry becomes 0.

    Args:
        x: [T, N, …], or any other shape.
        mask: bool, like x or its leading axes [T, N]; entries where it is False do not count and become 0.
        eps: added to the deviation, so that equal entries become 0.
        correction: 1 gives the unbiased deviation, 0 the deviation of the population.
    """
    eps = check_number("eps", eps)
    (x,), _, mask = align_inputs({"x": x}, {}, mask)
    centered, num_counted = _subtract_mean(x, mask, ())
    return centered / ((centered.square().sum() / (num_counted - correction).clamp(min=1)).sqrt() + eps)


def explained_variance(value: Tensor, return_: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """The share of the returns' variance that the values explain []: 1 at best, NaN for constant returns.

        1 − Var(return − value) / Var(return)

    A constant value gives 0.

    Args:
        value: [T, N, …]; the critic's predictions.
        return_: like value; the returns that it should have predicted.
        mask: bool, like value or its leading axes [T, N]; entries where it is False do not count.
    """
    (value, return_), _, mask = align_inputs({"value": value, "return_": return_}, {}, mask)
    residual_squares, total_squares = (
        _subtract_mean(x, mask, ())[0].square().sum() for x in (return_ - value, return_)
    )
    return torch.where(total_squares == 0, torch.nan, 1 - residual_squares / total_squares)


def _subtract_mean(x: Tensor, mask: Tensor | None, axis: int | tuple[()]) -> tuple[Tensor, Tensor]:
    """Return x minus its mean along `axis` (over all axes if it is empty), and the number of entries in each mean.

    Entries outside `mask` do not count and become 0. The largest entry is subtracted first: equal entries then become
    exactly 0, whatever their sum rounds to.
    """
    is_ignored = torch.zeros_like(x, dtype=torch.bool) if mask is None else mask.logical_not()
    num_counted = is_ignored.logical_not().sum(axis, keepdim=True)
    if x.numel() == 0:
        return x, num_counted
    shifted = (x - x.masked_fill(is_ignored, -torch.inf).amax(axis, keepdim=True)).masked_fill(is_ignored, 0)
    mean = shifted.sum(axis, keepdim=True) / num_counted.clamp(min=1)
    return (shifted - mean).masked_fill(is_ignored, 0), num_counted
