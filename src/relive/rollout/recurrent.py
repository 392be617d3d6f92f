"""Sequences of a rollout for recurrent networks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple, get_args

import torch

from relive import lazy
from relive.errors import SchemaError, explain
from relive.fields.assembly import to_device
from relive.fields.schema import Carry, Path, positive
from relive.kernels.reader import Following
from relive.kernels.sequence_index import Cuts, find_sequences
from relive.kernels.sequence_reader import Layout, SequenceReader, sequence_reader
from relive.rollout.episode_flags import EpisodeFlags
from relive.rollout.storage import Storage

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
