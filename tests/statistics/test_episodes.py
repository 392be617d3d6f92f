"""Episode statistics, updated by hand and by buffers, against a plain loop over environments and steps."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st

import relive as rl
from relive import kernels
from relive.statistics import counting, norm, observers
from tests.reference.stats import EpisodeStats as Reference
from tests.scripted import Script, Scripted, step_and_reset

MODES = list(AutoresetMode)


@pytest.fixture(params=["native", "torch"])
def arithmetic(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test with both ways of counting: natively, and with torch ops as on other devices."""
    if request.param == "torch":
        for place in (counting, norm, observers):
            monkeypatch.setattr(place, "make_counters", lambda *_: None)
    return request.param


def end(*envs: int, n: int = 2) -> np.ndarray:
    flags = np.zeros(n, bool)
    flags[list(envs)] = True
    return flags


def play(stats: rl.EpisodeStats, *returns: float) -> rl.EpisodeStats:
    """Count one episode of one step per return, in a single environment."""
    for return_ in returns:
        stats.update([return_], [True], [False])
    return stats


def as_lists(stats: rl.EpisodeStats) -> list[dict[str, Any]]:
    columns = {name: column.tolist() for name, column in stats.episodes().items()}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def test_a_device_may_be_named_with_or_without_its_number() -> None:
    for stats in (rl.EpisodeStats(1, device="cpu:0"), rl.EpisodeStats(1, device="meta").to("meta")):
        reward = torch.ones(1, dtype=torch.float16, device=stats.device.type)
        stats.update(reward, reward > 0, reward > 0)
        assert stats.device == reward.device


