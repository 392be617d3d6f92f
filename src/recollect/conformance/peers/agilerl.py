# pyright: reportMissingImports=false
"""AgileRL: `RolloutBuffer(recurrent=True)`, chunked sequences.

It drops the steps that are left over behind the last full sequence of an episode. Padding is prepared once a rollout;
that is part of an epoch here, since every rollout pays it before its first one.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from agilerl.components.rollout_buffer import RolloutBuffer
from agilerl.typing import BPTTSequenceType

from recollect.conformance.peers.protocol import Array, Peer, RolloutShape, Sequences, Step


class AgileRlRecurrent:
    """`prepare_sequence_tensors` and `get_minibatch_sequences`."""

    def __init__(self, shape: RolloutShape, length: int) -> None:
        self._shape, self._length = shape, length

    def fill(self, steps: list[Step], state: Array, advantage: Array, return_: Array) -> None:
        shape = self._shape
        self._buffer = RolloutBuffer(
            shape.num_steps,
            gym.spaces.Box(-np.inf, np.inf, (shape.obs_dim,), np.float32),
            gym.spaces.Box(-np.inf, np.inf, (shape.action_dim,), np.float32),
            num_envs=shape.num_envs,
            recurrent=True,
            hidden_state_architecture={"h": (1, shape.num_envs, state.shape[-1])},
            max_seq_len=self._length,
            bptt_sequence_type=BPTTSequenceType.CHUNKED,
        )
        for step, before in zip(steps, state, strict=True):
            ended, hidden = step.terminated | step.truncated, {"h": torch.from_numpy(before).unsqueeze(0)}
            self._buffer.add(step.obs, step.action, step.reward, ended, step.value, step.log_prob, hidden_state=hidden)
        self._buffer.buffer["advantages"] = torch.from_numpy(advantage)
        self._buffer.buffer["returns"] = torch.from_numpy(return_)

    def minibatches(self, num_steps: int) -> Iterable[Any]:
        self._buffer.prepare_sequence_tensors()
        return self._buffer.get_minibatch_sequences(num_steps // self._length)

    def read(self, batch: Any) -> Sequences:
        padded, _ = batch
        state = padded["initial_hidden_states"]["h"].squeeze(1)
        rows = padded["observations"][:, 0].long().view(len(state), -1)
        masks = padded["pad_mask"].view(len(state), -1)
        return Sequences([run[mask].tolist() for run, mask in zip(rows, masks, strict=True)], state.numpy())


def peer() -> Peer:
    """AgileRL."""
    return Peer("AgileRL", version("agilerl"), recurrent=AgileRlRecurrent)
