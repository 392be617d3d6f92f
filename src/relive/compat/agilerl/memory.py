"""The TensorDicts that show a buffer's memory by AgileRL's names."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDict


class Memory(TensorDict):
    """Memory by name. It is locked: `memory["rewards"] = x` copies into it, and so `memory["rewards"] += 1` works.

    New names are refused. What is made of it, a slice or a copy, is not locked and behaves as a TensorDict does.
    """

    def __setitem__(self, key: Any, value: Any) -> None:
        named = isinstance(key, str) or (isinstance(key, tuple) and all(isinstance(part, str) for part in key))
        if not (named and self.is_locked):
            super().__setitem__(key, value)
        elif value is not self.get(key):
            self.set_(key, value)
