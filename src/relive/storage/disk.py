"""Disk memory: the arrays of a buffer as mapped files in a folder, and the commits that make them durable.

One process uses a folder at a time. Committed rows survive a power loss; all added rows survive a kill of the process.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from relive import kernels
from relive.errors import CheckpointError, CorruptCheckpoint, IncompatibleCheckpoint, SchemaError, explain
from relive.kernels import complete
from relive.locking import ClosedLock
from relive.schema.checks import check_positive_int
from relive.storage.allocator import Allocator, Memory, require_persistent_memory, tensor_from_mapping
from relive.storage.codec import (
    CHUNK_BYTES,
    MAX_FIRST_LINE_BYTES,
    MAX_FOLDER_FORMAT_BYTES,
    MAX_JSON_BYTES,
    Arrays,
    ArraySource,
    array_info,
    arrays_from_json,
    arrays_in_file,
    arrays_to_json,
    folder_format,
    from_json,
    parse_folder_format,
    parse_format,
    reader_for,
    require_first_line,
    tensor_bytes,
    to_json,
    with_checksum,
)  # fmt: skip
from relive.storage.files import Files, convert_read_errors, is_read_error, make_read_error

if TYPE_CHECKING:
    from relive.replay.recovery import RecoverableBuffer

FORMAT = "FORMAT"
_UNPUBLISHED_FORMAT = "FORMAT.new"
_FILE_NAME_PATTERN = re.compile(
    r"LOCK|FORMAT\.new|commit[01]|(column|next)[0-9]+|seals|broken|traffic|(ring|tree|sampler)\.[a-z]+"
)
"""Names of the files that an interrupted creation may leave."""
_DERIVED_ARRAYS = ("tree.sums", "tree.least", "tree.summary", "closed")
"""Arrays without a file: sums, which are recomputed, and the closed flag of a RateLimit, which is never saved."""
_ROW_ARRAY_PATTERN = re.compile(r"(column|next)[0-9]+")
"""Names of the arrays of rows, which may be larger than memory."""


COMMIT_BYTES = 1 << 28
COMMIT_SECONDS = 60.0
_NUMBERS_GROWTH_BYTES = 1 << 12
"""Maximum growth of the JSON of a commit: its numbers get more digits."""
_MIN_ROWS = 32
"""Minimum number of rows between commits: a commit waits milliseconds for the disk."""
_FLUSH_BYTES = 1 << 24
"""Bytes of new rows after which writing to the disk starts, so that a commit waits for less."""
_REQUEST_BYTES = 1 << 17
"""Maximum bytes that Linux reads ahead per request."""

_BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")
COMMIT_FILES = ("commit0", "commit1")
_MAX_COMMIT_BYTES = 1 << 30
"""Maximum bytes of a commit."""
_BOOT_PATTERN = re.compile(r".{0,128}")


def disk_memory(path: str | PathLike[str], commit_every: int | None = None, *, only_reads: bool = False) -> Memory:
    """See `Memory.disk`. With `only_reads` files are not changed, and writes stay private to this process."""
    if not isinstance(path, str | PathLike) or not os.fspath(path):
        raise SchemaError(explain("Memory.disk", "the path of a folder", repr(path), "Pass a str or a Path."))
    root = Path(path).absolute()
    max_rows = None if commit_every is None else check_positive_int("commit_every", commit_every)
    option = "" if max_rows is None else f", commit_every={max_rows}"

    def make_allocator(owner: Any) -> DiskAllocator:
        require_support(SchemaError)
        return DiskAllocator(root, owner.config(), max_rows, only_reads=only_reads)

    def free_bytes() -> int | None:
        """Return the free space of the disk; None if the folder already contains a buffer."""
        with convert_read_errors(str(root)):
            return None if (root / FORMAT).exists() else Files(root).free_bytes()

    return Memory(
        torch.device("cpu"),
        allocator=make_allocator,
        free_bytes=free_bytes,
        name=f"Memory.disk({str(root)!r}{option})",
        free_of=f"the free space of the disk of {root}",
    )


def require_support(error_class: type[Exception]) -> None:
    """Raise an error of this class if the platform does not support disk memory."""
    require_persistent_memory("Memory.disk", 'Keep the buffer in memory: device="cpu".', error_class)


class DiskAllocator(Allocator):
    """Allocates the arrays of one buffer as mapped files in a locked folder, and commits the buffer."""

    device = torch.device("cpu")
    name = "disk"
    persistent = durable = True

    def __init__(self, root: Path, config: Mapping[str, Any], commit_every: int | None, *, only_reads: bool) -> None:
        self._root, self._commit_every, self._only_reads = root, commit_every, only_reads
        self._files = Files(root)
        self._arrays: dict[str, MappedFile] = {}
        self._commit_files: dict[str, int] = {}
        """File descriptors of the commits, by file name."""
        self.is_open = True
        self._rows_left = self._deadline = self._steps_until_flush = math.inf
        """Number of rows and time until the next commit, and number of steps until writing to the disk starts."""
        self._is_closing = False
        """Whether the last commit marks the buffer as closed."""
        open_files = self._open_files = _OpenFiles(self._files, self._take_lock(), self._arrays, self._commit_files)
        weakref.finalize(self, open_files.release)
        self._last_commit: Commit | None = None
        """The last commit when the folder was opened; None in a new folder."""
        with self._closed_on_error(str(root)):
            if holds_disk_memory(self._files):
                self._last_commit = self._read_last_commit(config)
            else:
                self._remove_incomplete()
                open_files.is_published = False
        self.reopened = self._last_commit is not None
        self._number = 0 if self._last_commit is None else self._last_commit.number

    @contextmanager
    def _closed_on_error(self, where: str) -> Iterator[None]:
        """Close the folder immediately if the body raises; an error of the disk names `where`."""
        try:
            with convert_read_errors(where):
                yield
        except BaseException:
            self._close_files()
            raise

    def _close_files(self) -> None:
        """Release the folder for other processes. A second call completes an interrupted first call."""
        self.is_open = False
        complete(self._open_files.release)

    # Opening the folder

    def _take_lock(self) -> int:
        try:
            if not self._only_reads:
                self._refuse_foreign()
                self._files.make_root(())
            lock = self._files.lock_until_close(only_reads=self._only_reads)
        except OSError as error:
            remedy = "Pass a writable folder."
            raise CheckpointError(explain(str(self._root), "a folder for disk memory", error, remedy)) from error
        if lock >= 0:
            return lock
        remedy = "Call close() there first; to share a buffer between processes, use device=Memory.shared()."
        got = "a folder that another process uses"
        raise CheckpointError(explain(str(self._root), "one process at a time", got, remedy))

    def _refuse_foreign(self) -> None:
        """Raise if a folder without FORMAT contains files of other programs."""
        names = self._files.names("") if self._root.exists() else []
        if FORMAT in names:
            holds_disk_memory(self._files)
            return
        regular_names = self._files.regular_names("") if names else []
        foreign_names = [name for name in names if name not in regular_names or not _FILE_NAME_PATTERN.fullmatch(name)]
        if foreign_names or (names and "LOCK" not in names):
            remedy = "Pass an empty folder, or one that does not exist yet."
            got = f"{(foreign_names or names)[0]!r} in it"
            raise IncompatibleCheckpoint(explain(str(self._root), "a folder for disk memory", got, remedy))

    def _remove_incomplete(self) -> None:
        """Remove the files of an interrupted creation. They contain no steps."""
        if self._only_reads or self._has_rows():
            remedy = "Copy the folder again, with all of its files; if they are lost, remove the folder."
            raise CorruptCheckpoint(explain(FORMAT, "a file of this name", "no file", remedy))
        for name in self._files.regular_names(""):
            if name != "LOCK" and _FILE_NAME_PATTERN.fullmatch(name):
                self._files.remove(name)

    def _has_rows(self) -> bool:
        """Whether the folder contains rows: its first commit precedes the first row and the file FORMAT."""
        try:
            return not set(COMMIT_FILES).isdisjoint(self._files.names("")) and newest_commit(self._root).number > 1
        except CorruptCheckpoint as error:
            if is_read_error(error):
                raise
            return False

    def _read_last_commit(self, config: Mapping[str, Any]) -> Commit:
        """Return the last commit; raise if its config differs from `config`."""
        commit = newest_commit(self._root)
        # A read-only buffer does not sample, and a custom sampler is not part of the config.
        ignores_sampler = self._only_reads or commit.config.get("sampler") is None
        ignored_settings = ("listeners", "sampler") if ignores_sampler else ("listeners",)
        for name, value in config.items():
            if name not in ignored_settings and commit.config.get(name) != value:
                remedy = "Make the buffer with the same settings, or relive.load() it without any."
                where = f"{name} of the buffer in {self._root}"
                raise IncompatibleCheckpoint(explain(where, commit.config.get(name), value, remedy))
        return commit

    # Allocating arrays

    def lock(self, recover: Callable[[], None]) -> AbstractContextManager[Any]:
        return kernels.guarded_lock(self._after_acquire)

    def _after_acquire(self) -> None:
        """Called after the lock was acquired: another thread may have closed the folder during the wait."""
        if not self.is_open:
            ClosedLock().__enter__()
        if self._is_closing:  # an earlier close() was interrupted
            self.commit()

    def allocate(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if name in _DERIVED_ARRAYS:
            return torch.zeros(shape, dtype=dtype, device="cpu")
        nbytes = max(math.prod(shape) * dtype.itemsize, 1)
        with self._closed_on_error(name):
            file = self._open_array(name, nbytes) if self.reopened else self._create_array(name, nbytes)
            memory = mmap.mmap(file, nbytes, access=mmap.ACCESS_COPY if self._only_reads else mmap.ACCESS_WRITE)
            self._arrays[name] = MappedFile(file, memory, tensor_from_mapping(memory, shape, dtype))
            if _ROW_ARRAY_PATTERN.fullmatch(name):
                memory.madvise(mmap.MADV_RANDOM)  # samples are random: reading ahead wastes memory
        return self._arrays[name].tensor

    def _create_array(self, name: str, nbytes: int) -> int:
        file = self._files.create_for_update(name)
        try:
            if self._files.free_bytes() < nbytes:
                raise OSError("the disk is full")
            self._files.grow(file, nbytes)
        except OSError as error:
            self._files.close(file)
            self._files.remove(name)
            needed = sum(len(array.memory) for array in self._arrays.values()) + nbytes
            self._close_files()
            free = f"{self._files.free_bytes():,} bytes free ({error.strerror or error})"
            remedy = "Lower capacity, free disk space, or use another disk."
            raise MemoryError(explain(str(self._root), f"room for at least {needed:,} bytes", free, remedy)) from error
        return file

    def _open_array(self, name: str, nbytes: int) -> int:
        file = -1
        try:
            file = self._files.open_for_update(name, only_reads=self._only_reads)
            size = os.fstat(file).st_size
            if size == nbytes and not self._only_reads:
                self._files.grow(file, nbytes)  # a copied file may be sparse
        except OSError as error:
            if file >= 0:
                self._files.close(file)
            raise make_read_error(name, error) from error
        if size != nbytes:
            self._files.close(file)
            raise CorruptCheckpoint(explain(name, f"{nbytes} bytes", size, "Copy the folder again."))
        return file

    @property
    def _row_files(self) -> list[MappedFile]:
        """The arrays of rows, which may be larger than memory."""
        return [array for name, array in self._arrays.items() if _ROW_ARRAY_PATTERN.fullmatch(name)]

    @contextmanager
    def reading_in_order(self) -> Iterator[None]:
        for array in self._row_files:
            array.memory.madvise(mmap.MADV_SEQUENTIAL)
        try:
            yield
        finally:
            for array in self._row_files:
                array.memory.madvise(mmap.MADV_RANDOM)

    # Committing

    def recover(self, buffer: RecoverableBuffer, *, resumes: bool) -> None:
        self._owner, self._max_rows_per_step = buffer, buffer.max_rows_per_step
        with self._closed_on_error(str(self._root)):
            if self._last_commit is not None:
                buffer.recover(self._last_commit, self._checksum, resumes=resumes)
            if self._only_reads:
                return
            self._plan_commits()
            self._reserve()
            self.commit()
            if not self.reopened:
                self._publish()

    def _plan_commits(self) -> None:
        """Set the number of rows per environment between commits, and between starts of writing to the disk."""
        step = max(self._owner.nbytes // self._owner.slots, 1)
        default = max(min(COMMIT_BYTES // step, self._owner.slots // 8), _MIN_ROWS)
        if self._commit_every is not None:
            default = max(self._commit_every, self._max_rows_per_step)
        self._default_max_rows = default
        self._flush_interval = max(_FLUSH_BYTES // step, 1)
        self._flushed_until = int(self._owner.head.max())
        """First row that was not passed to the disk yet."""

    def _reserve(self) -> None:
        """Open both commit files and reserve their maximum size: a full disk must not make a commit fail."""
        commit = self._make_commit(self._default_max_rows, is_closed=False)
        self._reserved_bytes = nbytes = len(dump_commit(commit)) + self._owner.max_growth + _NUMBERS_GROWTH_BYTES
        names = self._files.names("")
        for name in COMMIT_FILES:
            with convert_read_errors(name):
                if name in names:
                    file = self._files.open_for_update(name, only_reads=False)
                else:
                    file = self._files.create_for_update(name)
            self._commit_files[name] = file
            try:
                self._files.reserve(file, nbytes)
            except OSError as error:
                if self.reopened:
                    continue  # the space was reserved by the process that created the file
                free, remedy = f"{self._files.free_bytes():,} bytes free ({error.strerror})", "Free disk space."
                where = f"{self._root}: {name}"
                raise MemoryError(explain(where, f"room for {nbytes:,} bytes", free, remedy)) from error

    def before_write(self, steps: int) -> None:
        self._rows_left -= self._max_rows_per_step * steps
        self._steps_until_flush -= steps
        if self._steps_until_flush < 0:
            self._start_flush()
        if self._rows_left < 0 or time.monotonic() > self._deadline:
            self._require_rows_left(self._max_rows_per_step * steps)

    def _require_rows_left(self, rows: int) -> None:
        """Commit if the last commit does not permit `rows` more rows. This limit bounds the loss at a power failure."""
        # The true number of rows is usually smaller than the number that was counted.
        num_new_rows = int((self._owner.head - self._committed_head).max())
        if num_new_rows + rows > self._max_rows or time.monotonic() > self._deadline:
            self._commit(rows, is_closed=False)
        else:
            self._rows_left = self._max_rows - num_new_rows - rows

    def commit(self) -> None:
        self._commit(0, is_closed=False)

    def _commit(self, next_rows: int, *, is_closed: bool) -> None:
        """Write all arrays to the disk, then the commit, and permit at least `next_rows` rows after it."""
        if not self._owner.is_alive or self._only_reads:
            return
        max_rows = max(self._default_max_rows, next_rows)
        try:
            commit = self._make_commit(max_rows, is_closed)
            self._sync()
            self._is_closing |= is_closed
            self._write_commit(commit)
        except OSError as error:
            remedy = "Check the disk; everything committed before is intact."
            raise CheckpointError(explain(f"commit to {self._root}", "a writable disk", error, remedy)) from error
        head = self._owner.head.clone()
        self._number, self._committed_head, self._max_rows, self._is_closing = commit.number, head, max_rows, is_closed
        self._rows_left, self._deadline = max_rows - next_rows, time.monotonic() + COMMIT_SECONDS
        self._steps_until_flush = self._flush_interval

    def _sync(self) -> None:
        """Write all arrays to the disk and wait."""
        for array in self._arrays.values():
            self._files.sync_data(array.file)

    def _make_commit(self, max_rows: int, is_closed: bool) -> Commit:
        owner, checksum = self._owner, self._checksum() if is_closed else 0
        state = owner.state()
        return Commit(
            self._number + 1,
            boot_id(),
            is_closed,
            max_rows,
            owner.slots_checksum(),
            checksum,
            owner.config(),
            state.values,
            state.arrays,
        )

    def _checksum(self) -> int:
        """Return the checksum of all arrays except rows, which have checksums of their own."""
        total = 0
        for name, array in self._arrays.items():
            if not _ROW_ARRAY_PATTERN.fullmatch(name) and name != "seals":
                total = zlib.crc32(tensor_bytes(array.tensor), total)
        return total

    def _write_commit(self, commit: Commit) -> None:
        file = self._commit_files[commit.name]
        length = os.fstat(file).st_size
        data = dump_commit(commit, length)  # padded: a shorter file would lose its reserved space
        self._files.overwrite(file, data)
        if len(data) < length:
            with suppress(OSError):
                self._files.reserve(file, self._reserved_bytes)
        self._files.sync_data(file)

    def _start_flush(self) -> None:
        """Start writing new rows to the disk, and reading the rows that will be overwritten next."""
        slots, head = self._owner.slots, int(self._owner.head.max())
        first, last = max(self._flushed_until, head - slots), head
        for array in self._row_files:
            step = array.tensor[0].nbytes
            for start, stop in _slot_ranges(first, last, slots):
                self._owner.write_behind(array.file, start * step, (stop - start) * step)
            if head >= slots:  # until then nothing is overwritten, so that nothing has to be read
                for start, stop in _slot_ranges(head, head + min(2 * self._flush_interval, slots), slots):
                    _read_ahead(array.memory, start * step // mmap.PAGESIZE * mmap.PAGESIZE, stop * step)
        self._flushed_until, self._steps_until_flush = head, self._flush_interval

    # Replacing all contents, and closing

    def _publish(self) -> None:
        """Create FORMAT, which declares the folder to be disk memory."""
        if _UNPUBLISHED_FORMAT in self._files.names(""):  # `_unpublish` has renamed FORMAT: rename it back
            self._files.rename(_UNPUBLISHED_FORMAT, FORMAT)
        else:
            self._files.place(_UNPUBLISHED_FORMAT, FORMAT, [folder_format("disk memory")])
        self._files.sync_folder("")
        self._open_files.is_published = True

    @contextmanager
    def replacing(self) -> Iterator[None]:
        had_rows = bool(self._owner.head.any())
        try:
            self._unpublish()
            yield
        except BaseException:
            if not had_rows:  # the load into a new buffer failed: discard the folder
                self._close_files()
                raise
            self._publish_again()
            raise
        self._publish_again()

    def _unpublish(self) -> None:
        """Mark the folder as empty while its contents are replaced.

        Every file keeps its space on the disk, so that `_publish_again` cannot fail on a full disk.
        """
        self._open_files.is_published = False
        if FORMAT in self._files.names(""):
            self._files.rename(FORMAT, _UNPUBLISHED_FORMAT)
        for file in self._commit_files.values():
            self._files.overwrite(file, bytes(os.fstat(file).st_size))
        self._files.sync_folder("")
        for file in self._commit_files.values():
            self._files.sync_data(file)

    def _publish_again(self) -> None:
        self._owner.recompute_checksums()
        self.commit()
        self._publish()

    def close(self) -> None:
        self._commit(0, is_closed=True)
        self._close_files()


def _read_ahead(memory: mmap.mmap, start: int, stop: int) -> None:
    """Start reading a range of a file, in requests of a size that Linux reads completely."""
    for at in range(start, stop, _REQUEST_BYTES):
        memory.madvise(mmap.MADV_WILLNEED, at, min(_REQUEST_BYTES, stop - at))


def _slot_ranges(first: int, last: int, slots: int) -> list[tuple[int, int]]:
    """Return the slots of rows `first` to `last` (exclusive, at most `slots` rows) as one or two ranges."""
    if first >= last:
        return []
    start, stop = first % slots, last % slots
    return [(start, stop)] if start < stop else [(start, slots), *([(0, stop)] if stop else [])]


@dataclass(frozen=True)
class MappedFile:
    """An array in a mapped file."""

    file: int
    memory: mmap.mmap
    tensor: torch.Tensor


_all_open_files: weakref.WeakSet[_OpenFiles] = weakref.WeakSet()
"""The open folders of this process."""


class _OpenFiles:
    """The open files and the lock of a folder. Released on close, on garbage collection and at exit."""

    def __init__(self, files: Files, lock: int, arrays: dict[str, MappedFile], commits: dict[str, int]) -> None:
        self._files, self._lock, self._arrays, self._commit_files = files, lock, arrays, commits
        self._process = os.getpid()
        self.is_published = True
        """False while the folder is created or replaced: its files are deleted on release."""
        self._files_to_close: list[int] | None = None
        """Files that `release` has not closed yet; None before its first call."""
        _all_open_files.add(self)

    def release(self) -> None:
        """Close all files, delete an incomplete folder, and unlock it. A second call completes an interrupted one."""
        if os.getpid() != self._process or self._lock < 0:  # the descriptors of a forked child are its own
            return
        if self._files_to_close is None:
            self._files_to_close = [*(array.file for array in self._arrays.values()), *self._commit_files.values()]
        while self._files_to_close:  # pop first: the system may reuse a closed number at once
            self._files.close(self._files_to_close.pop())
        if not self.is_published:
            for name in (*self._arrays, *COMMIT_FILES, FORMAT, _UNPUBLISHED_FORMAT):
                with suppress(OSError):
                    self._files.remove(name)
        self._files.unlock(self._lock)
        lock, self._lock = self._lock, -1
        self._files.close(lock)

    def forget(self) -> None:
        """Close the lock that a forked child has inherited, and that would outlive the parent."""
        with suppress(OSError):
            self._files.close(self._lock)


def _forget_forked() -> None:
    for open_files in _all_open_files:
        open_files.forget()


os.register_at_fork(after_in_child=_forget_forked)


def holds_disk_memory(files: Files) -> bool:
    """Whether a folder contains disk memory; raise if its file FORMAT is damaged, foreign or too new."""
    try:
        header = files.contents(FORMAT, MAX_FOLDER_FORMAT_BYTES)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise make_read_error(FORMAT, error) from error
    parse_folder_format(header, "disk memory", READERS)
    return True


# Commits: the heads of the rings, and the state of a buffer outside its arrays. Two files are written alternately:
# while one is being written, the other is complete.


@dataclass(frozen=True)
class Commit:
    """The state of a buffer at one commit."""

    number: int
    boot: str
    """Id of the boot during which the commit was written."""
    is_closed: bool
    """Whether `close()` wrote the commit: no row was added afterwards."""
    max_rows_since_commit: int
    """Maximum number of rows that an environment may have received since the commit."""
    slots_checksum: int
    """Checksum of the kinds and starts of all slots."""
    checksum: int
    """Checksum of all arrays except rows; 0 unless closed."""
    config: dict[str, Any]
    values: dict[str, Any]
    arrays: ArraySource | Arrays
    """A source if the commit was read, tensors if it is about to be written."""

    @property
    def name(self) -> str:
        """Name of the file of this commit."""
        return COMMIT_FILES[self.number % 2]


def boot_id() -> str:
    """Return the id of the current boot: pages of an earlier boot may not have reached the disk."""
    return _BOOT_ID_FILE.read_text().strip()


def dump_commit(commit: Commit, length: int = 0) -> bytes:
    """Encode a commit: a line with a checksum, a line of JSON, and arrays.

    Spaces after the JSON pad it to `length` bytes, if the padded line is not too long.
    """
    assert isinstance(commit.arrays, dict)
    document = {
        "number": commit.number,
        "boot": commit.boot,
        "closed": commit.is_closed,
        "reach": commit.max_rows_since_commit,
        "marks": commit.slots_checksum,
        "checksum": commit.checksum,
        "config": commit.config,
        "values": commit.values,
        "arrays": arrays_to_json(array_info(name, array) for name, array in commit.arrays.items()),
    }
    head, arrays = to_json(document), b"".join(map(tensor_bytes, commit.arrays.values()))
    for what, nbytes, max_bytes in (
        ("description", len(head), MAX_JSON_BYTES),
        ("arrays", len(arrays), _MAX_COMMIT_BYTES - 2 * MAX_JSON_BYTES),
    ):
        if nbytes > max_bytes:
            remedy = "Declare fewer fields or environments."
            raise CheckpointError(explain(f"commit: {what}", f"at most {max_bytes} bytes", nbytes, remedy))
    missing = length - len(with_checksum(b"")) - len(head) - 1 - len(arrays)
    if missing <= MAX_JSON_BYTES - len(head):
        head += b" " * missing
    return with_checksum(b"\n".join([head, arrays]))


def _commit_format_1(where: str, first_line: bytes, read_at: Callable[[int, int], bytes], nbytes: int) -> Commit:
    start, checksum = len(first_line) + 1, 0
    for offset in range(start, nbytes, CHUNK_BYTES):
        checksum = zlib.crc32(read_at(min(CHUNK_BYTES, nbytes - offset), offset), checksum)
    require_first_line(where, first_line, checksum, nbytes)
    head, newline, _ = read_at(MAX_JSON_BYTES + 1, start).partition(b"\n")
    if not newline or len(head) > MAX_JSON_BYTES:
        place = f"{where}, bytes {start} to {start + len(head)}"
        expected = f"a line of at most {MAX_JSON_BYTES} bytes"
        raise CorruptCheckpoint(explain(place, expected, "a longer line", "Copy it again."))
    node, rest = from_json(where, head), start + len(head) + 1
    infos = arrays_from_json(node.entry("arrays"))
    if sum(array.nbytes for array in infos) != nbytes - rest:
        raise node.entry("arrays").error(f"arrays of {nbytes - rest} bytes")

    def fill(offset: int, target: memoryview) -> None:
        for at in range(0, len(target), CHUNK_BYTES):
            piece = target[at : at + CHUNK_BYTES]
            data = read_at(len(piece), rest + offset + at)
            if len(data) < len(piece):
                raise CorruptCheckpoint(explain(where, "all bytes of its arrays", "a shorter file", "Copy it again."))
            piece[:] = data

    return Commit(
        node.entry("number").integer(1),
        node.entry("boot").text(_BOOT_PATTERN),
        node.entry("closed").flag(),
        node.entry("reach").integer(1),
        node.entry("marks").integer(0, 2**32 - 1),
        node.entry("checksum").integer(0, 2**32 - 1),
        node.entry("config").mapping(),
        node.entry("values").mapping(),
        arrays_in_file(where, infos, fill),
    )


READERS: dict[int, Callable[..., Commit]] = {1: _commit_format_1}
"""Reader of each format: `reader(where, first_line, read_at, nbytes)`; `read_at(count, offset)` reads the file."""


def newest_commit(root: Path) -> Commit:
    """Return the newest intact commit."""
    commits: list[Commit] = []
    errors: list[str] = []
    for name in COMMIT_FILES:
        try:
            commit = _read_commit(Files(root), name)
            if commit.name != name:
                raise CorruptCheckpoint(explain(name, "the commit of this name", commit.name, "Copy it again."))
            commits.append(commit)
        except CorruptCheckpoint as error:
            if is_read_error(error):  # the file that cannot be read may be the newest commit
                raise
            errors.append(str(error))  # the error itself would keep its callers' frames alive
    if not commits:
        raise CorruptCheckpoint(errors[0])
    return max(commits, key=lambda commit: commit.number)


def _read_commit(files: Files, name: str) -> Commit:
    def read_at(count: int, offset: int) -> bytes:
        with convert_read_errors(name):
            return files.contents(name, count, offset)

    with convert_read_errors(name):
        nbytes = files.size(name)
    if nbytes > _MAX_COMMIT_BYTES:
        raise CorruptCheckpoint(explain(name, f"at most {_MAX_COMMIT_BYTES} bytes", nbytes, "Copy it again."))
    first_line = read_at(MAX_FIRST_LINE_BYTES, 0).partition(b"\n")[0]
    reader = reader_for(name, parse_format(name, first_line), READERS)
    return reader(name, first_line, read_at, nbytes)
