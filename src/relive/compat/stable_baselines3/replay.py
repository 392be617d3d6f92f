# pyright: reportMissingImports=false, reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false
"""`ReplayBuffer`, `DictReplayBuffer` and `NStepReplayBuffer`: Stable-Baselines3's off-policy buffers.

Stable-Baselines3's `done` marks every end of an episode, and "TimeLimit.truncated" in an info marks a timeout. `dones`
in batches exclude timeouts: they are relive's `terminated`. Rows are positions `[buffer_size, n_envs]`, written in
turn.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import stable_baselines3.common.buffers as sb3
import torch
from gymnasium import spaces
from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples
from stable_baselines3.common.vec_env import VecNormalize
from tensordict import TensorDict

from relive.compat.pickling import PicklableBuffer, restore_core
from relive.compat.seeding import choose_seed
from relive.compat.stable_baselines3.observations import (
    copy_if_shared,
    count_bytes,
    declare_fields,
    get_step_shapes,
    has_overrides,
    reshape_step,
    stack_frames,
    to_numpy,
    to_tensors,
    unstack_frames,
)
from relive.compat.stable_baselines3.rows import SharedRows, StoredRows
from relive.compat.views import make_memory_views
from relive.errors import SchemaError, explain
from relive.replay.samplers import Sampler, Uniform
from relive.replay.views import NStep, Transition, View
from relive.schema.assembly import to_device
from relive.schema.checks import check_choice
from relive.schema.fields import Declaration, Field

_MAX_BYTES_STORED_TWICE = 1024
"""Size in bytes above which an observation is stored once by default."""
_ARRAY_NAMES = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts")
_TRANSITION = Transition()
_BOOL, _FLOAT = np.dtype(np.bool_), np.dtype(np.float32)
CONVERSION_METHODS = ("to_torch", "_normalize_obs", "_normalize_reward")
"""Names of methods that Stable-Baselines3's `_get_samples` calls."""


