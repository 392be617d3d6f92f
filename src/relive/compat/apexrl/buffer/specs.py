"""Conversion of the arguments of ApexRL's buffers for the core."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict

from relive.compat.views import is_tree, map_tree
from relive.errors import SchemaError, explain
from relive.schema.checks import check_keys
from relive.schema.conversion import as_tensor
from relive.schema.fields import Field

_MAX_LIST_LENGTH = 64
_TENSOR: Any = torch.Tensor
_LEAF_TYPES = (torch.Tensor, tuple)
_VALID_DONES = frozenset((0.0, 1.0))


def to_plain_spec(spec: Any) -> Any:
    """Convert a specification to tuples and dicts, which files can hold: a `TensorLeafSpec` becomes (shape, dtype)."""
    if isinstance(spec, Mapping):
        return {key: to_plain_spec(part) for key, part in spec.items()}
    if spec is None:
        return None
    return (tuple(spec.shape), spec.dtype) if hasattr(spec, "dtype") else tuple(spec)


def list_leaves(where: str, layout: Any, value: Any) -> list[Any]:
    """List the leaves of `value` in the order of `layout`, which has its structure; the leaves of None are None."""
    # A single tensor, which `add` gets in every step, takes this faster path.
    if type(value) is _TENSOR and type(layout) in _LEAF_TYPES:
        return [value]
    if not is_tree(layout):
        if is_tree(value):
            raise TypeError(explain(where, "a tensor", "a dict", "Pass the structure that obs_shape has."))
        return [value]
    if value is not None and not hasattr(value, "keys"):
        expected = f"a dict with {sorted(layout.keys())}"
        raise TypeError(explain(where, expected, type(value).__name__, "Pass the structure that obs_shape has."))
    if value is not None:
        check_keys(where, value, layout.keys())
    parts = [list_leaves(f"{where}.{key}", part, None if value is None else value[key]) for key, part in layout.items()]
    return [leaf for part in parts for leaf in part]


def to_dicts(rows: Any) -> Any:
    """Convert a TensorDict to a plain dict; a tensor stays a tensor."""
    return rows.to_dict() if isinstance(rows, TensorDict) else rows


def to_device(value: Any, device: torch.device) -> Any:
    """Move the tensors of `value` to `device` and detach them."""
    if isinstance(value, torch.Tensor):
        return value if value.device == device and not value.requires_grad else value.detach().to(device)
    return map_tree(lambda leaf: to_device(leaf, device), value) if is_tree(value) else value


def convert_dones(where: str, dones: Any, device: torch.device) -> torch.Tensor:
    """Convert `dones` to a tensor; raise unless all are 0 or 1.

    On devices other than the CPU the check would wait for the device, so it is omitted.
    """
    tensor = to_device(dones, device)
    if not isinstance(tensor, torch.Tensor):
        tensor = as_tensor(where, tensor, device).to(device)
    if tensor.dtype == torch.bool or not tensor.is_cpu:
        return tensor
    if tensor.ndim == 1 and len(tensor) <= _MAX_LIST_LENGTH:
        # A list of few numbers is compared as a set, which is faster than arithmetic of arrays.
        is_valid = _VALID_DONES.issuperset(tensor.tolist())
    else:
        numbers = tensor.numpy()
        # Only 0 and 1 equal their squares, so every other number is invalid.
        is_valid = (numbers * numbers == numbers).all()
    if not is_valid:
        number = tensor[tensor * tensor != tensor].flatten()[0].item()
        raise SchemaError(explain(where, "zeros and ones", number, "Pass whether each episode ended."))
    return tensor


def declare_action(actions: Any, batch_ndim: int, shape: tuple[int, ...] | None, dtype: torch.dtype | None) -> Field:
    """Declare the field of `actions`, which have `batch_ndim` leading axes; None is replaced by their shape or dtype.

    Actions of dtype float64 declare float32, unless `dtype` is float64.
    """
    tensor = actions if isinstance(actions, torch.Tensor) else as_tensor("actions", actions, torch.device("cpu"))
    inferred_dtype = torch.float32 if tensor.dtype == torch.float64 else tensor.dtype
    return Field(tuple(tensor.shape[batch_ndim:]) if shape is None else shape, dtype or inferred_dtype)
