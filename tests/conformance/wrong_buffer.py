"""A typical hand-written buffer with three mistakes, and its adapter."""

from __future__ import annotations

from typing import Any

import numpy as np

from relive_conformance import ReplayShape, Transitions

FIELDS = ("obs", "action", "reward", "terminated", "next_obs")
MISTAKES = ["T7", "T21", "T27"]
"""Failing cases: it ignores episode ends (T7), stores references to inputs (T21), and broadcasts (T27)."""


class WrongBuffer:
    def __init__(self, shape: ReplayShape) -> None:
        self.shape, self.rows, self.random = shape, [], np.random.default_rng(shape.seed)

    def add(self, step: Transitions) -> None:
        n = self.shape.num_envs
        widths = {"obs": self.shape.obs, "next_obs": self.shape.obs, "action": (self.shape.action_dim,)}
        columns = {f: np.broadcast_to(getattr(step, f), (n, *widths.get(f, ()))) for f in FIELDS}
        if columns["obs"].dtype != self.shape.dtype:
            raise ValueError("obs: expected another dtype")
        self.rows.extend({f: column[i, ...] for f, column in columns.items()} for i in range(n))
        del self.rows[: -self.shape.capacity]

    def sample(self, batch_size: int) -> dict[str, Any]:
        if not self.rows:
            raise ValueError("empty")
        index = self.random.integers(0, len(self.rows), batch_size)
        batch = {f: np.stack([self.rows[i][f] for i in index]) for f in FIELDS}
        n = self.shape.num_envs
        after = [self.rows[i + n]["obs"] if i + n < len(self.rows) else self.rows[i]["next_obs"] for i in index]
        return {**batch, "next_obs": np.stack(after)}

    def __len__(self) -> int:
        return len(self.rows)
