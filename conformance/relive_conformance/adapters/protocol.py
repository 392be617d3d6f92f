"""The capabilities of an adapter, as protocols over shared numpy data; replay buffers are in `off_policy`.

An `Adapter` names a library and holds one class for each capability; None says "not offered". Adapters translate
our convention (everything at index t belongs to the action taken at t) into the documented meaning of their
library, and nothing else: what a library does between its public call and its result stays the library's.

Conversions that a user of the library would not pay for belong to `prepare`, which is never timed. What an adapter
hands out natively (a batch, a pair of advantages and returns) is turned into comparable form by `read`, never timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from gymnasium.vector import VectorEnv

from relive_conformance.adapters.off_policy import GoalReplay, PrioritizedReplay, Replay, ReplayShape, StepReplay

Array = np.ndarray[Any, Any]


class RolloutShape(NamedTuple):
    """The size of a rollout: T steps of N environments with flat float32 observations and actions."""

    num_steps: int
    num_envs: int
    obs_dim: int
    action_dim: int


@dataclass(frozen=True)
class Step:
    """One step of all environments, as float32 and bool arrays [N, …]."""

    obs: Array
    action: Array
    reward: Array
    terminated: Array
    truncated: Array
    value: Array
    log_prob: Array
    started: Array
    """[N] bool: the episode ended just before this step, so `obs` is the first of a new one."""


@dataclass(frozen=True)
class Trajectory:
    """The inputs of an advantage, as [T, N] arrays.

    `next_value[t]` is the value of the state that the action at t led to, before any reset.
    """

    reward: Array
    value: Array
    next_value: Array
    terminated: Array
    truncated: Array

    @property
    def ended(self) -> Array:
        """Whether the action at t ended the episode, by termination or truncation, as bools [T, N]."""
        return self.terminated | self.truncated

    @property
    def last_value(self) -> Array:
        """The value [N] of the state that the newest action led to."""
        return self.next_value[-1]

    def reward_with_truncation_folded_in(self, gamma: float) -> Array:
        """Return rewards [T, N] with γ V(next) added at truncated steps, for libraries without a next value.

        The newest step is treated like any other truncated step, because its episode has ended.
        """
        bootstrap = self.truncated & ~self.terminated
        return (self.reward + gamma * self.next_value * bootstrap).astype(self.reward.dtype)


class Batch(NamedTuple):
    """The six fields that a PPO update reads, [B, …] tensors."""

    obs: torch.Tensor
    action: torch.Tensor
    value: torch.Tensor
    log_prob: torch.Tensor
    advantage: torch.Tensor
    return_: torch.Tensor


class Gae(Protocol):
    """A stand-alone advantage estimator, in the library's fastest form."""

    def prepare(self, trajectory: Trajectory, *, gamma: float, lam: float) -> Callable[[], Any]:
        """Return a call without arguments that computes advantages and returns in the library's own layout."""
        ...

    def read(self, output: Any) -> tuple[Array, Array]:
        """Return (advantage, return), both [T, N], from the result of the prepared call."""
        ...


class Epoch(Protocol):
    """A full rollout that can be read in shuffled minibatches."""

    standardizes: bool
    """Whether the library itself normalises advantages to mean 0 and standard deviation 1."""

    def minibatches(self, batch_size: int) -> Iterable[Any]:
        """Yield one epoch in the library's own batches: each row once, shuffled."""
        ...

    def read(self, batch: Any) -> Batch:
        """Return the tensors of a batch under our names."""
        ...


class Rollout(Epoch, Protocol):
    """A rollout buffer: filled step by step, then read in epochs."""

    def prepare(self, step: Step) -> Any:
        """Return the argument of `add` for a step, in the library's preferred form."""
        ...

    def add(self, prepared: Any) -> None:
        """Store one step of all environments."""
        ...

    def advantage(self, last_value: torch.Tensor, last_done: Array, *, gamma: float, lam: float) -> Any:
        """Compute and keep advantages and returns of the full rollout.

        `last_value` [N] float32 is the value after the newest step, `last_done` [N] bool says whether it ended one.
        """
        ...

    def clear(self) -> None:
        """Remove the rollout, as the library's own training loop does."""
        ...


