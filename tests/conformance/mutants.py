"""Buffers with one mistake each, by the case that must detect it. Most mistakes were seen in libraries."""

from __future__ import annotations

import io
import pickle
import time
from dataclasses import replace
from typing import Any

import numpy as np

from relive_conformance.adapters import ALPHA, BETA, GoalStep, ReplayBatch, ReplayShape, Trajectory, Transitions
from tests.conformance.reference_buffer import (
    FIELDS,
    ListGae,
    ListHindsight,
    ListNStep,
    ListPrioritized,
    ListReplay,
    ListReplayOfSteps,
    ListSequence,
    ListWithoutReplacement,
    Row,
    reference,
)


class ReadsTheNextFlag(ListGae):
    def estimate(self, trajectory: Trajectory, gamma: float, lam: float) -> Any:
        shifted = np.concatenate([trajectory.terminated[1:], trajectory.terminated[-1:]])
        return super().estimate(replace(trajectory, terminated=shifted), gamma, lam)


class GoesOnAfterTruncation(ListGae):
    def estimate(self, trajectory: Trajectory, gamma: float, lam: float) -> Any:
        return super().estimate(replace(trajectory, truncated=np.zeros_like(trajectory.truncated)), gamma, lam)


class DoesNotBootstrap(ListGae):
    def estimate(self, trajectory: Trajectory, gamma: float, lam: float) -> Any:
        return super().estimate(replace(trajectory, terminated=trajectory.ended), gamma, lam)


class EndsForEverybody(ListGae):
    def estimate(self, trajectory: Trajectory, gamma: float, lam: float) -> Any:
        ends = np.broadcast_to(trajectory.terminated.any(1, keepdims=True), trajectory.terminated.shape)
        return super().estimate(replace(trajectory, terminated=ends), gamma, lam)


class StoresResets(ListReplayOfSteps):
    def add_step(self, obs: np.ndarray, action: np.ndarray, step: tuple[Any, ...]) -> None:
        self.resetting[:] = False
        super().add_step(obs, action, step)


class LosesFinalObservations(ListReplayOfSteps):
    def final(self, info: dict[str, Any], env: int) -> Any:
        return None


class KeepsOneTooMany(ListReplay):
    def __init__(self, shape: ReplayShape) -> None:
        super().__init__(shape)
        self.size += 1


class ExtendsFieldsApart(ListReplay):
    def extend(self, block: Transitions) -> None:
        super().extend(replace(block, reward=np.roll(block.reward, 1)))


class KeepsTheFirstFlag(ListNStep):
    def read_at(self, env: int, i: int) -> Row:
        return {**super().read_at(env, i), "terminated": self.rows[env][i]["terminated"]}


class SumsThroughTruncation(ListNStep):
    def run(self, rows: list[Row]) -> list[Row]:
        return super().run([{**row, "truncated": False} for row in rows])


class DiscountsAllSteps(ListNStep):
    def discount(self, run: list[Row]) -> Row:
        return {"discount": self.gamma**self.n}


class NeverDrawsLastSteps(ListNStep):
    def places(self) -> list[tuple[int, int]]:
        return [(env, i) for env, i in super().places() if len(self.run(self.rows[env][i : i + self.n])) == self.n]


