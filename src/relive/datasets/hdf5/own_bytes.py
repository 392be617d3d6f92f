"""A check of untrusted HDF5 files before they are read: all of their data must lie in the file itself."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from relive.datasets.metadata import damage_named, wrong
from relive.memory.space import available_bytes

_DEEPEST = 64
"""The most groups inside each other."""


def require_own_bytes(path: Path, *, is_read_whole: bool = True) -> None:
    """Raise unless all arrays of a file lie in it: no links, no external or virtual data, no cycles, no missing bytes.

    HDF5 follows links and external data by itself: an untrusted dataset could read any file of this machine into a
    buffer, or claim an array of terabytes.

    Args:
        path: the file.
        is_read_whole: whether every array must fit into memory; otherwise only every chunk must.
    """
    import h5py  # noqa: PLC0415 (an extra)

    free = available_bytes()
    with damage_named(str(path), "an HDF5 file that can be read"), h5py.File(path, "r") as file:
        met: set[Any] = set()
        for name, found in _objects(h5py, file, path, met):
            if isinstance(found, h5py.Dataset):
                _require_bytes(f"{path.name}: {name}", found, free, is_read_whole)


def _objects(h5py: Any, file: Any, path: Path, met: set[Any]) -> Iterator[tuple[str, Any]]:
    """Yield (name, object) for every object below the root; raises if the objects do not form a tree."""
    groups: list[tuple[str, Any, int]] = [("", file, 0)]
    met.add(_address(h5py, file))
    while groups:
        prefix, group, depth = groups.pop()
        for key in group:
            name = f"{prefix}/{key}"
            where = f"{path.name}: {name}"
            link = group.get(key, getlink=True)
            if not isinstance(link, h5py.HardLink):
                raise wrong(where, "an object of this file", f"a link to {_target(link)}")
            found = group[key]
            address = _address(h5py, found)
            if address in met or depth == _DEEPEST:
                raise wrong(where, "a tree of objects", "an object met twice, or groups nested too deeply")
            met.add(address)
            yield name, found
            if isinstance(found, h5py.Group):
                groups.append((name, found, depth + 1))


def _address(h5py: Any, found: Any) -> Any:
    info = h5py.h5o.get_info(found.id)
    return info.fileno, info.addr


def _target(link: Any) -> str:
    return repr(f"{getattr(link, 'filename', '')}:{link.path}".removeprefix(":"))


def _require_bytes(where: str, dataset: Any, free: int | None, is_read_whole: bool) -> None:
    if dataset.is_virtual:
        raise wrong(where, "data of its own", "a virtual dataset, which consists of other files")
    if dataset.external:
        raise wrong(where, "data of its own", f"external data in {dataset.external[0][0]!r}")
    if not dataset.shape or not math.prod(dataset.shape):
        return
    nbytes = math.prod(dataset.shape) * dataset.dtype.itemsize
    at_once = nbytes if is_read_whole else math.prod(dataset.chunks or ()) * dataset.dtype.itemsize
    if free is not None and at_once > free:
        raise wrong(where, f"at most {free:,} bytes, the free memory", f"{at_once:,}")
    if dataset.chunks is None:
        is_there = dataset.id.get_storage_size() >= nbytes
    else:
        chunks = math.prod(-(-size // chunk) for size, chunk in zip(dataset.shape, dataset.chunks, strict=True))
        is_there = dataset.id.get_num_chunks() == chunks
    if not is_there:
        got = f"shape {dataset.shape} with fewer stored bytes"
        raise wrong(where, f"{nbytes:,} bytes", got)
