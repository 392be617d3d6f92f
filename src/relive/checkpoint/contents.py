"""What a buffer consists of, in the words of a checkpoint; and its parts that several kinds of buffers have."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from relive.memory.rows import Rows
from relive.memory.saved import Arrays


@dataclass
class Contents:
    """A buffer taken apart."""

    kind: str
    config: dict[str, Any]
    values: dict[str, Any] = field(default_factory=dict)
    arrays: Arrays = field(default_factory=dict)
    rows: Rows | None = None

    def take(self, name: str, part: tuple[dict[str, Any], Arrays]) -> None:
        """Add a part under a name."""
        values, arrays = part
        self.values[name] = values
        self.arrays.update({f"{name}.{key}": array for key, array in arrays.items()})
