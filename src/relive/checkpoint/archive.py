"""A folder of checkpoints: the manifest that a checkpoint is, and how one is committed, found and read.

Files are written to tmp/, synchronised, and renamed to their place; the manifest comes last. Until it is in its place
the older checkpoint is the newest, and nothing of it has been touched.
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
    CHUNK,
    FORMAT,
    MAX_JSON_BYTES,
    ArrayInfo,
    Node,
    arrays_from_json,
    arrays_to_json,
    format_of,
    from_json,
    reader_for,
    to_json,
    with_checksum,
    without_checksum,
)  # fmt: skip
from relive.storage.files import FOLDERS, Files, is_read_error, reading, unreadable

_FILE = re.compile(r"[0-9]{8,19}(-[0-9]{1,9})?\.bin")
_LINEAGE = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class FileInfo:
    """A file that never changes."""

    name: str
    arrays: tuple[ArrayInfo, ...]
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
    state: FileInfo
    segments: tuple[FileInfo, ...]

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
        "state": _file_to_json(manifest.state),
        "segments": [_file_to_json(file) for file in manifest.segments],
    }
    return with_checksum(to_json(document))


def _file_to_json(file: FileInfo) -> dict[str, Any]:
    return {"name": file.name, "arrays": arrays_to_json(file.arrays), "checksums": list(file.checksums)}


def parse(data: bytes, number: int) -> Manifest:
    """The manifest that `data` is; CorruptCheckpoint says what is wrong with it, and where."""
    where = manifest_file(number)
    version = format_of(where, data.partition(b"\n")[0])
    return reader_for(where, version, READERS)(where, data, number)


def _format_1(where: str, data: bytes, number: int) -> Manifest:
    document = from_json(where, without_checksum(where, data))
    first = data.partition(b"\n")[0]
    if document.entry("format").integer() != format_of(where, first):
        expected = f"{format_of(where, first)}, as its first line says (bytes 0 to {len(first)})"
        raise document.entry("format").error(expected)
    if document.entry("number").integer() != number:
        raise document.entry("number").error(f"{number}, the number in the file name")
    segments = tuple(_file_from_json(segment) for segment in document.entry("segments").items())
    if len({segment.name for segment in segments}) != len(segments):
        raise document.entry("segments").error("every segment once")
    return Manifest(
        number,
        document.entry("lineage").text(_LINEAGE),
        document.entry("kind").text(),
        document.entry("config").mapping(),
        document.entry("values").mapping(),
        _file_from_json(document.entry("state")),
        segments,
    )


READERS: dict[int, Callable[[str, bytes, int], Manifest]] = {1: _format_1}
"""The reader of a manifest by its format: `reader(where, data, number)`."""


def _file_from_json(node: Node) -> FileInfo:
    file = FileInfo(
        node.entry("name").text(_FILE),
        arrays_from_json(node.entry("arrays")),
        node.entry("checksums").integers(maximum=2**32 - 1),
    )
    if len(file.checksums) != -(-file.nbytes // CHUNK):
        raise node.entry("checksums").error(f"one checksum per {CHUNK} bytes of {file.nbytes}")
    return file


_MAX_LISTED = 64
_NUMBER = r"([0-9]{8}|[1-9][0-9]{8,17})"
_MANIFEST = re.compile(rf"{_NUMBER}\.json")
_SAVED_FILES = {
    "tmp": re.compile(rf"FORMAT|manifests-{_NUMBER}\.json|segments-{_NUMBER}-[0-9]+\.bin|state-{_NUMBER}\.bin"),
    "segments": re.compile(rf"{_NUMBER}-[0-9]+\.bin"),
    "state": re.compile(rf"{_NUMBER}\.bin"),
}
"""The names that saves give to files; a file of another name belongs to somebody else."""


class ManifestSummary(NamedTuple):
    """A checkpoint beside the one that is being saved."""

    lineage: str
    files: list[str]
    """Everything it needs, as names below the root."""


class Archive:
    """The checkpoints below one root."""

    def __init__(self, root: Path, files: type[Files] = Files) -> None:
        self.root = root
        self.files = files(root)
        self._uncommitted: list[str] = []
        """Files of a checkpoint that is not committed yet."""

    # Saving

    @contextmanager
    def saving(self, needed: int, require: Callable[[Manifest], None]) -> Iterator[dict[int, ManifestSummary]]:
        """Be the only one who saves here, about `needed` bytes, beside the checkpoints that are there.

        `require` refuses the newest of them before anything is changed. Then files of an interrupted save are removed;
        if this one is refused, its own are.
        """
        try:
            self._refuse_foreign()
            self.files.make_root()
            with self.files.locked(exclusive=True):
                summaries = self._read_summaries(require)
                self._remove_saved("tmp", set())
                if "FORMAT" not in self.files.names("") or self._require_format() < FORMAT:
                    self._place("FORMAT", [_header()])
                try:
                    yield summaries
                except BaseException:
                    self._discard()
                    raise
        except OSError as error:
            raise self._save_error(error, needed) from error

    def _read_summaries(self, require: Callable[[Manifest], None]) -> dict[int, ManifestSummary]:
        """The checkpoints whose manifests can be read, newest first; `require` is given the newest."""
        found: dict[int, ManifestSummary] = {}
        for number in reversed(self.numbers()):
            try:
                manifest = self.manifest(number)
            except CheckpointError:
                continue
            if not found:
                require(manifest)
            found[number] = ManifestSummary(manifest.lineage, manifest.files)
        return found

    def _discard(self) -> None:
        """Remove the files of a checkpoint that was not committed."""
        with suppress(OSError):
            self._remove_saved("tmp", set())
            for name in self._uncommitted:
                self.files.remove(name)

    def _refuse_foreign(self) -> None:
        """Refuse a folder without FORMAT that holds more than a first save may leave.

        A save writes FORMAT before any other file, so FORMAT is looked for last: another process may be saving here.
        """
        found = [name for name in self._names("") if name not in ("LOCK", "FORMAT", *FOLDERS)]
        found += [f"{folder}/{name}" for folder in FOLDERS for name in self._names(folder)]
        if "FORMAT" in self._names(""):
            self._require_format()
        elif found != ["tmp/FORMAT"] * len(found):
            remedy = "Pass an empty folder, or one that does not exist yet; nothing was changed."
            got = f"{next(name for name in found if name != 'tmp/FORMAT')!r} in it"
            raise CheckpointError(explain(f"save to {self.root}", "a folder of checkpoints", got, remedy))

    def _names(self, folder: str) -> list[str]:
        """The names in a folder, none if it is not there."""
        try:
            return self.files.names(folder)
        except FileNotFoundError:
            return []

    def _remove_saved(self, folder: str, needed: set[str]) -> None:
        """Remove the files that saves have made in a folder, but for those that are needed."""
        for name in self.files.regular(folder):
            if _SAVED_FILES[folder].fullmatch(name) and f"{folder}/{name}" not in needed:
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
        """The checkpoints, valid or not, oldest first."""
        return sorted(int(match[1]) for match in map(_MANIFEST.fullmatch, self._names("manifests")) if match)

    def next_number(self) -> int:
        """The number of the coming checkpoint."""
        number = max(self.numbers(), default=0) + 1
        if number >= 10**18:
            remedy = "Remove the manifest of that number, or save elsewhere."
            raise CheckpointError(
                explain(f"save to {self.root}", "checkpoint numbers of at most 18 digits", number, remedy)
            )
        return number

    def size(self, number: int) -> int:
        """The bytes of a manifest, 0 if it cannot be read."""
        try:
            return self.files.size(manifest_file(number))
        except OSError:
            return 0

    def is_long(self, number: int) -> bool:
        """A manifest lists so many files that the next checkpoint is to list fewer."""
        return self.size(number) > MAX_JSON_BYTES // 2

    def put(
        self, folder: str, name: str, arrays: tuple[ArrayInfo, ...], parts: Iterable[memoryview | bytes]
    ) -> FileInfo:
        """Write an immutable file of these arrays, whose bytes are `parts`."""
        checksums: list[int] = []
        place = f"{folder}/{name}"
        self._uncommitted.append(place)
        self._place(place, _append_checksums(parts, checksums))
        file = FileInfo(name, arrays, tuple(checksums))
        if file.nbytes != self.files.size(place):
            raise AssertionError(f"{name}: {self.files.size(place)} bytes for arrays of {file.nbytes}")
        return file

    def commit(self, manifest: Manifest) -> None:
        """Make a checkpoint of files that are in their places."""
        data = dump(manifest)
        if len(data) > MAX_JSON_BYTES:
            remedy = "Declare fewer fields, or save less often."
            raise CheckpointError(
                explain(manifest_file(manifest.number), f"at most {MAX_JSON_BYTES} bytes", len(data), remedy)
            )
        for folder in ("segments", "state"):
            self.files.sync_folder(folder)
        try:
            self._place(manifest_file(manifest.number), [data])
        finally:
            if self.exists(manifest.number):  # also if whoever waited for it was interrupted
                self._uncommitted.clear()
        self.files.sync_folder("manifests")

    def collect(self, keep: int, lineage: str, summaries: Mapping[int, ManifestSummary]) -> None:
        """Remove all but the newest `keep` checkpoints of a lineage, and files that none of the others needs.

        A manifest that cannot be read is of no lineage, and removed. What cannot be removed now is removed by a later
        save.
        """
        try:
            numbers = self.numbers()
            unread = {number for number in numbers if number not in summaries}
            if any(map(self._is_valid, unread)):
                return  # it can be read now, and nobody knows yet what it needs
            own = [number for number in numbers[::-1] if number not in unread and summaries[number].lineage == lineage]
            gone = unread | set(own) - set(islice(filter(self._is_valid, own), keep))
            needed = {name for number in summaries if number not in gone for name in summaries[number].files}
            found = {name: _MANIFEST.fullmatch(name) for name in self.files.regular("manifests")}
            old = [name for name, number in found.items() if number is not None and int(number[1]) in gone]
            for name in old:
                self.files.remove(f"manifests/{name}")
            if old:
                self.files.sync_folder("manifests")
            for folder in ("segments", "state"):
                self._remove_saved(folder, needed)
        except OSError:
            return

    def _is_valid(self, number: int) -> bool:
        try:
            self.require_files(self.manifest(number))
        except CheckpointError as error:
            if is_read_error(error) and error.__cause__ is not None:  # nothing is removed because of that
                raise error.__cause__ from None
            return False
        return True

    def is_damaged(self, number: int) -> bool:
        """Whether a checkpoint can never be loaded; False if the disk does not answer, which may pass."""
        try:
            return not self._is_valid(number)
        except OSError:
            return False

    def _place(self, name: str, parts: Iterable[memoryview | bytes]) -> None:
        self.files.place(f"tmp/{name.replace('/', '-')}", name, parts)
        if "/" not in name:
            self.files.sync_folder("")

    # Loading

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Nobody collects files meanwhile."""
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
            raise unreadable(str(self.root), error) from error

    def _require_format(self) -> int:
        """The format that the folder says it has, one that can be read."""
        found = self.files.contents("FORMAT", 64)
        said = re.fullmatch(rb"recollect checkpoint ([0-9]{1,9})\n", found)
        if said is None:
            place, expected = f"FORMAT, bytes 0 to {len(found)}", repr(_header().decode())
            raise CorruptCheckpoint(explain(place, expected, repr(found), "Copy the folder again."))
        reader_for("FORMAT", int(said[1]), READERS)
        return int(said[1])

    def manifest(self, number: int) -> Manifest:
        """A checkpoint's manifest, checked for itself."""
        name = manifest_file(number)
        try:
            if not 0 <= number < 10**18:
                raise FileNotFoundError
            data = self.files.contents(name, MAX_JSON_BYTES + 1)
        except FileNotFoundError:
            known = ", ".join(map(str, self.numbers()[-_MAX_LISTED:])) or "none"
            remedy = "Pass one of these numbers."
            raise NoCheckpoint(explain(name, f"one of the checkpoints {known}", number, remedy)) from None
        except OSError as error:
            raise unreadable(name, error) from error
        if len(data) > MAX_JSON_BYTES:
            place = f"{name}, bytes 0 to {MAX_JSON_BYTES}"
            raise CorruptCheckpoint(
                explain(place, f"at most {MAX_JSON_BYTES} bytes", "a longer file", "Copy it again.")
            )
        return parse(data, number)

    def exists(self, number: int) -> bool:
        """Whether there is a manifest of this number, valid or not."""
        try:
            self.files.size(manifest_file(number))
        except FileNotFoundError:
            return False
        except OSError:
            return True  # whoever reads it says what is wrong
        return True

    def require_files(self, manifest: Manifest) -> None:
        """Every file of a checkpoint is there and has its length."""
        files = [("state", manifest.state), *(("segments", segment) for segment in manifest.segments)]
        for folder, file in files:
            name = f"{folder}/{file.name}"
            with reading(name):
                size = self.files.size(name)
            if size != file.nbytes:
                raise CorruptCheckpoint(explain(name, f"{file.nbytes} bytes", size, "Copy the checkpoint again."))

    @contextmanager
    def open_file(self, folder: str, file: FileInfo) -> Iterator[FileReader]:
        """A file opened for reading from its first byte to its last."""
        with self._readable(f"{folder}/{file.name}") as opened:
            yield FileReader(self.files, opened, f"{folder}/{file.name}", file)

    def verify(self, folder: str, file: FileInfo) -> None:
        """Read a file and compare it with its checksums."""
        memory = memoryview(bytearray(min(CHUNK, file.nbytes)))
        with self.open_file(folder, file) as source:
            for start in range(0, file.nbytes, CHUNK):
                source.fill(memory[: min(CHUNK, file.nbytes - start)])
            source.finish()

    def fill(self, folder: str, file: FileInfo) -> Callable[[int, memoryview], None]:
        """A function that copies bytes of a file from an offset on, after their checksums were compared."""
        name = f"{folder}/{file.name}"
        last = -1, b""  # small arrays lie in one piece

        def piece(i: int) -> bytes:
            nonlocal last
            if last[0] != i:
                with self._readable(name) as opened:
                    found = self.files.read_at(opened, min(CHUNK, file.nbytes - i * CHUNK), i * CHUNK)
                require_checksum(name, file, i, len(found), crc32(found))
                last = i, found
            return last[1]

        def fill(offset: int, target: memoryview) -> None:
            while len(target):
                part = memoryview(piece(offset // CHUNK))[offset % CHUNK :][: len(target)]
                target[: len(part)] = part
                target, offset = target[len(part) :], offset + len(part)

        return fill

    def stamp(self, file: FileInfo) -> tuple[int, ...]:
        """A stamp of a segment, which changes when its file does."""
        with reading(f"segments/{file.name}"):
            return self.files.stamp(f"segments/{file.name}")

    @contextmanager
    def _readable(self, name: str) -> Iterator[int]:
        """A file opened for reading."""
        with reading(name):
            file = self.files.open(name)
            try:
                yield file
            finally:
                self.files.close(file)


class FileReader:
    """Bytes of a file in their order, read to where they belong and compared with their checksums there.

    What was filled is what was written only if `finish` does not raise.
    """

    def __init__(self, files: Files, opened: int, name: str, file: FileInfo) -> None:
        self._files, self._opened, self._name, self._file = files, opened, name, file
        self._done = self._checksum = 0

    def fill(self, target: memoryview) -> None:
        """Copy the next bytes, as many as fit."""
        while len(target):
            i = self._done // CHUNK
            piece = target[: CHUNK - self._done % CHUNK]
            count = self._files.read_into(self._opened, piece)
            self._checksum = crc32(piece[:count], self._checksum)
            self._done += count
            length = self._done - i * CHUNK
            if count < len(piece) or length == CHUNK or self._done == self._file.nbytes:
                require_checksum(self._name, self._file, i, length, self._checksum)
                self._checksum = 0
            target = target[len(piece) :]

    def finish(self) -> None:
        """All bytes of the file were read, and there are no others."""
        if self._done != self._file.nbytes:
            got = f"{self._done:,} of {self._file.nbytes:,} bytes"
            raise CorruptCheckpoint(explain(self._name, "only the bytes of its arrays", got, "Copy it again."))


def _header() -> bytes:
    """The contents of the file FORMAT."""
    return f"recollect checkpoint {FORMAT}\n".encode()


def _append_checksums(parts: Iterable[memoryview | bytes], checksums: list[int]) -> Iterator[memoryview]:
    """Pass bytes on, and append a checksum for every `CHUNK` of them."""
    room = 0
    for part in parts:
        rest = whole = memoryview(part).cast("B")
        while len(rest):
            if not room:
                checksums.append(0)
                room = CHUNK
            piece, rest = rest[:room], rest[room:]
            checksums[-1] = crc32(piece, checksums[-1])
            room -= len(piece)
        yield whole


def require_checksum(name: str, file: FileInfo, i: int, length: int, found: int) -> None:
    """The i-th piece of a file is whole, and its bytes are those that were written."""
    expected = file.checksums[i]
    if length != min(CHUNK, file.nbytes - i * CHUNK) or found != expected:
        place = f"{name}, bytes {i * CHUNK} to {i * CHUNK + length}"
        remedy = "Load an older checkpoint, or copy this one again."
        raise CorruptCheckpoint(explain(place, f"the checksum {expected:08x}", f"{found:08x}", remedy))
