"""The examples of groups and of several agents run, repeat themselves and learn; their worlds are as described."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.examples.test_examples import load
from tests.examples.test_replay_examples import command


@pytest.mark.parametrize(("name", "amount"), [("grpo", 3), ("multi_agent", 2048)])
def test_an_example_repeats_itself_for_a_seed_and_not_for_another(name: str, amount: int) -> None:
    train: Callable[..., list[float]] = load(name).train
    returns = train(1, amount)
    assert len(returns) >= 3
    assert returns == train(1, amount)
    assert returns != train(2, amount)


@pytest.mark.parametrize(
    ("name", "arguments"), [("grpo", ("--rollouts", 10, "--kl", 0.1)), ("multi_agent", ("--total-steps", 1000))]
)
def test_an_example_runs_as_a_command_and_says_whether_it_solved_its_task(
    name: str, arguments: tuple[object, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command(monkeypatch, name, *arguments)
    said = capsys.readouterr().out
    assert "mean return of the last" in said
    assert "not yet the" in said.splitlines()[-1]


def test_members_of_a_group_start_alike_and_groups_do_not() -> None:
    env = load("grpo").Parcels(num_groups=3, group_size=4, seed=0)
    for _ in range(2):
        starts = env.reset().reshape(3, 4, 6)
        assert np.array_equal(starts, np.repeat(starts[:, :1], 4, 1))
        assert len(np.unique(starts[:, 0], axis=0)) == 3


def test_a_parcel_ends_once_and_lies_still_from_then_on() -> None:
    env = load("grpo").Parcels(num_groups=4, group_size=2, seed=0)
    env.reset()
    ends, after = np.zeros(8), []
    for _ in range(80):
        gone, place = ends > 0, env.place.copy()
        _, reward, ended = env.step(np.tile([[1.0, 1.0]], (8, 1)))  # everybody leaves the field
        ends += ended
        after.append(reward[gone])
        assert np.array_equal(env.place[gone], place[gone])
    assert ends.tolist() == [1.0] * 8
    assert not np.concatenate(after).any()


@pytest.mark.long
def test_the_distance_to_the_reference_holds_the_policy_back() -> None:
    """With a heavy weight the policy hardly moves, so returns stay what they were."""
    train = load("grpo").train
    free, held = train(1, 25), train(1, 25, kl=10.0)
    assert free[0] == held[0]
    assert np.mean(free[-5:]) > 2 * np.mean(held[-5:])  # both are costs: less than half of them
    assert abs(np.mean(held[-5:]) - np.mean(held[:5])) < 10


def test_the_porter_leaves_first_and_the_guest_enters_after_it() -> None:
    example = load("multi_agent")
    house = example.House(seed=0)
    seen, _ = house.reset()
    assert {agent: len(parts) for agent, parts in seen.items()} == example.SEES
    house.place |= {"porter": 3, "guest": 5}
    house.goal |= {"porter": 2, "guest": 5}
    # Too early, the wrong place, then the button, then the door.
    _, rewards, *_ = house.step({"porter": 2, "guest": 2})
    assert rewards == pytest.approx({"porter": -0.23, "guest": -0.23})
    house.step({"porter": 0, "guest": 0})
    seen, rewards, gone, cut, _ = house.step({"porter": 2, "guest": 1})
    assert rewards == pytest.approx({"porter": 0.97, "guest": -0.03})
    assert gone == {"porter": True, "guest": False}
    assert house.agents == ["guest"]
    everyone = example.everyone(seen, gone)
    assert [everyone[agent]["alive"] for agent in example.SEES] == [0.0, 1.0]
    assert everyone["guest"]["sees"][2] == 1.0
    seen, rewards, gone, cut, _ = house.step({"guest": 2})
    assert rewards == pytest.approx({"guest": 0.97})
    assert gone == {"guest": True}
    assert cut == {"guest": False}
    assert house.agents == []


def test_at_the_time_limit_only_those_still_there_are_cut_off() -> None:
    example = load("multi_agent")
    house = example.House(seed=0)
    house.reset()
    house.goal["porter"] = house.place["porter"]
    house.step({"porter": 2, "guest": 0})
    for _ in range(example.TIME_LIMIT - 2):
        assert house.agents == ["guest"]
        house.step({"guest": 0})
    seen, _, gone, cut, _ = house.step({"guest": 0})
    assert (gone, cut, house.agents) == ({"guest": False}, {"guest": True}, [])
    assert example.everyone(seen, gone)["guest"]["alive"] == 1.0  # its value is what the cut step bootstraps from


def test_the_value_of_an_agent_that_is_gone_is_zero() -> None:
    example = load("multi_agent")
    torch.manual_seed(0)
    obs = example.stack([example.everyone({"guest": np.ones(3, np.float32)}, {}) for _ in range(4)])
    value = example.Team().value(obs)
    assert value["porter"].tolist() == [0.0] * 4
    assert value["guest"].all()


@pytest.mark.long
def test_grpo_learns_without_a_critic() -> None:
    example = load("grpo")
    returns = example.train(1, 100)
    assert returns[0] < -40
    assert np.mean(returns[-10:]) > example.SOLVED


@pytest.mark.long
def test_several_agents_learn_together() -> None:
    example = load("multi_agent")
    returns = example.train(1, example.TOTAL_STEPS)
    assert np.mean(returns[:50]) < -3
    assert np.mean(returns[-100:]) > example.SOLVED
