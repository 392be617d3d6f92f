"""On-policy cases that buffers get wrong, with the numbers of `relive conformance`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st

import relive as rl
from tests.reference.estimators import gae as reference_gae
from tests.scripted import Script, Scripted, ScriptedDict, Transition, act, critic, step_and_reset, transitions, vector

MODES = list(AutoresetMode)
ends = st.sampled_from(["terminated", "truncated", "both"])
scripts = st.lists(st.tuples(st.integers(1, 5), ends), min_size=1, max_size=3).map(tuple)


def collect(envs: Any, num_steps: int, **options: Any) -> rl.RolloutBuffer:
    """Return one rollout of a vector environment, with advantages."""
    rollout = rl.RolloutBuffer.for_env(envs, num_steps, **options)
    obs, _ = envs.reset(seed=0)
    for _ in range(num_steps):
        action = act(obs)
        step, next_obs = step_and_reset(envs, action)
        rollout.add_step(obs, action, step, value=critic(obs), log_prob=np.zeros(len(obs)))
        obs = next_obs
    final = critic(rollout.final_obs.numpy())
    rollout.compute_advantage(critic(obs), final_value=final, gamma=0.9, lam=0.8)
    rollout.check()
    return rollout


def valid_steps(rollout: rl.RolloutBuffer, env: int) -> list[dict[str, Any]]:
    """Return the valid rows of one environment, in time order."""
    data = rollout.data[:, env]
    return [{str(key): data[key][t] for key in data.keys()} for t in range(len(data)) if data["mask"][t]]


def assert_same(row: dict[str, Any], expected: Transition) -> None:
    assert tuple(row["obs"].tolist()) == expected.obs
    assert int(row["action"]) == expected.action
    assert float(row["reward"]) == expected.reward
    assert (bool(row["terminated"]), bool(row["truncated"])) == (expected.terminated, expected.truncated)


def expected_advantage(found: list[Transition]) -> torch.Tensor:
    """Return the reference advantages of one environment's true transitions; exact for ended episodes."""
    column = {
        "reward": [t.reward for t in found],
        "value": [critic(np.array(t.obs)).item() for t in found],
        "next_value": [critic(np.array(t.next_obs)).item() for t in found],
        "terminated": [t.terminated for t in found],
        "truncated": [t.truncated for t in found],
        "mask": [True] * len(found),
    }
    return torch.tensor(reference_gae(column, gamma=0.9, lam=0.8)[0], dtype=torch.float64)


def valid_rows(script: Script, num_steps: int, mode: AutoresetMode) -> int:
    """Return the number of transitions in `num_steps` steps: under NEXT_STEP each end before the last adds a reset."""
    if mode is not AutoresetMode.NEXT_STEP:
        return num_steps
    is_reset: list[bool] = []
    for transition in transitions(0, script, num_steps):
        is_reset.append(False)
        if transition.terminated or transition.truncated:
            is_reset.append(True)
    return is_reset[:num_steps].count(False)


def test_t1_an_end_inside_belongs_to_its_own_step(backend: str) -> None:
    rollout = rl.RolloutBuffer(3, None, obs=1, action=())
    for value, terminated in zip([0.0, 0.0, 10.0], [False, True, False], strict=True):
        rollout.add([0.0], 0.0, 1.0, terminated, False, value=value)
    rollout.compute_advantage(0.0, gamma=1.0, lam=1.0)
    assert rollout["return"].tolist() == [2.0, 1.0, 1.0]


def test_t2_a_truncated_step_bootstraps_from_its_true_final_value_and_cuts_the_chain(backend: str) -> None:
    rollout = rl.RolloutBuffer(3, None, obs=1, action=())
    for t, truncated in enumerate([False, True, False]):
        final_obs = [50.0] if truncated else None
        rollout.add([float(t)], 0.0, 1.0, False, truncated, value=[0.0, 0.0, 10.0][t], final_obs=final_obs)
    assert rollout.final_obs.tolist() == [[50.0]]
    rollout.compute_advantage(0.0, final_value=[5.0], gamma=1.0, lam=1.0)
    assert rollout["return"].tolist() == [1 + 1 + 5.0, 1 + 5.0, 1.0]


@settings(max_examples=25, deadline=None)
@given(script=st.lists(scripts, min_size=1, max_size=3), num_steps=st.integers(1, 12), mode=st.sampled_from(MODES))
def test_t3_every_autoreset_mode_gives_the_transitions_of_the_bare_environment(
    script: list[Script], num_steps: int, mode: AutoresetMode
) -> None:
    rollout = collect(vector(script, mode), num_steps)
    total = 0
    for env, episodes in enumerate(script):
        rows = valid_steps(rollout, env)
        expected = transitions(env, episodes, num_steps)[: len(rows)]
        advantage = expected_advantage(expected)
        finished = max((i + 1 for i, t in enumerate(expected) if t.terminated or t.truncated), default=0)
        for i, (row, transition) in enumerate(zip(rows, expected, strict=True)):
            assert_same(row, transition)
            if i < finished:
                torch.testing.assert_close(row["advantage"].double(), advantage[i], rtol=1e-5, atol=1e-4)
        assert len(rows) == valid_rows(episodes, num_steps, mode)
        total += len(rows)
    assert len(rollout) == total
    assert sum(len(batch) for batch in rollout.minibatches(4)) == total
    assert torch.equal(rollout["advantage"][~rollout["mask"]], torch.zeros(int((~rollout["mask"]).sum())))


