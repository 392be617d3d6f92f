"""The calls of ApexRL's PPO, DQN and SAC, with 16 environments and 8 numbers per observation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch

from . import Case

_ENVS, _STEPS, _OBS, _BATCH = 16, 64, 8, 256
_PREFIXES = ("relive.compat.apexrl", "apexrl")


def cases() -> list[Case]:
    """Return every call. The original must be importable as `apexrl`."""
    calls = {
        "RolloutBuffer.add": _prepare_rollout_add,
        "RolloutBuffer.compute_returns_and_advantages": partial(
            _prepare_rollout_call, "compute_returns_and_advantages"
        ),
        "RolloutBuffer.get_all_data": partial(_prepare_rollout_call, "get_all_data"),
        "RolloutBuffer.get_minibatch": partial(_prepare_rollout_call, "get_minibatch"),
        "ReplayBuffer.add": partial(_prepare_replay, "add", 10_000),
        "ReplayBuffer.add (capacity no multiple of the batch)": partial(_prepare_replay, "add", 10_001),
        "ReplayBuffer.sample": partial(_prepare_replay, "sample", 10_000),
        "ReplayBuffer.add (dict observations)": partial(_prepare_dict_replay, "add"),
        "ReplayBuffer.sample (dict observations)": partial(_prepare_dict_replay, "sample"),
    }
    return [Case(name, *(partial(call, prefix) for prefix in _PREFIXES)) for name, call in calls.items()]


def _make_step() -> tuple[Any, ...]:
    numbers = torch.randn(4, _ENVS)
    return torch.randn(_ENVS, _OBS), None, torch.randint(0, 4, (_ENVS,)), numbers[0], torch.zeros(_ENVS), *numbers[1:3]


def _make_rollout(prefix: str) -> Any:
    module = import_module(f"{prefix}.buffer.rollout_buffer")
    return module.RolloutBuffer(_ENVS, _STEPS, (_OBS,), (), torch.long, torch.device("cpu"))


def _prepare_rollout_add(prefix: str) -> Callable[[], Any]:
    buffer, step = _make_rollout(prefix), _make_step()

    def call() -> None:
        if buffer.step == _STEPS:
            buffer.clear()
        buffer.add(*step)

    return call


def _prepare_rollout_call(method: str, prefix: str) -> Callable[[], Any]:
    buffer = _make_rollout(prefix)
    for _ in range(_STEPS):
        buffer.add(*_make_step())
    buffer.compute_returns_and_advantages(torch.zeros(_ENVS))
    arguments = {"compute_returns_and_advantages": (torch.zeros(_ENVS),), "get_minibatch": (_BATCH,)}.get(method, ())
    return partial(getattr(buffer, method), *arguments)


def _prepare_replay(method: str, capacity: int, prefix: str) -> Callable[[], Any]:
    module = import_module(f"{prefix}.buffer.replay_buffer")
    buffer = module.ReplayBuffer(capacity, (_OBS,), (), "cpu", torch.float32, torch.long)
    return _prepare_replay_call(buffer, method, torch.randn(_ENVS, _OBS), torch.randn(_ENVS, _OBS))


def _prepare_dict_replay(method: str, prefix: str) -> Callable[[], Any]:
    module = import_module(f"{prefix}.buffer.replay_buffer")
    buffer = module.ReplayBuffer(10_000, {"pose": (_OBS,), "goal": (2,)}, (), "cpu", torch.float32, torch.long)
    observations = [{"pose": torch.randn(_ENVS, _OBS), "goal": torch.randn(_ENVS, 2)} for _ in range(2)]
    return _prepare_replay_call(buffer, method, *observations)


def _prepare_replay_call(buffer: Any, method: str, obs: Any, next_obs: Any) -> Callable[[], Any]:
    transition = (obs, torch.randint(0, 4, (_ENVS,)), torch.randn(_ENVS), next_obs, torch.zeros(_ENVS))
    for _ in range(2 * _BATCH // _ENVS + 40):
        buffer.add(*transition)
    return partial(buffer.add, *transition) if method == "add" else partial(buffer.sample, _BATCH)
