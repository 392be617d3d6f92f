"""Which module knows a buffer."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from relive.checkpoint import distillation, replay, rollout
from relive.errors import CheckpointError, explain

KINDS: dict[str, ModuleType] = {
    "ReplayBuffer": replay,
    "RolloutBuffer": rollout,
    "DistillationBuffer": distillation,
}


def of(buffer: Any) -> ModuleType:
    """The module that takes such a buffer apart."""
    kind = KINDS.get(type(buffer).__name__)
    if kind is None:
        raise CheckpointError(
            explain(
                "save",
                f"one of {', '.join(KINDS)}",
                type(buffer).__name__,
                "Save one of these; of an adapter, save its core.",
            )
        )
    return kind