class ReplayBuffer(PicklableBuffer, sb3.ReplayBuffer):
    """The newest `buffer_size` transitions of `n_envs` environments, for DQN, SAC, TD3 and DDPG.

    Observations may be of any space, Dict included. `sample` returns exactly the transitions that were added.

    Two arguments that Stable-Baselines3 lacks, for `replay_buffer_kwargs`:

    - `next_obs="stored"`, the default for small observations, keeps two observations per transition, and the arrays
      (`observations`, `rewards`, …) are the memory itself. `"shared"`, the default for images and with
      `optimize_memory_usage`, stores every observation once. The last observation of an episode then takes one of the
      `buffer_size` rows, and the arrays are copies.
    - `n_stack=4` declares that observations are stacks of four frames, as `VecFrameStack` makes them. Single frames
      are stored.

    A subclass may write the arrays and `pos` itself, and read them in its own `_get_samples`, as in Stable-Baselines3:
    its default is `"stored"`.
    """

    observations, next_observations, actions, rewards, dones, timeouts = make_memory_views(*_ARRAY_NAMES)
    _sums_rewards = False
    """Whether batches contain sums of rewards; a normalizer is then applied before the sum."""

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        *,
        next_obs: Literal["stored", "shared"] | None = None,
        n_stack: int | None = None,
    ) -> None:
        sb3.BaseBuffer.__init__(self, buffer_size, observation_space, action_space, device, n_envs=n_envs)
        self._check_arguments(optimize_memory_usage, handle_timeout_termination)
        self.buffer_size = max(buffer_size // n_envs, 1)
        self.optimize_memory_usage = optimize_memory_usage
        self.handle_timeout_termination = handle_timeout_termination
        self.n_stack = n_stack
        self._random = np.random.default_rng(choose_seed())
        self._has_own_batches = has_overrides(self, "_get_samples", *CONVERSION_METHODS)
        """Whether a user's class overrides a method that makes batches from positions."""
        self._next_obs = self._choose_storage(next_obs)
        self._allocate_memory(self._draw_seed())

    def _check_arguments(self, optimize_memory_usage: bool, handle_timeout_termination: bool) -> None:
        """Raise for arguments that Stable-Baselines3 refuses."""
        if optimize_memory_usage and handle_timeout_termination:
            remedy = 'Pass handle_timeout_termination=False, or use next_obs="shared", which has no such limit.'
            raise ValueError(explain("optimize_memory_usage", "no timeouts to handle", "both", remedy))

    def _choose_storage(self, next_obs: str | None) -> str:
        """Return the argument `next_obs`, or by default "stored" for small observations and "shared" for large ones."""
        check_choice("next_obs", next_obs, ("stored", "shared", None))
        if next_obs == "stored" and (self.n_stack is not None or self.optimize_memory_usage):
            expected = '"shared" with n_stack or optimize_memory_usage'
            raise SchemaError(explain("next_obs", expected, '"stored"', "Leave one of them out."))
        if next_obs is not None:
            return next_obs
        is_large = count_bytes(self.observation_space) > _MAX_BYTES_STORED_TWICE and not (
            self._has_own_batches or has_overrides(self, "add", "sample")
        )
        return "shared" if is_large or self.optimize_memory_usage or self.n_stack is not None else "stored"

    def _draw_seed(self) -> int:
        return int(self._random.integers(2**62))

    def _allocate_memory(self, seed: int) -> None:
        """Make empty rows and the attributes that follow from the arguments of the constructor."""
        self._shapes = get_step_shapes(self.observation_space, self.n_envs)
        self._extra_values: dict[str, Any] = {}
        """Values of the next step's additional fields, by name."""
        self._fits_unchanged = not self.n_stack
        """Whether all observations so far could be stored without reshaping."""
        self._action_dtype: Any = np.dtype(self._maybe_cast_dtype(self.action_space.dtype))
        self._flag_shape, self._action_shape = (self.n_envs,), (self.n_envs, self.action_dim)
        kind = StoredRows if self._next_obs == "stored" else SharedRows
        self._fields = declare_fields(self.observation_space, self.n_stack)
        self._rows: Any = kind(
            self.buffer_size,
            self.n_envs,
            obs=self._fields,
            action=Field(self.action_dim, self._action_dtype),
            extra=self._declare_extra_fields(),
            sampler=self._make_sampler(),
            seed=seed,
        )
        self._core = self._rows.core

    def _declare_extra_fields(self) -> dict[str, Declaration]:
        return {}

    def _make_sampler(self) -> Sampler:
        return Uniform()

    def _get_memory(self, name: str) -> Any:
        array = self._rows.get_array(name)
        if name == "observations" and self.optimize_memory_usage:
            self._rows.write_newest_observations(array)
        return unstack_frames(array, self.obs_shape, 2) if self.n_stack else array

    @property
    def _core_is_current(self) -> bool:
        """Whether `add` stored every step of this buffer; False if a user wrote into the arrays and set `pos`."""
        num_written = self._rows.num_written
        return self.pos == num_written % self.buffer_size and self.full == (num_written >= self.buffer_size)

    @property
    def nbytes(self) -> int:
        """Size of the memory in bytes."""
        return self._core.nbytes + sum(self._rows.get_array(name).nbytes for name in self._rows.arrays_outside_core)

    def __getstate__(self) -> dict[str, Any]:
        names = self._rows.arrays_outside_core if self._core_is_current else _ARRAY_NAMES
        arrays, rows = {name: self._get_memory(name) for name in names}, {"num_written": self._rows.num_written}
        return {**super().__getstate__(), "_rows": rows, "_arrays": arrays}

    def _set_derived_attributes(self) -> None:
        core_state, rows, arrays = self._core, self._rows, vars(self).pop("_arrays")
        self._allocate_memory(seed=0)
        restore_core(self._core, core_state)
        self._rows.num_written = rows["num_written"]
        for name, saved_array in arrays.items():
            setattr(self, name, saved_array)

    def add(
        self,
        obs: np.ndarray,
        next_obs: np.ndarray,
        action: np.ndarray,
        reward: np.ndarray,
        done: np.ndarray,
        infos: list[dict[str, Any]],
    ) -> None:
        """Store one step of every environment; `next_obs` is the observation after the step, before any reset."""
        if not self._core_is_current:
            # `pos` is not the core's next position, so Stable-Baselines3's `add` writes the step at `pos` of the
            # arrays.
            super().add(obs, next_obs, action, reward, done, infos)
            return
        step = (
            action
            if type(action) is np.ndarray and action.dtype is self._action_dtype and action.shape == self._action_shape
            else np.asarray(action, self._action_dtype).reshape(self._action_shape),
            reward
            if type(reward) is np.ndarray and reward.dtype is _FLOAT and reward.shape == self._flag_shape
            else np.asarray(reward, _FLOAT).reshape(self.n_envs),
            done
            if type(done) is np.ndarray and done.dtype is _BOOL and done.shape == self._flag_shape
            else np.asarray(done, _BOOL).reshape(self.n_envs),
            _read_timeouts(infos, self.n_envs) if self.handle_timeout_termination else None,
            self._extra_values,
        )
        if self._fits_unchanged:
            try:
                self._rows.add(obs, next_obs, *step)
            except SchemaError:
                # A step that raises is not stored, so it is added again below, with reshaped values.
                self._fits_unchanged = False
        if not self._fits_unchanged:
            self._rows.add(*self._reshape_observations(obs, next_obs), *step)
        self.pos += 1
        if self.pos == self.buffer_size:
            self.pos, self.full = 0, True

    def _reshape_observations(self, obs: Any, next_obs: Any) -> tuple[Any, Any]:
        obs = reshape_step(self._shapes, obs)
        next_obs = copy_if_shared(reshape_step(self._shapes, next_obs), obs)
        if self.n_stack:
            obs, next_obs = stack_frames(obs, self._fields), stack_frames(next_obs, self._fields)
        return obs, next_obs

    def reset(self) -> None:
        """Remove every transition and replace the arrays by new ones."""
        self._allocate_memory(self._draw_seed())
        self.pos, self.full = 0, False

    def size(self) -> int:
        """Number of positions before `pos` with a transition of every environment."""
        return self._rows.count_steps(self.pos, self.full)

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> Any:
        """Draw random transitions, normalised by `env`."""
        if self._has_own_batches or not self._core_is_current:
            count = self.size()
            if self.optimize_memory_usage and count == self.buffer_size:
                # The oldest transition is not drawn, because the newest next observation has overwritten its
                # observation.
                count -= 1
            ages = self._random.integers(count, size=batch_size)
            return self._get_samples((self.pos - 1 - ages) % self.buffer_size, env=env)
        return self._make_samples(
            self._rows.sample(batch_size, self._make_view(), env if self._sums_rewards else None), env
        )

    def _get_samples(self, batch_inds: np.ndarray, env: VecNormalize | None = None) -> Any:
        """Read the transitions at these positions, each from a random environment."""
        if not self._core_is_current or has_overrides(self, *CONVERSION_METHODS):
            return super()._get_samples(batch_inds, env)
        envs = self._random.integers(self.n_envs, size=len(batch_inds))
        normalizer = env if self._sums_rewards else None
        return self._make_samples(self._rows.read(np.asarray(batch_inds), envs, self._make_view(), normalizer), env)

    def _make_view(self) -> View:
        return _TRANSITION

    def _make_samples(self, batch: TensorDict, env: VecNormalize | None) -> Any:
        """Convert a batch for the algorithms; each tensor operation here takes as long as gathering a field."""
        if self.device.type != "cpu":
            batch = to_device(batch, self.device)
        obs, next_obs, reward = batch["obs"], batch["next_obs"], batch["reward"]
        if self.n_stack:
            obs, next_obs = (unstack_frames(part, self.obs_shape, 1) for part in (obs, next_obs))
        if env is not None:
            obs, next_obs = (to_tensors(env.normalize_obs(to_numpy(x)), self.device) for x in (obs, next_obs))
            if not self._sums_rewards:
                reward = to_tensors(env.normalize_reward(to_numpy(reward)).astype(np.float32), self.device)
        kind: Any = ReplayBufferSamples
        if not isinstance(obs, torch.Tensor):
            kind, obs, next_obs = DictReplayBufferSamples, dict(obs.items()), dict(next_obs.items())
        return kind(obs, batch["action"], next_obs, batch["terminated"].float().unsqueeze(1), reward.unsqueeze(1))


class DictReplayBuffer(ReplayBuffer, sb3.DictReplayBuffer):
    """A `ReplayBuffer` for Dict observations only."""

    def _check_arguments(self, optimize_memory_usage: bool, handle_timeout_termination: bool) -> None:
        if not isinstance(self.obs_shape, dict):
            where = "DictReplayBuffer must be used with Dict obs space only"
            raise AssertionError(explain(where, "a Dict space", self.observation_space, "Use ReplayBuffer."))
        if optimize_memory_usage:
            remedy = 'Use next_obs="shared".'
            raise AssertionError(explain("optimize_memory_usage", "False with Dict observations", True, remedy))


class NStepReplayBuffer(ReplayBuffer, sb3.NStepReplayBuffer):
    """Transitions of up to `n_steps` steps with `discounts`; they stop at an episode's end or at the newest step."""

    _sums_rewards = True

    def __init__(self, *args: Any, n_steps: int = 3, gamma: float = 0.99, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.n_steps = n_steps
        self.gamma = gamma
        if self.optimize_memory_usage:
            remedy = 'Use next_obs="shared".'
            raise NotImplementedError(explain("optimize_memory_usage", "False with n-step returns", True, remedy))

    def _make_view(self) -> View:
        return NStep(self.n_steps, self.gamma)

    def _make_samples(self, batch: TensorDict, env: VecNormalize | None) -> Any:
        discounts = batch["discount"].to(self.device).unsqueeze(1)
        return super()._make_samples(batch, env)._replace(discounts=discounts)


def _read_timeouts(infos: list[dict[str, Any]], n_envs: int) -> np.ndarray | None:
    """Return flags of the environments that reached a time limit; None if none did."""
    for info in infos:
        if info and info.get("TimeLimit.truncated"):
            return np.array([info.get("TimeLimit.truncated", False) for info in infos], _BOOL).reshape(n_envs)
    return None
