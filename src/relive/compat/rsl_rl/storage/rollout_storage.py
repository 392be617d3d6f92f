"""rsl_rl's rollout storage on relive's core, with its transitions and batches."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from tensordict import TensorDict, TensorDictBase

import relive as rl
from relive.compat.pickling import PicklableBuffer
from relive.compat.seeding import choose_seed
from relive.compat.step_rows import StepBuffer, StepRows
from relive.compat.views import make_memory_views
from relive.errors import SchemaError, explain
from relive.schema.checks import check_choice

HiddenState: TypeAlias = torch.Tensor | tuple[torch.Tensor, ...] | None
"""A recurrent state [layers, N, hidden]: a tensor for a GRU, a tuple for an LSTM."""


@dataclass(eq=False)
class Transition:
    """A step of all environments; algorithms set its fields one after the other."""

    observations: TensorDict | None = None
    """The observations before the step [N, …], by group."""
    actions: torch.Tensor | None = None
    """The actions [N, *actions_shape]."""
    rewards: torch.Tensor | None = None
    """The rewards [N] or [N, 1]."""
    dones: torch.Tensor | None = None
    """Whether the step ended its episode, also by a time-out: [N] or [N, 1]."""
    values: torch.Tensor | None = None
    """The critic's values of the observations [N, 1] (training type "rl")."""
    actions_log_prob: torch.Tensor | None = None
    """Log-probabilities of the actions [N] or [N, 1] (training type "rl")."""
    distribution_params: tuple[torch.Tensor, ...] | None = None
    """Parameters of the actions' distribution, [N, …] each (training type "rl")."""
    privileged_actions: torch.Tensor | None = None
    """The teacher's actions [N, *actions_shape] (training type "distillation")."""
    hidden_states: tuple[HiddenState, HiddenState] = (None, None)
    """The states of the actor and the critic before the step."""

    def clear(self) -> None:
        """Reset every field."""
        self.__init__()


@dataclass(eq=False)
class Batch:
    """A batch of a generator; fields that the generator does not yield are None."""

    observations: TensorDict | None = None
    actions: torch.Tensor | None = None
    values: torch.Tensor | None = None
    advantages: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    old_actions_log_prob: torch.Tensor | None = None
    old_distribution_params: tuple[torch.Tensor, ...] | None = None
    hidden_states: tuple[HiddenState, HiddenState] = (None, None)
    masks: torch.Tensor | None = None
    privileged_actions: torch.Tensor | None = None
    dones: torch.Tensor | None = None


_TYPE_FIELDS = {"rl": ("value", "log_prob", "advantages", "returns"), "distillation": ("privileged_actions",)}
"""The core's fields of one training type only."""
_ORIGINAL_NAMES = {
    "obs": "observations", "action": "actions", "reward": "rewards", "terminated": "dones", "value": "values",
    "log_prob": "actions_log_prob",
}  # fmt: skip
"""rsl_rl's name of each field that the core names differently."""
_PARAMS_PREFIX = "distribution_params_"
"""Prefix of the core's fields of distribution parameters; a number follows."""
_STATE_PREFIXES = ("hidden_state_a_", "hidden_state_c_")
"""Prefixes of the core's fields of the actor's and the critic's hidden states; a number follows."""
_BATCH_FIELDS = ("obs", "action", "value", "log_prob", "advantages", "returns")
"""The core's fields in every minibatch."""


