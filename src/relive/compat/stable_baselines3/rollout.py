# pyright: reportMissingImports=false, reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false
"""`RolloutBuffer` and `DictRolloutBuffer`: Stable-Baselines3's on-policy buffers.

Its flag says that the episode ended *before* a step; the end of the last step is an argument of the advantages. Its
algorithms have added γ V(final observation) to the reward of a truncated step already, so that every end is a
termination here.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
import stable_baselines3.common.buffers as theirs
import torch
from gymnasium import spaces
from stable_baselines3.common.type_aliases import DictRolloutBufferSamples, RolloutBufferSamples
from stable_baselines3.common.vec_env import VecNormalize
from tensordict import TensorDict

from relive.compat.stable_baselines3.layout import fields_of, given_shapes, numpy_of, shaped
from relive.errors import NotReadyError, explain
from relive.rollout.buffer import RolloutBuffer as Core

_FIELDS = ("obs", "action", "value", "log_prob", "advantage", "return")
"""What a batch consists of, in the order of its tuple."""


def _column(name: str) -> Any:
    """A field of the stored steps as an array that shares their memory."""
    return property(lambda buffer: numpy_of(buffer._core[name]))


class RolloutBuffer(theirs.RolloutBuffer):
    """`buffer_size` steps of `n_envs` environments, for PPO and A2C; observations of any space, Dict too.

    The arrays (`observations`, `rewards`, …) are views of the stored steps, time first, and stay so after `get`:
    writing to them changes what is learnt from. Actions are kept as the float32 that batches have.
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: torch.device | str = "auto",
        gae_lambda: float = 1,
        gamma: float = 0.99,
        n_envs: int = 1,
    ) -> None:
        theirs.BaseBuffer.__init__(self, buffer_size, observation_space, action_space, device, n_envs=n_envs)
        self.gae_lambda = gae_lambda
        self.gamma = gamma
        self._shapes = given_shapes(observation_space, n_envs)
        self._not_yet = np.zeros(n_envs, np.bool_)
        """Whether a step ended its episode is told with the step after it."""
        self.episode_starts = np.zeros((buffer_size, n_envs), np.bool_)
        self._core = Core(
            buffer_size,
            n_envs,
            obs=fields_of(observation_space),
            action=(self.action_dim,),
            seed=np.random.randint(2**31),  # noqa: NPY002 (its algorithms seed the global generator)
        )

    @property
    def nbytes(self) -> int:
        """What this buffer keeps, in bytes."""
        return self._core.nbytes + self.episode_starts.nbytes

    def reset(self) -> None:
        """Forget the stored steps."""
        self._core.clear()
        self.pos, self.full = 0, False

    def add(
        self,
        obs: np.ndarray,
        action: np.ndarray,
        reward: np.ndarray,
        episode_start: np.ndarray,
        value: torch.Tensor,
        log_prob: torch.Tensor,
    ) -> None:
        """Store one step of every environment; `episode_start`: its observation is the first of an episode."""
        n_envs = self.n_envs
        self._core.add(
            shaped(self._shapes, obs),
            np.asarray(action, np.float32).reshape(n_envs, self.action_dim),
            np.asarray(reward, np.float32).reshape(n_envs),
            self._not_yet,
            self._not_yet,
            value=value.numpy(force=True).reshape(n_envs),
            log_prob=log_prob.numpy(force=True).reshape(n_envs),
        )
        self.episode_starts[self.pos] = episode_start
        self.pos += 1
        self.full = self.pos == self.buffer_size

    def compute_returns_and_advantage(self, last_values: torch.Tensor, dones: np.ndarray) -> None:
        """Compute `advantages` and `returns`; `dones`: the last step ended its episode."""
        ended = self._core["terminated"].numpy()
        ended[:-1] = self.episode_starts[1 : self.pos]
        ended[-1] = dones
        last = last_values.numpy(force=True).reshape(self.n_envs)
        self._core.compute_advantage(last, gamma=self.gamma, lam=self.gae_lambda)

    def get(self, batch_size: int | None = None) -> Generator[Any, None, None]:
        """Every step once, in random order and in batches; all at once without a `batch_size`."""
        if not self.full:
            remedy = f"Add {self.buffer_size - self.pos} more."
            raise NotReadyError(explain("get", f"{self.buffer_size} steps", self.pos, remedy))
        size = self.buffer_size * self.n_envs if batch_size is None else batch_size
        device = None if self.device.type == "cpu" else self.device
        for batch in self._core.minibatches(size, fields=_FIELDS, device=device):
            yield self._samples(batch)

    def _get_samples(self, batch_inds: np.ndarray, env: VecNormalize | None = None) -> Any:
        """The steps of these numbers, which count time within environments."""
        inds = torch.as_tensor(batch_inds)
        time, envs = inds % self.buffer_size, inds // self.buffer_size
        return self._samples(self._core.data[time, envs])

    def _samples(self, batch: TensorDict) -> Any:
        obs, *rest = (batch[name] for name in _FIELDS)
        if isinstance(obs, torch.Tensor):
            return RolloutBufferSamples(obs, *rest)
        return DictRolloutBufferSamples(dict(obs.items()), *rest)

    # The arrays [steps, n_envs, …]
    observations = _column("obs")
    actions = _column("action")
    rewards = _column("reward")
    values = _column("value")
    log_probs = _column("log_prob")
    advantages = _column("advantage")
    returns = _column("return")


class DictRolloutBuffer(RolloutBuffer, theirs.DictRolloutBuffer):
    """The same under the name for Dict observations."""
