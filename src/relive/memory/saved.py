"""What a file claims to hold, checked before it is believed: one validator for everything that is read from a disk.

Checkpoints, commits of disk memory and the notes of shards all come this way. A document is at most `MOST_BYTES` of
strict JSON (`documents.Node` says what is wrong in it, and where). An array is read only when a buffer asks for it,
once its dtype and shape are known to be right: what nobody asks for takes no memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch

from relive.errors import CheckpointError, CorruptCheckpoint, IncompatibleCheckpoint, explain
from relive.fields.conversion import clean_bools
from relive.memory.documents import ARRAY_NAME, ITEM_BYTES, Array, Node
from relive.memory.space import available_bytes

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}

_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Arrays = dict[str, torch.Tensor]

Form = tuple[torch.dtype, tuple[int, ...]]
"""What an array is before it is read."""

Lengths = tuple[int | range | None, ...]
"""A shape whose axes may also have any length of a range, or any at all."""

MOST_OF_NOTE = 1 << 26
"""Bytes of a shard's note."""


class Source(Protocol):
    """Arrays by name, each of which is read when it is asked for."""

    where: str

    def form(self, name: str) -> Form | None:
        """The dtype and shape of an array, which is not read for it; None if there is none of this name."""
        ...

    def names(self, prefix: str) -> dict[str, int]:
        """The arrays whose names begin so, and their bytes."""
        ...

    @property
    def unread(self) -> list[str]:
        """What nobody has asked for."""
        ...

    def __getitem__(self, name: str) -> torch.Tensor: ...


class Given:
    """Tensors that a caller has in memory, as a source."""

    def __init__(self, where: str, tensors: Mapping[str, torch.Tensor]) -> None:
        self.where, self._tensors = where, tensors
        self._asked: set[str] = set()

        for name, x in tensors.items():
            is_plain = isinstance(x, torch.Tensor) and x.layout == torch.strided and x.device.type != "meta"
            if not isinstance(name, str) or not is_plain:
                got = f"{x.layout} on {x.device}" if isinstance(x, torch.Tensor) else type(x).__name__
                raise Node(f"{where}: {name}", got).wrong("a dense tensor with values")

    def form(self, name: str) -> Form | None:
        x = self._tensors.get(name)
        return None if x is None else (x.dtype, tuple(x.shape))

    def names(self, prefix: str) -> dict[str, int]:
        return {name: x.nbytes for name, x in self._tensors.items() if name.startswith(prefix)}

    @property
    def unread(self) -> list[str]:
        return [name for name in self._tensors if name not in self._asked]

    def __getitem__(self, name: str) -> torch.Tensor:
        self._asked.add(name)
        tensor = (
            self._tensors[name].detach().clone(memory_format=torch.contiguous_format)
        )  # the given one is the caller's
        return clean_bools(tensor)


class Stored:
    """The arrays of one file. `fill(offset, target)` copies bytes of it whose checksum was found right."""

    def __init__(self, where: str, arrays: Iterable[Array], fill: Callable[[int, memoryview], None]) -> None:
        self.where, self._fill = where, fill
        self._arrays: dict[str, tuple[Array, int]] = {}
        self._found: Arrays = {}
        offset = 0
        for array in arrays:
            self._arrays[array.name] = array, offset
            offset += array.nbytes
        self.nbytes = offset
        free = available_bytes()
        if free is not None and offset > free:
            remedy = "Load it where there is more memory."
            raise IncompatibleCheckpoint(explain(where, f"at most {free:,} bytes, the free memory", offset, remedy))

    def form(self, name: str) -> Form | None:
        """The dtype and shape of an array, which is not read for it; None if there is none of this name."""
        if name not in self._arrays:
            return None
        array = self._arrays[name][0]
        return DTYPES[array.dtype], array.shape

    def names(self, prefix: str) -> dict[str, int]:
        """The arrays whose names begin so, and their bytes."""
        return {name: x.nbytes for name, (x, _) in self._arrays.items() if name.startswith(prefix)}

    @property
    def unread(self) -> list[str]:
        """What nobody has asked for."""
        return [name for name in self._arrays if name not in self._found]

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._found:
            array, offset = self._arrays[name]
            tensor = torch.empty(array.shape, dtype=DTYPES[array.dtype], device="cpu")
            self._fill(offset, memory_of(tensor))
            require_flags(tensor, f"{self.where}: {name}")
            self._found[name] = tensor
        return self._found[name]


