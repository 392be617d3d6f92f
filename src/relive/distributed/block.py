"""Blocks of steps as numpy arrays, for sending between processes; every observation is in a block once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from relive.fields.schema import Path, Schema

_BFLOAT16 = np.dtype("V2")
"""Two raw bytes, for bfloat16, which numpy lacks."""


class Block(NamedTuple):
    """T steps of k environments. The next observation of a step is the observation of the step after it, except at
    `breaks`."""

    leaves: list[np.ndarray]
    """The leaves in the schema's order: observations [T + 1, k, …], all others [T, k, …]."""
    breaks: np.ndarray
    """The steps t · k + e whose next observation differs from the observation after them, int64 [M]."""
    next_obs: list[np.ndarray]
    """The leaves of the next observations at `breaks` [M, …]."""

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays."""
        return sum(array.nbytes for array in (*self.leaves, self.breaks, *self.next_obs))


def pack(schema: Schema, leaves: Sequence[torch.Tensor], nexts: Sequence[torch.Tensor]) -> Block:
    """A block with memory of its own, from converted leaves and next observations [T, k, …]."""
    arrays = [to_array(leaf) for leaf in leaves]
    following = [to_array(leaf) for leaf in nexts]
    observed = schema.leaf_indices["obs"]
    broken = np.zeros(arrays[0].shape[:2], np.bool_)
    for i, after in zip(observed, following, strict=True):
        broken[:-1] |= _differs(arrays[i][1:], after[:-1])
    breaks = np.flatnonzero(broken)
    finals = [after.reshape(-1, *after.shape[2:])[breaks] for after in following]
    for i, after in zip(observed, following, strict=True):
        arrays[i] = np.concatenate([arrays[i], after[-1:]])
    return Block([array if i in observed else array.copy() for i, array in enumerate(arrays)], breaks, finals)


def unpack(schema: Schema, block: Block) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The leaves and the next observations of a block, as a buffer takes them; copied only where necessary."""
    arrays, nexts = list(block.leaves), []
    for i, finals in zip(schema.leaf_indices["obs"], block.next_obs, strict=True):
        after = arrays[i][1:]
        if len(block.breaks):
            after = after.copy()
            after.reshape(-1, *after.shape[2:])[block.breaks] = finals
        arrays[i] = arrays[i][:-1]
        nexts.append(after)
    return tuple(map(_readable, arrays)), tuple(map(_readable, nexts))


def to_array(tensor: torch.Tensor) -> np.ndarray:
    """The memory of a host tensor as an array."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(_BFLOAT16)
    return tensor.numpy()


def to_tensor(arrays: Sequence[np.ndarray]) -> torch.Tensor:
    """The concatenation of arrays [b, …] as a tensor with memory of its own."""
    narrow = arrays[0].dtype == _BFLOAT16
    plain = [array.view(np.int16) if narrow else array for array in arrays]
    whole = torch.from_numpy(np.concatenate(plain))
    return whole.view(torch.bfloat16) if narrow else whole


def concatenated(parts: Sequence[np.ndarray | torch.Tensor]) -> torch.Tensor:
    """Parts of a batch [b, …] as one tensor: arrays are copied, a single tensor is not."""
    arrays = [part for part in parts if isinstance(part, np.ndarray)]
    if len(arrays) == len(parts):
        return to_tensor(arrays)
    tensors = [to_tensor([part]) if isinstance(part, np.ndarray) else part for part in parts]
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def to_arrays(leaves: Mapping[Path, torch.Tensor]) -> dict[Path, np.ndarray]:
    """The memory of host tensors as arrays."""
    return {path: to_array(leaf) for path, leaf in leaves.items()}


def _readable(array: np.ndarray) -> torch.Tensor | np.ndarray:
    return to_tensor([array]) if array.dtype == _BFLOAT16 else array


def _differs(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Where the bytes of rows [T, k, …] differ: NaN equals itself, and 0.0 differs from -0.0."""
    a, b = (_words(x) for x in (a, b))
    return (a != b).any(-1)


def _words(x: np.ndarray) -> np.ndarray:
    """The bytes of rows [T, k, …] as words [T, k, W], as wide as divides a row."""
    size = x.itemsize * int(np.prod(x.shape[2:]))
    word = next(width for width in (8, 4, 2, 1) if size % width == 0)
    flat = np.ascontiguousarray(x).reshape(-1).view(np.dtype(f"u{word}"))
    return flat.reshape(*x.shape[:2], size // word)
