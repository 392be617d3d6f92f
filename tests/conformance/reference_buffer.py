"""A slow, small buffer that is obviously right: lists of rows. Mutants of it show that every case can fail."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from relive_conformance.adapters import (
    ALPHA,
    BETA,
    Adapter,
    GoalBatch,
    GoalStep,
    ReplayBatch,
    ReplayShape,
    Trajectory,
    Transitions,
    goal_reward,
)
from tests.reference.estimators import gae

FIELDS: tuple[str, ...] = ("obs", "action", "reward", "terminated", "truncated", "next_obs")
Row = dict[str, Any]


class ListGae:
    """The recurrence as a loop over each environment."""

    def prepare(self, trajectory: Trajectory, *, gamma: float, lam: float) -> Callable[[], Any]:
        return lambda: self.estimate(trajectory, gamma, lam)

    def estimate(self, trajectory: Trajectory, gamma: float, lam: float) -> Any:
        names = ("reward", "value", "next_value", "terminated", "truncated")
        columns = []
        for env in range(trajectory.reward.shape[1]):
            column = {name: getattr(trajectory, name)[:, env].tolist() for name in names}
            columns.append(gae({**column, "mask": [True] * len(column["reward"])}, gamma=gamma, lam=lam))
        return np.array(columns).transpose(1, 2, 0)

    def read(self, output: Any) -> Any:
        return output[0], output[1]


class ListReplay:
    """Rows of each environment in time order; the oldest is dropped beyond the capacity."""

    safe_in_threads = survives_kill = True

    def __init__(self, shape: ReplayShape) -> None:
        self.shape, self.size = shape, shape.capacity // shape.num_envs
        self.rows: list[list[Row]] = [[] for _ in range(shape.num_envs)]
        self.random = np.random.default_rng(shape.seed)
        self.count, self.lock = 0, threading.Lock()

    def add(self, step: Transitions) -> None:
        arrays = self.checked(step)
        with self.lock:
            for env in range(self.shape.num_envs):
                self.append(env, {name: self.copy(array[env]) for name, array in arrays.items()})

    def checked(self, step: Transitions) -> dict[str, np.ndarray]:
        n, obs = self.shape.num_envs, (self.shape.num_envs, *self.shape.obs)
        shapes = [obs, (n, self.shape.action_dim), (n,), (n,), (n,), obs]
        arrays = {name: np.asarray(getattr(step, name)) for name in FIELDS}
        for (name, array), shape in zip(arrays.items(), shapes, strict=True):
            if array.shape != shape:
                raise ValueError(f"{name}: expected {shape}, got {array.shape}")
            if name.endswith("obs") and not np.can_cast(array.dtype, self.shape.dtype, "same_kind"):
                raise ValueError(f"{name}: expected {self.shape.dtype}, got {array.dtype}")
        return arrays

    def copy(self, value: Any) -> Any:
        return np.array(value)

    def append(self, env: int, row: Row) -> None:
        self.rows[env].append({**row, "id": self.count, **self.born()})
        self.count += 1
        del self.rows[env][: -self.size]

    def born(self) -> Row:
        return {}

    def extend(self, block: Transitions) -> None:
        for row in range(len(block)):
            self.add(block[row : row + 1])

    def places(self) -> list[tuple[int, int]]:
        return [(env, i) for env, rows in enumerate(self.rows) for i in range(len(rows))]

    def sample(self, batch_size: int) -> ReplayBatch:
        with self.lock:
            places = self.places()
            if not places:
                raise RuntimeError("sample: expected stored rows, got none")
            return self.batch([places[i] for i in self.draw(places, batch_size)])

    def draw(self, places: list[tuple[int, int]], batch_size: int) -> np.ndarray:
        return self.random.integers(0, len(places), batch_size)

    def batch(self, places: list[tuple[int, int]]) -> ReplayBatch:
        return self.stacked([self.read_at(env, i) for env, i in places])

    def read_at(self, env: int, i: int) -> Row:
        return self.rows[env][i]

    def stacked(self, rows: list[Row]) -> ReplayBatch:
        known = {
            name: np.stack([np.asarray(row[name]) for row in rows]) for name in rows[0] if name in ReplayBatch._fields
        }
        return ReplayBatch(**known)

    @property
    def stored(self) -> int:
        return len(self.places())

    def clear(self) -> None:
        self.rows = [[] for _ in self.rows]

    def state(self) -> Any:
        return self.rows, self.random, self.count

    def save(self, path: str) -> None:
        with open(f"{path}.new", "wb") as file:
            pickle.dump(self.state(), file)
        os.replace(f"{path}.new", path)

    def load(self, path: str) -> None:
        with open(path, "rb") as file:
            self.rows, self.random, self.count = pickle.load(file)


class ListWithoutReplacement(ListReplay):
    def draw(self, places: list[tuple[int, int]], batch_size: int) -> np.ndarray:
        return self.random.choice(len(places), batch_size, replace=False)


class ListPrioritized(ListReplay):
    """p = priority^α, drawn in proportion; a row's id is its handle."""

    def born(self) -> Row:
        return {"priority": max((row["priority"] for rows in self.rows for row in rows), default=1.0)}

    def mass(self, places: list[tuple[int, int]]) -> np.ndarray:
        return np.array([self.rows[env][i]["priority"] for env, i in places]) ** ALPHA

    def draw(self, places: list[tuple[int, int]], batch_size: int) -> np.ndarray:
        mass = self.mass(places)
        return self.random.choice(len(places), batch_size, p=mass / mass.sum())

    def batch(self, places: list[tuple[int, int]]) -> ReplayBatch:
        self.newest_ids = np.array([self.rows[env][i]["id"] for env, i in places])
        weight = self.mass(places) ** -BETA
        return super().batch(places)._replace(weight=weight / weight.max())

    def handles(self, batch: Any) -> np.ndarray:
        return self.newest_ids

    def set_priority(self, handles: np.ndarray, priority: np.ndarray) -> None:
        if not (np.isfinite(priority).all() and (priority >= 0).all()):
            raise ValueError("priority: expected finite numbers of at least 0")
        known = {row["id"]: row for rows in self.rows for row in rows}
        for handle, value in zip(handles.tolist(), np.asarray(priority).tolist(), strict=True):
            if handle in known:
                known[handle]["priority"] = value


