"""Arguments that use the rollout while they are converted: no step is lost, or mixed with another step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import relive as rl

N = 2


class Meddling:
    """Array that calls `meddle`, which changes the rollout, when it is first read."""

    def __init__(self, shape: tuple[int, ...], meddle: Callable[[], Any], value: float = 9.0) -> None:
        self._shape, self._meddle, self._value, self._is_read = shape, meddle, value, False

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        if not self._is_read:
            self._is_read = True
            self._meddle()
        return np.full(self._shape, self._value, dtype or np.float32)


def step(value: float, **changed: Any) -> dict[str, Any]:
    numbers, none = np.full(N, value, np.float32), np.zeros(N, bool)
    fields = {"obs": numbers, "action": numbers, "reward": numbers, "terminated": none, "truncated": none}
    return {**fields, "value": numbers, **changed}


def make(autoreset: str | None = None) -> rl.RolloutBuffer:
    rollout = rl.RolloutBuffer(4, N, obs=(), action=(), autoreset=autoreset, stats=rl.EpisodeStats(N))
    rollout.add(**step(1))
    return rollout


def outer_add(rollout: rl.RolloutBuffer, argument: Any) -> None:
    rollout.add(**step(3, obs=argument))


def outer_final_obs(rollout: rl.RolloutBuffer, argument: Any) -> None:
    rollout.add(**step(3, truncated=np.ones(N, bool)), final_obs=argument)


def outer_add_step(rollout: rl.RolloutBuffer, argument: Any) -> None:
    given = step(3)
    flags = np.zeros(N, bool), np.ones(N, bool)
    rollout.add_step(given["obs"], given["action"], (argument, given["reward"], *flags, {}), value=given["value"])


def outer_stage(rollout: rl.RolloutBuffer, argument: Any) -> None:
    rollout.stage(obs=argument)


OUTER = [outer_add, outer_final_obs, outer_add_step, outer_stage]


@pytest.mark.parametrize("outer", OUTER)
def test_a_step_whose_arguments_add_another_is_refused_and_the_other_stays(backend: str, outer: Any) -> None:
    rollout = make("DISABLED")
    with pytest.raises(rl.SchemaError, match="^add: expected a rollout that stays as it is meanwhile, got another "):
        outer(rollout, Meddling((N,), lambda: rollout.add(**step(2))))
    rollout.check()
    assert rollout["obs"][:, 0].tolist() == [1, 2]
    assert rollout.stats is not None
    assert rollout.stats.num_steps == 2 * N
    rollout.add(**step(3))
    assert rollout["obs"][:, 0].tolist() == [1, 2, 3]
    assert not len(rollout.final_obs)


def test_a_step_whose_arguments_stage_or_clear_is_refused(backend: str) -> None:
    for meddle in (lambda rollout: rollout.stage(reward=np.full(N, 7.0)), lambda rollout: rollout.clear()):
        rollout = make()
        with pytest.raises(rl.SchemaError, match="^add: expected a rollout that stays as it is meanwhile"):
            outer_add(rollout, Meddling((N,), lambda m=meddle, r=rollout: m(r)))
        rollout.check()


def test_arguments_may_read_the_rollout(backend: str) -> None:
    rollout = make()
    outer_add(rollout, Meddling((N,), rollout.data["obs"].clone))
    assert torch.equal(rollout["obs"][:, 0], torch.tensor([1.0, 9.0]))


def test_a_mapping_that_adds_a_step_when_it_is_read_is_refused(backend: str) -> None:
    rollout = rl.RolloutBuffer(4, N, obs={"a": ()}, action=())

    class Obs(dict[str, Any]):
        def __getitem__(self, key: str) -> Any:
            if not rollout.num_stored:
                rollout.add(**step(2, obs={"a": np.full(N, 2.0)}))
            return super().__getitem__(key)

        def get(self, key: str, default: Any = None) -> Any:
            return self[key]

        def items(self) -> Any:
            return [(key, self[key]) for key in self]

    with pytest.raises(rl.SchemaError, match="^add: expected a rollout that stays as it is meanwhile, got another "):
        rollout.add(**step(3, obs=Obs(a=np.full(N, 3.0))))
    assert rollout["obs", "a"][:, 0].tolist() == [2]
