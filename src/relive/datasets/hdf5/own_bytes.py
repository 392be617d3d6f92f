"""A check of untrusted HDF5 files before they are read: all of their data must lie in the file itself."""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from relive.datasets.metadata import damage_named, part_of_budget, wrong

_DEEPEST = 64
"""The most groups inside each other."""
_GZIP, _SHUFFLE, _CHECKSUM, _LZF = 1, 2, 3, 32000
_EXPANSIONS = {_GZIP: 1032, _LZF: 90}
"""The compressors that are read, with the most bytes that one compressed byte can become."""


def require_own_bytes(path: Path, *, is_read_in_groups: bool = False) -> int:
    """Raise unless all arrays of a file lie in it, and take little memory; returns how many arrays there are.

    HDF5 follows links and external data by itself: an untrusted dataset could read any file of this machine into a
    buffer, or claim an array of terabytes. So links, external and virtual data, cycles, missing bytes, bytes of several
    arrays, and chunks that inflate to more than they should are refused.

    Args:
        path: the file.
        is_read_in_groups: whether all arrays of a group of the root are read at once, and must fit into the budget.
    """
    import h5py  # noqa: PLC0415 (an extra)

    with damage_named(str(path), "an HDF5 file that can be read"), h5py.File(path, "r", rdcc_nbytes=0) as file:
        nbytes, stored, arrays, met = path.stat().st_size, 0, 0, set[Any]()
        group_bytes: Counter[str] = Counter()
        for name, found in _objects(h5py, file, path, met):
            where = f"{path.name}: {name}"
            _require_small_attributes(h5py, where, found)
            if isinstance(found, h5py.Dataset):
                _require_bytes(where, found, nbytes)
                if found.dtype.hasobject:
                    _require_own_texts(h5py, where, found, nbytes)
                arrays += 1
                group_bytes[name.split("/")[1]] += math.prod(found.shape or ()) * found.dtype.itemsize
                if is_read_in_groups and group_bytes[name.split("/")[1]] > part_of_budget(nbytes):
                    raise wrong(where, f"groups of at most {part_of_budget(nbytes):,} bytes", "more")
                stored += found.id.get_storage_size()
                if stored > nbytes:
                    raise wrong(where, f"bytes of its own, in a file of {nbytes:,}", f"{stored:,} in all arrays")
    return arrays


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


def _require_bytes(where: str, dataset: Any, file_bytes: int) -> None:
    if dataset.is_virtual:
        raise wrong(where, "data of its own", "a virtual dataset, which consists of other files")
    if dataset.external:
        raise wrong(where, "data of its own", f"external data in {dataset.external[0][0]!r}")
    if not dataset.shape or not math.prod(dataset.shape):
        return
    nbytes = math.prod(dataset.shape) * dataset.dtype.itemsize
    if dataset.chunks is None:
        is_there = dataset.id.get_storage_size() >= nbytes
    else:
        chunks = math.prod(-(-size // chunk) for size, chunk in zip(dataset.shape, dataset.chunks, strict=True))
        is_there = dataset.id.get_num_chunks() == chunks
        _require_small_chunks(where, dataset, part_of_budget(file_bytes) // 2)
    if not is_there:
        got = f"shape {dataset.shape} with fewer stored bytes"
        raise wrong(where, f"{nbytes:,} bytes", got)


def _require_small_chunks(where: str, dataset: Any, most: int) -> None:
    """Raise unless every chunk is decoded within `most` bytes: HDF5 inflates a chunk before it looks at its size."""
    filters = dataset.id.get_create_plist()
    codes = [filters.get_filter(i)[0] for i in range(filters.get_nfilters())]
    compressors = [code for code in codes if code in _EXPANSIONS]
    if len(compressors) > 1 or len(set(codes)) < len(codes) or not {*codes} <= {*_EXPANSIONS, _SHUFFLE, _CHECKSUM}:
        raise wrong(where, "at most one of the filters gzip and lzf, with shuffle and fletcher32", f"filters {codes}")
    nbytes = math.prod(dataset.chunks) * dataset.dtype.itemsize
    if nbytes > most:
        raise wrong(where, f"chunks of at most {most:,} bytes", f"{nbytes:,}")
    if not compressors:
        return
    large: list[tuple[int, ...]] = []
    expansion = _EXPANSIONS[compressors[0]]

    def look(chunk: Any) -> None:
        if chunk.size * expansion > most:
            large.append(chunk.chunk_offset)

    dataset.id.chunk_iter(look)
    for offset in large:
        _, body = dataset.id.read_direct_chunk(offset)
        if compressors[0] != _GZIP or len(zlib.decompressobj().decompress(body, nbytes + 1)) > nbytes:
            raise wrong(f"{where}: chunk {offset}", f"at most {nbytes:,} bytes", "a chunk that may inflate to more")


def _require_small_attributes(h5py: Any, where: str, found: Any) -> None:
    """Raise if an attribute is a list of texts: each could be the same long one."""
    for name in found.attrs:
        about = found.attrs.get_id(name)
        if about.dtype.hasobject and math.prod(about.shape or ()) > 1:
            raise wrong(f"{where}: attribute {name!r}", "numbers, or one text", f"{about.shape} texts")


def _require_own_texts(h5py: Any, where: str, dataset: Any, file_bytes: int) -> None:
    """Raise unless the texts or lists of an array together are no longer than the file.

    HDF5 keeps them apart from the array, and many of its entries may mean the same long text.
    """
    if h5py.check_ref_dtype(dataset.dtype) is not None or not dataset.shape:
        return
    if h5py.check_string_dtype(dataset.dtype) is None and not _is_flat(h5py.check_vlen_dtype(dataset.dtype)):
        raise wrong(where, "numbers, texts or lists of numbers", f"dtype {dataset.dtype}")
    total, at_once = 0, 8 + (8 << 20) // file_bytes
    rows = max(1, at_once // max(1, math.prod(dataset.shape[1:])))
    if math.prod(dataset.shape[1:]) > at_once:
        raise wrong(where, f"at most {at_once} texts per row", dataset.shape)
    for start in range(0, dataset.shape[0], rows):
        total += sum(getattr(entry, "nbytes", None) or len(entry) for entry in dataset[start : start + rows].ravel())
        if total > file_bytes:
            raise wrong(where, f"texts of their own, in a file of {file_bytes:,} bytes", f"{total:,} bytes or more")


def _is_flat(dtype: Any) -> bool:
    return dtype is not None and not np.dtype(dtype).hasobject
