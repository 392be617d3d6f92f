# pyright: reportMissingImports=false
"""Stable-Baselines3's observations: fields, shapes and conversions. A Dict space has one level of names."""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.preprocessing import get_obs_shape, is_image_space, is_image_space_channels_first

from relive.compat.views import map_tree
from relive.errors import SchemaError, explain
from relive.schema.fields import Field, Stacked

Shapes = tuple[int, ...] | dict[str, tuple[int, ...]]


def has_overrides(buffer: Any, *names: str) -> bool:
    """Return True if a buffer is of a user's subclass of relive's class that overrides one of the methods `names`."""
    buffer_class = type(buffer)
    our_class = next(base for base in buffer_class.__mro__ if base.__module__.startswith("relive."))
    return any(getattr(buffer_class, name) is not getattr(our_class, name) for name in names)


def declare_fields(space: spaces.Space[Any], n_stack: int | None = None) -> Any:
    """Declare the fields of an observation space in its own dtypes; `n_stack` declares stacks of frames."""
    return map_tree(lambda part: _declare_field(part, n_stack), space)


def _declare_field(space: spaces.Space[Any], n_stack: int | None) -> Field:
    shape: Any = get_obs_shape(space)
    dtype: Any = space.dtype
    if n_stack is None:
        return Field(shape, dtype)
    axis = _find_stacking_axis(space)
    if shape[axis] % n_stack:
        remedy = "Pass the n_stack of VecFrameStack."
        raise SchemaError(explain("n_stack", f"a divisor of axis {axis} of {shape}", n_stack, remedy))
    frame = (*shape[:axis], shape[axis] // n_stack, *shape[axis + 1 :])
    return Stacked(Field(frame, dtype), n_stack, axis, pad="zero")


def _find_stacking_axis(space: spaces.Space[Any]) -> int:
    """Return the axis along which `VecFrameStack` concatenates frames: the channels of images, else the last axis."""
    first = is_image_space(space, check_channels=False) and is_image_space_channels_first(cast(spaces.Box, space))
    return 0 if first else len(space.shape or ()) - 1


def count_bytes(space: spaces.Space[Any]) -> int:
    """Count the bytes of an observation."""
    fields = declare_fields(space)
    leaves = fields.values() if isinstance(fields, dict) else [fields]
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def get_step_shapes(space: spaces.Space[Any], n_envs: int) -> Shapes:
    """Return the shapes of one step's observations of all environments."""
    return map_tree(lambda part: (n_envs, *get_obs_shape(part)), space)


def stack_frames(obs: Any, fields: Any) -> Any:
    """Reshape a step's stacks of frames: add an axis for the frames."""
    return map_tree(lambda f, x: x.reshape(len(x), *f.shape[: f.axis], f.k, *f.shape[f.axis :]), fields, obs)


def unstack_frames(obs: Any, shape: Any, num_leading_axes: int) -> Any:
    """Undo `stack_frames` for arrays with `num_leading_axes` axes before the observation."""
    return map_tree(lambda part, x: x.reshape(*x.shape[:num_leading_axes], *part), shape, obs)


def reshape_step(shapes: Shapes, obs: Any) -> Any:
    """Reshape a step's observations to these shapes; drop other keys of a dict."""
    if isinstance(shapes, dict):
        return {key: reshape_step(shape, obs[key]) for key, shape in shapes.items()}
    array = np.asarray(obs)
    if array.shape == shapes:
        return array
    # Discrete observations have shape (n,), and a single environment may omit its axis, so axes of length 1 may differ.
    equal_without_ones = [n for n in array.shape if n != 1] == [n for n in shapes if n != 1]
    return array.reshape(shapes) if equal_without_ones else array


def copy_if_shared(next_obs: Any, obs: Any) -> Any:
    """Copy next observations that share memory with `obs`; return others unchanged."""
    return map_tree(lambda new, x: new.copy() if np.may_share_memory(x, new) else new, next_obs, obs)


def to_numpy(batch: Any) -> Any:
    """Convert a tensor, or a TensorDict, to numpy."""
    return map_tree(lambda leaf: leaf.numpy(force=True), batch)


def to_tensors(obs: Any, device: torch.device) -> Any:
    """Convert an array, or a dict of arrays, to tensors on a device."""
    return map_tree(lambda leaf: torch.as_tensor(leaf, device=device), obs)
