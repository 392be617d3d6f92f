"""What is learnt from a rollout: advantages and returns, and whatever else is attached to its steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from relive.errors import NotReadyError, SchemaError, explain
from relive.estimators import gae
from relive.fields.buffer_schemas import MADE_BY_ROLLOUT, agents_of
from relive.fields.conversion import as_tensor, conform, dotted
from relive.fields.schema import Field, Path, named_leaves
from relive.rollout.finals import Finals
from relive.rollout.resets import Resets
from relive.rollout.storage import Storage

Bootstrap: TypeAlias = bool | Literal["own_value"]
"""What follows a truncated step: the value of its final observation, nothing, or where unknown its own value."""


class Advantages:
    """Generalised advantage estimation over the steps of a rollout, agent by agent."""

    def __init__(self, storage: Storage, resets: Resets, finals: Finals) -> None:
        self._storage, self._schema = storage, storage.schema
        self._resets, self._finals = resets, finals
        self._agents = agents_of(storage.schema)

    def require(self, steps: int, has_value: bool) -> None:
        """Refuse to estimate where the steps have no value, or where a reward has none."""
        if not has_value:
            remedy = "Pass value= to every add, or attach(value=…) before."
            raise NotReadyError(explain("compute_advantage", f"a value at {steps} steps", "none", remedy))
        if not self._agents:
            reward, value = (self._schema.trees[name] for name in ("reward", "value"))
            remedy = "Pass value= to the buffer with the keys and shapes of reward=."
            raise SchemaError(explain("value", f"one value for each reward ({reward})", value, remedy))

    def estimated(
        self, steps: int, last: list[torch.Tensor], final_value: Any, *, bootstrap: Bootstrap, gamma: float, lam: float
    ) -> dict[Path, torch.Tensor]:
        """Advantages and returns [T, N, …] of the first steps, after which come the values `last`."""
        ends, truncated = self._resets.flag("terminated")[:steps], self._resets.flag("truncated")[:steps]
        cut = truncated & ~ends
        bootstrap = _checked(bootstrap)
        places, finals = self._final_values(final_value, bootstrap, cut)
        unknown = cut if bootstrap == "own_value" and not self._resets.next_step else None
        flags = (ends if bootstrap else ends | truncated, truncated)
        mask = self._resets.mask(steps)
        targets: dict[Path, torch.Tensor] = {}
        for i, (agent, reward, value) in enumerate(self._agents):
            values = self._storage.columns[value][:steps]
            next_values = torch.cat([values[1:], last[i].view(1, *values.shape[1:])])
            if unknown is not None:
                wide = unknown.view(*unknown.shape, *(1,) * (values.ndim - 2))
                next_values = torch.where(wide, values, next_values)
            if places is not None:
                next_values[places] = finals[i]
            rewards = self._storage.columns[reward][:steps]
            advantage, return_ = gae(rewards, values, next_values, *flags, gamma=gamma, lam=lam, mask=mask)
            targets |= {("advantage", *agent): advantage, ("return", *agent): return_}
        return targets

    def _final_values(
        self, final_value: Any, bootstrap: Bootstrap, cut: torch.Tensor
    ) -> tuple[tuple[torch.Tensor, ...] | None, list[torch.Tensor]]:
        """Where the next value is not the next row's, (steps, envs) or None, and the leaves of what it is."""
        known = self._finals.places
        if not bootstrap:
            if final_value is not None:
                remedy = "Leave out final_value= or bootstrap_truncated=False."
                raise SchemaError(
                    explain("final_value", "None with bootstrap_truncated=False", type(final_value).__name__, remedy)
                )
            return None, []
        if not self._resets.next_step and bootstrap != "own_value":
            _require_finals(cut, known)
        if final_value is None and known and bootstrap != "own_value":
            remedy = "Pass final_value=critic(rollout.final_obs), or bootstrap_truncated=False to count them as ends."
            raise NotReadyError(explain("final_value", f"values of {len(known)} truncated steps", None, remedy))
        if final_value is None:
            return None, []
        values = self.values("final_value", final_value, (len(known),), "truncated steps")
        places = torch.tensor(known, dtype=torch.int64, device=self._storage.device).view(-1, 2).unbind(1)
        return places, values

    def values(self, where: str, given: Any, lead: tuple[int, ...], unit: str = "environments") -> list[torch.Tensor]:
        """The leaves of values that no stored step has, checked as those of the steps are."""
        schema, device = self._schema, self._storage.device
        return [
            conform(dotted((where, *schema.paths[i][1:])), schema.fields[i], leaf, lead, device, unit=unit)
            for i, leaf in zip(schema.columns["value"], schema.flatten("value", given, where), strict=True)
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


def attachable(
    trees: Iterable[tuple[Any, Any]], steps: int, storage: Storage, given: Iterable[str]
) -> dict[Path, torch.Tensor]:
    """The leaves [T, N, …] of (name, tree) that are attached to the first steps, if they may be.

    A declared field may be, if it is not among those that were `given`.
    """
    columns: dict[Path, torch.Tensor] = {}
    schema, lead, device = storage.schema, (steps, *storage.lead), storage.device
    taken = {*given, *MADE_BY_ROLLOUT}
    for name, tree in trees:
        if not isinstance(name, str) or name in taken:
            raise SchemaError(explain("attach", "an unused name", repr(name), "Attach it under another name."))
        taken.add(name)
        if name in schema.columns:
            declared = zip(schema.columns[name], schema.flatten(name, tree), strict=True)
            leaves = [(schema.paths[i], schema.fields[i], leaf) for i, leaf in declared]
        else:
            leaves = [(path, *_own_field(path, leaf, lead, device)) for path, leaf in named_leaves(name, tree)]
        for path, field, leaf in leaves:
            tensor = conform(dotted(path), field, leaf, lead, device)
            columns[path] = tensor if storage.lead else tensor.unsqueeze(1)
    return columns


def _own_field(path: Path, leaf: Any, lead: tuple[int, ...], device: torch.device) -> tuple[Field, torch.Tensor]:
    """What is attached, and the field it is then: whatever it has beside [T, N]."""
    tensor = as_tensor(dotted(path), leaf, device).to(device)
    return Field(tuple(tensor.shape[len(lead) :]), tensor.dtype), tensor
