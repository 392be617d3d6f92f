"""Iterating a buffer raises an error that names what to iterate instead."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset

import relive as rl


def replay() -> rl.ReplayBuffer:
    """Return a buffer of three rows after six steps: a loop over indices would begin with overwritten rows."""
    buffer = rl.ReplayBuffer(4, obs=1, action=(), seed=0)
    for t in range(6):
        buffer.add([float(t)], 0.0, 1.0, t % 3 == 2, False, [t + 1.0])
    return buffer


def rollout() -> rl.RolloutBuffer:
    buffer = rl.RolloutBuffer(3, 2, obs=1, action=())
    for t in range(3):
        buffer.add(np.full((2, 1), t), np.zeros(2), np.ones(2), np.zeros(2, bool), np.zeros(2, bool))
    return buffer


def distillation() -> rl.DistillationBuffer:
    buffer = rl.DistillationBuffer(4, obs=1, action=1)
    buffer.add(np.zeros((3, 1)), np.zeros((3, 1)))
    return buffer


KINDS = {
    "replay": (replay, r"ReplayBuffer: .*episodes\(\).*ids\(\).*sample"),
    "rollout": (rollout, r"RolloutBuffer: .*minibatches.*sequences"),
    "distillation": (distillation, r"DistillationBuffer: .*epochs.*sample"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_raises_and_names_the_remedy(kind: str) -> None:
    make, message = KINDS[kind]
    buffer: Any = make()
    for loop in (list, iter, tuple, lambda each: next(iter(each)), dict.fromkeys):
        with pytest.raises(TypeError, match=message):
            loop(buffer)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options", [{}, {"batch_size": 2, "shuffle": True}, {"batch_size": 2, "collate_fn": list}], ids=str
)
def test_a_data_loader_raises_the_same_error_at_its_first_batch(kind: str, options: dict[str, Any]) -> None:
    make, message = KINDS[kind]
    buffer: Any = make()
    with pytest.raises(TypeError, match=message):
        next(iter(DataLoader(buffer, **options)))
    with pytest.raises(TypeError, match=message):
        next(iter(DataLoader(Subset(buffer, [0, 1]), **options)))


def test_rows_are_still_read_by_their_ids() -> None:
    buffer = replay()
    ids = buffer.ids()
    assert torch.equal(buffer[ids]["index"], ids)
    assert buffer[int(ids[0])]["index"] == ids[0]
    assert distillation()[torch.tensor([0, 2])].batch_size == torch.Size([2])


def test_a_step_of_a_rollout_is_not_a_field() -> None:
    with pytest.raises(TypeError, match=r"^rollout\[\.\.\.\]: expected the name of a field, got 0\. .*rollout\.data"):
        rollout()[0]  # pyright: ignore[reportArgumentType]
