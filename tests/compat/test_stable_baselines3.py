# pyright: reportMissingImports=false
"""Our buffers in place of Stable-Baselines3's: the same calls and data, with its own algorithms."""

from __future__ import annotations

import copy
import importlib
import inspect
import io
import pickle
import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

import relive as rl

pytest.importorskip("stable_baselines3", reason="needs Stable-Baselines3: pip install '.[sb3]'")

import stable_baselines3 as sb3
import stable_baselines3.common.buffers as theirs
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.common.type_aliases import (
    DictReplayBufferSamples,
    DictRolloutBufferSamples,
    ReplayBufferSamples,
    RolloutBufferSamples,
)
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from relive.compat import stable_baselines3 as ours
from tests.tiers import select

SEED = 7
VECTOR = spaces.Box(-9, 9, (3,), np.float32)
MIXED = spaces.Dict({"vector": VECTOR, "image": spaces.Box(0, 255, (2, 4, 4), np.uint8), "mode": spaces.Discrete(5)})
OBSERVATIONS = {
    "vector": VECTOR,
    "float64": spaces.Box(-9, 9, (3,), np.float64),
    "image": spaces.Box(0, 255, (2, 4, 4), np.uint8),
    "discrete": spaces.Discrete(50),
    "dict": MIXED,
}
ACTIONS = {
    "box": spaces.Box(-1, 1, (2,), np.float32),
    "float64": spaces.Box(-1, 1, (2,), np.float64),
    "discrete": spaces.Discrete(4),
    "multi": spaces.MultiDiscrete([3, 4]),
    "binary": spaces.MultiBinary(3),
}
BOTH = {
    "RolloutBuffer": theirs.RolloutBuffer,
    "DictRolloutBuffer": theirs.DictRolloutBuffer,
    "ReplayBuffer": theirs.ReplayBuffer,
    "DictReplayBuffer": theirs.DictReplayBuffer,
    "NStepReplayBuffer": theirs.NStepReplayBuffer,
    "HerReplayBuffer": sb3.HerReplayBuffer,
}


def draw_values(space: spaces.Space[Any], n_envs: int) -> Any:
    """Draw observations or actions of every environment, batched as by a VecEnv."""
    samples = [space.sample() for _ in range(n_envs)]
    if isinstance(space, spaces.Dict):
        return {key: np.stack([sample[key] for sample in samples]) for key in space.spaces}
    return np.stack(samples)


def replace_values(obs: Any, fresh: Any, where: np.ndarray) -> Any:
    if isinstance(obs, dict):
        return {key: replace_values(obs[key], fresh[key], where) for key in obs}
    return np.where(where.reshape(-1, *(1,) * (obs.ndim - 1)), fresh, obs).astype(obs.dtype)


def make_steps(obs_space: spaces.Space[Any], action_space: spaces.Space[Any], n_envs: int, count: int) -> Iterator[Any]:
    """Yield steps of a VecEnv: chains of observations that terminate, time out and start again."""
    random = np.random.default_rng(SEED)
    obs_space.seed(SEED)
    action_space.seed(SEED)
    obs = draw_values(obs_space, n_envs)
    for _ in range(count):
        next_obs, kind = draw_values(obs_space, n_envs), random.random(n_envs)
        done, timeout = kind < 0.15, kind < 0.07
        infos = [{"TimeLimit.truncated": bool(t)} if d else {} for d, t in zip(done, timeout, strict=True)]
        reward = random.normal(size=n_envs).astype(np.float32)
        yield obs, next_obs, draw_values(action_space, n_envs), reward, done, infos
        obs = replace_values(next_obs, draw_values(obs_space, n_envs), done)


def make_pair(name: str, size: int, obs: str, action: str, n_envs: int, count: int, **options: Any) -> tuple[Any, Any]:
    """Return a replay buffer of the original and ours, with the same steps."""
    spaces_ = OBSERVATIONS[obs], ACTIONS[action]
    buffers = [
        owner(size, *spaces_, device="cpu", n_envs=n_envs, **options) for owner in (BOTH[name], vars(ours)[name])
    ]
    for step in make_steps(*spaces_, n_envs, count):
        for buffer in buffers:
            buffer.add(*copy.deepcopy(step))
    return buffers[0], buffers[1]


def stored_positions(buffer: Any) -> np.ndarray:
    """Return the positions that are stored for every environment, newest first."""
    return (buffer.pos - 1 - np.arange(buffer.size())) % buffer.buffer_size


def assert_equal(mine: Any, other: Any) -> None:
    """Assert that two batches, or parts of batches, have equal names, shapes, dtypes and numbers."""
    assert type(mine) is type(other)
    if isinstance(mine, tuple):
        for a, b in zip(mine, other, strict=True):
            assert_equal(a, b)
    elif isinstance(mine, dict):
        assert mine.keys() == other.keys()
        for key in mine:
            assert_equal(mine[key], other[key])
    elif mine is not None:
        torch.testing.assert_close(mine, other)


def samples_at(buffer: Any, positions: np.ndarray, env: VecNormalize | None = None) -> Any:
    """Return the samples at positions, from the same random environments for both buffers."""
    if hasattr(buffer, "_random"):
        buffer._random = np.random.default_rng(SEED)
        return buffer._get_samples(positions, env)
    envs = np.random.default_rng(SEED).integers(buffer.n_envs, size=len(positions))
    with mock.patch.object(np.random, "randint", return_value=envs):
        return buffer._get_samples(positions, env)


@pytest.fixture
def normalizer() -> VecNormalize:
    """Return a VecNormalize with statistics of some steps, and a small limit of rewards."""
    env = VecNormalize(DummyVecEnv([lambda: gym.make("Pendulum-v1")]), clip_reward=0.01)
    env.seed(SEED)
    env.action_space.seed(SEED)
    env.reset()
    for _ in range(20):
        env.step(np.array([env.action_space.sample()]))
    return env


