"""Advantages without a critic: every episode against the others of its group."""

from __future__ import annotations

import torch
from torch import Tensor

from recollect import kernels
from recollect.errors import SchemaError, explain
from recollect.estimators.arguments import conform, count, fraction, number


@torch.no_grad()
def group_advantage(
    reward: Tensor, done: Tensor, *,
    group_size: int, gamma: float = 1.0, first_episode_only: bool = True, eps: float = 1e-8,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Group-relative advantages (GRPO): `seq_return, seq_mask, advantage`, each [T, N], of consecutive environments.

        R[t] = r[t] + γ (1 − done[t]) · R[t+1],   R[T] = 0
        mask[t] = no earlier step of this environment was done        (everything, without first_episode_only)
        advantage[t] = (R[t] − m[t]) / (s[t] + eps) · mask[t]

    with m and s the mean and population standard deviation of R over the group's unmasked environments at t.
    Shao et al., DeepSeekMath, 2024.

    Args:
        reward: [T, N].
        done: bool [T, N]; the episode ended with this step, which still counts. There is no bootstrap.
        group_size: environments that started alike, at least 2 and a divisor of N; they are neighbours.
        gamma: discount γ in [0, 1].
        first_episode_only: count each environment up to its first end only.
        eps: keeps groups of equal returns at 0.
    """
    gamma, eps = fraction("gamma", gamma), number("eps", eps)
    size = count("group_size", group_size, least=2, remedy="Pass how many neighbouring environments form a group.")
    (reward,), (done,), _ = conform({"reward": reward}, {"done": done})
    if reward.ndim != 2:
        raise SchemaError(explain("reward", "shape [T, N]", tuple(reward.shape), "Pass one reward per environment."))
    steps, envs = reward.shape
    if envs % size:
        raise SchemaError(explain("group_size", f"a divisor of {envs} environments", size, "Choose one that divides."))
    never = torch.zeros_like(done)
    nothing = torch.zeros_like(reward)
    seq_return = kernels.estimate("lambda_return", 1, [reward, nothing, done, never, None], (gamma, 1.0))
    seq_mask = done.cumsum(0) == done if first_episode_only else never.logical_not()
    groups = (steps, envs // size, size)
    advantage = _standardize(seq_return.reshape(groups), seq_mask.reshape(groups), eps)
    return seq_return, seq_mask, advantage.reshape(steps, envs)


def _standardize(return_: Tensor, mask: Tensor, eps: float) -> Tensor:
    """Every group (last axis) to mean 0 and deviation 1 over its unmasked members; the others are 0."""
    masked = mask.logical_not()
    members = mask.sum(-1, keepdim=True).clamp(min=1)
    # The largest member is subtracted first: equal members are then exactly 0, whatever their sum rounds to.
    highest = return_.masked_fill(masked, -torch.inf).amax(-1, keepdim=True)
    shifted = (return_ - highest).masked_fill(masked, 0)
    centered = (shifted - shifted.sum(-1, keepdim=True) / members).masked_fill(masked, 0)
    deviation = (centered.square().sum(-1, keepdim=True) / members).sqrt()
    return centered / (deviation + eps)
