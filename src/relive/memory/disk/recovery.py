"""A buffer again, of what a folder holds: closed, left by a process that was killed, or by a machine that stopped."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

import torch

from relive.errors import CorruptCheckpoint, InvariantError, SchemaError, explain
from relive.memory.disk.records import Record
from relive.memory.saved import Saved, bytes_of
from relive.replay.buffer import ReplayBuffer
from relive.replay.loading import check_ring
from relive.replay.ring import TRANSITION, Ring
from relive.replay.samplers.registry import resume
from relive.replay.store import DurableStore, durable

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def boot() -> str:
    """Which run of this machine it is: what was stored in an earlier one may not have come to the disk."""
    return _BOOT.read_text().strip()


def restored(buffer: ReplayBuffer, record: Record, checksum: Callable[[], int], *, resumes: bool) -> None:
    """Make a buffer of what its arrays hold; CorruptCheckpoint if no process of ours can have left it so."""
    storage = durable(buffer.storage)
    ring = storage.memory.ring
    try:
        read = record.saved
        _check_flags(ring)
        if record.is_closed:
            _require_closed(ring, read, checksum() == record.checksum)
        else:
            _recover(storage, read, record)
        check_ring(ring.kind, ring.head, ring.count, ring.floor)
        storage.found()
        _resume(buffer, read, record, resumes)
        buffer.parts.check()
    except (SchemaError, InvariantError) as error:
        raise CorruptCheckpoint(f"{record.name}: the arrays are invalid. {error}") from error


def _resume(buffer: ReplayBuffer, read: Saved, record: Record, resumes: bool) -> None:
    """Everything that is not in the arrays goes on from the commit."""
    if not buffer.run.beside_rows:
        resume(buffer.run, buffer.sampler, buffer.storage.memory, read.part("sampler"))
    buffer.run.mended()
    random, observers, staged = buffer.parts.beside_rows.values()
    if resumes:
        random.load_state(read.part("random"))
    if observers.config() == record.config.get("listeners"):
        observers.load_state(read.part_without_values("listeners"))
    if record.is_closed:
        staged.load_state(read.part("staged"))


def _check_flags(ring: Ring) -> None:
    for flags in (ring.first, ring.open, ring.resetting):
        if bool((flags.view(torch.uint8) > 1).any()):
            got = int(flags.view(torch.uint8).max())
            raise CorruptCheckpoint(explain("ring", "flags of 0 and 1", got, "Copy the folder again."))


def _require_closed(ring: Ring, read: Saved, is_same: bool) -> None:
    assert ring.journal is not None
    heads = all(torch.equal(getattr(ring, name), _saved(ring, read, name)) for name in ("head", "open", "floor"))
    if not (is_same and heads and not bool(ring.journal.any())):
        remedy = "Copy the folder again, or load a checkpoint."
        raise CorruptCheckpoint(explain("arrays", "the contents at close()", "files that were changed since", remedy))


def _saved(ring: Ring, read: Saved, name: str) -> torch.Tensor:
    return read.array(f"ring.{name}", getattr(ring, name))


def _recover(storage: DurableStore, read: Saved, record: Record) -> None:
    """After a kill all that was stored is there, but for the step that was being written.

    Where that is not what is found, as after a loss of power, the rings go back to the last commit. Doing it twice, or
    again after being killed in the middle of it, leads to the same.
    """
    ring = storage.memory.ring
    head, floor = _saved(ring, read, "head"), _saved(ring, read, "floor")
    most = (1 << 62) // (2 * ring.num_envs)
    if bool(((floor < 0) | (head < floor) | (head >= most)).any()) or record.reach > most:
        got = f"floors from {int(floor.min())} and heads to {int(head.max())} (reach {record.reach})"
        raise CorruptCheckpoint(
            explain(record.name, "a floor from 0 and a head after it", got, "Copy the folder again.")
        )
    if record.boot == boot() and _is_left_by_a_kill(ring, head, floor, record.reach):
        ring.mend()
        if not storage.broken_rows(head - record.reach, ring.head + 1).any():
            return
    assert ring.journal is not None
    ring.journal.fill_(-1)  # until all of this is done, it is not what a kill leaves
    for name in ("head", "open", "resetting", "floor"):
        getattr(ring, name).copy_(_saved(ring, read, name))
    if _is_untouched(storage, record):
        ring.count.copy_((ring.kind == TRANSITION).sum(0))
    else:
        ring.go_back(head, ring.open.clone(), torch.ones_like(ring.open), record.reach)
        broken = storage.broken_rows(head - record.reach, ring.head + 1)
        if broken.any():
            ring.lose(torch.where(broken, ring.rows() + 1, 0).amax(0))
    ring.journal.zero_()


def marks_of(ring: Ring) -> int:
    """A checksum of what each slot holds."""
    return zlib.crc32(bytes_of(ring.first), zlib.crc32(bytes_of(ring.kind)))


def _is_untouched(storage: DurableStore, record: Record) -> bool:
    """Nothing that was written after the commit has come to the disk: the rows that it would have taken are whole."""
    ring, reach = storage.memory.ring, record.reach
    if marks_of(ring) != record.marks:
        return False
    newest = storage.broken_rows(ring.head - reach, ring.head + 1)
    oldest = storage.broken_rows(torch.zeros_like(ring.head), ring.head + 1 + reach - ring.slots)
    return not bool((newest | oldest).any())


def _is_left_by_a_kill(ring: Ring, head: torch.Tensor, floor: torch.Tensor, reach: int) -> bool:
    assert ring.journal is not None
    began = (ring.journal - 1).clamp(min=0) // 2
    right = (ring.head >= head) & (ring.head <= head + reach) & (ring.floor >= floor) & (ring.floor <= ring.head)
    right &= (ring.journal == 0) | ((ring.journal > 0) & (began >= head) & (began <= ring.head))
    return bool(right.all()) and bool((ring.kind <= 4).all())
