# pyright: reportMissingImports=false
"""How Stable-Baselines3 lays out observations: a shape and a dtype for every space, one level of names in a Dict."""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.preprocessing import get_obs_shape, is_image_space, is_image_space_channels_first

from relive.errors import SchemaError, explain
from relive.schema.fields import Field, Stacked

Shapes = tuple[int, ...] | dict[str, tuple[int, ...]]


def fields_of(space: spaces.Space[Any], n_stack: int | None = None) -> Field | dict[str, Field]:
    """An observation space as it is stored: with its own dtype, a float64 too; stacks of frames as frames."""
    shape: Any = get_obs_shape(space)
    if isinstance(space, spaces.Dict):
        return {key: _field(part, shape[key], n_stack) for key, part in space.spaces.items()}
    return _field(space, shape, n_stack)


def _field(space: spaces.Space[Any], shape: tuple[int, ...], n_stack: int | None) -> Field:
    dtype: Any = space.dtype
    if n_stack is None:
        return Field(shape, dtype)
    axis = _stacking_axis(space)
    if shape[axis] % n_stack:
        remedy = "Pass the n_stack of VecFrameStack."
        raise SchemaError(explain("n_stack", f"a divisor of axis {axis} of {shape}", n_stack, remedy))
    frame = (*shape[:axis], shape[axis] // n_stack, *shape[axis + 1 :])
    return Stacked(Field(frame, dtype), n_stack, axis, pad="zero")


def _stacking_axis(space: spaces.Space[Any]) -> int:
    """The axis that `VecFrameStack` puts frames one after another along: an image's channels, else the last."""
    first = is_image_space(space, check_channels=False) and is_image_space_channels_first(cast(spaces.Box, space))
    return 0 if first else len(space.shape or ()) - 1


def nbytes_of(space: spaces.Space[Any]) -> int:
    """How many bytes an observation takes."""
    fields = fields_of(space)
    leaves = fields.values() if isinstance(fields, dict) else [fields]
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def given_shapes(space: spaces.Space[Any], n_envs: int) -> Shapes:
    """The shapes of one step's observations."""
    shape: Any = get_obs_shape(space)
    if isinstance(shape, dict):
        return {key: (n_envs, *part) for key, part in shape.items()}
    return (n_envs, *shape)


def stacked(obs: Any, fields: Any) -> Any:
    """One step's observations with an axis for their frames."""
    if isinstance(fields, dict):
        return {key: stacked(obs[key], field) for key, field in fields.items()}
    return obs.reshape(len(obs), *fields.shape[: fields.axis], fields.k, *fields.shape[fields.axis :])


def shaped(shapes: Shapes, obs: Any) -> Any:
    """One step's observations in these shapes; other keys of a dict are left out."""
    if isinstance(shapes, dict):
        return {key: shaped(shape, obs[key]) for key, shape in shapes.items()}
    array = np.asarray(obs)
    if array.shape == shapes:
        return array
    # Discrete comes as (n,), one environment perhaps as it is: only axes of length one may differ.
    alike = [n for n in array.shape if n != 1] == [n for n in shapes if n != 1]
    return array.reshape(shapes) if alike else array


def shaped_pair(shapes: Shapes, obs: Any, next_obs: Any) -> tuple[Any, Any]:
    """An observation and the next one in these shapes, and each in memory of its own.

    The same array may be given as both, since both are copied.
    """
    if isinstance(shapes, dict):
        pairs = [shaped_pair(shape, obs[key], next_obs[key]) for key, shape in shapes.items()]
        first, second = zip(*pairs, strict=True)
        return dict(zip(shapes, first, strict=True)), dict(zip(shapes, second, strict=True))
    if type(obs) is not np.ndarray or obs.shape != shapes:
        obs = shaped(shapes, obs)
    if type(next_obs) is not np.ndarray or next_obs.shape != shapes:
        next_obs = shaped(shapes, next_obs)
    # Two arrays that own their memory share none; asking costs as much as storing.
    if obs is next_obs or obs.base is not None or next_obs.base is not None:
        next_obs = next_obs.copy() if np.may_share_memory(obs, next_obs) else next_obs
    return obs, next_obs


def numpy_of(batch: Any) -> Any:
    """A tensor, or a TensorDict of tensors, as numpy."""
    if isinstance(batch, torch.Tensor):
        return batch.numpy(force=True)
    return {key: leaf.numpy(force=True) for key, leaf in batch.items()}


def torch_of(obs: Any, device: torch.device) -> Any:
    """An array, or a dict of arrays, on a device."""
    if isinstance(obs, np.ndarray):
        return torch.as_tensor(obs, device=device)
    return {key: torch.as_tensor(leaf, device=device) for key, leaf in obs.items()}
