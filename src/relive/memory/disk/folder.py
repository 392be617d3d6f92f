"""A folder of arrays: a file each, mapped; and a lock that one process has at a time."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import re
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from relive.errors import CheckpointError, CorruptCheckpoint, IncompatibleCheckpoint, explain
from relive.kernels import complete
from relive.memory.disk.records import NAMES, READERS, Record, newest
from relive.memory.documents import reader_of
from relive.memory.files import Files, unreadable
from relive.memory.mapped import tensor_in

FORMAT = "FORMAT"
_COMING = "FORMAT.new"
HEADER = b"recollect disk memory 1\n"
_OURS = re.compile(r"LOCK|FORMAT\.new|commit[01]|(column|next)[0-9]+|seals|broken|traffic|(ring|tree|sampler)\.[a-z]+")
"""What a process that died may have left of memory that it was making."""
_DERIVED = ("tree.sums", "tree.least", "tree.summary", "closed")
"""Arrays without a file: sums that are added up anew, and whether a RateLimit was closed in this process."""
ROWS = re.compile(r"(column|next)[0-9]+")
"""The names of what is larger than memory."""


@dataclass(frozen=True)
class Mapped:
    """An array in a file."""

    file: int
    memory: mmap.mmap
    tensor: torch.Tensor


class Folder:
    """The arrays of one buffer below one root, taken by this process."""

    def __init__(self, root: Path, config: Mapping[str, Any], *, only_reads: bool) -> None:
        self.root, self.only_reads = root, only_reads
        self.files = Files(root)
        self.arrays: dict[str, Mapped] = {}
        self.is_open = True
        holdings = self._holdings = _Holdings(self.files, self._taken(), os.getpid())
        self._end = weakref.finalize(self, holdings.let_go, self.arrays)
        self.record: Record | None = None
        """The last commit that was found; None in new memory."""
        with self.or_let_go():
            if is_made(self.files):
                self.record = self._found(config)
            else:
                self._sweep()
                holdings.is_whole = False

    @contextlib.contextmanager
    def or_let_go(self) -> Iterator[None]:
        """What fails here ends the folder's use at once, not when the error is forgotten."""
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
        """Where it is not said that this is disk memory, nothing but our own is written over."""
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
        except CorruptCheckpoint:
            return False

    def _found(self, config: Mapping[str, Any]) -> Record:
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
        self._holdings.is_whole = True

    def withdraw(self, commits: Iterable[int]) -> None:
        """Begin to replace the contents: until they are published again, the folder counts as empty.

        Every file keeps its bytes of the disk: publishing again needs no more of them.
        """
        self._holdings.is_whole = False
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
        self._holdings.others.append(file)
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
        """See `Room`."""
        if name in _DERIVED:
            return torch.zeros(shape, dtype=dtype, device="cpu")
        nbytes = max(math.prod(shape) * dtype.itemsize, 1)
        file = self._opened(name, nbytes) if self.record else self._created(name, nbytes)
        memory = mmap.mmap(file, nbytes, access=mmap.ACCESS_COPY if self.only_reads else mmap.ACCESS_WRITE)
        tensor = tensor_in(memory, shape, dtype)
        self.arrays[name] = Mapped(file, memory, tensor)
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
    def rows(self) -> list[Mapped]:
        """The arrays that are larger than memory."""
        return [array for name, array in self.arrays.items() if ROWS.fullmatch(name)]

    @contextlib.contextmanager
    def in_order(self) -> Iterator[None]:
        """See `Keeper`."""
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
        complete(partial(self._holdings.let_go, self.arrays))


_held: weakref.WeakSet[_Holdings] = weakref.WeakSet()


class _Holdings:
    """What a folder has of the system, to be given back however it ends."""

    def __init__(self, files: Files, lock: int, owner: int) -> None:
        self._files, self._lock, self._owner = files, lock, owner
        self.is_whole = True
        """Not so: somebody is making this memory, and what there is of it is nothing yet."""
        self.others: list[int] = []
        self._left: list[int] = []
        self._is_ending = False
        _held.add(self)

    def let_go(self, arrays: dict[str, Mapped]) -> None:
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

    def _files_left(self, arrays: dict[str, Mapped]) -> list[int]:
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
    for holdings in _held:
        holdings.forget()


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