@pytest.mark.parametrize("mode", MODES)
def test_t3_the_last_step_of_a_rollout_may_be_the_truncated_one(mode: AutoresetMode) -> None:
    rollout = collect(vector([((3, "truncated"),)], mode), 3)
    expected = transitions(0, ((3, "truncated"),), 3)
    torch.testing.assert_close(rollout["advantage"][:, 0].double(), expected_advantage(expected), rtol=1e-6, atol=1e-5)


def test_t3_a_rollout_that_starts_with_a_pending_reset_masks_its_first_row() -> None:
    envs = vector([((3, "truncated"),)], AutoresetMode.NEXT_STEP)
    rollout = rl.RolloutBuffer.for_env(envs, 3)
    obs, _ = envs.reset()
    for expected in ([True] * 3, [False, True, True], [True, False, True]):
        rollout.clear()
        for _ in range(3):
            step, next_obs = step_and_reset(envs, act(obs))
            rollout.add_step(obs, act(obs), step)
            obs = next_obs
        assert rollout["mask"][:, 0].tolist() == expected
        assert len(rollout) == sum(expected)


def test_t3_an_environment_reset_by_hand_between_rollouts_has_no_pending_reset() -> None:
    envs = vector([((2, "terminated"),)], AutoresetMode.NEXT_STEP)
    rollout = rl.RolloutBuffer.for_env(envs, 2)
    for _ in range(2):
        obs, _ = envs.reset()
        rollout.clear(restarted=True)
        for _ in range(2):
            step, next_obs = step_and_reset(envs, act(obs))
            rollout.add_step(obs, act(obs), step)
            obs = next_obs
        assert rollout["mask"].all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
def test_t3_dict_observations_keep_their_final_observation(mode: AutoresetMode, kind: Callable[..., Any]) -> None:
    script: Script = ((2, "truncated"), (3, "terminated"))
    envs = kind([lambda n=n: ScriptedDict(Scripted(n, script)) for n in range(2)], autoreset_mode=mode)
    rollout = rl.RolloutBuffer.for_env(envs, 6)
    obs, _ = envs.reset()
    for _ in range(6):
        action = act(obs["state"])
        step = envs.step(action)
        rollout.add_step(obs, action, step, value=critic(obs["state"]))
        obs = step[0]
        if mode is AutoresetMode.DISABLED and (step[2] | step[3]).any():
            obs, _ = envs.reset(options={"reset_mask": step[2] | step[3]})
    envs.close()
    final = rollout.final_obs
    if mode is AutoresetMode.NEXT_STEP:
        assert final.batch_size == torch.Size([0])
    else:
        assert final["state"].tolist() == [[0, 0, 2], [1, 0, 2]]
        assert final["pair", "1"].dtype == torch.uint8
        assert final["pair", "1"].flatten().tolist() == final["state"][:, 2].tolist()
    for env in range(2):
        rows = [rollout.data[t, env] for t in range(6) if rollout["mask"][t, env]]
        expected = transitions(env, script, len(rows))
        assert [tuple(row["obs", "state"].tolist()) for row in rows] == [t.obs for t in expected]
        assert [row["obs", "pair", "0"].item() for row in rows] == [int(t.obs[1]) for t in expected]


def test_t20_the_seed_decides_the_order_and_no_global_generator_is_touched(backend: str) -> None:
    def order(seed: int | None) -> list[int]:
        rollout = rl.RolloutBuffer(50, 2, obs=1, action=(), seed=seed)
        for _ in range(50):
            rollout.add(np.zeros((2, 1)), np.zeros(2), np.zeros(2), np.zeros(2, bool), np.zeros(2, bool))
        return [i for batch in rollout.minibatches(7, epochs=2) for i in batch["index"].tolist()]

    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state(legacy=False)["state"]["key"]  # noqa: NPY002 (looked at, not used)
    first = order(3)
    assert first == order(3)
    assert first != order(4)
    assert order(None) != order(None)
    assert first[:100] != first[100:]
    assert sorted(first[:100]) == list(range(100))
    assert torch.equal(torch_state, torch.get_rng_state())
    assert np.array_equal(numpy_state, np.random.get_state(legacy=False)["state"]["key"])  # noqa: NPY002


