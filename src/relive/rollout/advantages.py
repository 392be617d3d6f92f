"""Learning targets of a rollout: advantages and returns, the last value and observation, and attached tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from gymnasium.vector import AutoresetMode

from relive.checkpoint.snapshot import SnapshotReader, State
from relive.errors import NotReadyError, SchemaError, explain, infinite_rewards, warn_user
from relive.estimators import gae
from relive.kernels import complete
from relive.rollout.storage import EpisodeFlags, Storage
from relive.schema.assembly import value_of
from relive.schema.autoreset import final_observations, host_flags
from relive.schema.buffer_schemas import MADE_BY_ROLLOUT, agents_of
from relive.schema.conversion import as_tensor, convert, convert_leaves, path_name
from relive.schema.fields import DTYPES, Field, Path, named_leaves
from relive.schema.invariants import require, require_form, same_bits
from relive.storage.codec import Node

Bootstrap: TypeAlias = bool | Literal["own_value"]
"""The value after a truncated step: of its final observation, 0, or of its own observation if the final is unknown."""


class Advantages:
    """Generalised advantage estimation over the steps of a rollout, agent by agent."""

    def __init__(self, storage: Storage, flags: EpisodeFlags, finals: FinalObservations) -> None:
        self._storage, self._schema, self._flags, self._finals = storage, storage.schema, flags, finals
        self._agents = agents_of(storage.schema)
        self.last = LastStep(storage)
        self._rewards = RewardWarnings(storage, flags)

    def compute(
        self, last_value: Any, last_obs: Any, final_value: Any, *, bootstrap: Bootstrap, gamma: float, lam: float
    ) -> None:
        """Attach advantages and returns to the stored steps, and keep the last value and observation after them."""
        storage, lead = self._storage, self._storage.lead
        steps = storage.require_complete_steps("compute_advantage")
        if "value" in storage.absent:
            remedy = "Pass value= to every add, or attach(value=…) before."
            raise NotReadyError(explain("compute_advantage", f"a value at {steps} steps", "none", remedy))
        if not self._agents:
            reward, value = (self._schema.trees[name] for name in ("reward", "value"))
            remedy = "Pass value= to the buffer with the keys and shapes of reward=."
            raise SchemaError(explain("value", f"one value for each reward ({reward})", value, remedy))
        fields = {"value": last_value} if last_obs is None else {"value": last_value, "obs": last_obs}
        last = {
            name: [x.clone() for x in convert_leaves(self._schema, name, value, lead, storage.device, prefix="last_")]
            for name, value in fields.items()
        }
        targets = self._estimate(steps, last["value"], final_value, _parse_bootstrap(bootstrap), gamma, lam)
        self._rewards.look_at(steps)

        def change() -> None:
            self.last.keep(last)
            self.last.write()
            storage.attach(targets)

        complete(change)

    def _estimate(
        self, steps: int, last: list[torch.Tensor], final_value: Any, bootstrap: Bootstrap, gamma: float, lam: float
    ) -> dict[Path, torch.Tensor]:
        """Advantages and returns [T, N, …] of the first steps, which the values `last` follow."""
        flags = self._flags
        terminated, truncated = flags.terminated[:steps], flags.truncated[:steps]
        cut = truncated & ~terminated
        places, finals = self._final_values(final_value, bootstrap, cut)
        uses_own = bootstrap == "own_value" and not flags.has_reset_rows
        ends = terminated if bootstrap else terminated | truncated
        mask = flags.mask(steps)
        targets: dict[Path, torch.Tensor] = {}
        for i, (agent, reward, value) in enumerate(self._agents):
            values = self._storage.tensors[value][:steps]
            next_values = torch.cat([values[1:], last[i].view(1, *values.shape[1:])])
            if uses_own:
                wide = cut.view(*cut.shape, *(1,) * (values.ndim - 2))
                next_values = torch.where(wide, values, next_values)
            if places is not None:
                next_values[places] = finals[i]
            rewards = self._storage.tensors[reward][:steps]
            advantage, return_ = gae(rewards, values, next_values, ends, truncated, gamma=gamma, lam=lam, mask=mask)
            targets |= {("advantage", *agent): advantage, ("return", *agent): return_}
        return targets

    def _final_values(
        self, final_value: Any, bootstrap: Bootstrap, cut: torch.Tensor
    ) -> tuple[tuple[torch.Tensor, ...] | None, list[torch.Tensor]]:
        """(steps, envs) whose next value is not the next row's, or None; and the leaves of these next values."""
        places = self._finals.places
        if not bootstrap:
            if final_value is None:
                return None, []
            remedy = "Leave out final_value= or bootstrap_truncated=False."
            got = type(final_value).__name__
            raise SchemaError(explain("final_value", "None with bootstrap_truncated=False", got, remedy))
        if bootstrap != "own_value":
            if not self._flags.has_reset_rows and int(cut.sum()) > len(places):
                raise _unknown_final(cut, places)
            if final_value is None and places:
                remedy = (
                    "Pass final_value=critic(rollout.final_obs), or bootstrap_truncated=False to count them as ends."
                )
                raise NotReadyError(explain("final_value", f"values of {len(places)} truncated steps", None, remedy))
        if final_value is None:
            return None, []
        device, lead = self._storage.device, (len(places),)
        values = convert_leaves(
            self._schema, "value", final_value, lead, device, prefix="final_", unit="truncated steps"
        )
        return torch.tensor(places, dtype=torch.int64, device=device).view(-1, 2).unbind(1), values


