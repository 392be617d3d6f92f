"""Batches that Triton's kernels read, whole: transitions, n-step returns and sequences."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from relive.fields.schema import Field, Path, Stacked, caller_shape
from relive.kernels.triton.read import LAST, NEXT, OWN, START, RowReader, Source
from relive.kernels.triton.windows import MOST_STEPS, Windows, find_windows
from relive.kernels.triton.words import MOST_COLUMNS, Frames, Leaf, Rings, as_words
from relive.replay.composed import ENDS, MARKS
from relive.replay.row_memory import RowMemory
from relive.replay.store import Leaves, Reading

Forms = dict[Path, tuple[tuple[int, ...], torch.dtype]]
"""The shape and dtype of every leaf of a batch, in its order."""


def rings_of(memory: RowMemory) -> Rings:
    """The ring of a memory, as kernels see it."""
    ring = memory.ring
    first, is_open, resetting = (flags.view(torch.uint8) for flags in (ring.first, ring.open, ring.resetting))
    return Rings(
        ring.kind, first, ring.head, is_open, resetting, ring.count, ring.floor, ring.slots, ring.num_envs, ring.alive
    )


def leaves_of(memory: RowMemory) -> tuple[list[Leaf], list[Leaf]]:
    """The leaves of a memory and those of next observations, as kernels see them."""
    frames = [_frames(field) for field in memory.schema.fields]
    leaves = [Leaf.of(leaf, how, MOST_COLUMNS) for leaf, how in zip(memory.leaves, frames, strict=True)]
    return leaves, [Leaf.of(leaf, Frames(), MOST_COLUMNS) for leaf in memory.next_leaves]


def _frames(field: Field) -> Frames:
    if not isinstance(field, Stacked):
        return Frames()
    return Frames(field.k, torch.Size(field.shape[field.axis :]).numel(), field.pad == "zero")


class TritonReader:
    """The batches of one memory, read into tensors that are there already."""

    def __init__(self, memory: RowMemory) -> None:
        self._memory, self._schema, self._rings = memory, memory.schema, rings_of(memory)
        self._leaves, self._next_leaves = leaves_of(memory)
        self._agents = memory.schema.leaf_indices["reward"]
        self._readers: dict[str, tuple[tuple[Path, ...], RowReader]] = {}

    def reads(self, reading: Reading) -> bool:
        """Whether there are kernels for a batch."""
        steps = reading.n or reading.length + reading.burn_in
        return not steps or (steps <= MOST_STEPS and not self._memory.keeps_next)

    def forms(self, reading: Reading, count: int) -> Forms:
        """What a batch of so many rows consists of."""
        memory, schema = self._memory, self._schema
        length = reading.length + reading.burn_in
        lead = (count, length) if length else (count,)
        once = memory.carried if length else ()
        items = [(caller_shape(field), field.dtype) for field in schema.fields]
        forms = {path: ((*lead, *items[i][0]), items[i][1]) for i, path in enumerate(schema.paths) if i not in once}
        nexts = zip(memory.next_paths, memory.observed, strict=True)
        forms |= {path: ((*lead, *items[i][0]), items[i][1]) for path, i in nexts}
        if length:
            forms |= dict.fromkeys(MARKS, (lead, torch.bool))
            forms |= {schema.paths[i]: ((count, *items[i][0]), items[i][1]) for i in once}
        forms[("index",)] = (count,), torch.int64
        if reading.n:
            forms[("discount",)] = (count,), torch.float32
        return forms

    def fresh(self, slots: torch.Tensor, reading: Reading) -> Leaves:
        """The batch of rows at slots, in tensors of its own."""
        leaves = self.empty(reading, len(slots))
        self.read(slots, reading, leaves)
        return leaves

    def empty(self, reading: Reading, count: int) -> Leaves:
        """Memory for a batch."""
        forms, device = self.forms(reading, count), self._memory.device
        return {path: torch.empty(shape, dtype=dtype, device=device) for path, (shape, dtype) in forms.items()}

    def read(self, slots: torch.Tensor, reading: Reading, out: Leaves) -> None:
        """Fill the leaves of a batch, which have the forms that were asked for."""
        if reading.length:
            return self._read_sequences(slots, reading, out)
        kind = "n_step" if reading.n else "transition"
        paths, reader = self._reader(kind)
        words = [as_words(out[path]) for path in paths]
        if not reading.n:
            reader.read(slots, words, out[("index",)])
            return None
        sums = [out[self._schema.paths[i]].view(-1) for i in self._agents]
        n, discount = min(reading.n, self._rings.slots), out[("discount",)]
        reader.read(slots, words, out[("index",)], n=n, gamma=reading.gamma, sums=sums, discount=discount)
        return None

    def _read_sequences(self, slots: torch.Tensor, reading: Reading, out: Leaves) -> None:
        mask, train, is_first = (out[mark].view(torch.uint8) for mark in MARKS)
        length = reading.burn_in + reading.length
        windows = Windows(slots.new_empty((len(slots), length)), mask, train, is_first, out[("index",)])
        find_windows(self._rings, slots, reading.burn_in, reading.length, reading.cross, windows)
        paths, reader = self._reader("sequence")
        reader.read(windows.slots, [as_words(out[path]) for path in paths], length=length)

    def _reader(self, kind: str) -> tuple[tuple[Path, ...], RowReader]:
        if kind not in self._readers:
            self._readers[kind] = self._made(kind)
        return self._readers[kind]

    def _made(self, kind: str) -> tuple[tuple[Path, ...], RowReader]:
        """The paths of the leaves that are copied for this kind of batch, and their reader."""
        memory, schema = self._memory, self._schema
        summed: Sequence[int] = self._agents if kind == "n_step" else ()
        places = {i: OWN.value for i in range(len(self._leaves)) if i not in summed}
        if kind == "n_step":
            places |= {schema.leaf_indices[name][0]: LAST.value for name in ENDS}
        if kind == "sequence":
            places |= dict.fromkeys(memory.carried, START.value)
        sources = [Source(self._leaves[i], place) for i, place in places.items()]
        if memory.keeps_next:
            sources += [Source(leaf, OWN.value) for leaf in self._next_leaves]
        else:
            sources += [Source(self._leaves[i], NEXT.value) for i in memory.observed]
        rewards = [(memory.leaves[i].view(-1), self._leaves[i].form) for i in summed]
        paths = (*(schema.paths[i] for i in places), *memory.next_paths)
        return paths, RowReader(self._rings, sources, rewards)
