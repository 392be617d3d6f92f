"""rsl_rl's rollout storage on ours."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Generator, Sequence
from typing import Any

import torch
from tensordict import TensorDict

import relive as rl
from relive.compat.rsl_rl.storage import transition as step
from relive.compat.rsl_rl.storage.attributes import PARAMS, STATES, Shared, follow, memory_of, parts_of
from relive.compat.rsl_rl.storage.transition import Batch, HiddenState
from relive.errors import SchemaError, explain

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

    observations = Shared()
    actions = Shared()
    rewards = Shared()
    dones = Shared()
    privileged_actions = Shared()
    values = Shared()
    actions_log_prob = Shared()
    distribution_params = Shared()
    returns = Shared()
    advantages = Shared()
    saved_hidden_state_a = Shared()
    saved_hidden_state_c = Shared()

    def __init__(
        self,
        training_type: str,
        num_envs: int,
        num_transitions_per_env: int,
        obs: TensorDict,
        actions_shape: tuple[int, ...] | list[int],
        device: str = "cpu",
    ) -> None:
        if training_type not in _TYPES:
            expected = " or ".join(map(repr, _TYPES))
            raise SchemaError(explain("training_type", expected, repr(training_type), "Pass one of them."))
        self.training_type = training_type
        self.device = device
        self.num_transitions_per_env = num_transitions_per_env
        self.num_envs = num_envs
        self.actions_shape = actions_shape
        self._observation = {name: rl.Field(leaf.shape[1:], leaf.dtype) for name, leaf in obs.items()}
        self._extra: dict[str, Any] = {"advantages": (1,), "returns": (1,)}
        if training_type == "distillation":
            self._extra = {"privileged_actions": rl.Field(actions_shape)}
        self._seed = _seed_of_the_run()
        self._adopt(self._made(self._extra), self._extra)

    def _made(self, extra: dict[str, Any], rows: TensorDict | None = None, count: int = 0) -> rl.RolloutBuffer:
        """A core with these extra fields, with the first `count` of these rows."""
        core = rl.RolloutBuffer(
            self.num_transitions_per_env,
            self.num_envs,
            self._observation,
            rl.Field(self.actions_shape),
            reward=(1,),
            value=(1,),
            extra=extra,
            device=self.device,
            seed=self._seed,
        )
        if rows is not None:
            core.columns.update_(rows)
            core.take_back(count)
        return core

    @torch.inference_mode(False)  # the memory is written later, in whatever mode
    def _adopt(self, core: rl.RolloutBuffer, extra: dict[str, Any]) -> None:
        self.core, self._extra = core, extra
        self.memory: dict[str, Any] = follow(getattr(self, "memory", {}), memory_of(core, self.training_type))
        """The core's memory by the names of the attributes."""
        self._nothing = torch.zeros(self.num_envs, 1, device=core.device)
        self._never = self._nothing[:, 0] != 0
        self._zero_states = {
            prefix: {
                name: self._nothing.new_zeros(self.num_envs, *field.shape)
                for name, field in extra.items()
                if name.startswith(prefix)
            }
            for prefix in STATES
        }

    @property
    def step(self) -> int:
        """How many steps are stored. Set it to the number of rows that were written directly."""
        return self.core.num_stored

    @step.setter
    def step(self, count: int) -> None:
        self.core.take_back(count)

    def add_transition(self, transition: Any) -> None:
        """Store one step of every environment; tensors on another device are moved."""
        if self.core.is_full:
            expected = f"at most {self.num_transitions_per_env} transitions"
            got = self.num_transitions_per_env + 1
            raise OverflowError(explain("add_transition", expected, got, "Train on the rollout, then clear() it."))
        late = self._late(transition)
        if late.keys() <= self._extra.keys():
            _add(self.core, {**self._fields(transition), **late})
            return
        extra = self._extra | {
            name: (rl.Field if name.startswith(PARAMS) else rl.Carry)(part.shape[1:]) for name, part in late.items()
        }
        core = self._made(extra, self.core.columns, self.step)
        _add(core, {**self._fields(transition), **late})
        self._adopt(core, extra)

    def _fields(self, transition: Any) -> dict[str, Any]:
        """What every step has, for the core, which explains what is missing."""
        dones = transition.dones
        fields = {
            "obs": transition.observations,
            "action": transition.actions,
            "reward": _as_column(transition.rewards),
            "terminated": None if dones is None else dones.view(-1) != 0,
            "truncated": self._never,
        }
        none = self._nothing
        if self.training_type == "rl":
            value, log_prob = transition.values, _as_column(transition.actions_log_prob)
            return {**fields, "value": value, "log_prob": log_prob, "advantages": none, "returns": none}
        return {**fields, "value": none, "log_prob": none, "privileged_actions": transition.privileged_actions}

    def _late(self, transition: Any) -> dict[str, torch.Tensor]:
        """What the first step that has it declares, for the core; a state that is None after that is zero."""
        late: dict[str, torch.Tensor] = {}
        if self.training_type == "rl":
            for i, part in enumerate(transition.distribution_params or ()):
                late[f"{PARAMS}{i}"] = part.contiguous()
        for prefix, state in zip(STATES, transition.hidden_states, strict=True):
            if state is None:
                late |= self._zero_states[prefix]
                continue
            for i, part in enumerate(state if isinstance(state, tuple | list) else (state,)):
                late[f"{prefix}{i}"] = part.transpose(0, 1).contiguous()
        return late

    def clear(self) -> None:
        """Forget the stored steps; the attributes show the old rows until they are overwritten."""
        self.core.clear()

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
        fields = [*_READ, *(name for name in self._extra if name.startswith(PARAMS))]
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
        states = [name for name in self._extra if name.startswith(STATES)]
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

    def _require(self, training_type: str, where: str) -> None:
        if self.training_type != training_type:
            remedy = "Make a storage of this type."
            raise SchemaError(explain(where, f"training_type {training_type!r}", repr(self.training_type), remedy))

    def __getstate__(self) -> dict[str, Any]:
        """Copies of the rows instead of the core and its memory."""
        derived = ("core", "memory", "_nothing", "_never", "_zero_states")
        state = {name: value for name, value in vars(self).items() if name not in derived}
        return {**state, "rows": self.core.columns.clone(), "count": self.step}

    def __setstate__(self, state: dict[str, Any]) -> None:
        rows, count = state.pop("rows"), state.pop("count")
        self.__dict__.update(state)
        self._adopt(self._made(self._extra, rows, count), self._extra)


