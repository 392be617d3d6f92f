"""All work with files, in one place: what a test can record, and can make fail. Nothing here knows torch.

Every name is looked up relative to an open folder, and no symbolic link is followed below the root: a checkpoint that
somebody else made cannot lead out of its folder. Disk memory, whose files stay open and change in place, has its own
part below.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from relive import locking
from relive.errors import CheckpointError, CorruptCheckpoint, explain

_TRANSIENT_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT, errno.ESTALE)
FOLDERS = ("manifests", "segments", "state", "tmp")

_KEEP_SIZE = 1
_fallocate: Any = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
"""Linux's own, where there is one: Python has only the one of POSIX, which makes files longer."""
if _fallocate is not None:
    _fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)

_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# A FIFO in place of a file would block: it is opened without waiting, and refused as no regular file.
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def unreadable(where: str, error: OSError) -> CheckpointError:
    """The error for a file that could not be read: damage of it, unless the reason is this process or this moment."""
    if error.errno in _TRANSIENT_ERRORS:
        remedy = "Nothing is known to be wrong with the file: close other files or free memory, and try again."
        return CheckpointError(explain(where, "a file that can be opened now", error, remedy))
    if isinstance(error, FileNotFoundError):
        remedy = "It was deleted, or left out of a copy: copy the whole folder again, or load an older checkpoint."
        return CorruptCheckpoint(explain(where, "a file", "none of this name", remedy))
    return CorruptCheckpoint(explain(where, "a file that can be read", error, "Copy it again."))


@contextmanager
def reading(where: str) -> Iterator[None]:
    """Turn an error of the disk into one that names the file."""
    try:
        yield
    except OSError as error:
        raise unreadable(where, error) from error


