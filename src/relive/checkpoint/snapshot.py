"""Snapshots: the state of a buffer or of one of its parts, as JSON and arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch

from relive.schema.conversion import as_indexable
from relive.storage.codec import (
    ArrayInfo,
    Arrays,
    describe_array,
    tensor_bytes,
)

MAX_NOTE_BYTES = 1 << 26
"""Maximum bytes of the note that a shard of a replay service adds to its checkpoints."""


class State(NamedTuple):
    """State of a part of a buffer, without its config."""

    values: dict[str, Any]
    """Numbers, names and flags, as JSON."""
    arrays: Arrays
    """Tensors by name, which may share the memory of the part."""

    @staticmethod
    def of_parts(parts: Mapping[str, tuple[dict[str, Any], Arrays]]) -> State:
        """Combine the states of a buffer's parts: `values` becomes a dict by part, an array is named `part.name`."""
        arrays_by_name = {f"{name}.{key}": x for name, (_, arrays) in parts.items() for key, x in arrays.items()}
        return State({name: values for name, (values, _) in parts.items()}, arrays_by_name)


def sum_bytes(arrays: Mapping[str, torch.Tensor]) -> int:
    """Return the number of bytes of all tensors together."""
    return sum(x.nbytes for x in arrays.values())


_COPY_BYTES = 1 << 22
"""Maximum bytes of a piece of a column that is read or written at once."""


@dataclass
class Rows:
    """Immutable rows in columns `[slots, N, …]`, with row r of an environment in slot r mod slots.

    Environment e has the rows from `first[e]` to before `stop[e]`. A file with these rows, a segment, is ordered by
    time if all environments have the same rows, else by environment.
    """

    columns: Arrays
    first: torch.Tensor
    stop: torch.Tensor

    @property
    def num_slots(self) -> int:
        """Number of slots per environment."""
        return len(next(iter(self.columns.values())))

    def __len__(self) -> int:
        return int((self.stop - self.first).sum())

    @property
    def nbytes(self) -> int:
        """Number of bytes of all columns together."""
        return sum(len(self) * column[0, 0].nbytes for column in self.columns.values())

    @property
    def segment_arrays(self) -> tuple[ArrayInfo, ...]:
        """Arrays in a file with these rows: `first` and `stop`, then one array for each column."""
        count = len(self)
        bounds = describe_array("first", self.first), describe_array("stop", self.stop)
        columns = self.columns.items()
        return bounds + tuple(ArrayInfo(name, column.dtype, (count, *column.shape[2:])) for name, column in columns)

    def iter_bytes(self) -> Iterator[memoryview]:
        """Yield the bytes of a segment, without a copy where rows are contiguous in memory."""
        yield tensor_bytes(self.first)
        yield tensor_bytes(self.stop)
        pieces = self.slot_pieces()
        for column in self.columns.values():
            flat = as_indexable(column.flatten(0, 1))
            for piece in pieces:
                yield tensor_bytes(flat[piece])

    def slot_pieces(self) -> list[slice] | list[torch.Tensor]:
        """Return the rows as indices of flat columns `[slots · N, …]`, in the order of a segment.

        An index is a slice, or a tensor where rows are not contiguous.
        """
        envs, slots, step = len(self.first), self.num_slots, self.rows_per_piece
        if not self.has_equal_bounds:
            return list(self.flat_slots().split(step))
        first, stop = int(self.first[0]), int(self.stop[0])
        boundaries = sorted({first, stop, *range(first - first % slots + slots, stop, slots)})
        runs = [(a % slots * envs, (b - a) * envs) for a, b in pairwise(boundaries)]
        return [slice(start + i, start + min(i + step, size)) for start, size in runs for i in range(0, size, step)]

    @property
    def rows_per_piece(self) -> int:
        """Maximum number of rows that one index of `slot_pieces` selects."""
        max_row_bytes = max(column[0, 0].nbytes for column in self.columns.values())
        return max(_COPY_BYTES // max(max_row_bytes, 1), 1)

    @property
    def has_equal_bounds(self) -> bool:
        """Whether all environments have the same rows."""
        return bool((self.first == self.first[0]).all() and (self.stop == self.stop[0]).all())

    def row_and_env_numbers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the row number and the environment of each row, in the order of a segment."""
        envs = torch.arange(len(self.first), device="cpu")
        if self.has_equal_bounds:
            rows = torch.arange(int(self.first[0]), int(self.stop[0]), device="cpu")
            return rows.repeat_interleave(len(envs)), envs.repeat(len(rows))
        sizes = self.stop - self.first
        env = envs.repeat_interleave(sizes)
        return torch.arange(len(env), device="cpu") - (sizes.cumsum(0) - sizes - self.first)[env], env

    def flat_slots(self) -> torch.Tensor:
        """Return the indices of the rows in flat columns `[slots · N, …]`, in the order of a segment."""
        row, env = self.row_and_env_numbers()
        return row % self.num_slots * len(self.first) + env


BUFFER_CLASSES: dict[str, Any] = {}
"""Classes of buffers, by their names in files.

Buffers and their parts have these methods: `config()` returns the constructor arguments as JSON; `state()` returns a
`State`; `load_state(saved)` restores a state or raises a CorruptCheckpoint; `check()` raises an InvariantError if the
part is inconsistent. A buffer also has the classmethod `from_config(config, saved, **changes)`, which makes an empty
buffer, and the method `rows()`, which returns its immutable rows.
"""

BufferClass = TypeVar("BufferClass")


def register_buffer(kind: type[BufferClass]) -> type[BufferClass]:
    """Decorate a class of buffers that `save` and `load` support."""
    BUFFER_CLASSES[kind.__name__] = kind
    return kind


class Snapshot(NamedTuple):
    """A whole buffer: its config, its state (values and arrays), and its immutable rows."""

    config: dict[str, Any]
    values: dict[str, Any]
    arrays: Arrays
    rows: Rows | None

    @staticmethod
    def of(buffer: Any) -> Snapshot:
        """Take a snapshot that shares the memory of a buffer. The caller holds the lock of the buffer."""
        values, arrays = buffer.state()
        return Snapshot(buffer.config(), values, arrays, buffer.rows())

    @property
    def columns(self) -> Arrays:
        """Tensors of the rows; empty without rows."""
        return {} if self.rows is None else self.rows.columns

    @property
    def nbytes(self) -> int:
        """Number of bytes of all arrays and rows."""
        return sum_bytes(self.arrays) + (0 if self.rows is None else self.rows.nbytes)
