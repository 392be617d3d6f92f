"""Minibatches and sequences of a rollout: the order of an epoch, and functions that read a batch of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, get_args

import torch

from relive import lazy
from relive.errors import NotReadyError, SchemaError, explain
from relive.kernels.reader import Following, Reader, permutation, reader, shuffled
from relive.kernels.sequences import Cuts, Layout, SequenceReader, find_sequences, sequence_reader
from relive.rng import Randomness
from relive.rollout.storage import EpisodeFlags, Storage
from relive.schema.assembly import assembler, checked_targets, to_device
from relive.schema.checks import positive
from relive.schema.conversion import overlaps
from relive.schema.fields import Carry, Path

Read = Callable[[torch.Tensor, int, int], "lazy.TensorDict"]
"""Reads the batch of the items index[start:stop]."""


class Epochs:
    """Batches of some items (or of all below a number), in an order that every epoch draws anew.

    Args:
        items: int64 [n], or the number n of items 0 to n − 1.
        batch_size: items per batch; the last one of an epoch may have fewer.
        repeats: the number of epochs.
        shuffle: draw the order from `random`; False keeps the order of the items.
        device: the device of the order.
    """

    def __init__(
        self, items: torch.Tensor | int, batch_size: int, repeats: int, *, shuffle: bool, random: Randomness,
        device: torch.device,
    ) -> None:  # fmt: skip
        self._items, self._shuffle, self._random, self._device = items, shuffle, random, device
        self._total = items if isinstance(items, int) else len(items)
        self._batch_size, self._repeats = batch_size, repeats

    def drop_last(self, where: str, expected: str, added: str = "steps") -> None:
        """Leave out an epoch's last batch if it is not full; raises a NotReadyError if no batch is full."""
        if 0 < self._total < self._batch_size:
            remedy = f"Add {added}, or pass a smaller batch_size."
            raise NotReadyError(explain(where, expected, self._total, remedy))
        self._total -= self._total % self._batch_size

    def require_full(self, unit: str) -> None:
        """Raise if the last batch is shorter than the others: it would not fill the caller's `out`."""
        if self._total % self._batch_size:
            remedy = f"Pass drop_last=True, or a batch_size that divides the {unit}."
            expected = f"full batches of {self._batch_size} {unit}"
            raise SchemaError(explain("out", expected, f"{self._total} {unit}", remedy))

    def batches(self, read: Read, lock: Any, check: Callable[[], None]) -> Iterator[lazy.TensorDict]:
        """Every batch, read under the lock after `check`, which raises if its items are gone."""
        index = None
        for _ in range(self._repeats):
            for start in range(0, self._total, self._batch_size):
                with lock:
                    check()
                    if start == 0 or index is None:
                        index = self._order()
                    batch = read(index, start, min(start + self._batch_size, self._total))
                yield batch

    def _order(self) -> torch.Tensor:
        items = self._items
        if isinstance(items, int):
            ordered = permutation(items, self._random, self._device) if self._shuffle else None
            return torch.arange(items, device=self._device) if ordered is None else ordered
        return shuffled(items, self._random) if self._shuffle else items


def row_reader(
    storage: Storage, fields: Iterable[str | Path] | None
) -> tuple[Following[Reader], dict[Path, torch.Tensor]]:
    """A reader of the stored rows t·N + n, and the leaves [T + 1, N, …] that it reads; "index" is among them."""
    items = storage.require_steps("minibatches") * storage.num_envs
    rows = len(storage.tensors[0])
    index = torch.arange(rows * storage.num_envs, device=storage.device).view(rows, -1)
    leaves = storage.select({**storage.leaves(), ("index",): index}, fields)
    tensors = list(leaves.values())
    return Following(lambda: reader(tensors, 2, items), tensors, lambda: storage.is_exposed), leaves


def read_fresh(source: Following[Reader] | Following[SequenceReader], paths: Iterable[Path], batched: bool) -> Read:
    """A function that reads batches into new tensors; with `batched` all of them have the axis [B] in front."""
    build = assembler(list(paths))

    def read(index: torch.Tensor, start: int, stop: int) -> lazy.TensorDict:
        return build(source.found().take(index, start, stop), torch.Size((stop - start,) if batched else ()))

    return read


def read_into(
    out: lazy.TensorDict, source: Following[Reader], leaves: dict[Path, torch.Tensor], batch_size: int,
    device: torch.device,
) -> Read:  # fmt: skip
    """A function that reads rows of leaves [T, N, …] into the caller's batch `out`."""
    like = {path: ((batch_size, *leaf.shape[2:]), leaf.dtype) for path, leaf in leaves.items()}
    targets = checked_targets(out, like, device)
    if any(overlaps(target, leaf) for target in targets for leaf in leaves.values()):
        got, remedy = "memory of the rollout", "Pass a batch as out=."
        raise SchemaError(explain("out", "memory outside the rollout", got, remedy))

    def read(index: torch.Tensor, start: int, stop: int) -> lazy.TensorDict:
        source.found().take_into(index, start, stop, targets)
        return out

    return read


# Sequences for recurrent networks

Mode = Literal["chunked", "overlap", "every"]

_STRIDES: dict[str, Callable[[int], int]] = {
    "chunked": lambda length: length,
    "overlap": lambda length: max(length // 2, 1),
    "every": lambda _: 1,
}


def parse_cuts(length: int | None, mode: str, split_episodes: bool, keep_tail: bool, layout: str) -> Cuts:
    """The arguments of `sequences` that say how steps are cut; raises for an unknown mode or layout."""
    for where, value, choices in (("layout", layout, get_args(Layout)), ("mode", mode, _STRIDES)):
        if value not in choices:
            expected = f"one of {', '.join(map(repr, choices))}"
            raise SchemaError(explain(where, expected, repr(value), "Pass one of them."))
    stride = 1 if length is None else _STRIDES[mode](positive("length", length))
    return Cuts(length, stride, split_episodes, keep_tail)


def sequences_to_device(batch: lazy.TensorDict, device: torch.device) -> lazy.TensorDict:
    """The batch on another device; the sizes of packed sequences stay on the host, where torch wants them."""
    sizes = batch.get("batch_sizes", None)
    moved = to_device(batch, device)
    return moved if sizes is None else moved.clear_device_().set("batch_sizes", sizes)


def sequence_source(
    storage: Storage, flags: EpisodeFlags, cuts: Cuts, layout: Layout, fields: Iterable[str | Path] | None
) -> tuple[int, Following[SequenceReader], list[Path]]:
    """The number of sequences in the stored steps, a reader of them, and the paths of its leaves.

    `Carry` fields are read at the first step of each sequence only.
    """
    steps = storage.require_steps("sequences")
    at_steps = storage.select(storage.leaves(), fields)
    declared = zip(storage.schema.paths, storage.schema.fields, strict=True)
    at_start = {path: at_steps.pop(path) for path, field in declared if isinstance(field, Carry) and path in at_steps}
    leaves, carried = list(at_steps.values()), list(at_start.values())
    tensors = [*leaves, *carried]
    index = find_sequences(flags.for_sequences(steps), cuts, tensors)
    length = cuts.length or max(index.longest, 1)
    source = Following(
        lambda: sequence_reader(index, length, layout, leaves, carried), tensors, lambda: storage.is_exposed
    )
    sizes = "batch_sizes" if layout == "packed" else "mask"
    return len(index), source, [*at_steps, ("is_first",), (sizes,), ("index",), *at_start]