class TestCounting:
    def test_returns_and_lengths_by_hand(self, arithmetic: str) -> None:
        stats = rl.EpisodeStats(2)
        assert stats.summary() == {"episodes": 0.0}
        stats.update([1.0, 10.0], end(), end())
        stats.update([2.0, 20.0], end(0), end())
        stats.update([3.0, 30.0], end(), end(0, 1))
        assert stats.episodes()["return"].tolist() == [3.0, 3.0, 60.0]
        assert stats.episodes()["length"].tolist() == [2, 1, 3]
        assert stats.episodes()["step"].tolist() == [4, 6, 6]
        summary = stats.summary()
        assert (summary["return_mean"], summary["return_min"], summary["return_max"]) == (22.0, 3.0, 60.0)
        assert summary["return_std"] == pytest.approx(np.std([3, 3, 60]))
        assert summary["step_reward_max"] == 20.0
        assert (summary["terminated_rate"], summary["truncated_rate"]) == pytest.approx((1 / 3, 2 / 3))
        assert (summary["episodes"], stats.num_episodes, stats.num_steps) == (3.0, 3, 6)

    def test_torch_ops_write_no_slot_but_the_spare_one_twice_in_a_step(self) -> None:
        """On other devices the order of two writes to one slot is undefined."""
        with kernels.force("torch"):
            stats: Any = rl.EpisodeStats(5, window=2)
        slots_written: list[int] = []

        class Ring:
            def __setitem__(self, slots: Any, rows: Any) -> None:
                slots_written.extend(slots.tolist())

        stats._tensors["ring"] = Ring()
        stats.update(np.arange(5.0), end(0, 1, 2, 4, n=5), end(n=5))
        ring_slots = [slot for slot in slots_written if slot != 2]
        assert sorted(ring_slots) == [0, 1]
        assert len(slots_written) > 2

    def test_rows_that_only_reset_are_ignored_entirely(self, arithmetic: str) -> None:
        stats = rl.EpisodeStats(2, metrics=("score",), reasons=("fall",))
        stats.update([1.0, 1.0], end(0), end(), metrics={"score": [5, 5]}, reasons=["fall", None])
        garbage = {"metrics": {"score": [np.nan, 5]}, "reasons": ["fall", None]}
        stats.update([np.nan, 1.0], end(0), end(0), mask=[False, True], **garbage)
        stats.update([7.0, 1.0], end(0, 1), end(), metrics={"score": [1, 1]})
        assert [episode["return"] for episode in as_lists(stats)] == [1.0, 7.0, 3.0]
        assert [episode["score"] for episode in as_lists(stats)] == [5.0, 1.0, 11.0]
        assert [episode["fall"] for episode in as_lists(stats)] == [True, False, False]
        assert stats.num_steps == 5

    def test_one_environment_without_an_axis(self, arithmetic: str) -> None:
        stats = rl.EpisodeStats(None, metrics=("score",), reasons=("fall", "success"))
        stats.update(1.5, False, False, metrics={"score": 2}, reasons=None)
        stats.update(np.float32(2.0), True, False, metrics={"score": True}, reasons="success")
        stats.update(1.0, False, True, reasons={"fall": True})
        first, second = as_lists(stats)
        assert (first["return"], first["length"], first["score"], first["success"], first["fall"]) == (
            3.5, 2, 3.0, True, False
        )  # fmt: skip
        assert (second["return"], second["truncated"], second["success"], second["fall"]) == (1.0, True, False, True)

    def test_many_small_rewards_keep_their_digits(self) -> None:
        stats = rl.EpisodeStats(1)
        tenth = torch.full((1,), 0.1)
        for _ in range(3000):
            stats.update(tenth, [False], [False])
        stats.update([0.0], [True], [False])
        assert stats.summary()["return_mean"] == pytest.approx(3000 * float(tenth[0]), rel=1e-12)

    @pytest.mark.parametrize("kind", [list, np.array, torch.tensor], ids=["list", "array", "tensor"])
    def test_lists_arrays_and_tensors_say_the_same(self, arithmetic: str, kind: Any) -> None:
        stats = rl.EpisodeStats(3, metrics=("score",), reasons=("fall",))
        for reward in ([1, 2, 3], [0.5, 0.25, 0.125]):
            ends = kind([False, reward[0] == 0.5, True])
            score = {"score": kind([4, 5, 6])}
            stats.update(kind(reward), ends, kind([False] * 3), metrics=score, reasons={"fall": ends})
        assert stats.episodes()["return"].tolist() == [3.0, 2.25, 0.125]
        assert stats.episodes()["score"].tolist() == [6.0, 10.0, 6.0]
        assert stats.summary()["fall_rate"] == 1.0

    def test_what_was_passed_is_not_kept(self, arithmetic: str) -> None:
        stats, reward, ended = rl.EpisodeStats(2), np.ones(2), end(0)
        stats.update(reward, ended, end())
        reward[:], ended[:] = 99.0, True
        stats.update([0.0, 1.0], end(1), end())
        assert stats.episodes()["return"].tolist() == [1.0, 2.0]

    def test_the_returned_episodes_are_the_callers_own(self) -> None:
        stats = play(rl.EpisodeStats(1, window=2), 1, 2, 3)
        stats.episodes()["return"].zero_()
        assert stats.episodes()["return"].tolist() == [2, 3]

    def test_every_update_runs_without_asking_the_device_anything(self) -> None:
        """A meta tensor has no values: reading one raises."""
        stats = rl.EpisodeStats(4, window=2, metrics=("score",), reasons=("fall",), device="meta")
        flags, numbers = torch.zeros(4, dtype=torch.bool, device="meta"), torch.zeros(4, device="meta")
        for mask in (None, flags):
            stats.update(numbers, flags, flags, mask=mask, metrics={"score": numbers}, reasons={"fall": flags})
            stats.update([1.0] * 4, [True] * 4, [False] * 4, reasons=["fall", None, None, None])
        stats.cut([1])
        stats.clear()
        with pytest.raises(RuntimeError, match="meta"):
            stats.summary()


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, int, list[list[dict[str, Any] | None]]]:
    """Draw a number of environments, a window, and a row per environment and step; None is a dummy step."""
    num_envs, window = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    row = st.fixed_dictionaries(
        {
            "reward": st.integers(-8, 8).map(lambda eighths: eighths / 8),
            "terminated": st.booleans(),
            "truncated": st.booleans(),
            "score": st.integers(-3, 3),
            "reasons": st.lists(st.sampled_from(["fall", "success"]), unique=True),
        }
    )
    steps = st.lists(st.lists(st.one_of(row, row, row, st.none()), min_size=num_envs, max_size=num_envs), max_size=12)
    return num_envs, window, draw(steps)


