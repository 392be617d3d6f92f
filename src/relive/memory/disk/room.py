"""The memory of a buffer in a folder: when it is committed, and how it is found again."""

from __future__ import annotations

import math
import mmap
import os
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch

from relive import kernels
from relive.errors import CheckpointError, explain
from relive.locking import ClosedLock
from relive.memory.disk import records
from relive.memory.disk.folder import ROWS, Folder
from relive.memory.disk.owner import Owner
from relive.memory.disk.records import Record, dump
from relive.memory.saved import bytes_of

COMMIT_BYTES = 1 << 28
COMMIT_SECONDS = 60.0
_GROWTH_OF_NUMBERS = 1 << 12
_FEWEST_ROWS = 32
"""Between commits of small buffers: waiting for the disk takes milliseconds."""
_BEHIND_BYTES = 1 << 24
"""After so much the disk begins to write, lest there be much to wait for at a commit."""
_REQUEST_BYTES = 1 << 17


class DiskRoom:
    """A room whose arrays are files, and its own keeper."""

    device = torch.device("cpu")
    name = "disk"
    outlives = True

    def __init__(self, folder: Folder, commit_every: int | None) -> None:
        self._folder, self._every = folder, commit_every
        self.is_found = folder.record is not None
        self._number = 0 if folder.record is None else folder.record.number
        self._records: dict[str, int] = {}
        """The open files of commits."""
        self._left = self._due = self._until_behind = math.inf
        """Rows that may be written, and time that may pass, before a commit; steps before the disk is told to begin."""
        self._is_closing = False
        """The last record says that the buffer is closed."""
        self.in_order = folder.in_order

    @property
    def keeper(self) -> DiskRoom:
        return self

    def lock(self, mend: Callable[[], None]) -> AbstractContextManager[Any]:
        return kernels.guarded_lock(self._enter)

    def _enter(self) -> None:
        """Called by whoever has taken the lock, maybe after a wait for somebody who has closed the folder meanwhile."""
        if not self._folder.is_open:
            ClosedLock().__enter__()
        if self._is_closing:  # a close() that was interrupted
            self._commit(0, is_closed=False)

    def allocate(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        with self._folder.or_let_go():
            return self._folder.allocate(name, shape, dtype)

    def settle(self, owner: Owner, *, resumes: bool) -> None:
        self._owner, self._rows_of_step = owner, owner.rows_of_step
        with self._folder.or_let_go():
            if self._folder.record is not None:
                owner.recover(self._folder.record, self._checksum, resumes=resumes)
            if self._folder.only_reads:
                return
            self._plan()
            self._reserve()
            self.commit()
            if not self.is_found:
                self._folder.publish()

    def _plan(self) -> None:
        """How many rows an environment gets between commits, and between the times that the disk is told to begin."""
        step = max(self._owner.nbytes // self._owner.slots, 1)
        usual = max(min(COMMIT_BYTES // step, self._owner.slots // 8), _FEWEST_ROWS)
        self._usual_reach = usual if self._every is None else max(self._every, self._rows_of_step)
        self._slots_behind = max(_BEHIND_BYTES // step, 1)
        self._behind = int(self._owner.head.max())
        """The row that the disk was told of last."""

    def _reserve(self) -> None:
        """Open both files of commits with all the room that they will need: no commit fails because a disk is full."""
        record = self._record(self._usual_reach, is_closed=False)
        self._room_of_record = len(dump(record)) + self._owner.most_growth + _GROWTH_OF_NUMBERS
        for name in records.NAMES:
            self._records[name] = self._folder.open_commit(name, self._room_of_record)

    # Committing

    def expect(self, steps: int) -> None:
        self._left -= self._rows_of_step * steps
        self._until_behind -= steps
        if self._until_behind < 0:
            self._write_behind()
        if self._left < 0 or time.monotonic() > self._due:
            self._require_reach(self._rows_of_step * steps)

    def _require_reach(self, rows: int) -> None:
        """Write no more rows than the last commit has allowed for. This limit bounds what a power loss can destroy."""
        used = int((self._owner.head - self._committed).max())  # seldom as many as were allowed for
        if used + rows > self._reach or time.monotonic() > self._due:
            self._commit(rows, is_closed=False)
        else:
            self._left = self._reach - used - rows

    def commit(self) -> None:
        self._commit(0, is_closed=False)

    def _commit(self, coming: int, *, is_closed: bool) -> None:
        """First everything that a record speaks of is on the disk, then the record."""
        if not self._owner.is_alive or self._folder.only_reads:
            return
        reach = max(self._usual_reach, coming)
        record = self._record(reach, is_closed)
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
        self._number, self._committed, self._reach, self._is_closing = record.number, head, reach, is_closed
        self._left, self._due = reach - coming, time.monotonic() + COMMIT_SECONDS
        self._until_behind = self._slots_behind

    def _record(self, reach: int, is_closed: bool) -> Record:
        owner, checksum = self._owner, self._checksum() if is_closed else 0
        run, state = records.boot(), owner.state()
        return Record(
            self._number + 1, run, is_closed, reach, owner.marks(), checksum, owner.config(), state.values, state.arrays
        )

    def _checksum(self) -> int:
        """Of everything that is no row, and has no checksum beside it."""
        total = 0
        for name, array in self._folder.arrays.items():
            if not ROWS.fullmatch(name) and name != "seals":
                total = zlib.crc32(bytes_of(array.tensor), total)
        return total

    def _write(self, record: Record) -> None:
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
    def refilled(self) -> Iterator[None]:
        had_rows = bool(self._owner.head.any())
        self._folder.withdraw(self._records.values())
        try:
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