class TestPlace:
    @pytest.mark.parametrize("name", BOTH)
    def test_every_public_method_has_the_signature_of_the_original(self, name: str) -> None:
        mine, other = vars(ours)[name], BOTH[name]
        names = ["__init__", *(n for n in dir(other) if not n.startswith("_") and callable(getattr(other, n)))]
        assert {"add", "reset", "size", "sample", "extend", "to_torch"} < set(names)
        for method in names:
            parameters = [
                [
                    (p.name, p.kind, p.default)
                    for p in inspect.signature(getattr(owner, method)).parameters.values()
                    if p.name not in ("next_obs", "n_stack") or method != "__init__"
                ]
                for owner in (mine, other)
            ]
            assert parameters[0] == parameters[1], method

    @pytest.mark.parametrize("name", BOTH)
    def test_our_classes_are_subclasses_of_the_originals(self, name: str) -> None:
        assert issubclass(vars(ours)[name], BOTH[name])

    def test_without_stable_baselines3_the_import_names_the_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(__import__("sys").modules, "stable_baselines3", None)
        source = Path(ours.__file__).read_text()
        with pytest.raises(ImportError, match=re.escape('Run pip install ".[sb3]" in a clone of relive.')):
            exec(compile(source, ours.__file__, "exec"), {})


