"""Random histories of a replay buffer: episodes, cuts, resets, environments out of phase."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import relive as rl
from relive.replay.views import View
from tests.reference.replay import Column


@dataclass
class World:
    """Environments with numbered, recognisable observations."""

    random: np.random.Generator
    num_envs: int
    end_rate: float = 0.25
    jump_rate: float = 0.1
    next_step: bool = False
    obs: list[float] = field(default_factory=list)
    resetting: list[bool] = field(default_factory=list)
    serial: float = 0.0

    def __post_init__(self) -> None:
        self.obs = [self._fresh() for _ in range(self.num_envs)]
        self.resetting = [False] * self.num_envs

    def _fresh(self) -> float:
        self.serial += 1
        return self.serial

    def step(self, env: int) -> dict[str, Any]:
        if self.random.random() < self.jump_rate and not self.resetting[env]:
            self.obs[env] = self._fresh()  # an unannounced reset or changed observation
        resets = self.resetting[env]
        kind = self.random.random()
        step = {
            "obs": self.obs[env],
            "action": float(self.random.integers(100)),
            "reward": self._fresh(),
            "terminated": not resets and kind < self.end_rate,
            "truncated": not resets and kind > 1 - self.end_rate,
            "next_obs": self._fresh(),
        }
        ended = step["terminated"] or step["truncated"]
        self.resetting[env] = ended and self.next_step
        self.obs[env] = self._fresh() if ended and not self.next_step else step["next_obs"]
        return step


def arrays(steps: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Convert steps of several environments to arguments of `add`; an observation is a vector of length 1."""
    return {
        name: np.array([step[name] for step in steps], bool if name in ("terminated", "truncated") else np.float32)
        for name in steps[0]
    } | {name: np.array([[step[name]] for step in steps], np.float32) for name in ("obs", "next_obs")}


class Both:
    """A replay buffer and its model, which receive the same calls."""

    def __init__(
        self, rows: int, num_envs: int, random: np.random.Generator, *, next_step: bool = False, **options: Any
    ) -> None:
        mode = "NEXT_STEP" if next_step else None
        options = {"obs": 1, "action": (), "seed": 0, "autoreset": mode, **options}
        self.replay = rl.ReplayBuffer(rows * num_envs, num_envs=num_envs, **options)
        self.columns = [Column(rows, next_step) for _ in range(num_envs)]
        self.world = World(random, num_envs, next_step=next_step)
        self.random = random

    def add(self, envs: list[int] | None = None) -> None:
        chosen = list(range(len(self.columns))) if envs is None else envs
        steps = [self.world.step(env) for env in chosen]
        self.replay.add(**arrays(steps), env_ids=envs)
        for env, step in zip(chosen, steps, strict=True):
            self.columns[env].add(step)

    def extend(self, length: int) -> None:
        block = [[self.world.step(env) for env in range(len(self.columns))] for _ in range(length)]
        stacked = [arrays(steps) for steps in block]
        self.replay.extend({name: np.stack([step[name] for step in stacked]) for name in stacked[0]})
        for steps in block:
            for column, step in zip(self.columns, steps, strict=True):
                column.add(step)

    def cut(self, envs: list[int]) -> None:
        self.replay.cut(envs)
        for env in envs:
            self.columns[env].cut()
            self.world.resetting[env] = False

    def clear(self) -> None:
        self.replay.clear()
        for column in self.columns:
            column.clear()

    def play(self, length: int) -> None:
        """Run a random history, with `check()` after each call."""
        n = len(self.columns)
        for _ in range(length):
            choice = self.random.random()
            some = sorted(self.random.permutation(n)[: self.random.integers(1, n + 1)].tolist())
            if choice < 0.70:
                self.add(None if choice < 0.4 else some)
            elif choice < 0.85:
                self.extend(int(self.random.integers(1, 5)))
            elif choice < 0.97:
                self.cut(some)
            else:
                self.clear()
            self.replay.check()

    @property
    def expected(self) -> dict[int, dict[str, Any]]:
        """Sampleable transitions by id."""
        n = len(self.columns)
        return {
            row * n + env: step for env, column in enumerate(self.columns) for row, step in column.transitions.items()
        }


def read(replay: rl.ReplayBuffer, ids: list[int], view: View) -> dict[Any, torch.Tensor]:
    """Read given rows through a view; return tensors by path."""
    batch: Any = replay.read(torch.tensor(ids, dtype=torch.int64), view)
    return {key if isinstance(key, tuple) else (key,): batch.get(key) for key in batch.keys(True, True)}
