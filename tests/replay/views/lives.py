"""Small replay buffers whose rings have wrapped around, with a slow reference that has the same steps."""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch

import relive as rl
from relive.storage import Memory
from tests.conftest import BACKENDS
from tests.reference.replay import Column

K = 3
ROWS = 12
Obs = dict[str, np.ndarray]


class RecordedReplay:
    """A replay buffer and its reference: stacked observations, a `Carry` field, several dtypes, cuts and all ends."""

    obs: ClassVar = {"plain": rl.Field(2, torch.float64), "frames": rl.Stacked(rl.Field(2, torch.uint8), K, 0)}
    extra: ClassVar = {"hidden": rl.Carry((2,)), "word": rl.Field((), torch.uint16)}

    def __init__(self, num_envs: int | None, seed: int, autoreset: str, device: Memory | str = "cpu") -> None:
        self.leading_shape = () if num_envs is None else (num_envs,)
        self.count = num_envs or 1
        self.rng = np.random.default_rng(seed)
        self.next_step = autoreset == "NEXT_STEP"
        self.replay = rl.ReplayBuffer(
            ROWS * self.count, self.obs, 2, num_envs=num_envs, extra=self.extra, autoreset=autoreset, seed=seed,
            device=device,
        )  # fmt: skip
        self.columns = [Column(ROWS, self.next_step) for _ in range(self.count)]
        self._add_steps(int(self.rng.integers(2, 40)))

    def _first_obs(self) -> Obs:
        frame = self.rng.integers(0, 255, (self.count, 1, 2), np.uint8)
        return {"plain": self.rng.normal(size=(self.count, 2)), "frames": np.repeat(frame, K, 1)}

    def _next_obs(self, obs: Obs) -> Obs:
        frame = self.rng.integers(0, 255, (self.count, 1, 2), np.uint8)
        frames = np.concatenate([obs["frames"][:, 1:], frame], 1)
        return {"plain": self.rng.normal(size=(self.count, 2)), "frames": frames}

    def _add_steps(self, steps: int) -> None:
        obs, resets = self._first_obs(), np.zeros(self.count, bool)
        for _ in range(steps):
            next_obs, first = self._next_obs(obs), self._first_obs()
            ends = (self.rng.random(self.count) < 0.25) & ~resets
            is_truncated = self.rng.random(self.count) < 0.5
            shown_obs = _where(resets, first, next_obs) if self.next_step else next_obs
            self._add(obs, shown_obs, ends & ~is_truncated, ends & is_truncated)
            obs = shown_obs if self.next_step else _where(ends, first, next_obs)
            resets = ends if self.next_step else resets
            if self.rng.random() < 0.1 and not resets.any():
                self.replay.cut()
                for column in self.columns:
                    column.cut()
                obs = self._first_obs()

    def _add(self, obs: Obs, next_obs: Obs, terminated: np.ndarray, truncated: np.ndarray) -> None:
        action, reward = self.rng.normal(size=(2, self.count, 2)).astype(np.float32)
        reward = reward[:, 0]
        hidden = self.rng.normal(size=(self.count, 2)).astype(np.float32)
        word = self.rng.integers(0, 2**16, self.count).astype(np.uint16)

        def drop_axis(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: drop_axis(leaf) for name, leaf in value.items()}
            return value if self.leading_shape else value[0]

        values = (obs, action, reward, terminated, truncated, next_obs)
        self.replay.add(*map(drop_axis, values), hidden=drop_axis(hidden), word=drop_axis(word))
        flat = {("action",): action, ("reward",): reward, ("terminated",): terminated, ("truncated",): truncated}
        flat |= {("hidden",): hidden, ("word",): word}
        flat |= {("obs", name): leaf for name, leaf in obs.items()}
        flat |= {("next_obs", name): leaf for name, leaf in next_obs.items()}
        for env, column in enumerate(self.columns):
            leaves = {path: leaf[env].copy() for path, leaf in flat.items()}
            column.add(
                {
                    "obs": b"".join(obs[name][env].tobytes() for name in obs),
                    "next_obs": b"".join(next_obs[name][env].tobytes() for name in next_obs),
                    "terminated": bool(terminated[env]), "truncated": bool(truncated[env]), "leaves": leaves,
                }
            )  # fmt: skip

    def rows(self) -> list[tuple[int, int, int]]:
        """Return (id, environment, row) of all transitions."""
        rows = [
            (row * self.count + env, env, row) for env, column in enumerate(self.columns) for row in column.transitions
        ]
        return sorted(rows)


@cache
def record_replay(name: str, num_envs: int | None, seed: int, autoreset: str) -> RecordedReplay:
    """Make a buffer with one of the backends; cached, because that takes longer than all reads."""
    with BACKENDS[name]():
        return RecordedReplay(num_envs, seed, autoreset)


def _where(mask: np.ndarray, a: Obs, b: Obs) -> Obs:
    return {name: np.where(mask.reshape(-1, *(1,) * (a[name].ndim - 1)), a[name], b[name]) for name in a}
