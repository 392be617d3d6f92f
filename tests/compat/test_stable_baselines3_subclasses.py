# pyright: reportMissingImports=false, reportIncompatibleMethodOverride=false
"""Buffers that users wrote against Stable-Baselines3's classes, with our classes as their bases."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from gymnasium import spaces

pytest.importorskip("stable_baselines3", reason="needs Stable-Baselines3: pip install '.[sb3]'")

import relive as rl
from relive.compat import stable_baselines3 as ours
from tests.compat.test_stable_baselines3 import (
    ACTIONS,
    BOTH,
    OBSERVATIONS,
    SEED,
    assert_equal,
    make_flips,
    make_steps,
    samples_at,
)

N_ENVS, LENGTH = 2, 24


def fill_rollout(kind: Any, obs: str) -> Any:
    """Return a full rollout of a class, with advantages."""
    buffer = kind(LENGTH, OBSERVATIONS[obs], ACTIONS["box"], device="cpu", n_envs=N_ENVS, gae_lambda=0.9)
    torch.manual_seed(SEED)
    started = np.ones(N_ENVS, np.bool_)
    for state, _, chosen, reward, done, _ in make_steps(OBSERVATIONS[obs], ACTIONS["box"], N_ENVS, LENGTH):
        buffer.add(copy.deepcopy(state), chosen, reward, started, torch.randn(N_ENVS, 1), torch.randn(N_ENVS))
        started = done
    buffer.compute_returns_and_advantage(torch.zeros(N_ENVS), started)
    return buffer


def subclass_with_own_samples(base: Any) -> Any:
    """Return a subclass that changes the actions of its batches."""

    class Doubled(base):
        def _get_samples(self, batch_inds: np.ndarray, env: Any = None) -> Any:
            samples = super()._get_samples(batch_inds, env)
            return samples._replace(actions=samples.actions * 2)

    return Doubled


def subclass_with_own_arrays(base: Any) -> Any:
    """Return a subclass that stores costs, too, and makes its batches with a loop over all arrays."""

    class Costs(base):
        def reset(self) -> None:
            self.costs = np.zeros((self.buffer_size, self.n_envs), np.float32)
            super().reset()

        def add(self, obs: Any, action: Any, reward: Any, *rest: Any) -> None:
            self.costs[self.pos] = reward * 10
            super().add(obs, action, reward, *rest)

        def get(self, batch_size: int | None = None) -> Any:
            count = self.buffer_size * self.n_envs
            numbers = np.random.default_rng(SEED).permutation(count)
            if not self.generator_ready:
                for name in ("observations", "actions", "values", "log_probs", "advantages", "returns", "costs"):
                    self.__dict__[name] = self.swap_and_flatten(self.__dict__[name])
                self.generator_ready = True
            for start in range(0, count, batch_size or count):
                part = numbers[start : start + (batch_size or count)]
                yield self._get_samples(part), self.to_torch(self.costs[part].flatten())

    return Costs


@pytest.mark.parametrize("obs", ["vector", "dict"])
def test_rollout_batches_pass_through_the_get_samples_of_a_subclass(obs: str) -> None:
    name = "DictRolloutBuffer" if obs == "dict" else "RolloutBuffer"
    numbers = np.random.default_rng(SEED).permutation(LENGTH * N_ENVS)
    found = []
    for base in (BOTH[name], vars(ours)[name]):
        buffer = fill_rollout(subclass_with_own_samples(base), obs)
        with mock.patch.object(np.random, "permutation", return_value=numbers):
            found.append(list(buffer.get(7)))
    assert_equal(tuple(found[1]), tuple(found[0]))


def test_a_subclass_with_its_own_loop_and_arrays_learns_rollout_after_rollout() -> None:
    found = []
    for base in (BOTH["RolloutBuffer"], ours.RolloutBuffer):
        buffer = fill_rollout(subclass_with_own_arrays(base), "vector")
        batches = list(buffer.get(7))
        buffer.reset()
        assert buffer.observations.shape == (LENGTH, N_ENVS, 3)
        for state, _, chosen, reward, done, _ in make_steps(OBSERVATIONS["vector"], ACTIONS["box"], N_ENVS, LENGTH):
            buffer.add(state, chosen, -reward, done, torch.ones(N_ENVS, 1), torch.ones(N_ENVS))
        buffer.compute_returns_and_advantage(torch.zeros(N_ENVS), np.zeros(N_ENVS, np.bool_))
        found.append((*batches, *buffer.get(7)))
    assert_equal(found[1], found[0])


def fill_replay(kind: Any, obs: Any, count: int, size: int = 40, **options: Any) -> Any:
    """Return a replay buffer of a class with `count` steps."""
    buffer = kind(size, obs, ACTIONS["box"], device="cpu", n_envs=N_ENVS, **options)
    for step in make_steps(obs, ACTIONS["box"], N_ENVS, count):
        buffer.add(*copy.deepcopy(step))
    return buffer


@pytest.mark.parametrize("options", [{}, {"optimize_memory_usage": True, "handle_timeout_termination": False}])
def test_replay_batches_pass_through_the_get_samples_of_a_subclass(options: dict[str, Any]) -> None:
    buffer = fill_replay(subclass_with_own_samples(ours.ReplayBuffer), OBSERVATIONS["vector"], 50, **options)
    stored = {tuple(action) for action in (buffer.actions * 2).reshape(-1, 2).tolist()}
    assert {tuple(action) for action in buffer.sample(300).actions.tolist()} <= stored
    assert len(buffer.sample(300).actions.unique(dim=0)) > 0.9 * buffer.size() * N_ENVS


def test_a_subclass_that_reads_the_arrays_has_them_at_every_position_whatever_the_observations() -> None:
    class Read(ours.ReplayBuffer):
        def _get_samples(self, batch_inds: np.ndarray, env: Any = None) -> Any:
            return self.observations[batch_inds], self.next_observations[batch_inds]

    image = spaces.Box(0, 255, (3, 20, 20), np.uint8)
    buffer = fill_replay(Read, image, 50)
    assert np.shares_memory(buffer.observations, buffer.observations)
    obs, after = buffer.sample(30)
    assert obs.any(axis=(1, 2, 3, 4)).all()
    assert after.any(axis=(1, 2, 3, 4)).all()


def test_a_subclass_may_write_the_arrays_itself() -> None:
    class Written(ours.ReplayBuffer):
        def add(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: Any) -> None:
            self.observations[self.pos], self.next_observations[self.pos] = obs, next_obs
            self.actions[self.pos], self.rewards[self.pos], self.dones[self.pos] = action, reward, done
            self.pos = (self.pos + 1) % self.buffer_size
            self.full = self.full or self.pos == 0

    for count in (5, 50):
        buffer = fill_replay(Written, OBSERVATIONS["vector"], count)
        plain = fill_replay(ours.ReplayBuffer, OBSERVATIONS["vector"], count, handle_timeout_termination=False)
        twin = copy.deepcopy(buffer)
        assert buffer.size() == plain.size() == twin.size() == min(count, 20)
        positions = np.arange(buffer.size())
        envs = np.random.default_rng(SEED).integers(N_ENVS, size=len(positions))
        with mock.patch.object(np.random, "randint", return_value=envs):
            assert_equal(buffer._get_samples(positions), samples_at(plain, positions))
        assert set(twin.sample(2000).rewards.flatten().tolist()) == set(
            buffer.rewards[: len(positions)].flatten().tolist()
        )


@pytest.mark.parametrize("position", [0, 4])
def test_steps_are_added_at_the_position_that_a_user_has_set(position: int) -> None:
    found = []
    for base in (BOTH["ReplayBuffer"], ours.ReplayBuffer):
        buffer = fill_replay(base, OBSERVATIONS["vector"], 2)
        buffer.rewards[:4] = 7
        buffer.pos = position
        for step in make_steps(OBSERVATIONS["vector"], ACTIONS["box"], N_ENVS, 18):
            buffer.add(*copy.deepcopy(step))
        found.append((buffer.rewards.copy(), buffer.observations.copy(), buffer.pos, buffer.full))
        drawn = set(buffer.sample(2000).rewards.flatten().tolist())
        assert drawn == set(buffer.rewards[: buffer.size()].flatten().tolist())
    assert_equal(found[1], found[0])


@pytest.mark.parametrize("count", [1, 5, 20, 30])
def test_subclasses_that_read_next_observations_at_the_next_position_draw_the_same_transitions(
    count: int,
) -> None:
    drawn = []
    for base in (BOTH["ReplayBuffer"], ours.ReplayBuffer):
        buffer = fill_with_counted_steps(subclass_that_reads_shared_positions(base), 40, count)
        obs, after = buffer.sample(2000)
        assert np.array_equal(after, obs + 1)
        drawn.append(np.unique(obs).tolist())
    assert drawn[1] == drawn[0] == list(range(max(0, count - 19), count))


def test_sampling_from_a_single_shared_position_raises() -> None:
    for base in (BOTH["ReplayBuffer"], ours.ReplayBuffer):
        buffer = fill_with_counted_steps(subclass_that_reads_shared_positions(base), N_ENVS, 1)
        with pytest.raises(ValueError, match="low >= high|high <= 0"):
            buffer.sample(1)


def test_optimize_memory_usage_refuses_stored_next_observations() -> None:
    with pytest.raises(rl.SchemaError, match='"shared" with n_stack or optimize_memory_usage, got "stored"'):
        fill_with_counted_steps(ours.ReplayBuffer, 40, 0, next_obs="stored")


def subclass_that_reads_shared_positions(base: Any) -> Any:
    """Return a subclass that reads next observations at the next position, as with `optimize_memory_usage`."""

    class Read(base):
        def _get_samples(self, batch_inds: np.ndarray, env: Any = None) -> Any:
            return self.observations[batch_inds], self.observations[(batch_inds + 1) % self.buffer_size]

    return Read


def fill_with_counted_steps(kind: Any, size: int, count: int, **options: Any) -> Any:
    """Return a buffer with `optimize_memory_usage` whose observations count the steps."""
    options |= {"optimize_memory_usage": True, "handle_timeout_termination": False}
    counted = spaces.Box(0, 100, (1,), np.float32)
    buffer = kind(size, counted, ACTIONS["box"], device="cpu", n_envs=N_ENVS, **options)
    for t in range(count):
        obs, never = np.full((N_ENVS, 1), t, np.float32), np.zeros(N_ENVS, np.bool_)
        buffer.add(obs, obs + 1, np.zeros((N_ENVS, 2), np.float32), np.zeros(N_ENVS), never, [{}] * N_ENVS)
    return buffer


@pytest.mark.parametrize("name", ["to_torch", "_normalize_reward"])
def test_a_conversion_of_a_subclass_is_used(name: str) -> None:
    def doubled(*args: Any) -> Any:
        return 2 * getattr(ours.ReplayBuffer, name)(*args)

    kind = type("Converted", (ours.ReplayBuffer,), {name: doubled if name == "to_torch" else staticmethod(doubled)})
    buffer = fill_replay(kind, OBSERVATIONS["vector"], 20)
    # Stable-Baselines3's code reads all arrays, so that large observations are stored twice, too.
    large = kind(40, spaces.Box(0, 255, (40, 40), np.uint8), ACTIONS["box"])
    assert np.shares_memory(large.observations, large.observations)
    rewards = {round(2 * reward, 4) for reward in buffer.rewards.flatten().tolist()}
    assert {round(reward, 4) for reward in buffer.sample(50).rewards.flatten().tolist()} <= rewards


def fill_hindsight(kind: Any) -> Any:
    """Return a hindsight buffer of a class, whose goals are ones."""
    env = make_flips(N_ENVS, continuous=True)
    buffer = kind(200, env.observation_space, env.action_space, env, n_envs=N_ENVS, device="cpu")
    add_hindsight_steps(buffer, env)
    return buffer


def add_hindsight_steps(buffer: Any, env: Any) -> None:
    """Reset the environment and add steps."""
    env.seed(SEED)
    env.action_space.seed(SEED)
    obs: Any = env.reset()
    for _ in range(22):
        action = np.array([env.action_space.sample() for _ in range(N_ENVS)])
        after, reward, done, infos = env.step(action)
        buffer.add(obs, after, action, reward, done, infos)
        obs = after


def subclass_with_own_goals(base: Any) -> Any:
    """Return a subclass that overrides `_sample_goals`."""

    class Own(base):
        def _sample_goals(self, batch_indices: np.ndarray, env_indices: np.ndarray) -> np.ndarray:
            return super()._sample_goals(batch_indices, env_indices)

    return Own


@pytest.mark.parametrize("name", ["to_torch", "_get_samples"])
def test_goals_are_relabelled_whichever_method_a_subclass_overrides(name: str) -> None:
    calls = []

    def counted(*args: Any) -> Any:
        calls.append(args)
        return getattr(ours.HerReplayBuffer, name)(*args)

    buffer = fill_hindsight(type("Changed", (ours.HerReplayBuffer,), {name: counted}))
    goals = buffer.sample(100).observations["desired_goal"]
    assert (goals != 1).any(1).float().mean() > 0.3
    # Stable-Baselines3's `sample` does not call `_get_samples`.
    assert bool(calls) == (name == "to_torch")


def test_goals_come_from_the_sample_goals_of_a_subclass() -> None:
    class Zero(ours.HerReplayBuffer):
        def _sample_goals(self, batch_indices: np.ndarray, env_indices: np.ndarray) -> np.ndarray:
            return np.full_like(self.next_observations["achieved_goal"][batch_indices, env_indices], 7)

    buffer = fill_hindsight(Zero)
    goals = buffer.sample(50).observations["desired_goal"]
    assert (goals == 7).all(1).sum() == 40
    with pytest.warns(UserWarning, match="The last trajectory in the replay buffer will be truncated"):
        buffer.truncate_last_trajectory()
    assert buffer.dones[buffer.pos - 1].all()


@pytest.mark.parametrize("position", [3, 40])
def test_hindsight_tracks_episodes_after_a_user_has_set_the_position(position: int) -> None:
    found = []
    for base in (BOTH["HerReplayBuffer"], ours.HerReplayBuffer):
        buffer = fill_hindsight(subclass_with_own_goals(base))
        buffer.pos = position
        buffer._current_ep_start[:] = position
        add_hindsight_steps(buffer, make_flips(N_ENVS, continuous=True))
        assert (buffer.sample(100).observations["desired_goal"] != 1).any(1).float().mean() > 0.3
        with pytest.warns(UserWarning, match="The last trajectory in the replay buffer will be truncated"):
            buffer.truncate_last_trajectory()
        found.append((buffer.ep_start, buffer.ep_length, buffer._current_ep_start, buffer.dones, buffer.timeouts))
    assert_equal(found[1], found[0])


def test_goals_are_relabelled_after_a_user_has_set_the_position() -> None:
    buffer = fill_hindsight(ours.HerReplayBuffer)
    buffer.pos -= 1
    assert (buffer.sample(100).observations["desired_goal"] != 1).any(1).float().mean() > 0.3


@pytest.mark.parametrize("name", ["to_torch", "_get_samples"])
def test_a_prioritized_buffer_is_not_silently_drawn_uniformly(name: str) -> None:
    kind = type("Own", (ours.PrioritizedReplayBuffer,), {name: lambda self, *_: None})
    with pytest.raises(rl.SchemaError, match="without its own _get_samples and conversions, got Own. Override sample"):
        kind(8, OBSERVATIONS["vector"], ACTIONS["box"], device="cpu")


def subclass_that_replaces_arrays(base: Any) -> Any:
    """Return a subclass that replaces the dict of arrays in `reset`, and arrays in `add`."""

    class Remade(base):
        def reset(self) -> None:
            super().reset()
            self.observations = {}
            for key, shape in self.obs_shape.items():
                self.observations[key] = np.zeros((self.buffer_size, self.n_envs, *shape), np.float32)

        def add(self, obs: Any, action: Any, *rest: Any) -> None:
            super().add(obs, action, *rest)
            if self.full:
                self.observations["vector"] = self.observations["vector"] * 10
                self.observations |= {"image": self.observations["image"] // 2}

    return Remade


def test_arrays_that_users_put_into_the_dict_of_a_rollout_are_in_its_batches() -> None:
    found = []
    for kind in (BOTH["DictRolloutBuffer"], ours.DictRolloutBuffer):
        buffer = fill_rollout(subclass_that_replaces_arrays(kind), "dict")
        batches = [batch.observations for batch in buffer.get(7)]
        rows = torch.cat([torch.cat([batch["vector"], batch["image"].flatten(1)], 1) for batch in batches])
        found.append(sorted(map(tuple, rows.tolist())))
    assert found[0] == found[1]
    copied = copy.deepcopy(buffer)
    assert copied.observations["vector"].shape == (LENGTH, N_ENVS, 3)


def fill_with_counted_rewards(kind: Any, length: int, obs: str = "vector", **options: Any) -> Any:
    """Return a replay buffer with `length` steps, whose rewards count from 1."""
    buffer = kind(10, OBSERVATIONS[obs], ACTIONS["box"], device="cpu", handle_timeout_termination=True, **options)
    for t, (state, after, chosen, _, _, infos) in enumerate(make_steps(OBSERVATIONS[obs], ACTIONS["box"], 1, length)):
        buffer.add(state, after, chosen, np.full(1, t + 1.0), np.zeros(1, np.bool_), infos)
    return buffer


def test_assignments_to_a_dict_of_arrays_are_sampled_or_refused() -> None:
    found = []
    for kind in (BOTH["DictReplayBuffer"], ours.DictReplayBuffer):
        buffer = fill_with_counted_rewards(kind, 4, "dict")
        buffer.observations["vector"] = buffer.observations["vector"] * 10
        buffer.next_observations.update(image=buffer.next_observations["image"] // 2)
        found.append(buffer._get_samples(np.arange(4)))
    assert_equal(found[1], found[0])
    with pytest.raises(rl.SchemaError, match="expected numbers of uint8, got others, of float64"):
        buffer.observations["image"] = buffer.observations["image"] * 1.5
    shared = fill_with_counted_rewards(ours.DictReplayBuffer, 4, "dict", next_obs="shared")
    with pytest.raises(rl.SchemaError, match="neighbouring steps share observations"):
        shared.observations["vector"] = shared.observations["vector"] + 1


def test_positions_after_a_pos_that_a_user_has_decreased_are_not_sampled() -> None:
    for options in ({"next_obs": "shared"}, {}):
        buffer = fill_with_counted_rewards(ours.ReplayBuffer, 4, **options)
        buffer.pos = 2
        assert buffer.size() == 2
        assert set(buffer.sample(50).rewards.flatten().tolist()) == {1.0, 2.0}
        buffer.pos = 0
        with pytest.raises(ValueError, match="high <= 0"):
            buffer.sample(1)
    prioritized = fill_with_counted_rewards(ours.PrioritizedReplayBuffer, 4)
    prioritized.pos = 2
    with pytest.raises(rl.SchemaError, match="steps that were all added with add"):
        prioritized.sample(1)


def test_an_overwritten_timeout_does_not_mark_the_new_step() -> None:
    found = []
    for kind in (BOTH["ReplayBuffer"], ours.ReplayBuffer):
        buffer = kind(6, OBSERVATIONS["vector"], ACTIONS["box"], device="cpu")
        (state, after, chosen, reward, _, _), *_ = make_steps(OBSERVATIONS["vector"], ACTIONS["box"], 1, 1)
        for pos, is_timeout in ((3, True), (0, False), (1, False), (2, False), (3, False)):
            buffer.pos = pos
            buffer.add(state, after, chosen, reward, np.ones(1, np.bool_), [{"TimeLimit.truncated": is_timeout}])
        found.append(buffer._get_samples(np.arange(4)).dones.flatten().tolist())
    assert found == [[1.0] * 4] * 2
