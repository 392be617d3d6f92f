# pyright: reportMissingImports=false, reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false
"""`ReplayBuffer`, `DictReplayBuffer` and `NStepReplayBuffer`: Stable-Baselines3's off-policy buffers.

Its `done` is any end, and the info of a step says whether that was a timeout; its batches have `dones` without these,
which is our `terminated`. Its rows are positions [buffer_size, n_envs] that are written in turn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import stable_baselines3.common.buffers as theirs
import torch
from gymnasium import spaces
from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples
from stable_baselines3.common.vec_env import VecNormalize
from tensordict import TensorDict

from relive.compat.stable_baselines3.layout import fields_of, given_shapes, numpy_of, shaped_pair, torch_of
from relive.errors import SchemaError, explain
from relive.fields.batch import moved
from relive.fields.schema import Declaration, Field
from relive.randomness import Randomness
from relive.replay.buffer import ReplayBuffer as Core
from relive.replay.composed import named, named_next
from relive.replay.samplers import Sampler, Uniform
from relive.replay.store import Leaves, ReplayStore
from relive.replay.views import NStep, Transition, View


def _column(name: str) -> Any:
    """A field as a read-only array in the order of positions."""
    return property(lambda buffer: buffer._arrays(name))


class ReplayBuffer(theirs.ReplayBuffer):
    """The newest transitions of `n_envs` environments, for DQN, SAC, TD3 and DDPG; observations of any space.

    Every observation is stored once, whatever `optimize_memory_usage` says: what `add` is given is what `sample` gives,
    at the ends of episodes too, and timeouts are handled with it. The price is a row of the `buffer_size` for every
    episode's last observation. `observations`, `rewards` and the other arrays are read-only copies in the order of
    positions; what is no longer stored is zero there.
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
    ) -> None:
        theirs.BaseBuffer.__init__(self, buffer_size, observation_space, action_space, device, n_envs=n_envs)
        self.buffer_size = max(buffer_size // n_envs, 1)
        self.optimize_memory_usage = optimize_memory_usage
        self.handle_timeout_termination = handle_timeout_termination
        self._start()

    def _start(self) -> None:
        self._shapes = given_shapes(self.observation_space, self.n_envs)
        self._never = np.zeros(self.n_envs, np.bool_)
        self._beside: dict[str, Any] = {}
        """What else the coming step consists of."""
        self._action_dtype: Any = self._maybe_cast_dtype(self.action_space.dtype)
        self._core = Core(
            self.buffer_size * self.n_envs,
            obs=fields_of(self.observation_space),
            action=Field(self.action_dim, self._action_dtype),
            num_envs=self.n_envs,
            reward=(1,),
            extra=self._extra(),
            sampler=self._sampler(),
            seed=np.random.randint(2**31),  # noqa: NPY002 (its algorithms seed the global generator)
        )

    def _extra(self) -> dict[str, Declaration]:
        return {}

    def _sampler(self) -> Sampler:
        return Uniform()

    @property
    def nbytes(self) -> int:
        """What this buffer keeps, in bytes."""
        return self._core.nbytes

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_core": _converted(self._core.state_dict(), torch.Tensor, torch.Tensor.numpy)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self._start()
        self._core.load_state_dict(_converted(state["_core"], np.ndarray, torch.from_numpy))

    # Writing

    def add(
        self,
        obs: np.ndarray,
        next_obs: np.ndarray,
        action: np.ndarray,
        reward: np.ndarray,
        done: np.ndarray,
        infos: list[dict[str, Any]],
    ) -> None:
        """Store one step of every environment; `next_obs` is the state it led to before any reset."""
        n_envs, truncated = self.n_envs, self._never
        terminated = done if type(done) is np.ndarray and done.dtype is _BOOL else _flat(done, _BOOL)
        if self.handle_timeout_termination:
            timeouts = [info.get("TimeLimit.truncated", False) for info in infos]
            if True in timeouts:
                truncated = np.array(timeouts, np.bool_)
                terminated = terminated & ~truncated
        obs, next_obs = shaped_pair(self._shapes, obs, next_obs)
        self._core.add(
            obs,
            np.asarray(action, self._action_dtype).reshape(n_envs, self.action_dim),
            np.asarray(reward, np.float32).reshape(n_envs, 1),
            terminated,
            truncated,
            next_obs,
            **self._beside,
        )
        self.pos += 1
        if self.pos == self.buffer_size:
            self.pos, self.full = 0, True

    def reset(self) -> None:
        """Forget every transition."""
        self._core.clear()
        self.pos, self.full = 0, False

    def size(self) -> int:
        """How many transitions of an environment are stored, on average."""
        return len(self._core) // self.n_envs

    # Reading

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> Any:
        """A batch of random transitions, normalised as `env` says."""
        return self._samples(self._core.sample(batch_size, self._view(env)), env)

    def _get_samples(self, batch_inds: np.ndarray, env: VecNormalize | None = None) -> Any:
        """The transitions at these positions, each of a random environment."""
        envs = np.random.randint(self.n_envs, size=len(batch_inds))  # noqa: NPY002 (as above)
        index, stored = self._index_at(torch.as_tensor(batch_inds), torch.as_tensor(envs))
        if not stored.all():
            gone = int(batch_inds[int((~stored).nonzero()[0])])
            remedy = "Pass positions of stored transitions; the last observation of an episode takes a position too."
            raise IndexError(explain("batch_inds", "stored positions", gone, remedy))
        return self._samples(self._core.read(index, self._view(env)), env)

    def _index_at(self, positions: torch.Tensor, envs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The core's ids of the steps at positions, and which of them are stored. The newest step is at pos - 1."""
        index = self._core.ids()
        index = index[(index % self.n_envs).argsort(stable=True)]  # by environment, then time
        count = torch.bincount(index % self.n_envs, minlength=self.n_envs)
        age = (self.pos - 1 - positions) % self.buffer_size
        stored = age < count[envs]
        place = count.cumsum(0)[envs] - 1 - age
        return index[place[stored]] if len(index) else index, stored

    def _view(self, env: VecNormalize | None) -> View:
        return _TRANSITION

    def _samples(self, batch: TensorDict, env: VecNormalize | None) -> Any:
        """What the algorithms read. Every tensor operation here costs as much as gathering a field."""
        if self.device.type != "cpu":
            batch = moved(batch, self.device)
        obs, next_obs, reward = batch["obs"], batch["next_obs"], batch["reward"]
        if env is not None:
            obs, next_obs = self._normalised(obs, env), self._normalised(next_obs, env)
            reward = self._normalised_reward(reward, env)
        kind: Any = ReplayBufferSamples
        if not isinstance(obs, torch.Tensor):
            kind, obs, next_obs = DictReplayBufferSamples, dict(obs.items()), dict(next_obs.items())
        return kind(obs, batch["action"], next_obs, batch["terminated"].float().unsqueeze(1), reward)

    def _normalised(self, obs: Any, env: VecNormalize) -> Any:
        return torch_of(env.normalize_obs(numpy_of(obs)), self.device)

    def _normalised_reward(self, reward: torch.Tensor, env: VecNormalize) -> torch.Tensor:
        return torch.as_tensor(env.normalize_reward(numpy_of(reward)), device=self.device)

    # The arrays [buffer_size, n_envs, …]

    observations = _column("obs")
    next_observations = _column("next_obs")
    actions = _column("action")
    rewards = _column("reward")
    timeouts = _column("truncated")

    @property
    def dones(self) -> np.ndarray:
        """Where episodes ended. Marking the newest step here ends its episode; where it led stays as it was given."""
        dones = (self._arrays("terminated") + self.timeouts).view(_Dones)
        dones.flags.writeable = False
        dones.mark = self._mark
        return dones

    def _mark(self, key: Any, value: Any) -> None:
        marks = np.zeros((self.buffer_size, self.n_envs), np.bool_)
        marks[key] = value
        newest = (self.pos - 1) % self.buffer_size
        envs = marks[newest].nonzero()[0]
        if marks.sum() > len(envs):
            remedy = "Mark only the newest step: older steps have been sampled already."
            raise SchemaError(explain("dones", f"a mark at the newest position {newest}", repr(key), remedy))
        if len(envs):
            self._core.cut(envs)

    def _arrays(self, name: str) -> Any:
        """A field at all positions, zero where nothing is stored."""
        shape = self.buffer_size, self.n_envs
        positions, envs = torch.cartesian_prod(*map(torch.arange, shape)).unbind(1)
        index, stored = self._index_at(positions, envs)
        batch = self._core.read(index, _Only(name)).get(name)

        def placed(leaf: torch.Tensor) -> np.ndarray:
            leaf = leaf.float() if leaf.dtype == torch.bool else leaf
            leaf = leaf.squeeze(1) if name == "reward" else leaf
            everything = leaf.new_zeros((len(positions), *leaf.shape[1:]))
            everything[stored] = leaf
            array = everything.view(*shape, *leaf.shape[1:]).numpy()
            array.flags.writeable = False
            return array

        return placed(batch) if isinstance(batch, torch.Tensor) else {key: placed(leaf) for key, leaf in batch.items()}


class DictReplayBuffer(ReplayBuffer, theirs.DictReplayBuffer):
    """The same under the name for Dict observations."""


class NStepReplayBuffer(ReplayBuffer, theirs.NStepReplayBuffer):
    """Transitions of `n_steps` steps, or of the fewer to an end or to the newest one, with their `discounts`."""

    def __init__(self, *args: Any, n_steps: int = 3, gamma: float = 0.99, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.n_steps = n_steps
        self.gamma = gamma

    def _view(self, env: VecNormalize | None) -> View:
        view = NStep(self.n_steps, self.gamma)
        return view if env is None else _NormalisedSteps(view, env)

    def _normalised_reward(self, reward: torch.Tensor, env: VecNormalize) -> torch.Tensor:
        return reward  # every step of the sum has been

    def _samples(self, batch: TensorDict, env: VecNormalize | None) -> Any:
        discounts = batch["discount"].to(self.device).unsqueeze(1)
        return super()._samples(batch, env)._replace(discounts=discounts)


@dataclass(frozen=True)
class _NormalisedSteps:
    """n steps whose rewards are normalised, and clipped, one by one before they are summed."""

    view: NStep
    env: VecNormalize

    def read(self, store: ReplayStore, slots: torch.Tensor, random: Randomness) -> Leaves:
        windows = self.view.windows(store, slots)
        columns = [store.schema.columns[name][0] for name in ("reward", "terminated")]
        leaves = store.take(windows.flatten(), columns, padded=True)
        leaves[0] = torch.from_numpy(self.env.normalize_reward(leaves[0].numpy()))
        steps = named(store.memory, [leaf.unflatten(0, windows.shape) for leaf in leaves], columns)
        summed = self.view.reduce(store, slots, windows, steps)
        return self.view.read(store, slots, random) | {("reward",): summed[("reward",)]}


@dataclass(frozen=True)
class _Only:
    """One field of rows."""

    name: str

    def read(self, store: ReplayStore, slots: torch.Tensor, random: Randomness) -> Leaves:
        if self.name == "next_obs":
            return named_next(store.memory, store.take_next(slots))
        columns = store.schema.columns[self.name]
        return named(store.memory, store.take(slots, columns), columns)


def _flat(values: Any, dtype: Any) -> np.ndarray:
    """One number, or a list of numbers, as an array."""
    return np.asarray(values, dtype).reshape(-1)


class _Dones(np.ndarray):
    """A read-only array; what is assigned to its entries is told to the buffer."""

    mark: Callable[[Any, Any], None]

    def __array_wrap__(self, array: np.ndarray, context: Any = None, return_scalar: bool = False) -> Any:
        return array[()] if return_scalar else array  # what is computed from it is plain

    def __setitem__(self, key: Any, value: Any) -> None:
        self.mark(key, value)


_TRANSITION = Transition()
_BOOL = np.dtype(np.bool_)


def _converted(state: Any, kind: type, convert: Callable[[Any], Any]) -> Any:
    """Nested dicts and tuples with everything of one kind converted."""
    if isinstance(state, dict):
        return {key: _converted(part, kind, convert) for key, part in state.items()}
    if isinstance(state, tuple):
        return tuple(_converted(part, kind, convert) for part in state)
    return convert(state) if isinstance(state, kind) else state
