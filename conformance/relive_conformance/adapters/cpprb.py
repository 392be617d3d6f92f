# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false
# If the library is missing, pyright resolves its name to this file.
"""cpprb: `ReplayBuffer` and `PrioritizedReplayBuffer`.

Fields are declared, so `done` is ours to define: it is `terminated`. It draws numpy arrays; Python cannot see the
size of its own arrays. n-step transitions are made when they are written. Memory is saved by `next_of` and
`stack_compress`, which need steps of one environment in order and the ends of episodes.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import cpprb
import numpy as np
import torch

from relive_conformance.adapters.off_policy import (
    ALPHA,
    BETA,
    GoalBatch,
    GoalStep,
    NotOffered,
    ReplayBatch,
    ReplayShape,
    Transitions,
    drop_unit_axis,
    goal_reward,
)
from relive_conformance.adapters.protocol import Adapter, Array

_LEARNED = ("obs", "act", "rew", "done", "next_obs")


def _fields(shape: ReplayShape) -> dict[str, dict[str, Any]]:
    obs = {"shape": shape.obs, "dtype": shape.dtype}
    return {"obs": obs, "act": {"shape": shape.action_dim}, "rew": {}, "next_obs": obs, "done": {}}


class CpprbReplay:
    """Adapter of `ReplayBuffer` with explicit next observations, its fastest form."""

    nbytes = None
    draws_from = "draws come from numpy's global generator"

    def __init__(self, shape: ReplayShape) -> None:
        self._buffer = self._make(shape)

    def _make(self, shape: ReplayShape) -> Any:
        return cpprb.ReplayBuffer(shape.capacity, _fields(shape))

    def prepare(self, step: Transitions) -> Any:
        arrays = step.obs, step.action, step.reward, step.terminated.astype(np.float32), step.next_obs
        return dict(zip(_LEARNED, arrays, strict=True))

    def add(self, prepared: Any) -> None:
        self._buffer.add(**prepared)

    def fill(self, block: Transitions) -> None:
        self.add(self.prepare(block))

    extend = fill

    def clear(self) -> None:
        self._buffer.clear()

    def save(self, path: str) -> None:
        self._buffer.save_transitions(path)

    def load(self, path: str) -> None:
        self._buffer.load_transitions(f"{path}.npz")

    def sample(self, batch_size: int) -> Any:
        batch = self._buffer.sample(batch_size)
        return {name: torch.from_numpy(batch[name]) for name in _LEARNED}

    def read(self, batch: Any) -> ReplayBatch:
        obs, action, reward, done, next_obs = (batch[name].numpy() for name in _LEARNED)
        return ReplayBatch(obs, action, drop_unit_axis(reward), drop_unit_axis(done), next_obs)

    @property
    def stored(self) -> int:
        return self._buffer.get_stored_size()


class _EpisodeReplay(CpprbReplay):
    """Stores single steps of one environment and reports the ends of episodes."""

    def prepare(self, step: Transitions) -> Any:
        return super().prepare(step), bool(step.ended[0])

    def add(self, prepared: Any) -> None:
        fields, ended = prepared
        self._buffer.add(**fields)
        if ended:
            self._buffer.on_episode_end()


class CpprbSavingReplay(_EpisodeReplay):
    """Adapter of `ReplayBuffer` with `next_of="obs"`, and with `stack_compress="obs"` for images."""

    def _make(self, shape: ReplayShape) -> Any:
        if shape.num_envs > 1:
            raise NotOffered
        fields = _fields(shape)
        del fields["next_obs"]
        frames = {"stack_compress": "obs"} if shape.is_image else {}
        return cpprb.ReplayBuffer(shape.capacity, fields, next_of="obs", **frames)

    def fill(self, block: Transitions) -> None:
        for row in range(len(block)):
            self.add(self.prepare(block[row : row + 1]))


class CpprbPrioritized(CpprbReplay):
    """Adapter of `PrioritizedReplayBuffer`, which divides weights by the largest possible weight of a stored row.

    The documentation says that transitions are saved, not priorities.
    """

    save: Any = None
    load: Any = None

    def _make(self, shape: ReplayShape) -> Any:
        return cpprb.PrioritizedReplayBuffer(shape.capacity, _fields(shape), alpha=ALPHA)

    def sample(self, batch_size: int) -> Any:
        batch = self._buffer.sample(batch_size, BETA)
        tensors = {name: torch.from_numpy(batch[name]) for name in (*_LEARNED, "weights")}
        return tensors, batch["indexes"]

    def read(self, batch: Any) -> ReplayBatch:
        return super().read(batch[0])._replace(weight=batch[0]["weights"].numpy())

    def priority(self, values: Array) -> Array:
        return values

    def update(self, batch: Any, priority: Array) -> None:
        self._buffer.update_priorities(batch[1], priority)

    def handles(self, batch: Any) -> Array:
        return batch[1]

    def set_priority(self, handles: Array, priority: Array) -> None:
        self._buffer.update_priorities(handles, priority)


class CpprbStrictlyPrioritized(CpprbPrioritized):
    """Adapter of `PrioritizedReplayBuffer` with `eps=0` and `check_for_update`, which skips stale updates."""

    def _make(self, shape: ReplayShape) -> Any:
        return cpprb.PrioritizedReplayBuffer(
            shape.capacity, _fields(shape), alpha=ALPHA, eps=0.0, check_for_update=True
        )


class CpprbNStep(CpprbReplay):
    """Adapter of `Nstep`, which sums rewards when steps are written; next observations after an end are not valid.

    Its own `done` misses an end at the last step of a window, which a learner would bootstrap through. A copy of it
    that is summed like a reward, `ended`, is positive exactly where a window holds an end.
    """

    def __init__(self, shape: ReplayShape, n: int, gamma: float) -> None:
        rule = {"size": n, "gamma": gamma, "rew": ["rew", "ended"], "next": "next_obs"}
        self._buffer = cpprb.ReplayBuffer(shape.capacity, {**_fields(shape), "ended": {}}, Nstep=rule)

    def prepare(self, step: Transitions) -> Any:
        fields = super().prepare(step)
        return {**fields, "ended": fields["done"]}

    def sample(self, batch_size: int) -> Any:
        batch = self._buffer.sample(batch_size)
        return {name: torch.from_numpy(batch["ended" if name == "done" else name]) for name in _LEARNED}

    def read(self, batch: Any) -> ReplayBatch:
        read = super().read(batch)
        return read._replace(terminated=read.terminated > 0)


class CpprbPlainNStep(_EpisodeReplay):
    """Adapter of `Nstep` with cpprb's own `done` and explicit ends of episodes."""

    def __init__(self, shape: ReplayShape, n: int, gamma: float) -> None:
        if shape.num_envs > 1:
            raise NotOffered("n-step transitions of one environment only")
        rule = {"size": n, "gamma": gamma, "rew": "rew", "next": "next_obs"}
        self._buffer = cpprb.ReplayBuffer(shape.capacity, _fields(shape), Nstep=rule)


