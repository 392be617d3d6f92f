"""What is learnt from a rollout: advantages and returns, and whatever else is attached to its steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from relive.checkpoint.snapshot import SnapshotReader, State
from relive.errors import NotReadyError, SchemaError, explain, warn_user
from relive.estimators import gae
from relive.kernels import complete
from relive.rollout.episode_flags import EpisodeFlags, StoredDoubts
from relive.rollout.storage import Storage
from relive.schema.autoreset import observation_leaves
from relive.schema.buffer_schemas import MADE_BY_ROLLOUT, agents_of
from relive.schema.conversion import as_tensor, convert, path_name
from relive.schema.fields import Field, Path, named_leaves
from relive.schema.invariants import require, same_bits

Bootstrap: TypeAlias = bool | Literal["own_value"]
"""What follows a truncated step: the value of its final observation, nothing, or where unknown its own value."""


class Advantages:
    """Generalised advantage estimation over the steps of a rollout, agent by agent."""

    def __init__(self, storage: Storage, flags: EpisodeFlags) -> None:
        self._storage, self._schema, self._flags = storage, storage.schema, flags
        self._agents = agents_of(storage.schema)
        self.last = LastStep(storage)
        self._doubts = StoredDoubts(storage, flags)

    def compute(
        self, last_value: Any, last_obs: Any, final_value: Any, *, bootstrap: Bootstrap, gamma: float, lam: float
    ) -> None:
        """Attach advantages and returns to the stored steps, and keep the last value and observation after them."""
        storage, lead = self._storage, self._storage.lead
        steps = storage.complete("compute_advantage")
        self._require_values(steps)
        last = {"value": [value.clone() for value in self._values("last_value", last_value, lead)]}
        if last_obs is not None:
            leaves = observation_leaves(self._schema, last_obs, lead, storage.device, prefix="last_")
            last["obs"] = [leaf.clone() for leaf in leaves]
        targets = self._estimated(steps, last["value"], final_value, bootstrap, gamma, lam)
        for message in self._doubts.of(steps):
            warn_user(message)

        def change() -> None:
            self.last.keep(last)
            self.last.write()
            storage.attach(targets)

        complete(change)

    def _require_values(self, steps: int) -> None:
        """Refuse to estimate where the steps have no value, or where a reward has none."""
        if "value" in self._storage.absent:
            remedy = "Pass value= to every add, or attach(value=…) before."
            raise NotReadyError(explain("compute_advantage", f"a value at {steps} steps", "none", remedy))
        if not self._agents:
            reward, value = (self._schema.trees[name] for name in ("reward", "value"))
            remedy = "Pass value= to the buffer with the keys and shapes of reward=."
            raise SchemaError(explain("value", f"one value for each reward ({reward})", value, remedy))

    def _estimated(
        self, steps: int, last: list[torch.Tensor], final_value: Any, bootstrap: Bootstrap, gamma: float, lam: float
    ) -> dict[Path, torch.Tensor]:
        """Advantages and returns [T, N, …] of the first steps, after which come the values `last`."""
        ends, truncated = self._flags.flag("terminated")[:steps], self._flags.flag("truncated")[:steps]
        cut = truncated & ~ends
        bootstrap = _checked(bootstrap)
        places, finals = self._final_values(final_value, bootstrap, cut)
        unknown = cut if bootstrap == "own_value" and not self._flags.has_reset_rows else None
        flags = (ends if bootstrap else ends | truncated, truncated)
        mask = self._flags.mask(steps)
        targets: dict[Path, torch.Tensor] = {}
        for i, (agent, reward, value) in enumerate(self._agents):
            values = self._storage.tensors[value][:steps]
            next_values = torch.cat([values[1:], last[i].view(1, *values.shape[1:])])
            if unknown is not None:
                wide = unknown.view(*unknown.shape, *(1,) * (values.ndim - 2))
                next_values = torch.where(wide, values, next_values)
            if places is not None:
                next_values[places] = finals[i]
            rewards = self._storage.tensors[reward][:steps]
            advantage, return_ = gae(rewards, values, next_values, *flags, gamma=gamma, lam=lam, mask=mask)
            targets |= {("advantage", *agent): advantage, ("return", *agent): return_}
        return targets

    def _final_values(
        self, final_value: Any, bootstrap: Bootstrap, cut: torch.Tensor
    ) -> tuple[tuple[torch.Tensor, ...] | None, list[torch.Tensor]]:
        """Where the next value is not the next row's, (steps, envs) or None, and the leaves of what it is."""
        known = self._flags.final_observations.places
        if not bootstrap:
            if final_value is not None:
                remedy = "Leave out final_value= or bootstrap_truncated=False."
                raise SchemaError(
                    explain("final_value", "None with bootstrap_truncated=False", type(final_value).__name__, remedy)
                )
            return None, []
        if not self._flags.has_reset_rows and bootstrap != "own_value":
            _require_finals(cut, known)
        if final_value is None and known and bootstrap != "own_value":
            remedy = "Pass final_value=critic(rollout.final_obs), or bootstrap_truncated=False to count them as ends."
            raise NotReadyError(explain("final_value", f"values of {len(known)} truncated steps", None, remedy))
        if final_value is None:
            return None, []
        values = self._values("final_value", final_value, (len(known),), "truncated steps")
        places = torch.tensor(known, dtype=torch.int64, device=self._storage.device).view(-1, 2).unbind(1)
        return places, values

    def _values(self, where: str, given: Any, lead: tuple[int, ...], unit: str = "environments") -> list[torch.Tensor]:
        """The leaves of values that no stored step has, checked as those of the steps are."""
        schema, device = self._schema, self._storage.device
        return [
            convert(path_name((where, *schema.paths[i][1:])), schema.fields[i], leaf, lead, device, unit=unit)
            for i, leaf in zip(schema.leaf_indices["value"], schema.flatten("value", given, where), strict=True)
        ]


