"""The document that a checkpoint is: which files, how long, with which checksums, and what they mean."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from relive.storage.codec import (
    CHUNK,
    FORMAT,
    Array,
    Node,
    arrays_of,
    from_json,
    list_of,
    reader_of,
    to_json,
    unwrapped,
    version_of,
    wrapped,
)

_FILE = re.compile(r"[0-9]{8,19}(-[0-9]{1,9})?\.bin")
_LINEAGE = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class File:
    """A file that never changes."""

    name: str
    arrays: tuple[Array, ...]
    checksums: tuple[int, ...]

    @cached_property
    def nbytes(self) -> int:
        """Its length."""
        return sum(array.nbytes for array in self.arrays)


@dataclass(frozen=True)
class Manifest:
    """One checkpoint."""

    number: int
    lineage: str
    """Random; saves that go on from each other share it."""
    kind: str
    config: dict[str, Any]
    """How an equal, empty buffer is made."""
    values: dict[str, Any]
    """Numbers that change."""
    state: File
    segments: tuple[File, ...]

    @property
    def files(self) -> list[str]:
        """Everything it needs, as names below the root."""
        return [f"state/{self.state.name}", *(f"segments/{file.name}" for file in self.segments)]


def manifest_file(number: int) -> str:
    """The file of the manifest of this number."""
    return f"manifests/{number:08}.json"


def dump(manifest: Manifest) -> bytes:
    """The document as bytes: a line with its checksum, and strict JSON."""
    document = {
        "format": FORMAT,
        "number": manifest.number,
        "lineage": manifest.lineage,
        "kind": manifest.kind,
        "config": manifest.config,
        "values": manifest.values,
        "state": _plain(manifest.state),
        "segments": [_plain(file) for file in manifest.segments],
    }
    return wrapped(to_json(document))


def _plain(file: File) -> dict[str, Any]:
    return {"name": file.name, "arrays": list_of(file.arrays), "checksums": list(file.checksums)}


def parse(data: bytes, number: int) -> Manifest:
    """The manifest that `data` is; CorruptCheckpoint says what is wrong with it, and where."""
    where = manifest_file(number)
    version = version_of(where, data.partition(b"\n")[0])
    return reader_of(where, version, READERS)(where, data, number)


def _format_1(where: str, data: bytes, number: int) -> Manifest:
    document = from_json(where, unwrapped(where, data))
    if document.entry("format").integer() != 1:
        length = len(data.partition(b"\n")[0])
        raise document.entry("format").wrong(f"1, as its first line says (bytes 0 to {length})")
    if document.entry("number").integer() != number:
        raise document.entry("number").wrong(f"{number}, the number in the file name")
    config, values = document.entry("config"), document.entry("values")
    for part in (config, values):
        if not isinstance(part.value, dict):
            raise part.wrong("an object")
    segments = tuple(_file(segment) for segment in document.entry("segments").items())
    if len({segment.name for segment in segments}) != len(segments):
        raise document.entry("segments").wrong("every segment once")
    return Manifest(
        number,
        document.entry("lineage").text(_LINEAGE),
        document.entry("kind").text(),
        config.value,
        values.value,
        _file(document.entry("state")),
        segments,
    )


READERS: dict[int, Callable[[str, bytes, int], Manifest]] = {1: _format_1}
"""Who reads a manifest, by its format: `reader(where, data, number)`."""


def _file(node: Node) -> File:
    file = File(
        node.entry("name").text(_FILE),
        arrays_of(node.entry("arrays")),
        tuple(checksum.integer(0, 2**32 - 1) for checksum in node.entry("checksums").items()),
    )
    if len(file.checksums) != -(-file.nbytes // CHUNK):
        raise node.entry("checksums").wrong(f"one checksum per {CHUNK} bytes of {file.nbytes}")
    return file
