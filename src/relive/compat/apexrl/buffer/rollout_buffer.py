"""ApexRL's `RolloutBuffer` on relive's core, and the base class that it shares with `RolloutRNNBuffer`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from tensordict import TensorDict

import relive as rl
from relive.compat.apexrl.buffer.overwritten import ReusedObs
from relive.compat.apexrl.buffer.specs import convert_dones, declare_action, list_leaves, to_dicts, to_plain_spec
from relive.compat.apexrl.utils.observation import Spec
from relive.compat.seeding import choose_seed, make_generator
from relive.compat.step_rows import SCORES, StepBuffer, StepRows
from relive.compat.views import declare_spec, gather_rows, make_memory_views
from relive.errors import DataWarning, explain
from relive.schema.checks import check_none_without_argument, check_nonempty, check_positive_int
from relive.schema.fields import Field

PRIVILEGED = "privileged_observations"
TRAINING_FIELDS = {
    "observations": "obs", PRIVILEGED: PRIVILEGED, "actions": "action", "old_log_probs": "log_prob",
    "advantages": "advantage", "returns": "return", "values": "value",
}  # fmt: skip
"""Core's name of each field of training data, in ApexRL's order."""
_STEP_FIELDS = ("observations", PRIVILEGED, "actions", "rewards", "dones", "values", "log_probs")
_SCORES = ("advantages", "returns")
_Self = TypeVar("_Self", bound="SingleAgentRollout")


class SingleAgentRollout(StepBuffer):
    """Base class of the rollout buffers of one agent; attributes `[num_steps, num_envs, …]` are the memory itself."""

    num_envs: int
    num_steps: int
    obs_shape: Spec
    privileged_obs_shape: Spec | None
    _reused_obs: ReusedObs
    _action_is_known = True
    """Whether shape and dtype of actions are declared, by the constructor or by the first step."""

    observations, privileged_observations, actions = make_memory_views("obs", PRIVILEGED, "action")
    rewards, dones, values, log_probs = make_memory_views("reward", "dones", "value", "log_prob")
    advantages, returns = make_memory_views(*SCORES)

    @property
    def core(self) -> rl.RolloutBuffer:
        """The relive buffer underneath, with the stored steps; `dones` are its "terminated"."""
        self._rows.tensors["terminated"].copy_(self._rows.tensors["dones"] != 0)
        return self._rows.core

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.rewards.device

    def __len__(self) -> int:
        """Number of stored transitions."""
        return self._rows.step * self.num_envs

    def _make_rows(self, action: Field, hidden_fields: Mapping[str, Any] | None = None, **settings: Any) -> StepRows:
        """Make the rows, with privileged observations if they are declared, and fields of hidden states."""
        hidden_fields = hidden_fields or {}
        privileged = {} if self.privileged_obs_shape is None else {PRIVILEGED: declare_spec(self.privileged_obs_shape)}
        settings["extra"] = {"dones": declare_spec(()), **privileged, **hidden_fields}
        make = partial(
            rl.RolloutBuffer, self.num_steps, self.num_envs, declare_spec(self.obs_shape), action, **settings
        )
        return StepRows(make, ["obs", *privileged, "action", "reward", "dones", "value", "log_prob", *hidden_fields])

    def _choose_rows(self, _actions: Any) -> StepRows:
        """Return the rows that store a step with these actions."""
        return self._rows

    def stage(self, observations: Any, privileged_observations: Any, actions: Any) -> None:
        """Copy observations and actions before the step, for environments that overwrite their observations.

        After the step call `add` with None for the three staged arguments. ApexRL has no such method.
        """
        check_not_full(self._rows)
        rows = self._choose_rows(actions)
        rows.stage_values([*list_observation_leaves(rows, observations, privileged_observations), actions])
        self._rows, self._action_is_known = rows, True

    def _store_step(
        self, observations: Any, privileged_observations: Any, actions: Any, rewards: Any, dones: Any,
        *further_fields: Any,
    ) -> None:  # fmt: skip
        """Store one step; `further_fields` are the values of the fields after `dones`, in the order of `_make_rows`."""
        check_not_full(self._rows)
        rows = self._choose_rows(actions)
        leaves = list_observation_leaves(rows, observations, privileged_observations)
        dones = convert_dones("dones", dones, rows.tensors["dones"].device)
        if self._reused_obs.is_first_reuse(leaves[0], rows.read_newest_first_leaf()):
            remedy = (
                "If the environment overwrites it, the next one is stored: clone it before the step, or call stage."
            )
            expected, got = "memory of its own for every step", "that of the step before, with other numbers"
            warnings.warn(explain("observations", expected, got, remedy), DataWarning, stacklevel=3)
        rows.write_step([*leaves, actions, rewards, dones, *further_fields])
        self._rows, self._action_is_known = rows, True

    def compute_returns_and_advantages(self, last_values: Any, gamma: float = 0.99, gae_lambda: float = 0.95) -> None:
        """Compute advantages and returns; `last_values` [num_envs] are the values after the last step.

        A truncated episode counts as ended: add the discounted value of the final observation to the last reward, as
        ApexRL's own runner does.
        """
        self._rows.compute_scores(last_values, self.dones.bool(), gamma=gamma, lam=gae_lambda)

    def clear(self) -> None:
        """Remove the stored steps."""
        self._rows.clear()

    def to(self: _Self, device: torch.device | str) -> _Self:
        """Move the stored steps to another device and return the buffer."""
        make: Any = self._rows.make_core
        self._rows = self._rows.copy_to_core(partial(make.func, *make.args, **{**make.keywords, "device": device}))
        return self


class RolloutBuffer(SingleAgentRollout):
    """`num_steps` steps of `num_envs` environments under ApexRL's names.

    Both constructors of ApexRL work: the documented one, `(num_envs, num_steps, obs_shape, device,
    num_privileged_obs=0)`, where the first `add` declares the action, and the newer one with `action_shape` and
    `action_dtype`. `num_privileged_obs` alone declares a vector of privileged observations, as documented. Attributes
    are the memory itself, and `step` may be set. `seed` makes `get_minibatch` repeatable, and so does
    `torch.manual_seed`; no global generator is used.

    Differences from ApexRL:
    - Only stored steps are trained on. For a partly filled rollout `get_all_data` returns `num_steps · num_envs` rows
      as in ApexRL, but warns, and rows that were not stored are zero; `get_minibatch` draws stored rows, and
      `last_values` follow the last stored step. (ApexRL also reads rows of older rollouts.)
    - Declared privileged observations are required, and undeclared ones are refused. (ApexRL: missing ones keep the row
      of an older rollout, and undeclared ones are dropped.)
    - Nothing is broadcast, and actions are never rounded to another dtype.
    - A `DataWarning` reports once that the environment may have overwritten `obs` before `add`; `stage` copies `obs`
      before the step.

    >>> buffer = RolloutBuffer(num_envs=2, num_steps=1, obs_shape=(3,), device="cpu")
    >>> ones = torch.ones(2)
    >>> buffer.add(torch.zeros(2, 3), None, ones, rewards=ones, dones=ones, values=0 * ones, log_probs=-ones)
    >>> buffer.compute_returns_and_advantages(last_values=ones)
    >>> buffer.get_all_data()["advantages"]
    tensor([1., 1.])
    """

    def __init__(
        self, num_envs: int, num_steps: int, obs_shape: Spec,
        action_shape: tuple[int, ...] | torch.device | str | None = None,
        action_dtype: torch.dtype | int | None = None, device: torch.device | str = "cpu",
        num_privileged_obs: int = 0, privileged_obs_shape: Spec | None = None, *, seed: int | None = None,
    ) -> None:  # fmt: skip
        # In the documented order (num_envs, num_steps, obs_shape, device, num_privileged_obs), the device arrives as
        # `action_shape` and `num_privileged_obs` as `action_dtype`.
        if isinstance(action_shape, str | torch.device):
            device, action_shape = action_shape, None
        if isinstance(action_dtype, int):
            num_privileged_obs, action_dtype = action_dtype, None
        self.num_envs, self.num_steps, self.obs_shape = num_envs, num_steps, obs_shape
        self.num_privileged_obs, self.privileged_obs_shape = num_privileged_obs, privileged_obs_shape
        if privileged_obs_shape is None and num_privileged_obs:
            self.privileged_obs_shape = (check_positive_int("num_privileged_obs", num_privileged_obs),)
        self._action_arguments = action_shape, action_dtype
        self._action_is_known = None not in self._action_arguments
        self._rows = self._make_rows(Field(action_shape or (), action_dtype or torch.float32), device=device)
        self._reused_obs = ReusedObs()
        self._seed = choose_seed(seed)
        self._random = make_generator(self.device, self._seed)

    @property
    def action_shape(self) -> tuple[int, ...]:
        """Shape of one action; `()` before the first `add` if it was not declared."""
        return tuple(self.actions.shape[2:])

    @property
    def action_dtype(self) -> torch.dtype:
        """Dtype of actions; float32 before the first `add` if it was not declared."""
        return self.actions.dtype

    def add(
        self, observations: Any, privileged_observations: Any, actions: Any, rewards: Any, dones: Any, values: Any,
        log_probs: Any,
    ) -> None:  # fmt: skip
        """Store one step of every environment; `dones` [num_envs] is 1 where this step ended an episode."""
        self._store_step(observations, privileged_observations, actions, rewards, dones, values, log_probs)

    def _choose_rows(self, actions: Any) -> StepRows:
        """Return rows for these actions; the first step declares the action if the constructor did not."""
        if self._action_is_known:
            return self._rows
        action = declare_action(actions, 1, *self._action_arguments)
        is_same = action == Field(self.action_shape, self.action_dtype)
        return self._rows if is_same else self._make_rows(action, device=self.device)

    def get_all_data(self) -> dict[str, Any]:
        """Return all transitions `[num_steps · num_envs, …]`, ordered by time, then environment, without copying.

        For a partly filled rollout they are a copy with zeros in rows that were not stored.
        """
        count = check_nonempty("get_all_data", self._rows.step) * self.num_envs
        data = _read_training_data(self._rows)
        if not self._rows.is_full:
            num_rows = self.num_steps * self.num_envs
            remedy = "Add the missing steps, or take the first len(buffer) rows."
            warnings.warn(explain("get_all_data", f"{num_rows} stored rows", count, remedy), DataWarning, stacklevel=2)
            data = {name: _copy_first_rows(count, rows) for name, rows in data.items()}
        return data

    def get_minibatch(self, batch_size: int) -> tuple[Any, ...]:
        """Draw stored transitions with replacement: a tuple of the fields of `get_all_data`, in its order."""
        count = check_nonempty("get_minibatch", self._rows.step) * self.num_envs
        size = (check_positive_int("batch_size", batch_size),)
        index = torch.randint(count, size, generator=self._random, device=self.device)
        return tuple(gather_rows(index, rows) for rows in _read_training_data(self._rows).values())

    def state_dict(self) -> dict[str, Any]:
        """Return the stored steps as tensors, dicts and numbers, for `torch.load(…, weights_only=True)`."""
        fields = {name: getattr(self, name) for name in (*_STEP_FIELDS, *_SCORES)}
        rows = {name: rows if rows is None else to_dicts(rows[: self.step].clone()) for name, rows in fields.items()}
        return {"step": self.step, **self._describe_layout(), **rows}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a `state_dict` of a buffer with this layout; an error leaves the buffer unchanged."""
        for name, expected in self._describe_layout().items():
            if state_dict[name] != expected:
                raise ValueError(f"RolloutBuffer {name} mismatch: {state_dict[name]} != {expected}")
        loaded_buffer = RolloutBuffer(
            self.num_envs, self.num_steps, self.obs_shape, *self._action_arguments, self.device,
            self.num_privileged_obs, self.privileged_obs_shape, seed=self._seed,
        )  # fmt: skip
        rows = TensorDict(
            {name: state_dict[name] for name in _STEP_FIELDS if state_dict[name] is not None}, state_dict["step"]
        )
        for row in rows:
            loaded_buffer.add(**{name: row.get(name, None) for name in _STEP_FIELDS})
        for name in _SCORES:
            getattr(loaded_buffer, name)[: loaded_buffer.step] = state_dict[name].to(self.device)
        self._rows, self._action_is_known = loaded_buffer._rows, loaded_buffer._action_is_known

    def _describe_layout(self) -> dict[str, Any]:
        specs = {name: to_plain_spec(getattr(self, name)) for name in ("obs_shape", "privileged_obs_shape")}
        return {"num_envs": self.num_envs, "num_steps": self.num_steps, **specs}

    def to(self, device: torch.device | str) -> RolloutBuffer:
        """Move the stored steps to another device and return the buffer."""
        super().to(device)
        self._random = make_generator(self.device, self._seed)
        return self


def check_not_full(rows: StepRows) -> None:
    """Raise ApexRL's error if every step is stored."""
    if rows.is_full:
        raise ValueError(explain("add", f"at most {rows.num_steps} steps", "one more", "Call clear() first."))


def list_observation_leaves(rows: StepRows, observations: Any, privileged_observations: Any) -> list[Any]:
    """List the leaves of a step's observations."""
    leaves = list_leaves("obs", rows.tensors["obs"], observations)
    if PRIVILEGED in rows.tensors:
        return [*leaves, *list_leaves(PRIVILEGED, rows.tensors[PRIVILEGED], privileged_observations)]
    check_none_without_argument(PRIVILEGED, privileged_observations, "privileged_obs_shape")
    return leaves


def _read_training_data(rows: StepRows) -> dict[str, Any]:
    """Return all rows `[T · N]` of the fields of training data."""
    return {name: rows.get_flat_memory(core_name) for name, core_name in TRAINING_FIELDS.items()}


def _copy_first_rows(count: int, rows: Any) -> Any:
    if rows is None:
        return None
    copy = rows.clone()
    copy[count:].zero_()
    return copy
