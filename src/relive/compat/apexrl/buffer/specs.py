"""Conversion of the arguments of ApexRL's buffers for the core."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from relive.compat.views import is_tree, map_tree
from relive.errors import SchemaError, explain
from relive.schema.checks import check_keys
from relive.schema.conversion import as_tensor
from relive.schema.fields import Field

_MAX_LIST_LENGTH = 64
_TENSOR: Any = torch.Tensor
_LEAVES = (torch.Tensor, tuple)
_ENDS = frozenset((0.0, 1.0))


def plain_spec(spec: Any) -> Any:
    """Convert a specification to tuples and dicts, for files: a leaf with a dtype becomes (shape, dtype)."""

    def leaf(shape: Any) -> Any:
        return None if shape is None else (tuple(shape.shape), shape.dtype) if hasattr(shape, "dtype") else tuple(shape)

    return map_tree(leaf, spec)


def leaves_of(where: str, tree: Any, value: Any) -> list[Any]:
    """List the leaves of a value in the order of a tree of the same structure; the leaves of None are None."""
    if type(value) is _TENSOR and type(tree) in _LEAVES:  # fast path for a plain tensor
        return [value]
    if not is_tree(tree):
        if is_tree(value):
            raise TypeError(explain(where, "a tensor", "a dict", "Pass the structure that obs_shape has."))
        return [value]
    if value is not None and not hasattr(value, "keys"):
        expected = f"a dict with {sorted(tree.keys())}"
        raise TypeError(explain(where, expected, type(value).__name__, "Pass the structure that obs_shape has."))
    if value is not None:
        check_keys(where, value, tree.keys())
    parts = [leaves_of(f"{where}.{key}", part, None if value is None else value[key]) for key, part in tree.items()]
    return [leaf for part in parts for leaf in part]


def plain(rows: Any) -> Any:
    """Convert TensorDicts to plain dicts of tensors."""
    return rows.to_dict() if isinstance(rows, TensorDict) else rows


def batch_size_of(spec: Any, observations: Any) -> int | None:
    """Length of the batch axis, in front of the specified axes; None without a batch axis."""
    while isinstance(spec, Mapping):
        expected, remedy = f"a dict with {sorted(spec)}", "Pass the structure that obs_shape has."
        if not hasattr(observations, "keys"):
            raise TypeError(explain("observations", expected, type(observations).__name__, remedy))
        if not observations.keys():
            raise ValueError(explain("observations", expected, "an empty dict", remedy))
        key = next(iter(spec))
        if key not in observations.keys():
            return None
        spec, observations = spec[key], observations[key]
    shape = observations.shape if isinstance(observations, torch.Tensor) else np.shape(observations)
    return shape[0] if len(shape) > len(getattr(spec, "shape", spec)) else None


def to_place(value: Any, device: torch.device) -> Any:
    """Move the tensors of a value to `device` and detach them."""
    if isinstance(value, torch.Tensor):
        return value if value.device == device and not value.requires_grad else value.detach().to(device)
    return map_tree(lambda leaf: to_place(leaf, device), value) if is_tree(value) else value


def convert_dones(where: str, dones: Any, device: torch.device) -> torch.Tensor:
    """Convert ApexRL's dones to a tensor; raise unless they are 0 or 1. Not checked on other devices than the host."""
    tensor = to_place(dones, device)
    if not isinstance(tensor, torch.Tensor):
        tensor = as_tensor(where, tensor, device).to(device)
    if tensor.dtype == torch.bool or not tensor.is_cpu:
        return tensor
    if tensor.ndim == 1 and len(tensor) <= _MAX_LIST_LENGTH:  # a set of Python numbers is faster for few items
        is_right = _ENDS.issuperset(tensor.tolist())
    else:
        numbers = tensor.numpy()
        is_right = (numbers * numbers == numbers).all()  # only 0 and 1 equal their squares
    if not is_right:
        number = tensor[tensor * tensor != tensor].flatten()[0].item()
        raise SchemaError(explain(where, "zeros and ones", number, "Pass whether each episode ended."))
    return tensor


def action_field(actions: Any, lead: int, shape: tuple[int, ...] | None, dtype: torch.dtype | None) -> Field:
    """Declare the field of actions: `shape` and `dtype`, or those of these actions, which have `lead` axes in front.

    As in the rest of the library, float64 becomes float32 unless `dtype` is float64.
    """
    tensor = actions if isinstance(actions, torch.Tensor) else as_tensor("actions", actions, torch.device("cpu"))
    own_dtype = torch.float32 if tensor.dtype == torch.float64 else tensor.dtype
    return Field(tuple(tensor.shape[lead:]) if shape is None else shape, dtype or own_dtype)
