"""Hot paths launch few operations on a device, and never wait for it.

Operations are counted for 4,096 environments on tensors of the meta device, where reading a number is an error. The
code path is that of every device other than the CPU. See `benchmarks.launches`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import relive as rl
from benchmarks.launch_peers import CALLS
from benchmarks.launches import Launches, counted, of_ours, ours
from relive import kernels
from relive.rng import Randomness

BARS = {
    "replay add": 40,
    "replay add, prioritized": 50,
    "uniform sample after a write": 13,
    "3-step sample": 26,
    "sequences of 16": 40,
    "the same with burn-in, across episodes": 60,
    "prioritized draw and update": 58,
    "GAE of 24 steps": 40,
    "minibatch of a rollout": 11,
    "rollout add": 2,
}
"""Maximum number of launches of each call with torch ops."""


@pytest.fixture(params=["meta", "cpu"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Use a device without native kernels, or the CPU without them."""
    # There are no generators for meta tensors. torch's default generator takes as many launches.
    if request.param == "meta":
        monkeypatch.setattr(Randomness, "generator", lambda *_: None)
    with kernels.force("torch"):
        yield request.param


@pytest.mark.parametrize("call", BARS)
def test_a_call_launches_at_most_its_limit_and_never_waits(device: str, call: str) -> None:
    (launches,) = counted({call: ours(device)[call]}).values()
    assert len(launches.names) <= BARS[call], launches.names
    assert not launches.waits


def test_every_call_of_the_table_has_a_limit() -> None:
    assert tuple(BARS) == CALLS


@pytest.mark.parametrize("masked", [False, True])
def test_masked_advantages_of_24_steps_are_at_most_40_launches(device: str, masked: bool) -> None:
    numbers = [torch.zeros(24, 4, device=device) for _ in range(3)]
    flags = [torch.ones(24, 4, dtype=torch.bool, device=device) for _ in range(3)]
    with Launches() as launches:
        rl.gae(*numbers, *flags[:2], gamma=0.99, lam=0.95, mask=flags[2] if masked else None)
    assert len(launches.names) <= 40
    assert not launches.waits


@pytest.mark.parametrize("slots", [32, 4096])
def test_neither_a_write_nor_a_draw_looks_at_all_slots(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Randomness, "generator", lambda *_: None)
    with kernels.force("torch"):
        replay = rl.ReplayBuffer(slots * 8, 3, 2, num_envs=8, device="meta")
        values = {
            name: torch.zeros(8, size, device="meta") for name, size in (("obs", 3), ("action", 2), ("next_obs", 3))
        }
        values["reward"] = torch.zeros(8, device="meta")
        flag = torch.zeros(8, dtype=torch.bool, device="meta")
        largest = _Largest()
        for again in range(2):
            with largest if again else nullcontext():
                replay.add(**values, terminated=flag, truncated=flag)
                for view in (rl.Transition(), rl.NStep(3, 0.9), rl.Sequence(4), rl.Sequence(4, 2, True)):
                    replay.sample(16, view)
    assert largest.made <= 16 * 18 * 3


def test_the_copies_of_a_rollout_have_one_dtype_each(device: str) -> None:
    launches = _Copies()
    call = ours(device)["rollout add"]()
    with launches:
        call()
    assert launches.dtypes == [{torch.int32}, {torch.uint8}]