class TestReplay:
    @pytest.mark.parametrize("n_envs", [1, 4])
    @pytest.mark.parametrize("count", [5, 10, 37])
    @pytest.mark.parametrize("obs", OBSERVATIONS)
    def test_the_same_positions_give_the_same_samples(self, obs: str, count: int, n_envs: int) -> None:
        name = "DictReplayBuffer" if obs == "dict" else "ReplayBuffer"
        other, mine = make_pair(name, 20 * n_envs, obs, "box", n_envs, count)
        positions = stored_positions(mine)
        assert len(positions) >= min(count, 12)
        assert_equal(samples_at(mine, positions), samples_at(other, positions))
        assert (mine.pos, mine.full) == (other.pos, other.full)

    @pytest.mark.parametrize("action", ACTIONS)
    def test_actions_of_every_space_equal_those_of_the_original(self, action: str) -> None:
        other, mine = make_pair("ReplayBuffer", 60, "vector", action, 2, 20)
        assert_equal(samples_at(mine, stored_positions(mine)), samples_at(other, stored_positions(mine)))

    @pytest.mark.parametrize("handle", [True, False])
    def test_timeouts_are_ends_only_where_they_are_not_handled(self, handle: bool) -> None:
        other, mine = make_pair("ReplayBuffer", 100, "vector", "box", 1, 40, handle_timeout_termination=handle)
        positions = stored_positions(mine)
        assert_equal(samples_at(mine, positions), samples_at(other, positions))
        assert mine.dones.sum() > samples_at(mine, positions).dones.sum() or not handle

    @pytest.mark.parametrize("n_envs", [1, 4])
    @pytest.mark.parametrize("count", [10, 37])
    def test_n_step_returns_equal_those_of_the_original(
        self, count: int, n_envs: int, normalizer: VecNormalize
    ) -> None:
        other, mine = make_pair("NStepReplayBuffer", 20 * n_envs, "vector", "box", n_envs, count, n_steps=4, gamma=0.9)
        positions = stored_positions(mine)
        assert_equal(samples_at(mine, positions), samples_at(other, positions))
        assert len(torch.unique(samples_at(mine, positions).discounts)) > 2
        assert_equal(samples_at(mine, positions, normalizer), samples_at(other, positions, normalizer))

    @pytest.mark.parametrize("obs", ["vector", "float64"])
    def test_normalised_samples_equal_those_of_the_original(self, obs: str, normalizer: VecNormalize) -> None:
        other, mine = make_pair("ReplayBuffer", 60, obs, "box", 1, 40)
        positions = stored_positions(mine)
        assert_equal(samples_at(mine, positions, normalizer), samples_at(other, positions, normalizer))
        assert float(mine.sample(50, normalizer).rewards.abs().max()) == pytest.approx(0.01)

    def test_the_arrays_are_in_the_order_of_positions(self) -> None:
        other, mine = make_pair("DictReplayBuffer", 40, "dict", "discrete", 2, 15)
        for name in ("actions", "rewards", "dones", "timeouts"):
            np.testing.assert_array_equal(getattr(mine, name), getattr(other, name))
            assert getattr(mine, name).dtype == getattr(other, name).dtype
        for name in ("observations", "next_observations"):
            for key in MIXED.spaces:
                np.testing.assert_array_equal(getattr(mine, name)[key], getattr(other, name)[key])

    @pytest.mark.parametrize("next_obs", ["stored", "shared"])
    def test_values_written_to_rewards_and_actions_are_sampled(self, next_obs: str) -> None:
        other, _ = make_pair("ReplayBuffer", 120, "vector", "box", 2, 40)
        kinds: dict[str, Any] = {"device": "cpu", "n_envs": 2, "next_obs": next_obs}
        mine = ours.ReplayBuffer(120, VECTOR, ACTIONS["box"], **kinds)
        for step in make_steps(VECTOR, ACTIONS["box"], 2, 40):
            mine.add(*copy.deepcopy(step))
        for buffer in (other, mine):
            buffer.rewards += np.where(np.arange(60) < 40, 0.5, 0)[:, None].astype(np.float32)
            buffer.rewards[3] = -7
            buffer.rewards[10:20, 1] *= 2
            buffer.actions = buffer.actions * 3
            part = buffer.actions[5:9]
            part -= 1
        np.testing.assert_array_equal(mine.rewards, other.rewards)
        np.testing.assert_array_equal(mine.actions, other.actions)
        assert_equal(samples_at(mine, np.arange(40)), samples_at(other, np.arange(40)))

    def test_writes_that_cannot_be_stored_are_refused(self) -> None:
        mine = ours.ReplayBuffer(20, VECTOR, ACTIONS["box"], device="cpu", next_obs="shared")
        for step in make_steps(VECTOR, ACTIONS["box"], 1, 5):
            mine.add(*step)
        with pytest.raises(rl.SchemaError, match="observations: expected no writing, since neighbouring steps share"):
            mine.observations[2] = 1
        with pytest.raises(IndexError, match="rewards: expected stored positions, got 7"):
            mine.rewards[7] = 1
        kept = mine.rewards.copy()
        with pytest.raises(ValueError, match="read-only"):
            mine.rewards.reshape(-1)[0] = 9
        np.testing.assert_array_equal(mine.rewards, kept)

    def test_arrays_have_their_full_length_before_the_first_step(self) -> None:
        for kind in ("ReplayBuffer", "RolloutBuffer"):
            buffers = [owner(6, VECTOR, ACTIONS["discrete"], n_envs=2) for owner in (BOTH[kind], vars(ours)[kind])]
            names = [name for name, value in vars(buffers[0]).items() if isinstance(value, np.ndarray)]
            assert len(names) >= 6
            for name in names:
                other, mine = (getattr(buffer, name) for buffer in buffers)
                assert (mine.shape, mine.dtype) == (other.shape, other.dtype), name
                assert not mine.any()

    def test_rows_written_to_the_arrays_are_sampled_and_saved_when_the_buffer_is_full(self) -> None:
        mine: Any = ours.ReplayBuffer(6, VECTOR, ACTIONS["box"], device="cpu")
        mine.observations[:, 0] = np.arange(6)[:, None]
        mine.rewards[:, 0] = np.arange(6)
        mine.full = True
        for buffer in (mine, pickle.loads(pickle.dumps(mine))):
            batch = buffer.sample(200)
            torch.testing.assert_close(batch.observations[:, :1], batch.rewards)
            assert len(torch.unique(batch.rewards)) == 6
        mine.add(np.full((1, 3), 9), np.full((1, 3), 9), np.zeros((1, 2)), np.array([9.0]), np.array([False]), [{}])
        assert mine.rewards[:, 0].tolist() == [9, 1, 2, 3, 4, 5]

    def test_unordered_data_keeps_the_full_capacity_when_next_observations_are_stored(self) -> None:
        image = OBSERVATIONS["image"]
        mine: Any = ours.ReplayBuffer(10, image, ACTIONS["box"], device="cpu", next_obs="stored")
        obs = after = None
        for _ in range(25):
            obs, after = draw_values(image, 1), draw_values(image, 1)
            mine.add(obs, after, np.zeros((1, 2)), np.zeros(1), np.zeros(1), [{}])
        assert mine.size() == 10
        np.testing.assert_array_equal(mine.observations[4], obs)
        np.testing.assert_array_equal(mine.next_observations[4], after)

    def test_stacks_of_frames_are_stored_as_frames(self) -> None:
        image = spaces.Box(0, 255, (4, 84, 84), np.uint8)
        mine = ours.ReplayBuffer(1_000, image, spaces.Discrete(4), device="cpu", n_stack=4)
        assert mine.nbytes / 1_000 < 84 * 84 + 100
        plain = ours.ReplayBuffer(1_000, image, spaces.Discrete(4), device="cpu")
        random = np.random.default_rng(SEED)
        stack = np.zeros((1, 4, 84, 84), np.uint8)
        for t in range(60):
            frame = random.integers(256, size=(1, 1, 84, 84), dtype=np.uint8)
            after = np.concatenate([stack[:, 1:], frame], 1)
            done = np.array([t % 20 == 19])
            for buffer in (mine, plain):
                buffer.add(stack.copy(), after.copy(), np.array([t % 4]), np.array([t]), done, [{}])
            first = random.integers(256, size=(1, 1, 84, 84), dtype=np.uint8)
            stack = np.concatenate([np.zeros((1, 3, 84, 84), np.uint8), first], 1) if done else after
        assert_equal(samples_at(mine, np.arange(60)), samples_at(plain, np.arange(60)))
        np.testing.assert_array_equal(mine.observations[:60], plain.observations[:60])

    def test_the_last_observation_of_an_episode_takes_a_row(self) -> None:
        mine = ours.ReplayBuffer(10, VECTOR, ACTIONS["box"], device="cpu", next_obs="shared")
        for t in range(10):
            obs = np.full((1, 3), t, np.float32)
            mine.add(obs, obs + 0.5, np.zeros((1, 2)), np.array([t]), np.array([t % 2 == 1]), [{}])
        assert mine.size() == len(stored_positions(mine)) < 10
        with pytest.raises(IndexError, match="batch_inds: expected stored positions, got 0. Pass .* the last obser"):
            mine._get_samples(np.array([0]))
        batch = mine.sample(200)
        torch.testing.assert_close(batch.next_observations, batch.observations + 0.5)

    @pytest.mark.parametrize("next_obs", ["stored", "shared"])
    @pytest.mark.parametrize("wrong", ["done", "infos"])
    def test_a_step_with_flags_of_other_environments_is_refused_and_not_stored(self, wrong: str, next_obs: Any) -> None:
        buffer = ours.ReplayBuffer(8, OBSERVATIONS["vector"], ACTIONS["box"], "cpu", 2, next_obs=next_obs)
        first, bad, second = (list(step) for step in make_steps(OBSERVATIONS["vector"], ACTIONS["box"], 2, 3))
        bad[4], bad[5] = np.ones(2, np.bool_), [{"TimeLimit.truncated": True}] * 2
        place = {"done": 4, "infos": 5}[wrong]
        bad[place] = np.ones(3, np.bool_) if wrong == "done" else bad[place] * 2
        buffer.add(*first)
        with pytest.raises(ValueError, match="cannot reshape array of size"):
            buffer.add(*bad)
        buffer.add(*second)
        draw_values = buffer._get_samples(np.array([0, 1] * 20)).rewards
        assert set(draw_values.flatten().tolist()) == {*first[3].tolist(), *second[3].tolist()}
        assert buffer.size() == 2

    def test_the_ends_of_episodes_are_right_with_optimize_memory_usage(self) -> None:
        kinds = {"optimize_memory_usage": True, "handle_timeout_termination": False}
        other, mine = make_pair("ReplayBuffer", 40, "vector", "box", 1, 30, **kinds)
        plain, _ = make_pair("ReplayBuffer", 40, "vector", "box", 1, 30, handle_timeout_termination=False)
        positions = stored_positions(mine)[1:]
        assert_equal(samples_at(mine, positions), samples_at(plain, positions))
        differs = (
            samples_at(other, positions).next_observations != samples_at(plain, positions).next_observations
        ).any(1)
        torch.testing.assert_close(differs.float(), samples_at(plain, positions).dones.squeeze(1))

    @pytest.mark.parametrize(
        ("name", "obs", "options"),
        [
            ("ReplayBuffer", "vector", {"optimize_memory_usage": True}),
            ("DictReplayBuffer", "dict", {"optimize_memory_usage": True}),
            ("DictReplayBuffer", "vector", {}),
            ("DictRolloutBuffer", "vector", {}),
            ("NStepReplayBuffer", "vector", {"optimize_memory_usage": True, "handle_timeout_termination": False}),
        ],
    )
    def test_settings_that_the_original_refuses_raise_the_same_error(self, name: str, obs: str, options: Any) -> None:
        with pytest.raises(Exception, match="Buffer") as refusal:
            BOTH[name](10, OBSERVATIONS[obs], ACTIONS["box"], **options)
        with pytest.raises(refusal.type, match="expected .*, got "):
            vars(ours)[name](10, OBSERVATIONS[obs], ACTIONS["box"], **options)

    def test_marking_the_newest_step_as_done_cuts_the_chain(self) -> None:
        given: dict[str, Any] = {"device": "cpu", "n_steps": 3, "gamma": 1.0, "next_obs": "shared"}
        mine = ours.NStepReplayBuffer(10, VECTOR, ACTIONS["box"], **given)
        for t in range(6):
            obs = np.full((1, 3), t, np.float32)
            mine.add(obs, obs + 1, np.zeros((1, 2)), np.ones(1, np.float32), np.array([False]), [{}])
            if t == 3:
                mine.dones[mine.pos - 1] = True
        batch = mine._get_samples(np.arange(6))
        assert batch.rewards.squeeze(1).tolist() == [3, 3, 2, 1, 2, 1]
        assert batch.dones.sum() == 0
        assert batch.next_observations[:, 0].tolist() == [3, 4, 4, 4, 6, 6]
        assert mine.dones[:6, 0].tolist() == mine.timeouts[:6, 0].tolist() == [0, 0, 0, 1, 0, 0]
        with pytest.raises(rl.SchemaError, match="dones: expected a mark at the newest position 5"):
            mine.dones[2] = True

    def test_images_are_stored_once(self) -> None:
        image = spaces.Box(0, 255, (4, 84, 84), np.uint8)
        mine = ours.ReplayBuffer(500, image, spaces.Discrete(4))
        other = theirs.ReplayBuffer(500, image, spaces.Discrete(4))
        held = sum(value.nbytes for value in vars(other).values() if isinstance(value, np.ndarray))
        assert mine.nbytes < 501 * (4 * 84 * 84 + 24) < 0.51 * held

    def test_one_array_may_be_passed_as_both_observations(self) -> None:
        mine = ours.ReplayBuffer(10, VECTOR, ACTIONS["box"], device="cpu")
        obs = np.arange(6, dtype=np.float32).reshape(2, 1, 3)
        mine.extend(obs, obs, np.zeros((2, 1, 2)), np.zeros((2, 1)), np.zeros((2, 1)), [[{}], [{}]])
        batch = mine._get_samples(np.arange(2))
        assert batch.next_observations.tolist() == batch.observations.tolist() == obs[:, 0].tolist()
        one = np.ones((1, 3), np.float32)
        mine.add(one, one, np.zeros((1, 2)), np.zeros(1), np.zeros(1), [{}])
        assert mine._get_samples(np.array([2])).next_observations.tolist() == one.tolist()

    @pytest.mark.parametrize("name", ["ReplayBuffer", "DictReplayBuffer", "NStepReplayBuffer"])
    def test_samples_are_on_the_device_of_the_algorithm(self, name: str) -> None:
        _, mine = make_pair(name, 20, "dict" if name == "DictReplayBuffer" else "vector", "box", 1, 15)
        mine.device = torch.device("meta")
        for part in mine.sample(4):
            leaves = part.values() if isinstance(part, dict) else [part]
            assert all(leaf is None or leaf.device.type == "meta" for leaf in leaves)

    def test_reset_removes_every_transition(self) -> None:
        _, mine = make_pair("ReplayBuffer", 20, "vector", "box", 1, 15)
        mine.reset()
        assert (mine.pos, mine.full, mine.size()) == (0, False, 0)
        with pytest.raises(rl.NotReadyError, match="sample: expected at least 1 stored transition, got 0"):
            mine.sample(1)

    @pytest.mark.parametrize("name", ["DictReplayBuffer", "NStepReplayBuffer", "PrioritizedReplayBuffer"])
    def test_an_unpickled_buffer_continues_with_the_same_samples(self, name: str) -> None:
        obs_space, action_space = MIXED if name == "DictReplayBuffer" else VECTOR, ACTIONS["discrete"]
        mine = vars(ours)[name](40, obs_space, action_space, device="cpu", n_envs=2)
        everything = list(make_steps(obs_space, action_space, 2, 30))
        for step in everything[:25]:
            mine.add(*copy.deepcopy(step))
        mine.sample(5)
        for twin in (pickle.loads(pickle.dumps(mine)), copy.deepcopy(mine)):
            assert_equal(twin.sample(64), copy.deepcopy(mine).sample(64))
        twin = pickle.loads(pickle.dumps(mine, protocol=pickle.HIGHEST_PROTOCOL))
        for buffer in (mine, twin):
            for step in everything[25:]:
                buffer.add(*copy.deepcopy(step))
        assert_equal(twin.sample(64), mine.sample(64))
        assert (twin.pos, twin.full, twin.size()) == (mine.pos, mine.full, mine.size())

    def test_a_pickle_of_another_version_is_refused(self) -> None:
        _, mine = make_pair("ReplayBuffer", 20, "vector", "box", 1, 15)
        state = mine.__getstate__()
        state["_rows"] = {"written": 15, "dones": mine.dones, "timeouts": mine.timeouts}
        with pytest.raises(rl.IncompatibleCheckpoint, match="got other contents .'num_written'"):
            object.__new__(type(mine)).__setstate__(state)


