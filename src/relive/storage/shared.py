"""Memory shared by several processes of one machine."""

from __future__ import annotations

import contextlib
import hashlib
import math
import mmap
import os
import secrets
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from relive import kernels, locking
from relive.errors import SchemaError, explain
from relive.storage.allocator import Allocator, Memory, require_persistent_memory, tensor_from_mapping

_DIGEST_BYTES = 32
_ADD_SEALS, _GET_SEALS, _SEALS = 1033, 1034, 0x1 | 0x2 | 0x4
"""Commands and flags of Linux, which `fcntl` lacks elsewhere. Sealed files can be neither resized nor unsealed."""


@dataclass(frozen=True)
class SharedAddress:
    """Address of shared memory for other processes: the open files of one process that uses the memory."""

    token: str
    process: int
    files: Mapping[str, int] = field(repr=False)

    @property
    def memory(self) -> Memory:
        """Memory at this address, for a buffer in another process."""
        return Memory(
            torch.device("cpu"), allocator=self.open_allocator, free_bytes=lambda: None, name="Memory.shared()"
        )

    def open_allocator(self, owner: Any) -> SharedAllocator:
        """Return an allocator for a buffer of this process; raise if the shared buffer was made with other settings."""
        _require_platform_support()
        allocator = SharedAllocator(self)
        if not torch.equal(allocator.allocate("settings", (_DIGEST_BYTES,), torch.uint8), _checksum_settings(owner)):
            remedy = "Pass the handle as replay.handle() made it."
            raise SchemaError(explain("connect", "the settings of the shared buffer", "others", remedy))
        return allocator


class SharedAllocator(Allocator):
    """Allocates one anonymous file per array. The system frees a file when the last process that uses it ends."""

    device = torch.device("cpu")
    name = "shared"
    persistent = True

    def __init__(self, address: SharedAddress | None = None) -> None:
        self.reopened = address is not None
        self._address = address
        self._token = f"relive-{secrets.token_hex(8)}" if address is None else address.token
        self._files: dict[str, int] = {}
        weakref.finalize(self, _close_descriptors, self._files, os.getpid())

    @classmethod
    def create(cls, owner: Any) -> SharedAllocator:
        """Create the allocator of a new buffer."""
        _require_platform_support()
        allocator = cls()
        allocator.allocate("settings", (_DIGEST_BYTES,), torch.uint8).copy_(_checksum_settings(owner))
        return allocator

    def allocate(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        nbytes = max(math.prod(shape) * dtype.itemsize, 1)
        if self._address is not None:
            file = self._files[name] = _open_foreign_file(self._address, name)
            _require_size(file, name, nbytes)
        else:
            file = os.memfd_create(f"{self._token}-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            self._files[name] = file
            # All pages are allocated now: a page that cannot be allocated later would kill the process.
            os.posix_fallocate(file, 0, nbytes)
            _control_seals(file, _ADD_SEALS, _SEALS)
        return tensor_from_mapping(mmap.mmap(file, nbytes), shape, dtype)

    def lock(self, recover: Callable[[], None]) -> AbstractContextManager[Any]:
        memory = self.allocate("lock", (kernels.process_lock_bytes(),), torch.uint8)
        return kernels.make_process_lock(memory, not self.reopened, recover, locking.LOCK_SECONDS)

    @property
    def address(self) -> SharedAddress:
        """Address of these files, valid while this process has them open."""
        return SharedAddress(self._token, os.getpid(), dict(self._files))


def _require_platform_support() -> None:
    require_persistent_memory("Memory.shared", "Keep the buffer in one process, or use relive.distributed.")


def _open_foreign_file(address: SharedAddress, name: str) -> int:
    """Open a file of another process, and verify its name: if that process ended, its id may belong to a new one."""
    try:
        path = f"/proc/{int(address.process)}/fd/{int(address.files[name])}"
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except (OSError, LookupError, TypeError, ValueError) as error:
        remedy = "Call handle() again in a process that still has the buffer."
        got = f"no such memory in process {address.process} ({getattr(error, 'strerror', None) or error})"
        raise ConnectionError(explain("connect", "a process that still has the buffer", got, remedy)) from error
    if os.readlink(f"/proc/self/fd/{file}") == f"/memfd:{address.token}-{name} (deleted)":
        return file
    os.close(file)
    remedy = "Call handle() again in a process that still has the buffer."
    got = f"another file in process {address.process}"
    raise ConnectionError(explain("connect", f"the shared memory {address.token}", got, remedy))


def _control_seals(file: int, command: int, seals: int = 0) -> int:
    from fcntl import fcntl  # noqa: PLC0415 (missing on Windows)

    return fcntl(file, command, seals)


def _require_size(file: int, name: str, nbytes: int) -> None:
    """Raise unless a file has the size of its array and is sealed: reading beyond the end would kill the process."""
    size, seals = os.fstat(file).st_size, _control_seals(file, _GET_SEALS)
    if size != nbytes or seals & _SEALS != _SEALS:
        got = f"{size} bytes" if size != nbytes else f"a file that can be shortened (seals {seals})"
        remedy = "Pass the handle as replay.handle() made it."
        raise ConnectionError(explain(f"connect: {name}", f"{nbytes} sealed bytes", got, remedy))


def _checksum_settings(owner: Any) -> torch.Tensor:
    """Return a checksum of the settings that determine the memory layout of a buffer."""
    layout = owner.capacity, owner.num_envs, owner.next_obs, owner.autoreset
    description = repr((layout, owner._schema.trees, _describe_sampler(owner.unbound_sampler))).encode()
    return torch.frombuffer(
        bytearray(hashlib.blake2b(description, digest_size=_DIGEST_BYTES).digest()), dtype=torch.uint8
    )


def _describe_sampler(sampler: Any) -> tuple[str, Any]:
    """Return the class of a sampler and its plain settings, without functions, which differ between processes."""
    plain = {name: x for name, x in getattr(sampler, "__dict__", {}).items() if isinstance(x, int | float | str)}
    inner = {name: _describe_sampler(x) for name, x in getattr(sampler, "__dict__", {}).items() if hasattr(x, "bind")}
    return type(sampler).__name__, (plain, inner)


def _close_descriptors(files: dict[str, int], owner: int) -> None:
    # A forked child does not close files that its parent opened.
    if os.getpid() != owner:
        return
    for file in files.values():
        with contextlib.suppress(OSError):
            os.close(file)
