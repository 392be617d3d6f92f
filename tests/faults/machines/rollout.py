"""Compares a rollout buffer with a list of dicts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

import relive as rl
from tests.faults.machines.machine import Machine, WrongCall
from tests.faults.machines.replay import ENDS
from tests.reference import estimators, sequences

GAMMA, LAM = 0.75, 0.5


@dataclass
class Model:
    """Stored steps, each a dict of lists over environments, with resets, final observations and values."""

    now: list[int]
    resetting: list[bool]
    """Environments whose next row is a reset."""
    steps: list[dict[str, list[Any]]] = field(default_factory=list)
    finals: dict[tuple[int, int], int] = field(default_factory=dict)
    """Final observations of truncated steps, by step and environment."""
    valued: bool = False
    """Whether steps have a value: all or none."""
    staged: dict[str, list[int]] = field(default_factory=dict)
    attached: dict[str, list[list[float]]] = field(default_factory=dict)

    def column(self, name: str) -> torch.Tensor:
        """A field [T, N]."""
        return torch.tensor([step[name] for step in self.steps])


class RolloutMachine(Machine):
    """Adds steps and final observations, computes advantages, and reads minibatches and sequences."""

    model: Model

    @initialize(
        envs=st.sampled_from([None, 1, 3]),
        num_steps=st.sampled_from([1, 3, 6]),
        mode=st.sampled_from([None, "NEXT_STEP", "SAME_STEP", "DISABLED"]),
        native=st.sampled_from([True, True, False]),
    )
    def make(self, envs: int | None, num_steps: int, mode: str | None, native: bool) -> None:
        self.begin(native=native)
        self.envs, self.n, self.num_steps, self.mode = envs, envs or 1, num_steps, mode
        self.buffer = rl.RolloutBuffer(
            num_steps,
            envs,
            {"x": 2},
            (),
            extra={"tag": rl.Field((), torch.int64)},
            autoreset=mode,
            device=self.memory,
            seed=5,
        )
        self.model = Model([self.fresh() for _ in range(self.n)], [False] * self.n)

    def observations(self, numbers: list[int]) -> dict[str, np.ndarray]:
        values = np.array(numbers, np.float32)
        return {"x": self.lead(np.stack([values, -values], -1).reshape(-1, 2))}

    def lead(self, array: np.ndarray) -> Any:
        return array if self.envs is not None else array[0]

    def step(self, ends: list[str], valued: bool) -> tuple[dict[str, list[Any]], list[int]]:
        """Step the environments."""
        model, n = self.model, self.n
        resets = model.resetting if self.mode == "NEXT_STEP" else [False] * n
        step = {
            "obs": list(model.now),
            "action": model.staged.get("action", [self.fresh() for _ in range(n)]),
            "reward": [self.fresh() for _ in range(n)],
            "terminated": [end in ("terminated", "both") for end in ends],
            "truncated": [end in ("truncated", "both") for end in ends],
            "value": [self.fresh() if valued else 0 for _ in range(n)],
            "log_prob": [self.fresh() for _ in range(n)],
            "tag": model.staged.get("tag", [self.fresh() for _ in range(n)]),
            "mask": [not reset for reset in resets],
        }
        led = [self.fresh() for _ in range(n)]
        over = [end != "goes on" and not reset for end, reset in zip(ends, resets, strict=True)]
        model.resetting = [self.mode == "NEXT_STEP" and end for end in over]
        model.now = [
            self.fresh() if end and self.mode != "NEXT_STEP" else at for end, at in zip(over, led, strict=True)
        ]
        return step, led

    def choose_fields(self, step: dict[str, list[Any]], valued: bool) -> dict[str, Any]:
        dtypes = {"terminated": bool, "truncated": bool, "tag": np.int64}
        left = {"obs", "mask", *self.model.staged, *(() if valued else ("value",))}
        found = {
            name: self.lead(np.array(x, dtypes.get(name, np.float32))) for name, x in step.items() if name not in left
        }
        return found | {"obs": self.observations(step["obs"])}

    def store(self, step: dict[str, list[Any]], led: list[int], valued: bool, *, finals: bool) -> None:
        model, at = self.model, len(self.model.steps)
        for env in range(self.n if finals else 0):
            if step["truncated"][env] and not step["terminated"][env]:
                model.finals[at, env] = led[env]
        model.steps.append(step)
        model.valued = valued
        model.staged, model.attached = {}, {}

    # Writing

    @precondition(lambda self: len(self.model.steps) < self.num_steps)
    @rule(data=st.data(), valued=st.sampled_from([True, True, True, False]), finals=st.booleans())
    def add(self, data: st.DataObject, valued: bool, finals: bool) -> None:
        finals = finals and self.mode != "NEXT_STEP"
        valued = self.model.valued if self.model.steps else valued
        step, led = self.step([data.draw(ENDS, "end") for _ in range(self.n)], valued)
        more = {"final_obs": self.observations(led)} if finals else {}
        self.buffer.add(**self.choose_fields(step, valued), **more)
        self.store(step, led, valued, finals=finals)
        self.count("add")

    @precondition(lambda self: self.mode is not None and len(self.model.steps) < self.num_steps)
    @rule(data=st.data())
    def add_step(self, data: st.DataObject) -> None:
        valued = self.model.valued or not self.model.steps
        step, led = self.step([data.draw(ENDS, "end") for _ in range(self.n)], valued)
        given = self.choose_fields(step, valued)
        returned, info = self.observations(led), {}
        if self.mode == "SAME_STEP":
            info = {"final_obs": returned, "_final_obs": given["terminated"] | given["truncated"]}
            returned = self.observations(self.model.now)
        parts = (returned, *(given.pop(name) for name in ("reward", "terminated", "truncated")), info)
        self.buffer.add_step(step=parts, **given)
        self.store(step, led, valued, finals=self.mode != "NEXT_STEP")
        self.count("add_step")

    @precondition(lambda self: len(self.model.steps) < self.num_steps)
    @rule(names=st.sampled_from([("action",), ("tag",), ("action", "tag")]))
    def stage(self, names: tuple[str, ...]) -> None:
        fields = {name: [self.fresh() for _ in range(self.n)] for name in names if name not in self.model.staged}
        dtypes = {"action": np.float32, "tag": np.int64}
        self.buffer.stage(**{name: self.lead(np.array(x, dtypes[name])) for name, x in fields.items()})
        self.model.staged |= fields
        self.count("stage")

    @rule(restarted=st.sampled_from([False, False, True]))
    def clear(self, restarted: bool) -> None:
        self.buffer.clear(restarted=restarted)
        resetting = [False] * self.n if restarted else self.model.resetting
        self.model = Model(self.model.now, resetting)
        self.count("clear")

    # Targets

    @precondition(lambda self: self.model.steps and not self.model.staged)
    @rule(bootstrap=st.sampled_from([True, True, False]))
    def compute_advantage(self, bootstrap: bool) -> None:
        model = self.model
        last, numbers = [self.fresh() for _ in range(self.n)], list(model.finals.values())
        cut = model.column("truncated") & ~model.column("terminated") & (bootstrap and self.mode != "NEXT_STEP")
        known = {tuple(place) for place in cut.nonzero().tolist()} <= set(model.finals)
        final_value = np.array([10 * x for x in numbers], np.float32) if bootstrap and numbers else None
        call: WrongCall = lambda: self.buffer.compute_advantage(  # noqa: E731 (called in one of two ways)
            self.lead(np.array(last, np.float32)),
            final_value=final_value,
            gamma=GAMMA,
            lam=LAM,
            bootstrap_truncated=bootstrap,
        )
        if not model.valued or not known:
            with pytest.raises(rl.NotReadyError):
                call()
            return
        call()
        following = torch.cat([model.column("value")[1:], torch.tensor([last])]).double()
        if bootstrap:
            for (t, env), number in model.finals.items():
                following[t, env] = 10 * number
        ends = model.column("terminated") if bootstrap else model.column("terminated") | model.column("truncated")
        tensors = {name: model.column(name) for name in ("reward", "value", "truncated", "mask")}
        tensors |= {"next_value": following, "terminated": ends}
        advantage, return_ = estimators.by_column(estimators.gae, tensors, gamma=GAMMA, lam=LAM)  # type: ignore[arg-type]
        model.attached |= {"advantage": advantage.tolist(), "return": return_.tolist()}
        self.count("compute_advantage")

    @precondition(lambda self: self.model.steps)
    @rule()
    def attach(self) -> None:
        note = [[float(self.fresh()) for _ in range(self.n)] for _ in self.model.steps]
        array = np.array(note, np.float32)
        self.buffer.attach(note=array if self.envs is not None else array[:, 0])
        self.model.attached["note"] = note
        self.count("attach")

    # Reading

    @property
    def valid(self) -> list[int]:
        """Rows t·N + n that are transitions."""
        return [
            t * self.n + env for t, step in enumerate(self.model.steps) for env in range(self.n) if step["mask"][env]
        ]

    @precondition(lambda self: self.valid)
    @rule(size=st.integers(1, 9), epochs=st.integers(1, 2))
    def minibatches(self, size: int, epochs: int) -> None:
        seen: list[int] = []
        for batch in self.buffer.minibatches(size, epochs=epochs):
            self._check(batch, batch["index"].tolist())
            seen += batch["index"].tolist()
        count = len(self.valid)
        assert len(seen) == epochs * count
        assert all(sorted(seen[start : start + count]) == self.valid for start in range(0, len(seen), count))
        self.count("minibatches")

    @precondition(lambda self: self.valid)
    @rule(length=st.sampled_from([None, 1, 2]), mode=st.sampled_from(["chunked", "overlap", "every"]))
    def sequences(self, length: int | None, mode: Any) -> None:
        ended, mask = self.model.column("terminated") | self.model.column("truncated"), self.model.column("mask")
        expected = sequences.sequences(ended, mask, length, mode, True, True)
        found = []
        for batch in self.buffer.sequences(length, mode=mode, batch_size=2):
            for i, first in enumerate(batch["index"].tolist()):
                rows = [first + step * self.n for step in range(int(batch["mask"][i].sum()))]
                steps = {key: x[i] for key, x in batch.items(True, True) if key != "index"}
                self._check({key: x[: len(rows)] for key, x in steps.items()}, rows)
                found.append(rows)
        assert sorted(found) == sorted(expected)
        self.count("sequences")

    def _check(self, batch: Any, rows: list[int]) -> None:
        """Assert that a batch has the given rows."""
        steps = [(self.model.steps[row // self.n], row // self.n, row % self.n) for row in rows]
        assert ("value" in batch.keys()) == ("value" in self.buffer) == self.model.valued
        given = ("value",) if self.model.valued else ()
        for name in ("action", "reward", "terminated", "truncated", "log_prob", "tag", *given):
            assert batch[name].tolist() == [step[name][env] for step, _, env in steps], name
        obs = np.array([step["obs"][env] for step, _, env in steps], np.float32)
        np.testing.assert_array_equal(batch["obs", "x"].numpy(), np.stack([obs, -obs], 1))
        attached = {name for name in ("advantage", "return", "note") if name in batch.keys()}
        assert attached == set(self.model.attached)
        for name, values in self.model.attached.items():
            expected = [values[t][env] for _, t, env in steps]
            assert batch[name].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-4), name

    def compare(self) -> None:
        model, buffer = self.model, self.buffer
        assert buffer.num_stored == len(model.steps)
        assert len(buffer) == len(self.valid)
        finals = [[x, -x] for x in model.finals.values()]
        assert buffer.final_obs["x"].tolist() == finals
        if self.valid:
            (batch,) = buffer.minibatches(10**6, shuffle=False)
            assert batch["index"].tolist() == self.valid
            self._check(batch, self.valid)
        elif model.steps:
            assert list(buffer.minibatches(1)) == list(buffer.sequences()) == []

    def wrong_calls(self) -> list[WrongCall]:
        buffer, model, n = self.buffer, self.model, self.n
        good = self.choose_fields(
            {name: [1] * n for name in ("obs", "action", "reward", "value", "log_prob", "tag")}
            | {name: [False] * n for name in ("terminated", "truncated")},
            True,
        )
        calls: list[WrongCall] = [
            lambda: buffer.add(**(good | {"reward": None})),
            lambda: buffer.add(**(good | {"reward": [[[1.0]]]})),
            lambda: buffer.add(**(good | {"obs": {"y": 1}})),
            lambda: buffer.add(**(good | {"terminated": [0.5] * n})),
            lambda: buffer.add(**good, colour=1),
            lambda: buffer.add_step(good["obs"], 1.0, (1, 2, 3)),
            lambda: buffer.stage(colour=1),
            lambda: buffer.stage(action=None),
            lambda: next(buffer.minibatches(0)),
            lambda: next(buffer.sequences(0)),
            lambda: buffer.save(self.root, keep=0),
            lambda: buffer.attach(obs=1),
        ]
        if len(model.steps) == self.num_steps:
            calls += [lambda: buffer.add(**good), lambda: buffer.stage(action=good["action"])]
        if model.steps and not model.valued:
            calls += [lambda: buffer.add(**good), lambda: buffer.stage(value=good["value"])]
        if model.valued:
            calls += [lambda: buffer.add(**{name: x for name, x in good.items() if name != "value"})]
        if not model.steps:
            calls += [lambda: next(buffer.minibatches(1)), lambda: buffer.attach(note=1), lambda: buffer.data]
        if model.staged:
            calls += [lambda: buffer.add(**good, **{name: self.lead(np.ones(n)) for name in model.staged})]
            calls += [lambda: buffer.compute_advantage(self.lead(np.ones(n, np.float32)))]
        return calls
