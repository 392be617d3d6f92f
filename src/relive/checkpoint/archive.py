"""A folder of checkpoints: manifests, and how checkpoints are committed, listed, verified and removed.

Files are written to tmp/, synchronised, and renamed; the manifest comes last. Until then the older checkpoint stays the
newest, and none of its files has changed.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from relive.errors import CheckpointError, CorruptCheckpoint, NoCheckpoint, explain
from relive.kernels import crc32
from relive.storage.codec import (
    CHUNK_BYTES,
    FORMAT,
    MAX_FOLDER_FORMAT_BYTES,
    MAX_JSON_BYTES,
    ArrayInfo,
    Node,
    arrays_from_json,
    arrays_to_json,
    folder_format,
    from_json,
    parse_folder_format,
    parse_format,
    reader_for,
    to_json,
    with_checksum,
    without_checksum,
)  # fmt: skip
from relive.storage.files import FOLDERS, Files, convert_read_errors, is_read_error, make_read_error

_FILE_NAME_PATTERN = re.compile(r"[0-9]{8,19}(-[0-9]{1,9})?\.bin")
_LINEAGE_PATTERN = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class FileInfo:
    """Name, arrays and checksums of an immutable file."""

    name: str
    arrays: tuple[ArrayInfo, ...]
    checksums: tuple[int, ...]

    @cached_property
    def nbytes(self) -> int:
        """Number of bytes of the file."""
        return sum(array.nbytes for array in self.arrays)


@dataclass(frozen=True)
class Manifest:
    """Description of one checkpoint."""

    number: int
    lineage: str
    """Random id, shared by checkpoints that continue each other."""
    kind: str
    config: dict[str, Any]
    """Constructor arguments of the buffer, as JSON."""
    values: dict[str, Any]
    """State of the buffer outside its arrays, as JSON."""
    state: FileInfo
    segments: tuple[FileInfo, ...]

    @property
    def files(self) -> list[str]:
        """Names of all files of the checkpoint, relative to the root."""
        return [f"state/{self.state.name}", *(f"segments/{file.name}" for file in self.segments)]


def manifest_file(number: int) -> str:
    """Return the name of the manifest with this number."""
    return f"manifests/{number:08}.json"


def dump_manifest(manifest: Manifest) -> bytes:
    """Encode a manifest: a line with a checksum, and strict JSON."""
    document = {
        "format": FORMAT,
        "number": manifest.number,
        "lineage": manifest.lineage,
        "kind": manifest.kind,
        "config": manifest.config,
        "values": manifest.values,
        "state": _file_to_json(manifest.state),
        "segments": [_file_to_json(file) for file in manifest.segments],
    }
    return with_checksum(to_json(document))


def _file_to_json(file: FileInfo) -> dict[str, Any]:
    return {"name": file.name, "arrays": arrays_to_json(file.arrays), "checksums": list(file.checksums)}


def parse_manifest(data: bytes, number: int) -> Manifest:
    """Parse an untrusted manifest; raise a CorruptCheckpoint that names the place of the fault."""
    where = manifest_file(number)
    version = parse_format(where, data.partition(b"\n")[0])
    return reader_for(where, version, READERS)(where, data, number)


def _format_1(where: str, data: bytes, number: int) -> Manifest:
    document, first_line = from_json(where, without_checksum(where, data)), data.partition(b"\n")[0]
    version = parse_format(where, first_line)
    if document.entry("format").integer() != version:
        expected = f"{version}, as its first line says (bytes 0 to {len(first_line)})"
        raise document.entry("format").error(expected)
    if document.entry("number").integer() != number:
        raise document.entry("number").error(f"{number}, the number in the file name")
    segments = tuple(_file_from_json(segment) for segment in document.entry("segments").items())
    if len({segment.name for segment in segments}) != len(segments):
        raise document.entry("segments").error("every segment once")
    return Manifest(
        number,
        document.entry("lineage").text(_LINEAGE_PATTERN),
        document.entry("kind").text(),
        document.entry("config").mapping(),
        document.entry("values").mapping(),
        _file_from_json(document.entry("state")),
        segments,
    )


READERS: dict[int, Callable[[str, bytes, int], Manifest]] = {1: _format_1}
"""Reader of each format: `reader(where, data, number)`."""


def _file_from_json(node: Node) -> FileInfo:
    file = FileInfo(
        node.entry("name").text(_FILE_NAME_PATTERN),
        arrays_from_json(node.entry("arrays")),
        node.entry("checksums").integers(maximum=2**32 - 1),
    )
    if len(file.checksums) != -(-file.nbytes // CHUNK_BYTES):
        raise node.entry("checksums").error(f"one checksum per {CHUNK_BYTES} bytes of {file.nbytes}")
    return file


_MAX_LISTED_NUMBERS = 64
"""Maximum number of checkpoints in an error message."""
_NUMBER = r"([0-9]{8}|[1-9][0-9]{8,17})"
_MANIFEST_PATTERN = re.compile(rf"{_NUMBER}\.json")
_SAVED_FILE_PATTERNS = {
    "tmp": re.compile(rf"FORMAT|manifests-{_NUMBER}\.json|segments-{_NUMBER}-[0-9]+\.bin|state-{_NUMBER}\.bin"),
    "segments": re.compile(rf"{_NUMBER}-[0-9]+\.bin"),
    "state": re.compile(rf"{_NUMBER}\.bin"),
}
"""Patterns of the names of saved files, by folder. Other files are never removed."""


class ManifestSummary(NamedTuple):
    """Lineage and files of a checkpoint; takes less memory than its manifest."""

    lineage: str
    files: list[str]
    """Names of all files of the checkpoint, relative to the root."""


class Archive:
    """The checkpoints in one folder."""

    def __init__(self, root: Path, files: type[Files] = Files) -> None:
        self.root = root
        self.files = files(root)
        self._uncommitted_files: list[str] = []
        """Files of the checkpoint that is being saved, until it is committed."""

    # Saving checkpoints

    @contextmanager
    def lock_for_saving(self, needed: int, require: Callable[[Manifest], None]) -> Iterator[dict[int, ManifestSummary]]:
        """Hold the exclusive lock during a save of about `needed` bytes; yield the existing checkpoints by number.

        `require` checks the newest checkpoint before anything is changed, and may raise. Then the files of interrupted
        saves are removed. If the body raises, its files are removed too.
        """
        try:
            self._refuse_foreign()
            self.files.make_root()
            with self.files.locked(exclusive=True):
                summaries = self._read_summaries(require)
                self._remove_saved("tmp", set())
                if "FORMAT" not in self.files.names("") or self._require_format() < FORMAT:
                    self._write_atomically("FORMAT", [folder_format("checkpoint")])
                try:
                    yield summaries
                except BaseException:
                    self._discard()
                    raise
        except OSError as error:
            raise self._save_error(error, needed) from error

    def _read_summaries(self, require: Callable[[Manifest], None]) -> dict[int, ManifestSummary]:
        """Return the checkpoints with valid manifests, newest first; `require` checks the newest."""
        summaries: dict[int, ManifestSummary] = {}
        for number in reversed(self.numbers()):
            try:
                manifest = self.manifest(number)
            except CheckpointError:
                continue
            if not summaries:
                require(manifest)
            summaries[number] = ManifestSummary(manifest.lineage, manifest.files)
        return summaries

    def _discard(self) -> None:
        """Remove the files of an uncommitted checkpoint."""
        with suppress(OSError):
            self._remove_saved("tmp", set())
            for name in self._uncommitted_files:
                self.files.remove(name)

    def _refuse_foreign(self) -> None:
        """Raise if a folder without FORMAT contains other files than those of an interrupted first save.

        FORMAT is looked up last: another process may be saving here, and a save writes FORMAT before any other file.
        """
        names = [name for name in self._names("") if name not in ("LOCK", "FORMAT", *FOLDERS)]
        names += [f"{folder}/{name}" for folder in FOLDERS for name in self._names(folder)]
        if "FORMAT" in self._names(""):
            self._require_format()
        elif names != ["tmp/FORMAT"] * len(names):
            remedy = "Pass an empty folder, or one that does not exist yet; nothing was changed."
            got = f"{next(name for name in names if name != 'tmp/FORMAT')!r} in it"
            raise CheckpointError(explain(f"save to {self.root}", "a folder of checkpoints", got, remedy))

    def _names(self, folder: str) -> list[str]:
        """Return the names in a folder; an empty list if it does not exist."""
        try:
            return self.files.names(folder)
        except FileNotFoundError:
            return []

    def _remove_saved(self, folder: str, needed: set[str]) -> None:
        """Remove the saved files in a folder, except those in `needed`."""
        for name in self.files.regular_names(folder):
            if _SAVED_FILE_PATTERNS[folder].fullmatch(name) and f"{folder}/{name}" not in needed:
                self.files.remove(f"{folder}/{name}")

    def _save_error(self, error: OSError, needed: int) -> CheckpointError:
        where = f"save to {self.root}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            remedy = "Free disk space, or save elsewhere; the previous checkpoint is intact."
            got = f"{self.files.free_bytes():,} bytes free ({error.strerror})"
            return CheckpointError(explain(where, f"room for about {needed:,} bytes", got, remedy))
        remedy = "Check that the folder can be written; the previous checkpoint is intact."
        return CheckpointError(explain(where, "a writable folder", error, remedy))

    def numbers(self) -> list[int]:
        """Return the numbers of all checkpoints, valid or not, oldest first."""
        return sorted(int(match[1]) for match in map(_MANIFEST_PATTERN.fullmatch, self._names("manifests")) if match)

    def next_number(self) -> int:
        """Return the number of the next checkpoint."""
        number = max(self.numbers(), default=0) + 1
        if number >= 10**18:
            remedy = "Remove the manifest of that number, or save elsewhere."
            raise CheckpointError(
                explain(f"save to {self.root}", "checkpoint numbers of at most 18 digits", number, remedy)
            )
        return number

    def size(self, number: int) -> int:
        """Return the number of bytes of a manifest; 0 if it cannot be read."""
        try:
            return self.files.size(manifest_file(number))
        except OSError:
            return 0

    def is_long(self, number: int) -> bool:
        """Whether a manifest is so long that the next checkpoint should have fewer segments."""
        return self.size(number) > MAX_JSON_BYTES // 2

    def write_file(
        self, folder: str, name: str, arrays: tuple[ArrayInfo, ...], parts: Iterable[memoryview | bytes]
    ) -> FileInfo:
        """Write an immutable file. `arrays` describes its arrays, and `parts` are their bytes."""
        checksums: list[int] = []
        path = f"{folder}/{name}"
        self._uncommitted_files.append(path)
        self._write_atomically(path, _append_checksums(parts, checksums))
        file = FileInfo(name, arrays, tuple(checksums))
        if file.nbytes != self.files.size(path):
            raise AssertionError(f"{name}: {self.files.size(path)} bytes for arrays of {file.nbytes}")
        return file

    def commit(self, manifest: Manifest) -> None:
        """Write the manifest of a checkpoint whose files are complete."""
        data = dump_manifest(manifest)
        if len(data) > MAX_JSON_BYTES:
            remedy = "Declare fewer fields, or save less often."
            raise CheckpointError(
                explain(manifest_file(manifest.number), f"at most {MAX_JSON_BYTES} bytes", len(data), remedy)
            )
        for folder in ("segments", "state"):
            self.files.sync_folder(folder)
        try:
            self._write_atomically(manifest_file(manifest.number), [data])
        finally:
            if self.exists(manifest.number):  # also true if the write was interrupted after the manifest was complete
                self._uncommitted_files.clear()
        self.files.sync_folder("manifests")

    def remove_old(self, keep: int, lineage: str, summaries: Mapping[int, ManifestSummary]) -> None:
        """Remove all but the newest `keep` checkpoints of a lineage, and the files that no checkpoint needs any more.

        Damaged manifests are removed too. Files that cannot be removed now are removed by a later save.
        """
        try:
            numbers = self.numbers()
            unread = {number for number in numbers if number not in summaries}
            if any(map(self._is_valid, unread)):
                return  # a manifest is readable again, but `summaries` lacks its files: remove nothing
            lineage_numbers = [
                number for number in numbers[::-1] if number not in unread and summaries[number].lineage == lineage
            ]
            removed = unread | set(lineage_numbers) - set(islice(filter(self._is_valid, lineage_numbers), keep))
            needed = {name for number in summaries if number not in removed for name in summaries[number].files}
            matches = {name: _MANIFEST_PATTERN.fullmatch(name) for name in self.files.regular_names("manifests")}
            removed_names = [name for name, match in matches.items() if match is not None and int(match[1]) in removed]
            for name in removed_names:
                self.files.remove(f"manifests/{name}")
            if removed_names:
                self.files.sync_folder("manifests")
            for folder in ("segments", "state"):
                self._remove_saved(folder, needed)
        except OSError:
            return

    def _is_valid(self, number: int) -> bool:
        try:
            self.require_files(self.manifest(number))
        except CheckpointError as error:
            if is_read_error(error) and error.__cause__ is not None:  # a failing disk must not cause removals
                raise error.__cause__ from None
            return False
        return True

    def is_damaged(self, number: int) -> bool:
        """Whether a checkpoint is damaged for good; False after an error of the disk, which may be transient."""
        try:
            return not self._is_valid(number)
        except OSError:
            return False

    def _write_atomically(self, name: str, parts: Iterable[memoryview | bytes]) -> None:
        self.files.place(f"tmp/{name.replace('/', '-')}", name, parts)
        if "/" not in name:
            self.files.sync_folder("")

    # Loading checkpoints

    @contextmanager
    def lock_for_loading(self) -> Iterator[None]:
        """Hold the shared lock during a load: no save removes files meanwhile."""
        try:
            with self.files.locked(exclusive=False):
                self._require_format()
                yield
        except FileNotFoundError:
            if self.numbers():
                raise CorruptCheckpoint(
                    explain("FORMAT", "a file of this name", "no file", "Copy the folder again.")
                ) from None
            remedy = "Save a buffer there first, or pass the right folder."
            raise NoCheckpoint(
                explain(str(self.root), "a folder of checkpoints", "no file FORMAT in it", remedy)
            ) from None
        except OSError as error:
            raise make_read_error(str(self.root), error) from error

    def _require_format(self) -> int:
        """Return the format of the folder; raise if it is unknown."""
        return parse_folder_format(self.files.contents("FORMAT", MAX_FOLDER_FORMAT_BYTES), "checkpoint", READERS)

    def manifest(self, number: int) -> Manifest:
        """Read and verify a manifest, but not the files that it lists."""
        name = manifest_file(number)
        try:
            if not 0 <= number < 10**18:
                raise FileNotFoundError
            data = self.files.contents(name, MAX_JSON_BYTES + 1)
        except FileNotFoundError:
            numbers = ", ".join(map(str, self.numbers()[-_MAX_LISTED_NUMBERS:])) or "none"
            remedy = "Pass one of these numbers."
            raise NoCheckpoint(explain(name, f"one of the checkpoints {numbers}", number, remedy)) from None
        except OSError as error:
            raise make_read_error(name, error) from error
        if len(data) > MAX_JSON_BYTES:
            place = f"{name}, bytes 0 to {MAX_JSON_BYTES}"
            raise CorruptCheckpoint(
                explain(place, f"at most {MAX_JSON_BYTES} bytes", "a longer file", "Copy it again.")
            )
        return parse_manifest(data, number)

    def exists(self, number: int) -> bool:
        """Whether a manifest with this number exists, valid or not."""
        try:
            self.files.size(manifest_file(number))
        except FileNotFoundError:
            return False
        except OSError:
            return True  # the manifest exists; reading it later raises this error
        return True

    def require_files(self, manifest: Manifest) -> None:
        """Raise unless all files of a checkpoint exist and have their sizes."""
        files = [("state", manifest.state), *(("segments", segment) for segment in manifest.segments)]
        for folder, file in files:
            name = f"{folder}/{file.name}"
            with convert_read_errors(name):
                size = self.files.size(name)
            if size != file.nbytes:
                raise CorruptCheckpoint(explain(name, f"{file.nbytes} bytes", size, "Copy the checkpoint again."))

    @contextmanager
    def open_file(self, folder: str, file: FileInfo) -> Iterator[FileReader]:
        """Open a file to read it once, from start to end."""
        with self._open(f"{folder}/{file.name}") as descriptor:
            yield FileReader(self.files, descriptor, f"{folder}/{file.name}", file)

    def verify(self, folder: str, file: FileInfo) -> None:
        """Read a file and verify its checksums."""
        memory = memoryview(bytearray(min(CHUNK_BYTES, file.nbytes)))
        with self.open_file(folder, file) as source:
            for start in range(0, file.nbytes, CHUNK_BYTES):
                source.fill(memory[: min(CHUNK_BYTES, file.nbytes - start)])
            source.finish()

    def fill(self, folder: str, file: FileInfo) -> Callable[[int, memoryview], None]:
        """Return a function `fill(offset, target)` that copies verified bytes of a file."""
        name = f"{folder}/{file.name}"
        cached_chunk = -1, b""  # index and bytes of the last chunk, cached: most arrays are smaller than a chunk

        def read_chunk(i: int) -> bytes:
            nonlocal cached_chunk
            if cached_chunk[0] != i:
                start = i * CHUNK_BYTES
                with self._open(name) as descriptor:
                    data = self.files.read_at(descriptor, min(CHUNK_BYTES, file.nbytes - start), start)
                require_checksum(name, file, i, len(data), crc32(data))
                cached_chunk = i, data
            return cached_chunk[1]

        def fill(offset: int, target: memoryview) -> None:
            while len(target):
                part = memoryview(read_chunk(offset // CHUNK_BYTES))[offset % CHUNK_BYTES :][: len(target)]
                target[: len(part)] = part
                target, offset = target[len(part) :], offset + len(part)

        return fill

    def stamp(self, file: FileInfo) -> tuple[int, ...]:
        """Return the stamp of a segment, which changes when its file changes; see `Files.stamp`."""
        with convert_read_errors(f"segments/{file.name}"):
            return self.files.stamp(f"segments/{file.name}")

    @contextmanager
    def _open(self, name: str) -> Iterator[int]:
        """Open a file for reading; errors name the file."""
        with convert_read_errors(name):
            file = self.files.open(name)
            try:
                yield file
            finally:
                self.files.close(file)


class FileReader:
    """Reads a file once, from start to end, directly into its destination, and verifies the checksums there.

    The bytes are valid only if `finish` does not raise.
    """

    def __init__(self, files: Files, descriptor: int, name: str, file: FileInfo) -> None:
        self._files, self._descriptor, self._name, self._file = files, descriptor, name, file
        self._num_read = self._checksum = 0

    def fill(self, target: memoryview) -> None:
        """Fill `target` with the next bytes of the file."""
        while len(target):
            i = self._num_read // CHUNK_BYTES
            piece = target[: CHUNK_BYTES - self._num_read % CHUNK_BYTES]
            count = self._files.read_into(self._descriptor, piece)
            self._checksum = crc32(piece[:count], self._checksum)
            self._num_read += count
            length = self._num_read - i * CHUNK_BYTES
            if count < len(piece) or length == CHUNK_BYTES or self._num_read == self._file.nbytes:
                require_checksum(self._name, self._file, i, length, self._checksum)
                self._checksum = 0
            target = target[len(piece) :]

    def finish(self) -> None:
        """Raise unless all bytes of the file were read."""
        if self._num_read != self._file.nbytes:
            got = f"{self._num_read:,} of {self._file.nbytes:,} bytes"
            raise CorruptCheckpoint(explain(self._name, "only the bytes of its arrays", got, "Copy it again."))


def _append_checksums(parts: Iterable[memoryview | bytes], checksums: list[int]) -> Iterator[memoryview]:
    """Yield `parts`, and append one checksum per `CHUNK_BYTES` bytes to `checksums`."""
    remaining = 0
    for part in parts:
        rest = whole = memoryview(part).cast("B")
        while len(rest):
            if not remaining:
                checksums.append(0)
                remaining = CHUNK_BYTES
            piece, rest = rest[:remaining], rest[remaining:]
            checksums[-1] = crc32(piece, checksums[-1])
            remaining -= len(piece)
        yield whole


def require_checksum(name: str, file: FileInfo, i: int, length: int, checksum: int) -> None:
    """Raise unless the i-th chunk of a file has its size and its checksum."""
    expected = file.checksums[i]
    if length != min(CHUNK_BYTES, file.nbytes - i * CHUNK_BYTES) or checksum != expected:
        place = f"{name}, bytes {i * CHUNK_BYTES} to {i * CHUNK_BYTES + length}"
        remedy = "Load an older checkpoint, or copy this one again."
        raise CorruptCheckpoint(explain(place, f"the checksum {expected:08x}", f"{checksum:08x}", remedy))
