"""Prioritized replay buffers on Triton's kernels agree with the same buffers on the native core."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import relive as rl
from relive.replay.samplers import prioritized
from relive_conformance import case
from relive_conformance.adapters import relive as ours
from tests.kernels.triton.interpreter import in_every_order, interpreted
from tests.kernels.triton.launches import WAITS, Launches
from tests.tiers import select

NUM_ENVS = 3


def buffer(capacity: int = 60, seed: int = 0, **settings: Any) -> rl.ReplayBuffer:
    sampler = rl.Prioritized(**settings)
    return rl.ReplayBuffer(capacity, obs=2, action=1, num_envs=NUM_ENVS, sampler=sampler, seed=seed)


def step(time: int, ends: tuple[int, ...] = (), cuts: tuple[int, ...] = ()) -> dict[str, torch.Tensor]:
    """Return a step of all environments that continues the previous one, except in the environments `cuts`."""
    obs = torch.full((NUM_ENVS, 2), float(time))
    obs[list(cuts)] += 0.5
    flags = torch.zeros(NUM_ENVS, dtype=torch.bool)
    terminated = flags.clone()
    terminated[list(ends)] = True
    return {
        "obs": obs, "action": torch.zeros(NUM_ENVS, 1), "reward": torch.arange(NUM_ENVS) + 10.0 * time,
        "terminated": terminated, "truncated": flags, "next_obs": torch.full((NUM_ENVS, 2), time + 1.0),
    }  # fmt: skip


def filled(capacity: int = 30, steps: int = 5, **settings: Any) -> rl.ReplayBuffer:
    replay = buffer(capacity, **settings)
    for time in range(steps):
        replay.add(**step(time, ends=(time % NUM_ENVS,) if time % 4 == 3 else ()))
    return replay


def masses(replay: Any) -> torch.Tensor:
    return replay.sampler.tree.leaves_view()


def assert_same_masses(mine: rl.ReplayBuffer, native: rl.ReplayBuffer) -> None:
    assert torch.allclose(masses(mine), masses(native), rtol=1e-13, atol=0)
    states = [buffer.sampler.state() for buffer in (mine, native)]
    assert float(states[0]["largest"]) == float(states[1]["largest"])


class TestLaunches:
    @pytest.mark.parametrize(("normalize", "draw"), select(("batch", 2), of=[("batch", 2), ("global", 1)]))
    def test_each_call_is_a_few_launches(self, normalize: str, draw: int) -> None:
        values, priority = step(5), torch.rand(16)
        with interpreted():
            replay = filled(normalize=normalize)
            with Launches() as adding:
                replay.add(**values)
            with Launches() as sampling:
                batch = replay.sample(16)
            with Launches() as updating:
                replay.update_priority(batch["index"], priority)
            with Launches() as again:
                replay.sample(16, out=batch)
        assert adding.names == ["write_kernel", "set_written_slots_kernel", "renew_subtrees_kernel"]
        drawing = ["prioritized_draw_kernel", "weights_kernel"][:draw]
        assert sampling.names == again.names == [*drawing, "read_kernel"]
        assert updating.names == [
            "aten::zeros",
            "check_priorities_kernel",
            "set_masses_kernel",
            "renew_subtrees_kernel",
        ]

    def test_the_counter_sees_operations_of_torch_and_what_waits(self) -> None:
        with interpreted(), Launches() as launches:
            float(torch.ones(3).sum())
        assert len(launches.names) >= 3
        assert WAITS & set(launches.names)


class TestBesideTheNativeCore:
    @pytest.mark.parametrize("normalize", select("global", of=["batch", "global"]))
    def test_the_same_steps_and_updates_give_the_same_masses(self, normalize: str) -> None:
        native = filled(18, 12, normalize=normalize)
        with interpreted():
            mine = filled(18, 12, normalize=normalize)
            assert_same_masses(mine, native)
            ids = native.ids()
            # Some ids occur twice, and two are ids of overwritten rows.
            index = torch.cat([ids[::2], ids[:5], torch.tensor([0, 1])])
            priority = torch.rand(len(index), generator=torch.Generator().manual_seed(0)) * 5
            assert int(mine.update_priority(index, priority)) == native.update_priority(index, priority) == 2
            assert_same_masses(mine, native)
            for buffer in (mine, native):
                buffer.add(**step(12, ends=(1,)))
            assert_same_masses(mine, native)
            mine.check()

    def test_clear_forgets_priorities(self) -> None:
        with interpreted():
            replay = filled()
            replay.update_priority(replay.ids()[:2], torch.tensor([7.0, 8.0]))
            replay.clear()
            assert masses(replay).count_nonzero() == 0
            replay.check()
            replay.add(**step(0))
            assert masses(replay).max() == pytest.approx((1 + 1e-6) ** 0.6)
            replay.check()

    @pytest.mark.thorough
    @pytest.mark.parametrize("number", ["T8", "T12"])
    def test_the_cases_of_the_conformance_suite(self, number: str) -> None:
        with interpreted():
            case(number).check(ours.adapter())


class TestFaults:
    """Faults that only the device detects are skipped, counted, and reported by `check`."""

    @pytest.mark.parametrize("wrong", select(math.nan, of=[math.nan, -1.0, math.inf, 1e200]))
    def test_invalid_priorities_are_faults(self, wrong: float, tmp_path: Path) -> None:
        with interpreted():
            replay = filled(alpha=2.0)
            ids, before = replay.ids(), masses(replay).clone()
            assert int(replay.update_priority(ids[:2], torch.tensor([wrong, 1.0], dtype=torch.float64))) == 0
            assert (masses(replay) != before).sum() == 0
            with pytest.raises(rl.InvariantError, match="priority: expected finite numbers .*, got 1 others, skipped"):
                replay.check()
            with pytest.warns(rl.DataWarning, match="save: priority: expected finite"):
                replay.save(tmp_path)
            assert torch.equal(masses(rl.load(tmp_path)), masses(replay))

    def test_ids_that_were_never_issued_are_faults(self) -> None:
        with interpreted():
            replay = filled()
            before = masses(replay).clone()
            assert int(replay.update_priority(torch.tensor([-2, 10**6, 2**62]), torch.ones(3))) == 3
            assert torch.equal(before, masses(replay))
            with pytest.raises(rl.InvariantError, match="index: expected ids of stored transitions, got 3 others"):
                replay.check()

    def test_draws_from_zeros_are_counted_as_faults(self) -> None:
        with interpreted():
            replay = filled(eps=0.0)
            replay.update_priority(replay.ids(), torch.zeros(len(replay)))
            replay.sample(4)
            with pytest.raises(rl.InvariantError, match="sample: expected a row of positive priority, got only zeros"):
                replay.check()

    def test_shapes_and_dtypes_are_refused_at_once(self) -> None:
        with interpreted():
            replay = filled()
            for priority in (torch.ones(3), torch.ones(2, 1), torch.ones(2, dtype=torch.bool)):
                with pytest.raises(rl.SchemaError, match="priority"):
                    replay.update_priority(replay.ids()[:2], priority)
            replay.check()

    def test_a_function_as_beta_is_refused_while_a_graph_is_captured(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with interpreted():
            changing, constant = filled(beta=lambda draws: 0.5), filled(beta=0.5)
            changing.sample(4)
            monkeypatch.setattr(prioritized, "is_capturing_graph", lambda device: True)
            with pytest.raises(rl.SchemaError, match="Prioritized.beta: expected a number while a CUDA graph"):
                changing.sample(4)
            constant.sample(4)


class TestCheckpoints:
    def test_a_resumed_run_is_the_same_bit_for_bit(self, tmp_path: Path) -> None:
        with interpreted():
            replay = filled(18, 9, normalize="global", seed=3)
            priority = 10 ** torch.linspace(-3, 2, 12)
            replay.update_priority(replay.sample(12)["index"], priority)
            replay.save(tmp_path)
            other = rl.load(tmp_path)
            assert isinstance(other, rl.ReplayBuffer)
            for time in range(9, 11):
                for each in (replay, other):
                    each.add(**step(time))
                batches = [each.sample(12) for each in (replay, other)]
                for name in ("index", "weight", "obs", "reward"):
                    assert torch.equal(batches[0][name], batches[1][name]), name
                for each, batch in zip((replay, other), batches, strict=True):
                    each.update_priority(batch["index"], priority)
            assert torch.equal(masses(replay), masses(other))
            for mine, loaded in zip(_sums(replay), _sums(other), strict=True):
                assert torch.equal(mine, loaded)

    def test_checkpoints_move_between_the_native_core_and_triton(self, tmp_path: Path) -> None:
        native = filled(18, 9)
        native.update_priority(native.ids(), torch.arange(1.0, 1 + len(native)))
        native.save(tmp_path / "native")
        with interpreted():
            mine = rl.load(tmp_path / "native")
            assert isinstance(mine, rl.ReplayBuffer)
            assert type(mine.storage).__name__ == "TritonBackend"
            assert torch.equal(masses(mine), masses(native))
            mine.add(**step(9))
            mine.update_priority(mine.sample(8)["index"], torch.rand(8))
            mine.check()
            mine.save(tmp_path / "triton")
        again = rl.load(tmp_path / "triton")
        assert isinstance(again, rl.ReplayBuffer)
        assert torch.equal(masses(again), masses(mine))
        assert float(again.sampler.state()["largest"]) == float(mine.sampler.state()["largest"]) == len(native)
        again.sample(8)
        again.check()


def _sums(replay: rl.ReplayBuffer) -> tuple[torch.Tensor, torch.Tensor]:
    run: Any = replay.sampler
    return run.tree._sums, run.tree._minima


@pytest.mark.thorough
def test_programs_in_any_order_sample_the_same() -> None:
    def run() -> Any:
        replay = filled(60, 12, seed=1)
        batch = replay.sample(80)
        replay.update_priority(batch["index"], batch["reward"])
        return [batch[name] for name in ("index", "weight", "obs", "next_obs")], masses(replay)

    with interpreted():
        in_every_order(run, 3)


@st.composite
def stories(draw: st.DrawFn) -> list[tuple[str, Any]]:
    """Steps with ends and cuts, and updates of rows by age; some rows are overwritten or repeated."""
    envs = st.lists(st.integers(0, NUM_ENVS - 1), max_size=2).map(tuple)
    adds = st.tuples(st.just("add"), st.tuples(envs, envs))
    rows = st.lists(st.tuples(st.integers(0, 40), st.floats(0, 1e6)), min_size=1, max_size=12)
    return draw(st.lists(st.one_of(adds, adds, st.tuples(st.just("update"), rows)), min_size=3, max_size=12))


@pytest.mark.thorough
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stories(), st.sampled_from(["batch", "global"]))
def test_any_history_gives_the_masses_of_the_native_core(story: list[tuple[str, Any]], normalize: str) -> None:
    native = buffer(15, normalize=normalize)
    with interpreted():
        mine = buffer(15, normalize=normalize)
        for time, (what, how) in enumerate(story):
            if what == "add":
                for each in (mine, native):
                    each.add(**step(time, *how))
            elif len(native):
                newest = int(native.ids().max())
                index = torch.tensor([max(newest - age, 0) for age, _ in how])
                index = index[native.storage.rows.ring.locate(index)[1].logical_not()]
                priority = torch.tensor([value for _, value in how], dtype=torch.float64)[: len(index)]
                assert int(mine.update_priority(index, priority)) == native.update_priority(index, priority)
            assert_same_masses(mine, native)
        mine.check()
