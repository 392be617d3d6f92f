"""The tables of docs/guides/batches.md match real batches and buffers: keys, shapes and reserved names."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import relive as rl

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "batches.md").read_text(encoding="utf-8")
STEP = {"obs", "action", "reward", "terminated", "truncated", "note", "state"}
B, L = 5, 6
EXTRA: dict[str, Any] = {"note": (), "state": rl.Carry(4)}


def table_rows(heading: str) -> list[list[str]]:
    """Return the cells of the table whose first column has a heading."""
    table = PAGE.partition(f"| {heading} |")[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table]


def named_keys(cell: str) -> set[str]:
    """Return the keys that a cell names."""
    keys = set(re.findall(r"`(\w+)`", cell))
    return keys | (STEP if "*step*" in cell else {"note"} if "extra" in cell else set())


def step(t: int, num_envs: int = 2) -> tuple[Any, ...]:
    ended, never = torch.full((num_envs,), t % 7 == 6), torch.zeros(num_envs, dtype=torch.bool)
    place = torch.full((num_envs, 3), float(t))
    return {"goal": place}, torch.zeros(num_envs, 2), torch.ones(num_envs), ended, never, {"goal": place + 1}


@cache
def replay(sampler: rl.Uniform | rl.Prioritized = rl.Uniform()) -> rl.ReplayBuffer:  # noqa: B008 (frozen)
    buffer = rl.ReplayBuffer(64, obs={"goal": 3}, action=2, num_envs=2, extra=EXTRA, sampler=sampler, seed=0)
    for t in range(20):
        buffer.add(*step(t), note=torch.zeros(2), state=torch.zeros(2, 4))
    return buffer


@cache
def rollout() -> rl.RolloutBuffer:
    buffer = rl.RolloutBuffer(8, 2, obs={"goal": 3}, action=2, extra=EXTRA, seed=0)
    for t in range(8):
        given = {
            "value": torch.zeros(2),
            "log_prob": torch.zeros(2),
            "note": torch.zeros(2),
            "state": torch.zeros(2, 4),
        }
        buffer.add(*step(t)[:5], **given)
    buffer.compute_advantage(torch.zeros(2))
    return buffer


def distillation_batch() -> Any:
    buffer = rl.DistillationBuffer(32, obs=3, action=2, extra={"note": ()}, seed=0)
    buffer.add(torch.zeros(8, 3), torch.zeros(8, 2), note=torch.zeros(8))
    return buffer.sample(B)


def relabel(achieved: Any, goal: Any, rows: Any) -> Any:
    return torch.zeros(len(rows)), torch.zeros(len(rows), dtype=torch.bool)


def sequences(**options: Any) -> Any:
    return next(iter(rollout().sequences(4, batch_size=B, mode="every", **options)))


BATCHES: dict[str, Callable[[], Any]] = {
    "Transition()": lambda: replay().sample(B),
    "NStep(n, gamma)": lambda: replay().sample(B, rl.NStep(3, 0.9)),
    "Sequence(length, burn_in)": lambda: replay().sample(B, rl.Sequence(4, burn_in=2)),
    "Sequence(length, step_index=True)": lambda: replay().sample(B, rl.Sequence(L, step_index=True)),
    "Hindsight(goal, achieved, fn)": lambda: replay().sample(B, rl.Hindsight("goal", "goal", relabel)),
    "Window(obs=(-1, 0), action=range(4))": lambda: replay().sample(B, rl.Window(obs=(-1, 0), action=range(4))),
    "any view, drawn by `Prioritized`": lambda: replay(rl.Prioritized()).sample(B),
    "replay[ids]": lambda: replay()[replay().ids()[:B]],
    "an episode of `replay.episodes()`": lambda: next(iter(replay().episodes())),
    "Mixture.sample": lambda: rl.Mixture({"mine": replay()}, {"mine": 1.0}).sample(B),
    "rollout.minibatches": lambda: next(rollout().minibatches(B)),
    "rollout.sequences": sequences,
    'rollout.sequences(layout="time_first")': lambda: sequences(layout="time_first"),
    'rollout.sequences(layout="packed")': lambda: sequences(layout="packed"),
    "rollout.data": lambda: rollout().data,
    "DistillationBuffer.sample": distillation_batch,
}
ROWS = {row[0].split("`, `")[0].strip("`") if row[0][0] == "`" else row[0]: row for row in table_rows("batch of")}


def test_every_row_of_the_table_has_a_batch() -> None:
    assert list(ROWS) == list(BATCHES)


@pytest.mark.parametrize("label", BATCHES)
def test_a_batch_has_the_keys_and_the_shape_of_its_row(label: str) -> None:
    batch = BATCHES[label]()
    _, shape, keys = ROWS[label]
    expected = named_keys(keys) | (named_keys(ROWS["Transition()"][2]) if "keys of the view" in keys else set())
    assert set(batch.keys()) == expected
    sizes = {"B": B, "T": 8, "N": 2, "steps": 7}
    assert list(batch.batch_size) == [sizes[name] for name in re.findall(r"\w+", shape)]


def test_keys_have_the_shapes_of_the_second_table() -> None:
    shapes = {key: shape for names, shape, _ in table_rows("key") for key in re.findall(r"`(\w+)`", names)}
    packed = BATCHES['rollout.sequences(layout="packed")']()
    assert shapes.pop("batch_sizes") == "`[L]`"
    assert list(packed["batch_sizes"].shape) == [4]
    sequence = BATCHES["Sequence(length, step_index=True)"]()
    flat = replay(rl.Prioritized()).sample(B, rl.NStep(3, 0.9))
    window = BATCHES["Window(obs=(-1, 0), action=range(4))"]()
    others = {"source": BATCHES["Mixture.sample"](), "round": distillation_batch()}
    others |= {"obs_mask": window, "action_mask": window}
    for key, said in shapes.items():
        batch = others.get(key, sequence if "`[B, L]`" in said else flat)
        ndim = {"`[B]`": 1, "`[B]`, `[B, L]`": 2, "`[B, L]`": 2, "`[B, offsets]`": 2}.get(said)
        assert ndim is None or batch[key].ndim == ndim, key
    assert sequence["state"].shape == (B, 4)
    assert sequence["obs", "goal"].shape == (B, L, 3)


MAKERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "ReplayBuffer": lambda extra: rl.ReplayBuffer(8, obs=1, action=1, extra=extra),
    "RolloutBuffer": lambda extra: rl.RolloutBuffer(8, 2, obs=1, action=1, extra=extra),
    "DistillationBuffer": lambda extra: rl.DistillationBuffer(8, obs=1, action=1, extra=extra),
}
RESERVED = {row[0].strip("`"): named_keys(row[1]) for row in table_rows("buffer")}
BOTH = RESERVED["ReplayBuffer` and `RolloutBuffer"]


@pytest.mark.parametrize("kind", MAKERS)
def test_exactly_the_reserved_names_are_refused(kind: str) -> None:
    expected = RESERVED[kind] | (BOTH if kind != "DistillationBuffer" else set())
    refused = set()
    for name in set().union(*RESERVED.values()) | {"note", "action_mask", "log_prob"}:
        try:
            MAKERS[kind]({name: 1})
        except rl.SchemaError:
            refused.add(name)
    assert refused == expected
