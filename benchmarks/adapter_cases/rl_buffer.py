"""The calls of off-policy and on-policy loops with rl-buffer, with 16 environments and 8 numbers per observation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import torch

from . import Case

_ENVS, _STEPS, _OBS, _BATCH = 16, 64, 8, 256
_PREFIXES = ("relive.compat.rl_buffer", "rl_buffer")


def cases() -> list[Case]:
    """Return every call. The original must be importable as `rl_buffer`, at commit 1d8b3f3."""
    calls = {
        "ReplayBuffer.add": partial(_prepare_replay, "add"),
        "ReplayBuffer.get": partial(_prepare_replay, "get"),
        "PrioritizedReplayBuffer.add": partial(_prepare_prioritized, "add"),
        "PrioritizedReplayBuffer.get": partial(_prepare_prioritized, "get"),
        "PrioritizedReplayBuffer.update_priorities": partial(_prepare_prioritized, "update_priorities"),
        "SharedReplayBuffer.add": partial(_prepare_shared, "add"),
        "SharedReplayBuffer.get": partial(_prepare_shared, "get"),
        "RolloutBuffer.add": _prepare_rollout_add,
        "RolloutBuffer.compute_returns_and_advantages": partial(_prepare_rollout, "compute_returns_and_advantages"),
        "RolloutBuffer.get (an epoch)": partial(_prepare_rollout, "get"),
        "RolloutBuffer.normalize_advantages": partial(_prepare_rollout, "normalize_advantages"),
        "StatsTracker.update": partial(_prepare_tracker, "update"),
        "StatsTracker.get_statistics": partial(_prepare_tracker, "get_statistics"),
        "SumTree.update": partial(_prepare_sum_tree, "update"),
        "SumTree.get": partial(_prepare_sum_tree, "get"),
    }
    return [Case(name, *(partial(call, prefix) for prefix in _PREFIXES)) for name, call in calls.items()]


def _make_buffer(prefix: str, path: str, *arguments: Any) -> Any:
    module, _, name = path.rpartition(".")
    tracker = import_module(f"{prefix}.stats_tracker").StatsTracker(_ENVS)
    size = _STEPS if name == "RolloutBuffer" else 1000
    return getattr(import_module(f"{prefix}.{module}"), name)(size, _ENVS, (_OBS,), (2,), tracker, *arguments)


def _prepare_replay_call(buffer: Any, method: str) -> Callable[[], Any]:
    flags = torch.zeros(2, _ENVS, dtype=torch.bool)
    step = (torch.randn(_ENVS, _OBS), torch.randn(_ENVS, 2), torch.randn(_ENVS), *flags, torch.randn(_ENVS, _OBS))
    for _ in range(2 * _BATCH // _ENVS):
        buffer.add(*step)
    if method == "add":
        return partial(buffer.add, *step)
    if method == "get":
        return partial(buffer.get, _BATCH)
    return partial(buffer.update_priorities, buffer.get(_BATCH).indices, torch.rand(_BATCH))


def _prepare_replay(method: str, prefix: str) -> Callable[[], Any]:
    return _prepare_replay_call(_make_buffer(prefix, "replay_buffer.ReplayBuffer"), method)


def _prepare_prioritized(method: str, prefix: str) -> Callable[[], Any]:
    return _prepare_replay_call(_make_buffer(prefix, "prioritized_replay_buffer.PrioritizedReplayBuffer"), method)


def _prepare_shared(method: str, prefix: str) -> Callable[[], Any]:
    return _prepare_replay_call(_make_buffer(prefix, "shared_replay_buffer.SharedReplayBuffer", True), method)


def _make_rollout_step() -> tuple[torch.Tensor, ...]:
    done = torch.zeros(_ENVS, dtype=torch.bool)
    return torch.randn(_ENVS, _OBS), torch.randn(_ENVS, 2), torch.randn(_ENVS), done, *torch.randn(2, _ENVS)


def _prepare_rollout_add(prefix: str) -> Callable[[], Any]:
    buffer, step = _make_buffer(prefix, "rollout_buffer.RolloutBuffer"), _make_rollout_step()

    def call() -> None:
        if buffer.full:
            buffer.reset()
        buffer.add(*step)

    return call


def _prepare_rollout(method: str, prefix: str) -> Callable[[], Any]:
    buffer = _make_buffer(prefix, "rollout_buffer.RolloutBuffer")
    for _ in range(_STEPS):
        buffer.add(*_make_rollout_step())
    last = torch.zeros(_ENVS), torch.zeros(_ENVS, dtype=torch.bool)
    buffer.compute_returns_and_advantages(*last)
    if method == "get":
        return lambda: list(buffer.get(_BATCH))
    return partial(getattr(buffer, method), *(last if method == "compute_returns_and_advantages" else ()))


def _prepare_tracker(method: str, prefix: str) -> Callable[[], Any]:
    tracker = import_module(f"{prefix}.stats_tracker").StatsTracker(_ENVS)
    dones, rewards = np.arange(_ENVS) == 3, np.ones(_ENVS, dtype=np.float32)
    for _ in range(20):
        tracker.update(dones, rewards)
    return partial(tracker.update, dones, rewards) if method == "update" else tracker.get_statistics


def _prepare_sum_tree(method: str, prefix: str) -> Callable[[], Any]:
    tree = import_module(f"{prefix}.utils.sum_tree").SumTree(1 << 14)
    for priority in range(1 << 14):
        tree.add(float(priority))
    return partial(tree.update, 777, 3.0) if method == "update" else partial(tree.get, tree.total_priority / 3)
