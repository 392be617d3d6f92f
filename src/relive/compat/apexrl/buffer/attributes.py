"""ApexRL's names for what the core stores, as attributes that can be read and written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensordict import TensorDict

from relive.compat.views import WrittenDict, assign
from relive.errors import explain

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


def plain(rows: Any) -> Any:
    """The same tensors in plain dicts."""
    return rows.to_dict() if isinstance(rows, TensorDict) else rows


class AgentTensors(WrittenDict):
    """A dict of one tensor `[num_steps, num_envs, …]` for each agent; assigning an agent's writes into the memory."""

    def __init__(self, where: str, tensors: Mapping[str, Any]) -> None:
        super().__init__(tensors)
        self._where = where

    def __setitem__(self, agent: str, value: Any) -> None:
        if agent not in self:
            raise KeyError(explain(self._where, f"one of {sorted(self)}", agent, "Declare every agent."))
        assign(f"{self._where}.{agent}", self[agent], value)

    def _refuse(self, *_args: Any, **_kwargs: Any) -> Any:
        raise TypeError(explain(self._where, "the tensors of every agent", "fewer", "Make a dict of your own."))

    pop = popitem = clear = setdefault = __delitem__ = _refuse  # pyright: ignore[reportAssignmentType]