def tell(stats: rl.EpisodeStats, rows: list[dict[str, Any] | None]) -> None:
    def column(name: str) -> np.ndarray:
        # The values of a dummy step are arbitrary, because dummy steps are not counted.
        return np.array([True if row is None else row[name] for row in rows])

    reasons = {name: np.array([row is None or name in row["reasons"] for row in rows]) for name in ("fall", "success")}
    mask = None if None not in rows else np.array([row is not None for row in rows])
    stats.update(
        column("reward"), column("terminated"), column("truncated"),
        mask=mask, metrics={"score": column("score")}, reasons=reasons,
    )  # fmt: skip


@pytest.mark.parametrize("forced", [False, True], ids=["native", "torch"])
@settings(deadline=None)
@given(history=histories())
def test_every_history_gives_what_a_plain_loop_finds(forced: bool, history: Any) -> None:
    num_envs, window, steps = history
    with kernels.force("torch") if forced else nullcontext():
        stats = rl.EpisodeStats(num_envs, window, ("score",), ("fall", "success"))
    reference = Reference(num_envs, window, ("score",), ("fall", "success"))
    for rows in steps:
        tell(stats, rows)
        reference.update(rows)
        assert as_lists(stats) == reference.episodes()
    assert stats.summary() == pytest.approx(reference.summary())
    assert set(stats.summary()) == set(reference.summary())
    assert stats.num_steps == reference.num_steps


class TestRefusing:
    GOOD: dict[str, Any] = {"reward": np.ones(3), "terminated": end(n=3), "truncated": end(n=3)}  # noqa: RUF012

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({"reward": np.ones((3, 1))}, r"reward: expected shape \(3,\) for 3 environments, got \(3, 1\)\. Squeeze"),
            ({"reward": 1.0}, r"reward: expected shape \(3,\)"),
            ({"reward": None}, "reward: expected a value, got None"),
            ({"reward": ["a"] * 3}, "reward: expected numbers or bools"),
            ({"reward": np.ones(3, complex)}, "reward: expected float64, got complex128"),
            ({"terminated": np.ones(3)}, "terminated: expected bool, got float64. Pass bools"),
            ({"truncated": end(n=2)}, r"truncated: expected shape \(3,\)"),
            ({"mask": [True]}, r"mask: expected shape \(3,\)"),
            ({"metrics": {"score": np.ones(2)}}, r"score: expected shape \(3,\)"),
            ({"metrics": {"points": np.ones(3)}}, r"metrics: expected declared names \(score\), got 'points'"),
            ({"reasons": {"fell": end(n=3)}}, r"reasons: expected declared names \(fall\), got 'fell'"),
            ({"reasons": {"fall": np.ones(3)}}, "fall: expected bool, got float64"),
            ({"reasons": ["fall", "fell", None]}, r"reasons: expected declared names \(fall\), got 'fell'"),
            ({"reasons": ["fall"]}, "reasons: expected a name or None for each of 3 environments"),
            ({"reasons": "fall"}, "reasons: expected a name or None for each of 3 environments"),
        ],
    )
    def test_a_refused_step_changes_nothing(self, arithmetic: str, changed: dict[str, Any], message: str) -> None:
        stats = rl.EpisodeStats(3, metrics=("score",), reasons=("fall",))
        stats.update(**{**self.GOOD, "terminated": end(1, n=3)})
        before = stats.snapshot()
        with pytest.raises(rl.SchemaError, match=message):
            stats.update(**{**self.GOOD, "terminated": end(0, n=3), **changed})
        for name, tensor in stats.snapshot().items():
            assert torch.equal(tensor, before[name])

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"num_envs": 0}, "num_envs: expected a positive int"),
            ({"window": 0}, "window: expected a positive int"),
            ({"metrics": "score"}, "metrics: expected a tuple of names, got 'score'"),
            ({"reasons": (1,)}, "reasons: expected a tuple of names"),
            ({"metrics": ("return",)}, "'return' twice"),
            ({"metrics": ("reward",)}, "'reward' twice"),
            ({"metrics": ("a", "step_a")}, "'step_a' twice"),
            ({"metrics": ("fall",), "reasons": ("fall",)}, "'fall' twice"),
            ({"reasons": ("truncated",)}, "'truncated' twice"),
        ],
    )
    def test_names_and_sizes_that_cannot_be(self, arguments: dict[str, Any], message: str) -> None:
        with pytest.raises(rl.SchemaError, match=message):
            rl.EpisodeStats(**{"num_envs": 2, **arguments})

    def test_unknown_environments_are_refused(self) -> None:
        with pytest.raises(IndexError, match="environments 0 to 1"):
            rl.EpisodeStats(2).cut([2])


