"""Helpers of the AgileRL adapter: lookup of its classes, to inherit from, and TensorDicts of rows."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from tensordict import TensorDict

from relive.compat.views import map_tree
from relive.schema.assembly import make_tensordict


def find_original_class(module: str, name: str, default: Any = object) -> Any:
    """Return the class `name` of AgileRL's `module`; return `default` without AgileRL.

    The distribution must be installed: a folder named agilerl is not enough.
    """
    try:
        version("agilerl")
    except PackageNotFoundError:
        return default
    return getattr(importlib.import_module(f"agilerl.{module}"), name)


def to_columns(data: Mapping[str, Any] | TensorDict, device: torch.device) -> dict[str, Any]:
    """Move the leaves of rows to `device`; leaves `[B]` become `[B, 1]`."""

    def column(leaf: torch.Tensor) -> torch.Tensor:
        leaf = leaf if leaf.device == device else leaf.to(device)
        return leaf.unsqueeze(1) if leaf.ndim == 1 else leaf

    return map_tree(column, data)


def to_batch(rows: TensorDict, **further: Any) -> TensorDict:
    """Merge rows and further leaves into one TensorDict with a `device`, as AgileRL's batches have."""
    leaves = {key: to_batch(item) if isinstance(item, TensorDict) else item for key, item in rows.items()}
    return make_tensordict({**leaves, **further}, rows.batch_size, next(iter(leaves.values())).device)
