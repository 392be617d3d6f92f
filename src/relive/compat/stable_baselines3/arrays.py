"""The arrays that Stable-Baselines3's buffers have as attributes: what is written to them is stored, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from relive.compat.views import WrittenDict
from relive.errors import SchemaError, explain


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
    """The same memory, which can be written."""

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
        """What is computed from it is plain; what is computed into it (`rewards += bonus`) is written."""
        computed = getattr(ufunc, method)(*map(_plain, inputs), **options)
        if not out:
            return computed
        (target,) = out
        target[...] = computed
        return target


def _plain(value: Any) -> Any:
    return value.view(np.ndarray) if isinstance(value, Gathered) else value
