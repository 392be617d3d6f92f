"""What a peer's replay buffer may offer, as protocols over shared numpy data.

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
"""The exponents that every prioritized buffer is made with."""


class NotOffered(Exception):
    """The library has no such operation, or none for this shape."""


class ReplayShape(NamedTuple):
    """How large a replay buffer is: `capacity` transitions of N environments."""

    capacity: int
    num_envs: int
    obs: tuple[int, ...]
    action_dim: int
    dtype: type[np.generic] = np.float32
    """Of observations. Images are (height, width, k) with k stacked frames, the newest last."""

    @property
    def is_image(self) -> bool:
        """Whether observations are stacks of frames."""
        return len(self.obs) > 1


@dataclass(frozen=True)
class Transitions:
    """Transitions as arrays with one leading axis: a step of N environments, or T steps of one."""

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
        """Bool: the episode ended with this step, in either way."""
        return self.terminated | self.truncated


class ReplayBatch(NamedTuple):
    """What a learner reads, [B, …] arrays, or [B, L, …] of sequences."""

    obs: Array
    action: Array
    reward: Array
    terminated: Array
    next_obs: Array
    weight: Array | None = None
    discount: Array | None = None
    """γ^k of an n-step transition; None where the library leaves it to the learner."""
    mask: Array | None = None
    """Which steps of a sequence are real; None says all."""


class Replay(Protocol):
    """A replay buffer that is written step by step and sampled with replacement."""

    def prepare(self, step: Transitions) -> Any:
        """What `add` takes, in the form that this library likes best."""
        ...

    def add(self, prepared: Any) -> None:
        """Store one step of all environments."""
        ...

    def fill(self, block: Transitions) -> None:
        """Store steps of a single environment, in time order, in the fastest way there is; never timed.

        Where a library has no call for that, its own arrays are written.
        """
        ...

    def sample(self, batch_size: int) -> Any:
        """A batch of torch tensors, in the library's own container."""
        ...

    def read(self, batch: Any) -> ReplayBatch:
        """The same as arrays under our names."""
        ...

    @property
    def stored(self) -> int:
        """How many transitions can be sampled."""
        ...

    @property
    def nbytes(self) -> int | None:
        """All arrays and tensors that the buffer holds; None where the library hides them."""
        ...


class PrioritizedReplay(Replay, Protocol):
    """A replay buffer that draws transitions in proportion to priority^ALPHA."""

    def priority(self, values: Array) -> Any:
        """Priorities in the form that `update` likes best; never timed."""
        ...

    def update(self, batch: Any, priority: Any) -> None:
        """Give the drawn transitions new priorities."""
        ...


def whole(array: Any) -> Array:
    """A torch tensor or array of shape [B, 1] or [B] as an array [B]: several libraries keep an axis for scalars."""
    return np.asarray(array).reshape(len(array))
