"""AgileRL's rollout buffer on relive's core."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict

import relive as rl
from relive.compat.agilerl.rows import find_original_class
from relive.compat.agilerl.typing import BPTTSequenceType
from relive.compat.pickling import PicklableBuffer
from relive.compat.seeding import choose_seed
from relive.compat.step_rows import compute_advantages_and_returns
from relive.compat.views import WriteThroughTensorDict, map_tree
from relive.errors import DataWarning, explain
from relive.schema.checks import check_nonempty, check_positive_int
from relive.schema.conversion import as_tensor, convert
from relive.schema.fields import Field, Tree

_CORE_NAMES = {
    "observations": "obs", "next_observations": "next_observations", "actions": "action", "rewards": "reward",
    "dones": "terminated", "values": "value", "log_probs": "log_prob", "advantages": "advantages",
    "returns": "returns", "episode_starts": "episode_starts",
}  # fmt: skip
"""The core's name of each of AgileRL's fields."""

_SEQUENCE_MODES = {"chunked": "chunked", "maximum": "every", "fifty_percent_overlap": "overlap"}
"""The core's mode for each value of BPTTSequenceType."""
_SUPPORTED_SPACES = "Box, Discrete, MultiDiscrete or MultiBinary"
_FLAG = Field((), torch.bool)


