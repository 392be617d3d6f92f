"""A folder of checkpoints, in which they are written, listed, verified and removed.

A checkpoint is its manifest, which lists the other files: one with the state of the buffer, and segments with rows.
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
    MAX_FIRST_LINE_BYTES,
    MAX_JSON_BYTES,
    ArrayInfo,
    JsonNode,
    SnapshotReader,
    add_checksum,
    arrays_from_json,
    arrays_to_json,
    encode_folder_format,
    from_json,
    make_snapshot_reader,
    require_first_line,
    require_folder_format,
    to_json,
)  # fmt: skip
from relive.storage.files import FOLDERS, FileOperations, convert_read_errors, is_read_error, make_read_error

_FILE_NAME_PATTERN = re.compile(r"[0-9]{8,19}(-[0-9]{1,9})?\.bin")
_LINEAGE_PATTERN = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class FileInfo:
    """Name, arrays and checksums of a state or segment file, which never changes."""

    name: str
    arrays: tuple[ArrayInfo, ...]
    checksums: tuple[int, ...]

    @cached_property
    def nbytes(self) -> int:
        """Number of bytes of the file."""
        return sum(array.nbytes for array in self.arrays)


@dataclass(frozen=True)
class Manifest:
    """Description of one checkpoint: the contents of its file in the folder manifests."""

    number: int
    lineage: str
    """Random id that all checkpoints of one run of saves have."""
    kind: str
    config: dict[str, Any]
    """Constructor arguments of the buffer, as JSON."""
    values: dict[str, Any]
    """State of the buffer outside its arrays, as JSON."""
    state: FileInfo
    segments: tuple[FileInfo, ...]

    @property
    def file_sizes(self) -> dict[str, int]:
        """Sizes of all files of the checkpoint, by their names relative to the root."""
        segments = {f"segments/{file.name}": file.nbytes for file in self.segments}
        return {f"state/{self.state.name}": self.state.nbytes, **segments}


def manifest_file_name(number: int) -> str:
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
        "state": _encode_file_info(manifest.state),
        "segments": [_encode_file_info(file) for file in manifest.segments],
    }
    return add_checksum(to_json(document))


def _encode_file_info(file: FileInfo) -> dict[str, Any]:
    return {"name": file.name, "arrays": arrays_to_json(file.arrays), "checksums": list(file.checksums)}


def parse_manifest(where: str, data: bytes, number: int) -> Manifest:
    """Parse an untrusted manifest, the inverse of `dump_manifest`."""
    first_line, _, body = data.partition(b"\n")
    require_first_line(where, first_line, crc32(body), len(data))
    document = from_json(where, body)
    if document.entry("format").integer() != FORMAT:
        expected = f"{FORMAT}, as its first line says (bytes 0 to {len(first_line)})"
        raise document.entry("format").error(expected)
    if document.entry("number").integer() != number:
        raise document.entry("number").error(f"{number}, the number in the file name")
    segments = tuple(_parse_file_info(segment) for segment in document.entry("segments").items())
    if len({segment.name for segment in segments}) != len(segments):
        raise document.entry("segments").error("every segment once")
    return Manifest(
        number,
        document.entry("lineage").text(_LINEAGE_PATTERN),
        document.entry("kind").text(),
        document.entry("config").unchecked_dict(),
        document.entry("values").unchecked_dict(),
        _parse_file_info(document.entry("state")),
        segments,
    )


def _parse_file_info(node: JsonNode) -> FileInfo:
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
    "manifests": _MANIFEST_PATTERN,
    "tmp": re.compile(rf"FORMAT|manifests-{_NUMBER}\.json|segments-{_NUMBER}-[0-9]+\.bin|state-{_NUMBER}\.bin"),
    "segments": re.compile(rf"{_NUMBER}-[0-9]+\.bin"),
    "state": re.compile(rf"{_NUMBER}\.bin"),
}
"""Patterns of the names that saves give to files, by folder. Other files are never removed."""


class ManifestSummary(NamedTuple):
    """Lineage and files of a checkpoint. They take less memory than its manifest."""

    lineage: str
    file_sizes: dict[str, int]
    """See `Manifest.file_sizes`."""


class Archive:
    """The checkpoints in one folder."""

    def __init__(self, root: Path, files: type[FileOperations] = FileOperations) -> None:
        self.root = root
        self.files = files(root)
        self._uncommitted_files: list[str] = []
        """Files of the current save, which are removed if the save fails."""

    @contextmanager
    def lock_for_saving(
        self, num_needed_bytes: int, check_newest: Callable[[Manifest], None]
    ) -> Iterator[dict[int, ManifestSummary]]:
        """Hold the exclusive lock while about `num_needed_bytes` are saved; yield the existing checkpoints by number.

        `check_newest` may refuse the newest checkpoint by raising, before anything is changed. Files of interrupted
        saves are removed. If the body raises, the files of this save are removed too.
        """
        try:
            self._refuse_foreign_folder()
            self.files.make_root()
            with self.files.hold_lock(exclusive=True):
                summaries = self._read_summaries(check_newest)
                self._remove_unneeded_files("tmp", set())
                if "FORMAT" not in self.files.list_names(""):
                    self._write_atomically("FORMAT", [encode_folder_format("checkpoint")])
                try:
                    yield summaries
                except BaseException:
                    self._discard_uncommitted_files()
                    raise
        except OSError as error:
            raise self._make_save_error(error, num_needed_bytes) from error

    def _read_summaries(self, check_newest: Callable[[Manifest], None]) -> dict[int, ManifestSummary]:
        """Return the checkpoints with valid manifests, newest first, after passing the newest to `check_newest`."""
        summaries: dict[int, ManifestSummary] = {}
        for number in reversed(self.checkpoint_numbers()):
            try:
                manifest = self.read_manifest(number)
            except CheckpointError:
                continue
            if not summaries:
                check_newest(manifest)
            summaries[number] = ManifestSummary(manifest.lineage, manifest.file_sizes)
        return summaries

    def _discard_uncommitted_files(self) -> None:
        """Remove the files of a checkpoint whose manifest was not written."""
        with suppress(OSError):
            self._remove_unneeded_files("tmp", set())
            for name in self._uncommitted_files:
                self.files.remove(name)

    def _refuse_foreign_folder(self) -> None:
        """Raise if a folder without FORMAT contains other files than those of an interrupted first save.

        FORMAT is looked up last: another process may be saving here, and a save writes FORMAT before any other file.
        """
        names = [name for name in self.files.list_names("") if name not in ("LOCK", "FORMAT", *FOLDERS)]
        names += [f"{folder}/{name}" for folder in FOLDERS for name in self.files.list_names(folder)]
        if "FORMAT" in self.files.list_names(""):
            self._require_known_format()
        elif names != ["tmp/FORMAT"] * len(names):
            remedy = "Pass an empty folder, or one that does not exist yet; nothing was changed."
            got = f"{next(name for name in names if name != 'tmp/FORMAT')!r} in it"
            raise CheckpointError(explain(f"save to {self.root}", "a folder of checkpoints", got, remedy))

    def _remove_unneeded_files(self, folder: str, needed_names: set[str]) -> bool:
        """Remove files that saves have written in a folder, except `needed_names`; return whether there were any."""
        pattern = _SAVED_FILE_PATTERNS[folder]
        names = (f"{folder}/{name}" for name in self.files.list_regular_files(folder) if pattern.fullmatch(name))
        unneeded_names = [name for name in names if name not in needed_names]
        for name in unneeded_names:
            self.files.remove(name)
        return bool(unneeded_names)

    def _make_save_error(self, error: OSError, num_needed_bytes: int) -> CheckpointError:
        where = f"save to {self.root}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            remedy = "Free disk space, or save elsewhere; the previous checkpoint is intact."
            got = f"{self.files.free_bytes():,} bytes free ({error.strerror})"
            return CheckpointError(explain(where, f"room for about {num_needed_bytes:,} bytes", got, remedy))
        remedy = "Check that the folder can be written; the previous checkpoint is intact."
        return CheckpointError(explain(where, "a writable folder", error, remedy))

    def checkpoint_numbers(self) -> list[int]:
        """Return the numbers of all checkpoints, valid or not, oldest first."""
        matches = map(_MANIFEST_PATTERN.fullmatch, self.files.list_names("manifests"))
        return sorted(int(match[1]) for match in matches if match)

    def next_checkpoint_number(self) -> int:
        """Return the number of the next checkpoint."""
        number = max(self.checkpoint_numbers(), default=0) + 1
        if number >= 10**18:
            remedy = "Remove the manifest of that number, or save elsewhere."
            expected = "checkpoint numbers of at most 18 digits"
            raise CheckpointError(explain(f"save to {self.root}", expected, number, remedy))
        return number

    def manifest_size(self, number: int) -> int:
        """Return the number of bytes of a manifest; 0 if it cannot be read."""
        try:
            return self.files.size(manifest_file_name(number))
        except OSError:
            return 0

    def has_long_manifest(self, number: int) -> bool:
        """Whether a manifest is so long that the next checkpoint should have fewer segments."""
        return self.manifest_size(number) > MAX_JSON_BYTES // 2

    def write_file(
        self, folder: str, name: str, arrays: tuple[ArrayInfo, ...], parts: Iterable[memoryview | bytes]
    ) -> FileInfo:
        """Write an immutable file. `arrays` describes its arrays, and `parts` are their bytes."""
        checksums: list[int] = []
        path = f"{folder}/{name}"
        self._uncommitted_files.append(path)
        self._write_atomically(path, _iter_with_checksums(parts, checksums))
        file = FileInfo(name, arrays, tuple(checksums))
        if file.nbytes != self.files.size(path):
            raise AssertionError(f"{name}: {self.files.size(path)} bytes for arrays of {file.nbytes}")
        return file

    def commit_manifest(self, manifest: Manifest) -> None:
        """Write the manifest of a checkpoint whose files are complete."""
        data = dump_manifest(manifest)
        if len(data) > MAX_JSON_BYTES:
            where, remedy = manifest_file_name(manifest.number), "Declare fewer fields, or save less often."
            raise CheckpointError(explain(where, f"at most {MAX_JSON_BYTES} bytes", len(data), remedy))
        for folder in ("segments", "state"):
            self.files.sync_folder(folder)
        try:
            self._write_atomically(manifest_file_name(manifest.number), [data])
        finally:
            # If an interrupted write has completed the manifest, the files of the checkpoint must stay.
            if self.has_manifest(manifest.number):
                self._uncommitted_files.clear()
        self.files.sync_folder("manifests")

    def remove_old_checkpoints(self, num_kept: int, lineage: str, summaries: Mapping[int, ManifestSummary]) -> None:
        """Remove all but the newest `num_kept` checkpoints of a lineage, and the files that no checkpoint needs.

        Damaged manifests are removed too. Files that cannot be removed now are removed by a later save.
        """
        try:
            numbers = self.checkpoint_numbers()
            unread_numbers = {number for number in numbers if number not in summaries}
            # If a manifest without a summary is valid now, it could not be read before: its files must not be removed.
            if any(map(self._is_valid_checkpoint, unread_numbers)):
                return
            own_numbers = [n for n in numbers[::-1] if n in summaries and summaries[n].lineage == lineage]
            kept_numbers = set(islice(filter(self._is_valid_checkpoint, own_numbers), num_kept))
            needed_names = {
                name
                for number, summary in summaries.items()
                if number in kept_numbers or summary.lineage != lineage
                for name in (manifest_file_name(number), *summary.file_sizes)
            }
            if self._remove_unneeded_files("manifests", needed_names):
                self.files.sync_folder("manifests")
            for folder in ("segments", "state"):
                self._remove_unneeded_files(folder, needed_names)
        except OSError:
            return

    def _is_valid_checkpoint(self, number: int) -> bool:
        try:
            self.require_files(self.read_manifest(number).file_sizes)
        except CheckpointError as error:
            # The caller must not remove a checkpoint that a failing disk could not read.
            if is_read_error(error) and error.__cause__ is not None:
                raise error.__cause__ from None
            return False
        return True

    def is_damaged(self, number: int) -> bool:
        """Whether a checkpoint is damaged; False after a read error of the disk, which may be transient."""
        try:
            return not self._is_valid_checkpoint(number)
        except OSError:
            return False

    def _write_atomically(self, name: str, parts: Iterable[memoryview | bytes]) -> None:
        self.files.write_atomically(f"tmp/{name.replace('/', '-')}", name, parts)
        if "/" not in name:
            self.files.sync_folder("")

    @contextmanager
    def lock_for_loading(self) -> Iterator[None]:
        """Hold the shared lock during a load, so that no save removes files."""
        try:
            with self.files.hold_lock(exclusive=False):
                self._require_known_format()
                yield
        except FileNotFoundError:
            if self.checkpoint_numbers():
                text = explain("FORMAT", "a file of this name", "no file", "Copy the folder again.")
                raise CorruptCheckpoint(text) from None
            remedy = "Save a buffer there first, or pass the right folder."
            got = "no file FORMAT in it" if self.root.exists() else "no folder"
            text = explain(str(self.root), "a folder of checkpoints", got, remedy)
            raise NoCheckpoint(text) from None
        except OSError as error:
            raise make_read_error(str(self.root), error) from error

    def _require_known_format(self) -> None:
        require_folder_format(self.files.read_contents("FORMAT", MAX_FIRST_LINE_BYTES), "checkpoint")

    def read_manifest(self, number: int) -> Manifest:
        """Read and verify a manifest, but not the files that it lists."""
        name = manifest_file_name(number)
        try:
            if not 0 <= number < 10**18:
                raise FileNotFoundError
            data = self.files.read_contents(name, MAX_JSON_BYTES + 1)
        except FileNotFoundError:
            numbers = ", ".join(map(str, self.checkpoint_numbers()[-_MAX_LISTED_NUMBERS:])) or "none"
            remedy = "Pass one of these numbers."
            raise NoCheckpoint(explain(name, f"one of the checkpoints {numbers}", number, remedy)) from None
        except OSError as error:
            raise make_read_error(name, error) from error
        if len(data) > MAX_JSON_BYTES:
            place, expected = f"{name}, bytes 0 to {MAX_JSON_BYTES}", f"at most {MAX_JSON_BYTES} bytes"
            raise CorruptCheckpoint(explain(place, expected, "a longer file", "Copy it again."))
        return parse_manifest(name, data, number)

    def has_manifest(self, number: int) -> bool:
        """Whether a manifest with this number exists, valid or not."""
        try:
            self.files.size(manifest_file_name(number))
        except FileNotFoundError:
            return False
        except OSError:
            # A file that cannot be opened exists; reading its manifest raises the same error later.
            return True
        return True

    def require_files(self, sizes: Mapping[str, int]) -> None:
        """Raise unless files with these names and sizes exist."""
        for name, nbytes in sizes.items():
            with convert_read_errors(name):
                size = self.files.size(name)
            if size != nbytes:
                raise CorruptCheckpoint(explain(name, f"{nbytes} bytes", size, "Copy the checkpoint again."))

    def read_state(self, manifest: Manifest) -> SnapshotReader:
        """Return a reader of the state of a checkpoint."""
        file, where = manifest.state, manifest_file_name(manifest.number)
        name = f"state/{file.name}"
        # Index and bytes of the last chunk, which is kept because most arrays are smaller than a chunk.
        cached_chunk = -1, b""

        def fill(offset: int, target: memoryview) -> None:
            nonlocal cached_chunk
            while len(target):
                i = offset // CHUNK_BYTES
                if cached_chunk[0] != i:
                    with convert_read_errors(name):
                        size = min(CHUNK_BYTES, file.nbytes - i * CHUNK_BYTES)
                        data = self.files.read_contents(name, size, i * CHUNK_BYTES)
                    require_checksum(name, file, i, len(data), crc32(data))
                    cached_chunk = i, data
                piece = memoryview(cached_chunk[1])[offset % CHUNK_BYTES :][: len(target)]
                target[: len(piece)] = piece
                target, offset = target[len(piece) :], offset + len(piece)

        values, config = JsonNode(f"{where}: values", manifest.values), JsonNode(f"{where}: config", manifest.config)
        return make_snapshot_reader(name, file.arrays, fill, values, config)

    @contextmanager
    def open_segment(self, file: FileInfo) -> Iterator[SegmentReader]:
        """Open a segment to read it once, from start to end."""
        name = f"segments/{file.name}"
        with convert_read_errors(name):
            descriptor = self.files.open(name)
            try:
                yield SegmentReader(self.files, descriptor, name, file)
            finally:
                self.files.close(descriptor)

    def verify_segment(self, file: FileInfo) -> None:
        """Read a segment and verify its checksums."""
        memory = memoryview(bytearray(min(CHUNK_BYTES, file.nbytes)))
        with self.open_segment(file) as reader:
            for start in range(0, file.nbytes, CHUNK_BYTES):
                reader.read_into(memory[: min(CHUNK_BYTES, file.nbytes - start)])
            reader.require_end()

    def read_segment_stamp(self, file: FileInfo) -> tuple[int, ...]:
        """Return `FileOperations.change_stamp` of a segment, which changes when the file is written or replaced."""
        with convert_read_errors(f"segments/{file.name}"):
            return self.files.change_stamp(f"segments/{file.name}")


class SegmentReader:
    """Reads a segment once, from start to end, directly into the columns of a buffer, and verifies its checksums there.

    The bytes are valid only if `require_end` does not raise.
    """

    def __init__(self, files: FileOperations, descriptor: int, name: str, file: FileInfo) -> None:
        self._files, self._descriptor, self._name, self._file = files, descriptor, name, file
        self._num_read = self._checksum = 0

    def read_into(self, target: memoryview) -> None:
        """Fill `target` with the next bytes of the file."""
        while len(target):
            i, position = divmod(self._num_read, CHUNK_BYTES)
            piece, target = target[: CHUNK_BYTES - position], target[CHUNK_BYTES - position :]
            count = self._files.read_into(self._descriptor, piece)
            self._checksum = crc32(piece[:count], self._checksum)
            self._num_read += count
            if count < len(piece) or position + count == CHUNK_BYTES or self._num_read == self._file.nbytes:
                require_checksum(self._name, self._file, i, position + count, self._checksum)
                self._checksum = 0

    def require_end(self) -> None:
        """Raise unless all bytes of the file were read."""
        if self._num_read != self._file.nbytes:
            got = f"{self._num_read:,} of {self._file.nbytes:,} bytes"
            raise CorruptCheckpoint(explain(self._name, "only the bytes of its arrays", got, "Copy it again."))


def _iter_with_checksums(parts: Iterable[memoryview | bytes], checksums: list[int]) -> Iterator[memoryview]:
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


def require_checksum(name: str, file: FileInfo, chunk_index: int, length: int, checksum: int) -> None:
    """Raise unless this chunk of a file has its size and its checksum."""
    expected = file.checksums[chunk_index]
    if length != min(CHUNK_BYTES, file.nbytes - chunk_index * CHUNK_BYTES) or checksum != expected:
        place = f"{name}, bytes {chunk_index * CHUNK_BYTES} to {chunk_index * CHUNK_BYTES + length}"
        remedy = "Load an older checkpoint, or copy this one again."
        raise CorruptCheckpoint(explain(place, f"the checksum {expected:08x}", f"{checksum:08x}", remedy))
