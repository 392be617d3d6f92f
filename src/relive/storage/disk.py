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
    MAX_JSON_BYTES,
    Arrays,
    JsonNode,
    SnapshotReader,
    add_checksum,
    arrays_from_json,
    arrays_to_json,
    describe_array,
    encode_folder_format,
    from_json,
    make_snapshot_reader,
    require_first_line,
    require_folder_format,
    tensor_bytes,
    to_json,
)  # fmt: skip
from relive.storage.files import FileOperations, convert_read_errors, is_read_error, make_read_error

if TYPE_CHECKING:
    from relive.replay.recovery import RecoverableBuffer

FORMAT = "FORMAT"
_UNPUBLISHED_FORMAT = "FORMAT.new"
_FILE_NAME_PATTERN = re.compile(
    r"LOCK|FORMAT\.new|commit[01]|(column|next)[0-9]+|seals|broken|traffic|(ring|tree|sampler)\.[a-z]+"
)
"""Names of the files that an interrupted creation of disk memory may leave."""
_DERIVED_ARRAYS = ("tree.sums", "tree.least", "tree.summary", "closed")
"""Names of arrays without a file: sums are recomputed, and the closed flag of a RateLimit is not saved."""
_ROW_ARRAY_PATTERN = re.compile(r"(column|next)[0-9]+")
"""Pattern of the names of row arrays, which may be larger than memory."""

COMMIT_FILES = ("commit0", "commit1")
"""Names of the files that commits are written into alternately: one is always complete."""
COMMIT_BYTES = 1 << 28
"""Maximum bytes of new rows between commits, unless the caller of `Memory.disk` chooses the interval."""
COMMIT_SECONDS = 60.0
"""Maximum seconds between commits while steps are added."""
_MIN_ROWS = 32
"""Minimum number of rows between commits: each waits milliseconds for the disk."""
_MAX_COMMIT_BYTES = 1 << 30
"""Maximum bytes of a commit."""
_NUMBERS_GROWTH_BYTES = 1 << 12
"""Maximum growth of the JSON of a commit, whose numbers get more digits."""
_FLUSH_BYTES = 1 << 24
"""Bytes of new rows after which writing to the disk starts, so that the next commit waits for fewer bytes."""
_REQUEST_BYTES = 1 << 17
"""Maximum bytes that Linux reads ahead per request."""

_BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")
_BOOT_PATTERN = re.compile(r".{0,128}")


def disk_memory(path: str | PathLike[str], commit_every: int | None) -> Memory:
    """See `Memory.disk`."""
    if not isinstance(path, str | PathLike) or not os.fspath(path):
        raise SchemaError(explain("Memory.disk", "the path of a folder", repr(path), "Pass a str or a Path."))
    root = Path(path).absolute()
    max_rows = None if commit_every is None else check_positive_int("commit_every", commit_every)
    option = "" if max_rows is None else f", commit_every={max_rows}"

    def make_allocator(owner: Any) -> DiskAllocator:
        _require_platform_support(SchemaError)
        config = owner.config()
        return DiskAllocator(root, max_rows).check_config_matches(config)

    def free_bytes() -> int | None:
        with convert_read_errors(str(root)):
            # An existing buffer needs no free space, because its files have reserved their disk space already.
            return None if (root / FORMAT).exists() else FileOperations(root).free_bytes()

    return Memory(
        torch.device("cpu"),
        allocator=make_allocator,
        free_bytes=free_bytes,
        name=f"Memory.disk({str(root)!r}{option})",
        free_of=f"the free space of the disk of {root}",
    )


def reopen_disk_memory(path: str | PathLike[str], *, only_reads: bool) -> DiskAllocator:
    """Open a folder with a buffer; its `memory` is the `device` of that buffer.

    With `only_reads` files are not changed, and writes stay private to this process.
    """
    _require_platform_support(IncompatibleCheckpoint)
    return DiskAllocator(Path(path).absolute(), None, only_reads=only_reads, must_exist=True)


def _require_platform_support(error_class: type[Exception]) -> None:
    """Raise an error of this class if the platform does not support disk memory."""
    require_persistent_memory("Memory.disk", 'Keep the buffer in memory: device="cpu".', error_class)