class _Copies(Launches):
    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[set[torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_foreach_copy" in str(func):
            self.dtypes.append({each.dtype for tensors in args[:2] for each in tensors})
        return super().__torch_dispatch__(func, types, args, kwargs)


class TestMeta:
    """Tensors without values: an operation that synchronises on other devices is an error here."""

    @pytest.fixture(autouse=True)
    def _device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Randomness, "generator", lambda *_: None)

    @staticmethod
    def step(envs: int, action: torch.dtype) -> dict[str, torch.Tensor]:
        step = {"obs": torch.zeros(envs, 2), "action": torch.zeros(envs, dtype=action), "reward": torch.zeros(envs)}
        step |= {name: torch.zeros(envs, dtype=torch.bool) for name in ("terminated", "truncated")}
        return {name: value.to("meta") for name, value in (step | {"next_obs": torch.zeros(envs, 2)}).items()}

    def test_integers_that_may_not_fit_are_refused(self) -> None:
        replay = rl.ReplayBuffer(64, 2, rl.Field((), torch.uint8), num_envs=4, device="meta")
        replay.add(**self.step(4, torch.uint8))
        with pytest.raises(rl.SchemaError, match="action: expected uint8, got int64 without values"):
            replay.add(**self.step(4, torch.int64))

    @pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
    def test_env_ids_on_the_device_are_not_read_back(self, dtype: torch.dtype) -> None:
        replay = rl.ReplayBuffer(64, 2, rl.Field((), torch.uint8), num_envs=4, device="meta")
        env_ids = torch.tensor([2, 0], dtype=dtype, device="meta")
        replay.add(**self.step(2, torch.uint8), env_ids=env_ids)
        replay.cut(env_ids)
        with pytest.raises(rl.SchemaError, match="env_ids: expected a vector of distinct ints"):
            replay.cut(env_ids.to(torch.float32))


class _Largest(Launches):
    """Records the number of elements of the largest result. If a result is written in place, only its rows count."""

    made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        in_place = str(func).split(".")[1].endswith("_")
        if isinstance(result, torch.Tensor) and not func.is_view and not in_place:
            self.made = max(self.made, result.numel())
        return result


READS: dict[str, Callable[[torch.Tensor], object]] = {
    "a number": lambda flags: flags.any().item(),
    "a condition": lambda flags: bool(flags[0]),
    "which are set": lambda flags: flags.nonzero(),
    "the rows of a mask": lambda flags: torch.arange(2)[flags],
    "writing to the rows of a mask": lambda flags: torch.arange(2).__setitem__(flags, 1),
    "whether two are equal": lambda flags: torch.equal(flags, flags),
    "a copy to another device": lambda flags: flags.to("meta"),
}


@pytest.mark.parametrize("name", READS)
def test_the_counter_sees_what_waits_for_a_device(name: str) -> None:
    with Launches() as launches:
        READS[name](torch.tensor([True, False]))
    assert launches.waits


def test_a_waiting_call_of_ours_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.launches.ours", lambda _: {"a call": lambda: lambda: torch.ones(1).item()})
    with pytest.raises(SystemExit, match="a call with torch kernels waits for its device: aten._local_scalar_dense"):
        of_ours("torch", "cpu")


def test_views_and_allocations_are_no_launches() -> None:
    with Launches() as launches:
        torch.empty(4, 2)[1:].view(-1).unsqueeze(0)
    assert not launches.names


@pytest.mark.parametrize("offsets", [2, 200])
def test_a_batch_of_windows_is_at_most_40_launches_however_long_they_are(device: str, offsets: int) -> None:
    replay = rl.ReplayBuffer(4096, 3, 2, num_envs=8, device=device)
    values = {name: torch.zeros(8, size, device=device) for name, size in (("obs", 3), ("action", 2), ("next_obs", 3))}
    flag = torch.zeros(8, dtype=torch.bool, device=device)
    replay.add(**values, reward=torch.zeros(8, device=device), terminated=flag, truncated=flag)
    window = rl.Window(obs=range(-offsets, 1), action=range(offsets))
    replay.sample(16, window)
    with Launches() as launches:
        batch = replay.sample(16, window)
    assert batch["action"].shape == (16, offsets, 2)
    assert len(launches.names) <= 40
    assert not launches.waits


def test_the_number_of_stale_rows_is_a_tensor_on_the_device(device: str) -> None:
    replay = rl.ReplayBuffer(64, obs=3, action=2, num_envs=4, sampler=rl.Prioritized(), device=device, seed=0)
    index = torch.zeros(3, dtype=torch.int64, device=device)
    zeros = {"obs": (4, 3), "action": (4, 2), "reward": (4,), "next_obs": (4, 3)}
    flags = {name: torch.zeros(4, dtype=torch.bool, device=device) for name in ("terminated", "truncated")}
    replay.add(**{name: torch.zeros(shape, device=device) for name, shape in zeros.items()}, **flags)
    gone = replay.update_priority(index, torch.ones(3, device=device))
    assert isinstance(gone, int) if device == "cpu" else torch.as_tensor(gone).device.type == device
