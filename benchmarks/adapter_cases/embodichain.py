"""The calls of EmbodiChain's collector, PPO and GRPO, with 64 environments, 32 steps and 16 numbers per observation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch

from . import Case

_ENVS, _STEPS, _OBS, _ACTION, _BATCH = 64, 32, 16, 4, 256
_PREFIXES = ("relive.compat.embodichain", "embodichain")


def cases() -> list[Case]:
    """Return every call. The original must be importable as `embodichain`; the older buffer is of release 0.1.0."""
    calls = {
        "RolloutBuffer.start_rollout, add, get": _prepare_cycle,
        "transition_view": partial(_prepare_view, False),
        "transition_view (flat)": partial(_prepare_view, True),
        "iterate_minibatches (an epoch)": _prepare_epoch,
        "compute_gae": _prepare_gae,
        "older RolloutBuffer.add": _prepare_older_add,
        "older RolloutBuffer.iterate_minibatches (an epoch)": _prepare_older_epoch,
    }
    return [Case(name, *(partial(call, prefix) for prefix in _PREFIXES)) for name, call in calls.items()]


def _make_buffer(prefix: str) -> Any:
    module = import_module(f"{prefix}.learning.rl.buffer")
    return module.RolloutBuffer(_ENVS, _STEPS, _OBS, _ACTION, torch.device("cpu"))


def _make_rollout(prefix: str) -> Any:
    rollout = _make_buffer(prefix).start_rollout()
    for name in ("obs", "action", "sample_log_prob", "value", "reward"):
        rollout[name][:] = torch.randn(rollout[name].shape)
    for name in ("done", "terminated", "truncated"):
        rollout[name][:] = torch.rand(rollout[name].shape) < 0.01
    return rollout


def _prepare_cycle(prefix: str) -> Callable[[], Any]:
    buffer = _make_buffer(prefix)

    def call() -> Any:
        buffer.add(buffer.start_rollout())
        return buffer.get(flatten=False)

    return call


def _prepare_view(flatten: bool, prefix: str) -> Callable[[], Any]:
    return partial(import_module(f"{prefix}.learning.rl.buffer").transition_view, _make_rollout(prefix), flatten)


def _prepare_epoch(prefix: str) -> Callable[[], Any]:
    module = import_module(f"{prefix}.learning.rl.buffer")
    flat = module.transition_view(_make_rollout(prefix), flatten=True)
    return lambda: list(module.iterate_minibatches(flat, _BATCH, torch.device("cpu")))


def _prepare_gae(prefix: str) -> Callable[[], Any]:
    return partial(import_module(f"{prefix}.learning.rl.algo.common").compute_gae, _make_rollout(prefix), 0.99, 0.95)


def _make_older_buffer(prefix: str) -> tuple[Any, tuple[torch.Tensor, ...]]:
    module = import_module(f"{prefix}.agents.rl.buffer.rollout_buffer")
    done = torch.zeros(_ENVS, dtype=torch.bool)
    step = (torch.randn(_ENVS, _OBS), torch.randn(_ENVS, _ACTION), torch.randn(_ENVS), done, *torch.randn(2, _ENVS))
    return module.RolloutBuffer(_STEPS, _ENVS, _OBS, _ACTION, torch.device("cpu")), step


def _prepare_older_add(prefix: str) -> Callable[[], Any]:
    buffer, step = _make_older_buffer(prefix)

    def call() -> None:
        if buffer.step == _STEPS:
            buffer.step = 0
        buffer.add(*step)

    return call


def _prepare_older_epoch(prefix: str) -> Callable[[], Any]:
    buffer, step = _make_older_buffer(prefix)
    for _ in range(_STEPS):
        buffer.add(*step)
    buffer.set_extras({"advantages": torch.randn(_STEPS, _ENVS), "returns": torch.randn(_STEPS, _ENVS)})
    return lambda: list(buffer.iterate_minibatches(_BATCH))
