"""AgileRL's transitions, the containers of one step, and its dataset of batches."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from tensordict import TensorClass, TensorDict
from torch.utils.data import IterableDataset, get_worker_info

from relive.compat.agilerl.components.replay_buffer import ReplayBuffer
from relive.compat.agilerl.rows import find_original_class

_ReplayBufferClass: Any = find_original_class("components.replay_buffer", "ReplayBuffer", ReplayBuffer)


def to_torch_tensor(data: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Convert an array, a number or a tensor to a tensor of `dtype`."""
    return data.to(dtype=dtype) if isinstance(data, torch.Tensor) else torch.tensor(data, dtype=dtype, device="cpu")


def to_tensordict(data: Any, dtype: torch.dtype = torch.float32) -> TensorDict:
    """Convert a dict of arrays to a TensorDict; the entries of a tuple become "tuple_obs_0", …"""
    if isinstance(data, TensorDict):
        return data.to(dtype=dtype)
    if isinstance(data, tuple):
        data = {f"tuple_obs_{i}": part for i, part in enumerate(data)}
    if not isinstance(data, Mapping) or not all(isinstance(key, str) for key in data):
        got = f"{type(data).__name__}. Pass a dict with strings as keys, a tuple or a TensorDict."
        raise TypeError(f"Cannot convert data of type {got}")
    return TensorDict({key: to_torch_tensor(value, dtype) for key, value in data.items()})


def transition_to_tensordict(transition: Any) -> TensorDict:
    """Return the fields of a transition as a TensorDict."""
    return transition.to_tensordict()


class Transition(TensorClass):
    """One step of an environment, or of several, in float32."""

    obs: Any
    action: Any
    next_obs: Any
    reward: Any
    done: Any

    def __post_init__(self) -> None:
        """Convert the fields; a reward or done without axes gets shape (1,)."""
        for name in ("obs", "next_obs"):
            if isinstance(value := getattr(self, name), dict | tuple):
                setattr(self, name, to_tensordict(value))
        for name in ("action", "reward", "done"):
            value = to_torch_tensor(getattr(self, name))
            setattr(self, name, value.unsqueeze(-1) if name != "action" and value.ndim == 0 else value)


class MultiAgentTransition(TensorClass):
    """One step of several agents: every field is a dict by agent, in float32."""

    obs: Any
    action: Any
    reward: Any
    next_obs: Any
    done: Any

    def __post_init__(self) -> None:
        """Convert the fields; an agent's observation may be a dict or a tuple."""
        for name in ("obs", "action", "reward", "next_obs", "done"):
            setattr(self, name, _convert_by_agent(getattr(self, name)))


def _convert_by_agent(data: Any) -> TensorDict:
    return TensorDict(
        {
            agent: to_tensordict(part) if isinstance(part, dict | tuple) else to_torch_tensor(part)
            for agent, part in data.items()
        }
    )


class ReplayDataset(find_original_class("components.data", "ReplayDataset", IterableDataset)):
    """Endless dataset of batches drawn from a buffer, for torch's DataLoader.

    A worker process of the loader draws from its own copy of the memory, which is made when the process starts.
    """

    def __init__(self, buffer: Any, batch_size: int = 256) -> None:
        # The two messages below keep AgileRL's words up to the colon, because AgileRL's tests match them.
        if not isinstance(buffer, _ReplayBufferClass):
            kind = type(buffer).__name__
            warnings.warn(f"Buffer is not an agilerl ReplayBuffer: {kind}.sample() draws the batches.", stacklevel=2)
        if batch_size <= 0:
            raise AssertionError(f"Batch size must be greater than zero: {batch_size} rows are no batch.")
        self.buffer = buffer
        self.batch_size = batch_size
        self._process = os.getpid()

    def __iter__(self) -> Iterator[TensorDict]:
        worker = get_worker_info()
        if worker is not None and self._process != os.getpid() and isinstance(self.buffer, ReplayBuffer):
            # A worker process gets its generator once, so that iterating again continues its draws.
            self._process = os.getpid()
            self.buffer.use_forked_copy(worker.seed)
        yield self.buffer.sample(self.batch_size)
