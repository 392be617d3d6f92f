"""Tests of `Prioritized`: another exponent after a load, and schedules for beta."""

from __future__ import annotations

import copy
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import relive as rl
from tests.faults.processes import apart

PRIORITIES = torch.tensor([0.0, 0.5, 1.0, 2.0, 8.0], dtype=torch.float64)


def make_buffer(sampler: Any, **options: Any) -> rl.ReplayBuffer:
    replay = rl.ReplayBuffer(5, 1, (), sampler=sampler, next_obs="stored", seed=0, **options)
    for t in range(5):
        replay.add([t], 0.0, 0.0, terminated=False, truncated=False, next_obs=[t + 1])
    replay.update_priority(replay.ids(), PRIORITIES)
    return replay


def masses(replay: rl.ReplayBuffer) -> torch.Tensor:
    return replay.state().arrays["sampler.mass"].clone()


def test_the_masses_of_all_slots_are_a_copy_and_zero_without_a_row() -> None:
    replay = rl.ReplayBuffer(4, 1, (), sampler=rl.Prioritized(alpha=2.0, eps=0.0), next_obs="stored", seed=0)
    for t in range(3):
        replay.add([t], 0.0, 0.0, terminated=False, truncated=False, next_obs=[t + 1])
    replay.update_priority([0, 2], [3.0, 0.5])
    sampler: Any = replay.sampler
    assert sampler.masses().tolist() == [9.0, 1.0, 0.25, 0.0]
    assert sampler.merge_max_priority() == 3.0
    sampler.masses().zero_()
    assert sampler.masses(torch.tensor([2, 0])).tolist() == [0.25, 9.0]
    replay.check()


@pytest.mark.parametrize("wrap", [lambda sampler: sampler, rl.Counted], ids=["plain", "counted"])
@pytest.mark.parametrize(
    "beta", [0.4, rl.Linear(0.4, 1.0, 10), lambda drawn: 0.5], ids=["number", "linear", "function"]
)
def test_another_exponent_applies_to_the_stored_priorities(tmp_path: Path, wrap: Any, beta: Any) -> None:
    make_buffer(wrap(rl.Prioritized(alpha=0.6, beta=beta, eps=0.25))).save(tmp_path)
    other = rl.Prioritized(alpha=1.5, beta=beta, eps=1e-3)
    loaded = rl.load(tmp_path, rl.ReplayBuffer, sampler=wrap(other))
    torch.testing.assert_close(masses(loaded), masses(make_buffer(wrap(other))))
    loaded.check()


def test_the_same_exponent_changes_no_bit(tmp_path: Path) -> None:
    replay = make_buffer(rl.Prioritized(alpha=0.6, beta=0.4))
    replay.save(tmp_path)
    loaded = rl.load(tmp_path, rl.ReplayBuffer, sampler=rl.Prioritized(alpha=0.6, beta=0.9, normalize="global"))
    assert torch.equal(masses(loaded), masses(replay))


def test_priorities_that_an_exponent_of_zero_has_lost_are_not_made_up(tmp_path: Path) -> None:
    make_buffer(rl.Prioritized(alpha=0.0)).save(tmp_path)
    with pytest.raises(
        rl.IncompatibleCheckpoint, match=r"sampler: expected alpha=0\.0 and eps=1e-06, .* got alpha=0\.6"
    ):
        rl.load(tmp_path, sampler=rl.Prioritized(alpha=0.6))
    rl.load(tmp_path, sampler=rl.Prioritized(alpha=0.0, beta=1.0))


@pytest.mark.skipif(sys.platform != "linux", reason="disk memory")
def test_disk_memory_with_another_exponent_is_refused(tmp_path: Path) -> None:
    disk = rl.Memory.disk(tmp_path)
    make_buffer(rl.Prioritized(alpha=0.6, beta=lambda drawn: 0.5), device=disk).close()
    with pytest.raises(rl.IncompatibleCheckpoint, match="sampler of the buffer in .*expected .*0.6.*got .*0.9"):
        rl.load(tmp_path, sampler=rl.Prioritized(alpha=0.9, beta=lambda drawn: 0.5))
    rl.load(tmp_path, rl.ReplayBuffer, sampler=rl.Prioritized(alpha=0.6, beta=lambda drawn: 0.5)).close()


