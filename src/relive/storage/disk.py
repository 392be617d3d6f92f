"""Disk memory: a folder of arrays, a file each, mapped, which one process has at a time; and when it is committed.

What was committed is there after a loss of power, and all that was added after a kill.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import re
import sys
import time
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from relive import kernels
from relive.errors import CheckpointError, CorruptCheckpoint, IncompatibleCheckpoint, SchemaError, explain
from relive.kernels import complete
from relive.locking import ClosedLock
from relive.schema.checks import positive
from relive.storage import commits
from relive.storage.allocator import Allocator, Memory, tensor_in
from relive.storage.codec import bytes_of, reader_of
from relive.storage.commits import NAMES, READERS, Commit, dump, newest
from relive.storage.files import Files, is_read_error, unreadable

if TYPE_CHECKING:
    from relive.replay.recovery import RecoverableBuffer

FORMAT = "FORMAT"
_COMING = "FORMAT.new"
HEADER = b"recollect disk memory 1\n"
_OURS = re.compile(r"LOCK|FORMAT\.new|commit[01]|(column|next)[0-9]+|seals|broken|traffic|(ring|tree|sampler)\.[a-z]+")
"""Names of files that a killed process may have left of memory that it was making."""
_DERIVED = ("tree.sums", "tree.least", "tree.summary", "closed")
"""Arrays without a file: sums that are added up anew, and whether a RateLimit was closed in this process."""
ROWS = re.compile(r"(column|next)[0-9]+")
"""The names of what is larger than memory."""


COMMIT_BYTES = 1 << 28
COMMIT_SECONDS = 60.0
_GROWTH_OF_NUMBERS = 1 << 12
_FEWEST_ROWS = 32
"""Between commits of small buffers: waiting for the disk takes milliseconds."""
_BEHIND_BYTES = 1 << 24
"""After so much the disk begins to write, lest there be much to wait for at a commit."""
_REQUEST_BYTES = 1 << 17


def disk_memory(path: str | PathLike[str], commit_every: int | None = None, *, only_reads: bool = False) -> Memory:
    """See `Memory.disk`. With `only_reads` the files stay as they are, and writes stay in this process."""
    if not isinstance(path, str | PathLike) or not os.fspath(path):
        raise SchemaError(explain("Memory.disk", "the path of a folder", repr(path), "Pass a str or a Path."))
    root, every = Path(path).absolute(), None if commit_every is None else positive("commit_every", commit_every)
    told = "" if every is None else f", commit_every={every}"

    def opened(owner: Any) -> DiskAllocator:
        require_support(SchemaError)
        return DiskAllocator(Folder(root, owner.config(), only_reads=only_reads), every)

    def free_bytes() -> int | None:
        """The free space of the disk; None for a folder that holds a buffer already."""
        return None if (root / FORMAT).exists() else Files(root).free_bytes()

    name = f"Memory.disk({str(root)!r}{told})"
    return Memory(
        torch.device("cpu"),
        allocator=opened,
        free_bytes=free_bytes,
        name=name,
        free_of=f"the free space of the disk of {root}",
    )


def require_support(kind: type[Exception]) -> None:
    """Raise that kind of error where there cannot be disk memory."""
    got = sys.platform if sys.platform != "linux" else "no native core" if kernels.backend() == "torch" else ""
    if got:
        remedy = 'Keep the buffer in memory: device="cpu".'
        raise kind(explain("Memory.disk", "Linux and relive's native core", got, remedy))


class DiskAllocator(Allocator):
    """Arrays that are files, and the commits of their buffer."""

    device = torch.device("cpu")
    name = "disk"
    persistent = durable = True

    def __init__(self, folder: Folder, commit_every: int | None) -> None:
        self._folder, self._every = folder, commit_every
        self.reopened = folder.record is not None
        self._number = 0 if folder.record is None else folder.record.number
        self._records: dict[str, int] = {}
        """The open files of commits."""
        self._left = self._due = self._until_behind = math.inf
        """Rows that may be written, and time that may pass, before a commit; steps before the disk is told to begin."""
        self._is_closing = False
        """The last record says that the buffer is closed."""
        self.reading_in_order = folder.in_order

    def lock(self, recover: Callable[[], None]) -> AbstractContextManager[Any]:
        return kernels.guarded_lock(self._enter)

    def _enter(self) -> None:
        """Called by whoever has taken the lock, maybe after a wait for somebody who has closed the folder meanwhile."""
        if not self._folder.is_open:
            ClosedLock().__enter__()
        if self._is_closing:  # a close() that was interrupted
            self._commit(0, is_closed=False)

    def allocate(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        with self._folder.released_on_error():
            return self._folder.allocate(name, shape, dtype)

    def recover(self, buffer: RecoverableBuffer, *, resumes: bool) -> None:
        self._owner, self._rows_of_step = buffer, buffer.rows_of_step
        with self._folder.released_on_error():
            if self._folder.record is not None:
                buffer.recover(self._folder.record, self._checksum, resumes=resumes)
            if self._folder.only_reads:
                return
            self._plan()
            self._reserve()
            self.commit()
            if not self.reopened:
                self._folder.publish()

    def _plan(self) -> None:
        """How many rows an environment gets between commits, and between the times that the disk is told to begin."""
        step = max(self._owner.nbytes // self._owner.slots, 1)
        usual = max(min(COMMIT_BYTES // step, self._owner.slots // 8), _FEWEST_ROWS)
        self._usual_max_rows = usual if self._every is None else max(self._every, self._rows_of_step)
        self._slots_behind = max(_BEHIND_BYTES // step, 1)
        self._behind = int(self._owner.head.max())
        """The row that the disk was told of last."""

    def _reserve(self) -> None:
        """Open both files of commits with all the room that they will need: no commit fails because a disk is full."""
        record = self._record(self._usual_max_rows, is_closed=False)
        self._room_of_record = len(dump(record)) + self._owner.most_growth + _GROWTH_OF_NUMBERS
        for name in commits.NAMES:
            self._records[name] = self._folder.open_commit(name, self._room_of_record)

    # Committing

    def before_write(self, steps: int) -> None:
        self._left -= self._rows_of_step * steps
        self._until_behind -= steps
        if self._until_behind < 0:
            self._write_behind()
        if self._left < 0 or time.monotonic() > self._due:
            self._require_rows_left(self._rows_of_step * steps)

    def _require_rows_left(self, rows: int) -> None:
        """Write no more rows than the last commit has allowed for. This limit bounds what a power loss can destroy."""
        used = int((self._owner.head - self._committed).max())  # seldom as many as were allowed for
        if used + rows > self._max_rows or time.monotonic() > self._due:
            self._commit(rows, is_closed=False)
        else:
            self._left = self._max_rows - used - rows

    def commit(self) -> None:
        self._commit(0, is_closed=False)

    def _commit(self, coming: int, *, is_closed: bool) -> None:
        """First everything that a record speaks of is on the disk, then the record."""
        if not self._owner.is_alive or self._folder.only_reads:
            return
        max_rows = max(self._usual_max_rows, coming)
        record = self._record(max_rows, is_closed)
        try:
            self._folder.sync()
            self._is_closing |= is_closed
            self._write(record)
        except OSError as error:
            remedy = "Check the disk; everything committed before is intact."
            raise CheckpointError(
                explain(f"commit to {self._folder.root}", "a writable disk", error, remedy)
            ) from error
        head = self._owner.head.clone()
        self._number, self._committed, self._max_rows, self._is_closing = record.number, head, max_rows, is_closed
        self._left, self._due = max_rows - coming, time.monotonic() + COMMIT_SECONDS
        self._until_behind = self._slots_behind

    def _record(self, max_rows: int, is_closed: bool) -> Commit:
        owner, checksum = self._owner, self._checksum() if is_closed else 0
        run, state = commits.boot(), owner.state()
        return Commit(
            self._number + 1,
            run,
            is_closed,
            max_rows,
            owner.slots_checksum(),
            checksum,
            owner.config(),
            state.values,
            state.arrays,
        )

    def _checksum(self) -> int:
        """The checksum of all arrays that have no checksums of their rows."""
        total = 0
        for name, array in self._folder.arrays.items():
            if not ROWS.fullmatch(name) and name != "seals":
                total = zlib.crc32(bytes_of(array.tensor), total)
        return total

    def _write(self, record: Commit) -> None:
        files, file = self._folder.files, self._records[record.name]
        length = os.fstat(file).st_size
        data = dump(record, length)  # a file that got shorter would lose its room
        files.overwrite(file, data)
        if len(data) < length:
            with suppress(OSError):
                files.reserve(file, self._room_of_record)
        files.sync_kept(file)

    def _write_behind(self) -> None:
        """Let the disk begin to write what was added, and to read what is overwritten next."""
        slots, head = self._owner.slots, int(self._owner.head.max())
        first, last = max(self._behind, head - slots), head
        for array in self._folder.rows:
            step = array.tensor[0].nbytes
            for start, stop in _around(first, last, slots):
                self._owner.write_behind(array.file, start * step, (stop - start) * step)
            if head >= slots:  # else there is nothing yet to be read
                for start, stop in _around(head, head + min(2 * self._slots_behind, slots), slots):
                    _ask_for(array.memory, start * step // mmap.PAGESIZE * mmap.PAGESIZE, stop * step)
        self._behind, self._until_behind = head, self._slots_behind

    @contextmanager
    def replacing(self) -> Iterator[None]:
        had_rows = bool(self._owner.head.any())
        try:
            self._folder.withdraw(self._records.values())
            yield
        except BaseException:
            if not had_rows:  # new memory, which nobody wants then
                self._folder.close()
                raise
            self._publish_again()
            raise
        self._publish_again()

    def _publish_again(self) -> None:
        self._owner.seal()
        self.commit()
        self._folder.publish()

    @property
    def is_open(self) -> bool:
        return self._folder.is_open

    def close(self) -> None:
        self._commit(0, is_closed=True)
        self._folder.close()


def _ask_for(memory: mmap.mmap, start: int, stop: int) -> None:
    """Let the disk read a piece of a file; of a request that is larger, the system reads only the first so many."""
    for at in range(start, stop, _REQUEST_BYTES):
        memory.madvise(mmap.MADV_WILLNEED, at, min(_REQUEST_BYTES, stop - at))


def _around(first: int, last: int, slots: int) -> list[tuple[int, int]]:
    """The slots of the rows from `first` to `last`, at most all of them, in one or two pieces."""
    if first >= last:
        return []
    start, stop = first % slots, last % slots
    return [(start, stop)] if start < stop else [(start, slots), *([(0, stop)] if stop else [])]


@dataclass(frozen=True)
class MappedFile:
    """An array in a file."""

    file: int
    memory: mmap.mmap
    tensor: torch.Tensor


class Folder:
    """The arrays of one buffer below one root, taken by this process."""

    def __init__(self, root: Path, config: Mapping[str, Any], *, only_reads: bool) -> None:
        self.root, self.only_reads = root, only_reads
        self.files = Files(root)
        self.arrays: dict[str, MappedFile] = {}
        self.is_open = True
        open_files = self._open_files = _OpenFiles(self.files, self._taken(), os.getpid())
        self._end = weakref.finalize(self, open_files.release, self.arrays)
        self.record: Commit | None = None
        """The last commit that was found; None in new memory."""
        with self.released_on_error():
            if is_made(self.files):
                self.record = self._found(config)
            else:
                self._sweep()
                open_files.is_whole = False

    @contextlib.contextmanager
    def released_on_error(self) -> Iterator[None]:
        """Close the folder on an error at once, not when the error is forgotten."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    # Finding and taking the folder

    def _taken(self) -> int:
        """The lock of the folder."""
        try:
            if not self.only_reads:
                self._refuse_foreign()
                self.files.make_root(())
            lock = self.files.lock_kept(only_reads=self.only_reads)
        except OSError as error:
            remedy = "Pass a writable folder."
            raise CheckpointError(explain(str(self.root), "a folder for disk memory", error, remedy)) from error
        if lock >= 0:
            return lock
        remedy = "Call close() there first; to share a buffer between processes, use device=Memory.shared()."
        raise CheckpointError(
            explain(str(self.root), "one process at a time", "a folder that another process uses", remedy)
        )

    def _refuse_foreign(self) -> None:
        """Refuse a folder without FORMAT that holds files which are not ours."""
        names = self.files.names("") if self.root.exists() else []
        if FORMAT in names:
            is_made(self.files)
            return
        regular = self.files.regular("") if names else []
        foreign = [name for name in names if name not in regular or not _OURS.fullmatch(name)]
        if foreign or (names and "LOCK" not in names):
            remedy = "Pass an empty folder, or one that does not exist yet."
            got = f"{(foreign or names)[0]!r} in it"
            raise IncompatibleCheckpoint(explain(str(self.root), "a folder for disk memory", got, remedy))

    def _sweep(self) -> None:
        """Remove files of an interrupted creation; no step was ever added to them."""
        names = self.files.names("")
        if self.only_reads or self._has_rows(names):
            remedy = "Copy the folder again, with all of its files; if they are lost, remove the folder."
            raise CorruptCheckpoint(explain(FORMAT, "a file of this name", "no file", remedy))
        for name in self.files.regular(""):
            if name != "LOCK" and _OURS.fullmatch(name):
                self.files.remove(name)

    def _has_rows(self, names: list[str]) -> bool:
        """The first commit comes before the first row, and before it is said that this is disk memory."""
        try:
            return not set(NAMES).isdisjoint(names) and newest(self.root).number > 1
        except CorruptCheckpoint as error:
            if is_read_error(error):
                raise
            return False

    def _found(self, config: Mapping[str, Any]) -> Commit:
        record = newest(self.root)
        # Nobody draws from what is only looked at.
        free = ("listeners", "sampler") if self.only_reads else ("listeners",)
        if record.config.get("sampler") is None:  # one that a file does not describe
            free = (*free, "sampler")
        differs = [name for name in config if name not in free and record.config.get(name) != config[name]]
        if differs:
            name = differs[0]
            remedy = "Make the buffer with the same settings, or relive.load() it without any."
            where = f"{name} of the buffer in {self.root}"
            raise IncompatibleCheckpoint(explain(where, record.config.get(name), config[name], remedy))
        return record

    def publish(self) -> None:
        """All arrays are complete: from now on this is disk memory."""
        if _COMING in self.files.names(""):  # withdrawn before
            self.files.rename(_COMING, FORMAT)
        else:
            self.files.place(_COMING, FORMAT, [HEADER])
        self.files.sync_folder("")
        self._open_files.is_whole = True

    def withdraw(self, commits: Iterable[int]) -> None:
        """Begin to replace the contents: until they are published again, the folder counts as empty.

        Every file keeps its bytes of the disk: publishing again needs no more of them.
        """
        self._open_files.is_whole = False
        if FORMAT in self.files.names(""):
            self.files.rename(FORMAT, _COMING)
        for file in commits:
            self.files.overwrite(file, bytes(os.fstat(file).st_size))
        self.files.sync_folder("")
        for file in commits:
            self.files.sync_kept(file)

    def open_commit(self, name: str, nbytes: int) -> int:
        """The file of every other commit, with so many bytes of the disk reserved."""
        is_there = name in self.files.names("")
        file = self.files.open_kept(name, only_reads=False) if is_there else self.files.create_kept(name)
        self._open_files.others.append(file)
        try:
            self.files.reserve(file, nbytes)
        except OSError as error:
            if self.record is not None:
                return file  # whoever made it has reserved what it needs
            free, remedy = f"{self.files.free_bytes():,} bytes free ({error.strerror})", "Free disk space."
            raise MemoryError(explain(f"{self.root}: {name}", f"room for {nbytes:,} bytes", free, remedy)) from error
        return file

    # Arrays

    def allocate(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """See `Allocator`."""
        if name in _DERIVED:
            return torch.zeros(shape, dtype=dtype, device="cpu")
        nbytes = max(math.prod(shape) * dtype.itemsize, 1)
        file = self._opened(name, nbytes) if self.record else self._created(name, nbytes)
        memory = mmap.mmap(file, nbytes, access=mmap.ACCESS_COPY if self.only_reads else mmap.ACCESS_WRITE)
        tensor = tensor_in(memory, shape, dtype)
        self.arrays[name] = MappedFile(file, memory, tensor)
        if ROWS.fullmatch(name):
            memory.madvise(mmap.MADV_RANDOM)  # neighbours of a row that is drawn are not wanted
        return tensor

    def _created(self, name: str, nbytes: int) -> int:
        file = self.files.create_kept(name)
        try:
            if self.files.free_bytes() < nbytes:
                raise OSError("the disk is full")
            self.files.grow(file, nbytes)
        except OSError as error:
            self.files.close(file)
            self.files.remove(name)
            needed = sum(len(array.memory) for array in self.arrays.values()) + nbytes
            self.close()
            free = f"{self.files.free_bytes():,} bytes free ({error.strerror or error})"
            remedy = "Lower capacity, free disk space, or use another disk."
            raise MemoryError(explain(str(self.root), f"room for at least {needed:,} bytes", free, remedy)) from error
        return file

    def _opened(self, name: str, nbytes: int) -> int:
        file = -1
        try:
            file = self.files.open_kept(name, only_reads=self.only_reads)
            size = os.fstat(file).st_size
            if size == nbytes and not self.only_reads:
                self.files.grow(file, nbytes)  # a copy may have holes
        except OSError as error:
            if file >= 0:
                self.files.close(file)
            raise unreadable(name, error) from error
        if size != nbytes:
            self.files.close(file)
            raise CorruptCheckpoint(explain(name, f"{nbytes} bytes", size, "Copy the folder again."))
        return file

    @property
    def rows(self) -> list[MappedFile]:
        """The arrays that are larger than memory."""
        return [array for name, array in self.arrays.items() if ROWS.fullmatch(name)]

    @contextlib.contextmanager
    def in_order(self) -> Iterator[None]:
        """See `Allocator.reading_in_order`."""
        for array in self.rows:
            array.memory.madvise(mmap.MADV_SEQUENTIAL)
        try:
            yield
        finally:
            for array in self.rows:
                array.memory.madvise(mmap.MADV_RANDOM)

    def sync(self) -> None:
        """Wait until all arrays are on the disk."""
        for array in self.arrays.values():
            self.files.sync_kept(array.file)

    def close(self) -> None:
        """Let others have the folder; after an interruption, what is left of that."""
        self.is_open = False
        complete(partial(self._open_files.release, self.arrays))


_held: weakref.WeakSet[_OpenFiles] = weakref.WeakSet()


class _OpenFiles:
    """The open files and the lock of a folder, released however it ends."""

    def __init__(self, files: Files, lock: int, owner: int) -> None:
        self._files, self._lock, self._owner = files, lock, owner
        self.is_whole = True
        """Not so: somebody is making this memory, and what there is of it is nothing yet."""
        self.others: list[int] = []
        self._left: list[int] = []
        self._is_ending = False
        _held.add(self)

    def release(self, arrays: dict[str, MappedFile]) -> None:
        """Close everything, and leave nothing half-made behind; called again, it does what is left to do."""
        if os.getpid() != self._owner or self._lock < 0:  # a forked child has numbers of its own for them
            return
        while self._files_left(arrays):
            self._files.close(self._left.pop())
        if not self.is_whole:
            for name in (*arrays, *NAMES, FORMAT, _COMING):
                with contextlib.suppress(OSError):
                    self._files.remove(name)
        self._files.unlock(self._lock)
        lock, self._lock = self._lock, -1
        self._files.close(lock)

    def _files_left(self, arrays: dict[str, MappedFile]) -> list[int]:
        """The files to close: a number is taken away first, since another file may get it next."""
        if not self._is_ending:
            self._left = [*(array.file for array in arrays.values()), *self.others]
            self._is_ending = True
        return self._left

    def forget(self) -> None:
        """In a forked child: the lock is the parent's, and must not outlive it here."""
        with contextlib.suppress(OSError):
            self._files.close(self._lock)


def _forget_forked() -> None:
    for open_files in _held:
        open_files.forget()


os.register_at_fork(after_in_child=_forget_forked)


def is_made(files: Files) -> bool:
    """Whether there is disk memory in a folder; CorruptCheckpoint or IncompatibleCheckpoint if it is none of ours."""
    try:
        found = files.contents(FORMAT, 64)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise unreadable(FORMAT, error) from error
    said = re.fullmatch(rb"recollect disk memory ([0-9]{1,9})\n", found)
    if said is None:
        raise CorruptCheckpoint(explain(FORMAT, repr(HEADER.decode()), repr(found), "Pass a folder of disk memory."))
    reader_of(FORMAT, int(said[1]), READERS)
    return True