class Sequences(NamedTuple):
    """The rows t·N + n of each sequence's steps, and the recurrent state [S, H] that each starts from."""

    rows: list[list[int]]
    state: Array


class Recurrent(Protocol):
    """A full rollout with recurrent states, read in shuffled or ordered minibatches of sequences."""

    def fill(self, steps: list[Step], state: Array, advantage: Array, return_: Array) -> None:
        """Store the steps, the state [T, N, H] before each, and their advantages and returns [T, N]."""
        ...

    def minibatches(self, num_steps: int) -> Iterable[Any]:
        """Yield one epoch in the library's own batches of about `num_steps` steps."""
        ...

    def read(self, batch: Any) -> Sequences:
        """Return the steps and states of a batch; the first number of an observation is its row."""
        ...


@dataclass(frozen=True)
class Adapter:
    """A library, and a class or function for each capability that the cases test."""

    name: str
    version: str
    gae: type[Gae] | None = None
    collected: type[Gae] | None = None
    """The same estimator, as the library's own collection loop calls it."""
    rollout: Callable[[RolloutShape], Rollout] | None = None
    epoch: Callable[[list[Step], Array, Array], Epoch] | None = None
    """For libraries without `rollout`: makes a shuffling object of steps, advantage [T, N] and return [T, N]."""
    rollout_given: Mapping[str, Callable[[RolloutShape], Rollout]] = field(default_factory=dict)
    """The same rollout with other kinds of input, by the name of the kind."""
    recurrent: Callable[[RolloutShape, int], Recurrent] | None = None
    """Makes a rollout, of a shape and a length, that is read in sequences of that length."""
    replay: Callable[[ReplayShape], Replay] | None = None
    """Draws transitions uniformly."""
    replay_given: Mapping[str, Callable[[ReplayShape], Replay]] = field(default_factory=dict)
    """The same replay with other kinds of input, by the name of the kind."""
    replay_saving: Mapping[str, Callable[[ReplayShape], Replay]] = field(default_factory=dict)
    """The same replay with the library's settings that save memory, by their names."""
    stacked: Callable[[ReplayShape], Replay] | None = None
    """Keeps single frames of images and rebuilds their stacks."""
    without_replacement: Callable[[ReplayShape], Replay] | None = None
    """Draws every stored transition once before it draws one again."""
    prioritized: Callable[[ReplayShape], PrioritizedReplay] | None = None
    prioritized_strictly: Callable[[ReplayShape], PrioritizedReplay] | None = None
    """The same with the strictest settings: nothing is added to priorities, overwritten rows are detected."""
    n_step: Callable[[ReplayShape, int, float], Replay] | None = None
    """Makes a replay, of a shape, n and gamma, whose batches are n-step transitions."""
    n_step_plain: Callable[[ReplayShape, int, float], Replay] | None = None
    """The same without the adapter's corrections."""
    sequence: Callable[[ReplayShape, int], Replay] | None = None
    """Makes a replay, of a shape and a length L, whose batches are sequences [B, L, …]."""
    burn_in: Callable[[ReplayShape, int, int], Replay] | None = None
    """Makes a replay, of a shape, a burn-in and a length, of sequences with up to `burn_in` steps before the row."""
    hindsight: Callable[[int, str], GoalReplay] | None = None
    """Makes a replay, of a capacity and a strategy ("future" or "final"), that replaces goals."""
    from_env: Callable[[VectorEnv, int], StepReplay] | None = None
    """Makes a replay, of a vector environment and a capacity, that understands how the environment resets."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """Why a case does not apply, by its number: what the library documents, or why it cannot run here."""
