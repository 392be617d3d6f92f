"""The native writer of mutable leaves checks every argument and converts none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import relive as rl
from relive import kernels

pytestmark = pytest.mark.skipif(kernels.native() is None, reason="this install has no native core (no compiler)")


def filled() -> tuple[rl.ReplayBuffer, Any]:
    extra = {"x": rl.Mutable(rl.Field((2,), torch.int32)), "y": rl.Mutable(())}
    replay = rl.ReplayBuffer(4, obs=1, action=(), extra=extra, seed=0)
    for t in range(3):
        replay.add([float(t)], 0.0, 0.0, False, False, [t + 1.0], x=torch.tensor([t, -t], dtype=torch.int32), y=1.0 * t)
    return replay, replay.storage._write_back  # type: ignore[attr-defined]


def test_rows_are_written_and_slots_of_minus_one_skipped() -> None:
    replay, core = filled()
    x = torch.tensor([[7, 8], [9, 9], [5, 6]], dtype=torch.int32)
    core.write(torch.tensor([2, -1, 0]), (x, None))
    read = replay[replay.ids()]
    assert read["x"].tolist() == [[5, 6], [1, -1], [7, 8]]
    assert read["y"].tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("slots", "values", "error"),
    [
        ([5], (None, [1.0]), IndexError),
        ([-2], (None, [1.0]), IndexError),
        ([2**62], (None, [1.0]), IndexError),
        ([0, 1], (None, [1.0]), ValueError),
        ([0], (None, [1.0, 2.0]), ValueError),
        ([0], (None,), ValueError),
        ([0], ([[1, 2]], None), ValueError),
        ([0], (None, [[1.0]]), ValueError),
        ([0.0], (None, [1.0]), ValueError),
        ([[0]], (None, [1.0]), ValueError),
    ],
)
def test_a_value_that_does_not_fit_is_refused_and_nothing_written(
    slots: Any, values: Any, error: type[Exception]
) -> None:
    replay, core = filled()
    before = replay[replay.ids()].clone()
    arrays = tuple(None if value is None else torch.tensor(value) for value in values)
    with pytest.raises(error):
        core.write(torch.tensor(slots), arrays)
    assert bool((replay[replay.ids()] == before).all())


def test_strided_rows_are_refused() -> None:
    replay, core = filled()
    with pytest.raises(ValueError, match="contiguous"):
        core.write(torch.tensor([0, 1]), (None, torch.zeros(4)[::2]))
    assert replay[replay.ids()]["y"].tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("leaves", [[0], [6, 5], [5, 5], [7], [-1]])
def test_leaves_that_are_observations_out_of_order_or_unknown_are_refused(leaves: list[int]) -> None:
    replay, _ = filled()
    with pytest.raises(ValueError, match="ascending numbers of columns that are no observations"):
        kernels.native().WriteBack(replay.storage._core.memory, leaves, None, None)  # type: ignore[attr-defined]


@pytest.mark.parametrize("words", [0, 1, 2, 4])
def test_a_journal_has_room_for_a_row(words: int) -> None:
    replay, _ = filled()
    with pytest.raises(ValueError, match="journal: expected 3 elements"):
        kernels.native().WriteBack(
            replay.storage._core.memory,  # type: ignore[attr-defined]
            [5, 6],
            None,
            torch.zeros(words, dtype=torch.int64),
        )


def test_a_journalled_row_is_completed_and_an_invalid_slot_is_ignored() -> None:
    replay, _ = filled()
    journal = torch.zeros(3, dtype=torch.int64)
    memory = replay.storage._core.memory  # type: ignore[attr-defined]
    core = kernels.native().WriteBack(memory, [5, 6], None, journal)
    noted = journal[1:].view(torch.int32)
    noted[:2] = torch.tensor([41, 42])
    noted[2:3].view(torch.float32).fill_(43.0)
    for slot in (0, 6, -1, 2**62):
        journal[0] = slot
        core.finish()
    assert replay[replay.ids()]["y"].tolist() == [0.0, 1.0, 2.0]
    journal[0] = 1 + 1
    core.finish()
    assert int(journal[0]) == 0
    read = replay[replay.ids()]
    assert read["x"].tolist() == [[0, 0], [41, 42], [2, -2]]
    assert read["y"].tolist() == [0.0, 43.0, 2.0]