class RolloutStorage(StepBuffer, PicklableBuffer):
    """`num_transitions_per_env` steps of `num_envs` environments under rsl_rl's names, for its PPO and distillation.

    `obs` [N, …] is an example of the observation groups. The attributes are the core's memory `[T, N, …]`;
    assigning to one writes into it. `distribution_params` and the hidden states are allocated by the first step that
    has them. `core` is the relive buffer underneath: its "terminated" are the `dones`, and its rewards include
    what rsl_rl's PPO adds to them, the discounted values of timed-out steps.

    Differences from rsl_rl:
    - Only stored steps are trained on: the generators of a partly filled storage read its first `step` rows. (rsl_rl
      also reads the other rows: zeros, or steps of older rollouts.)
    - Every epoch has a new order of all rows, from a generator of the storage. (rsl_rl uses one order for all epochs,
      and never draws the last rows if `num_mini_batches` does not divide their number.)
    - Nothing is broadcast, and floats are not rounded to integers.
    """

    Transition = Transition
    Batch = Batch

    observations, actions, rewards, dones = make_memory_views("observations", "actions", "rewards", "dones")
    values, actions_log_prob, privileged_actions = make_memory_views("values", "actions_log_prob", "privileged_actions")
    returns, advantages, distribution_params = make_memory_views("returns", "advantages", "distribution_params")
    saved_hidden_state_a, saved_hidden_state_c = make_memory_views("saved_hidden_state_a", "saved_hidden_state_c")

    def __init__(
        self, training_type: str, num_envs: int, num_transitions_per_env: int, obs: TensorDict,
        actions_shape: tuple[int, ...] | list[int], device: str = "cpu",
    ) -> None:  # fmt: skip
        self.training_type = check_choice("training_type", training_type, tuple(_TYPE_FIELDS))
        self.num_envs, self.num_transitions_per_env = num_envs, num_transitions_per_env
        self.actions_shape, self.device = actions_shape, device
        self._groups = {name: rl.Field(leaf.shape[1:], leaf.dtype) for name, leaf in obs.items()}
        self._late_fields: dict[str, rl.Field] = {}
        """Fields of distribution parameters and hidden states, declared by the first step that has them."""
        self._seed = choose_seed()
        self._rows = StepRows(*self._declare_core(self._late_fields), _ORIGINAL_NAMES, "Set it before add_transition.")
        self._bind_memory()

    def _declare_core(self, late_fields: dict[str, rl.Field]) -> tuple[partial[rl.RolloutBuffer], list[str]]:
        """Return a function that makes a core with the extra fields `late_fields`, and the names of a step's fields."""
        action = rl.Field(self.actions_shape)
        if self.training_type == "rl":
            extra, step_fields = {"advantages": (1,), "returns": (1,)}, ["value", "log_prob"]
        else:
            extra, step_fields = {"privileged_actions": action}, ["privileged_actions"]
        sizes = self.num_transitions_per_env, self.num_envs
        settings: dict[str, Any] = {"reward": (1,), "value": (1,), "device": self.device, "seed": self._seed}
        make = partial(rl.RolloutBuffer, *sizes, self._groups, action, extra={**extra, **late_fields}, **settings)
        return make, ["obs", "action", "reward", "terminated", *step_fields, *late_fields]

    # Inference tensors could not be written later, so the views are made outside inference mode.
    @torch.inference_mode(False)
    def _bind_memory(self) -> None:
        tensors = self._rows.tensors
        shape = self.num_transitions_per_env, self.num_envs
        fields = ("action", "reward", *_TYPE_FIELDS[self.training_type])
        memory: dict[str, Any] = {
            "observations": TensorDict(dict(tensors["obs"].items()), shape, device=tensors["action"].device),
            **{_ORIGINAL_NAMES.get(name, name): tensors[name] for name in fields},
            "dones": tensors["terminated"].view(torch.uint8).unsqueeze(-1),
        }
        if self.training_type == "rl":
            memory["distribution_params"] = tuple(_list_numbered_fields(tensors, _PARAMS_PREFIX)) or None
        for prefix in _STATE_PREFIXES:
            states = [state.transpose(1, 2) for state in _list_numbered_fields(tensors, prefix)]
            memory[f"saved_{prefix[:-1]}"] = states or None
        self.memory = _reuse_tensors(getattr(self, "memory", {}), memory)
        """The core's memory by attribute name."""
        states = [name for name in self._late_fields if name.startswith(_STATE_PREFIXES)]
        self._zero_states = {name: torch.zeros_like(tensors[name][0]) for name in states}
        """Zeros for steps without hidden states, by the core's names of the states."""

    def add_transition(self, transition: Any) -> None:
        """Store one step of every environment; tensors on another device are moved."""
        rows = self._rows
        if rows.is_full:
            expected = f"at most {self.num_transitions_per_env} transitions"
            remedy = "Train on the rollout, then clear() it."
            raise OverflowError(explain("add_transition", expected, rows.step + 1, remedy))
        values, late = self._list_step_values(transition), _read_optional_values(transition, self.training_type)
        fields = self._late_fields
        if not late.keys() <= fields.keys():
            for name, part in late.items():
                field_type = rl.Field if name.startswith(_PARAMS_PREFIX) else rl.Carry
                fields = fields | {name: field_type(part.shape[1:])}
            rows = rows.copy_to_core(*self._declare_core(fields))
        rows.write_step([*values, *(late.get(name, self._zero_states.get(name)) for name in fields)])
        if rows is not self._rows:
            self._rows, self._late_fields = rows, fields
            self._bind_memory()

    def _list_step_values(self, transition: Any) -> list[Any]:
        """Return the values of a step without distribution parameters and hidden states."""
        observations, dones = transition.observations, transition.dones
        groups = {} if observations is None else dict(observations.items())
        if groups.keys() != self._groups.keys():
            expected = f"the observation groups {list(self._groups)}"
            raise SchemaError(explain("observations", expected, list(groups), "Pass the groups that the storage has."))
        ended = None if dones is None else dones.view(-1) != 0
        values = [*map(groups.get, self._groups), transition.actions, _as_column(transition.rewards), ended]
        if self.training_type == "rl":
            return [*values, transition.values, _as_column(transition.actions_log_prob)]
        return [*values, transition.privileged_actions]

    def clear(self) -> None:
        """Remove the stored steps; the attributes show the old rows until they are overwritten."""
        self._rows.clear()

    def generator(self) -> Generator[Batch, None, None]:
        """Yield the stored steps one after the other, for distillation."""
        self._check_training_type("distillation", "generator")
        observations, actions, dones = (x.unbind(0) for x in (self.observations, self.privileged_actions, self.dones))
        for row in range(self.step):
            yield Batch(observations=observations[row], privileged_actions=actions[row], dones=dones[row])

    def mini_batch_generator(self, num_mini_batches: int, num_epochs: int = 8) -> Generator[Batch, None, None]:
        """Yield shuffled minibatches [B, …] for feed-forward networks, `num_mini_batches` per epoch."""
        self._check_training_type("rl", "mini_batch_generator")
        size = _compute_minibatch_size("stored transitions", len(self.core), num_mini_batches)
        fields = [*_BATCH_FIELDS, *(name for name in self._late_fields if name.startswith(_PARAMS_PREFIX))]
        for _ in range(num_epochs):
            batches = self.core.minibatches(size, drop_last=True, fields=fields)
            for rows in itertools.islice(batches, num_mini_batches):
                yield Batch(
                    observations=TensorDict(dict(rows["obs"].items()), rows.batch_size, device=self.core.device),
                    actions=rows["action"],
                    values=rows["value"],
                    advantages=rows["advantages"],
                    returns=rows["returns"],
                    old_actions_log_prob=rows["log_prob"],
                    old_distribution_params=tuple(_list_numbered_fields(rows, _PARAMS_PREFIX)),
                )

    def recurrent_mini_batch_generator(
        self, num_mini_batches: int, num_epochs: int = 8
    ) -> Generator[Batch, None, None]:
        """Yield minibatches of `num_envs // num_mini_batches` environments, with episodes as padded trajectories.

        Observations and masks are [T, trajectories, …], by environment, then time; hidden states belong to the first
        step of each trajectory; all other fields are [T, environments, …].
        """
        self._check_training_type("rl", "recurrent_mini_batch_generator")
        size = _compute_minibatch_size("environments", self.num_envs, num_mini_batches)
        steps = self.step
        fields = ["obs", *self._zero_states]
        (sequences,) = self.core.sequences(steps, shuffle=False, layout="time_first", fields=fields)
        observations = TensorDict(dict(sequences["obs"].items()), sequences["mask"].shape, device=self.core.device)
        actor, critic = (_list_numbered_fields(sequences, prefix) for prefix in _STATE_PREFIXES)
        # Trajectories are ordered by environment, so a search finds the first trajectory of each minibatch.
        first_envs = torch.arange(num_mini_batches + 1, device=self.core.device) * size
        bounds = torch.searchsorted(sequences["index"] % self.num_envs, first_envs).tolist()
        for i in list(range(num_mini_batches)) * num_epochs:
            envs, trajectories = slice(i * size, (i + 1) * size), slice(*bounds[i : i + 2])
            yield Batch(
                observations=observations[:, trajectories],
                actions=self.actions[:steps, envs],
                values=self.values[:steps, envs],
                advantages=self.advantages[:steps, envs],
                returns=self.returns[:steps, envs],
                old_actions_log_prob=self.actions_log_prob[:steps, envs],
                old_distribution_params=tuple(p[:steps, envs] for p in self.distribution_params or ()),
                hidden_states=(_make_network_state(actor, trajectories), _make_network_state(critic, trajectories)),
                masks=sequences["mask"][:, trajectories],
            )

    def _get_memory(self, field: str) -> Any:
        if field not in self.memory:
            remedy = f"A storage of type {self.training_type!r} does not have it."
            raise AttributeError(explain("RolloutStorage", f"one of {', '.join(self.memory)}", field, remedy))
        return self.memory[field]

    def _check_training_type(self, training_type: str, where: str) -> None:
        if self.training_type != training_type:
            remedy = "Make a storage of this type."
            raise SchemaError(explain(where, f"training_type {training_type!r}", repr(self.training_type), remedy))

    _derived_attributes = ("memory", "_zero_states")

    def _set_derived_attributes(self) -> None:
        self._bind_memory()


