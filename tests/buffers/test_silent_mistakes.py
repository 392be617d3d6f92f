"""Mistakes that a step reveals: a wrong autoreset mode, reused memory, rewards that are NaN."""

from __future__ import annotations

import copy
import pickle
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

import relive as rl
from relive.schema import conversion

RESET_ROWS_WARNING = (
    r"autoreset: expected steps after an end that are steps of new episodes.* declare autoreset=NEXT_STEP"
)
FINAL_OBS_WARNING = (
    r"autoreset: expected no final observations under autoreset={}, got info.* declare autoreset=SAME_STEP"
)


def cartpole(mode: str, seed: int = 0) -> Any:
    env = gym.make_vec("CartPole-v1", 2, "sync", vector_kwargs={"autoreset_mode": gym.vector.AutoresetMode[mode]})
    env.action_space.seed(seed)
    return env


def play(env: Any, steps: int, *, forgets: bool = False) -> Iterator[tuple[Any, Any, Any]]:
    """Add steps of a random policy; `forgets` omits `obs = step[0]` from the loop."""
    obs = env.reset(seed=0)[0]
    for _ in range(steps):
        action = env.action_space.sample()
        step = env.step(action)
        yield obs, action, step
        obs = obs if forgets else step[0]


def collect_warnings(call: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        call()
    return [str(one.message) for one in told if issubclass(one.category, rl.DataWarning)]


def make_replay(env: Any, **options: Any) -> rl.ReplayBuffer:
    return rl.ReplayBuffer.for_env(env, 2000, seed=0, **options)


def make_rollout_loop(env: Any, told: str, count: int = 6) -> Any:
    def run() -> None:
        rollout = rl.RolloutBuffer.for_env(env, 32, autoreset=told, seed=0)
        for number, (obs, action, step) in enumerate(play(env, 32 * count), 1):
            rollout.add_step(obs, action, step, value=np.zeros(2))
            if number % 32 == 0:
                rollout.compute_advantage(np.zeros(2), bootstrap_truncated="own_value")
                rollout.clear()

    return run


class TestModes:
    @pytest.mark.parametrize("told", ["NEXT_STEP", "DISABLED"])
    @pytest.mark.parametrize("make", [make_replay, lambda env, **options: rl.RolloutBuffer.for_env(env, 64, **options)])
    def test_final_observations_reveal_a_same_step_environment(self, make: Any, told: str) -> None:
        env = cartpole("SAME_STEP")
        buffer = make(env, autoreset=told)

        def run() -> None:
            for obs, action, step in play(env, 64):
                buffer.add_step(obs, action, step)

        (message,) = collect_warnings(run)
        assert re.match(FINAL_OBS_WARNING.format(told), message)

    @pytest.mark.parametrize("told", ["SAME_STEP", "DISABLED"])
    def test_reset_rows_in_rollouts_warn(self, told: str) -> None:
        (message,) = collect_warnings(make_rollout_loop(cartpole("NEXT_STEP"), told))
        assert re.match(RESET_ROWS_WARNING, message)

    def test_reset_rows_in_a_replay_buffer_warn(self, backend: str) -> None:
        env = cartpole("NEXT_STEP")
        replay = make_replay(env, autoreset="DISABLED")

        def run() -> None:
            for obs, action, step in play(env, 400):
                replay.add_step(obs, action, step)

        (message,) = collect_warnings(run)
        assert "declare autoreset=NEXT_STEP" in message

    @pytest.mark.parametrize("mode", ["NEXT_STEP", "SAME_STEP"])
    def test_the_right_autoreset_mode_does_not_warn(self, mode: str) -> None:
        assert collect_warnings(make_rollout_loop(cartpole(mode), mode)) == []

    def test_sparse_rewards_do_not_warn(self) -> None:
        rollout = rl.RolloutBuffer(64, 1, 1, (), autoreset="SAME_STEP")

        def run() -> None:
            for t in range(64):
                end = np.array([t % 4 == 3])
                rollout.add(np.full((1, 1), t), np.zeros(1), 1.0 * end, end, ~end & False, value=np.zeros(1))
            rollout.compute_advantage(np.zeros(1))

        assert collect_warnings(run) == []


class TestRolloutSteps:
    def test_a_forgotten_obs_assignment_is_the_first_warning(self) -> None:
        env = cartpole("NEXT_STEP")
        rollout = rl.RolloutBuffer.for_env(env, 64)

        def run() -> None:
            for obs, action, step in play(env, 64, forgets=True):
                rollout.add_step(obs, action, step)

        (message,) = collect_warnings(run)
        assert message.startswith(
            "obs: expected steps that start where the step before led, got 64 of 64 that do not. Assign obs = step[0]"
        )

    def test_a_replay_buffer_warns_about_a_forgotten_obs_assignment_first(self, backend: str) -> None:
        env = cartpole("NEXT_STEP")
        replay = make_replay(env)

        def run() -> None:
            for obs, action, step in play(env, 64, forgets=True):
                replay.add_step(obs, action, step)

        (message, *_) = collect_warnings(run)
        assert "that do not. Assign obs = step[0] after every step." in message

    def test_a_reset_between_rollouts_is_noticed(self) -> None:
        env = cartpole("NEXT_STEP")
        rollout = rl.RolloutBuffer.for_env(env, 8, stats=rl.EpisodeStats(2))

        def run(restarted: bool = False) -> None:
            for obs, action, step in play(env, 8):
                rollout.add_step(obs, action, step)
            rollout.clear(restarted=restarted)

        run(restarted=True)
        assert collect_warnings(run) == []
        (message,) = collect_warnings(run)
        assert "obs: expected a rollout that starts where the last one led, got 2 of 2" in message
        assert "clear(restarted=True)" in message

    def test_continued_rollouts_do_not_warn(self) -> None:
        for mode in ("NEXT_STEP", "SAME_STEP"):
            env = cartpole(mode)
            rollout = rl.RolloutBuffer.for_env(env, 8)

            def run(env: Any = env, rollout: rl.RolloutBuffer = rollout) -> None:
                for obs, action, step in play(env, 200):
                    rollout.add_step(torch.as_tensor(obs), action, step)
                    if rollout.is_full:
                        rollout.clear()

            assert collect_warnings(run) == []

    def test_reused_memory_warns(self) -> None:
        rollout = rl.RolloutBuffer(8, 2, 3, ())
        obs = np.zeros((2, 3), np.float32)

        def run() -> None:
            for t in range(8):
                obs[:] = t + 1
                rollout.add(obs, np.zeros(2), np.zeros(2), np.zeros(2, bool), np.zeros(2, bool))

        (message,) = collect_warnings(run)
        assert "obs: expected memory of its own for every step" in message
        assert "stage(obs=…)" in message

    def test_constant_observations_and_new_arrays_do_not_warn(self) -> None:
        rollout = rl.RolloutBuffer(64, 2, 3, ())
        constant = np.ones((2, 3), np.float32)

        def run() -> None:
            for t in range(64):
                obs = constant if t % 2 else np.full((2, 3), t, np.float32)
                rollout.add(obs, np.zeros(2), np.zeros(2), np.zeros(2, bool), np.zeros(2, bool))

        assert collect_warnings(run) == []


class TestNumbers:
    HUGE = (1e39, -1e39, np.float64(3.5e38))

    @pytest.mark.parametrize("huge", HUGE)
    @pytest.mark.parametrize("field", ["obs", "reward", "next_obs"])
    @pytest.mark.parametrize(
        "form", [lambda x: x, torch.from_numpy, lambda x: x.tolist()], ids=["array", "tensor", "list"]
    )
    def test_finite_numbers_that_would_become_infinite_are_refused(
        self, backend: str, field: str, huge: float, form: Any
    ) -> None:
        replay = rl.ReplayBuffer(8, 2, (), num_envs=2)
        step: dict[str, Any] = {"obs": np.zeros((2, 2)), "action": np.zeros(2), "reward": np.zeros(2)}
        step |= {"terminated": np.zeros(2, bool), "truncated": np.zeros(2, bool), "next_obs": np.ones((2, 2))}
        replay.add(**step)
        wrong = step[field].copy()
        wrong.flat[-1] = huge
        with pytest.raises(
            rl.SchemaError, match=rf"{field}: expected finite numbers of at most 3\.403e\+38 \(float32\), got"
        ):
            replay.add(**{**step, field: form(wrong)})
        assert len(replay) == 2
        replay.check()

    @pytest.mark.parametrize("form", [float, np.float64, np.array, lambda x: torch.tensor(x, dtype=torch.float64)])
    def test_overflow_is_refused_for_a_single_environment_too(self, backend: str, form: Any) -> None:
        replay, rollout = rl.ReplayBuffer(8, 1, ()), rl.RolloutBuffer(8, None, 1, ())
        with pytest.raises(rl.SchemaError, match="reward: expected finite numbers"):
            replay.add([0.0], 0.0, form(1e39), False, False, [1.0])
        with pytest.raises(rl.SchemaError, match="reward: expected finite numbers"):
            rollout.add([0.0], 0.0, form(1e39), False, False)
        assert len(replay) == len(rollout) == 0

    def test_rollouts_and_other_dtypes_refuse_overflow(self, backend: str) -> None:
        rollout = rl.RolloutBuffer(8, 2, rl.Field(1, torch.float16), ())
        wrong: tuple[Any, ...] = (np.full((2, 1), 70000), np.full((2, 1), 1e5), torch.full((2, 1), 1e5))
        for obs in wrong:
            with pytest.raises(rl.SchemaError, match=r"obs: expected finite numbers of at most 6\.55e\+04 \(float16\)"):
                rollout.add(obs, np.zeros(2), np.zeros(2), np.zeros(2, bool), np.zeros(2, bool))
        rollout.add(np.full((2, 1), 65504), np.zeros(2), np.zeros(2), np.zeros(2, bool), np.zeros(2, bool))

    def test_infinite_numbers_and_large_ones_that_fit_are_stored(self, backend: str) -> None:
        replay = rl.ReplayBuffer(8, 3, ())
        obs = np.array([np.inf, np.nan, 3.4028235e38])
        replay.add(obs, 0.0, 0.0, False, False, obs + 0)
        stored = replay[[0]]["obs"][0]
        assert [bool(x) for x in (stored[0].isinf(), stored[1].isnan(), stored[2].isfinite())] == [True] * 3

    def test_devices_count_numbers_that_overflow(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(conversion, "_is_on_host", lambda tensor: False)
        with rl.kernels.force_torch():
            replay, rollout = rl.ReplayBuffer(8, 1, ()), rl.RolloutBuffer(8, None, 1, ())
            wide = torch.full((1,), 1e39, dtype=torch.float64)
            replay.add(wide, 0.0, 0.0, False, False, wide.clone())
            rollout.add(wide, 0.0, 0.0, False, False)
            for buffer in (replay, rollout):
                with pytest.raises(
                    rl.InvariantError, match="fields: expected numbers that fit their dtypes, got [12] finite"
                ):
                    buffer.check()

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_nan_rewards_warn_once(self, backend: str, bad: float) -> None:
        replay = rl.ReplayBuffer(64, 1, (), reward={"fox": (), "hare": rl.Field((), torch.float64)})

        def add() -> None:
            for t in range(6):
                reward = {"fox": 0.0, "hare": bad if t in (2, 3) else 1.0}
                replay.add([t], 0.0, reward, False, False, [t + 1])

        (message,) = collect_warnings(add)
        assert message.startswith("reward: expected finite numbers, got infinite ones or NaN")

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_compute_advantage_warns_about_nan_rewards(self, bad: float) -> None:
        rollout = rl.RolloutBuffer(4, 2, 1, ())

        def learn() -> None:
            for _ in range(2):
                for t in range(4):
                    reward = np.array([bad, 0.0])
                    rollout.add(
                        np.full((2, 1), t), np.zeros(2), reward, np.zeros(2, bool), np.zeros(2, bool), value=np.zeros(2)
                    )
                rollout.compute_advantage(np.zeros(2))
                rollout.clear()

        (message,) = collect_warnings(learn)
        assert message.startswith("reward: expected finite numbers, got infinite ones or NaN")


class TestCounters:
    @pytest.mark.skipif(sys.platform != "linux", reason="shared memory")
    @pytest.mark.parametrize(
        "counted", [{"stats": rl.EpisodeStats(None)}, {"norm": {"obs": rl.RunningNorm(2)}}], ids=str
    )
    def test_shared_memory_refuses_statistics_of_one_process(self, tmp_path: Path, counted: Any) -> None:
        (name,) = counted
        with pytest.raises(rl.SchemaError, match=f"{name}: expected None in shared memory, where other processes"):
            rl.ReplayBuffer(8, 2, (), device=rl.Memory.shared(), **counted)
        rl.ReplayBuffer(8, 2, (), **counted).save(tmp_path)
        with pytest.raises(rl.IncompatibleCheckpoint, match=f"{name}: expected None in shared memory"):
            rl.load(tmp_path, device=rl.Memory.shared())

    def test_two_buffers_cannot_share_statistics(self) -> None:
        stats = rl.EpisodeStats(None)
        replay = rl.ReplayBuffer(8, 2, (), stats=stats)
        with pytest.raises(rl.SchemaError, match="stats: expected statistics that no other buffer counts in"):
            rl.RolloutBuffer(8, None, 2, (), stats=stats)
        twin = copy.deepcopy(replay)
        assert twin.stats is not None
        assert twin.stats is not stats
        del replay
        rollout = rl.RolloutBuffer(8, None, 2, (), stats=stats)
        rl.ReplayBuffer(8, 2, (), stats=pickle.loads(pickle.dumps(rollout.stats)))


class TestFrameStacks:
    @pytest.mark.parametrize(("padding", "pad"), [("reset", "repeat"), ("zero", "zero")])
    @pytest.mark.parametrize("num_envs", [None, 2])
    def test_for_env_says_that_frames_could_be_stored_once(self, num_envs: int | None, padding: str, pad: str) -> None:
        def stacked() -> Any:
            return gym.wrappers.FrameStackObservation(gym.make("CartPole-v1"), 3, padding_type=padding)

        env: Any = stacked() if num_envs is None else gym.vector.SyncVectorEnv([stacked] * num_envs)
        (message,) = collect_warnings(lambda: rl.ReplayBuffer.for_env(env, 60))
        field = f"rl.Stacked(rl.Field((4,), torch.float32), 3, axis=0, pad={pad!r})"
        assert message == (
            "for_env: expected frames that are stored once, got FrameStackObservation, which stores each 3 times. "
            f"Pass obs={field}."
        )
        replay = rl.ReplayBuffer.for_env(env, 60, obs=eval(field, {"rl": rl, "torch": torch}))
        for obs, action, step in play(env, 100) if num_envs else ():
            replay.add_step(obs, action, step)
        replay.check()

    def test_rollouts_and_environments_without_stacks_do_not_warn(self) -> None:
        env = gym.wrappers.FrameStackObservation(gym.make("CartPole-v1"), 3)
        assert collect_warnings(lambda: rl.RolloutBuffer.for_env(env, 60)) == []
        flat = gym.wrappers.FlattenObservation(env)
        assert collect_warnings(lambda: rl.ReplayBuffer.for_env(flat, 60)) == []
