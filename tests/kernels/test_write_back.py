"""The native ring checks every argument of a rewrite of mutable leaves and converts none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import relive as rl
from relive import kernels
from tests.kernels.test_ring_state import SHAPES, make_columns, make_ring, make_step, make_zeros

pytestmark = pytest.mark.skipif(kernels.native_core() is None, reason="this install has no native core (no compiler)")


def filled() -> tuple[rl.ReplayBuffer, Any]:
    extra = {"x": rl.Mutable(rl.Field((2,), torch.int32)), "y": rl.Mutable(())}
    replay = rl.ReplayBuffer(4, obs=1, action=(), extra=extra, seed=0)
    for t in range(3):
        replay.add([float(t)], 0.0, 0.0, False, False, [t + 1.0], x=torch.tensor([t, -t], dtype=torch.int32), y=1.0 * t)
    return replay, replay.storage.core  # type: ignore[attr-defined]


def test_rows_are_written_and_slots_of_minus_one_skipped() -> None:
    replay, core = filled()
    x = torch.tensor([[7, 8], [9, 9], [5, 6]], dtype=torch.int32)
    core.rewrite(torch.tensor([2, -1, 0]), (x, None))
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
        core.rewrite(torch.tensor(slots), arrays)
    assert bool((replay[replay.ids()] == before).all())


def test_strided_rows_are_refused() -> None:
    replay, core = filled()
    with pytest.raises(ValueError, match="contiguous"):
        core.rewrite(torch.tensor([0, 1]), (None, torch.zeros(4)[::2]))
    assert replay[replay.ids()]["y"].tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("leaves", [[0], [3, 2], [3, 3], [7], [-1]])
def test_leaves_that_are_observations_out_of_order_or_unknown_are_refused(leaves: list[int]) -> None:
    with pytest.raises(ValueError, match=r"rewritable: expected (ascending numbers of columns|no observations)"):
        make_ring(make_zeros(SHAPES), leaves)


@pytest.mark.parametrize("words", [0, 1, 3])
def test_a_journal_has_room_for_a_row(words: int) -> None:
    state = make_zeros(SHAPES) | {"rewrite_journal": torch.zeros(words, dtype=torch.int64)}
    with pytest.raises(ValueError, match="rewrite_journal: expected 2 elements"):
        make_ring(state, [1, 2])


def test_a_journalled_row_is_completed_and_an_invalid_slot_is_ignored() -> None:
    journal, columns = torch.zeros(2, dtype=torch.int64), make_columns()
    ring = make_ring(make_zeros(SHAPES) | {"rewrite_journal": journal}, [1, 2], columns)
    for t in range(3):
        assert ring.write(*make_step(t)) == -1
    journal[1:].view(torch.float32)[0] = 43.0
    journal[1:].view(torch.uint8)[4] = 1
    for slot in (0, 11, -1, 2**62):
        journal[0] = slot
        ring.finish_rewrite()
    assert columns[1][:3].tolist() == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
    journal[0] = 1 + 3
    ring.finish_rewrite()
    assert int(journal[0]) == 0
    assert columns[1][:3].tolist() == [[0.0, 0.0], [1.0, 43.0], [2.0, 2.0]]
    assert columns[2].nonzero().tolist() == [[1, 1]]
