"""The calls of rsl_rl's PPO and distillation in every iteration, 24 steps of robots with two observation groups."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rsl_rl.storage import RolloutStorage as Theirs
from tensordict import TensorDict

from relive.compat.rsl_rl.storage import RolloutStorage as Ours

from . import Case

STEPS, OBS, PRIVILEGED, ACTIONS, HIDDEN = 24, 48, 60, 12, 64
MINIBATCHES, EPOCHS = 4, 5

Call = Callable[[], Any]


def cases() -> list[Case]:
    """Return every call; reading is measured over all epochs of one update."""
    calls: dict[str, Callable[[Any], Call]] = {}
    for num_envs in (16, 512, 4096):
        calls[f"add_transition, {num_envs:,} environments"] = partial(_prepare_add, "rl", num_envs, False)
    calls["add_transition, 512 environments, LSTM"] = partial(_prepare_add, "rl", 512, True)
    calls["add_transition, 512 environments, distillation"] = partial(_prepare_add, "distillation", 512, False)
    for num_envs in (16, 512, 4096):
        calls[f"mini_batch_generator, {num_envs:,} environments"] = partial(_prepare_minibatches, num_envs)
    for num_envs in (16, 512):
        calls[f"recurrent_mini_batch_generator, {num_envs:,} environments"] = partial(
            _prepare_recurrent_minibatches, num_envs
        )
    calls["generator, 512 environments"] = _prepare_distillation
    return [Case(name, partial(call, Ours), partial(call, Theirs)) for name, call in calls.items()]


def _make_step(kind: Any, num_envs: int, recurrent: bool) -> Any:
    step = kind.Transition()
    observations = {"policy": torch.randn(num_envs, OBS), "critic": torch.randn(num_envs, PRIVILEGED)}
    step.observations = TensorDict(observations, [num_envs], device="cpu")
    step.actions, step.privileged_actions = torch.randn(2, num_envs, ACTIONS)
    step.rewards, step.dones = torch.randn(num_envs), (torch.rand(num_envs) < 0.03).long()
    step.values, step.actions_log_prob = torch.randn(num_envs, 1), torch.randn(num_envs)
    # rsl_rl's Gaussian has one deviation for all environments, expanded.
    step.distribution_params = (torch.randn(num_envs, ACTIONS), torch.ones(ACTIONS).expand(num_envs, ACTIONS))
    if recurrent:
        state = tuple(torch.randn(2, 1, num_envs, HIDDEN))
        step.hidden_states = (state, state)
    return step


def _fill_storage(kind: Any, training: str, num_envs: int, recurrent: bool = False) -> tuple[Any, Any]:
    """Return a full storage, and the step that fills it."""
    step = _make_step(kind, num_envs, recurrent)
    storage = kind(training, num_envs, STEPS, step.observations, [ACTIONS])
    for _ in range(STEPS):
        storage.add_transition(step)
    return storage, step


def _prepare_add(training: str, num_envs: int, recurrent: bool, kind: Any) -> Call:
    """Return a function that adds one step; the first of every 24 also clears."""
    storage, step = _fill_storage(kind, training, num_envs, recurrent)

    def call() -> None:
        if storage.step == STEPS:
            storage.clear()
        storage.add_transition(step)

    return call


def _prepare_minibatches(num_envs: int, kind: Any) -> Call:
    storage, _ = _fill_storage(kind, "rl", num_envs)
    return lambda: [None for _ in storage.mini_batch_generator(MINIBATCHES, EPOCHS)]


def _prepare_recurrent_minibatches(num_envs: int, kind: Any) -> Call:
    storage, _ = _fill_storage(kind, "rl", num_envs, recurrent=True)
    return lambda: [None for _ in storage.recurrent_mini_batch_generator(MINIBATCHES, EPOCHS)]


def _prepare_distillation(kind: Any) -> Call:
    storage, _ = _fill_storage(kind, "distillation", 512)
    return lambda: [None for _ in storage.generator()]
