"""The advantages of EmbodiChain's PPO and GRPO."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch.nn.functional import pad

from relive.compat.embodichain.learning.rl.buffer.utils import read_next_values
from relive.errors import SchemaError, explain
from relive.estimators import gae, group_advantage
from relive.schema.checks import check_shape

__all__ = ["compute_gae", "compute_group_advantage"]


def compute_gae(rollout: TensorDict, gamma: float, gae_lambda: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute advantages and returns `[N, T]` of a rollout `[N, T + 1]`; set its fields "advantage" and "return".

    See `relive.gae`. "truncated" and "terminated" may be missing; without "truncated" every end counts as a
    termination. A step that is done and not truncated does not bootstrap. The last slot of "value" is the value of the
    observation after the last step.
    """
    reward, value = rollout["reward"], rollout["value"]
    if reward.ndim != 2:
        raise SchemaError(explain("reward", "shape [N, T + 1]", tuple(reward.shape), "Pass one reward per step."))
    check_shape("value", value, reward.shape, "Pass one value per slot.")
    done = rollout["done"].bool()
    truncated, terminated = (_read_flags(rollout, name, done) for name in ("truncated", "terminated"))
    terminated = terminated | (done & ~truncated)
    reward, value, terminated, truncated = (x[:, :-1].T for x in (reward.float(), value.float(), terminated, truncated))
    next_value = read_next_values(dict(rollout.items())).T.float()
    advantage, return_ = gae(reward, value, next_value, terminated, truncated, gamma=gamma, lam=gae_lambda)
    return _set_field(rollout, "advantage", advantage), _set_field(rollout, "return", return_)


def compute_group_advantage(
    rollout: TensorDict, gamma: float, group_size: int, truncate_at_first_done: bool = True, eps: float = 1e-8
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute GRPO's "advantage", "seq_mask" and "seq_return" `[N, T]`, and set them as fields of the rollout.

    See `relive.group_advantage`: neighbouring environments form a group.
    """
    seq_return, seq_mask, advantage = group_advantage(
        rollout["reward"][:, :-1].T,
        rollout["done"][:, :-1].bool().T,
        group_size=group_size,
        gamma=gamma,
        first_episode_only=truncate_at_first_done,
        eps=eps,
    )
    return (
        _set_field(rollout, "advantage", advantage),
        _set_field(rollout, "seq_mask", seq_mask.to(advantage.dtype)),
        _set_field(rollout, "seq_return", seq_return),
    )


def _read_flags(rollout: TensorDict, name: str, like: torch.Tensor) -> torch.Tensor:
    """Return a field of flags as bools; all False if the rollout has no such field."""
    flags = rollout.get(name, None)
    return torch.zeros_like(like) if flags is None else flags.bool()


def _set_field(rollout: TensorDict, name: str, steps: torch.Tensor) -> torch.Tensor:
    """Set a field [N, T + 1] to `steps` [T, N], with zeros in the last slot; return the field without the last slot."""
    rollout[name] = pad(steps, (0, 0, 0, 1)).T
    return rollout[name][:, :-1]
