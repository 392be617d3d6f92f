"""Compares a distillation buffer with a list of dicts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from tensordict import TensorDict

import relive as rl
from tests.faults.machines.machine import Machine, WrongCall


@dataclass
class Model:
    """Every row ever added, in order."""

    rows: list[dict[str, int]] = field(default_factory=list)
    floor: int = 0
    round: int = 0


class DistillationMachine(Machine):
    """Adds rows and rounds, samples, and runs epochs."""

    model: Model

    @initialize(
        capacity=st.sampled_from([1, 5, 9]), declared=st.booleans(), native=st.sampled_from([True, True, False])
    )
    def make(self, capacity: int, declared: bool, native: bool) -> None:
        self.begin(native=native)
        self.capacity = capacity
        action = rl.Field(2, torch.int64) if declared else None
        self.buffer = rl.DistillationBuffer(capacity, {"x": 2}, action, device=self.memory, seed=5)
        self.model = Model()

    @property
    def stored_ids(self) -> range:
        """Ids of the stored rows."""
        count = len(self.model.rows)
        return range(max(self.model.floor, count - self.capacity), count)

    def arrays(self, rows: list[dict[str, int]]) -> dict[str, Any]:
        obs, action = (np.array([row[name] for row in rows]).reshape(-1) for name in ("obs", "action"))
        return {
            "obs": {"x": np.stack([obs, -obs], 1).astype(np.float32)},
            "action": np.stack([action, -action], 1).astype(np.int64),
        }

    # Writing

    def rows(self, count: int) -> list[dict[str, int]]:
        return [{"obs": self.fresh(), "action": self.fresh(), "round": self.model.round} for _ in range(count)]

    @rule(count=st.integers(0, 12))
    def add_batch(self, count: int) -> None:
        rows = self.rows(count)
        self.buffer.add(**self.arrays(rows))
        self.model.rows += rows
        self.count("add of a batch")

    @rule()
    def add_one(self) -> None:
        rows = self.rows(1)
        given = self.arrays(rows)
        self.buffer.add({"x": given["obs"]["x"][0]}, given["action"][0])
        self.model.rows += rows
        self.count("add of a row")

    @rule()
    def next_round(self) -> None:
        self.model.round += 1
        assert self.buffer.next_round() == self.model.round
        self.count("next_round")

    @rule()
    def clear(self) -> None:
        self.buffer.clear()
        self.model.floor = len(self.model.rows)
        self.count("clear")

    # Reading

    def recent(self, rounds: int | None) -> list[int]:
        """The stored rows of the newest rounds."""
        oldest = 0 if rounds is None else self.model.round - rounds + 1
        return [i for i in self.stored_ids if self.model.rows[i]["round"] >= oldest]

    @precondition(lambda self: self.stored_ids)
    @rule(size=st.integers(1, 7), rounds=st.sampled_from([None, 1, 2, 9]), share=st.booleans())
    def sample(self, size: int, rounds: int | None, share: bool) -> None:
        if not self.recent(rounds):
            return
        wanted = {rounds: 0.5} if share and rounds is not None else rounds
        batch = self.buffer.sample(size, recent=wanted)
        assert set(batch["index"].tolist()) <= set(self.stored_ids if share else self.recent(rounds))
        self._check(batch, size)
        self.count("sample")

    @precondition(lambda self: self.stored_ids)
    @rule(size=st.integers(1, 7), rounds=st.sampled_from([None, 1, 2]), shuffle=st.booleans())
    def epochs(self, size: int, rounds: int | None, shuffle: bool) -> None:
        rows = self.recent(rounds)
        if not rows:
            return
        seen: list[int] = []
        for batch in self.buffer.epochs(size, recent=rounds, shuffle=shuffle):
            self._check(batch, min(size, len(rows) - len(seen)))
            seen += batch["index"].tolist()
        assert (sorted(seen) if shuffle else seen) == rows
        self.count("epoch")

    def _check(self, batch: TensorDict, size: int) -> None:
        ids = batch["index"].tolist()
        assert len(ids) == size
        rows = [self.model.rows[i] for i in ids]
        expected = self.arrays(rows)
        np.testing.assert_array_equal(batch["obs", "x"].numpy(), expected["obs"]["x"])
        np.testing.assert_array_equal(batch["action"].numpy(), expected["action"])
        assert batch["round"].tolist() == [row["round"] for row in rows]

    def compare(self) -> None:
        assert len(self.buffer) == len(self.stored_ids)
        assert self.buffer.round == self.model.round
        if self.stored_ids:
            self._check(self.buffer[list(self.stored_ids)], len(self.stored_ids))

    def wrong_calls(self) -> list[WrongCall]:
        buffer = self.buffer
        obs, action = {"x": np.ones((2, 2), np.float32)}, np.ones((2, 2), np.int64)
        calls: list[WrongCall] = [
            lambda: buffer.add(obs, None),
            lambda: buffer.add({"x": np.ones((2, 3))}, action),
            lambda: buffer.add({"y": 1}, action),
            lambda: buffer.sample(0),
            lambda: buffer.sample(1, recent=0),
            lambda: buffer.sample(1, recent={1: 1.5}),
            lambda: next(iter(buffer.epochs(0))),
            lambda: buffer[[len(self.model.rows)]],
            lambda: buffer[[-1]],
            lambda: buffer.mix(action, action, 1.5),
            lambda: buffer.save(self.root, keep=0),
        ]
        if buffer.state_dict()["values"]["ring"]["known"]:
            calls += [
                lambda: buffer.add(obs, action[:1]),
                lambda: buffer.add(obs, action, colour=np.ones(2)),
                lambda: buffer.add(obs, action.astype(np.float32)),
            ]
        if not self.stored_ids:
            calls += [lambda: buffer.sample(1), lambda: next(iter(buffer.epochs(1)))]
        return calls