class CpprbHindsight:
    """Adapter of `HindsightReplayBuffer`, which writes an episode with its further goals when it ends."""

    def __init__(self, capacity: int, strategy: str) -> None:
        fields = {"obs": {}, "act": {}, "next_obs": {}}
        # Every step is stored once per goal: its original goal, and four future goals or the final one.
        self._buffer = cpprb.HindsightReplayBuffer(
            capacity * (5 if strategy == "future" else 2),
            fields,
            max_episode_len=8,
            reward_func=lambda state, action, goal: goal_reward(state, goal),
            strategy=strategy,
            prioritized=False,
        )

    def add(self, step: GoalStep) -> None:
        self._buffer.add(obs=step.at, act=0.0, next_obs=step.next_at)
        if step.terminated or step.truncated:
            self._buffer.on_episode_end(step.goal)

    def sample(self, batch_size: int) -> GoalBatch:
        batch = self._buffer.sample(batch_size)
        return GoalBatch(*(drop_unit_axis(batch[name]) for name in ("obs", "goal", "next_obs", "rew")))


def adapter() -> Adapter:
    """Return the adapter of cpprb."""
    return Adapter(
        "cpprb",
        version("cpprb"),
        replay=CpprbReplay,
        replay_saving={"next_of, stack_compress": CpprbSavingReplay},
        stacked=CpprbSavingReplay,
        prioritized=CpprbPrioritized,
        prioritized_strictly=CpprbStrictlyPrioritized,
        n_step=CpprbNStep,
        n_step_plain=CpprbPlainNStep,
        hindsight=CpprbHindsight,
    )
