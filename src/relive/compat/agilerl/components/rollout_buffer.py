"""AgileRL's rollout buffer on ours."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict

import relive as rl
from relive.compat.agilerl.memory import Memory
from relive.compat.agilerl.original import original
from relive.compat.agilerl.sequences import BPTTSequenceType, Prepared, mode_of
from relive.compat.agilerl.spaces import by_env, num_actions, observation, observation_tree, tensor_on
from relive.compat.seeding import experiment_seed
from relive.schema.checks import nonempty, positive
from relive.schema.conversion import convert
from relive.schema.fields import Field

_NAMES = {
    "observations": "obs",
    "next_observations": "next_observations",
    "actions": "action",
    "rewards": "reward",
    "dones": "terminated",
    "values": "value",
    "log_probs": "log_prob",
    "advantages": "advantages",
    "returns": "returns",
    "episode_starts": "episode_starts",
}
"""AgileRL's names, and what they are in the core."""

_SETTINGS = (
    "capacity", "observation_space", "action_space", "num_envs", "device", "gae_lambda", "gamma", "recurrent",
    "hidden_state_architecture", "use_gae", "wrap_at_capacity", "max_seq_len", "bptt_sequence_type",
)  # fmt: skip
"""The arguments of the constructor, which are attributes too."""

_FLAG = Field((), torch.bool)


_Rollout: Any = original("components.rollout_buffer", "RolloutBuffer")