def replace_storage(storage: Any) -> Any:
    """Replace an empty storage of rsl_rl by relive's with its settings; return a storage of another class unchanged.

    rsl_rl makes the storage and passes it to the constructor of an algorithm.
    """
    if (type(storage).__module__, type(storage).__name__) != ("rsl_rl.storage.rollout_storage", "RolloutStorage"):
        return storage
    sizes = storage.num_envs, storage.num_transitions_per_env
    obs = storage.observations[0]
    return RolloutStorage(storage.training_type, *sizes, obs, storage.actions_shape, storage.device)


def _reuse_tensors(old_tensors: Mapping[str, Any], new_tensors: dict[str, Any]) -> dict[str, Any]:
    """Point existing tensors at the new memory, so that references of callers to these tensors stay valid."""
    for name, memory in old_tensors.items():
        if isinstance(memory, torch.Tensor):
            new_tensors[name] = memory.set_(new_tensors[name])
        elif isinstance(memory, TensorDictBase):
            for key, leaf in new_tensors[name].items():
                memory.get(key).set_(leaf)
            new_tensors[name] = memory
    return new_tensors


def _list_numbered_fields(rows: Any, prefix: str) -> list[torch.Tensor]:
    """List the fields named `prefix` and a number, in the order of the numbers."""
    return [rows[f"{prefix}{i}"] for i in range(sum(str(name).startswith(prefix) for name in rows.keys()))]


