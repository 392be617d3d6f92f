"""rsl_rl's rollout storage on ours."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Sequence
from typing import Any

import torch
from tensordict import TensorDict

import relive as rl
from relive.compat.rsl_rl.storage import transition as step
from relive.compat.rsl_rl.storage.attributes import PARAMS, STATES, follow, memory_of, overwrite, parts_of
from relive.compat.rsl_rl.storage.transition import Batch, HiddenState
from relive.compat.seeding import experiment_seed
from relive.compat.step_rows import Rows
from relive.compat.views import MemoryView
from relive.errors import SchemaError, explain
from relive.schema.checks import one_of

_TYPES = ("rl", "distillation")
_READ = ("obs", "action", "value", "log_prob", "advantages", "returns")
"""What minibatches are made of."""


class RolloutStorage:
    """`num_transitions_per_env` steps of `num_envs` environments under rsl_rl's names, for its PPO and distillation.

    `obs` [N, …] shows the observation groups. The attributes are the core's memory, `[T, N, …]`, and can be assigned.
    `distribution_params` and the hidden states exist from the first step that has them. `core` is the relive buffer
    underneath: `dones` are its "terminated", and rewards are as rsl_rl's PPO gives them, with the value of a timed-out
    step's own observation in them.

    What is different here:
    - Only stored steps are trained on: the generators of a partly filled storage read its first `step` rows. (There,
      zeros and rows of older rollouts are among them.)
    - Every epoch is shuffled anew, over all rows, by a generator of the storage. (There, one permutation serves all
      epochs, and where `num_mini_batches` does not divide the rows, the last ones are never drawn.)
    - Nothing is broadcast, and floats are not rounded to integers.
    """

    Transition = step.Transition
    Batch = step.Batch

    observations = MemoryView()
    actions = MemoryView()
    rewards = MemoryView()
    dones = MemoryView()
    privileged_actions = MemoryView()
    values = MemoryView()
    actions_log_prob = MemoryView()
    distribution_params = MemoryView()
    returns = MemoryView()
    advantages = MemoryView()
    saved_hidden_state_a = MemoryView()
    saved_hidden_state_c = MemoryView()

    def __init__(
        self,
        training_type: str,
        num_envs: int,
        num_transitions_per_env: int,
        obs: TensorDict,
        actions_shape: tuple[int, ...] | list[int],
        device: str = "cpu",
    ) -> None:
        self.training_type = one_of("training_type", training_type, _TYPES)
        self.device = device
        self.num_transitions_per_env = num_transitions_per_env
        self.num_envs = num_envs
        self.actions_shape = actions_shape
        self._groups = {name: rl.Field(leaf.shape[1:], leaf.dtype) for name, leaf in obs.items()}
        self._extra: dict[str, Any] = {"advantages": (1,), "returns": (1,)}
        if training_type == "distillation":
            self._extra = {"privileged_actions": rl.Field(actions_shape)}
        self._late: dict[str, rl.Field] = {}
        """Distribution parameters and hidden states, which the first step that has them declares."""
        self._seed = experiment_seed()
        self._adopt(self._made(self._late), self._late)
        self._step, self._is_told = 0, True

    def _made(self, late: dict[str, rl.Field], rows: TensorDict | None = None) -> rl.RolloutBuffer:
        """A core that has these late fields, and the content of another one's memory."""
        core = rl.RolloutBuffer(
            self.num_transitions_per_env,
            self.num_envs,
            self._groups,
            rl.Field(self.actions_shape),
            reward=(1,),
            value=(1,),
            extra={**self._extra, **late},
            device=self.device,
            seed=self._seed,
        )
        if rows is not None:
            core.columns.update_(rows)
        return core

    @torch.inference_mode(False)  # the memory is written later, in whatever mode
    def _adopt(self, core: rl.RolloutBuffer, late: dict[str, rl.Field]) -> None:
        self._core, self._late = core, late
        self.memory: dict[str, Any] = follow(getattr(self, "memory", {}), memory_of(core, self.training_type))
        """The core's memory by the names of the attributes."""
        self._rows = self._rows_of(core, late)
        states = [name for name in late if name.startswith(STATES)]
        self._unknown = {name: torch.zeros_like(core.columns[name][0]) for name in states}
        """What stands for the hidden state of a step that has none."""

    def _rows_of(self, core: rl.RolloutBuffer, late: dict[str, rl.Field]) -> Rows:
        """The rows of what a step gives, in the order of `_values` and `late`."""
        columns = core.columns
        given = {"actions": "action", "rewards": "reward", "dones": "terminated"}
        if self.training_type == "rl":
            given |= {"values": "value", "actions_log_prob": "log_prob"}
        else:
            given |= {"privileged_actions": "privileged_actions"}
        groups = {f"observations.{name}": columns["obs", name] for name in self._groups}
        steps = {theirs: columns[ours] for theirs, ours in given.items()}
        return Rows({**groups, **steps, **{name: columns[name] for name in late}}, "Set it before add_transition.")

    @property
    def core(self) -> rl.RolloutBuffer:
        """The relive buffer underneath, with the stored steps."""
        if not self._is_told:
            self._core.take_back(self._step)
            self._is_told = True
        return self._core

    @property
    def step(self) -> int:
        """How many steps are stored. Set it to the number of rows that were written directly."""
        return self._step

    @step.setter
    def step(self, count: int) -> None:
        self._core.take_back(count)
        self._step, self._is_told = self._core.num_stored, True

    def add_transition(self, transition: Any) -> None:
        """Store one step of every environment; tensors on another device are moved."""
        if self._step == self.num_transitions_per_env:
            expected = f"at most {self.num_transitions_per_env} transitions"
            remedy = "Train on the rollout, then clear() it."
            raise OverflowError(explain("add_transition", expected, self._step + 1, remedy))
        values, late = self._values(transition), _late_values(transition, self.training_type)
        if late.keys() <= self._late.keys():
            self._rows.write(self._step, [*values, *(late.get(n, self._unknown.get(n)) for n in self._late)])
        else:
            self._grow(values, late)
        self._step, self._is_told = self._step + 1, False

    def _values(self, transition: Any) -> list[Any]:
        """What every step has."""
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

    def _grow(self, values: list[Any], late: dict[str, torch.Tensor]) -> None:
        """Store a step that has fields which no step had before, in a core that has them."""
        kinds = {name: rl.Field if name.startswith(PARAMS) else rl.Carry for name in late}
        fields = self._late | {name: kinds[name](part.shape[1:]) for name, part in late.items()}
        core = self._made(fields, self._core.columns)
        self._rows_of(core, fields).write(self._step, [*values, *(late.get(n, self._unknown.get(n)) for n in fields)])
        self._adopt(core, fields)

    def clear(self) -> None:
        """Forget the stored steps; the attributes show the old rows until they are overwritten."""
        self._step, self._is_told = 0, False

    def generator(self) -> Generator[Batch, None, None]:
        """The stored steps one after the other, for distillation."""
        self._require("distillation", "generator")
        observations, actions, dones = (x.unbind(0) for x in (self.observations, self.privileged_actions, self.dones))
        for row in range(self.step):
            yield Batch(observations=observations[row], privileged_actions=actions[row], dones=dones[row])

    def mini_batch_generator(self, num_mini_batches: int, num_epochs: int = 8) -> Generator[Batch, None, None]:
        """Shuffled minibatches [B, …] for feed-forward networks, `num_mini_batches` in each epoch."""
        self._require("rl", "mini_batch_generator")
        size = _share("stored transitions", len(self.core), num_mini_batches)
        fields = [*_READ, *(name for name in self._late if name.startswith(PARAMS))]
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
                    old_distribution_params=tuple(parts_of(rows, PARAMS)),
                )

    def recurrent_mini_batch_generator(
        self, num_mini_batches: int, num_epochs: int = 8
    ) -> Generator[Batch, None, None]:
        """Whole environments, `num_envs // num_mini_batches` at a time, with their episodes as padded trajectories.

        Observations and masks are [T, trajectories, …], by environment, then time; hidden states are those that the
        trajectories begin with; everything else is [T, environments, …].
        """
        self._require("rl", "recurrent_mini_batch_generator")
        size = _share("environments", self.num_envs, num_mini_batches)
        steps = self.step
        states = [name for name in self._late if name.startswith(STATES)]
        (found,) = self.core.sequences(steps, shuffle=False, layout="time_first", fields=["obs", *states])
        observations = TensorDict(dict(found["obs"].items()), found["mask"].shape, device=self.core.device)
        actor, critic = (parts_of(found, prefix) for prefix in STATES)
        # Trajectories are in the order of environments; these are the first ones of each minibatch.
        first_envs = torch.arange(num_mini_batches + 1, device=self.core.device) * size
        bounds = torch.searchsorted(found["index"] % self.num_envs, first_envs).tolist()
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
                hidden_states=(_states(actor, trajectories), _states(critic, trajectories)),
                masks=found["mask"][:, trajectories],
            )

    def _memory_of(self, name: str) -> Any:
        if name not in self.memory:
            remedy = f"A storage of type {self.training_type!r} does not have it."
            raise AttributeError(explain("RolloutStorage", f"one of {', '.join(self.memory)}", name, remedy))
        return self.memory[name]

    def _assign(self, name: str, value: Any) -> None:
        overwrite(name, self._memory_of(name), value)

    def _require(self, training_type: str, where: str) -> None:
        if self.training_type != training_type:
            remedy = "Make a storage of this type."
            raise SchemaError(explain(where, f"training_type {training_type!r}", repr(self.training_type), remedy))

    def __getstate__(self) -> dict[str, Any]:
        """Copies of the rows instead of the core and its memory."""
        derived = ("_core", "memory", "_rows", "_unknown", "_is_told")
        state = {name: value for name, value in vars(self).items() if name not in derived}
        return {**state, "columns": self._core.columns.clone()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        columns = state.pop("columns")
        self.__dict__.update(state)
        self._adopt(self._made(self._late, columns), self._late)
        self._is_told = False


def _share(what: str, total: int, num_mini_batches: int) -> int:
    """How many of the total each minibatch has."""
    if num_mini_batches < 1 or total < num_mini_batches:
        remedy = "Add transitions first." if not total else "Pass fewer mini-batches."
        raise SchemaError(explain("num_mini_batches", f"1 to {total} ({what})", num_mini_batches, remedy))
    return total // num_mini_batches


def _as_column(numbers: torch.Tensor | None) -> torch.Tensor | None:
    return None if numbers is None else numbers.view(-1, 1)


def _late_values(transition: Any, training_type: str) -> dict[str, torch.Tensor]:
    """The distribution parameters and hidden states of a step, [N, …] each."""
    late: dict[str, torch.Tensor] = {}
    if training_type == "rl":
        for i, part in enumerate(transition.distribution_params or ()):
            late[f"{PARAMS}{i}"] = part
    for prefix, state in zip(STATES, transition.hidden_states, strict=True):
        if state is not None:
            for i, part in enumerate(state if isinstance(state, tuple | list) else (state,)):
                late[f"{prefix}{i}"] = part.transpose(0, 1)
    return late


def _states(parts: Sequence[torch.Tensor], trajectories: slice) -> HiddenState:
    """The states [layers, trajectories, hidden] as rsl_rl's networks take them: a GRU's bare, an LSTM's in a tuple."""
    states = tuple(part[trajectories].transpose(0, 1).contiguous() for part in parts)
    return states if len(states) > 1 else states[0] if states else None
