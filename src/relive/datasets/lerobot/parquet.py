"""Rows of an untrusted parquet file: the headers of its pages are read first, so that no batch takes much memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from relive.datasets.installed import required
from relive.datasets.metadata import budget, damage_named, part_of_budget, wrong

_LONGEST_HEADER = 1 << 16
_DICTIONARY_PAGE = 2
_WIDTHS = {"BOOLEAN": 8, "INT32": 8, "FLOAT": 8, "INT64": 12, "DOUBLE": 12}
"""Bytes of a number and of its levels while a list of it is read."""


def batches(where: str, path: Path, names: list[str] | None, count: int, nbytes: int) -> Iterator[Any]:
    """Batches of at most `count` rows of the columns `names` (None: of all).

    Rows may share their values, so that a short file has rows without end, or one row of a billion numbers. The
    batches are shorter if each of their rows could be as long as the longest page.

    Args:
        where: the file, for messages.
        path: the file.
        names: the columns.
        count: the most rows of a batch.
        nbytes: how many bytes the dataset has on the disk, which say how much memory a batch may take.
    """
    parquet = required("pyarrow.parquet", "lerobot")
    with damage_named(where, "a parquet file that can be read"), path.open("rb") as body:
        file = parquet.ParquetFile(body)
        known = file.schema_arrow.names
        chosen: Sequence[str] = known if names is None else names
        missing = [name for name in chosen if name not in known]
        if missing:
            raise wrong(where, f"the column {missing[0]!r}", ", ".join(known))
        longest = 1
        for column in range(len(file.schema)):
            if any(f"{file.schema.column(column).path}.".startswith(f"{name}.") for name in chosen):
                longest = max(longest, _longest_value(where, file, body, column, nbytes))
        count = max(1, min(count, part_of_budget(nbytes) // 2 // longest))
        yield from file.iter_batches(count, columns=list(chosen), use_threads=False)


def _longest_value(where: str, file: Any, body: BinaryIO, column: int, nbytes: int) -> int:
    """The most bytes that one value of a column can have; raises if its pages or its lists are too long."""
    about, longest = file.schema.column(column), 1
    for number in range(file.metadata.num_row_groups):
        chunk = file.metadata.row_group(number).column(column)
        pages = list(_pages(body, chunk))
        largest = max((page.nbytes for page in pages), default=0)
        values = sum(page.values for page in pages if not page.is_dictionary)
        if values != chunk.num_values or any(page.is_dictionary and page.values > page.nbytes for page in pages):
            raise wrong(f"{where}: {about.path}", f"{chunk.num_values:,} values", f"pages of {values:,}")
        longest = max(longest, _WIDTHS.get(about.physical_type, largest))
        # All numbers of a row group may be in the list of its first row.
        for needed, most in (
            (largest, part_of_budget(nbytes) // 2),
            (longest * values if about.max_repetition_level else 0, budget(nbytes)),
        ):
            if needed > most:
                raise wrong(f"{where}: {about.path}", f"pages and lists of at most {most:,} bytes", f"{needed:,}")
    return longest


class _Page(NamedTuple):
    is_dictionary: bool
    nbytes: int
    """Its size when it is decompressed."""
    values: int


def _pages(body: BinaryIO, chunk: Any) -> Iterator[_Page]:
    """The headers of a column's pages in a row group."""
    at = chunk.data_page_offset
    if chunk.has_dictionary_page and 0 < chunk.dictionary_page_offset < at:
        at = chunk.dictionary_page_offset
    stop = at + chunk.total_compressed_size
    while at < stop:
        body.seek(at)
        header, length = _Thrift(body.read(_LONGEST_HEADER)).struct()
        values = next((header[part][1] for part in (5, 7, 8) if part in header), 0)
        is_dictionary, nbytes, size = header[1] == _DICTIONARY_PAGE, header[2], header[3]
        if min(nbytes, size, values) < 0:
            raise ValueError(f"a page of {size} bytes with {values} values")
        yield _Page(is_dictionary, nbytes, values)
        at += length + size


class _Thrift:
    """A struct in Thrift's compact protocol, as dicts of numbers by the numbers of their fields."""

    def __init__(self, body: bytes) -> None:
        self._body, self._at = body, 0

    def struct(self, depth: int = 0) -> tuple[dict[int, Any], int]:
        """The fields of a struct, and where it ends."""
        if depth > 8:
            raise ValueError("structs inside each other")
        fields: dict[int, Any] = {}
        field = 0
        while head := self._byte():
            field = field + (head >> 4) if head >> 4 else self._number()
            fields[field] = self._value(head & 15, depth)
        return fields, self._at

    def _value(self, kind: int, depth: int) -> Any:
        if kind in (1, 2):  # true, false: the kind is the value
            return kind == 1
        if kind == 3:
            return self._byte()
        if kind in (4, 5, 6):
            return self._number()
        if kind in (7, 8):  # a float64, or bytes after their length: nothing that is needed
            length = 8 if kind == 7 else self._unsigned()
            self._at += length
            return None
        if kind == 12:
            return self.struct(depth + 1)[0]
        raise ValueError(f"a value of the kind {kind}")

    def _byte(self) -> int:
        self._at += 1
        return self._body[self._at - 1]

    def _unsigned(self) -> int:
        number = shift = 0
        while True:
            byte = self._byte()
            number |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return number

    def _number(self) -> int:
        number = self._unsigned()
        return number >> 1 ^ -(number & 1)
