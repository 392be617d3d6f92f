"""How the rows of a rollout are read an epoch at a time: in which order, and into whose memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict

from relive.errors import NotReadyError, SchemaError, explain
from relive.fields.batch import assembler, checked_targets
from relive.fields.conversion import overlaps
from relive.fields.schema import Path
from relive.kernels.reader import Following, Reader
from relive.kernels.sequence_reader import SequenceReader
from relive.kernels.shuffling import permutation, shuffled
from relive.randomness import Randomness

Read = Callable[[torch.Tensor, int, int], TensorDict]
"""The batch of the rows index[start:stop]."""


def read_in_batches(where: str, total: int, size: int, drop_last: bool, expected: str) -> int:
    """How many of `total` are read an epoch: with `drop_last` a batch at least, unless there is nothing at all."""
    if drop_last and 0 < total < size:
        raise NotReadyError(explain(where, expected, total, "Add steps, or pass a smaller batch_size."))
    return total - total % size if drop_last else total


def order_of(rows: torch.Tensor | int, shuffle: bool, random: Randomness, device: torch.device) -> Callable[[], Any]:
    """Gives these rows, or all below a number, in the order of an epoch."""
    if isinstance(rows, int):
        return partial(permutation, rows, random, device) if shuffle else partial(torch.arange, rows, device=device)
    return partial(shuffled, rows, random) if shuffle else lambda: rows


def read_fresh(source: Following[Reader] | Following[SequenceReader], paths: list[Path], batched: bool) -> Read:
    """Reads batches into new tensors; `batched`: they have their first axis in common."""
    build, sizes = assembler(paths), {}

    def read(index: torch.Tensor, start: int, stop: int) -> TensorDict:
        size = sizes.get(stop - start)
        if size is None:
            size = sizes[stop - start] = torch.Size((stop - start,) if batched else ())
        return build(source.found().take(index, start, stop), size)

    return read


def read_into(
    out: TensorDict,
    source: Following[Reader],
    columns: dict[Path, torch.Tensor],
    device: torch.device,
    batch_size: int,
    total: int,
) -> Read:
    """Reads `total` rows of columns [T, N, …] into the caller's batch, again and again."""
    like = {path: ((batch_size, *column.shape[2:]), column.dtype) for path, column in columns.items()}
    targets = checked_targets(out, like, device)
    if any(overlaps(target, column) for target in targets for column in columns.values()):
        raise SchemaError(
            explain("out", "memory outside the rollout", "memory of the rollout", "Pass a batch as out=.")
        )
    if total % batch_size:
        remedy = "Pass drop_last=True, or a batch_size that divides the transitions."
        raise SchemaError(explain("out", f"full batches of {batch_size} transitions", f"{total} transitions", remedy))

    def read(index: torch.Tensor, start: int, stop: int) -> TensorDict:
        source.found().take_into(index, start, stop, targets)
        return out

    return read
