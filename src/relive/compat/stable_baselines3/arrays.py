# pyright: reportMissingImports=false
"""Observations and arrays as Stable-Baselines3 has them: shapes and dtypes of spaces, and attributes that are arrays.

Writing to these arrays stores, or raises. A Dict space has one level of names.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.preprocessing import get_obs_shape, is_image_space, is_image_space_channels_first

from relive.compat.views import WrittenDict, map_tree
from relive.errors import SchemaError, explain
from relive.schema.fields import Field, Stacked

Shapes = tuple[int, ...] | dict[str, tuple[int, ...]]


def overrides(buffer: Any, *names: str) -> bool:
    """Whether the class of a buffer is a user's and has its own method of one of these names."""
    kind = type(buffer)
    ours = next(base for base in kind.__mro__ if base.__module__.startswith("relive."))
    return any(getattr(kind, name) is not getattr(ours, name) for name in names)


# Observations


def fields_of(space: spaces.Space[Any], n_stack: int | None = None) -> Any:
    """An observation space as it is stored: with its own dtype, a float64 too; stacks of frames as frames."""
    return map_tree(lambda part: _field(part, n_stack), space)


def _field(space: spaces.Space[Any], n_stack: int | None) -> Field:
    shape: Any = get_obs_shape(space)
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


def step_shapes(space: spaces.Space[Any], n_envs: int) -> Shapes:
    """The shapes of one step's observations."""
    return map_tree(lambda part: (n_envs, *get_obs_shape(part)), space)


def stack_frames(obs: Any, fields: Any) -> Any:
    """One step's observations with an axis for their frames."""
    return map_tree(lambda f, x: x.reshape(len(x), *f.shape[: f.axis], f.k, *f.shape[f.axis :]), fields, obs)


def unstack_frames(obs: Any, shape: Any, lead: int) -> Any:
    """Stacks of frames after `lead` axes in the shape of the observation space."""
    return map_tree(lambda part, x: x.reshape(*x.shape[:lead], *part), shape, obs)


def reshape_step(shapes: Shapes, obs: Any) -> Any:
    """One step's observations in these shapes; other keys of a dict are left out."""
    if isinstance(shapes, dict):
        return {key: reshape_step(shape, obs[key]) for key, shape in shapes.items()}
    array = np.asarray(obs)
    if array.shape == shapes:
        return array
    # Discrete comes as (n,), one environment perhaps as it is: only axes of length one may differ.
    alike = [n for n in array.shape if n != 1] == [n for n in shapes if n != 1]
    return array.reshape(shapes) if alike else array


def in_own_memory(next_obs: Any, obs: Any) -> Any:
    """Next observations in other memory than the observations: a caller may pass one array as both."""
    return map_tree(lambda after, x: after.copy() if np.may_share_memory(x, after) else after, next_obs, obs)


def numpy_of(batch: Any) -> Any:
    """A tensor, or a TensorDict of tensors, as numpy."""
    return map_tree(lambda leaf: leaf.numpy(force=True), batch)


def torch_of(obs: Any, device: torch.device) -> Any:
    """An array, or a dict of arrays, on a device."""
    return map_tree(lambda leaf: torch.as_tensor(leaf, device=device), obs)


# Arrays


def overwrite(place: Any, value: Any) -> None:
    """Copy an array, or a dict of arrays, into another one."""
    if isinstance(place, dict):
        for key, array in place.items():
            overwrite(array, value[key])
    elif value is not place:
        cast = np.asarray(value).astype(place.dtype)
        if place.dtype.kind in "biu" and not np.array_equal(cast, value):
            expected, got = f"numbers of {place.dtype}", f"others, of {np.asarray(value).dtype}"
            raise SchemaError(explain("an array", expected, got, "Declare a space that has them."))
        place[...] = cast


class Arrays(WrittenDict):
    """The arrays of a Dict space. What is assigned to a key is written into its array, which stays."""

    def __setitem__(self, key: str, value: Any) -> None:
        overwrite(self[key], value)


class ExchangedArrays(Arrays):
    """The arrays of a Dict space, over `memory`, which users' code may exchange.

    What has the shape of the memory of its key is written there; all else is kept as it is, in an order of the user's.
    """

    def __init__(self, memory: dict[str, np.ndarray]) -> None:
        super().__init__(memory)
        self._memory = memory

    def __setitem__(self, key: str, value: Any) -> None:
        memory = self._memory.get(key)
        if memory is not None and np.shape(value) == memory.shape:
            overwrite(memory, value)
            value = memory
        dict.__setitem__(self, key, value)


class Gathered(np.ndarray):
    """A copy of rows `[buffer_size, n_envs, …]` that tells the buffer of what is written to it, whole or in part."""

    write: Callable[[Any, Any], None]
    """`write(key, value)` stores what is written, or raises."""
    copied: np.ndarray
    """The memory of the rows as a plain, writable array."""

    @staticmethod
    def of(copied: np.ndarray, write: Callable[[Any, Any], None]) -> Gathered:
        """An array over the memory of `copied`."""
        gathered = copied.view(Gathered)
        gathered.flags.writeable = False
        gathered.write, gathered.copied = write, copied
        return gathered

    def __setitem__(self, key: Any, value: Any) -> None:
        if not hasattr(self, "write"):
            raise ValueError("assignment destination is read-only")  # of what numpy made of the array
        value = np.asarray(value)
        self.write(key, value)
        self.copied[key] = value

    def __getitem__(self, key: Any) -> Any:
        if not hasattr(self, "write"):
            return super().__getitem__(key)
        part = self.copied[key]
        if not isinstance(part, np.ndarray) or not np.may_share_memory(part, self.copied):
            return part
        return Gathered.of(part, lambda inner, value: self._write_part(key, inner, value))

    def _write_part(self, key: Any, inner: Any, value: np.ndarray) -> None:
        """Write to a part of a part."""
        whole = np.array(self.copied[key])
        whole[inner] = value
        self.write(key, whole)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = (), **options: Any) -> Any:
        """Results are plain arrays; a result that goes into this array (`rewards += bonus`) is written."""
        computed = getattr(ufunc, method)(*map(_plain, inputs), **options)
        if not out:
            return computed
        (target,) = out
        target[...] = computed
        return target


def _plain(value: Any) -> Any:
    return value.view(np.ndarray) if isinstance(value, Gathered) else value