def is_read_error(error: CheckpointError) -> bool:
    """Whether the disk did not give a file that is there. That may pass, and says nothing about its contents."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno not in (None, errno.ENOENT, errno.ELOOP)


class Files:
    """The folder of one checkpoint root. Names are `folder/name`, or `name` for what lies in the root itself."""

    def __init__(self, root: Path) -> None:
        self.root, self._path = root, str(root)

    # What changes the disk: each is one step that may be the last one

    def make_root(self, folders: tuple[str, ...] = FOLDERS) -> None:
        """Make the root and the folders in it, as far as they are missing."""
        fresh = [path for path in (self.root, *self.root.parents) if not path.exists()]
        self.root.mkdir(parents=True, exist_ok=True)
        with self._folder("") as root:
            found = set(os.listdir(root))
            for name in folders:
                with suppress(FileExistsError):
                    os.mkdir(name, dir_fd=root)
        self.sync_folder("")
        if "FORMAT" in found:
            return  # whoever placed it has been at the end of this function before
        # The parent always: a save that was killed here may have made the root and not come to this line.
        for path in (self.root, *fresh[1:]):
            _sync(path.parent)

    def create(self, name: str) -> int:
        """A new file, opened for writing."""
        folder, name = _split(name)
        with self._folder(folder) as at:
            return os.open(name, _CREATE_FLAGS, 0o666, dir_fd=at)

    def write(self, file: int, data: memoryview | bytes) -> None:
        """Append all of `data`."""
        rest = memoryview(data).cast("B")
        while len(rest):
            rest = rest[os.write(file, rest) :]

    def sync(self, file: int) -> None:
        """Wait until what was written is on the disk."""
        os.fsync(file)

    def rename(self, old: str, new: str) -> None:
        """Give a file its place, over whatever may be there."""
        (old_folder, old), (new_folder, new) = _split(old), _split(new)
        with self._folder(old_folder) as source, self._folder(new_folder) as target:
            os.rename(old, new, src_dir_fd=source, dst_dir_fd=target)

    def place(self, temporary: str, name: str, parts: Iterable[memoryview | bytes]) -> None:
        """Write a new file, wait until it is on the disk, and rename it: its name is of a whole file or of none."""
        file = self.create(temporary)
        try:
            for part in parts:
                self.write(file, part)
            self.sync(file)
        finally:
            self.close(file)
        self.rename(temporary, name)

    def sync_folder(self, folder: str) -> None:
        """Wait until a folder's names are on the disk."""
        with self._folder(folder) as at:
            os.fsync(at)

    def remove(self, name: str) -> None:
        """Remove a file; one that is not there is no error."""
        folder, name = _split(name)
        with self._folder(folder) as at:
            try:
                os.unlink(name, dir_fd=at)
            except FileNotFoundError:
                return

    def close(self, file: int) -> None:
        """Close a file."""
        os.close(file)

    # Files that stay open and change in place

    def create_for_update(self, name: str) -> int:
        """A new file in the root, opened for reading and writing."""
        with self._folder("") as root:
            return os.open(name, _CREATE_FLAGS & ~os.O_WRONLY | os.O_RDWR, 0o666, dir_fd=root)

    def open_for_update(self, name: str, *, only_reads: bool) -> int:
        """A regular file in the root, opened for reading and (unless it only reads) writing."""
        return self._regular("", name, _READ_FLAGS if only_reads else _READ_FLAGS | os.O_RDWR)

    def grow(self, file: int, nbytes: int) -> None:
        """Give a file this many bytes of the disk, where it has them not: no page can be missing later."""
        os.posix_fallocate(file, 0, nbytes)

    def reserve(self, file: int, nbytes: int) -> None:
        """Give a file this many bytes of the disk, which it may grow into; its length stays.

        A file system that cannot do so is left as it is.
        """
        while _fallocate is not None and _fallocate(file, _KEEP_SIZE, 0, nbytes) != 0:
            error = ctypes.get_errno()
            if error in (errno.EOPNOTSUPP, errno.ENOSYS):
                return
            if error != errno.EINTR:
                raise OSError(error, os.strerror(error))

    def sync_data(self, file: int) -> None:
        """Wait until what was stored, also through a mapping, is on the disk."""
        os.fdatasync(file)

    def overwrite(self, file: int, data: bytes) -> None:
        """Make `data` all that a file holds. If that makes it shorter, what was reserved for it is free again."""
        done = 0
        while done < len(data):
            done += os.pwrite(file, memoryview(data)[done:], done)
        if os.fstat(file).st_size > len(data):
            os.truncate(file, len(data))

    def lock_until_close(self, *, only_reads: bool) -> int:
        """The root's lock, taken until the file is closed; -1 if it cannot be had. A reader needs none in a copy."""
        flags = os.O_RDONLY if only_reads else os.O_RDWR | os.O_CREAT
        with self._folder("") as root:
            try:
                file = os.open("LOCK", flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o666, dir_fd=root)
            except FileNotFoundError:
                return os.open(".", _FOLDER_FLAGS, dir_fd=root)
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if only_reads else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return -1
        return file

    def unlock(self, file: int) -> None:
        """Let others have the root; a child that was forked meanwhile has the file open, and may live long."""
        fcntl.flock(file, fcntl.LOCK_UN)

    # What only looks

    def names(self, folder: str) -> list[str]:
        """The names in a folder."""
        with self._folder(folder) as at:
            return sorted(os.listdir(at))

    def regular(self, folder: str) -> list[str]:
        """The regular files in a folder: no links, folders, FIFOs or devices."""
        with self._folder(folder) as at, os.scandir(at) as found:
            return sorted(entry.name for entry in found if entry.is_file(follow_symlinks=False))

    def open(self, name: str) -> int:
        """A regular file, opened for reading."""
        return self._regular(*_split(name), _READ_FLAGS)

    def _regular(self, folder: str, name: str, flags: int) -> int:
        with self._folder(folder) as at:
            file = os.open(name, flags, dir_fd=at)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise OSError(f"{folder}/{name} is not a regular file")
        return file

    def size(self, name: str) -> int:
        """How many bytes a regular file has."""
        return self._status(name).st_size

    def _status(self, name: str) -> os.stat_result:
        folder, name = _split(name)
        with self._folder(folder) as at:
            status = os.stat(name, dir_fd=at, follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{folder}/{name} is not a regular file")
        return status

    def stamp(self, name: str) -> tuple[int, ...]:
        """A stamp that changes when a regular file is written or replaced, as far as the system tells."""
        status = self._status(name)
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns

    def read(self, file: int, count: int) -> bytes:
        """The next `count` bytes, or the fewer that are left."""
        parts = []
        while count:
            part = os.read(file, count)
            if not part:
                break
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def read_into(self, file: int, target: memoryview) -> int:
        """Copy the next bytes into `target`, as many as it has room for or as are left; returns how many they were."""
        done = 0
        while done < len(target):
            count = os.readv(file, [target[done:]])
            if not count:
                break
            done += count
        return done

    def read_at(self, file: int, count: int, offset: int) -> bytes:
        """The `count` bytes from `offset` on, or the fewer that there are."""
        os.lseek(file, offset, os.SEEK_SET)
        return self.read(file, count)

    def contents(self, name: str, count: int, offset: int = 0) -> bytes:
        """The `count` bytes of a regular file from `offset` on, or the fewer that there are."""
        file = self.open(name)
        try:
            return self.read_at(file, count, offset)
        finally:
            self.close(file)

    def free_bytes(self) -> int:
        """The free space of the disk."""
        disk = os.statvfs(next(path for path in (self.root, *self.root.parents) if path.exists()))
        return disk.f_bavail * disk.f_frsize

    @contextmanager
    def locked(self, *, exclusive: bool) -> Iterator[None]:
        """Nobody else saves here meanwhile (exclusive), or collects what is being read (shared).

        The lock is of the process, and gone when it dies.
        """
        with self._folder("") as root:
            flags = os.O_RDWR | os.O_CREAT if exclusive else os.O_RDONLY
            try:
                file = os.open("LOCK", flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o666, dir_fd=root)
            except OSError:
                if exclusive:
                    raise
                file = -1  # a copy without its lock, or one that we may only read: nobody saves there
        try:
            if file >= 0:
                self._lock(file, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
            yield
        finally:
            if file >= 0:
                self.unlock(file)
                os.close(file)

    def _lock(self, file: int, kind: int) -> None:
        """Wait for a lock, but not for ever: its holder may be stopped."""
        deadline, pause = time.monotonic() + locking.LOCK_SECONDS, 0.001
        while True:
            try:
                return fcntl.flock(file, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise CheckpointError(self._lock_error(file)) from None
            time.sleep(pause)
            pause = min(2 * pause, 0.02)

    def _lock_error(self, file: int) -> str:
        expected = f"the folder's lock within {locking.LOCK_SECONDS:g} s"
        remedy = "Let that process go on, or end it; RELIVE_LOCK_SECONDS sets how long calls wait."
        return explain(str(self.root), expected, f"it held by {_lock_holder(file)} all the time", remedy)

    @contextmanager
    def _folder(self, name: str) -> Iterator[int]:
        root = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if not name:
                yield root
                return
            folder = os.open(name, _FOLDER_FLAGS, dir_fd=root)
            try:
                yield folder
            finally:
                os.close(folder)
        finally:
            os.close(root)


def _lock_holder(file: int) -> str:
    """The process that has the lock of a file, where the system tells."""
    number = f":{os.fstat(file).st_ino}"
    with suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            if len(words) > 5 and words[1] == "FLOCK" and words[5].endswith(number):
                return f"process {words[4]}"
    return "another process"


def _split(name: str) -> tuple[str, str]:
    folder, _, rest = name.rpartition("/")
    return folder, rest


def _sync(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
