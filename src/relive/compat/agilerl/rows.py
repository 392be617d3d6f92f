"""Rows of any names and nesting: their leaves, and what fields they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict

from relive.schema.assembly import level
from relive.schema.fields import Field


def columns(data: Mapping[str, Any] | TensorDict, device: torch.device) -> dict[str, Any]:
    """The leaves of rows on `device`, a number per row as a vector of length one."""
    return {
        key: columns(item, device) if isinstance(item, TensorDict) else _column(item, device)
        for key, item in data.items()
    }


def _column(leaf: Any, device: torch.device) -> torch.Tensor:
    leaf = leaf if leaf.device == device else leaf.to(device)
    return leaf.unsqueeze(1) if leaf.ndim == 1 else leaf


def fields_of(rows: dict[str, Any]) -> dict[str, Any]:
    """The fields that rows with these leaves have."""
    return {
        key: fields_of(item) if isinstance(item, dict) else Field(tuple(item.shape[1:]), item.dtype)
        for key, item in rows.items()
    }


def placed(rows: TensorDict, **further: Any) -> TensorDict:
    """Rows and further leaves as one TensorDict that names their device, as AgileRL's own do."""
    leaves = {key: placed(item) if isinstance(item, TensorDict) else item for key, item in rows.items()}
    return level({**leaves, **further}, rows.batch_size, next(iter(leaves.values())).device)


def shapes(data: TensorDict) -> dict[str, Any]:
    """Shape and dtype of every leaf."""
    return {
        key: shapes(item) if isinstance(item, TensorDict) else (tuple(item.shape), item.dtype)
        for key, item in data.items()
    }
