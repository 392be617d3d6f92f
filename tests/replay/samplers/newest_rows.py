"""Buffers whose rows can be told, for samplers that look at how new a row is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import relive as rl
from relive import kernels
from tests.conftest import BACKENDS

KINDS = [*BACKENDS, "shared", "disk"]


@contextmanager
def memory_of(kind: str, path: Path) -> Iterator[Any]:
    """What `device=` names, with the backend of this kind."""
    if kind in BACKENDS:
        with BACKENDS[kind]():
            yield "cpu"
    else:
        yield rl.Memory.shared() if kind == "shared" else rl.Memory.disk(path / "memory")


def is_possible(kind: str) -> bool:
    return kind == "torch" or kernels.native() is not None


class Lived:
    """Environments whose episodes end at random, each step of which is known by its id and by its observation."""

    def __init__(self, replay: rl.ReplayBuffer, seed: int, ends: float = 0.2) -> None:
        self.replay, self._rng, self._ends = replay, np.random.default_rng(seed), ends
        self._number, self._resets = 0.0, np.zeros(replay.num_envs or 1, bool)
        self._obs = self._fresh()

    def _fresh(self) -> np.ndarray:
        count = self.replay.num_envs or 1
        numbers = self._number + np.arange(count)
        self._number += count
        return numbers[:, None]

    def step(self, envs: np.ndarray | None = None) -> list[int]:
        """One step of the environments `envs`, or of all; returns the ids of the new rows."""
        before = set(self.replay.ids().tolist())
        chosen = np.arange(self.replay.num_envs or 1) if envs is None else envs
        following, first = self._fresh(), self._fresh()
        ends = self._rng.random(len(chosen)) < self._ends
        none = np.zeros(len(chosen), bool)
        obs = self._obs[chosen]
        self.replay.add(obs, obs[:, 0], obs[:, 0], ends, none, following[chosen], env_ids=chosen.tolist())
        self._obs[chosen] = np.where(ends[:, None], first[chosen], following[chosen])
        return sorted(set(self.replay.ids().tolist()) - before)
