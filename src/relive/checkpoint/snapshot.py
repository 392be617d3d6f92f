"""The state of a buffer and of its parts, and a reader of what a file claims it to be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from relive.checkpoint.rows import Rows
from relive.errors import CorruptCheckpoint, IncompatibleCheckpoint
from relive.storage.codec import DTYPES, ArrayInfo, Arrays, ArraySource, Form, Node, TensorArrays, memory_of

Lengths = tuple[int | range | None, ...]
"""A shape whose axes may also have any length of a range, or any at all."""

MOST_OF_NOTE = 1 << 26
"""Bytes of a shard's note."""


@contextmanager
def named(file: str) -> Iterator[None]:
    """Errors that are raised here name the file."""
    try:
        yield
    except (CorruptCheckpoint, IncompatibleCheckpoint) as error:
        if file.rpartition("/")[2].partition(".")[0] in str(error):
            raise
        raise type(error)(f"{file}: {error}") from error.__cause__


class State(NamedTuple):
    """Everything about a part of a buffer that changes."""

    values: dict[str, Any]
    """The numbers and names, as JSON."""
    arrays: Arrays
    """Tensors by name; they may share the part's memory."""

    @staticmethod
    def of_parts(parts: Mapping[str, tuple[dict[str, Any], Arrays]]) -> State:
        """The states of parts as one: `values` by part, arrays under the names `part.name`."""
        named = {f"{name}.{key}": x for name, (_, arrays) in parts.items() for key, x in arrays.items()}
        return State({name: values for name, (values, _) in parts.items()}, named)


class Part(Protocol):
    """A part of a buffer that can be saved. Checkpoints, disk memory and pickles are made of these."""

    def config(self) -> Any:
        """How an equal part that has seen nothing is made, as JSON."""
        ...

    def state(self) -> tuple[dict[str, Any], Arrays]:
        """Everything that changes, as a `State`; the tensors may share memory."""
        ...

    def load_state(self, saved: SnapshotReader) -> None:
        """Become what was saved; a CorruptCheckpoint says what no such part can have been."""
        ...

    def check(self) -> None:
        """Verify every invariant; raises an InvariantError for the first that does not hold, and changes nothing."""
        ...


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

    def require_columns(self, columns: Mapping[str, Form]) -> None:
        """The segments hold rows of just these columns, so that no memory is asked for rows that are only claimed."""
        wanted = [(name, *form) for name, form in columns.items()]
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

    def form(self, name: str) -> Form | None:
        """The dtype and shape of an array, which is not read for it; None if there is none of this name."""
        return self._arrays.form(self._prefix + name)

    def tensor(self, name: str) -> torch.Tensor:
        """An array that was required to be as it is."""
        return self._arrays[self._prefix + name]

    def tensors(self, most: int) -> Arrays:
        """All arrays of this part, if they have at most so many bytes together."""
        sizes = self._arrays.names(self._prefix)
        if sum(sizes.values()) > most:
            largest = max(sizes, key=lambda one: sizes[one])
            raise self.at(largest.removeprefix(self._prefix), f"{sizes[largest]:,}").error(f"at most {most:,} bytes")
        return {name.removeprefix(self._prefix): self._arrays[name] for name in sizes}

    def at(self, name: str, got: Any = None) -> Node:
        """An array as the place of an error."""
        if got is None:
            form = self.form(name)
            got = None if form is None else f"{form[0]} of shape {form[1]}"
        return Node(f"{self._arrays.where}: {self._prefix}{name}", got)

    def require(self, name: str, lead: Lengths, *, only_lead: bool = True) -> Form:
        """Refuse a size that is only claimed: an array of the state must begin with these axes."""
        form = self.form(name)
        shape = () if form is None else form[1]
        has_axes = form is not None and (len(shape) >= len(lead) if only_lead else len(shape) == len(lead))
        if form is not None and has_axes and all(map(_is_one_of, shape, lead)):
            return form
        shape = tuple("any" if want is None else want for want in lead)
        raise self.at(name).error(f"an array of {'leading ' if only_lead else ''}shape {shape}")

    def array(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """An array of the state that must be just as `like` is."""
        return self.shaped(name, tuple(like.shape), like.dtype)

    def shaped(self, name: str, shape: Lengths, dtype: torch.dtype) -> torch.Tensor:
        """An array of the state that must have this dtype and shape."""
        self.require_form(name, shape, dtype)
        return self.tensor(name)

    def require_form(self, name: str, shape: Lengths, dtype: torch.dtype) -> None:
        """An array of the state, which is not read for it, must have this dtype and shape."""
        if self.require(name, shape, only_lead=False)[0] != dtype:
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


def _is_one_of(length: int, want: int | range | None) -> bool:
    return want is None or (length in want if isinstance(want, range) else length == want)


def nbytes_of(arrays: Mapping[str, torch.Tensor]) -> int:
    """The bytes of tensors, for a limit."""
    return sum(x.nbytes for x in arrays.values())


KINDS: dict[str, Any] = {}
"""The buffers that can be saved, by the word for each in files.

Each is a `Part` that the classmethod `from_config(config, saved, **changes)` makes anew; its `rows()` are written once.
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
        return nbytes_of(self.arrays) + (0 if self.rows is None else self.rows.nbytes)

    def reader(self) -> SnapshotReader:
        """A reader of it that trusts nothing."""
        return SnapshotReader(
            Node("values", self.values), TensorArrays("state", self.arrays), config=Node("config", self.config)
        )