def dtype_name(dtype: torch.dtype) -> str:
    """What files call a dtype."""
    return _NAMES[dtype]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor, its own memory where that is the host's and in one piece."""
    if sys.byteorder != "little":
        raise CheckpointError(
            explain("save", "a little-endian machine", sys.byteorder, "Save on a little-endian machine.")
        )
    whole = tensor.detach().cpu().contiguous()
    # An axis of length one may have any stride, which a view of bytes minds: say that memory is in one piece.
    flat = whole.as_strided((whole.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def array_of(name: str, tensor: torch.Tensor) -> Array:
    """How a file describes a tensor."""
    if not ARRAY_NAME.fullmatch(name):
        remedy = "Rename it in the state() of the sampler."
        raise CheckpointError(explain("save", f"names of arrays like {ARRAY_NAME.pattern}", repr(name), remedy))
    return Array(name, dtype_name(tensor.dtype), tuple(tensor.shape))


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a tensor on the host, to be written."""
    if not tensor.numel():
        return memoryview(bytearray())
    return tensor.view(-1).view(torch.uint8).numpy().data


def require_flags(tensor: torch.Tensor, where: str) -> None:
    """A byte that is neither 0 nor 1 is no bool, and kernels may do anything with it."""
    if tensor.dtype != torch.bool or not tensor.numel():
        return
    largest = int(tensor.view(torch.uint8).numpy().max())  # of numpy: a parallel operation waits for busy cores
    if largest > 1:
        raise CorruptCheckpoint(explain(where, "bools of 0 and 1", largest, "Copy it again."))


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
    """What a document holds of it, as JSON."""
    arrays: Arrays
    """Tensors by name; they may share the part's memory."""

    @staticmethod
    def of_parts(parts: Mapping[str, tuple[dict[str, Any], Arrays]]) -> State:
        """The states of parts as one: `values` by part, arrays under the names `part.name`."""
        named = {f"{name}.{key}": x for name, (_, arrays) in parts.items() for key, x in arrays.items()}
        return State({name: values for name, (values, _) in parts.items()}, named)


class Part(Protocol):
    """What every part of a buffer is to whoever saves it. Checkpoints, disk memory and pickles are made of these."""

    def config(self) -> Any:
        """How an equal part that has seen nothing is made, as JSON."""
        ...

    def state(self) -> tuple[dict[str, Any], Arrays]:
        """Everything that changes, as a `State`; the tensors may share memory."""
        ...

    def load_state(self, saved: Saved) -> None:
        """Become what was saved; a CorruptCheckpoint says what no such part can have been."""
        ...

    def check(self) -> None:
        """Verify every invariant; raises an InvariantError for the first that does not hold, and changes nothing."""
        ...


class Saved:
    """The state of a part as a file claims it: values and arrays, each verified when it is asked for."""

    def __init__(self, values: Node, arrays: Source, prefix: str = "", *, config: Node | None = None) -> None:
        self.values, self._arrays, self._prefix = values, arrays, prefix
        self.config = Node("config", {}) if config is None else config
        """That of the saved part."""
        self.is_moved = False
        """The part is on another device than the saved one was."""
        self.segments: Mapping[str, tuple[Array, ...]] = {}
        """The arrays of each file of rows: which rows, and then their columns."""

    def require_columns(self, columns: Mapping[str, Form]) -> None:
        """The segments hold rows of just these columns, so that no memory is asked for rows that are only claimed."""
        wanted = [(name, *form) for name, form in columns.items()]
        for where, arrays in self.segments.items():
            found = [(array.name, DTYPES[array.dtype], array.shape[1:]) for array in arrays[2:]]
            if found != wanted:
                odd = next((got for got in found if got not in wanted), f"{len(found)} of {len(wanted)} columns")
                raise Node(where, odd).wrong("the columns that the manifest declares")

    def part(self, name: str) -> Saved:
        """The state of a part of this part."""
        return self._part(name, self.values.entry(name))

    def part_without_values(self, name: str) -> Saved:
        """The state of a part that has arrays only."""
        return self._part(name, Node((self.values, f": {name}"), {}))

    def _part(self, name: str, values: Node) -> Saved:
        part = Saved(values, self._arrays, f"{self._prefix}{name}.")
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
            raise self.at(largest.removeprefix(self._prefix), f"{sizes[largest]:,}").wrong(f"at most {most:,} bytes")
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
        raise self.at(name).wrong(f"an array of {'leading ' if only_lead else ''}shape {shape}")

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
            raise self.at(name).wrong(f"{dtype}")

    def arrays_like(self, targets: Mapping[str, torch.Tensor]) -> Arrays:
        """Copies of the arrays of these names, each just as its target is and where that is."""
        return {name: self.array(name, like).to(like.device, copy=True) for name, like in targets.items()}

    def copy_into(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Fill tensors with the arrays of their names."""
        for name, target in targets.items():
            target.copy_(self.array(name, target))

    def finish(self, what: str) -> None:
        """Every array was asked for."""
        if self._arrays.unread:
            raise self.at(self._arrays.unread[0]).wrong(f"no other array than those of a {what}")


def _is_one_of(length: int, want: int | range | None) -> bool:
    return want is None or (length in want if isinstance(want, range) else length == want)


def nbytes_of(arrays: Mapping[str, torch.Tensor]) -> int:
    """The bytes of tensors, for a limit."""
    return sum(x.nbytes for x in arrays.values())