def _parse_bootstrap(bootstrap: Any) -> Bootstrap:
    if isinstance(bootstrap, bool | np.bool_):
        return bool(bootstrap)
    if isinstance(bootstrap, str) and bootstrap == "own_value":
        return "own_value"
    expected = 'True, False or "own_value"'
    raise SchemaError(explain("bootstrap_truncated", expected, repr(bootstrap), "Pass one of them."))


def _unknown_final(cut: torch.Tensor, places: list[tuple[int, int]]) -> NotReadyError:
    """The error for the first truncated step whose final observation is unknown."""
    step, env = next((t, n) for t, n in cut.nonzero().tolist() if (t, n) not in set(places))
    remedy = (
        "Pass final_obs= to add, use add_step, or pass bootstrap_truncated=False to count it as an end; "
        'bootstrap_truncated="own_value" is for simulators that never reveal it.'
    )
    where = f"final_obs of step {step}, environment {env}"
    return NotReadyError(explain(where, "the observation that the truncated step led to", None, remedy))


_FEWEST_ENDS = 8


class RewardWarnings:
    """Warns once of rewards that are not finite, and once of rewards that show another autoreset mode; on the host."""

    def __init__(self, storage: Storage, flags: EpisodeFlags) -> None:
        self._storage, self._flags = storage, flags
        self._may_be_infinite = storage.device.type == "cpu"
        self._may_reset_later = self._may_be_infinite and not flags.has_reset_rows
        self._ends = self._others = self._other_rewards = 0

    def look_at(self, steps: int) -> None:
        """Look at the stored steps of a rollout, once for each."""
        if not (self._may_be_infinite or self._may_reset_later):
            return
        leaves = (self._storage.tensors[i][:steps] for i in self._storage.schema.leaf_indices["reward"])
        rewards = [(leaf.float() if DTYPES[leaf.dtype] is None else leaf).numpy() for leaf in leaves]
        num_infinite = sum(reward.size - np.count_nonzero(np.isfinite(reward)) for reward in rewards)
        if self._may_be_infinite and num_infinite:
            self._may_be_infinite = False
            warn_user(infinite_rewards(num_infinite))
        if self._may_reset_later and steps > 1 and self._look_like_reset_rows(rewards, steps):
            self._may_reset_later = False
            remedy = (
                "If the environment resets in the step after an end, declare autoreset=NEXT_STEP: such a step is none."
            )
            got = f"a reward of 0 after all {self._ends} ends, and not elsewhere"
            warn_user(explain("autoreset", "steps after an end that are steps of new episodes", got, remedy))

    def _look_like_reset_rows(self, rewards: list[np.ndarray], steps: int) -> bool:
        """Count the rewards after an end; False for good once a step there has a reward or ends an episode."""
        ended = self._flags.ended(slice(0, steps)).numpy()
        nonzero = [(x != 0).reshape(*ended.shape, -1).any(2) if x.ndim > 2 else x != 0 for x in rewards]
        rewarded = np.logical_or.reduce(nonzero)
        after_end = ended[:-1]
        if (after_end & (rewarded | ended)[1:]).any():
            self._may_reset_later = False
            return False
        num_ends = np.count_nonzero(after_end)
        self._ends += num_ends
        self._others += after_end.size - num_ends
        self._other_rewards += np.count_nonzero(rewarded[1:] & ~after_end)
        return self._ends >= _FEWEST_ENDS and 2 * self._other_rewards > self._others


class StepFinals(NamedTuple):
    """The final observations of one step: the K environments that have one, and leaves [K, …]."""

    step: int
    envs: list[int]
    leaves: list[torch.Tensor]