def test_a_function_for_beta_is_named_when_a_buffer_is_loaded(tmp_path: Path) -> None:
    sampler = rl.Prioritized(beta=lambda drawn: 0.5)
    make_buffer(sampler).save(tmp_path)
    with pytest.raises(rl.IncompatibleCheckpoint, match=r"sampler: beta: expected .*rl\.Linear.* got a function"):
        rl.load(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory")
def test_a_handle_with_a_function_for_beta_says_so_when_it_is_pickled() -> None:
    handle = make_buffer(rl.Prioritized(beta=lambda drawn: 0.5), device=rl.Memory.shared()).handle()
    with pytest.raises(rl.SchemaError, match=r"handle: .*rl\.Linear"):
        pickle.dumps(handle)


@pytest.mark.parametrize("beta", [1.4, -0.1, float("nan"), "0.4", rl.Linear(0.4, 1.4, 10), rl.Linear(-1.0, 1.0, 10)])
def test_a_beta_outside_of_0_to_1_is_refused(beta: Any) -> None:
    with pytest.raises(rl.SchemaError, match=r"Prioritized\.beta: expected a number( from 0 to 1)?, got"):
        rl.Prioritized(beta=beta)


def test_a_function_that_gives_such_a_beta_is_refused_when_it_does() -> None:
    replay = make_buffer(rl.Prioritized(beta=lambda drawn: 1.4))
    with pytest.raises(rl.SchemaError, match=r"Prioritized\.beta: expected a number( from 0 to 1)?, got"):
        replay.sample(2)


class TestLinear:
    def test_goes_from_start_to_end_and_stays_there(self) -> None:
        schedule = rl.Linear(0.4, 1.0, 3)
        assert [schedule(n) for n in (0, 1, 2, 3, 99)] == pytest.approx([0.4, 0.6, 0.8, 1.0, 1.0])
        assert schedule(3) == 1.0
        assert rl.Linear(1.0, 0.0, 4)(1) == 0.75

    @pytest.mark.parametrize(
        "wrong", [(0.4, 1.0, 0), (0.4, 1.0, 2.5), (float("nan"), 1.0, 3), ("0", 1.0, 3), (0, 1, True)]
    )
    def test_refuses_what_is_no_line(self, wrong: Any) -> None:
        with pytest.raises(rl.SchemaError, match="Linear"):
            rl.Linear(*wrong)

    def test_is_data(self) -> None:
        schedule = rl.Linear(0.4, 1.0, 3)
        assert schedule == rl.Linear(0.4, 1.0, 3) == pickle.loads(pickle.dumps(schedule))
        with pytest.raises(AttributeError):
            schedule.start = 1.0  # type: ignore[misc]

    def test_is_no_sampler(self) -> None:
        line: Any = rl.Linear(0.4, 1.0, 3)
        for make in (lambda: rl.ReplayBuffer(5, 1, (), sampler=line), lambda: rl.Counted(line)):
            with pytest.raises(rl.SchemaError, match="sampler"):
                make()

    def test_counts_calls_of_sample_whatever_their_size(self) -> None:
        replay = make_buffer(rl.Prioritized(beta=rl.Linear(0.0, 1.0, 4)))
        assert sample_betas(replay, (64, 32, 64, 32, 64, 64)) == pytest.approx(
            [0.0, 0.25, 0.5, 0.75, 1.0, 1.0], abs=1e-5
        )

    @pytest.mark.parametrize("wrap", [lambda sampler: sampler, rl.Counted], ids=["plain", "counted"])
    def test_goes_on_after_a_load_a_copy_and_a_pickle(self, tmp_path: Path, wrap: Any) -> None:
        replay = make_buffer(wrap(rl.Prioritized(beta=rl.Linear(0.0, 1.0, 4))))
        assert sample_betas(replay, (64, 64)) == pytest.approx([0.0, 0.25], abs=1e-5)
        replay.save(tmp_path)
        twins = [rl.load(tmp_path, rl.ReplayBuffer), copy.deepcopy(replay), pickle.loads(pickle.dumps(replay))]
        other = rl.ReplayBuffer(5, 1, (), sampler=replay.sampler, next_obs="stored")
        other.load_state_dict(replay.state_dict())
        for twin in (*twins, other):
            assert twin.sampler == replay.sampler
            assert sample_betas(twin, (64, 64, 64, 64)) == pytest.approx([0.5, 0.75, 1.0, 1.0], abs=1e-5)

    def test_a_number_may_follow_a_line_and_a_line_a_number(self, tmp_path: Path) -> None:
        make_buffer(rl.Prioritized(beta=0.4)).save(tmp_path / "number")
        make_buffer(rl.Prioritized(beta=rl.Linear(0.0, 1.0, 4))).save(tmp_path / "line")
        line = rl.load(tmp_path / "number", rl.ReplayBuffer, sampler=rl.Prioritized(beta=rl.Linear(0.0, 1.0, 4)))
        assert sample_betas(line, (64, 64)) == pytest.approx([0.0, 0.25], abs=1e-5)
        rl.load(tmp_path / "line", rl.ReplayBuffer, sampler=rl.Prioritized(beta=0.4)).sample(4)

    def test_a_call_that_raises_does_not_count(self) -> None:
        replay = make_buffer(rl.Prioritized(beta=rl.Linear(0.0, 1.0, 4)))
        out = replay.sample(3)
        with pytest.raises(rl.SchemaError):
            replay.sample(4, out=out)
        assert sample_betas(replay, (64,)) == pytest.approx([0.25], abs=1e-5)

    @pytest.mark.skipif(sys.platform != "linux", reason="disk memory")
    def test_goes_on_in_disk_memory(self, tmp_path: Path) -> None:
        with make_buffer(rl.Prioritized(beta=rl.Linear(0.0, 1.0, 4)), device=rl.Memory.disk(tmp_path)) as replay:
            sample_betas(replay, (64, 64))
        with rl.load(tmp_path, rl.ReplayBuffer) as replay:
            assert sample_betas(replay, (64,)) == pytest.approx([0.5], abs=1e-5)

    @pytest.mark.skipif(sys.platform != "linux", reason="shared memory")
    def test_processes_count_their_calls_together(self) -> None:
        replay = make_buffer(rl.Prioritized(beta=rl.Linear(0.0, 1.0, 4)), device=rl.Memory.shared())
        apart(_draw_twice, replay.handle())
        assert sample_betas(replay, (64,)) == pytest.approx([0.5], abs=1e-5)


def _draw_twice(handle: Any) -> None:
    replay = rl.connect(handle)
    replay.sample(2)
    replay.sample(2)


def sample_betas(replay: rl.ReplayBuffer, sizes: tuple[int, ...]) -> list[float]:
    """Sample batches of these sizes and compute beta from the weights of each."""
    return [_compute_beta(masses(replay), replay.sample(size)) for size in sizes]


def _compute_beta(mass: torch.Tensor, batch: Any) -> float:
    drawn = mass[batch["obs"][:, 0].long()]
    ratio = drawn.min() / drawn
    shown = ratio < 1
    return float((batch["weight"].double()[shown].log() / ratio[shown].log()).mean())
