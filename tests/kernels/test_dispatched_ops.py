"""What a device is asked to do: how many operations the hot paths launch there, and that nothing waits for it.

Counted on tensors of the meta device, where reading a number is an error: the path is that of every device other than
the CPU. A view (a slice, another shape) is dispatched but launches nothing, and is not counted.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import relive as rl
from relive import kernels
from relive.randomness import Randomness

NUM_ENVS, BATCH = 4, 32
WAITING = ("_local_scalar_dense", "nonzero", "item", "is_nonzero", "masked_select", "equal.default")


class Launches(TorchDispatchMode):
    """The operations that were launched inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not (func.is_view or func is torch.ops.aten.detach.default or func is torch.ops.aten.lift_fresh.default):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture(params=["meta", "cpu"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A device without native kernels, or the CPU without them."""
    if request.param == "meta":  # which has no generators: torch's own is as many launches
        monkeypatch.setattr(Randomness, "generator", lambda *_: None)
    with kernels.force_torch():
        yield request.param


def step(device: str) -> dict[str, torch.Tensor]:
    """A step of all environments, where it is stored."""
    numbers = {"obs": (NUM_ENVS, 3), "action": (NUM_ENVS, 2), "reward": (NUM_ENVS,)}
    flags = {name: torch.zeros(NUM_ENVS, dtype=torch.bool, device=device) for name in ("terminated", "truncated")}
    return {name: torch.zeros(shape, device=device) for name, shape in numbers.items()} | flags


def replay(device: str, sampler: Any) -> rl.ReplayBuffer:
    """A buffer that has been sampled from before; its tree has more blocks than a batch has rows."""
    buffer = rl.ReplayBuffer(100_000, obs=3, action=2, num_envs=NUM_ENVS, sampler=sampler, device=device, seed=0)
    for _ in range(10):
        buffer.add(**step(device), next_obs=torch.zeros(NUM_ENVS, 3, device=device))
    buffer.sample(BATCH)
    return buffer


def test_a_step_of_a_rollout_is_one_copy(device: str) -> None:
    rollout = rl.RolloutBuffer(8, NUM_ENVS, obs=3, action=2, device=device)
    given = {**step(device), **{name: torch.zeros(NUM_ENVS, device=device) for name in ("value", "log_prob")}}
    rollout.add(**given)
    with Launches() as launches:
        rollout.add(**given)
    assert len(launches.names) == 1


@pytest.mark.parametrize("masked", [False, True])
def test_advantages_of_24_steps_are_at_most_40_launches(device: str, masked: bool) -> None:
    numbers = [torch.zeros(24, NUM_ENVS, device=device) for _ in range(3)]
    flags = [torch.ones(24, NUM_ENVS, dtype=torch.bool, device=device) for _ in range(3)]
    with Launches() as launches:
        rl.gae(*numbers, *flags[:2], gamma=0.99, lam=0.95, mask=flags[2] if masked else None)
    assert len(launches.names) <= 40
    assert not waiting(launches)


def test_a_uniform_batch_is_a_gather_for_each_field_and_three_launches(device: str) -> None:
    buffer = replay(device, rl.Uniform())
    with Launches() as launches:
        batch = buffer.sample(BATCH)
    assert len(launches.names) <= len(batch.keys()) + 3
    assert not waiting(launches)


def test_a_step_between_costs_a_uniform_batch_few_more(device: str) -> None:
    buffer = replay(device, rl.Uniform())
    buffer.add(**step(device), next_obs=torch.zeros(NUM_ENVS, 3, device=device))
    with Launches() as launches:
        batch = buffer.sample(BATCH)
    assert len(launches.names) <= len(batch.keys()) + 8


def test_a_prioritized_batch_and_its_new_priorities_are_at_most_60_launches(device: str) -> None:
    buffer, priority = replay(device, rl.Prioritized()), torch.ones(BATCH, device=device)
    with Launches() as launches:
        batch = buffer.sample(BATCH)
        buffer.update_priority(batch["index"], priority)
    assert len(launches.names) <= 60
    assert not waiting(launches)


@pytest.mark.parametrize("offsets", [2, 200])
def test_a_batch_of_windows_is_at_most_40_launches_however_long_they_are(device: str, offsets: int) -> None:
    buffer, window = replay(device, rl.Uniform()), rl.Window(obs=range(-offsets, 1), action=range(offsets))
    buffer.sample(BATCH, window)
    with Launches() as launches:
        batch = buffer.sample(BATCH, window)
    assert batch["action"].shape == (BATCH, offsets, 2)
    assert len(launches.names) <= 40
    assert not waiting(launches)


def waiting(launches: Launches) -> list[str]:
    """Those that hold up the host until the device has come so far."""
    return [name for name in launches.names if any(word in name for word in WAITING)]


def test_how_many_rows_were_gone_is_told_where_the_rows_are(device: str) -> None:
    buffer = replay(device, rl.Prioritized())
    index = torch.zeros(3, dtype=torch.int64, device=device)
    gone = buffer.update_priority(index, torch.ones(3, device=device))
    assert isinstance(gone, int) if device == "cpu" else torch.as_tensor(gone).device.type == device
