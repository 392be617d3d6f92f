"""What a commit says: where the rings were, and everything about a buffer that is not in its arrays.

There are two files for it, written in turn: while one is being written, the other is whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from relive.checkpoint.contents import DTYPES, Arrays, Read, array_of, bytes_of
from relive.checkpoint.files import Files
from relive.checkpoint.manifest import Node, arrays_of, from_json, list_of, to_json, unwrapped, wrapped
from relive.errors import CorruptCheckpoint, explain
from relive.samplers import Counted, Prioritized

NAMES = ("commit0", "commit1")
_MOST_BYTES = 1 << 30
"""No record is longer."""


BESIDE_ROWS = (Prioritized, Counted)
"""Samplers whose numbers have files of their own."""


@dataclass(frozen=True)
class Record:
    """One commit."""

    number: int
    boot: str
    """Which run of the machine wrote it."""
    is_closed: bool
    """Nothing was written since."""
    reach: int
    """How many rows an environment may have got since, at most."""
    marks: int
    """The checksum of what each slot held."""
    checksum: int
    """That of all arrays that are no rows, where it is closed."""
    config: dict[str, Any]
    values: dict[str, Any]
    arrays: Arrays

    @property
    def name(self) -> str:
        """The file that it is in."""
        return NAMES[self.number % 2]

    @property
    def read(self) -> Read:
        """The same for those who put a buffer together again."""
        return Read(Node(f"{self.name}: config", self.config), Node(f"{self.name}: values", self.values), self.arrays)


def dump(record: Record) -> bytes:
    """A record as bytes: a line with a checksum, a line of JSON, and arrays."""
    document = {
        "number": record.number,
        "boot": record.boot,
        "closed": record.is_closed,
        "reach": record.reach,
        "marks": record.marks,
        "checksum": record.checksum,
        "config": record.config,
        "values": record.values,
        "arrays": list_of(array_of(name, array) for name, array in record.arrays.items()),
    }
    return wrapped(b"\n".join([to_json(document), b"".join(map(bytes_of, record.arrays.values()))]))


def parse(where: str, data: bytes) -> Record:
    """The record that `data` is."""
    head, _, rest = unwrapped(where, data).partition(b"\n")
    node = from_json(where, head)
    described = arrays_of(node.entry("arrays"))
    if sum(array.nbytes for array in described) != len(rest):
        raise node.entry("arrays").wrong(f"arrays of {len(rest)} bytes")
    arrays: Arrays = {}
    for array in described:
        piece, rest = bytearray(rest[: array.nbytes]), rest[array.nbytes :]
        if array.dtype == "bool" and any(byte > 1 for byte in piece):
            raise CorruptCheckpoint(explain(f"{where}: {array.name}", "bools of 0 and 1", max(piece), "Copy it again."))
        flat = (
            torch.frombuffer(piece, dtype=DTYPES[array.dtype]) if piece else torch.empty(0, dtype=DTYPES[array.dtype])
        )
        arrays[array.name] = flat.view(array.shape)
    config, values = node.entry("config"), node.entry("values")
    for part in (config, values):
        if not isinstance(part.value, dict):
            raise part.wrong("an object")
    return Record(
        node.entry("number").integer(1),
        str(node.entry("boot").value),
        node.entry("closed").flag(),
        node.entry("reach").integer(1),
        node.entry("marks").integer(0, 2**32 - 1),
        node.entry("checksum").integer(0, 2**32 - 1),
        config.value,
        values.value,
        arrays,
    )


def newest(root: Path) -> Record:
    """The last commit that is whole."""
    found: list[Record] = []
    wrong: list[str] = []
    for name in NAMES:
        try:
            record = parse(name, _bytes_in(Files(root), name))
            if record.name != name:
                raise CorruptCheckpoint(explain(name, "the commit of this name", record.name, "Copy it again."))
            found.append(record)
        except CorruptCheckpoint as error:
            wrong.append(str(error))  # the error itself would keep alive whoever asked
    if not found:
        raise CorruptCheckpoint(wrong[0])
    return max(found, key=lambda record: record.number)


def _bytes_in(files: Files, name: str) -> bytes:
    try:
        file = files.open(name)
        try:
            data = files.read(file, _MOST_BYTES + 1)
        finally:
            files.close(file)
    except OSError as error:
        raise CorruptCheckpoint(explain(name, "a file that can be read", error, "Copy it again.")) from error
    if len(data) > _MOST_BYTES:
        raise CorruptCheckpoint(explain(name, f"at most {_MOST_BYTES} bytes", "a longer file", "Copy it again."))
    return data