class TestKeeping:
    def test_a_snapshot_brings_back_what_came_after(self, arithmetic: str) -> None:
        stats = rl.EpisodeStats(2, window=2, metrics=("score",))
        stats.update([1.0, 2.0], end(0), end(), metrics={"score": [1, 2]})
        snapshot = stats.snapshot()
        other = rl.EpisodeStats(2, window=2, metrics=("score",))
        other.restore(snapshot)
        for each in (stats, other):
            each.update([10.0, 20.0], end(0, 1), end(), metrics={"score": [1, 2]})
        assert as_lists(other) == as_lists(stats)
        assert other.episodes()["return"].tolist() == [10.0, 22.0]
        other.restore(snapshot)
        other.update([10.0, 20.0], end(0, 1), end(), metrics={"score": [1, 2]})
        assert as_lists(other) == as_lists(stats)

    def test_a_snapshot_of_other_arguments_is_refused(self) -> None:
        stats = play(rl.EpisodeStats(1), 5)
        for other in (rl.EpisodeStats(1, window=99), rl.EpisodeStats(2), rl.EpisodeStats(1, reasons=("fall",))):
            with pytest.raises(rl.SchemaError, match="EpisodeStats: expected a snapshot of"):
                stats.restore(other.snapshot())
        assert stats.episodes()["return"].tolist() == [5]

    def test_clear_forgets_all_and_cut_only_what_is_running(self, arithmetic: str) -> None:
        stats = rl.EpisodeStats(3)
        stats.update([1.0, 2.0, 3.0], end(0, n=3), end(n=3))
        stats.update([1.0, 2.0, 3.0], end(n=3), end(n=3))
        stats.cut([0, 2])
        stats.update([10.0, 20.0, 30.0], end(0, 1, 2, n=3), end(n=3))
        assert stats.episodes()["return"].tolist() == [1.0, 10.0, 24.0, 30.0]
        assert stats.episodes()["length"].tolist() == [1, 1, 3, 1]
        stats.update([1.0, 2.0, 3.0], end(n=3), end(n=3))
        stats.cut()
        stats.update([10.0, 20.0, 30.0], end(1, n=3), end(n=3))
        assert stats.episodes()["return"].tolist()[-1] == 20.0
        stats.clear()
        assert stats.summary() == {"episodes": 0.0}
        assert stats.num_steps == 0
        stats.update([10.0, 20.0, 30.0], end(2, n=3), end(n=3))
        assert stats.episodes()["return"].tolist() == [30.0]