def test_t21_inputs_and_batches_are_copies(backend: str) -> None:
    rollout = rl.RolloutBuffer(2, 2, obs=1, action=(), seed=0)
    obs = np.ones((2, 1), np.float32)
    final = np.ones((2, 1), np.float32)
    for _ in range(2):
        rollout.add(
            obs, np.zeros(2), np.zeros(2), np.zeros(2, bool), np.ones(2, bool), value=torch.zeros(2), final_obs=final
        )
    obs[:], final[:] = 7, 7
    tag = torch.ones(2, 2)
    rollout.attach(tag=tag)
    tag[:] = 7
    for batch in rollout.minibatches(2):
        batch["obs"][:] = 9
        batch["tag"][:] = 9
    rollout.final_obs[:] = 9
    assert rollout["obs"].tolist() == [[[1.0], [1.0]]] * 2
    assert rollout["tag"].tolist() == [[1.0, 1.0]] * 2
    assert rollout.final_obs.tolist() == [[1.0]] * 4


def test_t22_uint8_stays_uint8_float64_rewards_are_accepted_float_into_integers_is_refused(backend: str) -> None:
    space = gym.spaces.Box(0, 255, (2, 2), np.uint8)
    rollout = rl.RolloutBuffer(1, 1, obs=space, action=gym.spaces.Discrete(3))
    flags = np.zeros(1, bool)
    with pytest.raises(rl.SchemaError, match="obs: expected uint8, got float32"):
        rollout.add(np.zeros((1, 2, 2), np.float32), np.zeros(1, int), np.zeros(1), flags, flags)
    with pytest.raises(rl.SchemaError, match="action: expected int64, got float32"):
        rollout.add(np.zeros((1, 2, 2), np.uint8), np.zeros(1, np.float32), np.zeros(1), flags, flags)
    with pytest.raises(rl.SchemaError, match="terminated: expected bool, got float64"):
        rollout.add(np.zeros((1, 2, 2), np.uint8), np.zeros(1, int), np.zeros(1), np.zeros(1), flags)
    rollout.add(np.full((1, 2, 2), 200, np.uint8), np.zeros(1, int), np.full(1, 0.1, np.float64), flags, flags)
    batch = next(rollout.minibatches(1))
    assert batch["obs"].dtype == torch.uint8
    assert batch["obs"].flatten().tolist() == [200] * 4
    assert batch["reward"].dtype == torch.float32
    assert batch["reward"].item() == np.float32(0.1)


@pytest.mark.parametrize("mode", MODES)
def test_t25_an_end_affects_only_its_own_environment(mode: AutoresetMode) -> None:
    together = collect(vector([((2, "terminated"),), ((5, "truncated"),), ((100, "terminated"),)], mode), 8)
    for env, script in enumerate([((2, "terminated"),), ((5, "truncated"),), ((100, "terminated"),)]):
        rows = valid_steps(together, env)
        for row, expected in zip(rows, transitions(env, script, len(rows)), strict=True):
            assert_same(row, expected)


SHAPES = {
    "reward a column": {"reward": np.zeros((8, 1))},
    "reward a number": {"reward": 0.0},
    "reward of one": {"reward": np.zeros(1)},
    "obs of one environment": {"obs": np.zeros(3)},
    "obs broadcastable": {"obs": np.zeros((1, 3))},
    "obs transposed": {"obs": np.zeros((3, 8))},
    "action a scalar": {"action": 0},
    "action with an axis": {"action": np.zeros((8, 1), int)},
    "flag a bool": {"terminated": False},
    "value a column": {"value": np.zeros((8, 1))},
    "too many environments": {"log_prob": np.zeros(9)},
}


@pytest.mark.parametrize("wrong", SHAPES.values(), ids=SHAPES)
def test_t27_t28_a_broadcastable_wrong_shape_is_refused_and_nothing_changes(
    backend: str, wrong: dict[str, Any]
) -> None:
    rollout = rl.RolloutBuffer(2, 8, obs=3, action=gym.spaces.Discrete(2))
    good: dict[str, Any] = {
        "obs": np.ones((8, 3)),
        "action": np.ones(8, int),
        "reward": np.ones(8),
        "terminated": np.ones(8, bool),
        "truncated": np.ones(8, bool),
        "value": np.ones(8),
        "log_prob": np.ones(8),
    }
    rollout.add(**good)
    before = rollout.data.clone()
    (name,) = wrong
    with pytest.raises(rl.SchemaError, match=f"^{name}: expected shape .*, got .*\\. [A-Z].*\\.$"):
        rollout.add(**{**good, **wrong})
    assert len(rollout) == 8
    assert rollout.num_stored == 1
    assert (rollout.data == before).all()
    rollout.add(**good)
    assert torch.equal(rollout["obs"], torch.ones(2, 8, 3))