class RolloutBuffer(_Rollout):
    """AgileRL's `RolloutBuffer`: `capacity` steps of `num_envs` environments, on `device`.

    `buffer` is a TensorDict `[capacity, num_envs]` of the stored memory: what is assigned to its names is copied there.
    `core` is the relive buffer underneath. `seed` makes draws repeatable, and so does a seed of torch. A pickled buffer
    goes on with the same draws.

    What is different here:
    - `done` belongs to the step that it is added with, for GAE too: an episode's end is neither bootstrapped across nor
      cuts the step before it.
    - `last_done` says whether the newest step ended its episode for good. Where it is False and `done` of that step
      True, a time limit has ended it, and the value of the last observation counts. That is biased where environments
      reset in the same step, since the last observation is then another episode's. Other steps with `done` count as
      ends: the arguments cannot say which were time limits.
    - After a wrap, returns, sequences and `get()` go by time: the oldest step comes first.
    - What is left out of `add` is zero (an action mask: all legal), not what an earlier rollout had there.
    - Batches are the caller's own, and drawn by the buffer's own generator.
    """

    def __init__(
        self,
        capacity: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        num_envs: int = 1,
        device: str = "cpu",
        gae_lambda: float = 0.95,
        gamma: float = 0.99,
        recurrent: bool = False,
        hidden_state_architecture: dict[str, tuple[int, int, int]] | None = None,
        use_gae: bool = True,
        wrap_at_capacity: bool = False,
        max_seq_len: int | None = None,
        bptt_sequence_type: BPTTSequenceType = BPTTSequenceType.CHUNKED,
        *,
        seed: int | None = None,
    ) -> None:
        self.capacity = capacity
        self.observation_space = observation_space
        self.action_space = action_space
        self.num_envs = num_envs
        self.device = device
        self.gae_lambda = gae_lambda
        self.gamma = gamma
        self.recurrent = recurrent
        self.hidden_state_architecture = hidden_state_architecture
        self.use_gae = use_gae
        self.wrap_at_capacity = wrap_at_capacity
        self.max_seq_len = max_seq_len
        self.bptt_sequence_type = bptt_sequence_type
        self._is_masked = False
        self._random = np.random.default_rng(experiment_seed() if seed is None else seed)
        self.reset()
        self._allocate()

    @classmethod
    def like(cls, buffer: Any) -> RolloutBuffer:
        """An empty buffer with the settings of another one, AgileRL's own too."""
        return cls(**{name: getattr(buffer, name) for name in _SETTINGS})

    def _allocate(self) -> None:
        self.core = self._new_rollout()
        blank = self.core.columns[0].clone()
        blank["action_masks"].fill_(True)
        self._omitted = {name: blank[name] for name in self._extra()}
        """What is stored of further fields that `add` is not given."""
        self._never = blank["truncated"]
        self._expose()

    def _extra(self) -> dict[str, Any]:
        extra: dict[str, Any] = {
            "next_observations": observation_tree(self.observation_space),
            "advantages": (),
            "returns": (),
            "episode_starts": _FLAG,
            "action_masks": Field(spaces.flatdim(self.action_space), torch.bool),
        }
        if self.recurrent:
            if self.hidden_state_architecture is None:
                remedy = 'name each state as in {"actor": (layers, num_envs, size)}.'
                raise ValueError(f"hidden_state_architecture must be provided for recurrent networks: {remedy}")
            extra["hidden_states"] = {
                key: rl.Carry((layers, size)) for key, (layers, _, size) in self.hidden_state_architecture.items()
            }
        return extra

    def _new_rollout(self) -> rl.RolloutBuffer:
        obs, action = observation_tree(self.observation_space), num_actions(self.action_space)
        return rl.RolloutBuffer(self.capacity, self.num_envs, obs, action, extra=self._extra(), device=self.device)

    def _expose(self) -> None:
        """Make `buffer`: the core's memory under AgileRL's names."""
        rows = self.core.columns
        columns = {theirs: rows[ours] for theirs, ours in self._names().items()}
        self.buffer = Memory(columns, batch_size=rows.batch_size, device=self.core.device).lock_()
        self._steps_flat: dict[str, Any] = _mapped(columns, lambda leaf: leaf.flatten(0, 1))
        """The same memory `[capacity · num_envs, …]`."""

    def _names(self) -> dict[str, str]:
        further = ["hidden_states"] * self.recurrent + ["action_masks"] * self._is_masked
        return _NAMES | {name: name for name in further}

    def size(self) -> int:
        """How many transitions are stored: steps times environments."""
        return self._steps * self.num_envs

    @property
    def _steps(self) -> int:
        return self.capacity if self.full else self.pos

    @property
    def _oldest(self) -> int:
        """The row of the oldest step."""
        return self.pos if self.full and self.pos < self.capacity else 0

    def reset(self) -> None:
        """Forget the stored steps and the prepared sequences."""
        self.pos = 0
        self.full = False
        self.num_sequences: int | None = None
        self.max_sequence_length: int | None = None
        self.unpadded_slices: list[torch.Tensor] | None = None
        self.padded_data: TensorDict | None = None
        self.unpadded_data: TensorDict | None = None
        self._prepared: Prepared | None = None

    def add(
        self,
        obs: Any,
        action: Any,
        reward: Any,
        done: Any,
        value: Any,
        log_prob: Any,
        next_obs: Any = None,
        hidden_state: dict[str, Any] | None = None,
        next_hidden_state: dict[str, Any] | None = None,
        episode_start: Any = None,
        action_mask: Any = None,
    ) -> None:
        """Store one step of every environment: arrays, tensors or, for one environment, numbers.

        `hidden_state` is the state before the step, `(layers, num_envs, size)` as torch has it, or `(num_envs, size)`
        of one layer. `next_hidden_state` is not stored: it is the next step's.
        """
        row = self.pos
        if row == self.capacity:
            if not self.wrap_at_capacity:
                remedy = "Call reset() first, or let wrap_at_capacity=True drop the oldest step."
                raise ValueError(f"Buffer has reached capacity: all {self.capacity} steps are stored. {remedy}")
            row = 0
        extra: dict[str, Any] = {}
        if next_obs is not None:
            extra["next_observations"] = self._observation("next_obs", next_obs)
        if self.recurrent and hidden_state is not None:
            extra["hidden_states"] = {key: self._hidden(key, state) for key, state in hidden_state.items()}
        if episode_start is not None:
            extra["episode_starts"] = self._by_env("episode_start", episode_start) != 0
        if action_mask is not None:
            legal = (spaces.flatdim(self.action_space),)
            extra["action_masks"] = self._by_env("action_mask", action_mask, legal) != 0
        if self.core.num_stored != row:
            self.core.take_back(row)
        self.core.add(
            self._observation("obs", obs),
            self._by_env("action", action, (num_actions(self.action_space),), self.action_space.shape or ()),
            self._by_env("reward", reward),
            self._by_env("done", done) != 0,
            self._never,
            value=self._by_env("value", value),
            log_prob=self._by_env("log_prob", log_prob),
            **(self._omitted | extra),
        )
        self.pos = row + 1
        self.full = self.full or self.pos == self.capacity
        if action_mask is not None and not self._is_masked:
            self._is_masked = True
            self._expose()

    def _by_env(self, where: str, value: Any, *shapes: tuple[int, ...]) -> Any:
        return by_env(where, value, self.num_envs, self.core.device, *(shapes or ((),)))

    def _observation(self, where: str, value: Any) -> Any:
        return observation(where, self.observation_space, value, self.num_envs, self.core.device)

    def _hidden(self, key: str, state: Any) -> torch.Tensor:
        state = tensor_on(f"hidden_state.{key}", state, self.core.device)
        return state.transpose(0, 1) if state.ndim == 3 else state.unsqueeze(1)

    def compute_returns_and_advantages(self, last_value: Any, last_done: Any) -> None:
        """Compute "returns" and "advantages" of the stored steps by GAE, or by Monte-Carlo where `use_gae=False`.

        `last_value` [num_envs] is the value of the observation after the newest step, and `last_done` says where it
        counts nothing, since the episode is over.
        """
        steps, device = self._steps, self.core.device
        nonempty("compute_returns_and_advantages", steps)
        lead = (self.num_envs,)
        last = convert("last_value", Field(), self._by_env("last_value", last_value), lead, device)
        over = convert("last_done", _FLAG, self._by_env("last_done", last_done) != 0, lead, device)
        reward, value, done = (
            self.buffer[name][:steps].roll(-self._oldest, 0) for name in ("rewards", "values", "dones")
        )
        terminated = torch.cat([done[:-1], over.unsqueeze(0)])
        never = torch.zeros_like(terminated)
        if self.use_gae:
            next_value = torch.cat([value[1:], last.unsqueeze(0)])
            advantage, return_ = rl.gae(
                reward, value, next_value, terminated, never, gamma=self.gamma, lam=self.gae_lambda
            )
        else:
            return_ = rl.discounted_return(reward, terminated, never, gamma=self.gamma, last_value=last)
            advantage = return_ - value
        self.buffer["advantages"][:steps] = advantage.roll(self._oldest, 0)
        self.buffer["returns"][:steps] = return_.roll(self._oldest, 0)

    def get(self, batch_size: int | None = None) -> dict[str, Any]:
        """Flat arrays of all steps in time order, or of `batch_size` random ones; an empty dict of none."""
        if not self.size():
            return {}
        arrays: Any = self._flat(batch_size, "buffer size").cpu().numpy()
        return arrays

    def get_tensor_batch(self, batch_size: int | None = None, device: str | None = None) -> TensorDict:
        """The same as a TensorDict `[B]` on `device`."""
        target = device or self.device
        if not self.size():
            return TensorDict({}, batch_size=[], device=target)
        return self._flat(batch_size, "buffer_size").to(target)

    def _flat(self, batch_size: int | None, limit: str) -> TensorDict:
        total = self.size()
        if batch_size is not None and batch_size > total:
            message = f"get({batch_size}): larger than {limit}, so that all {total} steps are returned."
            warnings.warn(message, stacklevel=3)
            batch_size = None
        if batch_size is not None:
            drawn = self._random.choice(total, positive("batch_size", batch_size), replace=False)
            rows = torch.from_numpy(drawn).to(self.core.device)
            return self._batch(lambda leaf: leaf.index_select(0, rows), batch_size)
        oldest = self._oldest * self.num_envs
        if oldest:
            return self._batch(lambda leaf: torch.cat([leaf[oldest:total], leaf[:oldest]]), total)
        return self._batch(lambda leaf: leaf[:total].clone(), total)

    def _batch(self, read: Callable[[torch.Tensor], torch.Tensor], count: int) -> TensorDict:
        """What `read` makes of every leaf `[capacity · num_envs, …]`."""
        return TensorDict(_mapped(self._steps_flat, read), batch_size=[count], device=self.core.device)

    def _stored(self) -> rl.RolloutBuffer:
        """The stored steps in the order of their rows."""
        self.core.take_back(self._steps)
        return self.core

    def _in_time(self) -> rl.RolloutBuffer:
        """The stored steps, oldest first; after a wrap a copy of them."""
        oldest = self._oldest
        if not oldest:
            return self._stored()
        rows, ordered = self.core.columns, self._new_rollout()
        in_time: Any = torch.cat([rows[oldest:], rows[:oldest]])
        ordered.columns.update_(in_time)
        ordered.take_back(self.capacity)
        return ordered

    def prepare_sequence_tensors(self, device: str | None = None) -> TensorDict:
        """All sequences of the stored steps, padded with zeros: a TensorDict `[num_sequences, max_sequence_length]`.

        "pad_mask" is True at real steps; "initial_hidden_states" are the hidden states `[num_sequences, layers, size]`
        that sequences start with. `get_minibatch_sequences` draws from them.
        """
        if not self.recurrent:
            # AgileRL's tests match these messages up to the colon.
            reason = "other rollouts have no hidden states."
            raise ValueError(f"prepare_sequence_tensors() is only supported when recurrent=True: {reason}")
        if not self.size():
            raise ValueError("Attempting to prepare sequences with empty buffer: add steps first.")
        mode, rollout = mode_of(self.bptt_sequence_type), self._in_time()
        names = {"observations": "obs", "actions": "action", "pad_mask": "mask"}
        names |= {"action_masks": "action_masks"} if self._is_masked else {}
        fields = ("obs", "action", "hidden_states", "action_masks")
        (batch,) = rollout.sequences(self.max_seq_len, mode=mode, keep_tail=False, shuffle=False, fields=fields)
        target = device or self.device
        self._prepared = prepared = Prepared.of(batch, self.num_envs, names, target)
        self.num_sequences, self.max_sequence_length = prepared.padded.batch_size
        self.padded_data = prepared.padded.reshape(-1)
        self.unpadded_slices = prepared.slices()
        names = {"log_probs": "log_prob", "advantages": "advantages", "values": "value", "returns": "returns"}
        flat = {theirs: rollout[ours].flatten(0, 1).clone() for theirs, ours in names.items()}
        self.unpadded_data = TensorDict(flat, batch_size=[self.size()]).to(target)
        return prepared.padded

    def get_minibatch_sequences(self, batch_size: int) -> Iterator[tuple[TensorDict, TensorDict]]:
        """Every prepared sequence once, in random order and `batch_size` at a time.

        Each minibatch is a pair: the padded steps `[B · max_sequence_length]`, and the log_probs, advantages, values
        and returns of the real ones among them, in the same order.
        """
        if self._prepared is None or self.unpadded_data is None:
            remedy = "call prepare_sequence_tensors() after the last step."
            raise ValueError(f"Attempting to fetch minibatches before preparing sequences: {remedy}")
        total = len(self._prepared.steps)
        if positive("batch_size", batch_size) > total:
            message = f"batch_size {batch_size} is larger than the number of sequences; all {total} are one batch."
            warnings.warn(message, stacklevel=2)
        for which in torch.from_numpy(self._random.permutation(total)).split(min(batch_size, total)):
            yield self._prepared.minibatch(which, self.unpadded_data)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in ("core", "_omitted", "_never", "_steps_flat"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take a state of this class, or of AgileRL's own, which lacks what is private here."""
        self._is_masked, self._random = False, np.random.default_rng(experiment_seed())
        self.reset()
        self.__dict__.update(state)
        stored = state.get("buffer")
        if not isinstance(stored, TensorDict):
            message = "Unpickling: the state has no TensorDict of steps. The buffer starts empty."
            warnings.warn(message, stacklevel=2)
            if "observation_space" not in state or "action_space" not in state:
                message = "The observation or action space is missing, too: this buffer cannot store steps."
                warnings.warn(message, stacklevel=2)
                return
            stored = None
        elif stored.batch_size != (self.capacity, self.num_envs):
            expected = torch.Size([self.capacity, self.num_envs])
            message = f"Unpickling: expected batch_size {expected}, got {stored.batch_size}. The buffer starts empty."
            warnings.warn(message, stacklevel=2)
            stored = None
        self._is_masked = stored is not None and "action_masks" in stored.keys()
        self._allocate()
        if stored is None:
            self.reset()
        else:
            self.buffer.update_(stored)


def _mapped(columns: Any, read: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    """Every leaf of nested fields, read so."""
    return {key: read(item) if isinstance(item, torch.Tensor) else _mapped(item, read) for key, item in columns.items()}
