"""`check()` detects every planted corruption of a buffer's memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

import relive as rl
from relive import kernels
from relive.errors import InvariantError
from relive.replay.ring import FINAL, HISTORY, PENDING, TRANSITION
from tests.faults.digest import digest

Corruption = Callable[[Any], Any]
"""A function that corrupts a buffer."""


def assert_detected(buffer: Any, corrupt: Corruption, message: str) -> None:
    before = digest(buffer)
    buffer.check()
    assert digest(buffer) == before
    corrupt(buffer)
    with pytest.raises(InvariantError, match=message):
        buffer.check()


def make_replay(steps: int = 4, end: int | None = 2, frames: int = 1, **options: Any) -> rl.ReplayBuffer:
    """Return a buffer of two environments with six rows each, obs = t; environment 0 ends at t = `end`.

    Rows of environment 0: transitions 0 to 2, the final row 3, the transition 4, and the pending row 5.
    """
    obs: Any = 1 if frames == 1 else rl.Stacked(rl.Field(1), frames)
    replay = rl.ReplayBuffer(12, **{"obs": obs, "action": (), "num_envs": 2, "seed": 0, **options})
    start = [0, 0]
    for t in range(steps):
        ended = np.array([t == end, False])
        given = [_stacks([max(t + s, start[n]) for n in (0, 1)], start, frames) for s in (0, 1)]
        replay.add(given[0], np.zeros(2), np.full(2, t), ended, np.zeros(2, bool), given[1])
        start[0] = t + 1 if ended[0] else start[0]
    return replay


def _stacks(now: list[int], start: list[int], frames: int) -> np.ndarray:
    if frames == 1:
        return np.array(now, np.float32)[:, None]
    return np.array([[[max(t - j, s) for j in reversed(range(frames))]] for t, s in zip(now, start, strict=True)], "f")


def array(name: str, place: Any, value: Any) -> Corruption:
    """Return a corruption that writes into an array of the state dict, which shares the buffer's memory."""

    def apply(buffer: Any) -> None:
        buffer.state_dict()["arrays"][name][place] = value

    return apply


def ring(name: str, place: Any, value: Any) -> Corruption:
    return array(f"ring.{name}", place, value)


def kind(slot: int, env: int, value: int) -> Corruption:
    return ring("kind", (slot, env), value)


def column(name: str, place: Any, value: Any) -> Corruption:
    def apply(buffer: Any) -> None:
        buffer.columns[name][place] = value

    return apply


def byte(name: str, place: Any) -> Corruption:
    def apply(buffer: Any) -> None:
        buffer.columns[name].view(torch.uint8)[place] = 2

    return apply


def replaced(change: Callable[[torch.Tensor], torch.Tensor]) -> Corruption:
    """Return a corruption that replaces the tensor of the observations."""

    def apply(buffer: Any) -> None:
        path = "storage.rows.leaves" if isinstance(buffer, rl.ReplayBuffer) else "_storage.tensors"
        attribute(path, lambda tensors: (change(tensors[0]), *tensors[1:]))(buffer)

    return apply


def of_rows(path: str, value: Any) -> Corruption:
    return attribute(f"storage.rows.{path}", value)


def attribute(path: str, value: Any) -> Corruption:
    def apply(buffer: Any) -> None:
        *owners, name = path.split(".")
        for owner in owners:
            buffer = getattr(buffer, owner)
        setattr(buffer, name, value(getattr(buffer, name)) if callable(value) else value)

    return apply


def after(call: str, corrupt: Corruption) -> Corruption:
    """Return a corruption that first calls a method of the buffer."""

    def apply(replay: Any) -> None:
        getattr(replay, call)()
        corrupt(replay)

    return apply


NEXT: dict[str, Any] = {"autoreset": "NEXT_STEP"}
STORED: dict[str, Any] = {"next_obs": "stored"}