class FinalObservations:
    """The true final observations of truncated steps whose next row does not hold them, in the order of t·N + n."""

    def __init__(self, storage: Storage, mode: AutoresetMode | None) -> None:
        self._storage, self._schema, self._mode = storage, storage.schema, mode
        self._fields = [storage.schema.fields[i] for i in storage.schema.leaf_indices["obs"]]
        self.steps: list[StepFinals] = []

    def of_add(self, row: int, final_obs: Any, terminated: Any, truncated: Any) -> StepFinals | None:
        """Return the final observations among `final_obs` of all environments; all of its rows are checked."""
        if self._mode is AutoresetMode.NEXT_STEP:
            remedy = "Leave it out: the row after an end holds the final observation."
            raise SchemaError(explain("final_obs", "None under autoreset=NEXT_STEP", type(final_obs).__name__, remedy))
        return self._select(row, self._truncated_envs(row, terminated, truncated), final_obs)

    def of_step(self, row: int, step: tuple[Any, Any, Any, Any, Mapping[str, Any]]) -> StepFinals | None:
        """Return the final observations where the autoreset mode leaves them in the result of `env.step`."""
        if self._mode is AutoresetMode.NEXT_STEP:
            return None
        next_obs, _, terminated, truncated, info = step
        envs = self._truncated_envs(row, terminated, truncated)
        if not envs:
            return None
        return self._select(row, envs, next_obs, info if self._mode is AutoresetMode.SAME_STEP else None)

    def _truncated_envs(self, row: int, terminated: Any, truncated: Any) -> list[int]:
        """Environments whose episode is truncated, and not terminated, by the step that is being added."""
        storage, flags = self._storage, {"terminated": terminated, "truncated": truncated}
        staged = {name: storage.flag(name)[row].view(storage.lead) for name in flags if name in storage.staged}
        ended, cut = host_flags(flags | staged, storage.lead, storage.device)
        return (cut & ~ended).nonzero()[0].tolist()

    def _select(self, row: int, envs: list[int], obs: Any, info: Mapping[str, Any] | None = None) -> StepFinals | None:
        """Copy the rows `envs` of an observation of all environments, or their final observations in `info`."""
        lead, device = self._storage.lead, self._storage.device
        if info is None:
            leaves = convert_leaves(self._schema, "obs", obs, lead, device, envs if lead else None, prefix="final_")
        else:
            envs, leaves = final_observations(info, envs, self._schema, lead, device)
        if not envs:
            return None
        return StepFinals(row, envs, leaves if lead else [leaf.unsqueeze(0).clone() for leaf in leaves])

    @property
    def places(self) -> list[tuple[int, int]]:
        """(step, environment) of each."""
        return [(finals.step, env) for finals in self.steps for env in finals.envs]

    @property
    def obs(self) -> Any:
        """All of them: a tensor [K, …], or a TensorDict [K] of a nested observation."""
        leaves = [
            torch.cat([
                torch.empty((0, *field.shape), dtype=field.dtype, device=self._storage.device),
                *(finals.leaves[i] for finals in self.steps),
            ])
            for i, field in enumerate(self._fields)
        ]  # fmt: skip
        return value_of(self._schema, "obs", leaves, leaves[0].shape[:1])

    def state(self) -> State:
        """All of them, with their places."""
        leaves = [torch.cat(parts) for parts in zip(*(finals.leaves for finals in self.steps), strict=True)]
        places = torch.tensor(self.places, dtype=torch.int64, device="cpu").view(-1, 2)
        return State({}, {"places": places, **{f"leaf{i}": leaf for i, leaf in enumerate(leaves)}})

    def load_state(self, saved: SnapshotReader) -> None:
        """Restore a saved state; the storage was restored before."""
        self.steps = []
        steps, num_envs = self._storage.num_stored, self._storage.num_envs
        places = saved.shaped("places", (range(steps * num_envs + 1), 2), torch.int64).tolist()
        if not places:
            return
        leaves = [
            saved.shaped(f"leaf{i}", (len(places), *field.shape), field.dtype).to(self._storage.device)
            for i, field in enumerate(self._fields)
        ]
        for i, (step, env) in enumerate(places):
            if not (0 <= step < steps and 0 <= env < num_envs):
                raise Node("state: finals.places", [step, env]).error("a stored step and its environment")
            self.steps.append(StepFinals(step, [env], [leaf[i : i + 1] for leaf in leaves]))

    def check(self) -> None:
        """Verify that each belongs to a truncated step, and that they are in order."""
        storage, leaf_indices = self._storage, self._schema.leaf_indices
        paths = [path_name(self._schema.paths[i]) for i in leaf_indices["obs"]]
        for finals in self.steps:
            for path, field, leaf in zip(paths, self._fields, finals.leaves, strict=True):
                shape = (len(finals.envs), *field.shape)
                require_form(f"final_{path} of step {finals.step}", leaf, shape, field.dtype, storage.device)
        places = self.places
        require(places == sorted(set(places)), "final_obs", "one for each (step, environment), in order", places)
        if not storage.has_values:
            return
        terminated, truncated = (storage.flag(name)[: storage.num_stored] for name in ("terminated", "truncated"))
        cut = set(map(tuple, (truncated & ~terminated).nonzero().tolist()))
        wrong = [place for place in places if place not in cut]
        require(not wrong, "final_obs", "(step, environment) of truncated steps", wrong)


