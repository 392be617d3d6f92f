# pyright: reportMissingImports=false
"""The calls of AgileRL's training loops: off-policy, Rainbow with n steps and priorities, PPO flat and recurrent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import agilerl.components.replay_buffer as their_replay
import agilerl.components.rollout_buffer as their_rollout
import numpy as np
import torch
from agilerl.components.data import Transition
from gymnasium import spaces
from tensordict import TensorDict

import relive.compat.agilerl.components.replay_buffer as our_replay
import relive.compat.agilerl.components.rollout_buffer as our_rollout

from . import Case

ENVS, OBS, ACTIONS, CAPACITY, BATCH = 8, 17, 6, 10_000, 128
STEPS = 128
LAYERS, HIDDEN = 1, 64

RANDOM = np.random.default_rng(0)

Call = Callable[[], Any]


def cases() -> list[Case]:
    """Return every call with the set-up of both sides."""
    calls = {
        "replay add": ("ReplayBuffer", _prepare_add),
        "replay sample": ("ReplayBuffer", _prepare_sample),
        "n-step add": ("MultiStepReplayBuffer", _prepare_add),
        "n-step sample_from_indices": ("MultiStepReplayBuffer", _prepare_lookup),
        "prioritized add": ("PrioritizedReplayBuffer", _prepare_add),
        "prioritized sample": ("PrioritizedReplayBuffer", _prepare_prioritized_sample),
        "prioritized update_priorities": ("PrioritizedReplayBuffer", _prepare_update),
        "rollout add": (False, _prepare_step),
        "rollout compute_returns_and_advantages": (False, _prepare_estimate),
        "rollout get_tensor_batch": (False, _prepare_read_all),
        "rollout get_tensor_batch(batch_size)": (False, _prepare_read_some),
        "recurrent add": (True, _prepare_step),
        "recurrent prepare_sequence_tensors": (True, _prepare_sequences),
        "recurrent get_minibatch_sequences": (True, _prepare_iteration),
    }
    return [
        Case(name, _prepare_side(kind, call, ours=True), _prepare_side(kind, call, ours=False))
        for name, (kind, call) in calls.items()
    ]


def _prepare_side(kind: str | bool, call: Callable[[Any], Call], ours: bool) -> Callable[[], Call]:
    if isinstance(kind, str):
        return lambda: call(_fill_replay(getattr(our_replay if ours else their_replay, kind)))
    return lambda: call(_fill_rollout((our_rollout if ours else their_rollout).RolloutBuffer, recurrent=kind))


def _make_step() -> TensorDict:
    """Return a step of all environments, as `train_off_policy` makes it."""
    transition = Transition(
        obs=RANDOM.random((ENVS, OBS)).astype(np.float32),
        action=RANDOM.random((ENVS, ACTIONS)).astype(np.float32),
        reward=RANDOM.random(ENVS),
        next_obs=RANDOM.random((ENVS, OBS)).astype(np.float32),
        done=RANDOM.random(ENVS) < 0.01,
        batch_size=[ENVS],
    )
    return transition.to_tensordict()


def _fill_replay(kind: Any) -> Any:
    buffer = kind(CAPACITY)
    for _ in range(CAPACITY // ENVS):
        buffer.add(_make_step())
    return buffer


def _prepare_add(buffer: Any) -> Call:
    step = _make_step()
    return lambda: buffer.add(step)


def _prepare_sample(buffer: Any) -> Call:
    return lambda: buffer.sample(BATCH)


def _prepare_prioritized_sample(buffer: Any) -> Call:
    return lambda: buffer.sample(BATCH, beta=0.4)


def _prepare_update(buffer: Any) -> Call:
    index, priority = buffer.sample(BATCH, beta=0.4)["idxs"], torch.rand(BATCH)
    return lambda: buffer.update_priorities(index, priority)


def _prepare_lookup(buffer: Any) -> Call:
    index = torch.randint(len(buffer), (BATCH, 1))
    return lambda: buffer.sample_from_indices(index.squeeze(1))


def _fill_rollout(kind: Any, recurrent: bool) -> Any:
    """Return a full rollout, with its advantages."""
    architecture = {"shared_encoder_h": (LAYERS, ENVS, HIDDEN), "shared_encoder_c": (LAYERS, ENVS, HIDDEN)}
    buffer = kind(
        STEPS,
        spaces.Box(-1, 1, (OBS,), np.float32),
        spaces.Box(-1, 1, (ACTIONS,), np.float32),
        num_envs=ENVS,
        recurrent=recurrent,
        hidden_state_architecture=architecture if recurrent else None,
        max_seq_len=16 if recurrent else None,
    )
    for _ in range(STEPS):
        buffer.add(**_make_rollout_step(recurrent))
    buffer.compute_returns_and_advantages(torch.zeros(ENVS), torch.zeros(ENVS))
    return buffer


def _make_rollout_step(recurrent: bool) -> dict[str, Any]:
    """Return a step of all environments, as `collect_rollouts` gives it."""
    step = {
        "obs": RANDOM.random((ENVS, OBS)).astype(np.float32),
        "action": RANDOM.random((ENVS, ACTIONS)).astype(np.float32),
        "reward": RANDOM.random(ENVS).astype(np.float32),
        "done": RANDOM.random(ENVS) < 0.02,
        "value": RANDOM.random(ENVS).astype(np.float32),
        "log_prob": RANDOM.random(ENVS).astype(np.float32),
        "next_obs": RANDOM.random((ENVS, OBS)).astype(np.float32),
    }
    if recurrent:
        state = torch.rand(LAYERS, ENVS, HIDDEN)
        step["hidden_state"] = {"shared_encoder_h": state, "shared_encoder_c": state}
    return step


def _prepare_step(buffer: Any) -> Call:
    step = _make_rollout_step(buffer.recurrent)

    def call() -> None:
        if buffer.pos == buffer.capacity:
            buffer.reset()
        buffer.add(**step)

    return call


def _prepare_estimate(buffer: Any) -> Call:
    last, over = torch.zeros(ENVS), torch.zeros(ENVS)
    return lambda: buffer.compute_returns_and_advantages(last, over)


def _prepare_read_all(buffer: Any) -> Call:
    return lambda: buffer.get_tensor_batch(device="cpu")


def _prepare_read_some(buffer: Any) -> Call:
    return lambda: buffer.get_tensor_batch(BATCH, device="cpu")


def _prepare_sequences(buffer: Any) -> Call:
    return lambda: buffer.prepare_sequence_tensors(device="cpu")


def _prepare_iteration(buffer: Any) -> Call:
    buffer.prepare_sequence_tensors(device="cpu")
    return lambda: list(buffer.get_minibatch_sequences(16))