def rollouts(obs: str, action: str, n_envs: int, length: int = 24) -> tuple[Any, Any]:
    """Return a rollout buffer of the original and ours, with the same steps and with advantages."""
    name = "DictRolloutBuffer" if obs == "dict" else "RolloutBuffer"
    spaces_, settings = (OBSERVATIONS[obs], ACTIONS[action]), {"gae_lambda": 0.9, "gamma": 0.95, "n_envs": n_envs}
    buffers = [owner(length, *spaces_, device="cpu", **settings) for owner in (BOTH[name], vars(ours)[name])]
    torch.manual_seed(SEED)
    started = np.ones(n_envs, np.bool_)
    for state, _, chosen, reward, done, _ in make_steps(*spaces_, n_envs, length):
        value, log_prob = torch.randn(n_envs, 1), torch.randn(n_envs)
        for buffer in buffers:
            buffer.add(copy.deepcopy(state), chosen, reward, started, value, log_prob)
        started = done
    last = torch.randn(n_envs, 1)
    for buffer in buffers:
        buffer.compute_returns_and_advantage(last_values=last, dones=started)
    return buffers[0], buffers[1]


def read(mine: Any, other: Any) -> tuple[Any, Any]:
    """Return the steps of our rollout in random order, and the same steps of the original."""
    # `get` of the original flattens its arrays.
    next(other.get(1))
    (batch,) = mine.get()
    places = {value: number for number, value in enumerate(other.values.flatten().tolist())}
    return batch, other._get_samples(np.array([places[value] for value in batch.old_values.tolist()]))


