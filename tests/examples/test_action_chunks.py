"""The example of action chunks: its road is as described, it repeats itself, and chunks beat single actions."""

from typing import Any

import numpy as np
import pytest

from tests.examples.test_examples import load
from tests.examples.test_replay_examples import command


def test_cloning_repeats_itself_for_a_seed_and_not_for_another() -> None:
    example: Any = load("action_chunks")
    example.COURSES = 50
    scores = example.train(1, 20)
    assert len(scores) == 10
    assert scores == example.train(1, 20)
    assert scores != example.train(2, 20)


def test_the_command_compares_chunks_with_single_actions(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command(monkeypatch, "action_chunks", "--updates", 10)
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("chunks of  1")
    assert said[-1].startswith("chunks of 12: ")
    assert "single actions: " in said[-1]


def test_demonstrators_reach_the_end_on_either_side() -> None:
    example: Any = load("action_chunks")
    roads: list[Any] = []
    plain = example.Road

    def noted(*arguments: Any) -> Any:
        roads.append(plain(*arguments))
        return roads[-1]

    example.Road = noted
    replay = example.demonstrate(100, 0)
    assert len(replay) == 100 * example.PILLARS * example.STEPS_A_PILLAR
    assert roads[0].has_crashed.mean() < 0.05
    first = replay.read(replay.ids()[:100])
    assert abs(float(first["action"].mean())) < 0.3
    assert bool((first["action"].abs() == 1).all())


def test_a_car_in_the_middle_hits_the_pillar_and_one_beside_it_does_not() -> None:
    example: Any = load("action_chunks")
    road = example.Road(2, np.random.default_rng(0))
    for _ in range(example.PILLAR_AT):
        assert not road.has_crashed.any()
        road.place[:] = 0.0, 0.8
        road.step(np.zeros(2))
    assert road.has_crashed.tolist() == [True, False]


@pytest.mark.long
def test_chunks_pass_the_pillars_that_single_actions_hit() -> None:
    train = load("action_chunks").train
    assert train(1, 3000, 12)[-1] > 0.9
    assert train(1, 3000, 1)[-1] < 0.7
