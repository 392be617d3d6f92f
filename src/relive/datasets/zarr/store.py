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

from relive.datasets.metadata import damage_named, wrong

_MOST_FILES = 1 << 22
_DEEPEST = 16


class Store(NamedTuple):
    """The files of a store by their names ("data/img/0.0.0.0")."""

    name: str
    sizes: dict[str, int]
    body: Callable[[str], bytes]
    """Reads a file by its name."""

    def read(self, name: str, most: int) -> bytes:
        """A whole file; raises if it is longer than `most` bytes."""
        where = f"{self.name}: {name}"
        if self.sizes[name] > most:
            raise wrong(where, f"at most {most:,} bytes", f"{self.sizes[name]:,}")
        with damage_named(where, "a file that can be read"):
            body = self.body(name)
        if len(body) != self.sizes[name]:
            raise wrong(where, f"{self.sizes[name]} bytes", len(body))
        return body


@contextmanager
def opened(path: Path) -> Iterator[Store]:
    """The store in a folder or .zip."""
    if path.is_dir():
        yield Store(path.name, dict(_files(path, path.name, "", 0)), lambda name: _own_bytes(path / name))
        return
    with damage_named(str(path), "a folder or a .zip with a zarr store"):
        archive = zipfile.ZipFile(path)
    with archive:
        yield Store(path.name, dict(_entries(path.name, archive)), archive.read)


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


def _own_bytes(path: Path) -> bytes:
    with open(os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0)), "rb") as file:
        return file.read()


def _entries(name: str, archive: zipfile.ZipFile) -> Iterator[tuple[str, int]]:
    entries = archive.infolist()
    if len(entries) > _MOST_FILES or len(set(archive.namelist())) != len(entries):
        raise wrong(name, f"at most {_MOST_FILES} files with distinct names", len(entries))
    for entry in entries:
        if not entry.is_dir():
            yield entry.filename, entry.file_size
