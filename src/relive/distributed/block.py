"""Steps on their way between processes: numpy arrays, and every observation once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from relive.fields.schema import Path, Schema

_NO_TWIN = np.dtype("V2")
"""What stands for bfloat16, which numpy has not."""


class Block(NamedTuple):
    """T steps of k environments. The next observation of a step is the observation after it, but where it is not."""

    leaves: list[np.ndarray]
    """In the schema's order: observations [T + 1, k, …], everything else [T, k, …]."""
    breaks: np.ndarray
    """The steps t · k + e whose next observation is another, int64 [M]."""
    finals: list[np.ndarray]
    """The next observations of these [M, …], a leaf each."""

    @property
    def nbytes(self) -> int:
        """All arrays together."""
        return sum(array.nbytes for array in (*self.leaves, self.breaks, *self.finals))


def pack(schema: Schema, leaves: Sequence[torch.Tensor], nexts: Sequence[torch.Tensor]) -> Block:
    """A block with memory of its own, from leaves [T, k, …] that fit their fields."""
    arrays = [wire(leaf) for leaf in leaves]
    following = [wire(leaf) for leaf in nexts]
    observed = schema.columns["obs"]
    broken = np.zeros(arrays[0].shape[:2], np.bool_)
    for i, after in zip(observed, following, strict=True):
        broken[:-1] |= _differs(arrays[i][1:], after[:-1])
    breaks = np.flatnonzero(broken)
    finals = [after.reshape(-1, *after.shape[2:])[breaks] for after in following]
    for i, after in zip(observed, following, strict=True):
        arrays[i] = np.concatenate([arrays[i], after[-1:]])
    return Block([array if i in observed else array.copy() for i, array in enumerate(arrays)], breaks, finals)


def unpack(schema: Schema, block: Block) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The leaves and the next observations of a block, as a buffer takes them; what needs no copy is not copied."""
    arrays, nexts = list(block.leaves), []
    for i, finals in zip(schema.columns["obs"], block.finals, strict=True):
        after = arrays[i][1:]
        if len(block.breaks):
            after = after.copy()
            after.reshape(-1, *after.shape[2:])[block.breaks] = finals
        arrays[i] = arrays[i][:-1]
        nexts.append(after)
    return tuple(map(_readable, arrays)), tuple(map(_readable, nexts))


def wire(tensor: torch.Tensor) -> np.ndarray:
    """The memory of a tensor on the host as an array."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(_NO_TWIN)
    return tensor.numpy()


def unwired(arrays: Sequence[np.ndarray]) -> torch.Tensor:
    """Arrays [b, …] one after the other as a tensor with memory of its own."""
    narrow = arrays[0].dtype == _NO_TWIN
    plain = [array.view(np.int16) if narrow else array for array in arrays]
    whole = torch.from_numpy(np.concatenate(plain))
    return whole.view(torch.bfloat16) if narrow else whole


def joined(parts: Sequence[np.ndarray | torch.Tensor]) -> torch.Tensor:
    """Parts of a batch [b, …] as one tensor: arrays are others' memory, tensors ours already."""
    arrays = [part for part in parts if isinstance(part, np.ndarray)]
    if len(arrays) == len(parts):
        return unwired(arrays)
    tensors = [unwired([part]) if isinstance(part, np.ndarray) else part for part in parts]
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def wired(leaves: Mapping[Path, torch.Tensor]) -> dict[Path, np.ndarray]:
    """The memory of tensors as arrays."""
    return {path: wire(leaf) for path, leaf in leaves.items()}


def _readable(array: np.ndarray) -> torch.Tensor | np.ndarray:
    return unwired([array]) if array.dtype == _NO_TWIN else array


def _differs(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Where rows [T, k, …] are other bytes: NaN equals itself, and 0.0 is not -0.0."""
    a, b = (_words(x) for x in (a, b))
    return (a != b).any(-1)


def _words(x: np.ndarray) -> np.ndarray:
    """The bytes of rows [T, k, …] as [T, k, words], in words as long as they fit."""
    size = x.itemsize * int(np.prod(x.shape[2:]))
    word = next(width for width in (8, 4, 2, 1) if size % width == 0)
    flat = np.ascontiguousarray(x).reshape(-1).view(np.dtype(f"u{word}"))
    return flat.reshape(*x.shape[:2], size // word)
