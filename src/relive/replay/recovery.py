"""Recovery of a replay buffer in disk memory, after `close()`, after a kill of its process, or after a power loss."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch

from relive.checkpoint.snapshot import State
from relive.errors import CorruptCheckpoint, InvariantError, SchemaError, explain
from relive.replay.native_backend import NativeBackend
from relive.replay.ring import MAX_ROWS_PER_STEP, TRANSITION, Ring, check_ring
from relive.replay.samplers.registry import load_sampler_state
from relive.storage import disk
from relive.storage.codec import SnapshotReader, tensor_bytes
from relive.storage.disk import Commit

if TYPE_CHECKING:
    from relive.replay.buffer import ReplayBuffer


_MAX_DESCRIPTION_BYTES = 512
"""Maximum bytes that describe an array in a commit."""


class RecoverableBuffer:
    """The interface of a replay buffer for its `DiskAllocator`, with only a weak reference to the buffer."""

    max_rows_per_step = MAX_ROWS_PER_STEP

    def __init__(self, buffer: ReplayBuffer) -> None:
        self._buffer = weakref.ref(buffer)
        self._ring = buffer.storage.ring
        self.slots, self.nbytes = self._ring.slots, buffer.nbytes

    @property
    def max_commit_growth(self) -> int:
        """Number of bytes by which staged fields and the sampler's state can make a commit larger than the first."""
        buffer = self._live_buffer
        has_state = not buffer.sampler.keeps_state_in_memory and buffer.sampler.state()
        sampler_bytes = 8 * self._ring.size if has_state else 0
        description_bytes = _MAX_DESCRIPTION_BYTES * len(buffer.storage.schema.fields)
        return buffer.components["staged"].max_staged_bytes + description_bytes + sampler_bytes

    @property
    def is_alive(self) -> bool:
        """Whether the buffer still exists; this interface has only a weak reference to the buffer."""
        return self._buffer() is not None

    @property
    def _live_buffer(self) -> ReplayBuffer:
        buffer = self._buffer()
        assert buffer is not None
        return buffer

    @property
    def _backend(self) -> NativeBackend:
        """Native backend, the only one that supports disk memory."""
        return cast("NativeBackend", self._live_buffer.storage)

    @property
    def head(self) -> torch.Tensor:
        """Number of the row that each environment writes next [N]."""
        return self._ring.head

    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments as JSON."""
        return self._live_buffer.config()

    def state(self) -> State:
        """Return the state that is not in arrays of the disk, and the heads of the rings."""
        buffer, ring = self._live_buffer, self._ring
        heads = {name: getattr(ring, name).clone() for name in ("head", "open", "resetting", "floor")}
        sampler = {} if buffer.sampler.keeps_state_in_memory else buffer.sampler.state()
        states = {name: component.state() for name, component in buffer.components.items()}
        return State.of_parts({"ring": ({}, heads), "sampler": ({}, sampler), **states})

    def slots_checksum(self) -> int:
        """Return a checksum of the kinds and starts of all slots."""
        return _compute_slots_checksum(self._ring)

    def write_behind(self, file: int, offset: int, nbytes: int) -> None:
        """Start writing a range of a file to the disk, without waiting."""
        self._backend.core.write_behind(file, offset, nbytes)

    def recompute_checksums(self) -> None:
        """Recompute the checksum of every row."""
        self._backend.core.recompute_checksums()

    def recover(self, commit: Commit, checksum: Callable[[], int], *, resumes: bool) -> None:
        """Restore the buffer from its arrays and the last commit; raise a CorruptCheckpoint if these disagree."""
        buffer, ring, saved = self._live_buffer, self._ring, commit.saved
        backend = self._backend
        try:
            _check_ring_flags(ring)
            if commit.is_closed:
                _require_unchanged_arrays(ring, saved, checksum() == commit.checksum)
            else:
                _recover_rings(backend, saved, commit)
            check_ring(ring.kind, ring.head, ring.count, ring.floor)
            backend.rebuild_caches()
            _load_commit(buffer, commit, resumes)
            buffer.check_state()
        except (SchemaError, InvariantError) as error:
            raise CorruptCheckpoint(f"{commit.name}: the arrays are invalid. {error}") from error


def _load_commit(buffer: ReplayBuffer, commit: Commit, loads_random: bool) -> None:
    """Restore the state that is not in arrays of the disk; `loads_random` includes the random generator."""
    saved = commit.saved
    if not buffer.sampler.keeps_state_in_memory:
        load_sampler_state(buffer.sampler, saved.part("sampler"), saved.config)
    buffer.sampler.on_recover()
    random, observers, staged = buffer.components.values()
    if loads_random:
        random.load_state(saved.part("random"))
    if observers.config() == saved.config.value.get("listeners"):
        observers.load_state(saved.part_without_values("listeners"))
    if commit.is_closed:
        staged.load_state(saved.part("staged"))


def _check_ring_flags(ring: Ring) -> None:
    for flags in (ring.first, ring.open, ring.resetting):
        if bool((flags.view(torch.uint8) > 1).any()):
            got = int(flags.view(torch.uint8).max())
            raise CorruptCheckpoint(explain("ring", "flags of 0 and 1", got, "Copy the folder again."))


def _require_unchanged_arrays(ring: Ring, saved: SnapshotReader, checksum_matches: bool) -> None:
    assert ring.journal is not None
    heads_match = all(
        torch.equal(getattr(ring, name), _read_saved_array(ring, saved, name)) for name in ("head", "open", "floor")
    )
    if not (checksum_matches and heads_match and not bool(ring.journal.any())):
        remedy = "Copy the folder again, or load a checkpoint."
        raise CorruptCheckpoint(explain("arrays", "the contents at close()", "files that were changed since", remedy))


def _read_saved_array(ring: Ring, saved: SnapshotReader, name: str) -> torch.Tensor:
    return saved.read_like(f"ring.{name}", getattr(ring, name))


def _recover_rings(backend: NativeBackend, saved: SnapshotReader, commit: Commit) -> None:
    """Restore the rings of a buffer that was not closed.

    After a kill, all rows are intact except the rows of an unfinished step. If rows are damaged, as after a power loss,
    the rings are rolled back to the last commit. The recovery is idempotent, since its process may be killed too.
    """
    ring = backend.ring
    head, floor = _read_saved_array(ring, saved, "head"), _read_saved_array(ring, saved, "floor")
    max_row = (1 << 62) // (2 * ring.num_envs)
    if bool(((floor < 0) | (head < floor) | (head >= max_row)).any()) or commit.max_rows_since_commit > max_row:
        new_rows = commit.max_rows_since_commit
        got = f"floors from {int(floor.min())} and heads to {int(head.max())} (at most {new_rows} rows since)"
        expected, remedy = "floors of at least 0 and heads that are not below their floors", "Copy the folder again."
        raise CorruptCheckpoint(explain(commit.name, expected, got, remedy))
    if commit.boot == disk.read_boot_id() and _is_state_after_kill(ring, head, floor, commit.max_rows_since_commit):
        backend.recover()
        if not backend.find_damaged_rows(head - commit.max_rows_since_commit, ring.head + 1).any():
            return
    assert ring.journal is not None
    # A journal of -1 marks an unfinished recovery: if this process dies, the next one repeats the recovery from here.
    ring.journal.fill_(-1)
    for name in ("head", "open", "resetting", "floor"):
        getattr(ring, name).copy_(_read_saved_array(ring, saved, name))
    if _is_disk_unchanged(backend, commit):
        ring.count.copy_((ring.kind == TRANSITION).sum(0))
    else:
        ring.roll_back(head, ring.open.clone(), torch.ones_like(ring.open), commit.max_rows_since_commit)
        damaged = backend.find_damaged_rows(head - commit.max_rows_since_commit, ring.head + 1)
        if damaged.any():
            ring.drop_rows_before(torch.where(damaged, ring.row_numbers() + 1, 0).amax(0))
    # Rows that were rewritten after the commit may have reached the disk only in part, so torn rows are excluded.
    if backend.rows.rewrite_journal is not None:
        backend.rows.rewrite_journal[0] = 0
    ring.exclude_rows(backend.find_torn_rows())
    ring.journal.zero_()


def _compute_slots_checksum(ring: Ring) -> int:
    return zlib.crc32(tensor_bytes(ring.first), zlib.crc32(tensor_bytes(ring.kind)))


def _is_disk_unchanged(backend: NativeBackend, commit: Commit) -> bool:
    """Whether no write after the commit reached the disk: the rows that writes would overwrite are intact."""
    ring, max_rows = backend.ring, commit.max_rows_since_commit
    if _compute_slots_checksum(ring) != commit.slots_checksum:
        return False
    newest = backend.find_damaged_rows(ring.head - max_rows, ring.head + 1)
    oldest = backend.find_damaged_rows(torch.zeros_like(ring.head), ring.head + 1 + max_rows - ring.slots)
    return not bool((newest | oldest).any())


def _is_state_after_kill(ring: Ring, head: torch.Tensor, floor: torch.Tensor, max_rows: int) -> bool:
    """Whether a killed process can have left this state of the ring, with at most `max_rows` rows after the commit."""
    assert ring.journal is not None
    first_row = (ring.journal - 1).clamp(min=0) // 2
    is_valid = (ring.head >= head) & (ring.head <= head + max_rows) & (ring.floor >= floor) & (ring.floor <= ring.head)
    is_valid &= (ring.journal == 0) | ((ring.journal > 0) & (first_row >= head) & (first_row <= ring.head))
    return bool(is_valid.all()) and bool((ring.kind <= 4).all())