def _checked(bootstrap: Any) -> Bootstrap:
    if isinstance(bootstrap, bool | np.bool_):
        return bool(bootstrap)
    if isinstance(bootstrap, str) and bootstrap == "own_value":
        return "own_value"
    expected = 'True, False or "own_value"'
    raise SchemaError(explain("bootstrap_truncated", expected, repr(bootstrap), "Pass one of them."))


def _require_finals(cut: torch.Tensor, known: list[tuple[int, int]]) -> None:
    if int(cut.sum()) <= len(known):
        return
    step, env = next((t, n) for t, n in cut.nonzero().tolist() if (t, n) not in set(known))
    remedy = (
        "Pass final_obs= to add, use add_step, or pass bootstrap_truncated=False to count it as an end; "
        'bootstrap_truncated="own_value" is for simulators that never reveal it.'
    )
    where = f"final_obs of step {step}, environment {env}"
    raise NotReadyError(explain(where, "the observation that the truncated step led to", None, remedy))


class LastStep:
    """The value and observation after the last stored step; the row after it holds them until another step is added."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._leaves: dict[str, list[torch.Tensor]] = {}
        self._age = storage.age

    def keep(self, leaves: dict[str, list[torch.Tensor]]) -> None:
        """Let these leaves of "value", and of "obs" if it is known, be after the steps that are stored now."""
        self._leaves, self._age = leaves, self._storage.age

    @property
    def leaves(self) -> dict[str, list[torch.Tensor]]:
        """The leaves by field; none if they were not given since the last step."""
        return self._leaves if self._age == self._storage.age else {}

    def write(self) -> None:
        """Write them into the row after the stored steps; whatever else it holds becomes zero."""
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
        known = self.leaves
        arrays = {f"{name}{i}": leaf for name, leaves in known.items() for i, leaf in enumerate(leaves)}
        return State({name: name in known for name in ("value", "obs")}, arrays)

    def load_state(self, saved: SnapshotReader) -> None:
        """Become what was saved, after the steps of the storage that was loaded before."""
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
                found = storage.tensors[i][storage.num_stored]
                require(same_bits(leaf, found), f"last_{path_name(schema.paths[i])}", leaf.tolist(), found.tolist())


def attachable(trees: Iterable[tuple[Any, Any]], storage: Storage) -> dict[Path, torch.Tensor]:
    """The leaves [T, N, …] of (name, tree) that may be attached to the stored steps.

    A name is new, or that of an optional field that the steps did not give.
    """
    found: dict[Path, torch.Tensor] = {}
    schema, lead, device = storage.schema, (storage.stored("attach"), *storage.lead), storage.device
    taken = {*schema.names, *MADE_BY_ROLLOUT} - storage.missing
    for name, tree in trees:
        if not isinstance(name, str) or name in taken:
            raise SchemaError(explain("attach", "an unused name", repr(name), "Attach it under another name."))
        taken.add(name)
        if name in schema.leaf_indices:
            declared = zip(schema.leaf_indices[name], schema.flatten(name, tree), strict=True)
            leaves = [(schema.paths[i], schema.fields[i], leaf) for i, leaf in declared]
        else:
            leaves = [(path, *_own_field(path, leaf, lead, device)) for path, leaf in named_leaves(name, tree)]
        for path, field, leaf in leaves:
            tensor = convert(path_name(path), field, leaf, lead, device)
            found[path] = tensor if storage.lead else tensor.unsqueeze(1)
    return found


def _own_field(path: Path, leaf: Any, lead: tuple[int, ...], device: torch.device) -> tuple[Field, torch.Tensor]:
    """The field that an attached leaf is, with whatever axes it has beside [T, N], and the leaf as a tensor."""
    tensor = as_tensor(path_name(path), leaf, device).to(device)
    return Field(tuple(tensor.shape[len(lead) :]), tensor.dtype), tensor