class ScoringEnv(gym.Wrapper[Any, Any, Any, Any]):
    """Environment whose info has a score (at odd steps only) and the end reason; the info of a reset is wrong."""

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        obs, _ = self.env.reset(**options)
        return obs, {"score": 1000, "goal": True}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, _ = self.env.step(action)
        info: dict[str, Any] = {"goal": np.bool_(terminated)}
        if obs[2] % 2:
            info["score"] = int(obs[2])
        return obs, reward, bool(terminated), bool(truncated), info


def scoring_envs(scripts: list[Script], mode: AutoresetMode, vector: Any = SyncVectorEnv) -> Any:
    makers = [lambda n=n, script=script: ScoringEnv(Scripted(n, script)) for n, script in enumerate(scripts)]
    return vector(makers, autoreset_mode=mode)


SCRIPTS: list[Script] = [((3, "terminated"), (2, "truncated")), ((1, "truncated"), (4, "both")), ((5, "terminated"),)]


def make_buffer(which: int, envs: Any, stats: rl.EpisodeStats) -> Any:
    return (rl.RolloutBuffer.for_env, rl.ReplayBuffer.for_env)[which](envs, 60, stats=stats)


def record_episodes(envs: Any, which: int, episodes: int) -> list[dict[str, Any]]:
    """Return the first episodes of each environment, as the statistics of a buffer record them."""
    stats = rl.EpisodeStats(envs.num_envs, window=1000, metrics=("score",), reasons=("goal",))
    buffer = make_buffer(which, envs, stats)
    obs, _ = envs.reset(seed=0)
    for _ in range(60):
        action = np.zeros(envs.num_envs, np.int64)
        step, next_obs = step_and_reset(envs, action)
        buffer.add_step(obs, action, step)
        obs = next_obs
    envs.close()
    found = [{name: x for name, x in episode.items() if name != "step"} for episode in as_lists(stats)]
    return sorted(found, key=lambda episode: episode["return"])[:episodes]


