"""Declarations read from files: JSON that anybody may have written becomes fields, paths and devices."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch

from relive.errors import IncompatibleCheckpoint, explain
from relive.schema.fields import DTYPES, MOST_NESTED, Field, Path, Tree

if TYPE_CHECKING:
    from relive.storage.codec import Node

_DEVICE = re.compile(r"[a-z]{1,32}(:[0-9]{1,3})?")
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


def tree_of(node: Node) -> Tree:
    """The declaration that `config_of` made JSON of; a CorruptCheckpoint says what cannot be one."""
    if isinstance(node.value, dict):
        if not node.value:
            raise node.error("at least one field")
        return {name: tree_of(child) for name, child in node.entries().items()}
    parts = node.items(8)
    if not parts:
        raise node.error("a field")
    kind = Field.kinds[parts[0].one_of(Field.kinds)]
    if len(parts) < 3:
        raise node.error("a kind, a shape and a dtype")
    shape, dtype = parts[1].shape(), _DTYPES[parts[2].one_of(_DTYPES)]
    if any(size < 1 for size in shape):
        raise parts[1].error("positive sizes")
    try:
        return kind.with_settings(Field(shape, dtype), parts[3:])
    except ValueError as error:  # more settings, or fewer
        raise node.error(f"the settings of a {kind.__name__} ({error})") from None


def device_of(node: Node) -> torch.device:
    """The device of a saved buffer, if this machine has it."""
    if node.text(_DEVICE).startswith("meta"):
        raise node.error("a device that holds data")
    return present(node.value)


def present(device: str | torch.device) -> torch.device:
    """A device that this machine has; of any other, an IncompatibleCheckpoint."""
    try:
        return torch.empty(0, device=device).device
    except (AssertionError, ImportError, RuntimeError) as error:
        got, remedy = str(error).partition("\n")[0], "Pass device=."
        raise IncompatibleCheckpoint(explain(f"device {device}", "a device of this machine", got, remedy)) from None


def path_of(node: Node) -> Path:
    """A path to a leaf."""
    names = node.items(MOST_NESTED)
    if not names:
        raise node.error("at least one name")
    return tuple(name.text() for name in names)
