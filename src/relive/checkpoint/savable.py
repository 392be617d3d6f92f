"""What a checkpoint asks of a buffer, and the buffers that answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from relive.checkpoint.manifest import Manifest
from relive.distillation import DistillationBuffer
from relive.errors import CheckpointError, IncompatibleCheckpoint, explain
from relive.replay.buffer import ReplayBuffer
from relive.rollout.buffer import RolloutBuffer
from relive.storage.codec import Node
from relive.storage.rows import Rows
from relive.storage.snapshot import Part, Saved


class Savable(Part, Protocol):
    """A `Part` that can be made from its config, and whose rows are written once."""

    @classmethod
    def from_config(cls, config: Node, saved: Saved, **changes: Any) -> Any:
        """An empty buffer of this config, but for `changes` that are not None: device, capacity, sampler."""
        ...

    def rows(self) -> Rows | None:
        """The rows that will never change; None if all of them are in the state."""
        ...


KINDS: dict[str, type[Savable]] = {kind.__name__: kind for kind in (ReplayBuffer, RolloutBuffer, DistillationBuffer)}
"""The buffers that can be saved, by the word for each in files."""


def name_of(buffer: Any) -> str:
    """The word for a buffer in files."""
    name = type(buffer).__name__
    if KINDS.get(name) is not type(buffer):
        remedy = "Save one of these; of an adapter, save its core."
        raise CheckpointError(explain("save", f"one of {', '.join(KINDS)}", name, remedy))
    return name


_FIELDS = ("obs", "action", "reward", "value", "extra")


def fields_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The declarations in a config by name; a distillation buffer may have only its observation declared yet."""
    fields = config.get("fields", {name: config[name] for name in _FIELDS if name in config})
    return fields if isinstance(fields, dict) else {}


def require_fields(where: str, kind: str, config: Mapping[str, Any], other: Manifest) -> None:
    """Raise an IncompatibleCheckpoint if a checkpoint is of another kind of buffer, or one with other fields."""
    remedy = "Save into another folder; nothing was changed in this one."
    if other.kind != kind:
        raise IncompatibleCheckpoint(explain(where, f"a {other.kind}, as in its checkpoints", f"a {kind}", remedy))
    own, found = fields_of(config), fields_of(other.config)
    names = own.keys() | found.keys() if "action" in own and "action" in found else own.keys() & found.keys()
    for name in sorted(names):
        if own.get(name) != found.get(name):
            expected = f"{name} {found.get(name)}, as in its checkpoints"
            raise IncompatibleCheckpoint(explain(where, expected, own.get(name), remedy))


def require_class(where: str, kind: type | None, found: str) -> None:
    """Raise an IncompatibleCheckpoint if the buffer called `found` is not of the expected class."""
    if kind is not None and KINDS.get(found) is not kind:
        remedy = "Load it without kind, or look for the right folder."
        raise IncompatibleCheckpoint(explain(where, f"a {kind.__name__}", f"a {found}", remedy))
