"""Small rings that have gone round, each beside a slow reference that was given the same steps."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch

import relive as rl
from relive.storage import Memory
from tests.reference.replay import Column

K = 3
ROWS = 12
Obs = dict[str, np.ndarray]


class Life:
    """Plain and stacked observations, a carried field, several dtypes, cuts, ends and time limits."""

    obs: ClassVar = {"plain": rl.Field(2, torch.float64), "frames": rl.Stacked(rl.Field(2, torch.uint8), K, 0)}
    extra: ClassVar = {"hidden": rl.Carry((2,)), "word": rl.Field((), torch.uint16)}

    def __init__(self, num_envs: int | None, seed: int, autoreset: str, device: Memory | str = "cpu") -> None:
        self.lead = () if num_envs is None else (num_envs,)
        self.count = num_envs or 1
        self.rng = np.random.default_rng(seed)
        self.next_step = autoreset == "NEXT_STEP"
        self.replay = rl.ReplayBuffer(
            ROWS * self.count, self.obs, 2, num_envs=num_envs, extra=self.extra, autoreset=autoreset, seed=seed,
            device=device,
        )  # fmt: skip
        self.columns = [Column(ROWS, self.next_step) for _ in range(self.count)]
        self._live(int(self.rng.integers(2, 40)))

    def _fresh(self) -> Obs:
        frame = self.rng.integers(0, 255, (self.count, 1, 2), np.uint8)
        return {"plain": self.rng.normal(size=(self.count, 2)), "frames": np.repeat(frame, K, 1)}

    def _led_to(self, obs: Obs) -> Obs:
        frame = self.rng.integers(0, 255, (self.count, 1, 2), np.uint8)
        frames = np.concatenate([obs["frames"][:, 1:], frame], 1)
        return {"plain": self.rng.normal(size=(self.count, 2)), "frames": frames}

    def _live(self, steps: int) -> None:
        obs, resets = self._fresh(), np.zeros(self.count, bool)
        for _ in range(steps):
            following, first = self._led_to(obs), self._fresh()
            ends = (self.rng.random(self.count) < 0.25) & ~resets
            late = self.rng.random(self.count) < 0.5
            given = _chosen(resets, first, following) if self.next_step else following
            self._add(obs, given, ends & ~late, ends & late)
            obs = given if self.next_step else _chosen(ends, first, following)
            resets = ends if self.next_step else resets
            if self.rng.random() < 0.1 and not resets.any():
                self.replay.cut()
                for column in self.columns:
                    column.cut()
                obs = self._fresh()

    def _add(self, obs: Obs, following: Obs, terminated: np.ndarray, truncated: np.ndarray) -> None:
        action, reward = self.rng.normal(size=(2, self.count, 2)).astype(np.float32)
        reward = reward[:, 0]
        hidden = self.rng.normal(size=(self.count, 2)).astype(np.float32)
        word = self.rng.integers(0, 2**16, self.count).astype(np.uint16)

        def shaped(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: shaped(leaf) for name, leaf in value.items()}
            return value if self.lead else value[0]

        values = (obs, action, reward, terminated, truncated, following)
        self.replay.add(*map(shaped, values), hidden=shaped(hidden), word=shaped(word))
        flat = {("action",): action, ("reward",): reward, ("terminated",): terminated, ("truncated",): truncated}
        flat |= {("hidden",): hidden, ("word",): word}
        flat |= {("obs", name): leaf for name, leaf in obs.items()}
        flat |= {("next_obs", name): leaf for name, leaf in following.items()}
        for env, column in enumerate(self.columns):
            leaves = {path: leaf[env].copy() for path, leaf in flat.items()}
            column.add(
                {
                    "obs": b"".join(obs[name][env].tobytes() for name in obs),
                    "next_obs": b"".join(following[name][env].tobytes() for name in following),
                    "terminated": bool(terminated[env]), "truncated": bool(truncated[env]), "leaves": leaves,
                }
            )  # fmt: skip

    def rows(self) -> list[tuple[int, int, int]]:
        """(id, environment, row) of everything that may be drawn."""
        found = [
            (row * self.count + env, env, row) for env, column in enumerate(self.columns) for row in column.transitions
        ]
        return sorted(found)


def _chosen(mask: np.ndarray, a: Obs, b: Obs) -> Obs:
    return {name: np.where(mask.reshape(-1, *(1,) * (a[name].ndim - 1)), a[name], b[name]) for name in a}
