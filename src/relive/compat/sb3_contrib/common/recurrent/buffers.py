# pyright: reportMissingImports=false, reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false
"""`RecurrentRolloutBuffer` and `RecurrentDictRolloutBuffer`: rollouts with LSTM states, read as padded sequences.

A batch is a run of consecutive steps, environment by environment. A sequence ends with its episode, with the steps of
its environment or with the batch. The first batch starts at a random step, and the rollout wraps around.
"""

from __future__ import annotations

import importlib
from collections.abc import Generator
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from relive.compat.seeding import choose_seed
from relive.compat.stable_baselines3.rollout import DictRolloutBuffer, RolloutBuffer
from relive.compat.views import make_memory_views, map_tree

__all__ = ["RecurrentDictRolloutBuffer", "RecurrentRolloutBuffer"]

contrib: Any = importlib.import_module("sb3_contrib.common.recurrent.buffers")
RNNStates: Any = contrib.RNNStates

_STATE_NAMES = ("hidden_states_pi", "cell_states_pi", "hidden_states_vf", "cell_states_vf")


class _RecurrentBuffer(RolloutBuffer):
    """Base class of the rollout buffers with LSTM states."""

    hidden_states_pi, cell_states_pi, hidden_states_vf, cell_states_vf = make_memory_views(*_STATE_NAMES)
    _batch_types = (contrib.RecurrentRolloutBufferSamples, contrib.RecurrentDictRolloutBufferSamples)
    _casts_actions = False

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        hidden_state_shape: tuple[int, int, int, int],
        device: torch.device | str = "auto",
        gae_lambda: float = 1,
        gamma: float = 0.99,
        n_envs: int = 1,
    ) -> None:
        self.hidden_state_shape = hidden_state_shape
        self._random = np.random.default_rng(choose_seed())
        RolloutBuffer.__init__(self, buffer_size, observation_space, action_space, device, gae_lambda, gamma, n_envs)

    @classmethod
    def make_like(cls, other: Any) -> _RecurrentBuffer:
        """Make an empty buffer with the settings of another one, which may be sb3-contrib's."""
        names = ("buffer_size", "observation_space", "action_space", "hidden_state_shape", "device", "gae_lambda")
        return cls(*(getattr(other, name) for name in (*names, "gamma", "n_envs")))

    def _allocate_memory(self) -> None:
        super()._allocate_memory()
        for name in _STATE_NAMES:
            self._arrays[name] = np.zeros(self.hidden_state_shape, np.float32)

    def add(self, *args: Any, lstm_states: Any, **kwargs: Any) -> None:
        """Store one step of every environment with the LSTM states before it."""
        row = self.pos
        super().add(*args, **kwargs)
        for name, state in zip(_STATE_NAMES, (*lstm_states.pi, *lstm_states.vf), strict=True):
            self._arrays[name][row] = state.numpy(force=True)

    def get(self, batch_size: int | None = None) -> Generator[Any, None, None]:
        """Yield every step once, in batches of sequences; by default in a single batch."""
        if self._has_own_batches:
            yield from super().get(batch_size)
            return
        self._require_full()
        self.generator_ready = True
        total = self.buffer_size * self.n_envs
        numbers = np.roll(np.arange(total), -int(self._random.integers(total)))
        for start in range(0, total, batch_size or total):
            yield self._make_sequences(numbers[start : start + (batch_size or total)])

    def _make_sequences(self, step_numbers: np.ndarray) -> Any:
        """Make padded sequences of the steps with these numbers, env · buffer_size + time."""
        time, envs = step_numbers % self.buffer_size, step_numbers // self.buffer_size
        starts = (self._arrays["episode_starts"][time, envs] != 0) | (time == 0)
        starts[0] = True
        self.seq_start_indices = first = np.flatnonzero(starts)
        rows, mask = _compute_padding(first, len(step_numbers))

        def pad_field(name: str) -> Any:
            return map_tree(lambda array: self._pad_steps(array[time, envs], rows, mask), self._arrays[name])

        parts = [
            pad_field(name) for name in ("observations", "actions", "values", "log_probs", "advantages", "returns")
        ]
        states = [self._arrays[name][time[first], :, envs[first]].swapaxes(0, 1) for name in _STATE_NAMES]
        pi_h, pi_c, vf_h, vf_c = (self.to_torch(np.ascontiguousarray(state)) for state in states)
        step_mask = torch.from_numpy(mask.astype(np.float32)).to(self.device)
        return self._make_samples(
            [*parts, RNNStates((pi_h, pi_c), (vf_h, vf_c)), pad_field("episode_starts"), step_mask]
        )

    def _pad_steps(self, steps: np.ndarray, rows: np.ndarray, mask: np.ndarray) -> torch.Tensor:
        """Gather steps [B, …] into sequences [S · L, …] with zeros as padding."""
        sequences = steps[rows]
        sequences[~mask] = 0
        return self.to_torch(sequences)


class RecurrentRolloutBuffer(_RecurrentBuffer, contrib.RecurrentRolloutBuffer):
    """Rollouts with the states of the actor's and the critic's LSTM before each step.

    The states are arrays `[buffer_size, layers, n_envs, size]`.
    """


class RecurrentDictRolloutBuffer(_RecurrentBuffer, DictRolloutBuffer, contrib.RecurrentDictRolloutBuffer):
    """A `RecurrentRolloutBuffer` for Dict observations only."""


def _compute_padding(first_steps: np.ndarray, num_steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the step numbers of padded sequences [S · L] that start at `first_steps`, and a mask of real steps."""
    lengths = np.diff(first_steps, append=num_steps)
    offsets = np.arange(lengths.max())
    mask = offsets < lengths[:, None]
    return np.where(mask, first_steps[:, None] + offsets, 0).reshape(-1), mask.reshape(-1)
