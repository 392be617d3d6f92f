"""File operations below a root folder, in a class that tests replace to record operations and to make them fail.

Every name is looked up relative to an open folder, and no symbolic link is followed below the root: an untrusted
checkpoint cannot lead out of its folder. This module does not import torch.
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
"""Folders of the files of checkpoints."""

_KEEP_SIZE = 1
"""Flag of `fallocate`: the length of the file does not change."""
_fallocate: Any = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
"""Linux's `fallocate`, None elsewhere: Python has only `posix_fallocate`, which makes files longer."""
if _fallocate is not None:
    _fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)

_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# With O_NONBLOCK, opening a FIFO does not wait for its writer. A later check refuses it as no regular file.
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def make_read_error(where: str, error: OSError) -> CheckpointError:
    """Return the error for an unreadable file: a CorruptCheckpoint, unless the cause is transient."""
    if error.errno in _TRANSIENT_ERRORS:
        remedy = "Nothing is known to be wrong with the file: close other files or free memory, and try again."
        return CheckpointError(explain(where, "a file that can be opened now", error, remedy))
    if isinstance(error, FileNotFoundError):
        remedy = "It was deleted, or left out of a copy: copy the whole folder again, or load an older checkpoint."
        return CorruptCheckpoint(explain(where, "a file", "none of this name", remedy))
    return CorruptCheckpoint(explain(where, "a file that can be read", error, "Copy it again."))


@contextmanager
def convert_read_errors(where: str) -> Iterator[None]:
    """Turn an OSError of the body into a CheckpointError that names the file."""
    try:
        yield
    except OSError as error:
        raise make_read_error(where, error) from error