class ListNStep(ListReplay):
    def __init__(self, shape: ReplayShape, n: int, gamma: float) -> None:
        super().__init__(shape)
        self.n, self.gamma = n, gamma

    def read_at(self, env: int, i: int) -> Row:
        run = self.run(self.rows[env][i : i + self.n])
        reward = sum(self.gamma**k * float(row["reward"]) for k, row in enumerate(run))
        return {**run[-1], "obs": run[0]["obs"], "action": run[0]["action"], "reward": reward, **self.discount(run)}

    def run(self, rows: list[Row]) -> list[Row]:
        for k, row in enumerate(rows):
            if row["terminated"] or row["truncated"]:
                return rows[: k + 1]
        return rows

    def discount(self, run: list[Row]) -> Row:
        return {"discount": self.gamma ** len(run)}


class ListSequence(ListReplay):
    """Runs of `burn_in` + `length` steps around the drawn one; masked where the episode is over."""

    def __init__(self, shape: ReplayShape, burn_in: int, length: int) -> None:
        super().__init__(shape)
        self.burn_in, self.length = burn_in, length

    def read_at(self, env: int, i: int) -> Row:
        rows, first, last = self.rows[env], i, i
        while first > 0 and not self.ends(rows[first - 1]):
            first -= 1
        while last + 1 < len(rows) and not self.ends(rows[last]):
            last += 1
        wanted = range(i - self.burn_in, i + self.length)
        steps = [rows[min(max(k, 0), len(rows) - 1)] for k in wanted]
        run = {name: np.stack([np.asarray(step[name]) for step in steps]) for name in FIELDS}
        return {**run, "mask": self.mask(np.array([first <= k <= last for k in wanted]))}

    def mask(self, real: np.ndarray) -> np.ndarray:
        return real

    def ends(self, row: Row) -> bool:
        return bool(row["terminated"] or row["truncated"])


class ListHindsight:
    def __init__(self, capacity: int, strategy: str) -> None:
        self.capacity, self.strategy, self.random = capacity, strategy, np.random.default_rng(0)
        self.steps: list[tuple[int, GoalStep]] = []
        self.episode = 0

    def add(self, step: GoalStep) -> None:
        self.steps.append((self.episode, step))
        self.episode += step.terminated or step.truncated
        del self.steps[: -self.capacity]

    def sample(self, batch_size: int) -> GoalBatch:
        rows = [self.exchanged(int(i)) for i in self.random.integers(0, len(self.steps), batch_size)]
        return GoalBatch(*(np.array(column) for column in zip(*rows, strict=True)))

    def exchanged(self, i: int) -> tuple[Any, ...]:
        episode, step = self.steps[i]
        later = self.later(i, episode)
        goal = later[-1] if self.strategy == "final" else float(self.random.choice(later))
        reward = self.reward(step, goal)
        return step.at, goal, step.next_at, reward, reward == 0

    def later(self, i: int, episode: int) -> list[float]:
        return [step.next_at for number, step in self.steps[i:] if number == episode]

    def reward(self, step: GoalStep, goal: float) -> float:
        return float(goal_reward(np.array(step.next_at), np.array(goal)))


class ListReplayOfSteps(ListReplay):
    def __init__(self, envs: VectorEnv, capacity: int) -> None:
        n = envs.num_envs
        super().__init__(ReplayShape(capacity * n, n, (3,), 1))
        self.mode, self.resetting = envs.metadata["autoreset_mode"], np.zeros(n, bool)

    def add_step(self, obs: np.ndarray, action: np.ndarray, step: tuple[Any, ...]) -> None:
        after, reward, terminated, truncated, info = step
        for env in np.flatnonzero(~self.resetting).tolist():
            true = self.final(info, env) if self.mode is AutoresetMode.SAME_STEP else None
            row = obs[env], action[env : env + 1], reward[env], terminated[env], truncated[env]
            row = dict(zip(FIELDS, (*row, after[env] if true is None else true), strict=True))
            self.append(env, {name: self.copy(value) for name, value in row.items()})
        self.resetting = (terminated | truncated) & (self.mode is AutoresetMode.NEXT_STEP)

    def final(self, info: dict[str, Any], env: int) -> Any:
        return info["final_obs"][env] if "final_obs" in info and info["_final_obs"][env] else None


def sequences(shape: ReplayShape, length: int) -> ListSequence:
    return ListSequence(shape, 0, length)


def reference(**changed: Any) -> Adapter:
    """Return the adapter of the reference, with some parts replaced."""
    parts: dict[str, Any] = {
        "gae": ListGae,
        "replay": ListReplay,
        "stacked": ListReplay,
        "without_replacement": ListWithoutReplacement,
        "prioritized": ListPrioritized,
        "prioritized_strictly": ListPrioritized,
        "n_step": ListNStep,
        "sequence": sequences,
        "burn_in": ListSequence,
        "hindsight": ListHindsight,
        "from_env": ListReplayOfSteps,
    }
    return Adapter("reference", "1", **{**parts, **changed})