class TestRollout:
    @pytest.mark.parametrize("n_envs", [1, 4])
    @pytest.mark.parametrize("obs", OBSERVATIONS)
    def test_batches_have_the_steps_of_the_original(self, obs: str, n_envs: int) -> None:
        other, mine = rollouts(obs, "box", n_envs)
        assert_equal(*read(mine, other))
        assert isinstance(next(mine.get(3)), DictRolloutBufferSamples if obs == "dict" else RolloutBufferSamples)

    @pytest.mark.parametrize("action", ACTIONS)
    def test_actions_of_every_space_equal_those_of_the_original(self, action: str) -> None:
        other, mine = rollouts("vector", action, 2)
        assert_equal(*read(mine, other))

    def test_the_arrays_equal_those_of_the_original_before_and_after_get(self) -> None:
        other, mine = rollouts("vector", "discrete", 4)
        names = ("observations", "actions", "rewards", "episode_starts", "values", "log_probs", "advantages", "returns")
        kept = {name: getattr(other, name).copy() for name in names}
        for _ in mine.get(7):
            for name, array in kept.items():
                np.testing.assert_allclose(getattr(mine, name), array, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("batch_size", [7, 64, None])
    def test_get_gives_every_step_once(self, batch_size: int | None) -> None:
        _, mine = rollouts("vector", "box", 4)
        batches = list(mine.get(batch_size))
        assert [len(batch.returns) for batch in batches] == {7: [7] * 13 + [5], 64: [64, 32], None: [96]}[batch_size]
        seen = torch.cat([batch.old_values for batch in batches])
        assert sorted(seen.tolist()) == sorted(mine.values.flatten().tolist())
        assert seen.tolist() != mine.values.flatten().tolist()

    def test_batches_are_on_the_device_of_the_algorithm(self) -> None:
        _, mine = rollouts("vector", "box", 2)
        mine.device = torch.device("meta")
        assert all(part.device.type == "meta" for batch in mine.get(7) for part in batch)

    def test_rewards_written_to_the_array_change_the_advantages(self) -> None:
        other, mine = rollouts("vector", "box", 2)
        for buffer in (other, mine):
            buffer.rewards[3] += 5
            buffer.compute_returns_and_advantage(torch.zeros(2), np.zeros(2, np.bool_))
        np.testing.assert_allclose(mine.returns, other.returns, rtol=1e-5, atol=1e-5)

    def test_the_error_of_an_incomplete_rollout_names_the_missing_steps(self) -> None:
        mine = ours.RolloutBuffer(5, VECTOR, ACTIONS["box"])
        with pytest.raises(rl.NotReadyError, match=re.escape("get: expected 5 steps, got 0. Add 5 more.")):
            next(mine.get(2))

    def test_a_rollout_holds_little_more_memory_than_the_original(self) -> None:
        other, mine = rollouts("vector", "discrete", 4, length=128)
        assert mine.nbytes < 1.06 * sum(value.nbytes for value in vars(other).values() if isinstance(value, np.ndarray))

    def test_rows_written_to_the_arrays_are_in_the_batches(self) -> None:
        mine = ours.RolloutBuffer(6, VECTOR, ACTIONS["box"], device="cpu")
        for name in ("values", "log_probs", "advantages", "returns"):
            setattr(mine, name, np.arange(6).reshape(6, 1))
        mine.full = True
        (batch,) = mine.get()
        assert sorted(batch.returns.tolist()) == list(range(6))
        assert batch.returns.tolist() == batch.advantages.tolist() == batch.old_values.tolist()
        assert mine.generator_ready
        mine.reset()
        assert not mine.generator_ready
        assert not mine.returns.any()

    def test_a_copy_and_an_unpickled_rollout_have_the_same_steps(self) -> None:
        other, mine = rollouts("dict", "discrete", 2)
        for twin in (copy.deepcopy(mine), pickle.loads(pickle.dumps(mine))):
            assert_equal(*read(twin, other))
            twin.rewards[0] += 1
            assert (twin.rewards[0] != mine.rewards[0]).all()
            assert sum(len(batch.returns) for batch in twin.get(7)) == 48


def make_flips(n_envs: int, continuous: bool = False) -> Any:
    return make_vec_env(lambda: BitFlippingEnv(n_bits=4, continuous=continuous, max_steps=6), n_envs)


def hindsight(env: Any, count: int, **options: Any) -> Any:
    """Return a hindsight buffer with random steps of an environment."""
    mine = ours.HerReplayBuffer(
        400, env.observation_space, env.action_space, env, n_envs=env.num_envs, device="cpu", **options
    )
    env.seed(SEED)
    env.action_space.seed(SEED)
    obs = env.reset()
    for _ in range(count):
        action = np.array([env.action_space.sample() for _ in range(env.num_envs)])
        next_obs, reward, done, infos = env.step(action)
        true = copy.deepcopy(next_obs)
        for i in np.flatnonzero(done):
            for key in true:
                true[key][i] = infos[i]["terminal_observation"][key]
        mine.add(obs, true, action, reward, done, infos)
        obs = next_obs
    return mine


class Judge:
    """Environment that rewards reached goals and records the arguments of `compute_reward`."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, Any]] = []

    def env_method(self, name: str, achieved: Any, goal: Any, infos: Any, indices: Any) -> list[Any]:
        self.seen.extend(zip(achieved[:, 0], infos, strict=True))
        return [-(achieved != goal).any(1).astype(np.float32)]


def count_goals(size: int, steps: int, **options: Any) -> Any:
    """Return a hindsight buffer with observations n + 100·env; episodes have 7 observations and 6 steps."""
    number = spaces.Box(-1, 999, (1,), np.float32)
    space = spaces.Dict({"observation": number, "achieved_goal": number, "desired_goal": number})
    judge: Any = Judge()
    mine = ours.HerReplayBuffer(size, space, spaces.Discrete(2), judge, n_envs=2, device="cpu", **options)
    for n in (t + t // 6 for t in range(steps)):
        now = np.array([[n], [n + 100]], np.float32)
        goal = {"desired_goal": np.full_like(now, -1)}
        obs, after = ({**goal, "observation": now + k, "achieved_goal": now + k} for k in (0, 1))
        infos = [{"number": n + 100 * env} for env in range(2)]
        mine.add(obs, after, np.zeros(2, np.int64), np.full(2, -1.0), np.full(2, n % 7 == 5), infos)
    return mine


class TestHindsight:
    @pytest.mark.parametrize(("strategy", "n"), [("future", 4), ("final", 3), ("episode", 4)])
    def test_relabelled_goals_come_from_the_same_episode_and_determine_the_rewards(self, strategy: str, n: int) -> None:
        batch = count_goals(400, 60, goal_selection_strategy=strategy, n_sampled_goal=n).sample(4000)
        place, goal = batch.observations["observation"], batch.observations["desired_goal"]
        number = place % 100
        # Step n reaches the goal n + 1.
        reached_by = goal - 1 - (place - number)
        is_relabelled = goal != -1
        assert abs(float(is_relabelled.float().mean()) - n / (n + 1)) < 0.03
        assert (reached_by // 7 == number // 7)[is_relabelled].all()
        assert strategy != "final" or (reached_by % 7 == 5)[is_relabelled].all()
        assert strategy != "future" or (reached_by >= number)[is_relabelled].all()
        assert torch.equal(batch.next_observations["desired_goal"], goal)
        torch.testing.assert_close(batch.rewards, -(batch.next_observations["achieved_goal"] != goal).float())
        assert torch.equal(batch.dones, (number % 7 == 5).float())

    def test_samples_have_the_types_and_shapes_of_the_original(self) -> None:
        env = make_flips(2, continuous=True)
        mine = hindsight(env, 30)
        other: Any = sb3.HerReplayBuffer(400, env.observation_space, env.action_space, env, n_envs=2, device="cpu")
        obs = env.reset()
        for _ in range(30):
            action = np.array([env.action_space.sample() for _ in range(2)])
            next_obs, reward, done, infos = env.step(action)
            other.add(obs, next_obs, action, reward, done, infos)
            obs = next_obs
        for a, b in zip(mine.sample(16), other.sample(16), strict=True):
            leaves = zip(a.values(), b.values(), strict=True) if isinstance(a, dict) else [(a, b)]
            assert all(x is y is None or (x.shape, x.dtype) == (y.shape, y.dtype) for x, y in leaves)

    def test_compute_reward_gets_the_infos_of_its_step(self) -> None:
        mine = count_goals(12, 20, copy_info_dict=True)
        mine.sample(50)
        seen = mine.env.seen
        assert 30 < len(seen) <= 50
        assert all(info["number"] == achieved - 1 for achieved, info in seen)
        assert {info["number"] // 100 for _, info in seen} == {0, 1}

    def test_an_unfinished_episode_is_truncated_once(self) -> None:
        mine = hindsight(make_flips(2), 3)
        with pytest.warns(UserWarning, match="truncated: [12] environments have not ended it"):
            mine.truncate_last_trajectory()
        mine.truncate_last_trajectory()
        assert mine.sample(20).dones.sum() == 0

    def test_an_unknown_strategy_is_refused(self) -> None:
        with pytest.raises(rl.SchemaError, match="goal_selection_strategy: expected one of .*, got 'past'"):
            hindsight(make_flips(1), 0, goal_selection_strategy="past")


def prioritized(steps: int = 4, **options: Any) -> Any:
    """Return a prioritized buffer; step t has the observation and the reward t, and the row id t."""
    mine = ours.PrioritizedReplayBuffer(4, VECTOR, ACTIONS["box"], device="cpu", **options)
    for t in range(steps):
        obs = np.full((1, 3), t, np.float32)
        mine.add(obs, obs + 1, np.zeros((1, 2)), np.array([t]), np.array([False]), [{}])
    return mine


class TestPriorities:
    def test_draws_follow_the_priorities_and_weights_correct_for_them(self) -> None:
        mine = prioritized(alpha=1.0, beta=1.0, eps=0.0)
        mine.update_priorities(torch.arange(4), np.array([1.0, 2.0, 3.0, 4.0]))
        batch = mine.sample(20_000)
        share = torch.bincount(batch.rewards.squeeze(1).long()) / 20_000
        torch.testing.assert_close(share, torch.tensor([0.1, 0.2, 0.3, 0.4]), atol=0.02, rtol=0)
        torch.testing.assert_close(batch.weights, 1 / (batch.rewards + 1))

    def test_beta_follows_its_schedule(self) -> None:
        mine = prioritized(2, alpha=1.0, eps=0.0)
        mine.update_priorities(torch.arange(2), torch.tensor([1.0, 16.0]))
        for progress, beta in ((1.0, 0.4), (0.5, 0.7), (0.0, 1.0)):
            mine.progress_remaining = progress
            assert float(mine.sample(200).weights.min()) == pytest.approx(16**-beta, rel=1e-5)

    @pytest.mark.parametrize("algorithm", ["DQN", "SAC", "TD3"])
    def test_with_equal_priorities_the_updates_are_those_of_the_plain_algorithm(self, algorithm: str) -> None:
        env = "CartPole-v1" if algorithm == "DQN" else "Pendulum-v1"
        # Plain descent with large steps: Adam would hide the size of a loss.
        network = {"net_arch": [16], "optimizer_class": torch.optim.SGD}
        settings = {"seed": SEED, "device": "cpu", "learning_starts": 10_000, "policy_kwargs": network}
        settings["learning_rate"] = 0.05 if algorithm == "DQN" else 0.005
        mine = vars(ours)[f"Prioritized{algorithm}"]("MlpPolicy", env, replay_buffer_kwargs={"alpha": 0.0}, **settings)
        plain = vars(sb3)[algorithm]("MlpPolicy", env, replay_buffer_class=ours.PrioritizedReplayBuffer, **settings)
        mine.learn(80)
        plain._setup_learn(80)
        plain.replay_buffer = copy.deepcopy(mine.replay_buffer)
        plain.policy.load_state_dict(mine.policy.state_dict())
        for model in (mine, plain):
            torch.manual_seed(SEED)
            model._current_progress_remaining = 0.5
            model.train(gradient_steps=6, batch_size=32)
        for name, tensor in mine.policy.state_dict().items():
            torch.testing.assert_close(tensor, plain.policy.state_dict()[name], msg=name)

    @pytest.mark.parametrize("algorithm", ["DQN", "SAC", "TD3"])
    def test_rows_of_weight_zero_do_not_change_the_critic(
        self, algorithm: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        env = "CartPole-v1" if algorithm == "DQN" else "Pendulum-v1"
        model = vars(ours)[f"Prioritized{algorithm}"]("MlpPolicy", env, device="cpu", learning_starts=10_000).learn(50)
        draw, critic = model.replay_buffer.sample, model.q_net if algorithm == "DQN" else model.critic
        before = copy.deepcopy(critic.state_dict())
        weightless = lambda *args, **options: draw(*args, **options)._replace(weights=torch.zeros(16, 1))  # noqa: E731
        monkeypatch.setattr(model.replay_buffer, "sample", weightless)
        model.train(gradient_steps=2, batch_size=16)
        assert all(torch.equal(tensor, before[name]) for name, tensor in critic.state_dict().items())
        monkeypatch.undo()
        model.train(gradient_steps=2, batch_size=16)
        assert any(not torch.equal(tensor, before[name]) for name, tensor in critic.state_dict().items())

    @pytest.mark.parametrize("algorithm", select("DQN", of=["DQN", "SAC", "TD3"]))
    def test_training_sets_priorities_to_the_errors_of_rows(self, algorithm: str) -> None:
        env = "CartPole-v1" if algorithm == "DQN" else "Pendulum-v1"
        model = vars(ours)[f"Prioritized{algorithm}"]("MlpPolicy", env, seed=SEED, device="cpu", learning_starts=64)
        model.learn(160)
        assert model.replay_buffer.progress_remaining < 0.01
        assert 0 < model.replay_buffer.sample(64).weights.min() < 1

    def test_a_buffer_without_priorities_is_refused(self) -> None:
        model = ours.PrioritizedDQN("MlpPolicy", "CartPole-v1", learning_starts=2, buffer_size=100, device="cpu")
        file = io.BytesIO()
        sb3.DQN("MlpPolicy", "CartPole-v1", buffer_size=100, device="cpu").learn(2).save_replay_buffer(file)
        file.seek(0)
        model.load_replay_buffer(file)
        with pytest.raises(rl.SchemaError, match="expected a PrioritizedReplayBuffer, got a ReplayBuffer. Load one"):
            model.learn(8)

    @pytest.mark.parametrize("algorithm", select("DQN", of=["DQN", "SAC", "TD3"]))
    def test_an_algorithm_that_never_updates_priorities_gets_one_warning(self, algorithm: str) -> None:
        message = "PrioritizedReplayBuffer: expected update_priorities after sample, got 10 batches and no update.*Prio"
        with pytest.warns(rl.DataWarning, match=message) as said:
            off_policy(algorithm, replay_buffer_class=ours.PrioritizedReplayBuffer).learn(250)
        assert sum(issubclass(each.category, rl.DataWarning) for each in said) == 1

    def test_uniform_draws_and_late_updates_get_no_warning(self) -> None:
        for alpha, update in ((0.0, False), (0.6, True)):
            mine = prioritized(1, alpha=alpha)
            for i in range(30):
                batch = mine.sample(2)
                if update and i == 8:
                    mine.update_priorities(batch.indices, np.ones(2))

    def test_a_warning_that_is_an_error_draws_nothing(self) -> None:
        mine = prioritized()
        for _ in range(9):
            mine.sample(2)
        other = copy.deepcopy(mine)
        with pytest.raises(rl.DataWarning):
            mine.sample(3)
        for each in (mine, other):
            each.update_priorities(torch.arange(4), np.ones(4))
        assert torch.equal(mine.sample(20).indices, other.sample(20).indices)


ROLLOUTS = {"PPO": {"n_steps": 64, "n_epochs": 2}, "A2C": {}}
REPLAYS = ("DQN", "SAC", "TD3", "DDPG")


def off_policy(algorithm: str, env: Any = None, policy: str = "MlpPolicy", **options: Any) -> Any:
    env = env or ("CartPole-v1" if algorithm == "DQN" else "Pendulum-v1")
    settings = {"learning_starts": 100, "buffer_size": 1_000, "seed": SEED, "device": "cpu", "batch_size": 32}
    return vars(sb3)[algorithm](policy, env, policy_kwargs={"net_arch": [16]}, **settings, **options)


class TestTraining:
    @pytest.mark.parametrize("n_envs", [1, 3])
    @pytest.mark.parametrize("algorithm", ROLLOUTS)
    def test_on_policy_algorithms_train(self, algorithm: str, n_envs: int) -> None:
        env = VecNormalize(make_vec_env("Pendulum-v1", n_envs, seed=SEED))
        model = vars(sb3)[algorithm](
            "MlpPolicy", env, rollout_buffer_class=ours.RolloutBuffer, device="cpu", seed=SEED, **ROLLOUTS[algorithm]
        )
        before = copy.deepcopy(model.policy.state_dict())
        model.learn(64 * 3 * n_envs)
        assert any(not torch.equal(before[name], tensor) for name, tensor in model.policy.state_dict().items())

    @pytest.mark.parametrize("name", ["ReplayBuffer", "NStepReplayBuffer", "PrioritizedReplayBuffer"])
    @pytest.mark.parametrize("algorithm", REPLAYS)
    def test_off_policy_algorithms_train(self, algorithm: str, name: str) -> None:
        model = off_policy(algorithm, replay_buffer_class=vars(ours)[name])
        before = copy.deepcopy(model.policy.state_dict())
        # Stable-Baselines3's own algorithms never update priorities.
        warns = name == "PrioritizedReplayBuffer"
        with pytest.warns(rl.DataWarning, match="no update") if warns else nullcontext():
            model.learn(150)
        assert any(not torch.equal(before[key], tensor) for key, tensor in model.policy.state_dict().items())

    def test_the_same_seed_gives_the_same_training(self) -> None:
        first, second = (off_policy("DQN", replay_buffer_class=ours.ReplayBuffer).learn(200) for _ in range(2))
        for name, tensor in first.policy.state_dict().items():
            assert torch.equal(tensor, second.policy.state_dict()[name])

    def test_ppo_with_one_batch_per_epoch_learns_the_weights_of_the_original(self) -> None:
        learnt = []
        for owner in (theirs.RolloutBuffer, ours.RolloutBuffer):
            env = make_vec_env("CartPole-v1", 4, seed=SEED)
            settings = {"n_steps": 64, "batch_size": 256, "n_epochs": 4, "seed": SEED, "device": "cpu"}
            model = sb3.PPO("MlpPolicy", env, rollout_buffer_class=owner, **settings).learn(256)
            learnt.append(model.policy.state_dict())
        for name, tensor in learnt[0].items():
            torch.testing.assert_close(tensor, learnt[1][name], rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("algorithm", ["DQN", "SAC"])
    def test_off_policy_algorithms_train_with_several_normalised_environments(self, algorithm: str) -> None:
        env = VecNormalize(make_vec_env("CartPole-v1" if algorithm == "DQN" else "Pendulum-v1", 3, seed=SEED))
        model = off_policy(algorithm, env, replay_buffer_class=ours.NStepReplayBuffer).learn(300)
        raw = model.replay_buffer.observations.reshape(-1, *env.observation_space.shape)[:300]
        assert np.abs(raw).max() > 0
        batch = model.replay_buffer.sample(400, env)
        assert isinstance(batch, ReplayBufferSamples)
        assert float(batch.observations.std()) == pytest.approx(1.0, abs=0.5)

    def test_algorithms_train_on_dict_observations(self) -> None:
        env = make_flips(2, continuous=True)
        on = sb3.PPO("MultiInputPolicy", env, n_steps=32, rollout_buffer_class=ours.DictRolloutBuffer, device="cpu")
        on.learn(64)
        off = off_policy(
            "SAC", make_flips(2, continuous=True), "MultiInputPolicy", replay_buffer_class=ours.DictReplayBuffer
        )
        assert isinstance(off.learn(200).replay_buffer.sample(8), DictReplayBufferSamples)

    @pytest.mark.parametrize("algorithm", ["DQN", "SAC"])
    def test_hindsight_trains_and_is_saved_and_loaded(self, algorithm: str, tmp_path: Path) -> None:
        env = make_flips(2, continuous=algorithm == "SAC")
        options = {"replay_buffer_kwargs": {"n_sampled_goal": 2, "copy_info_dict": True}}
        model = off_policy(algorithm, env, "MultiInputPolicy", replay_buffer_class=ours.HerReplayBuffer, **options)
        model.learn(201)
        kept = model.replay_buffer.rewards
        model.save_replay_buffer(tmp_path / "replay")
        with pytest.warns(UserWarning, match="truncated: [12] environments have not ended it"):
            model.load_replay_buffer(tmp_path / "replay")
        np.testing.assert_array_equal(model.replay_buffer.rewards, kept)
        model.learn(100)
        with pytest.raises(rl.SchemaError, match="set_env: expected a buffer without an environment"):
            model.replay_buffer.set_env(env)

    def test_a_saved_replay_buffer_is_loaded_into_another_model(self, tmp_path: Path) -> None:
        model = off_policy("DQN", replay_buffer_class=ours.ReplayBuffer).learn(300)
        model.save(tmp_path / "model")
        model.save_replay_buffer(tmp_path / "replay")
        other = sb3.DQN.load(tmp_path / "model", env=model.get_env(), device="cpu")
        other.load_replay_buffer(tmp_path / "replay")
        assert isinstance(other.replay_buffer, ours.ReplayBuffer)
        assert_equal(other.replay_buffer.sample(64), model.replay_buffer.sample(64))
        other.learn(100, reset_num_timesteps=False)

    def test_a_model_that_the_original_saved_is_loaded_with_either_buffers(self, tmp_path: Path) -> None:
        env = make_vec_env("CartPole-v1", 2)
        sb3.PPO("MlpPolicy", env, n_steps=16, batch_size=16, device="cpu").save(tmp_path / "model")
        kept = ours.PPO.load(tmp_path / "model", env=env, device="cpu")
        changed = ours.PPO.load(
            tmp_path / "model", env=env, device="cpu", custom_objects={"rollout_buffer_class": None}
        )
        assert type(kept.learn(32).rollout_buffer) is theirs.RolloutBuffer
        assert type(changed.learn(32).rollout_buffer) is ours.RolloutBuffer

    def test_learning_again_with_optimize_memory_usage_cuts_the_last_episode(self) -> None:
        options: dict[str, Any] = {
            "replay_buffer_kwargs": {"handle_timeout_termination": False},
            "optimize_memory_usage": True,
        }
        model = off_policy("DQN", replay_buffer_class=ours.ReplayBuffer, **options).learn(50)
        assert not model.replay_buffer.dones[model.replay_buffer.pos - 1].any()
        with pytest.warns(UserWarning, match="The last trajectory in the replay buffer will be truncated"):
            model._setup_learn(50)
        assert model.replay_buffer.dones[model.replay_buffer.pos - 1].all()

    @pytest.mark.parametrize("name", ["PPO", "A2C", "DQN", "SAC", "TD3", "DDPG"])
    def test_algorithms_imported_here_choose_our_buffers(self, name: str) -> None:
        env = make_vec_env("CartPole-v1" if name == "DQN" else "Pendulum-v1", 2, seed=SEED)
        algorithm = vars(ours)[name]
        assert issubclass(algorithm, vars(sb3)[name])
        options = {"n_steps": 32} if name in ROLLOUTS else {"learning_starts": 50, "n_steps": 3, "gamma": 0.9}
        model = algorithm("MlpPolicy", env, device="cpu", policy_kwargs={"net_arch": [8]}, **options).learn(128)
        if name in ROLLOUTS:
            assert type(model.rollout_buffer) is ours.RolloutBuffer
        else:
            assert type(model.replay_buffer) is ours.NStepReplayBuffer
            assert (model.replay_buffer.n_steps, model.replay_buffer.gamma, model.n_steps) == (3, 0.9, 3)


class TestModules:
    def test_every_public_name_has_the_path_of_the_original(self) -> None:
        for module in ("common.buffers", "her"):
            mine = importlib.import_module(f"relive.compat.stable_baselines3.{module}")
            other = importlib.import_module(f"stable_baselines3.{module}")
            names = getattr(other, "__all__", None) or [
                name for name, value in vars(other).items() if getattr(value, "__module__", None) == other.__name__
            ]
            assert names
            assert all(hasattr(mine, name) for name in names)
