"""The state of a buffer and of its parts, and a reader of what a file claims it to be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch

from relive.schema.conversion import bits_of
from relive.storage.codec import (
    DTYPES,
    ArrayInfo,
    Arrays,
    ArraySource,
    ArraySpec,
    Node,
    arrays_in_memory,
    bytes_of,
    dtype_name,
    memory_of,
)

MAX_NOTE_BYTES = 1 << 26
"""Bytes of a shard's note."""


class State(NamedTuple):
    """Everything about a part of a buffer that changes."""

    values: dict[str, Any]
    """The row_numbers and names, as JSON."""
    arrays: Arrays
    """Tensors by name; they may share the part's memory."""

    @staticmethod
    def of_parts(parts: Mapping[str, tuple[dict[str, Any], Arrays]]) -> State:
        """The states of parts as one: `values` by part, arrays under the names `part.name`."""
        named = {f"{name}.{key}": x for name, (_, arrays) in parts.items() for key, x in arrays.items()}
        return State({name: values for name, (values, _) in parts.items()}, named)


class SnapshotReader:
    """The state of a part as a file claims it: values and arrays, each verified when it is asked for."""

    def __init__(self, values: Node, arrays: ArraySource, prefix: str = "", *, config: Node | None = None) -> None:
        self.values, self._arrays, self._prefix = values, arrays, prefix
        self.config = Node("config", {}) if config is None else config
        """That of the saved part."""
        self.is_moved = False
        """The part is on another device than the saved one was."""
        self.segments: Mapping[str, tuple[ArrayInfo, ...]] = {}
        """The arrays of each file of rows: which rows, and then their columns."""

    @classmethod
    def of(cls, where: str, config: dict[str, Any], values: dict[str, Any], arrays: ArraySource) -> SnapshotReader:
        """The state of a whole buffer as the document `where` claims it."""
        return cls(Node(f"{where}: values", values), arrays, config=Node(f"{where}: config", config))

    def require_columns(self, columns: Mapping[str, ArraySpec]) -> None:
        """The segments hold rows of just these columns, so that no memory is asked for rows that are only claimed."""
        wanted = [(name, *spec) for name, spec in columns.items()]
        for where, arrays in self.segments.items():
            found = [(array.name, DTYPES[array.dtype], array.shape[1:]) for array in arrays[2:]]
            if found != wanted:
                odd = next((got for got in found if got not in wanted), f"{len(found)} of {len(wanted)} columns")
                raise Node(where, odd).error("the columns that the manifest declares")

    def part(self, name: str) -> SnapshotReader:
        """The state of a part of this part."""
        return self._part(name, self.values.entry(name))

    def part_without_values(self, name: str) -> SnapshotReader:
        """The state of a part that has arrays only."""
        return self._part(name, Node((self.values, name), {}))

    def _part(self, name: str, values: Node) -> SnapshotReader:
        part = SnapshotReader(values, self._arrays, f"{self._prefix}{name}.")
        part.is_moved = self.is_moved
        return part

    def spec(self, name: str) -> ArraySpec | None:
        """The dtype and shape of an array, which is not read for it; None if there is none of this name."""
        return self._arrays.spec(self._prefix + name)

    def tensor(self, name: str) -> torch.Tensor:
        """An array that was required to be as it is."""
        return self._arrays[self._prefix + name]

    def tensors(self, most: int) -> Arrays:
        """All arrays of this part, if they have at most so many bytes together."""
        sizes = self._arrays.sizes(self._prefix)
        if sum(sizes.values()) > most:
            largest = max(sizes, key=lambda one: sizes[one])
            raise self.at(largest.removeprefix(self._prefix), f"{sizes[largest]:,}").error(f"at most {most:,} bytes")
        return {name.removeprefix(self._prefix): self._arrays[name] for name in sizes}

    def at(self, name: str, got: Any = None) -> Node:
        """An array as the place of an error."""
        if got is None:
            spec = self.spec(name)
            got = None if spec is None else f"{spec[0]} of shape {spec[1]}"
        return Node(f"{self._arrays.where}: {self._prefix}{name}", got)

    def require(self, name: str, leading: tuple[int | range | None, ...], *, only_leading: bool = True) -> ArraySpec:
        """Refuse a size that is only claimed: an array of the state must begin with these axes.

        An axis may have one length, one of a range, or (None) any.
        """
        spec = self.spec(name)
        shape = () if spec is None else spec[1]
        has_axes = spec is not None and (len(shape) >= len(leading) if only_leading else len(shape) == len(leading))
        if spec is not None and has_axes and all(map(_matches, shape, leading)):
            return spec
        shape = tuple("any" if want is None else want for want in leading)
        raise self.at(name).error(f"an array of {'leading ' if only_leading else ''}shape {shape}")

    def array(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """An array of the state that must be just as `like` is."""
        return self.shaped(name, tuple(like.shape), like.dtype)

    def shaped(self, name: str, shape: tuple[int | range | None, ...], dtype: torch.dtype) -> torch.Tensor:
        """An array of the state that must have this dtype and shape."""
        self.require_spec(name, shape, dtype)
        return self.tensor(name)

    def require_spec(self, name: str, shape: tuple[int | range | None, ...], dtype: torch.dtype) -> None:
        """An array of the state, which is not read for it, must have this dtype and shape."""
        if self.require(name, shape, only_leading=False)[0] != dtype:
            raise self.at(name).error(f"{dtype}")

    def arrays_like(self, targets: Mapping[str, torch.Tensor]) -> Arrays:
        """Copies of the arrays of these names, each just as its target is and where that is."""
        return {name: self.array(name, like).to(like.device, copy=True) for name, like in targets.items()}

    def copy_into(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Fill tensors with the arrays of their names."""
        for name, target in targets.items():
            array = self.array(name, target)
            if target.is_cpu and target.is_contiguous():
                memory_of(target)[:] = memory_of(array)  # a parallel operation of torch waits for busy cores
            else:
                target.copy_(array)

    def finish(self, what: str) -> None:
        """Every array was asked for."""
        if self._arrays.unread:
            raise self.at(self._arrays.unread[0]).error(f"no other array than those of a {what}")


def _matches(length: int, want: int | range | None) -> bool:
    return want is None or (length in want if isinstance(want, range) else length == want)


def total_bytes(arrays: Mapping[str, torch.Tensor]) -> int:
    """The bytes of tensors, for a limit."""
    return sum(x.nbytes for x in arrays.values())


_COPY_BYTES = 1 << 22
"""Bytes that are copied at once where memory cannot be written as it lies."""


@dataclass
class Rows:
    """Rows that never change once they are written: columns `[slots, N, …]`, row r of an environment at r mod slots.

    In memory are the rows `first[e]` to `stop[e]` of each environment e.
    """

    columns: Arrays
    first: torch.Tensor
    stop: torch.Tensor

    @property
    def slots(self) -> int:
        """How many rows of an environment there is room for."""
        return len(next(iter(self.columns.values())))

    def since(self, saved: torch.Tensor) -> Rows:
        """The rows from `saved[e]` on."""
        return Rows(self.columns, torch.minimum(torch.maximum(self.first, saved), self.stop), self.stop)

    def __len__(self) -> int:
        return int((self.stop - self.first).sum())

    @property
    def nbytes(self) -> int:
        """The bytes of all columns together."""
        return sum(len(self) * column[0, 0].nbytes for column in self.columns.values())

    @property
    def arrays(self) -> tuple[ArrayInfo, ...]:
        """The arrays of a segment: which rows, and their columns."""
        envs, count = len(self.first), len(self)
        bounds = tuple(ArrayInfo(name, "int64", (envs,)) for name in ("first", "stop"))
        return bounds + tuple(
            ArrayInfo(name, dtype_name(column.dtype), (count, *column.shape[2:]))
            for name, column in self.columns.items()
        )

    def parts(self) -> Iterator[memoryview]:
        """Their bytes, without a copy where the rows of all environments lie in one piece."""
        yield bytes_of(self.first)
        yield bytes_of(self.stop)
        pieces = self.pieces()
        for column in self.columns.values():
            flat = bits_of(column.flatten(0, 1))
            for piece in pieces:
                yield bytes_of(flat[piece])

    def pieces(self) -> list[Any]:
        """Slots of the rows in columns `[slots · N, …]`, in the order of a segment: by time if all environments have
        the same rows, else by environment."""
        envs, slots, step = len(self.first), self.slots, self.step
        if self.is_even:
            first, stop = int(self.first[0]), int(self.stop[0])
            edges = sorted({first, stop, *range(first - first % slots + slots, stop, slots)})
            runs = [(a % slots * envs, (b - a) * envs) for a, b in pairwise(edges)]
            return [slice(at + i, at + min(i + step, size)) for at, size in runs for i in range(0, size, step)]
        return list(self.places(slots).split(step))

    @property
    def step(self) -> int:
        """How many rows are copied at once."""
        widest = max(column[0, 0].nbytes for column in self.columns.values())
        return max(_COPY_BYTES // max(widest, 1), 1)

    @property
    def is_even(self) -> bool:
        """All environments have the same rows."""
        return bool((self.first == self.first[0]).all() and (self.stop == self.stop[0]).all())

    def row_numbers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The row and the environment of each, in the order of a segment."""
        envs = torch.arange(len(self.first), device="cpu")
        if self.is_even:
            rows = torch.arange(int(self.first[0]), int(self.stop[0]), device="cpu")
            return rows.repeat_interleave(len(envs)), envs.repeat(len(rows))
        sizes = self.stop - self.first
        env = envs.repeat_interleave(sizes)
        return torch.arange(len(env), device="cpu") - (sizes.cumsum(0) - sizes - self.first)[env], env

    def places(self, slots: int) -> torch.Tensor:
        """Their flat slots in columns of `slots`."""
        row, env = self.row_numbers()
        return row % slots * len(self.first) + env


KINDS: dict[str, Any] = {}
"""The buffers that can be saved, by the word for each in files.

Each has, as its parts have: `config()`, how an equal one that has seen nothing is made, as JSON; `state()`, everything
that changes, as a `State`; `load_state(saved)`, which becomes what was saved, or raises a CorruptCheckpoint; `check()`,
which raises an InvariantError for what no such part can be. The classmethod `from_config(config, saved, **changes)`
makes an empty buffer, and `rows()` are those that are written once.
"""

Kind = TypeVar("Kind")


def savable(kind: type[Kind]) -> type[Kind]:
    """Class decorator: `save` and `load` know this buffer by its name."""
    KINDS[kind.__name__] = kind
    return kind


class Snapshot(NamedTuple):
    """A whole buffer: how an equal, empty one is made, everything that changes, and the rows that never do."""

    config: dict[str, Any]
    values: dict[str, Any]
    arrays: Arrays
    rows: Rows | None

    @staticmethod
    def of(buffer: Any) -> Snapshot:
        """The snapshot of a buffer, whose memory it shares. The caller holds the buffer's lock."""
        values, arrays = buffer.state()
        return Snapshot(buffer.config(), values, arrays, buffer.rows())

    @property
    def columns(self) -> Arrays:
        """The tensors of the rows."""
        return {} if self.rows is None else self.rows.columns

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays and rows."""
        return total_bytes(self.arrays) + (0 if self.rows is None else self.rows.nbytes)

    def reader(self) -> SnapshotReader:
        """A reader of it that trusts nothing."""
        return SnapshotReader(
            Node("values", self.values), arrays_in_memory("state", self.arrays), config=Node("config", self.config)
        )
