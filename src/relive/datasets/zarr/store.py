"""The files of a zarr store, in a folder or in a .zip; nothing outside of it is ever read."""

from __future__ import annotations

import os
import stat
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from relive.datasets.metadata import wrong
from relive.errors import SchemaError, explain

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
        try:
            body = self.body(name)
        except (OSError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError) as error:
            raise SchemaError(explain(where, "a file that can be read", error, "Copy it again.")) from error
        if len(body) != self.sizes[name]:
            raise wrong(where, f"{self.sizes[name]} bytes", len(body))
        return body


@contextmanager
def opened(path: Path) -> Iterator[Store]:
    """The store in a folder or .zip."""
    if path.is_dir():
        yield Store(path.name, dict(_files(path, "", 0)), lambda name: _own_bytes(path / name))
        return
    try:
        archive = zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile) as error:
        expected = "a folder or a .zip with a zarr store"
        raise SchemaError(explain(str(path), expected, error, "Pass the path of a store.")) from error
    with archive:
        yield Store(path.name, dict(_entries(path.name, archive)), archive.read)


def _files(folder: Path, prefix: str, depth: int) -> Iterator[tuple[str, int]]:
    if depth > _DEEPEST:
        raise wrong(f"{folder.name}: {prefix}", f"at most {_DEEPEST} folders inside each other", "more")
    for number, entry in enumerate(os.scandir(folder)):
        found, name = entry.stat(follow_symlinks=False), f"{prefix}{entry.name}"
        if stat.S_ISDIR(found.st_mode):
            yield from _files(folder / entry.name, f"{name}/", depth + 1)
        elif not stat.S_ISREG(found.st_mode):
            kind = "a link" if entry.is_symlink() else "a device or pipe"
            raise wrong(f"{folder.name}: {name}", "a file of the store itself", kind)
        elif number >= _MOST_FILES:
            raise wrong(f"{folder.name}: {prefix}", f"at most {_MOST_FILES} files", "more")
        else:
            yield name, found.st_size


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
