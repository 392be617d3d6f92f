"""Conversion of arguments of ApexRL's buffers to the core's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from relive.compat.views import is_tree, map_tree
from relive.errors import SchemaError, explain
from relive.schema.checks import same_keys
from relive.schema.conversion import as_tensor
from relive.schema.fields import Field

_FEW = 64
_TENSOR: Any = torch.Tensor
_LEAVES = (torch.Tensor, tuple)
_ENDS = frozenset((0.0, 1.0))


def plain_spec(spec: Any) -> Any:
    """A specification in tuples and dicts only, which files can hold: a leaf with a dtype is (shape, dtype)."""

    def leaf(shape: Any) -> Any:
        return None if shape is None else (tuple(shape.shape), shape.dtype) if hasattr(shape, "dtype") else tuple(shape)

    return map_tree(leaf, spec)


def leaves_of(where: str, tree: Any, value: Any) -> list[Any]:
    """The values of a dict for every leaf of a tree, in the tree's order; Nones of None."""
    if type(value) is _TENSOR and type(tree) in _LEAVES:  # most steps
        return [value]
    if not is_tree(tree):
        if is_tree(value):
            raise TypeError(explain(where, "a tensor", "a dict", "Pass the structure that obs_shape has."))
        return [value]
    if value is not None and not hasattr(value, "keys"):
        expected = f"a dict with {sorted(tree.keys())}"
        raise TypeError(explain(where, expected, type(value).__name__, "Pass the structure that obs_shape has."))
    if value is not None:
        same_keys(where, value, tree.keys())
    parts = [leaves_of(f"{where}.{key}", part, None if value is None else value[key]) for key, part in tree.items()]
    return [leaf for part in parts for leaf in part]


def plain(rows: Any) -> Any:
    """Tensors in plain dicts instead of TensorDicts."""
    return rows.to_dict() if isinstance(rows, TensorDict) else rows


def batch_size_of(spec: Any, observations: Any) -> int | None:
    """How many observations were given: the length of the axis in front of the specified ones, None without one."""
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
    """A caller's value with its tensors on `device` and without their history."""
    if isinstance(value, torch.Tensor):
        return value if value.device == device and not value.requires_grad else value.detach().to(device)
    return map_tree(lambda leaf: to_place(leaf, device), value) if is_tree(value) else value


def zeros_and_ones(where: str, dones: Any, device: torch.device) -> torch.Tensor:
    """ApexRL's dones, which are numbers, as a tensor. On other devices than the host they are not looked at."""
    given = to_place(dones, device)
    if not isinstance(given, torch.Tensor):
        given = as_tensor(where, given, device).to(device)
    if given.dtype == torch.bool or not given.is_cpu:
        return given
    if given.ndim == 1 and len(given) <= _FEW:  # a list of few numbers is quicker than three calls for many
        is_right = _ENDS.issuperset(given.tolist())
    else:
        found = given.numpy()
        is_right = (found * found == found).all()  # of numbers, zero and one are equal to their squares
    if not is_right:
        wrong = given[given * given != given].flatten()[0].item()
        raise SchemaError(explain(where, "zeros and ones", wrong, "Pass whether each episode ended."))
    return given


def action_field(actions: Any, lead: int, shape: tuple[int, ...] | None, dtype: torch.dtype | None) -> Field:
    """The field of actions: `shape` and `dtype`, or those of the first actions, which have `lead` axes in front.

    Like everywhere in this library float64 becomes float32 unless somebody asks for it.
    """
    given = actions if isinstance(actions, torch.Tensor) else as_tensor("actions", actions, torch.device("cpu"))
    found = torch.float32 if given.dtype == torch.float64 else given.dtype
    return Field(tuple(given.shape[lead:]) if shape is None else shape, dtype or found)
