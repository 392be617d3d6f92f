"""Rollouts and estimators on a device equal those of the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import relive as rl
from tests.devices.place import Place, same

STEPS, ENVS = 24, 5


def steps() -> list[dict[str, torch.Tensor]]:
    """Return random steps with terminated and truncated episodes."""
    random = np.random.default_rng(0)
    shapes = {"obs": (ENVS, 3), "action": (ENVS, 2), "reward": (ENVS,), "value": (ENVS,), "log_prob": (ENVS,)}
    return [
        {name: torch.from_numpy(random.normal(size=shape).astype(np.float32)) for name, shape in shapes.items()}
        | {"terminated": torch.from_numpy(random.random(ENVS) < 0.1), "truncated": torch.zeros(ENVS, dtype=torch.bool)}
        for _ in range(STEPS)
    ]


def rollout(on: Place | None) -> rl.RolloutBuffer:
    buffer = rl.RolloutBuffer(STEPS, ENVS, 3, 2, device=on.device if on else "cpu", seed=0)
    for step in steps():
        buffer.add(**(on.there(step) if on else step))
    last = torch.ones(ENVS)
    buffer.compute_advantage(on.there(last) if on else last)
    return buffer


def test_stored_steps_equal_those_of_the_host(device_with_values: Place) -> None:
    host = rollout(None)
    with device_with_values.inside():
        there = rollout(device_with_values)
        for name in ("advantage", "return"):  # sums may be rounded in another order
            torch.testing.assert_close(there[name].cpu(), host[name], rtol=1e-5, atol=1e-5)
        stored = ("obs", "action", "reward", "terminated", "truncated", "value", "log_prob")
        same(there.data.select(*stored), host.data.select(*stored))
        there.check()


def test_minibatches_hold_every_step_once(device_with_values: Place) -> None:
    with device_with_values.inside():
        batches = list(rollout(device_with_values).minibatches(32))
        index = torch.cat([batch["index"] for batch in batches]).cpu()
        reward = torch.cat([batch["reward"] for batch in batches]).cpu()
    assert index.sort().values.tolist() == list(range(STEPS * ENVS))
    assert torch.equal(reward, torch.cat([step["reward"] for step in steps()])[index])


@pytest.mark.parametrize("name", ["gae", "lambda_return", "n_step_return", "vtrace"])
def test_an_estimator_gives_what_the_host_gives(device_with_values: Place, name: str) -> None:
    every = steps()
    reward, value = (torch.stack([step[field] for step in every]) for field in ("reward", "value"))
    flags = [torch.stack([step[field] for step in every]) for field in ("terminated", "truncated")]
    numbers: dict[str, Any] = {
        "gae": (rl.gae, (reward, value, value.roll(-1, 0), *flags), {"gamma": 0.99, "lam": 0.95}),
        "lambda_return": (rl.lambda_return, (reward, value, *flags), {"gamma": 0.99, "lam": 0.95}),
        "n_step_return": (rl.n_step_return, (reward, value, *flags), {"gamma": 0.99, "n": 5}),
        "vtrace": (rl.vtrace, (0.1 * reward, reward, value, value.roll(-1, 0), *flags), {"gamma": 0.99}),
    }
    estimator, tensors, options = numbers[name]
    host = estimator(*tensors, **options)
    with device_with_values.inside():
        there = estimator(*device_with_values.there(tensors), **options)
        strided = estimator(*(tensor.t().contiguous().t() for tensor in device_with_values.there(tensors)), **options)
    for expected, got, again in zip(
        *(each if isinstance(each, tuple) else (each,) for each in (host, there, strided)), strict=True
    ):
        torch.testing.assert_close(got.cpu(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(again.cpu(), expected, rtol=1e-5, atol=1e-5)
