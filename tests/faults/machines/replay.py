"""Compares a replay buffer with lists of dicts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from tensordict import TensorDict

import relive as rl
from tests.faults.machines.machine import Machine, WrongCall
from tests.reference.replay import Column
from tests.reference.sequences import around

FRAMES = 3
ENDS = st.sampled_from(["goes on"] * 5 + ["terminated", "truncated", "both"])
JUMPS = st.sampled_from([False] * 5 + [True])


@dataclass
class Model:
    """Expected contents of the buffer, and the next observations of the environments."""

    columns: list[Column]
    now: list[Any]
    """Current observation of each environment: a number, or the numbers of its frames."""
    staged: dict[str, list[int]] = field(default_factory=dict)
    epoch: set[int] = field(default_factory=set)
    """Rows left in the current epoch."""
    priority: dict[int, float] = field(default_factory=dict)
    largest: float = 1.0

    @property
    def transitions(self) -> dict[int, dict[str, Any]]:
        """Sampleable transitions by id."""
        n = len(self.columns)
        return {
            row * n + env: step for env, column in enumerate(self.columns) for row, step in column.transitions.items()
        }

    def add(self, env: int, step: dict[str, Any]) -> None:
        column = self.columns[env]
        written = len(column.rows)
        column.add(step)
        for row in range(written, len(column.rows)):
            if column.rows[row] is not None:
                self.priority[row * len(self.columns) + env] = self.largest


class ReplayMachine(Machine):
    """Writes, reads, cuts and clears a buffer of one layout with one sampler."""

    layout: ClassVar[str] = "shared"
    sampler: ClassVar[Any] = rl.Uniform()
    model: Model

    @initialize(
        envs=st.sampled_from([None, 1, 3]),
        rows=st.sampled_from([1, 4, 7]),
        mode=st.sampled_from([None, "NEXT_STEP", "SAME_STEP", "DISABLED"]),
        pad=st.sampled_from(["repeat", "zero"]),
        native=st.sampled_from([True, True, False]),
    )
    def make(self, envs: int | None, rows: int, mode: str | None, pad: Any, native: bool) -> None:
        self.begin(native=native)
        self.envs, self.mode, self.pad = envs, mode, pad
        n = envs or 1
        obs: Any = {"x": 2, "y": rl.Field((), torch.int32)}
        if self.layout == "stacked":
            obs = {"x": rl.Stacked(rl.Field(2, torch.int32), FRAMES, pad=pad)}
        self.buffer = rl.ReplayBuffer(
            rows * n,
            obs,
            (),
            num_envs=envs,
            extra={"tag": rl.Field((), torch.int64)},
            sampler=self.sampler,
            device=self.memory,
            next_obs="stored" if self.layout == "stored" else "shared",
            autoreset=mode,
            seed=5,
        )
        columns = [Column(rows, mode == "NEXT_STEP", keeps_next=self.layout == "stored") for _ in range(n)]
        self.model = Model(columns, [self.start() for _ in range(n)])

    # Environments whose observations are numbers

    def start(self) -> Any:
        first = self.fresh()
        if self.layout != "stacked":
            return first
        return (first if self.pad == "repeat" else 0,) * (FRAMES - 1) + (first,)

    def next_after(self, obs: Any) -> Any:
        return (*obs[1:], self.fresh()) if self.layout == "stacked" else self.fresh()

    def step(self, env: int, end: str, jumps: bool) -> dict[str, Any]:
        """Step one environment and its model."""
        model, resets = self.model, self.model.columns[env].resetting
        if jumps and not resets:
            model.now[env] = self.start()
        obs = model.now[env]
        step = {
            "obs": obs,
            "action": model.staged["action"][env] if "action" in model.staged else self.fresh(),
            "reward": self.fresh(),
            "terminated": end in ("terminated", "both"),
            "truncated": end in ("truncated", "both"),
            "next_obs": self.start() if resets else self.next_after(obs),
            "tag": model.staged["tag"][env] if "tag" in model.staged else self.fresh(),
        }
        is_over = end != "goes on" and not resets and self.mode != "NEXT_STEP"
        model.now[env] = self.start() if is_over else step["next_obs"]
        model.add(env, step)
        return step

    def arrays(self, steps: list[dict[str, Any]]) -> dict[str, Any]:
        """Convert the steps of several environments to arguments of `add`."""
        dtypes = {"terminated": bool, "truncated": bool, "tag": np.int64}
        names = [name for name in steps[0] if name not in self.model.staged]
        found: dict[str, Any] = {
            name: np.array([step[name] for step in steps], dtypes.get(name, np.float32)) for name in names
        } | {name: self.observations([step[name] for step in steps]) for name in ("obs", "next_obs")}
        return found if self.envs is not None else {name: _first(value) for name, value in found.items()}

    def observations(self, numbers: list[Any]) -> dict[str, Any]:
        if self.layout == "stacked":
            frames = np.array(numbers, np.int32)
            return {"x": np.stack([frames, -frames], 1)}
        values = np.array(numbers, np.float32)
        return {"x": np.stack([values, -values], 1), "y": np.array(numbers, np.int32)}

    def choose_envs(self, data: st.DataObject) -> list[int] | None:
        """Draw some environments, or None for all."""
        if self.envs is None or self.model.staged or data.draw(st.booleans(), "all"):
            return None
        envs = st.lists(st.integers(0, self.envs - 1), min_size=1, unique=True)
        return data.draw(envs, "envs")

    def steps(self, data: st.DataObject, envs: list[int] | None) -> list[dict[str, Any]]:
        every = range(len(self.model.columns)) if envs is None else envs
        return [self.step(env, data.draw(ENDS, "end"), data.draw(JUMPS, "jumps")) for env in every]

    # Writing

    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        envs = self.choose_envs(data)
        self.buffer.add(**self.arrays(self.steps(data, envs)), env_ids=envs)
        self.model.staged.clear()
        self.count("add")

    @precondition(lambda self: self.mode is not None)
    @rule(data=st.data())
    def add_step(self, data: st.DataObject) -> None:
        envs = self.choose_envs(data)
        steps = self.steps(data, envs)
        given = self.arrays(steps)
        returned, info = given.pop("next_obs"), {}
        if self.mode == "SAME_STEP":
            every = range(len(steps)) if envs is None else envs
            info = {"final_obs": returned, "_final_obs": given["terminated"] | given["truncated"]}
            returned = self.observations([self.model.now[env] for env in every])
            returned = returned if self.envs is not None else _first(returned)
        step = (returned, *(given.pop(name) for name in ("reward", "terminated", "truncated")), info)
        self.buffer.add_step(step=step, env_ids=envs, **given)
        self.model.staged.clear()
        self.count("add_step")

    @precondition(lambda self: not self.model.staged)
    @rule(data=st.data(), length=st.integers(1, 12))
    def extend(self, data: st.DataObject, length: int) -> None:
        envs = self.choose_envs(data)
        block = [self.arrays(self.steps(data, envs)) for _ in range(length)]
        self.buffer.extend(_stacked(block), env_ids=envs)
        self.count("extend")

    @rule(names=st.sampled_from([("action",), ("tag",), ("action", "tag")]))
    def stage(self, names: tuple[str, ...]) -> None:
        fields = {name: [self.fresh() for _ in self.model.columns] for name in names if name not in self.model.staged}
        arrays = {name: np.array(values, np.int64 if name == "tag" else np.float32) for name, values in fields.items()}
        self.buffer.stage(**(arrays if self.envs is not None else {name: x[0] for name, x in arrays.items()}))
        self.model.staged |= fields
        self.count("stage")

    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        some = st.lists(st.integers(0, (self.envs or 1) - 1), min_size=1, unique=True)
        envs = None if self.envs is None else data.draw(st.none() | some, "envs")
        self.buffer.cut(envs)
        for env in range(len(self.model.columns)) if envs is None else envs:
            self.model.columns[env].cut()
            self.model.now[env] = self.start()
        self.count("cut")

    @rule(really=st.sampled_from([True, False, False]))
    def clear(self, really: bool) -> None:
        if not really:
            return
        self.buffer.clear()
        for env, column in enumerate(self.model.columns):
            column.clear()
            if not column.resetting:
                self.model.now[env] = self.start()
        self.model.staged.clear()
        self.model.epoch.clear()
        self.model.priority.clear()
        self.model.largest = 1.0
        self.count("clear")

    # Reading

    @precondition(lambda self: self.model.transitions)
    @rule(
        sizes=st.lists(st.integers(1, 8), min_size=1, max_size=5),
        view=st.sampled_from([None, rl.NStep(3, 0.5), rl.Sequence(3, burn_in=1), rl.Window(action=range(-2, 3))]),
    )
    def sample(self, sizes: list[int], view: Any) -> None:
        for size in sizes:
            self._sample(size, view)

    def _sample(self, size: int, view: Any) -> None:
        alive = self.model.transitions
        view = None if self.layout == "stored" else view
        if isinstance(self.sampler, rl.WithoutReplacement) and size > len(alive):
            with pytest.raises(rl.NotReadyError):
                self.buffer.sample(size, view)
            return
        batch = self.buffer.sample(size, view)
        ids = batch["index"].tolist()
        assert set(ids) <= set(alive), "rows that are not there"
        self._check_draw(ids, size, batch)
        if isinstance(view, rl.NStep):
            self._check_windows(batch, view)
        elif isinstance(view, rl.Sequence):
            self._check_sequences(batch, view)
        elif isinstance(view, rl.Window):
            self._check_chunks(batch)
        else:
            self._check_rows(batch, [alive[i] for i in ids])
        self.count(f"sample {type(view).__name__}" if view is not None else "sample Transition")

    def _check_draw(self, ids: list[int], size: int, batch: TensorDict) -> None:
        model, alive = self.model, set(self.model.transitions)
        if isinstance(self.sampler, rl.WithoutReplacement):
            left = model.epoch & alive or alive
            assert len(ids) == len(set(ids)) == min(size, len(left))
            assert set(ids) <= left, "a row again before its epoch is over"
            model.epoch = left - set(ids)
            return
        assert len(ids) == size
        if isinstance(self.sampler, rl.Prioritized):
            masses = np.array([self._mass(i) for i in ids])
            expected = (masses.min() / masses) ** float(self.sampler.beta)  # pyright: ignore[reportArgumentType]
            np.testing.assert_allclose(batch["weight"].numpy(), expected, rtol=1e-5)

    def _mass(self, row: int) -> float:
        return (self.model.priority[row] + self.sampler.eps) ** self.sampler.alpha

    def _check_rows(self, batch: Any, steps: list[dict[str, Any]]) -> None:
        expected = {name: [step[name] for step in steps] for name in steps[0]} if steps else {}
        for name, values in expected.items():
            if name in ("obs", "next_obs"):
                for key, leaf in self.observations(values).items():
                    np.testing.assert_array_equal(batch[name, key].numpy(), leaf)
            else:
                assert batch[name].tolist() == values, name

    def _check_windows(self, batch: TensorDict, view: rl.NStep) -> None:
        n, whole = len(self.model.columns), []
        for row in batch["index"].tolist():
            run = self.model.columns[row % n].run(row // n, view.n)
            reward = sum(view.gamma**i * step["reward"] for i, step in enumerate(run))
            ends = {name: run[-1][name] for name in ("terminated", "truncated", "next_obs")}
            whole.append((run[0] | ends | {"reward": reward}, view.gamma ** len(run)))
        self._check_rows(batch, [step for step, _ in whole])
        assert batch["discount"].tolist() == [discount for _, discount in whole]

    def _check_chunks(self, batch: TensorDict) -> None:
        n, rows, offsets = len(self.model.columns), [], range(-2, 3)
        for place, row in enumerate(batch["index"].tolist()):
            column = self.model.columns[row % n]
            before, after = column.run_before(row // n, 2), column.run(row // n, 3)
            steps, now = before + after, len(before)
            nearest = [steps[min(max(now + offset, 0), len(steps) - 1)]["action"] for offset in offsets]
            assert batch["action"][place].tolist() == nearest
            assert batch["action_mask"][place].tolist() == [0 <= now + offset < len(steps) for offset in offsets]
            rows.append({name: value for name, value in after[0].items() if name != "action"})
        self._check_rows(batch, rows)

    def _check_sequences(self, batch: TensorDict, view: rl.Sequence) -> None:
        n, steps = len(self.model.columns), []
        masks, trains = [], []
        for row in batch["index"].tolist():
            column = self.model.columns[row % n]
            before, after = column.run_before(row // n, view.burn_in), column.run(row // n, view.length)
            window, mask, train = around(before, after, view.length, view.burn_in)
            steps += [step for step in window if step is not None]
            masks.append(mask)
            trains.append(train)
        assert batch["mask"].tolist() == masks
        assert batch["train"].tolist() == trains
        of_steps = [key for key in batch.keys(True, True) if key not in ("index", "weight")]
        self._check_rows({key: batch[key][batch["mask"]] for key in of_steps}, steps)

    @precondition(lambda self: isinstance(self.sampler, rl.Prioritized) and self.model.priority)
    @rule(data=st.data())
    def update_priority(self, data: st.DataObject) -> None:
        known = st.sampled_from(sorted(self.model.priority))
        updates = data.draw(st.lists(st.tuples(known, st.sampled_from([0.0, 0.25, 1.0, 7.5])), min_size=1, max_size=6))
        ids, priorities = zip(*updates, strict=True)
        alive = self.model.transitions
        stale = self.buffer.update_priority(list(ids), list(priorities))
        assert stale == sum(i not in alive for i in ids)
        for i, priority in updates:
            if i in alive:
                self.model.priority[i] = priority
                self.model.largest = max(self.model.largest, priority)
        self.count("update_priority")

    def compare(self) -> None:
        alive = self.model.transitions
        ids = sorted(alive)
        assert self.buffer.ids().tolist() == ids
        assert len(self.buffer) == len(ids)
        if ids:
            self._check_rows(self.buffer[ids], [alive[i] for i in ids])
        if isinstance(self.sampler, rl.Prioritized):
            slots = self.buffer.storage.locate(torch.tensor(ids, dtype=torch.int64))
            masses = self.buffer.sampler.state()["mass"][slots].tolist()
            assert masses == pytest.approx([self._mass(i) for i in ids], rel=1e-12)

    def wrong_calls(self) -> list[WrongCall]:
        buffer, n = self.buffer, len(self.model.columns)
        never = max(len(column.rows) for column in self.model.columns) * n + 2 * n
        good = {
            "obs": self.observations([1] * n),
            "action": np.ones(n, np.float32),
            "reward": np.ones(n, np.float32),
            "terminated": np.zeros(n, bool),
            "truncated": np.zeros(n, bool),
            "next_obs": self.observations([2] * n),
            "tag": np.ones(n, np.int64),
        }
        good = {name: x for name, x in good.items() if name not in self.model.staged}
        good = good if self.envs is not None else {name: _first(x) for name, x in good.items()}
        calls: list[WrongCall] = [
            lambda: buffer.add(**(good | {"reward": None})),
            lambda: buffer.add(**(good | {"reward": [[1.0]]})),
            lambda: buffer.add(**(good | {"next_obs": {"z": 1.0}})),
            lambda: buffer.add(**good, colour=1),
            lambda: buffer.add(**good, env_ids=[n]),
            lambda: buffer.add(**(good | {"terminated": [0.5] * n})),
            lambda: buffer.add_step(good["obs"], 1.0, (1, 2, 3)),
            lambda: buffer.extend(good),
            lambda: buffer.extend({}),
            lambda: buffer.stage(colour=1),
            lambda: buffer.cut([n]),
            lambda: buffer[[never]],
            lambda: buffer[[-1]],
            lambda: buffer.sample(0),
            lambda: buffer.sample(1, device="nowhere"),
            lambda: buffer.sample(2, out=TensorDict({"obs": torch.zeros(2)}, [2])),
            lambda: buffer.update_priority([never], [1.0]),
            lambda: buffer.update_priority([0], [1.0, 2.0, 3.0]),
            lambda: buffer.save(self.root, keep=0),
        ]
        if not self.model.transitions:
            calls.append(lambda: buffer.sample(1))
        if self.model.staged:
            calls.append(lambda: buffer.stage(**dict.fromkeys(self.model.staged, 1)))
        if self.model.priority and isinstance(self.sampler, rl.Prioritized):
            calls.append(lambda: buffer.update_priority([min(self.model.priority)], [float("nan")]))
        return calls


def _first(value: Any) -> Any:
    return {key: leaf[0] for key, leaf in value.items()} if isinstance(value, dict) else value[0]


def _stacked(block: list[Any]) -> Any:
    if isinstance(block[0], dict):
        return {name: _stacked([step[name] for step in block]) for name in block[0]}
    return np.stack(block)
