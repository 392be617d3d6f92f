"""Tests of prioritized sequences, with a priority per step or one per sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import relive as rl
from tests.replay.samplers.newest_rows import RandomEpisodes


def make_buffer(**options: Any) -> rl.ReplayBuffer:
    sampler = rl.Prioritized(alpha=1.0, eps=0.0)
    replay = rl.ReplayBuffer(60, 1, (), num_envs=3, sampler=sampler, seed=0, **options)
    episodes = RandomEpisodes(replay, 1)
    for _ in range(30):
        episodes.step()
    return replay


def masses(replay: rl.ReplayBuffer) -> dict[int, float]:
    ids = replay.ids()
    return dict(zip(ids.tolist(), replay.sampler.masses(replay.storage.locate(ids)).tolist(), strict=True))  # type: ignore[attr-defined]


def test_the_steps_of_sequences_get_their_priorities_and_no_other_row_does(backend: str) -> None:
    replay = make_buffer()
    old_masses = masses(replay)
    batch = replay.sample(4, rl.Sequence(3, burn_in=2, step_index=True))
    steps = torch.where(batch["train"], batch["step_index"], -1)
    error = torch.where(batch["train"], 2.0 + torch.arange(20.0).view(4, 5), float("nan"))
    assert replay.update_priority(steps, error) == 0
    expected = dict(old_masses)
    for i, value in zip(steps.view(-1).tolist(), error.view(-1).tolist(), strict=True):
        if i >= 0:
            # If a step is in two sequences, its last priority is used.
            expected[i] = value
    assert masses(replay) == pytest.approx(expected)
    replay.check()


def test_steps_that_were_overwritten_are_counted_and_padding_is_not(backend: str) -> None:
    replay = make_buffer()
    batch = replay.sample(6, rl.Sequence(4, step_index=True))
    episodes = RandomEpisodes(replay, 2)
    for _ in range(8):
        episodes.step()
    steps = batch["step_index"]
    num_overwritten = int(((steps >= 0) & ~torch.isin(steps, replay.ids())).sum())
    assert replay.update_priority(steps, torch.ones(steps.shape)) == num_overwritten


def test_a_shape_that_differs_and_an_invalid_priority_are_refused(backend: str) -> None:
    replay = make_buffer()
    steps = replay.sample(2, rl.Sequence(3, step_index=True))["step_index"]
    old_masses = masses(replay)
    for wrong in (torch.ones(2), torch.ones(6), torch.ones(3, 2)):
        with pytest.raises(rl.SchemaError, match=r"priority: expected shape \(2, 3\)"):
            replay.update_priority(steps, wrong)
    with pytest.raises(rl.PriorityError, match="a finite number of at least 0"):
        replay.update_priority(steps, torch.full((2, 3), float("nan")))
    assert masses(replay) == old_masses


def test_a_prioritized_row_starts_the_sequences_that_are_drawn(backend: str) -> None:
    replay = make_buffer()
    ids = replay.ids()
    chosen = ids[len(ids) // 2]
    replay.update_priority(ids, (ids == chosen).double())
    batch = replay.sample(5, rl.Sequence(3, burn_in=2, step_index=True))
    first = batch["train"].long().argmax(1, keepdim=True)
    assert set(batch["step_index"].gather(1, first).view(-1).tolist()) == {int(chosen)}


@given(st.lists(st.lists(st.tuples(st.floats(-9, 9), st.booleans()), min_size=3, max_size=3), min_size=1, max_size=4))
def test_one_priority_is_the_written_out_formula(rows: list[list[tuple[float, bool]]]) -> None:
    error, mask = (torch.tensor([[step[k] for step in row] for row in rows]) for k in (0, 1))
    for eta in (0.0, 0.9, 1.0):
        got = rl.sequence_priority(error, mask, eta=eta).tolist()
        for row, priority in zip(rows, got, strict=True):
            sizes = [abs(value) for value, counts in row if counts]
            expected = eta * max(sizes) + (1 - eta) * sum(sizes) / len(sizes) if sizes else 0.0
            assert priority == pytest.approx(expected, abs=1e-5)


def test_errors_and_masks_of_other_forms_are_refused() -> None:
    error, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    for wrong, text in (
        ({"error": torch.zeros(3)}, "error: expected floating-point errors"),
        ({"mask": mask.float()}, "mask: expected bools of shape"),
        ({"mask": mask[:1]}, "mask: expected bools of shape"),
        ({"eta": 1.5}, r"eta: expected a number from 0 to 1"),
    ):
        with pytest.raises(rl.SchemaError, match=text):
            rl.sequence_priority(**{"error": error, "mask": mask, **wrong})
    gradient = rl.sequence_priority(error.requires_grad_(), mask)
    assert not gradient.requires_grad
