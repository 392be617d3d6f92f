"""ApexRL's names for what the core stores, as attributes that can be read and written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict

from relive.compat.step_rows import StepRows, is_tree
from relive.errors import SchemaError, explain

TRAINING = {
    "observations": "obs",
    "privileged_observations": "privileged_observations",
    "actions": "action",
    "old_log_probs": "log_prob",
    "advantages": "advantage",
    "returns": "return",
    "values": "value",
}
"""What ApexRL trains on, in its order, and the core's name of it."""

SCORES = ("advantage", "return")
"""What is computed after the rollout."""


def plain(rows: Any) -> Any:
    """The same tensors in plain dicts."""
    return rows.to_dict() if isinstance(rows, TensorDict) else rows


class Column:
    """An attribute `[num_steps, num_envs, …]` that is the memory itself. Assigning to it writes into the memory."""

    def __init__(self, field: str) -> None:
        self._field = field

    def __get__(self, buffer: Any, owner: type) -> Any:
        if buffer is None:
            return self
        rows: StepRows = buffer._rows
        return rows.scored(self._field) if self._field in SCORES else rows.tensors.get(self._field)

    def __set__(self, buffer: Any, value: Any) -> None:
        assign(self._field, self.__get__(buffer, type(buffer)), value)


def assign(where: str, place: Any, value: Any) -> None:
    """Write a value into memory of its form; of a tensor that is this memory nothing is left to do."""
    if value is place:
        return
    if place is None:
        raise SchemaError(explain(where, "a field of this buffer", "one that it has not", "Declare it."))
    if is_tree(place):
        for key in value.keys():
            if key not in place.keys():
                raise SchemaError(explain(where, f"the keys {sorted(place.keys())}", key, "Declare it."))
            assign(f"{where}.{key}", place[key], value[key])
        return
    given = torch.as_tensor(value, device=place.device)
    if given.shape != place.shape:
        remedy = "Assign a tensor of that shape, or write into a part of it."
        raise SchemaError(explain(where, f"shape {tuple(place.shape)}", tuple(given.shape), remedy))
    if given.dtype.is_floating_point and not place.dtype.is_floating_point:
        raise SchemaError(explain(where, place.dtype, given.dtype, "Convert it."))
    place.copy_(given.detach())


class AgentTensors(dict[str, Any]):
    """A dict of one tensor `[num_steps, num_envs, …]` for each agent; assigning an agent's writes into the memory."""

    def __init__(self, where: str, tensors: Mapping[str, Any]) -> None:
        super().__init__(tensors)
        self._where = where

    def __setitem__(self, agent: str, value: Any) -> None:
        if agent not in self:
            raise KeyError(explain(self._where, f"one of {sorted(self)}", agent, "Declare every agent."))
        assign(f"{self._where}.{agent}", self[agent], value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Write the tensors of several agents."""
        for agent, value in dict(*args, **kwargs).items():
            self[agent] = value

    def __ior__(self, other: Any) -> AgentTensors:  # type: ignore[override,misc]
        self.update(other)
        return self

    def _refuse(self, *_args: Any, **_kwargs: Any) -> Any:
        raise TypeError(explain(self._where, "the tensors of every agent", "fewer", "Make a dict of your own."))

    pop = popitem = clear = setdefault = __delitem__ = _refuse

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class AgentColumn(Column):
    """An attribute that is a dict of one tensor for each agent, the memory itself."""

    def __get__(self, buffer: Any, owner: type) -> Any:
        found = super().__get__(buffer, owner)
        return found if buffer is None else AgentTensors(self._field, dict(found.items()))
