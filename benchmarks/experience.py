"""Recognisable transitions for the replay buffers of all libraries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from relive_conformance.adapters import ReplayShape, Transitions

Array = np.ndarray[Any, Any]

EPISODE_STEPS = (150, 250)
"""The shortest and the longest length of an episode."""
_BLOCK_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Experience:
    """T steps of N environments; row t·N + n is a transition.

    Every observation is kept once: an episode of L steps has L + 1 of them in a row, and the next observation of a step
    follows its own. Each begins with its number, exact in float32 or as the four bytes of the first pixels.
    """

    shape: ReplayShape
    frames: Array
    """[F, …] observations, or the single frames of stacked ones."""
    place: Array
    """[T·N] index of a row's observation in `frames`."""
    first: Array
    """[T·N] index of the first observation of a row's episode."""
    action: Array
    reward: Array
    terminated: Array
    truncated: Array

    def __len__(self) -> int:
        return len(self.place)

    def rows(self, index: Array) -> Transitions:
        """Return the transitions of the given rows."""
        place, first = self.place[index], self.first[index]
        return Transitions(
            obs=self._seen(place, first),
            action=self.action[index],
            reward=self.reward[index],
            terminated=self.terminated[index],
            truncated=self.truncated[index],
            next_obs=self._seen(place + 1, first),
        )

    def blocks(self) -> Iterator[Transitions]:
        """Yield all rows of a single environment in time order, in small blocks."""
        row_bytes = 2 * int(np.prod(self.shape.obs)) * np.dtype(self.shape.dtype).itemsize
        length = max(1, _BLOCK_BYTES // row_bytes)
        for start in range(0, len(self), length):
            yield self.rows(np.arange(start, min(start + length, len(self))))

    def steps(self) -> list[Transitions]:
        """Yield single steps; a next observation and the observation after it are the same array."""
        num_envs = self.shape.num_envs
        steps: list[Transitions] = []
        for start in range(0, len(self), num_envs):
            step = self.rows(np.arange(start, start + num_envs))
            if steps and not steps[-1].ended.any():
                step = Transitions(**{**vars(step), "obs": steps[-1].next_obs})
            steps.append(step)
        return steps

    def find_rows(self, obs: Array) -> Array:
        """Return the rows [B] of observations [B, …]; −1 for an unknown observation."""
        rows = np.full(len(self.frames) + 1, -1)
        rows[self.place] = np.arange(len(self))
        number = self._number(obs)
        return rows[np.where((number >= 0) & (number < len(self.frames)), number, -1)]

    def last_of_episode(self) -> Array:
        """Return [T] the last row of each row's episode, for a single environment."""
        ends = np.flatnonzero(self.terminated | self.truncated)
        return ends[np.searchsorted(ends, np.arange(len(self)))]

    def _seen(self, place: Array, first: Array) -> Array:
        if not self.shape.is_image:
            return self.frames[place]
        stack = [self.frames[np.maximum(place - back, first)] for back in reversed(range(self.shape.obs[-1]))]
        return np.stack(stack, axis=-1)

    def _number(self, obs: Array) -> Array:
        if not self.shape.is_image:
            return np.nan_to_num(obs[:, 0], nan=-1.0).astype(np.int64)
        newest = np.ascontiguousarray(obs[..., -1].reshape(len(obs), -1)[:, :4])
        return newest.view("<u4").reshape(-1).astype(np.int64)


def make_experience(shape: ReplayShape, num_steps: int, seed: int, truncated_share: float = 0.0) -> Experience:
    """Return random transitions in ended episodes of about 200 steps; a share of the ends is truncated."""
    rng = np.random.default_rng(seed)
    ended = np.stack([_ends(num_steps, rng) for _ in range(shape.num_envs)], axis=1)
    truncated = ended & (rng.random(ended.shape) < truncated_share)
    started = np.concatenate([np.ones_like(ended[:1]), ended[:-1]])
    streams = np.cumsum(num_steps + ended.sum(axis=0))
    ends_before = np.cumsum(ended, axis=0) - ended
    place = np.arange(num_steps)[:, None] + ends_before + np.concatenate([[0], streams[:-1]])
    rows = num_steps * shape.num_envs
    return Experience(
        shape,
        frames=_frames(int(streams[-1]), shape, rng),
        place=place.reshape(rows),
        first=np.maximum.accumulate(np.where(started, place, 0), axis=0).reshape(rows),
        action=rng.standard_normal((rows, shape.action_dim), dtype=np.float32),
        reward=rng.standard_normal(rows, dtype=np.float32),
        terminated=(ended & ~truncated).reshape(rows),
        truncated=truncated.reshape(rows),
    )


def _ends(num_steps: int, rng: np.random.Generator) -> Array:
    shortest, longest = EPISODE_STEPS
    ends = np.cumsum(rng.integers(shortest, longest + 1, size=num_steps // shortest + 1)) - 1
    ended = np.zeros(num_steps, dtype=bool)
    ended[ends[ends < num_steps]] = True
    ended[-1] = True
    return ended


def _frames(count: int, shape: ReplayShape, rng: np.random.Generator) -> Array:
    if not shape.is_image:
        frames = rng.standard_normal((count, *shape.obs), dtype=np.float32)
        frames[:, 0] = np.arange(count)
        return frames
    frames = rng.integers(0, 256, size=(count, *shape.obs[:-1]), dtype=np.uint8)
    frames.reshape(count, -1)[:, :4] = np.arange(count, dtype="<u4").view(np.uint8).reshape(count, 4)
    return frames
