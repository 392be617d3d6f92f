"""The capabilities of an adapter's replay buffer, as protocols over shared numpy data.

As in `protocol`, what a user of the library would not pay for belongs to `prepare`, `fill` and `read`, which are never
timed. A learner computes in torch, so `sample` ends in torch tensors: libraries that draw numpy arrays get them
wrapped by `torch.from_numpy`, which copies nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol

import numpy as np

Array = np.ndarray[Any, Any]

ALPHA, BETA = 0.6, 0.4
"""Exponents of every prioritized buffer."""


class NotOffered(Exception):
    """Raised if a library lacks an operation, lacks it for this shape, or documents another meaning of it."""


class ReplayShape(NamedTuple):
    """The size of a replay buffer: `capacity` transitions of N environments."""

    capacity: int
    num_envs: int
    obs: tuple[int, ...]
    action_dim: int
    dtype: type[np.generic] = np.float32
    """The shape of observations. Images are (height, width, k) with k stacked frames, the newest last."""
    seed: int | None = 0
    """The seed of the draws; None leaves it to the library."""

    @property
    def is_image(self) -> bool:
        """Whether observations are stacks of frames."""
        return len(self.obs) > 1


@dataclass(frozen=True)
class Transitions:
    """Transitions as arrays with one leading axis: a step of N environments, or T steps of one environment."""

    obs: Array
    action: Array
    reward: Array
    terminated: Array
    truncated: Array
    next_obs: Array

    def __len__(self) -> int:
        return len(self.reward)

    def __getitem__(self, rows: slice) -> Transitions:
        return Transitions(*(getattr(self, field.name)[rows] for field in fields(self)))

    @property
    def ended(self) -> Array:
        """Whether each step ended its episode, by termination or truncation."""
        return self.terminated | self.truncated


class ReplayBatch(NamedTuple):
    """The fields that a learner reads, arrays [B, …], or [B, L, …] of sequences."""

    obs: Array
    action: Array
    reward: Array
    terminated: Array
    next_obs: Array
    weight: Array | None = None
    discount: Array | None = None
    """γ^k of an n-step transition; None if the library leaves it to the learner."""
    mask: Array | None = None
    """True for real steps of a sequence; None means all."""
    train: Array | None = None
    """True for trained steps; None means all after the requested burn-in."""


class Replay(Protocol):
    """A replay buffer that is written step by step and sampled with replacement.

    The conformance cases use `add`, `sample` and `stored`, and these where they are there, documented in `OPTIONAL`:
    `prepare` and `read`, which without them pass on what they are given, and more that some libraries offer.
    """

    def prepare(self, step: Transitions) -> Any:
        """Return the argument of `add` for a step, in the library's preferred form."""
        ...

    def add(self, prepared: Any) -> None:
        """Store one step of all environments."""
        ...

    def fill(self, block: Transitions) -> None:
        """Store steps of a single environment, in time order, in the fastest way; benchmarks do not time this method.

        If the library has no call for it, the adapter writes into the library's arrays.
        """
        ...

    def sample(self, batch_size: int) -> Any:
        """Return a batch of torch tensors, in the library's own container."""
        ...

    def read(self, batch: Any) -> ReplayBatch:
        """Return a batch as arrays under our names."""
        ...

    @property
    def stored(self) -> int:
        """The number of transitions that can be sampled."""
        ...

    @property
    def nbytes(self) -> int | None:
        """The bytes of all arrays and tensors of the buffer; None if the library hides them."""
        ...


class PrioritizedReplay(Replay, Protocol):
    """A replay buffer that draws transitions in proportion to priority^ALPHA."""

    def priority(self, values: Array) -> Any:
        """Return priorities in the form that `update` prefers; benchmarks do not time this method."""
        ...

    def update(self, batch: Any, priority: Any) -> None:
        """Give the drawn transitions new priorities."""
        ...

    def handles(self, batch: Any) -> Array:
        """Return the library's identifiers [B] of the drawn transitions, for setting their priorities."""
        ...

    def set_priority(self, handles: Array, priority: Array) -> None:
        """Give the transitions of these handles new priorities."""
        ...


OPTIONAL = {
    "extend": "extend(block): steps of one environment in one call, where the library has a call for that",
    "raw": "raw(step): what `add` takes, without repairing shapes; `prepare` where it is missing",
    "clear": "clear(): forget everything",
    "save": "save(path): write everything to a file or folder",
    "load": "load(path): become what was saved there",
    "draws_from": "a sentence, if draws come from a generator that is not the buffer's own: its seed is not looked at",
    "default_seed": "a sentence, if two buffers that are given no seed are documented to draw the same",
    "crosses_episodes": "a sentence, if sequences are documented to go on through the ends of episodes",
    "flags_of_first_step": "a sentence, if n-step transitions are documented to keep the flags of their first step",
    "finished_only": "a sentence, if sequences are documented to come from finished episodes",
    "fewer_is_documented": "a sentence, if a batch is documented to be smaller where too little is stored",
    "safe_in_threads": "True, if the library promises that threads may write and sample at once",
    "survives_kill": "True, if the library promises that a killed `save` leaves the last whole one",
}
"""Optional parts of a replay adapter; cases that need a missing part are "not offered"."""


class GoalStep(NamedTuple):
    """One step of one environment with a goal: its position and its goal as numbers."""

    at: float
    goal: float
    next_at: float
    reward: float
    terminated: bool
    truncated: bool


class GoalBatch(NamedTuple):
    """Transitions with replaced goals, arrays [B]; `terminated` is None if the library documents that it keeps it."""

    at: Array
    goal: Array
    next_at: Array
    reward: Array
    terminated: Array | None = None


class GoalReplay(Protocol):
    """A replay buffer that replaces goals; its reward is `goal_reward`."""

    def add(self, step: GoalStep) -> None:
        """Store one step of the only environment."""
        ...

    def sample(self, batch_size: int) -> GoalBatch:
        """Draw transitions, most of them with a replaced goal."""
        ...


def goal_reward(at: Array, goal: Array) -> Array:
    """Return the reward of a goal task: 0 at the goal, −1 elsewhere."""
    return np.where(np.asarray(at) == np.asarray(goal), 0.0, -1.0).astype(np.float32)


class StepReplay(Protocol):
    """A replay buffer that takes the results of a Gymnasium vector environment in any autoreset mode."""

    def add_step(self, obs: Array, action: Array, step: tuple[Any, ...]) -> None:
        """Store one step of all environments, with `step = env.step(action)`."""
        ...

    def sample(self, batch_size: int) -> ReplayBatch:
        """Draw transitions."""
        ...

    @property
    def stored(self) -> int:
        """The number of transitions that can be sampled."""
        ...


def drop_unit_axis(array: Any) -> Array:
    """Return a tensor or array [B, 1] or [B] as an array [B]; several libraries store scalars as [B, 1]."""
    return np.asarray(array).reshape(len(array))