COLUMNS: dict[str, tuple[Corruption, str]] = {
    "another dtype": (replaced(torch.Tensor.double), r"^obs: expected torch.float32 of shape .*, got torch.float64 of"),
    "another shape": (replaced(lambda x: x[:-1]), r"^obs: expected torch.float32 of shape \(\d, 2, 1\) on cpu, got"),
    "another device": (replaced(lambda x: x.to("meta")), r"^obs: expected .* on cpu, got .* on meta"),
    "other strides": (
        replaced(lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)), "^obs: expected contiguous memory"
    ),
    "other memory": (
        replaced(torch.clone), r"^memory of obs: expected the address \d+, which the buffer writes to, got"
    ),
    "a flag of 2": (byte("terminated", (0, 1)), r"^terminated\[0, 1\]: expected a flag of 0 or 1, got 2"),
    "another flag of 2": (byte("truncated", (1, 0)), r"^truncated\[1, 0\]: expected a flag of 0 or 1, got 2"),
}  # fmt: skip

REPLAY: dict[str, tuple[dict[str, Any], Corruption, str]] = {
    "a kind that is none": ({}, kind(0, 0, 9), r"^kind\[0, 0\]: expected one of 0 to 4, got 9\. "),
    "a hole": ({}, kind(1, 0, 0), "^kind of row 1, environment 0: expected a row that was written, got empty"),
    "a row that was never written": ({}, kind(6, 1, TRANSITION), r"^kind\[6, 1\]: expected 0 \(empty\) where no row"),
    "no pending row": ({}, kind(5, 0, FINAL), "^kind of row 5, environment 0: expected pending at the open head"),
    "a second pending row": ({}, kind(1, 1, PENDING), "^kind of row 1, environment 1: expected pending only at an op"),
    "a transition that has expired": (
        {"steps": 10, "frames": 3}, kind(2, 1, TRANSITION), "^kind of row 2, environment 1: expected no transition 7 r"
    ),
    "history in the window": ({}, kind(1, 0, HISTORY), "^kind of row 1, .*: expected no history in the newest 7 rows"),
    "a transition that leads nowhere": (
        {"steps": 3}, kind(3, 0, TRANSITION), "^kind of row 3, environment 0: expected no transition as the newest"
    ),
    "an episode of no transition": ({}, kind(2, 0, FINAL), "^kind of row 3, .*: expected a transition before a final"),
    "a final row at the start": ({}, kind(0, 1, FINAL), "^kind of row 0, .*: expected a transition before a final row"),
    "three final rows": (
        NEXT, ring("kind", (slice(1, 3), 0), FINAL), "^kind of row 3, environment 0: expected at most two final rows"
    ),
    "no start behind a final row": ({}, ring("first", (4, 0), False), "^first of row 4, .*: expected a start after"),
    "a start in an episode": ({}, ring("first", (1, 1), True), "^first of row 1, .*: expected a start only after a"),
    "no start of a stored row": (
        STORED, ring("first", (1, 1), False), "^first of row 1, .*: expected a start in every unordered"
    ),
    "an end inside": ({}, column("terminated", (1, 1), True), "^kind of row 2, environment 1: expected final after"),
    "a truncation at the newest": ({}, column("truncated", (4, 0), True), "^kind of row 5, .*: expected final after"),
    "a reset without an end": (
        STORED | NEXT, column("terminated", (2, 0), False), "^kind of row 3, .*: expected an end before the row that r"
    ),
    "a final row among stored ones": (STORED, kind(1, 0, FINAL), "^kind of row 1, .*: expected an end before the row"),
    "a reset that never comes": (
        {}, ring("resetting", 0, True), r"^resetting\[0\]: expected False, except after an end under"
    ),
    "a reset in an episode": (
        NEXT, ring("resetting", 1, True), r"^resetting\[1\]: expected False, except after an end in the newest row"
    ),
    "a stored reset in an episode": (
        STORED | NEXT, ring("resetting", 1, True),
        r"^resetting\[1\]: expected False, except after an end in the newest row"
    ),
    "no reset after an end": (
        NEXT | {"steps": 3}, ring("resetting", 0, False), r"^resetting\[0\]: expected True after an end, got False"
    ),
    "a reset after a cut": (
        NEXT | {"steps": 3}, after("cut", ring("resetting", 0, True)),
        r"^resetting\[0\]: expected False, except after an end under autoreset"
    ),
    "an open row of nothing": ({}, after("clear", ring("open", 1, True)), r"^open\[1\]: expected False without a step"),
    "an open row of stored ones": (STORED, ring("open", 1, True), r"^open\[1\]: expected False without a step before"),
    "a closed row that is pending": ({}, ring("open", 0, False), r"^kind\[5, 0\]: expected 0 \(empty\) .*, got 3"),
    "a flag that is none": (
        {}, lambda r: r.state_dict()["arrays"]["ring.open"].view(torch.uint8).fill_(3),
        r"^open\[0\]: expected a flag of 0 or 1, got 3"
    ),
    "a head too far": ({}, ring("head", 0, 6), "^kind of row 6, environment 0: expected a row that was written"),
    "a head before the floor": ({}, ring("head", 1, -1), r"^head\[1\]: expected a row of at least the floor, got -1"),
    "a head beyond all ids": ({}, ring("head", 1, 2**62), r"^head\[1\]: expected a row of at most \d+, for ids of int"),
    "a floor below everything": ({}, ring("floor", 0, -1), r"^floor\[0\]: expected a row of at least 0, got -1"),
    "a floor too high": ({}, ring("floor", 0, 1), r"^kind\[0, 0\]: expected 0 \(empty\) where no row was written"),
    "a wrong count": ({}, ring("count", 1, 5), r"^count\[1\]: expected the number of transitions, got 5"),
    "an end of nothing": ({}, kind(3, 1, FINAL), "^first of row 4, environment 1: expected a start after a final row"),
    "stacks that could not be refused": (
        {"frames": 3}, lambda r: r.storage.rows.num_invalid_stacks.add_(2),
        "^obs: expected stacks of the stored frames, got 2 steps w"
    ),
    "another window": ({}, of_rows("ring.num_sampleable", 6), r"^ring: expected .* \(2, 7, 7\), got \(2, 6, 7\)"),
    "other memory of the ring": ({}, of_rows("ring.kind", torch.clone), "^memory of kind: expected the"),
    "other memory of next_obs": (
        STORED, of_rows("next_leaves", lambda c: (c[0].clone(),)), "^memory of next_obs: expected the addr"
    ),
    "an unknown staged field": (
        {}, attribute("_input.staged", {"hont": ()}), r"^staged fields: expected declared fields \(obs"
    ),
    "a staged field of another shape": (
        {}, attribute("_input.staged", {"obs": (torch.zeros(2, 3),)}), r"^staged obs: expected .* \(2, 1\) on cpu, got"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REPLAY)
def test_corruption_of_a_replay_buffer_is_detected(backend: str, name: str) -> None:
    options, corrupt, message = REPLAY[name]
    assert_detected(make_replay(**options), corrupt, message)


@pytest.mark.parametrize("name", COLUMNS)
def test_corruption_of_the_columns_is_detected(backend: str, name: str) -> None:
    corrupt, message = COLUMNS[name]
    rollout = rl.RolloutBuffer(4, 2, obs=1, action=())
    for t in range(3):
        rollout.add(np.full((2, 1), t), np.zeros(2), np.zeros(2), np.zeros(2, bool), np.zeros(2, bool))
    assert_detected(make_replay(), corrupt, message)
    assert_detected(rollout, corrupt, message)


def leaf(place: int, value: float, rebuild: bool = True) -> Corruption:
    def apply(replay: Any) -> None:
        tree = replay.sampler.tree
        tree.leaves_view()[place] = value
        if rebuild:
            tree.rebuild()

    return apply


def epoch_id(place: int, value: int) -> Corruption:
    def apply(replay: Any) -> None:
        replay.sample(3)
        ids = replay.state_dict()["arrays"]["sampler.ids"]
        ids[place] = value if value >= 0 else ids[0]

    return apply


def clear_within_an_epoch(replay: Any) -> None:
    replay.sample(3)
    epoch = replay.sampler.state()
    replay.clear()
    replay.sampler.load_state(epoch)


SAMPLERS: dict[str, tuple[Any, Corruption, str]] = {
    "a priority that is no number": (
        rl.Prioritized(), leaf(3, float("nan")), r"^priority\[1, 1\]: expected a finite number of at least 0, got nan"
    ),
    "a negative priority": (rl.Prioritized(), leaf(0, -1.0), r"^priority\[0, 0\]: expected a finite number of at"),
    "a priority of no transition": (rl.Prioritized(), leaf(6, 1.0), r"^priority\[3, 0\]: expected 0 where there is no"),
    "a transition without priority": (rl.Prioritized(), leaf(2, 0.0), r"^priority\[1, 0\]: expected more than 0 for a"),
    "a priority of nowhere": (rl.Prioritized(), leaf(14, 1.0), "^priority of no row: expected 0, got 1.0"),
    "sums of other priorities": (
        rl.Prioritized(), leaf(0, 1.0 + 1e-5, rebuild=False),
        "^sums of priorities: expected the sums over the rows, to 1e-9"
    ),
    "no largest priority": (
        rl.Prioritized(),
        attribute("sampler._max_priority", float("inf")),
        "^largest priority: expected a finite number of",
    ),
    "fewer draws than none": (
        rl.Prioritized(), attribute("sampler.num_drawn", -1), "^draws: expected a number of at least 0"
    ),
    "a tree of another size": (
        rl.Prioritized(), attribute("sampler._slots", 13), "^priorities: expected 14, got 15"
    ),
    "an epoch with a row that was never there": (
        rl.WithoutReplacement(), epoch_id(1, 999), r"^epoch\[1\]: expected ids of transitions, got 999"
    ),
    "an epoch with a final row": (rl.WithoutReplacement(), epoch_id(0, 6), r"^epoch\[0\]: expected ids of transitions"),
    "an epoch of rows that were cleared": (
        rl.WithoutReplacement(), clear_within_an_epoch, r"^epoch\[0\]: expected rows since the last clear, got"
    ),
    "an epoch with a row twice": (rl.WithoutReplacement(), epoch_id(2, -1), "^epoch: expected every row once, got 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", SAMPLERS)
def test_corruption_of_a_sampler_is_detected(backend: str, name: str) -> None:
    sampler, corrupt, message = SAMPLERS[name]
    assert_detected(make_replay(sampler=sampler), corrupt, message)


@pytest.mark.skipif(kernels.native_core() is None, reason="this install has no native core (no compiler)")
def test_a_wrong_cached_smallest_priority_is_detected() -> None:
    replay = make_replay(sampler=rl.Prioritized(normalize="global", alpha=1.0, eps=0.0))
    replay.sample(2)

    def keep_total(replay: Any) -> None:
        replay.sampler.tree.leaves_view()[:2] = torch.tensor([0.5, 1.5])

    assert_detected(
        replay, keep_total, "^sums of priorities: expected the sums over the rows, to 1e-9, got .* error of inf"
    )


def test_priorities_of_zero_are_valid_without_eps(backend: str) -> None:
    replay = make_replay(sampler=rl.Prioritized(eps=0.0))
    replay.update_priority(replay.ids(), torch.zeros(8))
    replay.check()


def make_counted_replay() -> rl.ReplayBuffer:
    """Return a buffer with statistics of four steps in two environments; one episode ended after three."""
    return make_replay(stats=rl.EpisodeStats(2, window=4), norm={"obs": rl.RunningNorm(1), "action": rl.RunningNorm()})


def restored(listener: Callable[[Any], Any], change: Callable[[dict[str, torch.Tensor]], Any]) -> Corruption:
    """Return a corruption that restores changed tensors into the statistics or the norm of a buffer."""

    def apply(buffer: Any) -> None:
        tensors = {name: tensor.clone() for name, tensor in listener(buffer).snapshot().items()}
        change(tensors)
        listener(buffer).restore(tensors)

    return apply


def stats(name: str, place: Any, value: float) -> Corruption:
    return restored(lambda buffer: buffer.stats, lambda tensors: tensors[name].__setitem__(place, value))


def norm(name: str, value: Any) -> Corruption:
    new = {name: torch.as_tensor(value, dtype=torch.float64)}
    return restored(lambda buffer: buffer.norm["obs"], lambda tensors: tensors.update(new))


def two_episodes(place: Any, value: float) -> Corruption:
    """Return a corruption that repeats the only episode and writes a value into the window of episodes."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["counts"][0] = 2
        tensors["ring"][1] = tensors["ring"][0]
        tensors["ring"][place] = value

    return restored(lambda buffer: buffer.stats, change)


LISTENERS: dict[str, tuple[Corruption, str]] = {
    "more episodes than steps": (stats("counts", 0, 9), "^stats: episodes: expected 0 to 8, the steps, got 9"),
    "fewer episodes than none": (stats("counts", 0, -1), "^stats: episodes: expected 0 to 8, the steps, got -1"),
    "half a step": (
        stats("open", (1, 1), 3.5), r"^stats: running length\[1\]: expected a whole number of steps, got 3.5"
    ),
    "a running length below zero": (
        stats("open", (1, 1), -1), r"^stats: running length\[1\]: expected a whole number of steps"
    ),
    "an episode of no step": (
        stats("ring", (0, 2), 0), r"^stats: length\[0\]: expected a whole number of the counted steps"
    ),
    "an episode longer than time": (
        stats("ring", (0, 2), 7), r"^stats: length\[0\]: expected a whole number of the counted"
    ),
    "an end in the future": (stats("ring", (0, 0), 9), r"^stats: step\[0\]: expected at most 8, the steps, got 9.0"),
    "an end before the one before": (
        two_episodes((1, 0), 3), r"^stats: step\[0\]: expected steps in order of time"
    ),
    "an end that is no flag": (stats("ring", (0, 3), 2), r"^stats: ends\[0, 0\]: expected flags of 0 or 1, got 2.0"),
    "more steps in episodes than in all": (stats("open", (1, 1), 6), "^stats: steps: expected at least the 10 of the"),
    "an episode behind the last": (stats("ring", (2, 1), 5), r"^stats: window\[1, 1\]: expected 0 after the last"),
    "rows that are no number": (norm("count", float("nan")), "^norm: count: expected a whole number of rows, got nan"),
    "rows below none": (norm("count", -1.0), "^norm: count: expected a whole number of rows, got -1.0"),
    "squares below zero": (norm("squares", [-1.0]), r"^norm: squares\[0\]: expected numbers of at least 0, got -1.0"),
    "a mean of nothing": (norm("count", 0.0), r"^norm: mean\[0\]: expected 0 before the first row, got"),
}  # fmt: skip


@pytest.mark.parametrize("name", LISTENERS)
def test_corruption_of_statistics_and_norms_is_detected(name: str) -> None:
    assert_detected(make_counted_replay(), *LISTENERS[name])


@pytest.mark.filterwarnings("ignore:obs. expected steps that start where")
@pytest.mark.filterwarnings("ignore:reward. expected finite numbers")
def test_nan_in_rewards_and_observations_passes_the_check() -> None:
    replay = make_counted_replay()
    nothing = np.full(2, np.nan)
    replay.add(nothing[:, None], np.zeros(2), nothing, np.ones(2, bool), np.zeros(2, bool), np.zeros((2, 1)))
    replay.check()


def make_rollout(steps: int = 3, *, advantage: bool = True, **options: Any) -> rl.RolloutBuffer:
    """Return a rollout with three of four steps; environment 1 is truncated at t = 1."""
    options = {"extra": {"hidden": rl.Carry(1)}, "stats": rl.EpisodeStats(2), **options}
    rollout = rl.RolloutBuffer(4, 2, obs=1, action=(), **options)
    for t in range(steps):
        now, none = np.full((2, 1), float(t)), np.zeros(2, bool)
        finals = {} if rollout.autoreset else {"final_obs": now + 0.5}
        rollout.add(now, now[:, 0], now[:, 0], none, np.array([False, t == 1]), value=now[:, 0], hidden=now, **finals)
    if advantage:
        final = None if rollout.autoreset else [1.0]
        rollout.compute_advantage([5.0, 5.0], last_obs=np.full((2, 1), 5.0), final_value=final)
    return rollout


def final_steps(rollout: rl.RolloutBuffer) -> Any:
    return rollout._storage.finals


ROLLOUT: dict[str, tuple[dict[str, Any], Corruption, str]] = {
    "more steps than fit": ({}, attribute("_storage.num_stored", 5), "^num_stored: expected 0 to 4 steps, got 5"),
    "a staged field that no other step has": (
        {}, attribute("_storage.staged", {"log_prob"}),
        r"^staged fields: expected none of \['log_prob'\], got \['log_prob'\]"
    ),
    "an unknown staged field": (
        {}, attribute("_storage.staged", {"hont"}), r"^staged fields: expected declared fields \(obs, .*hidden"
    ),
    "a field staged behind the end": (
        {"steps": 4}, attribute("_storage.staged", {"obs"}),
        "^staged fields: expected no staged fields in a full rollout"
    ),
    "a reset that never comes": (
        {}, array("flags.resetting", slice(None), True), r"^resetting\[0\]: expected False unless"
    ),
    "a start that is no flag": (
        {}, lambda r: r.state_dict()["arrays"]["flags.starting"].view(torch.uint8).fill_(7),
        r"^starting\[0\]: expected a flag of 0 or 1, got 7"
    ),
    "resets of other environments": (
        {}, attribute("_flags.first_resets", lambda x: x.repeat(2)), r"^resetting: expected torch.bool of shape \(2,\)"
    ),
    "a final observation of a step that goes on": (
        {}, column("truncated", (1, 1), False), r"^final_obs: expected .* of truncated steps, got \[\(1, 1\)\]"
    ),
    "a final observation of a step that is not stored": (
        {}, lambda r: final_steps(r).append(final_steps(r)[0]._replace(positions=[(9, 1)])), r"steps, got \[\(9, 1\)\]"
    ),
    "a final observation twice": (
        {}, lambda r: final_steps(r).append(final_steps(r)[0]),
        r"^final_obs: expected one for each \(step, environment\), in order"
    ),
    "a final observation of another shape": (
        {}, lambda r: final_steps(r)[0].leaves.__setitem__(0, torch.zeros(1, 3)), r"^final_obs: expected torch"
    ),
    "an advantage of another length": (
        {}, lambda r: r._storage.attached.update({("advantage",): torch.zeros(3, 2)}),
        r"^advantage: expected .* \(5, 2\) on"
    ),
    "an advantage behind the steps": (
        {}, array("rows.attached0", 3, 1.0),
        r"^advantage\[0, 0\]: expected zeros after step 2"
    ),
    "an attached field of a field's name": (
        {}, lambda r: r._storage.attached.update({("obs",): torch.zeros(5, 2)}),
        "^obs: expected a name that no field has, got the name of"
    ),
    "another last value": ({}, column("value", (3, 0), 6.0), r"^last_value: expected \[5.0, 5.0\], got \[6.0, 5.0\]"),
    "another last observation": ({}, column("obs", (3, 1), 6.0), r"^last_obs: expected \[\[5.0\], \[5.0\]\], got"),
    "listeners that wait for another reset": (
        {"steps": 2, **NEXT}, array("flags.coming", 0, torch.tensor([True, False])),
        r"^next resets\[0, 0\]: expected the resets"
    ),
    "statistics that are wrong": (
        {}, stats("counts", slice(None), -1), "^stats: episodes: expected 0 to -1, the steps, got -1"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROLLOUT)
def test_corruption_of_a_rollout_is_detected(backend: str, name: str) -> None:
    options, corrupt, message = ROLLOUT[name]
    assert_detected(make_rollout(**options), corrupt, message)


def make_distillation() -> rl.DistillationBuffer:
    """Return a distillation buffer of four rows after seven, in two rounds."""
    buffer = rl.DistillationBuffer(4, obs=1, action=(), seed=0)
    buffer.add(np.arange(5.0)[:, None], np.zeros(5))
    buffer.next_round()
    buffer.add(np.arange(2.0)[:, None], np.zeros(2))
    return buffer


DISTILLATION: dict[str, tuple[Corruption, str]] = {
    "another capacity": (attribute("_ring.capacity", 5), "^capacity: expected 4, got 5"),
    "a floor behind the head": (attribute("_ring.floor", 8), "^rows: expected a first row of 0 to 7, got 8"),
    "a floor below zero": (attribute("_ring.floor", -1), "^rows: expected a first row of 0 to 7, got -1"),
    "rows without fields": (
        attribute("_columns", ()), "^fields: expected columns before the first row, got 0 columns for 7"
    ),
    "a column less": (attribute("_columns", lambda c: c[:1]), "^fields: expected 2 columns, got 1"),
    "a column of another length": (
        attribute("_columns", lambda c: (c[0][:3], c[1])), r"^obs: expected torch.float32 of shape \(4, 1\) on cpu, got"
    ),
    "rounds that go back": (attribute("_starts", [0, 5, 3]), r"^rounds: expected first rows from 0 to 7, in order"),
    "a round in the future": (attribute("_starts", [0, 8]), r"^rounds: expected first rows from 0 to 7, in order, got"),
    "no first round": (attribute("_starts", [1, 5]), r"^rounds: expected first rows from 0 to 7, in order, got"),
    "other rounds on the device": (
        attribute("_device_starts", lambda x: x + 1), r"^rounds\[0\]: expected equal first rows on the device, got 1"
    ),
    "fewer rounds on the device": (
        attribute("_device_starts", lambda x: x[:1]), r"^rounds: expected torch.int64 of sh"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DISTILLATION)
def test_corruption_of_a_distillation_buffer_is_detected(name: str) -> None:
    assert_detected(make_distillation(), *DISTILLATION[name])


def test_the_message_has_a_remedy() -> None:
    replay = make_replay()
    kind(1, 0, 0)(replay)
    with pytest.raises(
        rl.InvariantError, match=r"got empty\. Call clear\(\), or load a checkpoint: the memory was changed from out"
    ):
        replay.check()


@pytest.mark.parametrize("wrong", [False, True])
def test_check_of_a_meta_device_compares_dtypes_and_shapes(wrong: bool) -> None:
    replay = rl.ReplayBuffer(12, 1, (), num_envs=2, device="meta", sampler=rl.Prioritized(), stats=rl.EpisodeStats(2))
    rollout = rl.RolloutBuffer(3, 2, 1, (), device="meta", norm={"obs": rl.RunningNorm(1)}, **NEXT)
    for buffer in (replay, rollout):
        if wrong:
            replaced(torch.Tensor.double)(buffer)
        with pytest.raises(InvariantError, match="^obs: expected torch.float32") if wrong else nullcontext():
            buffer.check()
    rl.DistillationBuffer(3, 1, (), device="meta").check()
