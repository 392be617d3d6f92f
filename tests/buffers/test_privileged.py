"""Asymmetric actor-critic: the critic has privileged observations, of the next state too, in both buffers."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import relive as rl
from tests.conformance.test_on_policy import expected_advantage
from tests.scripted import Script, Scripted, critic, transitions

SCRIPTS: list[Script] = [((3, "truncated"), (2, "terminated")), ((4, "truncated"),)]
STEPS = 11
every_mode = pytest.mark.parametrize("mode", list(AutoresetMode))


class Asymmetric(gym.ObservationWrapper[dict[str, Any], Any, np.ndarray]):
    """An environment with the step as the policy's observation; the critic also observes environment and episode."""

    def __init__(self, env: Scripted) -> None:
        super().__init__(env)
        sizes = {"policy": 1, "critic": 3}
        self.observation_space = gym.spaces.Dict(
            {name: gym.spaces.Box(-np.inf, np.inf, (size,), np.float32) for name, size in sizes.items()}
        )

    def observation(self, observation: np.ndarray) -> dict[str, Any]:
        return {"policy": observation[2:], "critic": observation}


def act(obs: dict[str, np.ndarray]) -> np.ndarray:
    return obs["policy"][:, 0].astype(np.int64)


def make(mode: AutoresetMode) -> SyncVectorEnv:
    makers = [lambda n=n, script=script: Asymmetric(Scripted(n, script)) for n, script in enumerate(SCRIPTS)]
    return SyncVectorEnv(makers, autoreset_mode=mode)


def play(envs: SyncVectorEnv, buffer: Any, **values: Any) -> dict[str, np.ndarray]:
    """Fill a buffer; `values` are functions of the observation."""
    obs, _ = envs.reset()
    for _ in range(STEPS):
        step = deepcopy(envs.step(act(obs)))
        buffer.add_step(obs, act(obs), step, **{name: fn(obs) for name, fn in values.items()})
        obs, ended = step[0], step[2] | step[3]
        if buffer.autoreset is AutoresetMode.DISABLED and ended.any():
            obs, _ = envs.reset(options={"reset_mask": ended})
        obs = deepcopy(obs)
    return obs


class TestRollout:
    @every_mode
    def test_the_critic_values_true_final_states_by_privileged_observations(
        self, backend: str, mode: AutoresetMode
    ) -> None:
        envs = make(mode)
        rollout = rl.RolloutBuffer.for_env(envs, STEPS)
        last = play(envs, rollout, value=lambda obs: critic(obs["critic"]))
        finals = rollout.final_obs
        assert finals["policy"].tolist() == finals["critic"][:, 2:].tolist()
        assert (len(finals) == 0) == (mode is AutoresetMode.NEXT_STEP)
        final_value = critic(finals["critic"].numpy())
        rollout.compute_advantage(critic(last["critic"]), last_obs=last, final_value=final_value, gamma=0.9, lam=0.8)
        assert torch.equal(rollout.env_major()["obs", "critic"][:, -1], torch.as_tensor(last["critic"]))
        for env, script in enumerate(SCRIPTS):
            data = rollout.data[:, env]
            data = data[data["mask"]]
            true = transitions(env, script, len(data))
            assert [tuple(row) for row in data["obs", "critic"].tolist()] == [row.obs for row in true]
            assert data["obs", "policy"].squeeze(1).tolist() == [row.obs[2] for row in true]
            wanted = expected_advantage(true)
            torch.testing.assert_close(data["advantage"].double(), wanted, rtol=1e-5, atol=1e-4)

    def test_a_batch_may_contain_one_part_of_the_observation(self, backend: str) -> None:
        envs = make(AutoresetMode.SAME_STEP)
        rollout = rl.RolloutBuffer.for_env(envs, STEPS)
        play(envs, rollout)
        for fields, keys in (
            ([("obs", "critic"), "reward"], {("obs", "critic"), "reward"}),
            ([("obs", "policy"), "action", "index"], {("obs", "policy"), "action", "index"}),
            (["obs"], {("obs", "policy"), ("obs", "critic")}),
        ):
            batch = next(rollout.minibatches(8, fields=fields))
            assert set(batch.keys(True, True)) == keys
        out = next(rollout.minibatches(11, fields=[("obs", "critic"), "index"]))
        for batch in rollout.minibatches(11, fields=[("obs", "critic"), "index"], out=out):
            expected = rollout["obs", "critic"].flatten(0, 1)[batch["index"]]
            assert torch.equal(batch["obs", "critic"], expected)
        with pytest.raises(rl.SchemaError, match=r"fields: expected stored fields \(.*\), got obs.nobody"):
            rollout.minibatches(8, fields=[("obs", "nobody")])

    @every_mode
    def test_sequences_have_both_parts_of_every_state(self, backend: str, mode: AutoresetMode) -> None:
        envs = make(mode)
        rollout = rl.RolloutBuffer.for_env(envs, STEPS)
        play(envs, rollout)
        batch = next(rollout.sequences(shuffle=False))
        mask, time = batch["mask"], torch.arange(batch["mask"].shape[1])
        assert mask.sum() == len(rollout)
        assert torch.equal(batch["obs", "policy"].squeeze(2), time * mask)
        environment, episode, step = batch["obs", "critic"].unbind(2)
        assert torch.equal(step, time * mask)
        for part in (environment, episode):
            assert torch.equal(part, part[:, :1] * mask)
        only = next(rollout.sequences(3, fields=[("obs", "critic")]))
        assert ("obs", "policy") not in only.keys(True, True)

    def test_privileged_fields_of_stored_steps_are_extra_fields(self, backend: str) -> None:
        rollout = rl.RolloutBuffer(3, 2, obs=1, action=(), extra={"privileged": {"mass": (), "map": (2, 2)}})
        flags = np.zeros(2, bool)
        for t in range(3):
            privileged = {"mass": np.array([t, -t]), "map": np.full((2, 2, 2), t)}
            rollout.stage(privileged=privileged)
            rollout.add(np.zeros((2, 1)), np.zeros(2), np.zeros(2), flags, flags)
        batch = next(rollout.minibatches(6, fields=[("privileged", "mass"), "index"], shuffle=False))
        assert batch["privileged", "mass"].tolist() == [0, 0, 1, -1, 2, -2]
        assert rollout["privileged", "map"][:, 1, 0, 1].tolist() == [0, 1, 2]


