"""Several agents per environment, as an axis or a dict: each gets the results of a buffer of that agent alone."""

from __future__ import annotations

import doctest
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import relive as rl
from relive.replay import buffer as replay_module
from relive.rollout import buffer as rollout_module

N = 3
SHAPES: dict[str, tuple[int, ...]] = {"fox": (), "pack": (2,)}
"""One agent with its own entry, and two that share an entry."""

NOBODY = np.zeros(N, bool)


def play(random: np.random.Generator, *, end_rate: float = 0.2) -> dict[str, Any]:
    """Return one step with random numbers for every agent."""

    def each(lead: int = N) -> dict[str, np.ndarray]:
        return {name: random.normal(size=(lead, *shape)).astype(np.float32) for name, shape in SHAPES.items()}

    ends = random.random((2, N)) < end_rate
    return {"obs": random.normal(size=(N, 2)), "action": each(), "reward": each(), "value": each(), "log_prob": each(),
            "terminated": ends[0], "truncated": ends[1], "final_obs": random.normal(size=(N, 2))}  # fmt: skip


def select_agent(fields: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the arguments for a buffer of one agent alone."""
    return {key: value[name] if isinstance(value, dict) else value for key, value in fields.items()}


def make(**options: Any) -> rl.RolloutBuffer:
    # The order of agents in a dict does not matter.
    backwards = dict(reversed(SHAPES.items()))
    return rl.RolloutBuffer(6, N, **{"obs": 2, "action": SHAPES, "reward": SHAPES, "value": backwards, **options})


def one_step(**changed: Any) -> dict[str, Any]:
    return {**play(np.random.default_rng(0), end_rate=0.0), "final_obs": None, **changed}


class TestRollout:
    @pytest.mark.parametrize("mode", [None, "NEXT_STEP", "SAME_STEP", "DISABLED"])
    def test_every_agent_has_the_targets_of_a_rollout_of_its_own(self, backend: str, mode: str | None) -> None:
        random = np.random.default_rng(0)
        together = make(autoreset=mode)
        alone = {
            name: rl.RolloutBuffer(6, N, obs=2, action=shape, reward=shape, value=shape, autoreset=mode)
            for name, shape in SHAPES.items()
        }
        for _ in range(6):
            step = play(random)
            if mode == "NEXT_STEP":
                del step["final_obs"]
            together.add(**step)
            for name, rollout in alone.items():
                rollout.add(**select_agent(step, name))
        values = {
            lead: {name: random.normal(size=(lead, *shape)) for name, shape in SHAPES.items()}
            for lead in (N, len(together.final_obs))
        }
        assert mode == "NEXT_STEP" or len(together.final_obs)
        last, final = values[N], values[len(together.final_obs)]
        together.compute_advantage(last, final_value=final, gamma=0.9, lam=0.8)
        batch = next(together.minibatches(100, shuffle=False))
        sequences = next(together.sequences(3, shuffle=False))
        for name, rollout in alone.items():
            rollout.compute_advantage(last[name], final_value=final[name], gamma=0.9, lam=0.8)
            theirs = next(rollout.minibatches(100, shuffle=False))
            their_sequences = next(rollout.sequences(3, shuffle=False))
            for field in ("action", "reward", "value", "log_prob", "advantage", "return"):
                assert torch.equal(together[field, name], rollout[field])
                assert torch.equal(batch[field, name], theirs[field])
                assert torch.equal(sequences[field, name], their_sequences[field])
            assert torch.equal(together.env_major()["value", name], rollout.env_major()["value"])

    def test_one_environment_needs_no_axis(self, backend: str) -> None:
        each = {"fox": (), "hare": ()}
        rollout = rl.RolloutBuffer(2, None, obs=1, action=each, reward=each, value=each)
        for t in range(2):
            rollout.add([t], {"fox": 0, "hare": 0}, {"fox": 1.0, "hare": 10.0}, t == 1, False,
                        value={"fox": 0.0, "hare": 0.5})  # fmt: skip
        rollout.compute_advantage({"fox": 99.0, "hare": 99.0}, gamma=1.0, lam=1.0)
        assert rollout["return"]["fox"].tolist() == [2.0, 1.0]
        assert rollout["advantage", "hare"].tolist() == [19.5, 9.5]

    def test_agents_may_be_staged_and_optional_fields_may_be_missing(self, backend: str) -> None:
        rollout = make()
        step = one_step()
        rollout.stage(value=step.pop("value"))
        rollout.add(**{**step, "log_prob": None})
        assert torch.equal(rollout["value", "pack"][0], torch.as_tensor(one_step()["value"]["pack"]))
        assert ("log_prob", "pack") not in rollout
        rollout.compute_advantage({"fox": np.zeros(N), "pack": np.zeros((N, 2))})

    def test_a_missing_agent_is_named_and_nothing_changes(self, backend: str) -> None:
        rollout = make()
        rollout.add(**one_step())
        last = {"fox": np.zeros(N), "pack": np.zeros((N, 2))}
        rollout.compute_advantage(last)
        before = rollout.env_major().clone()
        value, reward = one_step()["value"], one_step()["reward"]
        for changed, message in (
            ({"reward": {"fox": reward["fox"]}}, r"^reward: expected the keys .*, got the keys \['fox'\]"),
            ({"reward": reward["fox"]}, r"^reward: expected the keys \['fox', 'pack'\], got numpy.ndarray"),
            ({"value": {**value, "pack": None}}, "^value.pack: expected a value, got None"),
            ({"value": {**value, "pack": value["fox"]}}, r"^value.pack: expected shape \(3, 2\)"),
        ):  # fmt: skip
            with pytest.raises(rl.SchemaError, match=message):
                rollout.add(**one_step(**changed))
        for wrong, message in (
            ({"fox": np.zeros(N)}, r"^last_value: expected the keys \['fox', 'pack'\]"),
            ({**last, "pack": np.zeros(N)}, r"^last_value.pack: expected shape \(3, 2\)"),
            (None, "^last_value.*: expected a value, got None"),
        ):
            with pytest.raises(rl.SchemaError, match=message):
                rollout.compute_advantage(wrong)
        with pytest.raises(rl.SchemaError, match=r"^final_value.fox: expected shape \(0,\)"):
            rollout.compute_advantage(last, final_value={"fox": np.zeros(1), "pack": np.zeros((0, 2))})
        assert (rollout.env_major() == before).all()

    @pytest.mark.parametrize("value", [(), {"fox": ()}, {"fox": (), "pack": ()}])
    def test_values_that_do_not_correspond_to_rewards_give_no_advantage(self, value: Any) -> None:
        rollout = make(value=value)
        empty = {name: np.zeros((N, *shape)) for name, shape in value.items()} if value else np.zeros(N)
        rollout.add(**one_step(value=empty))
        with pytest.raises(
            rl.SchemaError, match="^value: expected one value for each reward .*Pass value= to the buffer"
        ):
            rollout.compute_advantage(empty)

    def test_an_agent_that_ends_early_has_the_targets_of_its_own_end(self, backend: str) -> None:
        """An agent with reward 0 and value 0 after its end has the same targets as one with a flag of its own."""
        random = np.random.default_rng(1)
        steps, agents = 6, 2
        alive = np.ones((steps + 1, N, agents), np.float32)
        # The first agent ends at step 2, and its environment continues beyond the rollout.
        alive[3:, 0, 1] = 0
        # The second agent ends at step 1, three steps before its environment is truncated.
        alive[2:, 1, 0] = 0
        reward = random.normal(size=(steps, N, agents)).astype(np.float32) * alive[:-1]
        value = random.normal(size=(steps + 1, N, agents)).astype(np.float32) * alive
        truncated = np.zeros((steps, N), bool)
        truncated[4, 1] = True
        alive[5:, 1] = 1
        value[5:, 1, 0] = reward[5:, 1, 0] = 7.0
        final_value = np.array([[0.0, 3.0]], np.float32)
        rollout = rl.RolloutBuffer(
            steps, N, obs={"place": 1, "alive": agents}, action=agents, reward=agents, value=agents
        )
        for t in range(steps):
            obs = {"place": np.full((N, 1), t), "alive": alive[t]}
            rollout.add(obs, np.zeros((N, agents)), reward[t], NOBODY, truncated[t], value=value[t],
                        final_obs={"place": np.zeros((N, 1)), "alive": np.full((N, agents), [0, 1])})  # fmt: skip
        assert rollout.final_obs["alive"].tolist() == [[0.0, 1.0]]
        rollout.compute_advantage(value[-1], final_value=final_value, gamma=0.9, lam=0.8)

        own_end = torch.zeros(steps, N, agents, dtype=torch.bool)
        own_end[2, 0, 1] = own_end[1, 1, 0] = True
        next_value = torch.as_tensor(value[1:]).clone()
        next_value[4, 1] = torch.as_tensor(final_value[0])
        advantage, return_ = rl.gae(
            torch.as_tensor(reward), torch.as_tensor(value[:-1]), next_value, own_end, torch.as_tensor(truncated),
            gamma=0.9, lam=0.8, mask=torch.as_tensor(alive[:-1] > 0),
        )  # fmt: skip
        torch.testing.assert_close(rollout["advantage"], advantage)
        torch.testing.assert_close(rollout["return"], return_)
        assert not rollout["advantage"][3:, 0, 1].any()


class TestAttach:
    def test_attached_dicts_are_in_every_batch_and_replace_older_ones(self, backend: str) -> None:
        rollout = make()
        for _ in range(2):
            rollout.add(**one_step())
        numbers = torch.arange(2 * N).view(2, N)
        rollout.attach(tag=numbers, other=numbers)
        rollout.attach(tag={"a": numbers, "b": {"c": 10 * numbers}})
        rollout.attach(TensorDict({"both": TensorDict({"x": numbers}, [2, N])}, [2, N]))
        for batch in rollout.minibatches(4):
            assert torch.equal(batch["tag", "a"], batch["index"])
            assert torch.equal(batch["tag", "b", "c"], 10 * batch["index"])
            assert torch.equal(batch["both", "x"], batch["index"])
            assert torch.equal(batch["other"], batch["index"])
        rollout.attach(tag=-numbers)
        assert torch.equal(rollout["tag"], -numbers)
        only = next(rollout.minibatches(6, fields=[("both", "x"), ("reward", "fox")], shuffle=False))
        assert set(only.keys(True, True)) == {("both", "x"), ("reward", "fox")}

    def test_attach_names_refused_fields(self) -> None:
        rollout = make()
        rollout.add(**one_step())
        numbers = np.zeros((1, N))
        wrongs: tuple[tuple[dict[str, Any], str], ...] = (
            ({"tag": {}}, "^tag: expected at least one field, got an empty dict"),
            ({"tag": {3: numbers}}, "^tag: expected names like .*, got 3"),
            ({"tag": {"a": numbers, "b": np.zeros((N, 1))}}, r"^tag.b: expected shape \(1, 3\)"),
            ({"reward": {"fox": numbers}}, "^attach: expected an unused name, got 'reward'"),
        )
        for wrong, message in wrongs:
            with pytest.raises(rl.SchemaError, match=message):
                rollout.attach(wrong)
        assert "tag" not in rollout.data.keys()


class TestStatistics:
    """Episode statistics count the sum over all agents."""

    rewards = {"fox": np.arange(3.0), "pack": np.arange(10.0, 16.0).reshape(3, 2)}  # noqa: RUF012
    team = [0.0 + 10 + 11, 1.0 + 12 + 13, 2.0 + 14 + 15]  # noqa: RUF012

    def test_statistics_of_a_rollout_with_a_dict_of_agents(self, backend: str) -> None:
        stats = rl.EpisodeStats(N)
        rollout = make(stats=stats)
        rollout.add(**one_step(reward=self.rewards))
        rollout.add(**one_step(reward=self.rewards, terminated=~NOBODY))
        assert stats.episodes()["return"].tolist() == [2 * reward for reward in self.team]

    def test_statistics_of_one_environment_without_an_axis(self) -> None:
        each, stats = {"fox": (), "hare": ()}, rl.EpisodeStats(None)
        rollout = rl.RolloutBuffer(2, None, obs=1, action=(), reward=each, stats=stats)
        rollout.add([0.0], 0.0, {"fox": 1.0, "hare": -3.0}, True, False)
        assert stats.episodes()["return"].tolist() == [-2.0]

    def test_statistics_of_a_rollout_with_an_axis_of_agents(self) -> None:
        stats = rl.EpisodeStats(N)
        rollout = make(reward=(2,), value=(2,), stats=stats)
        rollout.add(**one_step(reward=self.rewards["pack"], value=None, log_prob=None, terminated=~NOBODY))
        assert stats.episodes()["return"].tolist() == [10.0 + 11, 12.0 + 13, 14.0 + 15]

    def test_statistics_of_a_replay_buffer_with_steps_blocks_and_some_environments(self, backend: str) -> None:
        stats = rl.EpisodeStats(N)
        replay = rl.ReplayBuffer(12, obs=1, action=(), num_envs=N, reward=SHAPES, stats=stats)
        step = {"obs": np.zeros((N, 1)), "action": np.zeros(N), "reward": self.rewards, "terminated": NOBODY,
                "truncated": NOBODY, "next_obs": np.ones((N, 1))}  # fmt: skip
        replay.add(**step)
        block = {name: value[None] for name, value in step.items() if name != "reward"}
        replay.extend({**block, "reward": {name: value[None] for name, value in self.rewards.items()}})
        some = {name: value[[2]] for name, value in step.items() if name != "reward"} | {"terminated": [True]}
        replay.add(**some, reward={name: value[[2]] for name, value in self.rewards.items()}, env_ids=[2])
        assert stats.episodes()["return"].tolist() == [3 * self.team[2]]
        replay.add(**{**step, "terminated": ~NOBODY})
        assert stats.episodes()["return"].tolist()[1:] == [3 * self.team[0], 3 * self.team[1], self.team[2]]


class TestReplay:
    def both(self, seed: int, count: int = 40) -> tuple[rl.ReplayBuffer, dict[str, rl.ReplayBuffer]]:
        """Return a buffer of all agents and one per agent, filled with the same steps."""
        random = np.random.default_rng(seed)
        options: dict[str, Any] = {"obs": 2, "num_envs": N, "seed": 0}
        together = rl.ReplayBuffer(20 * N, action=SHAPES, reward=SHAPES, **options)
        alone = {name: rl.ReplayBuffer(20 * N, action=shape, reward=shape, **options) for name, shape in SHAPES.items()}
        obs = random.normal(size=(N, 2))
        for _ in range(count):
            step = play(random)
            ended = (step["terminated"] | step["truncated"])[:, None]
            step = {name: step[name] for name in ("action", "reward", "terminated", "truncated")}
            step |= {"obs": obs, "next_obs": random.normal(size=(N, 2))}
            together.add(**step)
            for name, replay in alone.items():
                replay.add(**select_agent(step, name))
            obs = np.where(ended, random.normal(size=(N, 2)), step["next_obs"])
        return together, alone

    @pytest.mark.parametrize("view", [rl.Transition(), rl.NStep(3, 0.9), rl.Sequence(4, burn_in=1)], ids=repr)
    def test_every_agent_has_the_batches_of_a_buffer_of_its_own(self, backend: str, view: Any) -> None:
        together, alone = self.both(0)
        batch = together.sample(60, view)
        for name, replay in alone.items():
            theirs = replay.sample(60, view)
            for field in theirs.keys():
                mine = batch[field, name] if field in ("action", "reward") else batch[field]
                torch.testing.assert_close(mine, theirs[field])

    @pytest.mark.parametrize("inner", [rl.Transition(), rl.NStep(3, 0.9)], ids=repr)
    def test_hindsight_gives_every_agent_a_new_reward(self, backend: str, inner: Any) -> None:
        each = {"near": (), "far": ()}
        replay = rl.ReplayBuffer(50, obs={"goal": 1, "at": 1}, action=(), reward=each, seed=0)

        def judge(achieved: torch.Tensor, goal: torch.Tensor, rows: TensorDict) -> tuple[Any, torch.Tensor]:
            distance = (achieved - goal).squeeze(1).abs()
            return {"near": -distance, "far": distance}, torch.zeros(len(goal), dtype=torch.bool)

        for t in range(8):
            obs = [{"goal": [100.0], "at": [float(place)]} for place in (t, t + 1)]
            replay.add(obs[0], 0.0, {"near": t - 99.0, "far": 99.0 - t}, False, False, obs[1])
        view = rl.Hindsight("goal", "at", judge, ratio=1.0, view=inner)
        batch = replay.sample(100, view)
        steps = 3 if isinstance(inner, rl.NStep) else 1
        expected = torch.zeros(100)
        for i in range(steps):
            there = batch["obs", "at"].squeeze(1) + 1 + i
            distance = (there - batch["obs", "goal"].squeeze(1)).abs()
            expected += torch.where(there <= 8, 0.9**i * distance, 0.0)
        torch.testing.assert_close(batch["reward", "far"], expected)
        torch.testing.assert_close(batch["reward", "near"], -expected)
        with pytest.raises(rl.SchemaError, match=r"^Hindsight.fn: reward: expected the keys \['far', 'near'\]"):
            replay.sample(2, rl.Hindsight("goal", "at", lambda a, g, rows: (a, g > 0), ratio=1.0))


@pytest.mark.parametrize("module", [rollout_module, replay_module])
def test_the_examples_of_the_documentation_run(module: Any) -> None:
    results = doctest.testmod(module)
    assert results.attempted > 3
    assert results.failed == 0