class RolloutBuffer(PicklableBuffer, find_original_class("components.rollout_buffer", "RolloutBuffer")):
    """AgileRL's `RolloutBuffer`: `capacity` steps of `num_envs` environments, on `device`.

    `buffer` is the memory as a TensorDict `[capacity, num_envs]`; assigning to a name copies into the memory.
    `core` is the relive buffer underneath. `seed` makes draws repeatable, and so does a seed of torch. A pickled buffer
    continues with the same draws.

    Differences from AgileRL:
    - `done` ends the episode after the step that it is added with: GAE does not bootstrap across that end, and does not
      cut the step before it.
    - `last_done` is True where the newest step terminated its episode. Where it is False and `done` of that step is
      True, a time limit ended the episode, and `last_value` is used. This is biased if environments reset in the same
      step, since the last observation then belongs to the next episode. Other steps with `done` count as
      terminations: the arguments cannot say which were time limits.
    - After a wrap, returns, sequences and `get()` follow time: the oldest step comes first.
    - Fields that `add` does not get are zero (action masks: all actions legal), not the values of an earlier rollout.
    - Batches are copies, drawn with a generator of the buffer.
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
        self.capacity, self.num_envs, self.device = capacity, num_envs, device
        self.observation_space, self.action_space = observation_space, action_space
        self.gae_lambda, self.gamma, self.use_gae = gae_lambda, gamma, use_gae
        self.recurrent, self.hidden_state_architecture = recurrent, hidden_state_architecture
        self.wrap_at_capacity = wrap_at_capacity
        self.max_seq_len, self.bptt_sequence_type = max_seq_len, bptt_sequence_type
        self._is_masked = False
        self._random = np.random.default_rng(choose_seed(seed))
        self.reset()
        self._allocate_memory()

    def _allocate_memory(self) -> None:
        self.core = self._make_rollout()
        default_row = self.core.columns[0].clone()
        default_row["action_masks"].fill_(True)
        self._default_values = {name: default_row[name] for name in self._declare_extra_fields()}
        """Default values of the optional arguments of `add`."""
        self._no_flags = default_row["truncated"]
        self._set_buffer_view()

    def _declare_extra_fields(self) -> dict[str, Any]:
        extra: dict[str, Any] = {
            "next_observations": _declare_observation(self.observation_space),
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

    def _make_rollout(self) -> rl.RolloutBuffer:
        obs, action = _declare_observation(self.observation_space), _count_action_components(self.action_space)
        return rl.RolloutBuffer(
            self.capacity, self.num_envs, obs, action, extra=self._declare_extra_fields(), device=self.device
        )

    def _set_buffer_view(self) -> None:
        """Set `buffer` to a TensorDict of the core's memory under AgileRL's names."""
        rows = self.core.columns
        columns = {name: rows[core_name] for name, core_name in self._get_core_names().items()}
        self.buffer = WriteThroughTensorDict(columns, batch_size=rows.batch_size, device=self.core.device).lock_()
        self._flat_memory: dict[str, Any] = map_tree(lambda leaf: leaf.flatten(0, 1), columns)
        """The memory as `[capacity · num_envs, …]`."""

    def _get_core_names(self) -> dict[str, str]:
        optional_names = ["hidden_states"] * self.recurrent + ["action_masks"] * self._is_masked
        return _CORE_NAMES | {name: name for name in optional_names}

    def size(self) -> int:
        """Number of stored transitions: steps times environments."""
        return self._num_steps * self.num_envs

    @property
    def _num_steps(self) -> int:
        return self.capacity if self.full else self.pos

    @property
    def _oldest_row(self) -> int:
        return self.pos if self.full and self.pos < self.capacity else 0

    def reset(self) -> None:
        """Remove the stored steps and the prepared sequences."""
        self.pos = 0
        self.full = False
        self.num_sequences: int | None = None
        self.max_sequence_length: int | None = None
        self.unpadded_slices: list[torch.Tensor] | None = None
        self.padded_data: TensorDict | None = None
        self.unpadded_data: TensorDict | None = None
        self._padded: TensorDict | None = None
        """The prepared sequences `[num_sequences, max_sequence_length]`."""

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
        of one layer. `next_hidden_state` is ignored: the next step is added with it.
        """
        row = self.pos
        if row == self.capacity:
            if not self.wrap_at_capacity:
                remedy = "Call reset() first, or let wrap_at_capacity=True drop the oldest step."
                raise ValueError(f"Buffer has reached capacity: all {self.capacity} steps are stored. {remedy}")
            row = 0
        extra: dict[str, Any] = {}
        if next_obs is not None:
            extra["next_observations"] = self._reshape_observation("next_obs", self.observation_space, next_obs)
        if self.recurrent and hidden_state is not None:
            extra["hidden_states"] = {key: self._convert_hidden(key, state) for key, state in hidden_state.items()}
        if episode_start is not None:
            extra["episode_starts"] = self._reshape_for_envs("episode_start", episode_start) != 0
        if action_mask is not None:
            mask_shape = (spaces.flatdim(self.action_space),)
            extra["action_masks"] = self._reshape_for_envs("action_mask", action_mask, mask_shape) != 0
        if self.core.num_stored != row:
            self.core.take_back(row)
        self.core.add(
            self._reshape_observation("obs", self.observation_space, obs),
            self._reshape_for_envs(
                "action", action, (_count_action_components(self.action_space),), self.action_space.shape or ()
            ),
            self._reshape_for_envs("reward", reward),
            self._reshape_for_envs("done", done) != 0,
            self._no_flags,
            value=self._reshape_for_envs("value", value),
            log_prob=self._reshape_for_envs("log_prob", log_prob),
            **(self._default_values | extra),
        )
        self.pos = row + 1
        self.full = self.full or self.pos == self.capacity
        if action_mask is not None and not self._is_masked:
            self._is_masked = True
            self._set_buffer_view()

    def _reshape_for_envs(self, where: str, value: Any, *shapes: tuple[int, ...]) -> Any:
        """Reshape `value` to `[num_envs, *shapes[0]]` if its shape is one row per environment of one of `shapes`.

        A single number for a single environment fills the shape, with a warning. Any other value is returned
        unchanged; the core then raises.
        """
        num_envs, shape = self.num_envs, shapes[0] if shapes else ()
        if isinstance(value, np.ndarray) and value.shape == (num_envs, *shape):
            return value
        tensor = self._to_tensor(where, value)
        for row_shape in shapes or ((),):
            lead = tensor.shape[: max(tensor.ndim - len(row_shape), 0)]
            if tensor.shape == (*lead, *row_shape) and lead.numel() == num_envs:
                return tensor.reshape(num_envs, *shape)
        if tensor.numel() == num_envs == 1:
            remedy = "It fills them all, as in AgileRL; pass every number."
            warnings.warn(explain(where, f"shape {(1, *shape)}", "one number", remedy), DataWarning, stacklevel=3)
            return tensor.reshape(()).expand(1, *shape).contiguous()
        return tensor

    def _to_tensor(self, where: str, value: Any) -> torch.Tensor:
        device = self.core.device
        return as_tensor(where, value.to(device) if isinstance(value, torch.Tensor) else value, device).to(device)

    def _reshape_observation(self, where: str, space: spaces.Space[Any] | None, value: Any) -> Any:
        """Reshape an observation of all environments: each leaf to `[num_envs, …]`."""
        if isinstance(space, spaces.Dict):
            if not isinstance(value, Mapping) and not hasattr(value, "keys"):
                got, remedy = type(value).__name__, "Pass an array for each key."
                raise AssertionError(explain(where, f"a dict with {list(space.spaces)}", got, remedy))
            return {
                key: self._reshape_observation(f"{where}.{key}", space.spaces.get(key), part)
                for key, part in value.items()
            }
        if isinstance(space, spaces.Discrete):
            return self._reshape_for_envs(where, value, (1,), ())
        return value if space is None else self._reshape_for_envs(where, value, space.shape or ())

    def _convert_hidden(self, key: str, state: Any) -> torch.Tensor:
        state = self._to_tensor(f"hidden_state.{key}", state)
        return state.transpose(0, 1) if state.ndim == 3 else state.unsqueeze(1)

    def compute_returns_and_advantages(self, last_value: Any, last_done: Any) -> None:
        """Compute "returns" and "advantages" of the stored steps by GAE, or by Monte-Carlo where `use_gae=False`.

        `last_value` [num_envs] is the value of the observation after the newest step, and `last_done` is True
        where the episode is over and this value is not used.
        """
        steps, device = self._num_steps, self.core.device
        check_nonempty("compute_returns_and_advantages", steps)
        lead = (self.num_envs,)
        last = convert("last_value", Field(), self._reshape_for_envs("last_value", last_value), lead, device)
        is_over = convert("last_done", _FLAG, self._reshape_for_envs("last_done", last_done) != 0, lead, device)
        reward, value, done = (
            self.buffer[name][:steps].roll(-self._oldest_row, 0) for name in ("rewards", "values", "dones")
        )
        ended = torch.cat([done[:-1], is_over.unsqueeze(0)])
        if self.use_gae:
            settings = {"gamma": self.gamma, "lam": self.gae_lambda}
            advantage, return_ = compute_advantages_and_returns(reward, value, last, ended, **settings)
        else:
            all_false = torch.zeros_like(ended)
            return_ = rl.discounted_return(reward, ended, all_false, gamma=self.gamma, last_value=last)
            advantage = return_ - value
        self.buffer["advantages"][:steps] = advantage.roll(self._oldest_row, 0)
        self.buffer["returns"][:steps] = return_.roll(self._oldest_row, 0)

    def get(self, batch_size: int | None = None) -> dict[str, Any]:
        """Return flat arrays of all steps in time order, or of `batch_size` random ones; an empty buffer gives {}."""
        if not self.size():
            return {}
        arrays: Any = self._read_flat_batch(batch_size, "buffer size").cpu().numpy()
        return arrays

    def get_tensor_batch(self, batch_size: int | None = None, device: str | None = None) -> TensorDict:
        """Return the steps of `get` as a TensorDict `[B]` on `device`."""
        target = device or self.device
        if not self.size():
            return TensorDict({}, batch_size=[], device=target)
        return self._read_flat_batch(batch_size, "buffer_size").to(target)

    def _read_flat_batch(self, batch_size: int | None, limit_name: str) -> TensorDict:
        total = self.size()
        if batch_size is not None and batch_size > total:
            message = f"get({batch_size}): larger than {limit_name}, so that all {total} steps are returned."
            warnings.warn(message, stacklevel=3)
            batch_size = None
        if batch_size is not None:
            indices = self._random.choice(total, check_positive_int("batch_size", batch_size), replace=False)
            rows = torch.from_numpy(indices).to(self.core.device)
            return self._map_flat_memory(lambda leaf: leaf.index_select(0, rows), batch_size)
        oldest = self._oldest_row * self.num_envs
        if oldest:
            return self._map_flat_memory(lambda leaf: torch.cat([leaf[oldest:total], leaf[:oldest]]), total)
        return self._map_flat_memory(lambda leaf: leaf[:total].clone(), total)

    def _map_flat_memory(self, read_rows: Callable[[torch.Tensor], torch.Tensor], num_rows: int) -> TensorDict:
        """Apply `read_rows` to every leaf `[capacity · num_envs, …]`."""
        return TensorDict(map_tree(read_rows, self._flat_memory), batch_size=[num_rows], device=self.core.device)

    def _get_ordered_rollout(self) -> rl.RolloutBuffer:
        """Return a rollout of the stored steps, oldest first: the core, or after a wrap a copy."""
        oldest = self._oldest_row
        if not oldest:
            self.core.take_back(self._num_steps)
            return self.core
        rows, ordered_rollout = self.core.columns, self._make_rollout()
        rows_in_order: Any = torch.cat([rows[oldest:], rows[:oldest]])
        ordered_rollout.columns.update_(rows_in_order)
        ordered_rollout.take_back(self.capacity)
        return ordered_rollout

    def prepare_sequence_tensors(self, device: str | None = None) -> TensorDict:
        """Cut the stored steps into sequences, padded with zeros: a TensorDict `[num_sequences, max_sequence_length]`.

        "pad_mask" is True at real steps; "initial_hidden_states" are the hidden states `[num_sequences, layers, size]`
        that sequences start with. `get_minibatch_sequences` yields these sequences in minibatches.
        """
        if not self.recurrent:
            # The two messages below keep AgileRL's words up to the colon, because AgileRL's tests match them.
            reason = "other rollouts have no hidden states."
            raise ValueError(f"prepare_sequence_tensors() is only supported when recurrent=True: {reason}")
        if not self.size():
            raise ValueError("Attempting to prepare sequences with empty buffer: add steps first.")
        kind: Any = self.bptt_sequence_type
        mode: Any = _SEQUENCE_MODES.get(getattr(kind, "value", kind))
        if mode is None:
            types = ", ".join(sequence_type.name for sequence_type in BPTTSequenceType)
            raise NotImplementedError(f"unrecognized sequence type {kind!r}: pass one of {types}.")
        rollout = self._get_ordered_rollout()
        names = {"observations": "obs", "actions": "action", "pad_mask": "mask"}
        names |= {"action_masks": "action_masks"} if self._is_masked else {}
        fields = ("obs", "action", "hidden_states", "action_masks")
        (batch,) = rollout.sequences(self.max_seq_len, mode=mode, keep_tail=False, shuffle=False, fields=fields)
        target = device or self.device
        longest = int(batch["mask"].sum(1).max())
        inputs = {
            name: map_tree(lambda leaf: leaf[:, :longest].contiguous(), batch[core_name])
            for name, core_name in names.items()
        }
        padded = TensorDict(inputs, batch_size=[len(batch), longest]).to(target)
        # Hidden states [S, layers, H] have no time axis, so they are non-tensor data of the TensorDict, as in AgileRL.
        padded.set_non_tensor("initial_hidden_states", batch["hidden_states"].to(target).to_dict())
        self._padded, self.padded_data = padded, padded.reshape(-1)
        self.num_sequences, self.max_sequence_length = padded.batch_size
        is_real = batch["mask"][:, :longest].cpu()
        steps = batch["index"].cpu().unsqueeze(1) + self.num_envs * torch.arange(longest, device="cpu")
        self.unpadded_slices = list(steps[is_real].split(is_real.sum(1).tolist()))
        names = {"log_probs": "log_prob", "advantages": "advantages", "values": "value", "returns": "returns"}
        flat = {name: rollout[core_name].flatten(0, 1).clone() for name, core_name in names.items()}
        self.unpadded_data = TensorDict(flat, batch_size=[self.size()]).to(target)
        return padded

    def get_minibatch_sequences(self, batch_size: int) -> Iterator[tuple[TensorDict, TensorDict]]:
        """Yield every prepared sequence once, in random order, `batch_size` per minibatch.

        Each minibatch is a pair: the padded steps `[B · max_sequence_length]`, and the log_probs, advantages, values
        and returns of the real ones among them, in the same order.
        """
        padded, slices, unpadded = self._padded, self.unpadded_slices, self.unpadded_data
        if padded is None or slices is None or unpadded is None:
            remedy = "call prepare_sequence_tensors() after the last step."
            raise ValueError(f"Attempting to fetch minibatches before preparing sequences: {remedy}")
        total = len(padded)
        if check_positive_int("batch_size", batch_size) > total:
            message = f"batch_size {batch_size} is larger than the number of sequences; all {total} are one batch."
            warnings.warn(message, stacklevel=2)
        hidden: Any = padded.get_non_tensor("initial_hidden_states")
        for sequence_ids in torch.from_numpy(self._random.permutation(total)).split(min(batch_size, total)):
            ids = sequence_ids.to(padded.device or "cpu")
            inputs = padded[ids].reshape(-1)
            inputs.set_non_tensor("initial_hidden_states", {key: state[ids] for key, state in hidden.items()})
            steps = torch.cat([slices[i] for i in sequence_ids.tolist()])
            yield inputs, unpadded[steps.to(unpadded.device or "cpu")]

    _derived_attributes = ("core", "_default_values", "_no_flags", "_flat_memory")

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickle of this class, or of AgileRL's class, whose pickles lack this class's private attributes."""
        self._is_masked, self._random = False, np.random.default_rng(choose_seed())
        self.reset()
        self.__dict__.update(state)
        saved_buffer, problem = state.get("buffer"), ""
        if not isinstance(saved_buffer, TensorDict):
            problem = "the state has no TensorDict of steps"
        elif saved_buffer.batch_size != (self.capacity, self.num_envs):
            expected = torch.Size([self.capacity, self.num_envs])
            problem = f"expected batch_size {expected}, got {saved_buffer.batch_size}"
        if problem:
            warnings.warn(f"Unpickling: {problem}. The buffer starts empty.", stacklevel=2)
            saved_buffer = None
        if "observation_space" not in state or "action_space" not in state:
            message = "Unpickling: the observation or action space is missing. This buffer cannot store steps."
            warnings.warn(message, stacklevel=2)
            return
        self._is_masked = saved_buffer is not None and "action_masks" in saved_buffer.keys()
        self._allocate_memory()
        if saved_buffer is None:
            self.reset()
        else:
            self.buffer.update_(saved_buffer)


def _declare_observation(space: spaces.Space[Any]) -> Tree:
    """Declare the fields of an observation: nested for a Dict, one number [1] for a Discrete."""
    if isinstance(space, spaces.Dict):
        return {key: _declare_observation(part) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        raise AssertionError(explain("observation_space", "any space but a Tuple", space, "Use a Dict space."))
    if isinstance(space, spaces.Discrete):
        return Field(1)
    if isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
        return Field(space.shape)
    raise NotImplementedError(explain("observation_space", _SUPPORTED_SPACES, space, "Wrap the environment."))


def _count_action_components(space: spaces.Space[Any]) -> int:
    """Count the components of an action."""
    if isinstance(space, spaces.Discrete):
        return 1
    if isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
        return torch.Size(space.shape).numel()
    raise NotImplementedError(explain("action_space", _SUPPORTED_SPACES, space, "Wrap the environment."))
