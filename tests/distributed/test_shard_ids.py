"""Ids equal those of a single buffer, and a restarted shard issues no id twice."""

import pytest

pytest.importorskip("ray", reason="needs Ray: pip install '.[ray]'")

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from relive.distributed.protocol import ROWS_PER_LIFE, ShardIds


def test_ids_are_those_of_one_buffer_until_a_shard_starts_again() -> None:
    shard_ids = ShardIds(range(2, 5), 7, np.zeros((1, 3), np.int64), 0)
    inside = np.arange(12)
    outside = shard_ids.to_service_ids(inside)
    assert outside.tolist() == [row * 7 + env for row in range(4) for env in (2, 3, 4)]
    back, kept = shard_ids.to_shard_ids(outside, np.full(3, 4))
    assert back.tolist() == inside.tolist()
    assert kept.all()


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=6))
def test_no_id_is_given_twice_by_a_shard_that_starts_again(lives: list[tuple[int, int]]) -> None:
    """Simulates lives of a shard; in each life, the shard writes rows and then loses some."""
    shard_ids = ShardIds(range(1, 2), 3, np.zeros((1, 1), np.int64), 0)
    given, head, saved, alive = set(), 0, 0, dict[int, int]()
    for written, lost in lives:
        rows = np.arange(head, head + written)
        ids = shard_ids.to_service_ids(rows).tolist()
        assert not given & set(ids)
        assert all(i % 3 == 1 for i in ids)
        given |= set(ids)
        alive |= dict(zip(rows.tolist(), ids, strict=True))
        saved = max(head + written - lost, saved)
        head = saved
        alive = {row: i for row, i in alive.items() if row < head}
        shard_ids = shard_ids.begin_life(np.array([head]), np.array([0]))
        rows, kept = shard_ids.to_shard_ids(np.array(sorted(given)), np.array([head]))
        actual = dict(zip(rows[kept].tolist(), np.array(sorted(given))[kept].tolist(), strict=True))
        assert actual == alive


def test_an_id_that_was_never_given_is_refused() -> None:
    shard_ids = ShardIds(range(1), 1, np.zeros((1, 1), np.int64), 0).begin_life(np.array([5]), np.array([0]))
    for never in (-1, ROWS_PER_LIFE + 4, ROWS_PER_LIFE + 9, 2 * ROWS_PER_LIFE):
        with pytest.raises(IndexError, match="the id of a stored transition"):
            shard_ids.to_shard_ids(np.array([never]), np.array([9]))
    assert shard_ids.to_shard_ids(np.array([4, 5, ROWS_PER_LIFE + 5]), np.array([9]))[1].tolist() == [True, False, True]
    with pytest.raises(OverflowError, match="ids below 2\\^63"):
        ShardIds(range(1 << 20), 1 << 20, np.zeros((1, 1), np.int64), 1 << 11)


def test_lives_whose_rows_are_gone_are_forgotten() -> None:
    shard_ids = ShardIds(range(1), 1, np.zeros((1, 1), np.int64), 0)
    for life in range(1, 100):
        shard_ids = shard_ids.begin_life(np.array([10 * life]), np.array([10 * life - 15]))
        assert len(shard_ids.starts) <= 4
    assert shard_ids.to_service_ids(np.array([985, 990])).tolist() == [
        98 * ROWS_PER_LIFE + 985,
        99 * ROWS_PER_LIFE + 990,
    ]
