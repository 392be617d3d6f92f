"""From a rollout to group-relative minibatches: dummy steps never count, later episodes only on request."""

from __future__ import annotations

import pytest
import torch
from gymnasium.vector import AutoresetMode

import relive as rl
from tests.scripted import Script, act, step_and_reset, transitions, vector

SCRIPTS: list[Script] = [((3, "terminated"),), ((5, "truncated"),), ((2, "both"),), ((4, "terminated"),)]
STEPS, SIZE, GAMMA = 7, 2, 0.9


def collect(mode: AutoresetMode) -> rl.RolloutBuffer:
    envs = vector(SCRIPTS, mode)
    rollout = rl.RolloutBuffer.for_env(envs, STEPS, seed=0)
    obs, _ = envs.reset()
    for _ in range(STEPS):
        step, next_obs = step_and_reset(envs, act(obs))
        rollout.add_step(obs, act(obs), step)
        obs = next_obs
    done = rollout["terminated"] | rollout["truncated"]
    seq_return, seq_mask, advantage = rl.group_advantage(
        rollout["reward"], done, group_size=SIZE, gamma=GAMMA, mask=rollout["mask"]
    )
    rollout.attach(seq_return=seq_return, seq_mask=seq_mask, advantage=advantage)
    return rollout


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_every_autoreset_mode_compares_the_same_first_episodes(backend: str, mode: AutoresetMode) -> None:
    rollout = collect(mode)
    lengths = [script[0][0] for script in SCRIPTS]
    returns = torch.zeros(STEPS, len(SCRIPTS))
    for env, length in enumerate(lengths):
        rewards = [row.reward for row in transitions(env, SCRIPTS[env], length)]
        for t in range(length):
            returns[t, env] = sum(GAMMA**i * reward for i, reward in enumerate(rewards[t:]))
    first = torch.tensor([[t < length for length in lengths] for t in range(STEPS)])
    assert torch.equal(rollout["seq_mask"], first)
    torch.testing.assert_close(rollout["seq_return"][first], returns[first])
    # In a group of two environments the better return is 1 deviation above the mean; a single return is the mean.
    pair = first.view(STEPS, -1, SIZE).all(2).repeat_interleave(SIZE, 1)
    better = returns.view(STEPS, -1, SIZE).argmax(2).repeat_interleave(SIZE, 1) == torch.arange(len(SCRIPTS)) % SIZE
    torch.testing.assert_close(rollout["advantage"], torch.where(better, 1.0, -1.0) * pair)


def test_rows_that_only_reset_are_in_no_group() -> None:
    rollout = collect(AutoresetMode.NEXT_STEP)
    done, resets = rollout["terminated"] | rollout["truncated"], ~rollout["mask"]
    assert resets.any()
    everything = {"group_size": 4, "gamma": GAMMA, "first_episode_only": False}
    seq_return, seq_mask, advantage = rl.group_advantage(rollout["reward"], done, **everything, mask=~resets)
    assert torch.equal(seq_mask, ~resets)
    assert not seq_return[resets].any()
    assert not advantage[resets].any()
    nonsense = torch.where(resets, 1e6, rollout["reward"])
    again = rl.group_advantage(nonsense, done, **everything, mask=~resets)
    assert all(map(torch.equal, again, (seq_return, seq_mask, advantage)))


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_a_loss_weighed_by_seq_mask_is_the_loss_of_the_first_episodes(mode: AutoresetMode) -> None:
    rollout = collect(mode)
    total, count = torch.zeros(()), torch.zeros(())
    for batch in rollout.minibatches(5):
        total += (batch["seq_mask"] * (batch["seq_return"] + 1)).sum()
        count += batch["seq_mask"].sum()
    assert count == sum(script[0][0] for script in SCRIPTS)
    torch.testing.assert_close(total, (rollout["seq_return"] + 1)[rollout["seq_mask"]].sum())