@pytest.mark.usefixtures("arithmetic")
class TestBuffers:
    @pytest.mark.parametrize("which", [0, 1], ids=["rollout", "replay"])
    @pytest.mark.parametrize("vector", [SyncVectorEnv, AsyncVectorEnv])
    def test_all_autoreset_modes_give_the_same_statistics(self, vector: Any, which: int) -> None:
        by_hand = Reference(1, 1000, ("score",), ("goal",))
        for env, script in enumerate(SCRIPTS):
            world = ScoringEnv(Scripted(env, script))
            world.reset()
            for _ in range(60):
                _, reward, terminated, truncated, info = world.step(0)
                reasons = ["goal"] if info["goal"] else []
                by_hand.update([{"reward": reward, "terminated": terminated, "truncated": truncated,
                                 "score": info.get("score", 0), "reasons": reasons}])  # fmt: skip
                if terminated or truncated:
                    world.reset()
        expected = [{name: x for name, x in episode.items() if name != "step"} for episode in by_hand.finished]
        expected = sorted(expected, key=lambda episode: episode["return"])[:20]
        for mode in MODES if vector is SyncVectorEnv else MODES[:2]:
            assert record_episodes(scoring_envs(SCRIPTS, mode, vector), which, 20) == expected, mode

    @pytest.mark.parametrize("which", [0, 1], ids=["rollout", "replay"])
    def test_one_environment_without_an_axis(self, which: int) -> None:
        world = ScoringEnv(Scripted(2, ((3, "terminated"), (2, "truncated"))))
        stats = rl.EpisodeStats(None, metrics=("score",), reasons=("goal",))
        buffer = make_buffer(which, world, stats)
        obs, _ = world.reset()
        for _ in range(5):
            step = world.step(0)
            buffer.add_step(obs, 0, step)
            obs = world.reset()[0] if step[2] or step[3] else step[0]
        assert stats.episodes()["return"].tolist() == [603.0, 421.0]
        assert stats.episodes()["score"].tolist() == [4.0, 1.0]
        assert stats.episodes()["goal"].tolist() == [True, False]

    @pytest.mark.parametrize("layout", ["dict", "objects", "nothing"])
    def test_the_last_step_of_an_episode_is_in_final_info_whatever_its_layout(self, layout: str) -> None:
        stats = rl.EpisodeStats(3, metrics=("score",), reasons=("goal",))
        rollout = rl.RolloutBuffer(9, 3, obs=1, action=(), autoreset="SAME_STEP", stats=stats)
        final: Any = {
            "dict": {"score": np.array([0, 5, 0]), "_score": end(1, n=3), "goal": np.array([0.0, 1.0, 0.0])},
            "objects": np.array([None, {"score": 5, "goal": True}, None], dtype=object),
            "nothing": {},
        }[layout]
        info = {"score": np.array([7.0, 1000.0, 8.0]), "_score": [True, True, False], "final_info": final,
                "_final_info": end(1, n=3)}  # fmt: skip
        obs = np.zeros((3, 1), np.float32)
        rollout.add_step(obs, np.zeros(3), (obs.copy(), np.ones(3), end(1, n=3), end(n=3), info))
        rollout.add_step(obs, np.zeros(3), (obs.copy(), np.ones(3), end(0, 2, n=3), end(n=3), {}))
        known = layout != "nothing"
        assert stats.episodes()["score"].tolist() == [5.0 if known else 0.0, 7.0, 0.0]
        assert stats.episodes()["goal"].tolist() == [known, False, False]

    def test_metrics_and_reasons_may_be_fields_of_the_buffer(self, backend: str) -> None:
        stats = rl.EpisodeStats(2, metrics=("force",), reasons=("fall",))
        extra = {"force": (), "fall": rl.Field((), torch.bool)}
        rollout = rl.RolloutBuffer(4, 2, obs=1, action=(), extra=extra, stats=stats)
        obs, fields = np.zeros((2, 1)), {"force": [0.5, 0.25], "fall": end(1)}
        rollout.add(obs, [0, 0], [1, 1], end(), end(), **fields)
        rollout.add(obs, [0, 0], [1, 1], end(0, 1), end(), **fields)
        del rollout
        replay = rl.ReplayBuffer(8, obs=1, action=(), num_envs=2, extra=extra, stats=stats)
        replay.add(obs, [0, 0], [1, 1], end(1), end(), obs + 1, **fields)
        assert stats.episodes()["force"].tolist() == [1.0, 0.5, 0.25]
        assert stats.episodes()["fall"].tolist() == [False, True, True]

    def test_environments_that_step_at_their_own_time(self, backend: str) -> None:
        stats = rl.EpisodeStats(3, metrics=("score",))
        replay = rl.ReplayBuffer(12, obs=1, action=(), num_envs=3, stats=stats, autoreset="DISABLED")
        for ids, reward, ends in (
            ([2, 0], [1.0, 10.0], end()),
            ([0], [20.0], end(0, n=1)),
            ([1, 2], [5.0, 2.0], end(1)),
        ):
            obs, n = np.zeros((len(ids), 1)), len(ids)
            step = (obs + 1, np.array(reward), ends, end(n=n), {"score": np.array(reward) / 2})
            replay.add_step(obs, np.zeros(n), step, env_ids=ids)
        assert stats.episodes()["return"].tolist() == [30.0, 3.0]
        assert stats.episodes()["length"].tolist() == [2, 2]
        assert stats.episodes()["score"].tolist() == [15.0, 1.5]
        assert stats.episodes()["step"].tolist() == [3, 5]

    def test_a_block_counts_as_its_steps_do(self, backend: str) -> None:
        rng = np.random.default_rng(0)
        steps = 20
        block = {
            "obs": rng.random((steps, 3, 1)), "action": np.zeros((steps, 3)), "reward": rng.random((steps, 3)),
            "terminated": rng.random((steps, 3)) < 0.3, "truncated": rng.random((steps, 3)) < 0.2,
            "next_obs": rng.random((steps, 3, 1)), "force": rng.random((steps, 3)),
        }  # fmt: skip
        stats = [rl.EpisodeStats(3, metrics=("force",)) for _ in range(2)]
        whole, single = (
            rl.ReplayBuffer(300, obs=1, action=(), num_envs=3, extra={"force": ()}, autoreset="NEXT_STEP", stats=each)
            for each in stats
        )
        whole.extend(block)
        for t in range(steps):
            single.add(**{name: column[t] for name, column in block.items()})
        assert as_lists(stats[0]) == as_lists(stats[1])
        assert stats[0].num_steps == len(whole) < 60

    @pytest.mark.parametrize("agents", [1, 8, 300])
    def test_many_agents_are_added_up_within_rounding(self, backend: str, agents: int) -> None:
        stats, rewards = rl.EpisodeStats(None), np.random.default_rng(agents).normal(size=agents)
        replay = rl.ReplayBuffer(4, obs=1, action=(), reward=rl.Field(agents, torch.float64), stats=stats)
        replay.add([0.0], 0.0, rewards, True, False, [1.0])
        error = agents * 2.0**-53 * np.abs(rewards).sum()
        assert stats.episodes()["return"].tolist() == pytest.approx([math.fsum(rewards)], rel=0, abs=error)

    def test_agents_may_differ_in_dtype(self, backend: str) -> None:
        agents = {"fox": rl.Field((), torch.bfloat16), "hare": (), "hounds": rl.Field(2, torch.float16)}
        stats, norm = rl.EpisodeStats(2), rl.RunningNorm(1)
        rollout = rl.RolloutBuffer(4, 2, obs=1, action=(), reward=agents, stats=stats, norm={"obs": norm})
        obs, reward = np.zeros((2, 1)), {"fox": [1, 2], "hare": [0.5, 0.25], "hounds": [[6e4, 6e4], [0, 1]]}
        rollout.add(obs, [0, 0], reward, end(), end())
        del rollout
        replay = rl.ReplayBuffer(8, obs=1, action=(), num_envs=2, reward=agents, stats=stats)
        replay.add(obs, [0, 0], reward, end(0, 1), end(), obs + 1)
        assert stats.episodes()["return"].tolist() == [240_003.0, 6.5]
        assert norm.count == 2

    def test_an_episode_goes_on_in_the_next_rollout_unless_the_environments_restarted(self) -> None:
        for restarted, expected in ((False, [11.0, 22.0]), (True, [10.0, 20.0])):
            stats = rl.EpisodeStats(2)
            rollout = rl.RolloutBuffer(1, 2, obs=1, action=(), stats=stats)
            rollout.add(np.zeros((2, 1)), [0, 0], [1.0, 2.0], end(), end())
            rollout.clear(restarted=restarted)
            rollout.add(np.zeros((2, 1)), [0, 0], [10.0, 20.0], end(0, 1), end())
            assert stats.episodes()["return"].tolist() == expected

    def test_a_reset_that_was_pending_at_clear_is_still_ignored(self) -> None:
        stats = rl.EpisodeStats(2)
        rollout = rl.RolloutBuffer(2, 2, obs=1, action=(), autoreset="NEXT_STEP", stats=stats)
        for t in range(6):
            if rollout.is_full:
                rollout.clear()
            rollout.add(np.zeros((2, 1)), [0, 0], [10.0**t, 1.0], end(0) if t in (1, 2, 3, 5) else end(), end())
        assert stats.episodes()["return"].tolist() == [11.0, 1000.0, 100000.0]
        assert stats.num_steps == 10

    def test_clearing_a_replay_keeps_its_episodes_running_and_cutting_drops_them(self) -> None:
        for stop, expected in (("clear", [11.0, 22.0]), ("cut", [10.0, 20.0]), ("cut one", [11.0, 20.0])):
            stats = rl.EpisodeStats(2)
            replay = rl.ReplayBuffer(4, obs=1, action=(), num_envs=2, stats=stats)
            obs = np.zeros((2, 1))
            replay.add(obs, [0, 0], [1.0, 2.0], end(), end(), obs + 1)
            {"clear": replay.clear, "cut": replay.cut, "cut one": lambda r=replay: r.cut([1])}[stop]()
            replay.add(obs, [0, 0], [10.0, 20.0], end(0, 1), end(), obs + 1)
            assert stats.episodes()["return"].tolist() == expected, stop

    @pytest.mark.parametrize("make", [rl.RolloutBuffer, rl.ReplayBuffer])
    def test_statistics_that_do_not_fit_are_refused_when_the_buffer_is_made(self, make: Any) -> None:
        options = {"obs": 1, "action": (), "extra": {"force": (3,)}}
        for stats, message in (
            (rl.EpisodeStats(3), "stats: expected num_envs=2, as in the buffer, got 3"),
            (rl.EpisodeStats(None), "stats: expected num_envs=2, as in the buffer, got None"),
            (rl.EpisodeStats(2, metrics=("force",)), "stats: force: expected a field of one real number"),
            (rl.EpisodeStats, "stats: expected an EpisodeStats, got <class"),
        ):
            with pytest.raises(rl.SchemaError, match=message):
                make(4, num_envs=2, stats=stats, **options)

    def test_an_info_that_does_not_fit_leaves_buffer_and_statistics_as_they_were(self) -> None:
        envs = scoring_envs(SCRIPTS, AutoresetMode.SAME_STEP)
        obs = np.zeros((3, 3), np.float32)
        for which in (0, 1):
            stats = rl.EpisodeStats(3, metrics=("score",))
            buffer = make_buffer(which, envs, stats)
            step = (obs + 1, np.ones(3), end(n=3), end(n=3), {"score": np.ones((3, 2))})
            with pytest.raises(rl.SchemaError, match=r"info\['score'\]: expected shape \(3,\)"):
                buffer.add_step(obs, np.zeros(3, np.int64), step)
            assert len(buffer) == 0
            assert stats.num_steps == 0
        envs.close()

    @pytest.mark.parametrize("make", [rl.RolloutBuffer, rl.ReplayBuffer])
    def test_counting_does_not_synchronise_with_the_device(self, make: Any) -> None:
        """A meta tensor has no values: reading one raises."""
        stats, norm = rl.EpisodeStats(2, metrics=("force",)), rl.RunningNorm(3)
        options = {"obs": 3, "action": (), "extra": {"force": ()}, "autoreset": "NEXT_STEP", "device": "meta"}
        buffer = make(4, num_envs=2, stats=stats, norm={"obs": norm}, **options)
        numbers, flags = torch.zeros(2, device="meta"), torch.zeros(2, dtype=torch.bool, device="meta")
        obs, next_obs = (torch.zeros(2, 3, device="meta") for _ in range(2))
        for _ in range(3):
            rest = (next_obs,) if make is rl.ReplayBuffer else ()
            buffer.add(obs, numbers, numbers, flags, flags, *rest, force=numbers)

    def test_the_buffer_moves_its_statistics_to_its_device(self) -> None:
        stats = rl.EpisodeStats(2)
        rollout = rl.RolloutBuffer(4, 2, obs=1, action=(), device="meta", stats=stats)
        assert rollout.stats is stats
        assert stats.device.type == "meta"


@pytest.mark.parametrize("make", [rl.EpisodeStats, rl.RunningNorm])
def test_what_the_native_core_counts_stays_where_it_is(make: Any) -> None:
    counted = make(2)
    options: Any = {"stats": counted} if make is rl.EpisodeStats else {"norm": {"obs": counted}}
    rl.ReplayBuffer(8, obs=2, action=(), num_envs=2, **options)
    assert counted.to("cpu") is counted
    with pytest.raises(rl.SchemaError, match="expected cpu, where a buffer counts its steps, got meta"):
        counted.to("meta")