def _share(what: str, total: int, num_mini_batches: int) -> int:
    """How many of the total each minibatch has."""
    if num_mini_batches < 1 or total < num_mini_batches:
        remedy = "Add transitions first." if not total else "Pass fewer mini-batches."
        raise SchemaError(explain("num_mini_batches", f"1 to {total} ({what})", num_mini_batches, remedy))
    return total // num_mini_batches


def _seed_of_the_run() -> int:
    """A seed made of the state of torch's generator, which is only read.

    Not `experiment_seed`, which counts buffers: rsl_rl promises that a run repeats after `torch.manual_seed`, also in
    the same process.
    """
    state = torch.random.get_rng_state().numpy().tobytes()
    return int.from_bytes(hashlib.blake2b(state, digest_size=7).digest(), "little")


def _as_column(numbers: torch.Tensor | None) -> torch.Tensor | None:
    return None if numbers is None else numbers.view(-1, 1)


def _add(core: rl.RolloutBuffer, fields: dict[str, Any]) -> None:
    try:
        core.add(**fields)
    except SchemaError:
        # Here, because comparing every tensor's device at every step takes as long as a small copy.
        moved = {name: value if value is None else value.to(core.device) for name, value in fields.items()}
        if all(moved[name] is value for name, value in fields.items()):
            raise
        core.add(**moved)


def _states(parts: Sequence[torch.Tensor], trajectories: slice) -> HiddenState:
    """The states [layers, trajectories, hidden] as rsl_rl's networks take them: a GRU's bare, an LSTM's in a tuple."""
    states = tuple(part[trajectories].transpose(0, 1).contiguous() for part in parts)
    return states if len(states) > 1 else states[0] if states else None
