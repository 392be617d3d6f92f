"""The files of a zarr store, in a folder or in a .zip; nothing outside of it is ever read."""

from __future__ import annotations

import os
import stat
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from relive.datasets.metadata import damage_named, part_of_budget, wrong

_MOST_FILES = 1 << 22
_DEEPEST = 16


class Kept:
    """The rows of the chunk that was decoded last, of each array of a store, within a number of bytes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._rows: dict[str, tuple[int, int, np.ndarray]] = {}

    def get(self, array: str, number: int, nbytes: int, make: Callable[[], np.ndarray]) -> np.ndarray:
        """The rows of an array's chunk, which `make` makes and which take `nbytes` bytes."""
        kept, _, rows = self._rows.get(array, (-1, 0, None))
        if kept == number and rows is not None:
            return rows
        self._rows.pop(array, None)
        if nbytes + sum(each for _, each, _ in self._rows.values()) > self._most:
            self._rows.clear()
        self._rows[array] = number, nbytes, make()
        return self._rows[array][2]


class Store(NamedTuple):
    """The files of a store by their names ("data/img/0.0.0.0")."""

    name: str
    nbytes: int
    """How many bytes the store has on the disk."""
    sizes: dict[str, int]
    body: Callable[[str, int], bytes]
    """Reads a file of this many bytes by its name."""
    kept: Kept

    def read(self, name: str, most: int) -> bytes:
        """A whole file; raises if it is longer than `most` bytes."""
        where = f"{self.name}: {name}"
        if self.sizes[name] > most:
            raise wrong(where, f"at most {most:,} bytes", f"{self.sizes[name]:,}")
        with damage_named(where, "a file that can be read"):
            body = self.body(name, self.sizes[name])
        if len(body) != self.sizes[name]:
            raise wrong(where, f"{self.sizes[name]} bytes", len(body))
        return body


@contextmanager
def opened(path: Path) -> Iterator[Store]:
    """The store in a folder or .zip."""
    if path.is_dir():
        sizes, body = dict(_files(path, path.name, "", 0)), _body_in(path)
        nbytes = sum(sizes.values())
        yield Store(path.name, nbytes, sizes, body, Kept(part_of_budget(nbytes)))
        return
    with damage_named(str(path), "a folder or a .zip with a zarr store"):
        archive, nbytes = zipfile.ZipFile(path), path.stat().st_size
    with archive:
        sizes = dict(_entries(path.name, archive))
        yield Store(path.name, nbytes, sizes, _body_of(archive), Kept(part_of_budget(nbytes)))


def _files(folder: Path, store: str, prefix: str, depth: int) -> Iterator[tuple[str, int]]:
    if depth > _DEEPEST:
        raise wrong(f"{store}: {prefix}", f"at most {_DEEPEST} folders inside each other", "more")
    with os.scandir(folder) as entries:
        found = [(entry.name, entry.stat(follow_symlinks=False)) for entry in islice(entries, _MOST_FILES + 1)]
    if len(found) > _MOST_FILES:
        raise wrong(f"{store}: {prefix}", f"at most {_MOST_FILES} files", "more")
    for name, about in found:
        if stat.S_ISDIR(about.st_mode):
            yield from _files(folder / name, store, f"{prefix}{name}/", depth + 1)
        elif stat.S_ISREG(about.st_mode):
            yield f"{prefix}{name}", about.st_size
        else:
            kind = "a link" if stat.S_ISLNK(about.st_mode) else "a device or pipe"
            raise wrong(f"{store}: {prefix}{name}", "a file of the store itself", kind)


def _body_in(folder: Path) -> Callable[[str, int], bytes]:
    def body(name: str, nbytes: int) -> bytes:
        with open(os.open(folder / name, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0)), "rb") as file:
            return file.read(nbytes + 1)

    return body


def _body_of(archive: zipfile.ZipFile) -> Callable[[str, int], bytes]:
    def body(name: str, nbytes: int) -> bytes:
        with archive.open(name) as file:  # archive.read would inflate up to 2 GiB before it looks at the size
            return file.read(nbytes) + file.read(1)

    return body


def _entries(name: str, archive: zipfile.ZipFile) -> Iterator[tuple[str, int]]:
    entries = archive.infolist()
    if len(entries) > _MOST_FILES or len(set(archive.namelist())) != len(entries):
        raise wrong(name, f"at most {_MOST_FILES} files with distinct names", len(entries))
    for entry in entries:
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise wrong(f"{name}: {entry.filename}", "an entry that is stored or deflated", entry.compress_type)
        if not entry.is_dir():
            yield entry.filename, entry.file_size