class DiskAllocator(Allocator):
    """Allocates the arrays of one buffer as mapped files in a locked folder, and commits the buffer."""

    device = torch.device("cpu")
    name = "disk"
    persistent = durable = True

    def __init__(
        self, root: Path, commit_every: int | None, *, only_reads: bool = False, must_exist: bool = False
    ) -> None:
        self._root, self._commit_every, self._only_reads = root, commit_every, only_reads
        self._files = FileOperations(root)
        self._arrays: dict[str, MappedFile] = {}
        self._commit_files: dict[str, int] = {}
        """File descriptors of the commits, by file name."""
        self.is_open = True
        self._rows_left = self._deadline = self._steps_until_flush = math.inf
        """Number of rows until the next commit, its latest time, and number of steps until `_start_flush`."""
        self._is_closing = False
        """Whether the last commit declares the buffer closed."""
        open_files = self._open_files = _OpenFiles(self._files, self._lock_folder(), self._arrays, self._commit_files)
        weakref.finalize(self, open_files.release)
        self.last_commit: Commit | None = None
        """The commit from which the buffer is recovered; None in a new folder."""
        with self.closed_on_error():
            if _has_disk_format(self._files):
                self.last_commit = read_newest_commit(root)
            else:
                self._remove_incomplete_files(must_exist)
                open_files.is_published = False
        self.reopened = self.last_commit is not None
        self._number = 0 if self.last_commit is None else self.last_commit.number

    @property
    def memory(self) -> Memory:
        """Memory of this folder, for the buffer of its last commit."""
        name = f"Memory.disk({str(self._root)!r})"
        return Memory(self.device, lambda owner: self.check_config_matches(owner.config()), lambda: None, name)

    @contextmanager
    def closed_on_error(self, where: str | None = None) -> Iterator[None]:
        """Close the folder if the body raises. An OSError becomes a CheckpointError about `where` or the folder."""
        try:
            yield
        except BaseException as error:
            self._close_files()
            if isinstance(error, OSError):
                raise make_read_error(where or str(self._root), error) from error
            raise

    def _close_files(self) -> None:
        """Release the folder for other processes. If a call is interrupted, a second call completes it."""
        self.is_open = False
        complete(self._open_files.release)

    def _lock_folder(self) -> int:
        try:
            if not self._only_reads:
                self._refuse_foreign_files()
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

    def _refuse_foreign_files(self) -> None:
        """Raise if a folder without FORMAT contains files of other programs."""
        names = self._files.list_names("")
        if FORMAT in names:
            _has_disk_format(self._files)
            return
        regular_names = self._files.list_regular_files("") if names else []
        foreign_names = [name for name in names if name not in regular_names or not _FILE_NAME_PATTERN.fullmatch(name)]
        if foreign_names or (names and "LOCK" not in names):
            remedy = "Pass an empty folder, or one that does not exist yet."
            got = f"{(foreign_names or names)[0]!r} in it"
            raise IncompatibleCheckpoint(explain(str(self._root), "a folder for disk memory", got, remedy))

    def _remove_incomplete_files(self, must_exist: bool) -> None:
        """Remove the files of an interrupted creation; raise if there are rows, or with `must_exist`."""
        if must_exist or self._has_rows():
            remedy = "Copy the folder again, with all of its files; if they are lost, remove the folder."
            raise CorruptCheckpoint(explain(FORMAT, "a file of this name", "no file", remedy))
        for name in self._files.list_regular_files(""):
            if name != "LOCK" and _FILE_NAME_PATTERN.fullmatch(name):
                self._files.remove(name)

    def _has_rows(self) -> bool:
        """Whether there is a commit after the first one, which describes an empty buffer."""
        try:
            return (
                not set(COMMIT_FILES).isdisjoint(self._files.list_names(""))
                and read_newest_commit(self._root).number > 1
            )
        except CorruptCheckpoint as error:
            if is_read_error(error):
                raise
            return False

    def check_config_matches(self, config: Mapping[str, Any]) -> DiskAllocator:
        """Return self; raise if the config of the last commit differs from `config`, the settings of the buffer."""
        if self.last_commit is None:
            return self
        saved = self.last_commit.saved.config.value
        # Samplers are not compared for a read-only buffer, which does not sample, nor if the saved sampler was a custom
        # one, which the config does not contain.
        ignores_sampler = self._only_reads or saved.get("sampler") is None
        ignored_settings = ("listeners", "sampler") if ignores_sampler else ("listeners",)
        for name, value in config.items():
            if name not in ignored_settings and saved.get(name) != value:
                self._close_files()
                remedy = "Make the buffer with the same settings, or relive.load() it without any."
                where = f"{name} of the buffer in {self._root}"
                raise IncompatibleCheckpoint(explain(where, saved.get(name), value, remedy))
        return self

    def lock(self, recover: Callable[[], None]) -> AbstractContextManager[Any]:
        return kernels.make_guarded_lock(self._check_open_after_acquire)

    def _check_open_after_acquire(self) -> None:
        """Raise if another thread has closed the folder during the wait for the lock."""
        if not self.is_open:
            ClosedLock().__enter__()
        if self._is_closing:
            # An interrupted close() has declared the buffer closed, but it is still in use, so it is committed again.
            self.commit()

    def allocate(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if name in _DERIVED_ARRAYS:
            return torch.zeros(shape, dtype=dtype, device="cpu")
        nbytes = max(math.prod(shape) * dtype.itemsize, 1)
        with self.closed_on_error(name):
            file = self._open_array(name, nbytes) if self.reopened else self._create_array(name, nbytes)
            memory = mmap.mmap(file, nbytes, access=mmap.ACCESS_COPY if self._only_reads else mmap.ACCESS_WRITE)
            self._arrays[name] = MappedFile(file, memory, tensor_from_mapping(memory, shape, dtype))
            if _ROW_ARRAY_PATTERN.fullmatch(name):
                # Sampled rows are at random places, so reading ahead would waste memory.
                memory.madvise(mmap.MADV_RANDOM)
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
        file = self._files.open_for_update(name, only_reads=self._only_reads)
        try:
            size = os.fstat(file).st_size
            if size != nbytes:
                raise CorruptCheckpoint(explain(name, f"{nbytes} bytes", size, "Copy the folder again."))
            if not self._only_reads:
                # A copied file may be sparse, so its disk space is reserved again.
                self._files.grow(file, nbytes)
        except BaseException:
            self._files.close(file)
            raise
        return file

    @property
    def _row_files(self) -> list[MappedFile]:
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

    def recover(self, buffer: RecoverableBuffer, *, resumes: bool) -> None:
        self._owner, self._max_rows_per_step = buffer, buffer.max_rows_per_step
        with self.closed_on_error():
            if self.last_commit is not None:
                buffer.recover(self.last_commit, self._compute_checksum, resumes=resumes)
            if self._only_reads:
                return
            step_bytes = max(buffer.nbytes // buffer.slots, 1)
            self._default_max_rows = max(min(COMMIT_BYTES // step_bytes, buffer.slots // 8), _MIN_ROWS)
            if self._commit_every is not None:
                self._default_max_rows = max(self._commit_every, self._max_rows_per_step)
            self._flush_interval = max(_FLUSH_BYTES // step_bytes, 1)
            self._flushed_until = int(buffer.head.max())
            """First row that was not passed to the disk yet."""
            self._open_commit_files()
            self.commit()
            if not self.reopened:
                self._publish()

    def _open_commit_files(self) -> None:
        """Open both commit files and reserve their maximum size: a full disk must not make a commit fail."""
        document, arrays = self._describe_commit(self._default_max_rows, is_closed=False)
        nbytes = len(dump_commit(document, arrays)) + self._owner.max_commit_growth + _NUMBERS_GROWTH_BYTES
        self._reserved_bytes, names = nbytes, self._files.list_names("")
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
                    # The error is harmless here: the process that created the file has reserved its disk space already.
                    continue
                free, remedy = f"{self._files.free_bytes():,} bytes free ({error.strerror})", "Free disk space."
                where = f"{self._root}: {name}"
                raise MemoryError(explain(where, f"room for {nbytes:,} bytes", free, remedy)) from error

    def before_write(self, steps: int) -> None:
        max_new_rows = self._max_rows_per_step * steps
        self._rows_left -= max_new_rows
        self._steps_until_flush -= steps
        if self._steps_until_flush < 0:
            self._start_flush()
        is_late = time.monotonic() > self._deadline
        if self._rows_left >= 0 and not is_late:
            return
        # `_rows_left` assumes that every step ended an episode, so the true number of new rows is read from the heads.
        num_rows = int((self._owner.head - self._committed_head).max())
        if is_late or num_rows + max_new_rows > self._max_rows:
            self._commit(max_new_rows, is_closed=False)
        else:
            self._rows_left = self._max_rows - num_rows - max_new_rows

    def commit(self) -> None:
        self._commit(0, is_closed=False)

    def _commit(self, max_new_rows: int, *, is_closed: bool) -> None:
        """Write all arrays to the disk, then the commit, after which at least `max_new_rows` rows may be added."""
        if not self._owner.is_alive or self._only_reads:
            return
        max_rows = max(self._default_max_rows, max_new_rows)
        try:
            document, arrays = self._describe_commit(max_rows, is_closed=is_closed)
            self._sync_arrays()
            self._is_closing |= is_closed
            file = self._commit_files[COMMIT_FILES[document["number"] % 2]]
            length = os.fstat(file).st_size
            # The commit is padded to the length of the file: a shorter file would lose its reserved space.
            data = dump_commit(document, arrays, length)
            self._files.overwrite(file, data)
            if len(data) < length:
                with suppress(OSError):
                    self._files.reserve(file, self._reserved_bytes)
            self._files.sync_data(file)
        except OSError as error:
            remedy = "Check the disk; everything committed before is intact."
            raise CheckpointError(explain(f"commit to {self._root}", "a writable disk", error, remedy)) from error
        head = self._owner.head.clone()
        self._number, self._committed_head = document["number"], head
        self._max_rows, self._is_closing = max_rows, is_closed
        self._rows_left, self._deadline = max_rows - max_new_rows, time.monotonic() + COMMIT_SECONDS
        self._steps_until_flush = self._flush_interval

    def _sync_arrays(self) -> None:
        for array in self._arrays.values():
            self._files.sync_data(array.file)

    def _describe_commit(self, max_rows: int, *, is_closed: bool) -> tuple[dict[str, Any], Arrays]:
        """Return the next commit as JSON and arrays; see `Commit`."""
        owner, (values, arrays) = self._owner, self._owner.state()
        document = {
            "number": self._number + 1,
            "boot": read_boot_id(),
            "closed": is_closed,
            "reach": max_rows,
            "marks": owner.slots_checksum(),
            "checksum": self._compute_checksum() if is_closed else 0,
            "config": owner.config(),
            "values": values,
        }
        return document, arrays

    def _compute_checksum(self) -> int:
        """Return the checksum of all arrays except rows, which have checksums of their own."""
        total = 0
        for name, array in self._arrays.items():
            if not _ROW_ARRAY_PATTERN.fullmatch(name) and name != "seals":
                total = zlib.crc32(tensor_bytes(array.tensor), total)
        return total

    def _start_flush(self) -> None:
        """Start writing new rows to the disk, and reading the rows that will be overwritten next."""
        slots, head = self._owner.slots, int(self._owner.head.max())
        first, last = max(self._flushed_until, head - slots), head
        for array in self._row_files:
            step = array.tensor[0].nbytes
            for start, stop in _split_into_slot_ranges(first, last, slots):
                self._owner.write_behind(array.file, start * step, (stop - start) * step)
            if head < slots:
                # Before all slots are full, no row is overwritten, so none needs to be read.
                continue
            for start, stop in _split_into_slot_ranges(head, head + min(2 * self._flush_interval, slots), slots):
                # Linux reads only the first bytes of a large request, so the range is split.
                for offset in range(start * step // mmap.PAGESIZE * mmap.PAGESIZE, stop * step, _REQUEST_BYTES):
                    array.memory.madvise(mmap.MADV_WILLNEED, offset, min(_REQUEST_BYTES, stop * step - offset))
        self._flushed_until, self._steps_until_flush = head, self._flush_interval

    def _publish(self) -> None:
        """Create FORMAT, which declares the folder to be disk memory."""
        if _UNPUBLISHED_FORMAT in self._files.list_names(""):
            # `_unpublish` has given the file `FORMAT` another name, which is undone here.
            self._files.rename(_UNPUBLISHED_FORMAT, FORMAT)
        else:
            self._files.write_atomically(_UNPUBLISHED_FORMAT, FORMAT, [encode_folder_format("disk memory")])
        self._files.sync_folder("")
        self._open_files.is_published = True

    @contextmanager
    def replacing_contents(self) -> Iterator[None]:
        replaces_rows = bool(self._owner.head.any())
        try:
            self._unpublish()
            yield
        except BaseException:
            if replaces_rows:
                self._publish_again()
            else:
                # A load into a new buffer has failed: `_close_files` deletes the folder of this buffer.
                self._close_files()
            raise
        self._publish_again()

    def _unpublish(self) -> None:
        """Mark the folder as empty while its contents are replaced.

        Every file keeps its space on the disk, so that `_publish_again` cannot fail on a full disk.
        """
        self._open_files.is_published = False
        if FORMAT in self._files.list_names(""):
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


def _split_into_slot_ranges(first: int, last: int, slots: int) -> list[tuple[int, int]]:
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
    """The open files and the lock of a folder, which are released on close, on garbage collection and at exit."""

    def __init__(
        self, files: FileOperations, lock: int, arrays: dict[str, MappedFile], commits: dict[str, int]
    ) -> None:
        self._files, self._lock, self._arrays, self._commit_files = files, lock, arrays, commits
        self._process = os.getpid()
        self.is_published = True
        """False while the folder is created or replaced: `release` then deletes its files."""
        self._files_to_close: list[int] | None = None
        """Files that `release` has not closed yet; None before its first call."""
        _all_open_files.add(self)

    def release(self) -> None:
        """Close all files, delete an incomplete folder, and unlock it; if interrupted, call it again."""
        # A forked child does not own the folder: its parent releases it.
        if os.getpid() != self._process or self._lock < 0:
            return
        if self._files_to_close is None:
            self._files_to_close = [*(array.file for array in self._arrays.values()), *self._commit_files.values()]
        while self._files_to_close:
            # Each descriptor leaves the list before it is closed, because the system may reuse its number at once.
            self._files.close(self._files_to_close.pop())
        if not self.is_published:
            for name in (*self._arrays, *COMMIT_FILES, FORMAT, _UNPUBLISHED_FORMAT):
                with suppress(OSError):
                    self._files.remove(name)
        self._files.unlock(self._lock)
        lock, self._lock = self._lock, -1
        self._files.close(lock)

    def close_inherited_lock(self) -> None:
        """Close the lock file that a forked child has inherited: it would keep the folder locked after the parent."""
        with suppress(OSError):
            self._files.close(self._lock)


def _close_inherited_locks() -> None:
    for open_files in _all_open_files:
        open_files.close_inherited_lock()


os.register_at_fork(after_in_child=_close_inherited_locks)


def is_disk_memory(root: Path) -> bool:
    """Whether a folder contains disk memory of any format: without a file FORMAT, or with another one, it does not."""
    contents = _read_format(FileOperations(root))
    return contents is not None and contents.startswith(b"recollect disk memory ")


def _has_disk_format(files: FileOperations) -> bool:
    """Whether a folder has a file FORMAT; raise if the file does not declare disk memory."""
    contents = _read_format(files)
    if contents is not None:
        require_folder_format(contents, "disk memory")
    return contents is not None


def _read_format(files: FileOperations) -> bytes | None:
    """Return the contents of the file FORMAT of a folder; None without the file."""
    try:
        return files.read_contents(FORMAT, MAX_FIRST_LINE_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise make_read_error(FORMAT, error) from error


@dataclass(frozen=True)
class Commit:
    """A saved description of disk memory, from which its buffer is recovered."""

    number: int
    boot: str
    """Id of the boot during which the commit was written."""
    is_closed: bool
    """Whether `close()` wrote the commit: no row was added afterwards."""
    max_rows_since_commit: int
    """Maximum number of rows that may have been added per environment since the commit."""
    slots_checksum: int
    """Checksum of the kinds and starts of all slots."""
    checksum: int
    """Checksum of all arrays except rows; 0 unless closed."""
    saved: SnapshotReader
    """Config of the buffer, and its state outside the mapped files, with the heads of its rings."""

    @property
    def name(self) -> str:
        """Name of the file of this commit."""
        return COMMIT_FILES[self.number % 2]


def read_boot_id() -> str:
    """Return the id of the current boot: pages of an earlier boot may not have reached the disk."""
    return _BOOT_ID_FILE.read_text().strip()


def dump_commit(document: dict[str, Any], arrays: Arrays, length: int = 0) -> bytes:
    """Encode a commit: a line with a checksum, a line of JSON, and arrays.

    Spaces after the JSON pad the commit to `length` bytes, unless the line becomes too long.
    """
    head = to_json({**document, "arrays": arrays_to_json(describe_array(name, x) for name, x in arrays.items())})
    contents = b"".join(map(tensor_bytes, arrays.values()))
    for section, nbytes, max_bytes in (
        ("description", len(head), MAX_JSON_BYTES),
        ("arrays", len(contents), _MAX_COMMIT_BYTES - 2 * MAX_JSON_BYTES),
    ):
        if nbytes > max_bytes:
            remedy = "Declare fewer fields or environments."
            raise CheckpointError(explain(f"commit: {section}", f"at most {max_bytes} bytes", nbytes, remedy))
    missing = length - len(add_checksum(b"")) - len(head) - 1 - len(contents)
    if missing <= MAX_JSON_BYTES - len(head):
        head += b" " * missing
    return add_checksum(b"\n".join([head, contents]))


def read_newest_commit(root: Path) -> Commit:
    """Return the newest intact commit."""
    commits: list[Commit] = []
    errors: list[str] = []
    for name in COMMIT_FILES:
        try:
            commit = _read_commit(FileOperations(root), name)
            if commit.name != name:
                raise CorruptCheckpoint(explain(name, "the commit of this name", commit.name, "Copy it again."))
            commits.append(commit)
        except CorruptCheckpoint as error:
            if is_read_error(error):
                # The unreadable file may be the newest commit, so the older one must not be used.
                raise
            # A reference to the error would keep the stack frames of its traceback alive.
            errors.append(str(error))
    if not commits:
        raise CorruptCheckpoint(errors[0])
    return max(commits, key=lambda commit: commit.number)


def _read_commit(files: FileOperations, name: str) -> Commit:
    """Read and verify a commit, except its arrays, which are read when they are requested."""

    def read_at(count: int, offset: int) -> bytes:
        with convert_read_errors(name):
            return files.read_contents(name, count, offset)

    with convert_read_errors(name):
        nbytes = files.size(name)
    if nbytes > _MAX_COMMIT_BYTES:
        raise CorruptCheckpoint(explain(name, f"at most {_MAX_COMMIT_BYTES} bytes", nbytes, "Copy it again."))
    first_line = read_at(MAX_FIRST_LINE_BYTES, 0).partition(b"\n")[0]
    start, checksum = len(first_line) + 1, 0
    for offset in range(start, nbytes, CHUNK_BYTES):
        checksum = zlib.crc32(read_at(min(CHUNK_BYTES, nbytes - offset), offset), checksum)
    require_first_line(name, first_line, checksum, nbytes)
    head, newline, _ = read_at(MAX_JSON_BYTES + 1, start).partition(b"\n")
    if not newline or len(head) > MAX_JSON_BYTES:
        place = f"{name}, bytes {start} to {start + len(head)}"
        expected = f"a line of at most {MAX_JSON_BYTES} bytes"
        raise CorruptCheckpoint(explain(place, expected, "a longer line", "Copy it again."))
    node, arrays_start = from_json(name, head), start + len(head) + 1
    infos = arrays_from_json(node.entry("arrays"))
    if sum(array.nbytes for array in infos) != nbytes - arrays_start:
        raise node.entry("arrays").error(f"arrays of {nbytes - arrays_start} bytes")

    def fill(offset: int, target: memoryview) -> None:
        for start in range(0, len(target), CHUNK_BYTES):
            piece = target[start : start + CHUNK_BYTES]
            data = read_at(len(piece), arrays_start + offset + start)
            if len(data) < len(piece):
                raise CorruptCheckpoint(explain(name, "all bytes of its arrays", "a shorter file", "Copy it again."))
            piece[:] = data

    config, values = (JsonNode(f"{name}: {key}", node.entry(key).unchecked_dict()) for key in ("config", "values"))
    return Commit(
        node.entry("number").integer(1),
        node.entry("boot").text(_BOOT_PATTERN),
        node.entry("closed").flag(),
        node.entry("reach").integer(1),
        node.entry("marks").integer(0, 2**32 - 1),
        node.entry("checksum").integer(0, 2**32 - 1),
        make_snapshot_reader(name, infos, fill, values, config),
    )
