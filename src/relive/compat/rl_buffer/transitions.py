"""What rl-buffer's three replay buffers do alike, on one of ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from relive.checkpoint.state_dict import load_packed_state, packed_state
from relive.compat.rl_buffer.stats_tracker import on_host
from relive.compat.rl_buffer.steps import flags, placed, refuse_shared
from relive.compat.seeding import experiment_seed
from relive.compat.views import is_tree
from relive.replay.buffer import ReplayBuffer as _Replay
from relive.schema.assembly import to_device


@dataclass
class ReplayBatch:
    """Transitions `[B]`."""

    observations: Any
    actions: torch.Tensor
    rewards: torch.Tensor
    dones: torch.Tensor
    truncateds: torch.Tensor
    next_observations: Any


REPLAY_FIELDS = {
    "observations": "obs",
    "actions": "action",
    "rewards": "reward",
    "dones": "terminated",
    "truncateds": "truncated",
    "next_observations": "next_obs",
}
"""rl-buffer's names in a batch, and the core's."""
_STEP = ("obs", "action", "reward", "terminated", "truncated", "next_obs")


class Transitions:
    """One step of every environment at a time into the core that `make` makes, and batches out of it.

    `make` must survive pickling: a `functools.partial`.
    """

    def __init__(self, make: Callable[[], _Replay], obs_shape: Any) -> None:
        self._make, self._obs_shape = make, obs_shape
        self.core = make()
        self.memory = self.core.columns
        """The whole memory `[buffer_size, num_envs, …]` by the core's names."""
        self._places = [(name, self.memory[name][0]) for name in _STEP]
        self._flag = tuple(self.memory.batch_size[1:]) if obs_shape else None
        """The shape of a flag, where it is not that of an observation too."""

    def fitting(self, obs: Any, action: Any, reward: Any, done: Any, next_obs: Any, truncated: Any) -> tuple[Any, ...]:
        """The fields of one step as the core takes them. `truncated` may come before `next_obs`, and is recognised."""
        if self._are_exchanged(next_obs, truncated):
            next_obs, truncated = truncated, next_obs
        given = (obs, action, reward, flags(done), flags(truncated), next_obs)
        step = tuple(placed(name, value, place) for (name, place), value in zip(self._places, given, strict=True))
        refuse_shared(step[0], step[5])
        return step

    def _are_exchanged(self, next_obs: Any, truncated: Any) -> bool:
        """Whether `next_obs` are flags: by their shape, or by their dtype where an observation is one number."""
        if self._flag is not None:
            return not is_tree(next_obs) and np.shape(next_obs) == self._flag
        return _are_bools(next_obs) and not _are_bools(truncated) and self.memory["obs"].dtype is not torch.bool

    def sample(self, batch_size: int, device: torch.device) -> Any:
        """A batch of the core on a device."""
        if not len(self.core):
            raise ValueError("Cannot sample from empty buffer: add a step first.")
        batch = self.core.sample(batch_size)
        return batch if device == self.core.device else to_device(batch, device)

    def __getstate__(self) -> dict[str, Any]:
        return {"make": self._make, "obs_shape": self._obs_shape, "contents": packed_state(self.core)}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__(state["make"], state["obs_shape"])
        load_packed_state(self.core, state["contents"])


def _are_bools(value: Any) -> bool:
    return value.dtype is torch.bool if isinstance(value, torch.Tensor) else np.asarray(value).dtype == np.bool_


def maker(
    total: int,
    num_envs: int,
    obs: Any,
    action: Any,
    device: Any,
    seed: int | None,
    sampler: Any = None,
) -> partial[_Replay]:
    """What makes a core for transitions."""
    # Copies of their own: every time step then fits, whatever its next observation is.
    settings = {"num_envs": num_envs, "next_obs": "stored", "sampler": sampler, "device": device}
    return partial(_Replay, total, obs, action, seed=experiment_seed() if seed is None else seed, **settings)


def ends(step: tuple[Any, ...], tracker: Any) -> Any:
    """Where a step that fits ended an episode for a tracker."""
    done = on_host(step[3])
    return done | on_host(step[4]) if getattr(tracker, "truncated_ends", False) is True else done


def checked_batch(batch_size: int, available: int) -> int:
    """rl-buffer's error for a batch that is larger than what is stored."""
    if 0 < available < batch_size:
        raise ValueError(f"Batch size {batch_size} is larger than available samples: {available} are stored.")
    return batch_size


def renamed(names: Mapping[str, str], batch: Any) -> dict[str, Any]:
    """The fields of a batch under rl-buffer's names."""
    return {theirs: batch[ours] for theirs, ours in names.items()}