def _compute_minibatch_size(unit: str, total: int, num_mini_batches: int) -> int:
    """Return the size of each of `num_mini_batches` equal minibatches."""
    if num_mini_batches < 1 or total < num_mini_batches:
        remedy = "Add transitions first." if not total else "Pass fewer mini-batches."
        raise SchemaError(explain("num_mini_batches", f"1 to {total} ({unit})", num_mini_batches, remedy))
    return total // num_mini_batches


def _as_column(numbers: torch.Tensor | None) -> torch.Tensor | None:
    return None if numbers is None else numbers.view(-1, 1)


def _read_optional_values(transition: Any, training_type: str) -> dict[str, torch.Tensor]:
    """Return the distribution parameters and hidden states of a step, [N, …] each."""
    late: dict[str, torch.Tensor] = {}
    if training_type == "rl":
        for i, part in enumerate(transition.distribution_params or ()):
            late[f"{_PARAMS_PREFIX}{i}"] = part
    for prefix, state in zip(_STATE_PREFIXES, transition.hidden_states, strict=True):
        if state is not None:
            for i, part in enumerate(state if isinstance(state, tuple | list) else (state,)):
                late[f"{prefix}{i}"] = part.transpose(0, 1)
    return late


def _make_network_state(parts: Sequence[torch.Tensor], trajectories: slice) -> HiddenState:
    """Return the state [layers, trajectories, hidden] for a network: a tensor for a GRU, a tuple for an LSTM."""
    states = tuple(part[trajectories].transpose(0, 1).contiguous() for part in parts)
    return states if len(states) > 1 else states[0] if states else None