def is_read_error(error: CheckpointError) -> bool:
    """Whether the disk failed to read an existing file. The error may be transient, and the contents be valid."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno not in (None, errno.ENOENT, errno.ELOOP)


class FileOperations:
    """File operations below one root folder. Names are `folder/name`, or `name` for a file in the root itself."""

    def __init__(self, root: Path) -> None:
        self.root, self._path = root, str(root)

    def make_root(self, folders: tuple[str, ...] = FOLDERS) -> None:
        """Create the root and its folders, unless they exist."""
        missing = [path for path in (self.root, *self.root.parents) if not path.exists()]
        self.root.mkdir(parents=True, exist_ok=True)
        with self._open_folder("") as root:
            names = set(os.listdir(root))
            for name in folders:
                with suppress(FileExistsError):
                    os.mkdir(name, dir_fd=root)
        self.sync_folder("")
        # FORMAT exists only after a completed call of this function. Without it a killed save may have created the root
        # without waiting for its name to be on the disk.
        if "FORMAT" not in names:
            for path in (self.root, *missing[1:]):
                parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    os.fsync(parent)
                finally:
                    os.close(parent)

    def create(self, name: str) -> int:
        """Create a file and open it for writing."""
        folder, name = _split_name(name)
        with self._open_folder(folder) as parent:
            return os.open(name, _CREATE_FLAGS, 0o666, dir_fd=parent)

    def write(self, file: int, data: memoryview | bytes) -> None:
        """Append all of `data`."""
        rest = memoryview(data).cast("B")
        while len(rest):
            rest = rest[os.write(file, rest) :]

    def sync(self, file: int) -> None:
        """Wait until all written bytes are on the disk."""
        os.fsync(file)

    def rename(self, old: str, new: str) -> None:
        """Rename a file, replacing an existing one."""
        (old_folder, old), (new_folder, new) = _split_name(old), _split_name(new)
        with self._open_folder(old_folder) as source, self._open_folder(new_folder) as target:
            os.rename(old, new, src_dir_fd=source, dst_dir_fd=target)

    def write_atomically(self, temporary: str, name: str, parts: Iterable[memoryview | bytes]) -> None:
        """Write a file atomically: write a temporary file, wait until it is on the disk, and rename it."""
        file = self.create(temporary)
        try:
            for part in parts:
                self.write(file, part)
            self.sync(file)
        finally:
            self.close(file)
        self.rename(temporary, name)

    def sync_folder(self, folder: str) -> None:
        """Wait until the names in a folder are on the disk."""
        with self._open_folder(folder) as descriptor:
            os.fsync(descriptor)

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""
        folder, name = _split_name(name)
        with self._open_folder(folder) as parent, suppress(FileNotFoundError):
            os.unlink(name, dir_fd=parent)

    def close(self, file: int) -> None:
        """Close a file."""
        os.close(file)

    def create_for_update(self, name: str) -> int:
        """Create a file in the root and open it for reading and writing."""
        with self._open_folder("") as root:
            return os.open(name, _CREATE_FLAGS & ~os.O_WRONLY | os.O_RDWR, 0o666, dir_fd=root)

    def open_for_update(self, name: str, *, only_reads: bool) -> int:
        """Open a regular file in the root for reading and, unless `only_reads`, for writing."""
        return self._open_regular("", name, _READ_FLAGS if only_reads else _READ_FLAGS | os.O_RDWR)

    def grow(self, file: int, nbytes: int) -> None:
        """Extend a file to `nbytes` and allocate all of them: a write to a mapped page cannot fail on a full disk."""
        os.posix_fallocate(file, 0, nbytes)

    def reserve(self, file: int, nbytes: int) -> None:
        """Reserve disk space for a file to grow to `nbytes`, without changing its length.

        Does nothing on file systems without this operation.
        """
        while _fallocate is not None and _fallocate(file, _KEEP_SIZE, 0, nbytes) != 0:
            error = ctypes.get_errno()
            if error in (errno.EOPNOTSUPP, errno.ENOSYS):
                return
            if error != errno.EINTR:
                raise OSError(error, os.strerror(error))

    def sync_data(self, file: int) -> None:
        """Wait until all bytes of a file, including bytes written through a mapping, are on the disk."""
        os.fdatasync(file)

    def overwrite(self, file: int, data: bytes) -> None:
        """Replace the contents of a file by `data`. If the file gets shorter, it loses its reserved space."""
        done = 0
        while done < len(data):
            done += os.pwrite(file, memoryview(data)[done:], done)
        if os.fstat(file).st_size > len(data):
            os.truncate(file, len(data))

    def lock_until_close(self, *, only_reads: bool) -> int:
        """Lock the root and return the open lock file; -1 if another process has the lock."""
        with self._open_folder("") as root:
            try:
                file = _open_lock_file(root, only_reads=only_reads)
            except FileNotFoundError:
                # A copied folder may lack the lock file. It is then read without a lock, through the open root.
                return os.open(".", _FOLDER_FLAGS, dir_fd=root)
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if only_reads else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return -1
        return file

    def unlock(self, file: int) -> None:
        """Unlock the root. Closing the lock file would not suffice: a forked child may still have it open."""
        fcntl.flock(file, fcntl.LOCK_UN)

    def list_names(self, folder: str) -> list[str]:
        """Return the names in a folder, sorted; an empty list if the folder does not exist."""
        try:
            with self._open_folder(folder) as descriptor:
                return sorted(os.listdir(descriptor))
        except FileNotFoundError:
            return []

    def list_regular_files(self, folder: str) -> list[str]:
        """Return the names of the regular files in a folder, sorted."""
        with self._open_folder(folder) as descriptor, os.scandir(descriptor) as entries:
            return sorted(entry.name for entry in entries if entry.is_file(follow_symlinks=False))

    def open(self, name: str) -> int:
        """Open a regular file for reading."""
        return self._open_regular(*_split_name(name), _READ_FLAGS)

    def _open_regular(self, folder: str, name: str, flags: int) -> int:
        with self._open_folder(folder) as parent:
            file = os.open(name, flags, dir_fd=parent)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise OSError(f"{folder}/{name} is not a regular file")
        return file

    def size(self, name: str) -> int:
        """Return the number of bytes of a regular file."""
        return self._read_status(name).st_size

    def _read_status(self, name: str) -> os.stat_result:
        folder, name = _split_name(name)
        with self._open_folder(folder) as parent:
            status = os.stat(name, dir_fd=parent, follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{folder}/{name} is not a regular file")
        return status

    def change_stamp(self, name: str) -> tuple[int, ...]:
        """Return device, inode, size and times of a regular file: they change when it is written or replaced."""
        status = self._read_status(name)
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns

    def read(self, file: int, count: int) -> bytes:
        """Read the next `count` bytes, fewer at the end of the file."""
        parts = []
        while count:
            part = os.read(file, count)
            if not part:
                break
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def read_into(self, file: int, target: memoryview) -> int:
        """Fill `target` with the next bytes and return their number, fewer than its size at the end of the file."""
        done = 0
        while done < len(target):
            count = os.readv(file, [target[done:]])
            if not count:
                break
            done += count
        return done

    def read_contents(self, name: str, count: int, offset: int = 0) -> bytes:
        """Read `count` bytes of a regular file from `offset` on, fewer at its end."""
        file = self.open(name)
        try:
            os.lseek(file, offset, os.SEEK_SET)
            return self.read(file, count)
        finally:
            self.close(file)

    def free_bytes(self) -> int:
        """Return the free space of the disk."""
        disk = os.statvfs(next(path for path in (self.root, *self.root.parents) if path.exists()))
        return disk.f_bavail * disk.f_frsize

    @contextmanager
    def hold_lock(self, *, exclusive: bool) -> Iterator[None]:
        """Hold the lock of the root: exclusive for a save, shared for a load, which a save must not disturb.

        The system releases the lock when the process dies.
        """
        with self._open_folder("") as root:
            try:
                file = _open_lock_file(root, only_reads=not exclusive)
            except OSError:
                if exclusive:
                    raise
                # A copy without a lock file, or a folder that cannot be written, needs no lock: no save can run there.
                file = -1
        if file < 0:
            yield
            return
        try:
            self._wait_for_lock(file, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
            yield
        finally:
            self.unlock(file)
            os.close(file)

    def _wait_for_lock(self, file: int, kind: int) -> None:
        """Wait for a lock, at most `LOCK_SECONDS`: the process that holds the lock may be suspended."""
        deadline, pause = time.monotonic() + locking.LOCK_SECONDS, 0.001
        while True:
            try:
                return fcntl.flock(file, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    expected = f"the folder's lock within {locking.LOCK_SECONDS:g} s"
                    got = f"it held by {_describe_lock_holder(file)} all the time"
                    remedy = "Resume that process, or end it; RELIVE_LOCK_SECONDS sets how long calls wait."
                    raise CheckpointError(explain(str(self.root), expected, got, remedy)) from None
            time.sleep(pause)
            pause = min(2 * pause, 0.02)

    @contextmanager
    def _open_folder(self, name: str) -> Iterator[int]:
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


def _open_lock_file(root: int, *, only_reads: bool) -> int:
    flags = os.O_RDONLY if only_reads else os.O_RDWR | os.O_CREAT
    return os.open("LOCK", flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o666, dir_fd=root)


def _describe_lock_holder(file: int) -> str:
    """Describe the process that holds the lock of a file, by its id if /proc/locks contains it."""
    number = f":{os.fstat(file).st_ino}"
    with suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            if len(words) > 5 and words[1] == "FLOCK" and words[5].endswith(number):
                return f"process {words[4]}"
    return "another process"


def _split_name(name: str) -> tuple[str, str]:
    folder, _, rest = name.rpartition("/")
    return folder, rest