class StopsAtAnybodysEnd(ListNStep):
    def run(self, rows: list[Row]) -> list[Row]:
        for k, row in enumerate(rows):
            same_time = [other for column in self.rows for other in column if other["id"] // 3 == row["id"] // 3]
            if any(other["terminated"] or other["truncated"] for other in same_time):
                return rows[: k + 1]
        return rows


class SharesNextObservations(ListReplay):
    def read_at(self, env: int, i: int) -> Row:
        rows = self.rows[env]
        return {**rows[i], "next_obs": rows[i + 1]["obs"]} if i + 1 < len(rows) else rows[i]


class MixesPowers(ListPrioritized):
    def batch(self, places: list[tuple[int, int]]) -> ReplayBatch:
        weight = self.mass(places) ** (-BETA / ALPHA)
        return super().batch(places)._replace(weight=weight / weight.max())


class RemembersTheSmallest(ListPrioritized):
    smallest = np.inf

    def batch(self, places: list[tuple[int, int]]) -> ReplayBatch:
        return super().batch(places)._replace(weight=(self.mass(places) / min(self.smallest, 1.0)) ** -BETA)

    def set_priority(self, handles: np.ndarray, priority: np.ndarray) -> None:
        super().set_priority(handles, priority)
        self.smallest = min(self.smallest, float((priority**ALPHA).min()))


class AcceptsAnything(ListPrioritized):
    def set_priority(self, handles: np.ndarray, priority: np.ndarray) -> None:
        super().set_priority(handles, np.abs(np.nan_to_num(priority)))


class DrawsZeros(ListPrioritized):
    def set_priority(self, handles: np.ndarray, priority: np.ndarray) -> None:
        super().set_priority(handles, np.maximum(priority, np.where(priority < 0, priority, 0.1)))


class AddsUpInFloat32(ListPrioritized):
    """A running total of float32 that is corrected by differences."""

    total = np.float32(0)

    def born(self) -> Row:
        self.total += np.float32(1)
        return {"priority": 1.0}

    def set_priority(self, handles: np.ndarray, priority: np.ndarray) -> None:
        before = {row["id"]: row["priority"] for rows in self.rows for row in rows}
        super().set_priority(handles, priority)
        for handle, value in zip(handles.tolist(), priority.tolist(), strict=True):
            self.total += np.float32(np.float32(value**ALPHA) - np.float32(before[handle] ** ALPHA))

    def draw(self, places: list[tuple[int, int]], batch_size: int) -> np.ndarray:
        below = np.cumsum(self.mass(places))
        return np.searchsorted(below, self.random.random(batch_size) * self.total).clip(0, len(places) - 1)


class TheFirstCounts(ListPrioritized):
    def set_priority(self, handles: np.ndarray, priority: np.ndarray) -> None:
        super().set_priority(handles[::-1], priority[::-1])


class KnowsSlotsOnly(ListPrioritized):
    def append(self, env: int, row: Row) -> None:
        super().append(env, row)
        self.rows[env][-1]["slot"] = self.rows[env][-1]["id"] % self.size

    def set_priority(self, handles: np.ndarray, priority: np.ndarray) -> None:
        for handle, value in zip(handles.tolist(), priority.tolist(), strict=True):
            for row in self.rows[0]:
                row["priority"] = value if row["slot"] == handle % self.size else row["priority"]


class NeverDrawsTheOldest(ListReplay):
    def draw(self, places: list[tuple[int, int]], batch_size: int) -> np.ndarray:
        return self.random.integers(min(1, len(places) - 1), len(places), batch_size)


class ForgetsPriorities(ListPrioritized):
    def draw(self, places: list[tuple[int, int]], batch_size: int) -> np.ndarray:
        return self.random.integers(0, len(places), batch_size)


class GoalsOfOtherEpisodes(ListHindsight):
    def later(self, i: int, episode: int) -> list[float]:
        return [step.next_at for _, step in self.steps[i:]]


class KeepsRewards(ListHindsight):
    def reward(self, step: GoalStep, goal: float) -> float:
        return step.reward


class FinalBeforeTheLastStep(ListHindsight):
    def later(self, i: int, episode: int) -> list[float]:
        return [step.at for number, step in self.steps[i:] if number == episode]


class CrossesEnds(ListSequence):
    def ends(self, row: Row) -> bool:
        return False


class CrossesTheSeam(ListSequence):
    def read_at(self, env: int, i: int) -> Row:
        steps = [self.rows[env][k % len(self.rows[env])] for k in range(i, i + self.length)]
        return {name: np.stack([np.asarray(step[name]) for step in steps]) for name in FIELDS}


class NeverReachesTheEnd(ListSequence):
    def read_at(self, env: int, i: int) -> Row:
        run = super().read_at(env, i)
        ended = run["terminated"] | run["truncated"]
        return {**run, "mask": run["mask"] & ~ended}


class MasksNothing(ListSequence):
    def mask(self, real: np.ndarray) -> np.ndarray:
        return np.ones_like(real)


class PadsBeforeTheStart(ListSequence):
    """Marks the trained steps but still pads a short burn-in in front."""

    def read_at(self, env: int, i: int) -> Row:
        run = super().read_at(env, i)
        return {**run, "train": run["mask"] & (np.arange(self.burn_in + self.length) >= self.burn_in)}


class TrainsOnBurnIn(ListSequence):
    def read_at(self, env: int, i: int) -> Row:
        run = super().read_at(env, i)
        return {**run, "train": run["mask"]}


class ForgetsTheGenerator(ListReplay):
    def load(self, path: str) -> None:
        random = self.random
        super().load(path)
        self.random = random


class LoadsEqualPriorities(ListPrioritized):
    def load(self, path: str) -> None:
        super().load(path)
        for row in self.rows[0]:
            row["priority"] = 1.0


class OverwritesTheFile(ListReplay):
    def save(self, path: str) -> None:
        whole = io.BytesIO()
        pickle.dump(self.state(), whole)
        with open(path, "wb") as file:
            file.write(whole.getvalue()[:100])
            file.flush()
            time.sleep(0.1)
            file.write(whole.getvalue()[100:])


class WritesFieldByField(ListReplay):
    def add(self, step: Transitions) -> None:
        row: Row = {"id": 0, **{name: np.zeros_like(getattr(step, name)[0]) for name in FIELDS}}
        self.rows[0] = [*self.rows[0], row][-self.size :]
        for name in FIELDS:
            row[name] = getattr(step, name)[0].copy()
            time.sleep(0)


class DrawsFromTheGlobalGenerator(ListReplay):
    def draw(self, places: list[tuple[int, int]], batch_size: int) -> np.ndarray:
        return np.random.RandomState().randint(0, len(places), batch_size)


class TouchesTheGlobalGenerator(ListReplay):
    def draw(self, places: list[tuple[int, int]], batch_size: int) -> np.ndarray:
        np.random.rand()  # noqa: NPY002
        return super().draw(places, batch_size)


class AlwaysTheSameSeed(ListReplay):
    def __init__(self, shape: ReplayShape) -> None:
        super().__init__(shape._replace(seed=42 if shape.seed is None else shape.seed))


class KeepsReferences(ListReplay):
    def copy(self, value: Any) -> Any:
        return value


class HandsOutItsMemory(ListReplay):
    def batch(self, places: list[tuple[int, int]]) -> ReplayBatch:
        batch = super().batch(places)
        for k, (env, i) in enumerate(places):
            self.rows[env][i]["obs"] = batch.obs[k]
        return batch


class CastsToUint8(ListReplay):
    def checked(self, step: Transitions) -> dict[str, np.ndarray]:
        dtype = self.shape.dtype
        return super().checked(replace(step, obs=step.obs.astype(dtype), next_obs=step.next_obs.astype(dtype)))


class NextObservationsAreFloat(ListReplay):
    def stacked(self, rows: list[Row]) -> ReplayBatch:
        batch = super().stacked(rows)
        return batch._replace(next_obs=batch.next_obs.astype(np.float32))


class EmptyBatches(ListReplay):
    def sample(self, batch_size: int) -> ReplayBatch:
        if self.places():
            return super().sample(batch_size)
        return ReplayBatch(*(np.zeros((0, 2)) for _ in range(5)))


class FewerThanAsked(ListWithoutReplacement):
    def draw(self, places: list[tuple[int, int]], batch_size: int) -> np.ndarray:
        return super().draw(places, min(batch_size, len(places)))


class ClearsNothing(ListReplay):
    def clear(self) -> None:
        pass


class ClearsTheSizeOnly(ListPrioritized):
    """New rows get the largest priority ever set; one old row is still drawn."""

    def clear(self) -> None:
        self.rows[0] = self.rows[0][-1:]


class StacksAcrossEpisodes(ListReplay):
    def read_at(self, env: int, i: int) -> Row:
        newest = [self.rows[env][max(k, 0)]["obs"][..., -1] for k in range(i - 3, i + 1)]
        return {**self.rows[env][i], "obs": np.stack(newest, -1)}


class Broadcasts(ListReplay):
    def checked(self, step: Transitions) -> dict[str, np.ndarray]:
        n = self.shape.num_envs
        arrays = {name: np.asarray(getattr(step, name)) for name in FIELDS}
        obs = (n, *self.shape.obs)
        shapes: dict[str, Any] = dict(
            zip(FIELDS, (obs, (n, self.shape.action_dim), (n,), (n,), (n,), obs), strict=True)
        )
        return {name: np.broadcast_to(array, shapes[name]) for name, array in arrays.items()}


class MovesOnBeforeItRefuses(ListReplay):
    def add(self, step: Transitions) -> None:
        for rows in self.rows:
            del rows[: max(0, len(rows) + 1 - self.size)]
        super().add(step)


MUTANTS: list[tuple[str, dict[str, Any]]] = [
    ("T1", {"gae": ReadsTheNextFlag}),
    ("T2", {"gae": GoesOnAfterTruncation}),
    ("T2", {"gae": DoesNotBootstrap}),
    ("T2", {"collected": GoesOnAfterTruncation}),
    ("T3", {"from_env": StoresResets}),
    ("T3", {"from_env": LosesFinalObservations}),
    ("T4", {"replay": KeepsOneTooMany}),
    ("T4", {"replay": ExtendsFieldsApart}),
    ("T5", {"n_step": KeepsTheFirstFlag}),
    ("T5", {"n_step": SumsThroughTruncation}),
    ("T6", {"n_step": DiscountsAllSteps}),
    ("T6", {"n_step": NeverDrawsLastSteps}),
    ("T7", {"replay": SharesNextObservations}),
    ("T7", {"replay_saving": {"sharing": SharesNextObservations}}),
    ("T8", {"prioritized": MixesPowers}),
    ("T8", {"prioritized": RemembersTheSmallest}),
    ("T9", {"prioritized_strictly": AcceptsAnything}),
    ("T9", {"prioritized_strictly": DrawsZeros}),
    ("T10", {"prioritized_strictly": AddsUpInFloat32}),
    ("T11", {"prioritized_strictly": TheFirstCounts}),
    ("T12", {"prioritized_strictly": KnowsSlotsOnly}),
    ("T13", {"replay": NeverDrawsTheOldest}),
    ("T13", {"prioritized": ForgetsPriorities}),
    ("T14", {"hindsight": GoalsOfOtherEpisodes}),
    ("T14", {"hindsight": KeepsRewards}),
    ("T14", {"hindsight": FinalBeforeTheLastStep}),
    ("T15", {"sequence": lambda shape, length: CrossesEnds(shape, 0, length)}),
    ("T15", {"sequence": lambda shape, length: CrossesTheSeam(shape, 0, length)}),
    ("T15", {"sequence": lambda shape, length: NeverReachesTheEnd(shape, 0, length)}),
    ("T16", {"burn_in": MasksNothing}),
    ("T16", {"burn_in": PadsBeforeTheStart}),
    ("T16", {"burn_in": TrainsOnBurnIn}),
    ("T17", {"replay": ForgetsTheGenerator}),
    ("T17", {"prioritized": LoadsEqualPriorities}),
    ("T18", {"replay": OverwritesTheFile}),
    ("T19", {"replay": WritesFieldByField}),
    ("T20", {"replay": DrawsFromTheGlobalGenerator}),
    ("T20", {"replay": TouchesTheGlobalGenerator}),
    ("T20", {"replay": AlwaysTheSameSeed}),
    ("T21", {"replay": KeepsReferences}),
    ("T21", {"replay": HandsOutItsMemory}),
    ("T22", {"replay": CastsToUint8}),
    ("T22", {"replay": NextObservationsAreFloat}),
    ("T23", {"replay": EmptyBatches}),
    ("T23", {"without_replacement": FewerThanAsked}),
    ("T24", {"replay": ClearsNothing}),
    ("T24", {"prioritized": ClearsTheSizeOnly}),
    ("T25", {"gae": EndsForEverybody}),
    ("T25", {"n_step": StopsAtAnybodysEnd}),
    ("T26", {"stacked": StacksAcrossEpisodes}),
    ("T27", {"replay": Broadcasts}),
    ("T28", {"replay": MovesOnBeforeItRefuses}),
]
"""Cases, each with the wrong part that replaces a part of the reference."""

__all__ = ["MUTANTS", "reference"]