class TestReplay:
    @every_mode
    def test_both_parts_of_the_observation_have_the_true_next_state_in_every_view(
        self, backend: str, mode: AutoresetMode
    ) -> None:
        envs = make(mode)
        replay = rl.ReplayBuffer.for_env(envs, 40 * len(SCRIPTS), seed=0)
        play(envs, replay)
        true: dict[tuple[float, ...], Any] = {}
        for env, script in enumerate(SCRIPTS):
            true |= {row.obs: row for row in transitions(env, script, STEPS)}

        def check(state: list[float], following: list[float], steps: int) -> None:
            row = true[tuple(state)]
            for _ in range(steps - 1):
                row = true[row.next_obs]
            assert tuple(following) == row.next_obs

        batch = replay.sample(100)
        for state, following in zip(batch["obs", "critic"].tolist(), batch["next_obs", "critic"].tolist(), strict=True):
            check(state, following, 1)
        self.assert_one_state(batch["obs"])
        self.assert_one_state(batch["next_obs"])
        assert set(batch["next_obs", "policy"][batch["truncated"]].squeeze(1).tolist()) == {3.0, 4.0}

        batch = replay.sample(100, rl.NStep(3, 0.5))
        steps = torch.log2(1 / batch["discount"]).long().tolist()
        parts = (batch["obs", "critic"].tolist(), batch["next_obs", "critic"].tolist(), steps)
        assert set(steps) == {1, 2, 3}
        for state, following, k in zip(*parts, strict=True):
            check(state, following, k)
        self.assert_one_state(batch["next_obs"])

        batch = replay.sample(100, rl.Sequence(3, burn_in=1))
        real = batch["mask"]
        assert not batch["obs", "critic"][~real].any()
        for state, following in zip(
            batch["obs", "critic"][real].tolist(), batch["next_obs", "critic"][real].tolist(), strict=True
        ):
            check(state, following, 1)
        self.assert_one_state(batch["obs"])

    @staticmethod
    def assert_one_state(obs: Any) -> None:
        assert torch.equal(obs["policy"], obs["critic"][..., 2:])

    def test_a_stacked_picture_beside_the_state_of_the_simulator(self, backend: str) -> None:
        picture = rl.Stacked(rl.Field((2, 2), torch.uint8), 3)
        replay = rl.ReplayBuffer(30, obs={"policy": picture, "critic": 1}, action=(), seed=0)

        def see(t: int) -> dict[str, Any]:
            frames = [max(t - age, 0) for age in (2, 1, 0)]
            return {"policy": np.broadcast_to(np.array(frames, np.uint8), (2, 2, 3)).copy(), "critic": [float(t)]}

        for t in range(6):
            replay.add(see(t), 0.0, 0.0, False, t == 5, see(t + 1))
        batch = replay.sample(50, rl.NStep(2, 1.0))
        for part, ahead in (("obs", 0), ("next_obs", 2)):
            time = (batch["obs", "critic"].squeeze(1) + ahead).clamp(max=6)
            assert torch.equal(batch[part, "critic"].squeeze(1), time)
            for frame, age in enumerate((2, 1, 0)):
                assert torch.equal(batch[part, "policy"][:, 1, 0, frame].float(), (time - age).clamp(min=0))
