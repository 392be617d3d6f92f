"""Minibatches and sequences of a rollout, an epoch at a time: in which order, into whose memory, for how long."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch

from relive import lazy
from relive.errors import NotReadyError, SchemaError, explain
from relive.kernels.reader import Following, Reader
from relive.kernels.sequence_index import Cuts, find_sequences
from relive.kernels.sequence_reader import Layout, SequenceReader, sequence_reader
from relive.kernels.shuffling import permutation, shuffled
from relive.rng import Randomness
from relive.rollout.episode_flags import EpisodeFlags
from relive.rollout.storage import Storage
from relive.schema.assembly import assembler, checked_targets, to_device
from relive.schema.checks import positive
from relive.schema.conversion import overlaps
from relive.schema.fields import Carry, Path

Read = Callable[[torch.Tensor, int, int], "lazy.TensorDict"]
"""The batch of the items index[start:stop]."""


class Epochs(NamedTuple):
    """How often the first `total` items of an order are read, and how many at once."""

    repeats: int
    total: int
    batch_size: int

    @classmethod
    def of(
        cls, where: str, items: torch.Tensor | int, batch_size: int, repeats: int, drop_last: bool, expected: str,
        added: str = "steps",
    ) -> Epochs:  # fmt: skip
        """Epochs of all items (or of as many); with `drop_last` full batches only, at least one of them."""
        total = items if isinstance(items, int) else len(items)
        if drop_last and 0 < total < batch_size:
            raise NotReadyError(explain(where, expected, total, f"Add {added}, or pass a smaller batch_size."))
        return cls(repeats, total - total % batch_size if drop_last else total, batch_size)

    def require_full(self, items: str) -> None:
        """Refuse a last batch that is shorter than the others, which a batch of the caller's cannot be."""
        if self.total % self.batch_size:
            remedy = f"Pass drop_last=True, or a batch_size that divides the {items}."
            expected = f"full batches of {self.batch_size} {items}"
            raise SchemaError(explain("out", expected, f"{self.total} {items}", remedy))

    def batches(
        self, read: Read, order: Callable[[], Any], lock: Any, require: Callable[[], None]
    ) -> Iterator[lazy.TensorDict]:
        """Batch after batch, each read under the lock, unless `require` raises because its rows are gone."""
        index, size = None, self.batch_size
        for start in itertools.chain.from_iterable(itertools.repeat(range(0, self.total, size), self.repeats)):
            with lock:
                require()
                if index is None or start == 0:
                    index = order()
                batch = read(index, start, min(start + size, self.total))
            yield batch


def stays(storage: Storage) -> Callable[[], None]:
    """A function that raises once the steps that the storage has now are forgotten."""
    generation = storage.generation

    def require() -> None:
        if storage.generation != generation:
            got, remedy = "a cleared one", "Finish the epochs before clear()."
            raise NotReadyError(explain("batch", "the rollout that the epochs began with", got, remedy))

    return require


def order_of(rows: torch.Tensor | int, shuffle: bool, random: Randomness, device: torch.device) -> Callable[[], Any]:
    """Gives these rows, or all below a number, in the order of an epoch."""
    if isinstance(rows, int):
        return partial(permutation, rows, random, device) if shuffle else partial(torch.arange, rows, device=device)
    return partial(shuffled, rows, random) if shuffle else lambda: rows


def read_fresh(source: Following[Reader] | Following[SequenceReader], paths: list[Path], batched: bool) -> Read:
    """Reads batches into new tensors; `batched`: they have their first axis in common."""
    build, sizes = assembler(paths), {}

    def read(index: torch.Tensor, start: int, stop: int) -> lazy.TensorDict:
        size = sizes.get(stop - start)
        if size is None:
            size = sizes[stop - start] = torch.Size((stop - start,) if batched else ())
        return build(source.found().take(index, start, stop), size)

    return read


def read_into(
    out: lazy.TensorDict,
    source: Following[Reader],
    leaves: dict[Path, torch.Tensor],
    device: torch.device,
    epochs: Epochs,
) -> Read:
    """Reads rows of leaves [T, N, …] into the caller's batch, again and again."""
    like = {path: ((epochs.batch_size, *leaf.shape[2:]), leaf.dtype) for path, leaf in leaves.items()}
    targets = checked_targets(out, like, device)
    if any(overlaps(target, leaf) for target in targets for leaf in leaves.values()):
        raise SchemaError(
            explain("out", "memory outside the rollout", "memory of the rollout", "Pass a batch as out=.")
        )
    epochs.require_full("transitions")

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
_LAYOUTS = get_args(Layout)


def cuts_of(length: int | None, mode: str, split_episodes: bool, keep_tail: bool) -> Cuts:
    """What the arguments of `sequences` ask for."""
    if mode not in _STRIDES:
        known = ", ".join(map(repr, _STRIDES))
        raise SchemaError(explain("mode", f"one of {known}", repr(mode), "Pass one of them."))
    stride = 1 if length is None else _STRIDES[mode](positive("length", length))
    return Cuts(length, stride, split_episodes, keep_tail)


def check_layout(layout: str) -> None:
    """Refuse an unknown layout."""
    if layout not in _LAYOUTS:
        known = ", ".join(map(repr, _LAYOUTS))
        raise SchemaError(explain("layout", f"one of {known}", repr(layout), "Pass one of them."))


def moved_sequences(batch: lazy.TensorDict, device: torch.device) -> lazy.TensorDict:
    """The batch on another device; torch wants the sizes of packed sequences on the host, wherever the steps are."""
    sizes = batch.get("batch_sizes", None)
    there = to_device(batch, device)
    return there if sizes is None else there.clear_device_().set("batch_sizes", sizes)


class Sequences(NamedTuple):
    """The sequences of the stored steps: how many, and how batches of them are read."""

    size: int
    source: Following[SequenceReader]
    paths: list[Path]


def sequences_of(
    storage: Storage, flags: EpisodeFlags, cuts: Cuts, layout: Layout, fields: Iterable[str | Path] | None
) -> Sequences:
    """The stored steps cut into sequences; fields declared as `Carry` are read at their first steps only."""
    steps = storage.stored("sequences")
    chosen = storage.selected(storage.leaves(), fields)
    declared = zip(storage.schema.paths, storage.schema.fields, strict=True)
    carried = {path: chosen.pop(path) for path, field in declared if isinstance(field, Carry) and path in chosen}
    leaves, firsts = list(chosen.values()), list(carried.values())
    tensors = [*leaves, *firsts]
    index = find_sequences(flags.for_sequences(steps), cuts, tensors)
    length = cuts.length or max(index.longest, 1)
    source = storage.following(tensors, lambda: sequence_reader(index, length, layout, leaves, firsts))
    sizes = "batch_sizes" if layout == "packed" else "mask"
    return Sequences(len(index), source, [*chosen, ("is_first",), (sizes,), ("index",), *carried])
