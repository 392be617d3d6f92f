"""Memory that several processes of one machine use at once."""

from __future__ import annotations

import contextlib
import hashlib
import math
import mmap
import os
import secrets
import sys
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from relive import kernels, locking
from relive.errors import SchemaError, explain
from relive.storage.allocator import Allocator, Memory, tensor_in

_DIGEST = 32
_ADD_SEALS, _GET_SEALS, _SEALS = 1033, 1034, 0x1 | 0x2 | 0x4
"""Linux's own names are in `fcntl`, which other systems lack: nobody may shorten a file, lengthen it, or allow that."""


@dataclass(frozen=True)
class SharedAddress:
    """The address of shared memory for other processes: the open files of one that has it."""

    token: str
    process: int
    files: Mapping[str, int] = field(repr=False)

    @property
    def memory(self) -> Memory:
        """The memory of a buffer that uses it too."""
        return Memory(torch.device("cpu"), allocator=self.open, free_bytes=lambda: None, name="Memory.shared()")

    def open(self, owner: Any) -> SharedAllocator:
        """The allocator of an equal buffer in this process."""
        _require_support()
        allocator = SharedAllocator(self.token, self)
        if not torch.equal(allocator.allocate("settings", (_DIGEST,), torch.uint8), _checksum_settings(owner)):
            remedy = "Pass the handle as replay.handle() made it."
            raise SchemaError(explain("connect", "the settings of the shared buffer", "others", remedy))
        return allocator


class SharedAllocator(Allocator):
    """An anonymous file for each array. The last process that has them open takes them along, however it ends."""

    device = torch.device("cpu")
    name = "shared"
    persistent = True

    def __init__(self, token: str, found: SharedAddress | None = None) -> None:
        self.reopened = found is not None
        self._token, self._address = token, found
        self._files: dict[str, int] = {}
        weakref.finalize(self, _close, self._files, os.getpid())

    @classmethod
    def create(cls, owner: Any) -> SharedAllocator:
        """New memory for a buffer."""
        _require_support()
        allocator = cls(f"relive-{secrets.token_hex(8)}")
        allocator.allocate("settings", (_DIGEST,), torch.uint8).copy_(_checksum_settings(owner))
        return allocator

    def allocate(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        nbytes = max(math.prod(shape) * dtype.itemsize, 1)
        if self._address is not None:
            file = self._files[name] = _open_file(self._token, self._address, name)
            _require_size(file, name, nbytes)
        else:
            file = os.memfd_create(f"{self._token}-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            self._files[name] = file
            os.posix_fallocate(file, 0, nbytes)  # now: where there is no room, no page is missing later
            _file_seals(file, _ADD_SEALS, _SEALS)
        return tensor_in(mmap.mmap(file, nbytes), shape, dtype)

    def lock(self, recover: Callable[[], None]) -> AbstractContextManager[Any]:
        memory = self.allocate("lock", (kernels.lock_bytes(),), torch.uint8)
        return kernels.process_lock(memory, not self.reopened, recover, locking.LOCK_SECONDS)

    @property
    def address(self) -> SharedAddress:
        """The address of these files, for as long as this process has them."""
        return SharedAddress(self._token, os.getpid(), dict(self._files))


def shares_memory() -> bool:
    """Whether processes can share memory here."""
    return sys.platform == "linux" and kernels.locks_processes()


def _require_support() -> None:
    if not shares_memory():
        expected = "Linux and relive's native core"
        got = sys.platform if sys.platform != "linux" else "no native core"
        remedy = "Keep the buffer in one process, or use relive.distributed."
        raise SchemaError(explain("Memory.shared", expected, got, remedy))


def _open_file(token: str, address: SharedAddress, name: str) -> int:
    """Our own descriptor of a file that another process has open; a process number may have been given again."""
    try:
        path = f"/proc/{int(address.process)}/fd/{int(address.files[name])}"
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except (OSError, LookupError, TypeError, ValueError) as error:
        remedy = "Call handle() again in a process that still has the buffer."
        got = f"no such memory in process {address.process} ({getattr(error, 'strerror', None) or error})"
        raise ConnectionError(explain("connect", "a process that still has the buffer", got, remedy)) from error
    if os.readlink(f"/proc/self/fd/{file}") == f"/memfd:{token}-{name} (deleted)":
        return file
    os.close(file)
    remedy = "Call handle() again in a process that still has the buffer."
    got = f"another file in process {address.process}"
    raise ConnectionError(explain("connect", f"the shared memory {token}", got, remedy))


def _file_seals(file: int, command: int, seals: int = 0) -> int:
    from fcntl import fcntl  # noqa: PLC0415 (Linux has it, and only there is this called)

    return fcntl(file, command, seals)


def _require_size(file: int, name: str, nbytes: int) -> None:
    """A file is as long as its array, and nobody can shorten it: whoever reads beyond its end would die of it."""
    size, seals = os.fstat(file).st_size, _file_seals(file, _GET_SEALS)
    if size != nbytes or seals & _SEALS != _SEALS:
        got = f"{size} bytes" if size != nbytes else f"a file that can be shortened (seals {seals})"
        remedy = "Pass the handle as replay.handle() made it."
        raise ConnectionError(explain(f"connect: {name}", f"{nbytes} sealed bytes", got, remedy))


def _checksum_settings(owner: Any) -> torch.Tensor:
    """A checksum of everything that says what the bytes of a buffer mean."""
    layout = owner.capacity, owner.num_envs, owner.settings.next_obs, owner.autoreset
    described = repr((layout, owner.settings.schema.trees, _describe(owner.settings.sampler))).encode()
    return torch.frombuffer(bytearray(hashlib.blake2b(described, digest_size=_DIGEST).digest()), dtype=torch.uint8)


def _describe(sampler: Any) -> tuple[str, Any]:
    """The class of a sampler and its plain settings; a function is another object in every process."""
    plain = {name: x for name, x in getattr(sampler, "__dict__", {}).items() if isinstance(x, int | float | str)}
    inner = {name: _describe(x) for name, x in getattr(sampler, "__dict__", {}).items() if hasattr(x, "bind")}
    return type(sampler).__name__, (plain, inner)


def _close(files: dict[str, int], owner: int) -> None:
    if os.getpid() != owner:  # a forked child has numbers of its own for them
        return
    for file in files.values():
        with contextlib.suppress(OSError):
            os.close(file)