class LastStep:
    """The value and observation after the last stored step; the row after it holds them until another step is added."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.keep({})

    def keep(self, leaves: dict[str, list[torch.Tensor]]) -> None:
        """Let these leaves of "value", and of "obs" if it is known, follow the steps that are stored now."""
        self._leaves, self._age = leaves, self._storage.age

    @property
    def leaves(self) -> dict[str, list[torch.Tensor]]:
        """The leaves by field; empty if they were not passed since the last step."""
        return self._leaves if self._age == self._storage.age else {}

    def write(self) -> None:
        """Write them into the row after the stored steps; its other fields become zero."""
        storage = self._storage
        storage.zero(storage.num_stored)
        for name, leaves in self.leaves.items():
            storage.write(storage.num_stored, tuple(leaves), storage.schema.leaf_indices[name])

    def write_again(self) -> None:
        """Write them if they are known: a step that was refused has overwritten the row, unless it is staged there."""
        if self.leaves and not self._storage.staged:
            self.write()

    def state(self) -> State:
        """The leaves of both fields."""
        fields = self.leaves
        arrays = {f"{name}{i}": leaf for name, leaves in fields.items() for i, leaf in enumerate(leaves)}
        return State({name: name in fields for name in ("value", "obs")}, arrays)

    def load_state(self, saved: SnapshotReader) -> None:
        """Restore a saved state; the storage was restored before."""
        storage, schema = self._storage, self._storage.schema
        self.keep({})
        for name in ("value", "obs"):
            if not saved.values.entry(name).flag():
                return
            fields = [schema.fields[i] for i in schema.leaf_indices[name]]
            self._leaves[name] = [
                saved.shaped(f"{name}{i}", (*storage.lead, *field.shape), field.dtype).to(storage.device)
                for i, field in enumerate(fields)
            ]

    def check(self) -> None:
        """Verify that the row holds them, unless the coming step is staged there."""
        storage, schema = self._storage, self._storage.schema
        if storage.staged or not storage.has_values:
            return
        for name, leaves in self.leaves.items():
            for i, leaf in zip(schema.leaf_indices[name], leaves, strict=True):
                stored = storage.tensors[i][storage.num_stored]
                require(same_bits(leaf, stored), f"last_{path_name(schema.paths[i])}", leaf.tolist(), stored.tolist())


def attachable_leaves(trees: Iterable[tuple[Any, Any]], storage: Storage) -> dict[Path, torch.Tensor]:
    """The leaves [T, N, …] of (name, tree) that may be attached to the stored steps.

    A name is new, or names an optional field that the steps do not have.
    """
    attachable: dict[Path, torch.Tensor] = {}
    schema, lead, device = storage.schema, (storage.require_steps("attach"), *storage.lead), storage.device
    used = {*schema.names, *MADE_BY_ROLLOUT} - storage.missing
    for name, tree in trees:
        if not isinstance(name, str) or name in used:
            raise SchemaError(explain("attach", "an unused name", repr(name), "Attach it under another name."))
        used.add(name)
        if name in schema.leaf_indices:
            declared = zip(schema.leaf_indices[name], schema.flatten(name, tree), strict=True)
            leaves = [(schema.paths[i], schema.fields[i], leaf) for i, leaf in declared]
        else:
            tensors = ((path, as_tensor(path_name(path), x, device).to(device)) for path, x in named_leaves(name, tree))
            leaves = [(path, Field(tuple(x.shape[len(lead) :]), x.dtype), x) for path, x in tensors]
        for path, field, leaf in leaves:
            tensor = convert(path_name(path), field, leaf, lead, device)
            attachable[path] = tensor if storage.lead else tensor.unsqueeze(1)
    return attachable
