"""Tests of `NewFirst`: every new row is returned once, oldest first, and the rest of a batch is uniform."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import relive as rl
from relive.concurrent import Handle
from tests.faults.processes import apart
from tests.replay.samplers.newest_rows import RandomEpisodes

ENVS, ROWS = 3, 30


def make_buffer(memory: Any = "cpu", sampler: Any = None, rows: int = ROWS, **options: Any) -> rl.ReplayBuffer:
    sampler = rl.NewFirst(0.5) if sampler is None else sampler
    return rl.ReplayBuffer(ENVS * rows, 1, (), num_envs=ENVS, sampler=sampler, device=memory, seed=3, **options)


def test_every_new_row_is_shown_once_and_oldest_first(memory: Any) -> None:
    replay = make_buffer(memory)
    episodes, waiting = RandomEpisodes(replay, 1), {env: [] for env in range(ENVS)}
    for t in range(60):
        for row in episodes.step(None if t % 3 else np.array([0, 2])):
            waiting[row % ENVS].append(row)
        batch = replay.sample(5)["index"].tolist()
        assert len(batch) == 5
        # Half of five rows, rounded up, may be new.
        for row in check_new_rows(waiting, batch[:3]):
            waiting[row % ENVS].remove(row)
        replay.check()
    for _ in range(5):
        replay.sample(50)
    assert not sample_has_new_rows(replay, 50)


def check_new_rows(waiting: dict[int, list[int]], first: list[int]) -> list[int]:
    """Return the new rows at the start of a batch; fails unless older rows of their environments come first."""
    num_new = min(3, sum(map(len, waiting.values())))
    shown = first[:num_new]
    for row in shown:
        rows = waiting[row % ENVS]
        place = rows.index(row)
        assert all(earlier in shown for earlier in rows[:place]), f"{row} is shown before {rows[:place]}"
    assert len(set(shown)) == num_new
    return shown


def sample_has_new_rows(replay: rl.ReplayBuffer, count: int) -> bool:
    """Sample a batch and return whether it has new rows."""
    before = replay.sampler.state()["shown"].clone()
    replay.sample(count)
    return not torch.equal(before, replay.sampler.state()["shown"])


def test_the_rest_of_a_batch_is_uniform(backend: str) -> None:
    replay = make_buffer(sampler=rl.NewFirst(0.25), rows=5)
    episodes = RandomEpisodes(replay, 2, ends=0.3)
    for _ in range(12):
        episodes.step()
    while sample_has_new_rows(replay, 8):
        pass
    ids = replay.ids().tolist()
    drawn = Counter(replay.sample(30_000)["index"].tolist())
    mean = 30_000 / len(ids)
    chi_squared = sum((drawn[i] - mean) ** 2 / mean for i in ids)
    assert set(drawn) == set(ids)
    # With at most 14 degrees of freedom, χ² is above 48 in 1 of 100,000 cases.
    assert chi_squared < 50, (chi_squared, len(ids))


SHARES = [(0.5, 8, 4), (0.25, 8, 2), (1.0, 8, 8), (0.1, 1, 1), (0.3, 4, 2)]


@pytest.mark.parametrize(("share", "count", "max_new"), SHARES)
def test_no_more_than_its_share_of_a_batch_is_new(share: float, count: int, max_new: int, backend: str) -> None:
    replay = make_buffer(sampler=rl.NewFirst(share))
    episodes = RandomEpisodes(replay, 2, ends=0.0)
    for _ in range(20):
        episodes.step()
    replay.sample(count)
    assert int(replay.sampler.state()["shown"].sum()) == max_new


def test_rows_that_were_overwritten_before_their_turn_are_not_shown(backend: str) -> None:
    replay = make_buffer(sampler=rl.NewFirst(0.5), rows=4)
    episodes = RandomEpisodes(replay, 2, ends=0.0)
    for _ in range(11):
        episodes.step()
    batch = replay.sample(24)["index"].tolist()
    assert sorted(batch[:12]) == replay.ids().tolist()
    assert not sample_has_new_rows(replay, 24)


@pytest.mark.filterwarnings("ignore:obs. expected steps that start where")
@pytest.mark.parametrize("autoreset", [None, "NEXT_STEP"])
def test_with_a_length_every_new_step_is_shown_once(autoreset: Any, backend: str) -> None:
    length = 4
    replay = make_buffer(sampler=rl.NewFirst(1.0, length=length), rows=60, autoreset=autoreset)
    episodes, seen, written = RandomEpisodes(replay, 7, ends=0.15), Counter[int](), set[int]()
    for t in range(50):
        written |= set(episodes.step(None if t % 4 else np.array([1])))
        while (shown := sample_new_sequence(replay, length)) is not None:
            steps, ended = shown
            assert len(steps) == length or ended, "a sequence that goes on is shown"
            seen.update(steps)
    assert max(seen.values()) == 1
    assert set(seen) <= written
    for env in range(ENVS):
        rows = sorted(row for row in written if row % ENVS == env)
        waiting = [row for row in rows if row not in seen]
        assert waiting == rows[len(rows) - len(waiting) :], "a step was passed over"
        assert len(waiting) < length + 1


def sample_new_sequence(replay: rl.ReplayBuffer, length: int) -> tuple[list[int], bool] | None:
    """Sample a sequence; return its steps and whether they end an episode, or None if the sequence is not new."""
    before = replay.sampler.state()["shown"].clone()
    batch = replay.sample(1, rl.Sequence(length, step_index=True))
    if torch.equal(replay.sampler.state()["shown"], before):
        return None
    mask = batch["mask"][0]
    return batch["step_index"][0][mask].tolist(), bool(batch["terminated"][0][mask][-1])


def test_a_refused_batch_leaves_all_new_rows_new() -> None:
    replay = make_buffer()
    RandomEpisodes(replay, 1).step()
    before = replay.sampler.state()["shown"].clone()
    with pytest.raises(rl.SchemaError, match="^out"):
        replay.sample(4, out=replay.read(replay.ids()[:1]))
    assert torch.equal(replay.sampler.state()["shown"], before)
    assert sample_has_new_rows(replay, 4)


def test_a_loaded_buffer_draws_the_same_batches(tmp_path: Path, backend: str) -> None:
    replay = make_buffer()
    episodes = RandomEpisodes(replay, 1)
    for _ in range(20):
        episodes.step()
    replay.sample(9)
    replay.save(tmp_path)
    loaded = rl.load(tmp_path, rl.ReplayBuffer)
    assert loaded.sampler == rl.NewFirst(0.5)
    for _ in range(12):
        assert torch.equal(loaded.sample(9)["index"], replay.sample(9)["index"])
    loaded.check()


def test_disk_memory_remembers_what_was_shown(tmp_path: Path) -> None:
    replay = make_buffer(rl.Memory.disk(tmp_path / "memory"))
    episodes = RandomEpisodes(replay, 1)
    for _ in range(10):
        episodes.step()
    while sample_has_new_rows(replay, 8):
        pass
    shown = replay.sampler.state()["shown"].clone()
    replay.close()
    with rl.load(tmp_path / "memory", rl.ReplayBuffer) as loaded:
        assert torch.equal(loaded.sampler.state()["shown"], shown)
        assert not sample_has_new_rows(loaded, 8)


def sample_first_half(handle: Handle, count: int) -> list[int]:
    return rl.connect(handle).sample(count)["index"].tolist()[: count // 2]


def test_processes_show_each_row_once_together() -> None:
    replay = make_buffer(rl.Memory.shared())
    episodes = RandomEpisodes(replay, 1, ends=0.0)
    for _ in range(8):
        episodes.step()
    first_ids = replay.sample(16)["index"].tolist()[:8]
    other_ids = apart(sample_first_half, replay.handle(), 16)
    loaded = replay.sample(16)["index"].tolist()[:8]
    assert sorted(first_ids + other_ids + loaded) == replay.ids().tolist()


def test_invalid_settings_are_refused() -> None:
    for wrong in (0, -0.5, 1.5, True, "half", float("nan")):
        with pytest.raises(rl.SchemaError, match=r"NewFirst\.share: expected a number in \(0, 1\]"):
            rl.NewFirst(wrong)  # type: ignore[arg-type]
    with pytest.raises(rl.SchemaError, match=r"NewFirst\.length: expected a positive int"):
        rl.NewFirst(length=0)
    with pytest.raises(rl.SchemaError, match="NewFirst: expected rows in time order"):
        make_buffer(sampler=rl.NewFirst(length=2), next_obs="stored")


def test_an_impossible_saved_state_is_refused() -> None:
    replay = make_buffer()
    RandomEpisodes(replay, 1).step()
    for wrong in (torch.full((ENVS,), 99), torch.full((ENVS,), -1), torch.zeros(ENVS + 1, dtype=torch.int64)):
        state = replay.state_dict()
        state["arrays"] = {**state["arrays"], "sampler.shown": wrong}
        with pytest.raises(rl.SchemaError, match="sampler: expected the state of a sampler"):
            make_buffer().load_state_dict(state)
