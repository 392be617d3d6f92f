"""relive through its own public interface."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv

import relive as rl
from relive.replay.samplers import Sampler
from relive.replay.views import View
from relive_conformance.adapters.off_policy import (
    ALPHA,
    BETA,
    GoalBatch,
    GoalStep,
    NotOffered,
    ReplayBatch,
    ReplayShape,
    Transitions,
    goal_reward,
)
from relive_conformance.adapters.protocol import Adapter, Array, Batch, RolloutShape, Sequences, Step, Trajectory

FIELDS = ("obs", "action", "value", "log_prob", "advantage", "return")
_TRANSITION_FIELDS = ("obs", "action", "reward", "terminated", "truncated", "next_obs")
_STEP_FIELDS = ("obs", "action", "reward", "terminated", "truncated", "value", "log_prob")


class OurGae:
    """Adapter of `rl.gae` on time-major torch tensors."""

    def prepare(self, trajectory: Trajectory, *, gamma: float, lam: float) -> Callable[[], Any]:
        names = ("reward", "value", "next_value", "terminated", "truncated")
        reward, value, next_value, terminated, truncated = (torch.from_numpy(getattr(trajectory, n)) for n in names)
        return lambda: rl.gae(reward, value, next_value, terminated, truncated, gamma=gamma, lam=lam)

    def read(self, output: Any) -> tuple[Array, Array]:
        advantage, return_ = output
        return advantage.numpy(), return_.numpy()


class OurRollout:
    """Adapter of `rl.RolloutBuffer`, to which steps are passed as torch tensors."""

    standardizes = False

    def __init__(self, shape: RolloutShape) -> None:
        self._buffer = rl.RolloutBuffer(shape.num_steps, shape.num_envs, shape.obs_dim, shape.action_dim, seed=0)

    def prepare(self, step: Step) -> Any:
        return tuple(torch.from_numpy(getattr(step, name)) for name in _STEP_FIELDS)

    def add(self, prepared: Any) -> None:
        obs, action, reward, terminated, truncated, value, log_prob = prepared
        self._buffer.add(obs, action, reward, terminated, truncated, value=value, log_prob=log_prob)

    def advantage(self, last_value: torch.Tensor, last_done: Array, *, gamma: float, lam: float) -> Any:
        return self._buffer.compute_advantage(last_value, gamma=gamma, lam=lam)

    def minibatches(self, batch_size: int) -> Iterable[Any]:
        return self._buffer.minibatches(batch_size, fields=FIELDS)

    def read(self, batch: Any) -> Batch:
        return Batch(*(batch[name] for name in FIELDS))

    def clear(self) -> None:
        self._buffer.clear()


class OurRolloutOfNumpy(OurRollout):
    """Adapter of `rl.RolloutBuffer`, to which steps are passed as numpy arrays."""

    def prepare(self, step: Step) -> Any:
        return tuple(np.ascontiguousarray(getattr(step, name)) for name in _STEP_FIELDS)


class OurRecurrent:
    """Adapter of `rl.RolloutBuffer` with a `Carry` field, read by `sequences`."""

    def __init__(self, shape: RolloutShape, length: int) -> None:
        self._shape, self._length = shape, length

    def fill(self, steps: list[Step], state: Array, advantage: Array, return_: Array) -> None:
        shape, carry = self._shape, rl.Carry(state.shape[-1])
        extra = {"state": carry}
        self._buffer = rl.RolloutBuffer(
            shape.num_steps, shape.num_envs, shape.obs_dim, shape.action_dim, extra=extra, seed=0
        )
        for step, before in zip(steps, state, strict=True):
            *fields, value, log_prob = (getattr(step, name) for name in _STEP_FIELDS)
            self._buffer.add(*fields, value=value, log_prob=log_prob, state=before)
        self._buffer.attach({"advantage": advantage, "return": return_})

    def minibatches(self, num_steps: int) -> Iterable[Any]:
        whole = num_steps == self._shape.num_steps * self._shape.num_envs
        # A whole rollout also has shorter sequences, at the ends of episodes: their number is not known.
        size = None if whole else num_steps // self._length
        return self._buffer.sequences(self._length, batch_size=size, fields=(*FIELDS, "state"))

    def read(self, batch: Any) -> Sequences:
        rows = batch["obs"][:, :, 0].long()
        runs = [run[mask].tolist() for run, mask in zip(rows, batch["mask"], strict=True)]
        return Sequences(runs, batch["state"].numpy())


class OurReplay:
    """Adapter of `rl.ReplayBuffer`: steps are numpy arrays, or numbers and bools for a single environment."""

    view: View = rl.Transition()
    safe_in_threads = survives_kill = True

    def __init__(self, shape: ReplayShape) -> None:
        self._one = shape.num_envs == 1
        self._buffer = rl.ReplayBuffer(
            shape.capacity,
            self._observation(shape),
            shape.action_dim,
            num_envs=None if self._one else shape.num_envs,
            sampler=self._sampler(),
            seed=shape.seed,
        )

    def _observation(self, shape: ReplayShape) -> rl.Field:
        return rl.Field(shape.obs, torch.uint8 if shape.is_image else torch.float32)

    def _sampler(self) -> Sampler:
        return rl.Uniform()

    def prepare(self, step: Transitions) -> Any:
        if not self._one:
            return tuple(getattr(step, name) for name in _TRANSITION_FIELDS)
        flags = bool(step.terminated[0]), bool(step.truncated[0])
        return step.obs[0], step.action[0], float(step.reward[0]), *flags, step.next_obs[0]

    def add(self, prepared: Any) -> None:
        self._buffer.add(*prepared)

    def fill(self, block: Transitions) -> None:
        self._buffer.extend({name: getattr(block, name) for name in _TRANSITION_FIELDS})

    extend = fill

    def sample(self, batch_size: int) -> Any:
        return self._buffer.sample(batch_size, self.view)

    def clear(self) -> None:
        self._buffer.clear()

    def save(self, path: str) -> None:
        self._buffer.save(path)

    def load(self, path: str) -> None:
        loaded = rl.load(path)
        assert isinstance(loaded, rl.ReplayBuffer)
        self._buffer = loaded

    def read(self, batch: Any) -> ReplayBatch:
        return ReplayBatch(**{name: batch[name].numpy() for name in ReplayBatch._fields if name in batch.keys()})

    @property
    def stored(self) -> int:
        return len(self._buffer)

    @property
    def nbytes(self) -> int:
        return self._buffer.nbytes


class OurReplayOfTorch(OurReplay):
    """Adapter of `rl.ReplayBuffer`, to which steps are passed as torch tensors."""

    def prepare(self, step: Transitions) -> Any:
        tensors = tuple(torch.from_numpy(getattr(step, name)) for name in _TRANSITION_FIELDS)
        return tuple(tensor[0] for tensor in tensors) if self._one else tensors


class OurStackedReplay(OurReplay):
    """Adapter of `rl.Stacked`, which stores single frames and rebuilds the stacks."""

    def _observation(self, shape: ReplayShape) -> rl.Field:
        if not shape.is_image:
            raise NotOffered
        return rl.Stacked(rl.Field(shape.obs[:-1], torch.uint8), shape.obs[-1])


class OurPrioritized(OurReplay):
    """Adapter of `rl.Prioritized`."""

    def _sampler(self) -> Sampler:
        return rl.Prioritized(ALPHA, BETA)

    def priority(self, values: Array) -> torch.Tensor:
        return torch.from_numpy(values)

    def update(self, batch: Any, priority: torch.Tensor) -> None:
        self._buffer.update_priority(batch["index"], priority)

    def handles(self, batch: Any) -> Array:
        return batch["index"].numpy()

    def set_priority(self, handles: Array, priority: Array) -> None:
        self._buffer.update_priority(handles, priority)


class OurStrictlyPrioritized(OurPrioritized):
    """Adapter of `rl.Prioritized` with eps=0."""

    def _sampler(self) -> Sampler:
        return rl.Prioritized(ALPHA, BETA, eps=0.0)


class OurReplayWithoutReplacement(OurReplay):
    """Adapter of `rl.WithoutReplacement`."""

    def _sampler(self) -> Sampler:
        return rl.WithoutReplacement()


class OurNStep(OurReplay):
    """Adapter of `rl.NStep`, which sums rewards when transitions are sampled."""

    def __init__(self, shape: ReplayShape, n: int, gamma: float) -> None:
        super().__init__(shape)
        self.view = rl.NStep(n, gamma)


class OurSequence(OurReplay):
    """Adapter of `rl.Sequence`, whose sequences end with their episode."""

    def __init__(self, shape: ReplayShape, length: int) -> None:
        super().__init__(shape)
        self.view = rl.Sequence(length)


class OurBurnIn(OurReplay):
    """Adapter of `rl.Sequence` with burn-in."""

    def __init__(self, shape: ReplayShape, burn_in: int, length: int) -> None:
        super().__init__(shape)
        self.view = rl.Sequence(length, burn_in)


class OurHindsight:
    """Adapter of `rl.Hindsight`."""

    def __init__(self, capacity: int, strategy: Any) -> None:
        self._buffer = rl.ReplayBuffer(capacity, {"at": 1, "goal": 1}, (), seed=0)
        self._view = rl.Hindsight("goal", "at", self._reached, strategy=strategy)

    @staticmethod
    def _reached(at: torch.Tensor, goal: torch.Tensor, rows: Any) -> tuple[torch.Tensor, torch.Tensor]:
        reward = torch.from_numpy(goal_reward(at.numpy(), goal.numpy())).squeeze(-1)
        return reward, reward == 0

    def add(self, step: GoalStep) -> None:
        obs, next_obs = ({"at": [at], "goal": [step.goal]} for at in (step.at, step.next_at))
        self._buffer.add(obs, 0.0, step.reward, step.terminated, step.truncated, next_obs)

    def sample(self, batch_size: int) -> GoalBatch:
        batch = self._buffer.sample(batch_size, self._view)
        at, goal, next_at = batch["obs", "at"], batch["obs", "goal"], batch["next_obs", "at"]
        columns = (at.squeeze(1), goal.squeeze(1), next_at.squeeze(1), batch["reward"], batch["terminated"])
        return GoalBatch(*(column.numpy() for column in columns))


class OurReplayOfSteps:
    """Adapter of `ReplayBuffer.for_env` and `add_step`."""

    def __init__(self, envs: VectorEnv, capacity: int) -> None:
        self._buffer = rl.ReplayBuffer.for_env(envs, capacity, seed=0)

    def add_step(self, obs: Array, action: Array, step: tuple[Any, ...]) -> None:
        self._buffer.add_step(obs, action, step)

    def sample(self, batch_size: int) -> ReplayBatch:
        batch = self._buffer.sample(batch_size)
        return ReplayBatch(**{name: batch[name].numpy() for name in ReplayBatch._fields if name in batch.keys()})

    @property
    def stored(self) -> int:
        return len(self._buffer)


def adapter() -> Adapter:
    """Return the adapter of relive."""
    return Adapter(
        "relive",
        rl.__version__,
        gae=OurGae,
        rollout=OurRollout,
        recurrent=OurRecurrent,
        rollout_given={"numpy": OurRolloutOfNumpy},
        replay=OurReplay,
        replay_given={"torch": OurReplayOfTorch},
        replay_saving={"Stacked": OurStackedReplay},
        stacked=OurStackedReplay,
        without_replacement=OurReplayWithoutReplacement,
        prioritized=OurPrioritized,
        prioritized_strictly=OurStrictlyPrioritized,
        n_step=OurNStep,
        sequence=OurSequence,
        burn_in=OurBurnIn,
        hindsight=OurHindsight,
        from_env=OurReplayOfSteps,
    )
