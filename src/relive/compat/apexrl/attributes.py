"""ApexRL's names for what the core stores."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

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

_FLAGS = ("terminated", "done")
SCORES = ("advantage", "return")
"""What is computed after the rollout."""


def read(rows: TensorDict, field: str) -> Any:
    """One field as ApexRL has it: ends are floats, scores are zero before they are computed, undeclared ones None."""
    found = rows.get(field, None)
    if field in _FLAGS:
        return found.float()
    return torch.zeros_like(rows["reward"]) if found is None and field in SCORES else found


def training_data(rows: TensorDict) -> dict[str, Any]:
    """Rows of the core under the names that ApexRL trains on."""
    return {theirs: read(rows, ours) for theirs, ours in TRAINING.items()}


def plain(rows: Any) -> Any:
    """The same tensors in plain dicts."""
    return rows.to_dict() if isinstance(rows, TensorDict) else rows


class Column:
    """An attribute `[num_steps, num_envs, …]` that shares the core's memory, but for ends; scores can be assigned."""

    def __init__(self, field: str) -> None:
        self._field = field

    def __get__(self, buffer: Any, owner: type) -> Any:
        return self if buffer is None else read(buffer.core.columns, self._field)

    def __set__(self, buffer: Any, value: torch.Tensor) -> None:
        if self._field not in SCORES:
            expected = f"an assignment to {' or '.join(SCORES)}"
            raise AttributeError(
                explain(self._field, expected, f"one to {self._field}", "Write into the tensor, or add steps.")
            )
        buffer.core.attach({self._field: value[: buffer.core.num_stored]})
