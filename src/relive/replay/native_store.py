"""Rows in host memory, written and read by the C++ core."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from relive import kernels, lazy
from relive.errors import InvariantError, explain
from relive.fields.assembly import assembler
from relive.fields.invariants import require
from relive.fields.schema import Stacked, caller_shape
from relive.kernels.priority import NativeTree
from relive.randomness import Randomness
from relive.replay import composed
from relive.replay.chains import Chains
from relive.replay.invariants import check_kernels
from relive.replay.native_offsets import OffsetReader, sums_natively
from relive.replay.offset_plan import OffsetPlan
from relive.replay.offset_reading import windowed
from relive.replay.ring import MOST_ROWS
from relive.replay.row_memory import RowMemory
from relive.replay.row_store import RowStore, never_issued
from relive.replay.store import Leaves, Reading, Touched

if TYPE_CHECKING:
    from relive.replay.samplers.protocol import Draws


class NativeStore(RowStore):
    """A `DurableStore` of the C++ core. Whatever it does not take as it is, is conformed once and given again."""

    def __init__(self, memory: RowMemory) -> None:
        super().__init__(memory)
        self._core = _ring_of(memory)
        self._write_back = _write_back_of(self._core, memory)
        self._reads_files = memory.seals is not None
        self._is_alone = not memory.allocator.persistent
        """Nobody else writes this memory, and none of its pages are asked for."""
        self.fuses = self._is_alone
        self.has_neighbours = memory.allocator.persistent and not self._reads_files
        """Other processes may write here, and would wait while rows are copied; see `copy_beside_writers`."""
        agents = memory.schema.leaf_indices["reward"]
        self._sums_steps = len(agents) == 1 and memory.leaves[agents[0]].dtype in _SUMMED and not memory.keeps_next
        self._name_batches()
        self._offset_readers: WeakKeyDictionary[OffsetPlan, OffsetReader] = WeakKeyDictionary()
        self.warning: str | None = None
        self._few: torch.Tensor | None = None
        """The slots of all transitions, where they are few; kept until something is written."""
        self._tree: NativeTree | None = None
        self._rows_left = memory.ring.rows_left()

    def _name_batches(self) -> None:
        memory, paths = self.memory, self.schema.paths
        self._transition_paths = (*paths, *memory.next_paths, ("index",))
        self._n_step_paths = (*self._transition_paths, ("discount",))
        steps = [path for i, path in enumerate(paths) if i not in memory.carried]
        starts = [paths[i] for i in memory.carried]
        self._sequence_paths = (*steps, *memory.next_paths, *composed.MARKS, *starts, ("index",))
        self._assemble = {
            (of_steps, weighted): assembler((*names, ("weight",)) if weighted else names)
            for of_steps, names in ((False, self._transition_paths), (True, self._n_step_paths))
            for weighted in (False, True)
        }

    # Writing

    def write(
        self, leaves: tuple[Any, ...], nexts: tuple[Any, ...], envs: torch.Tensor | None, steps: int | None = None,
        then: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        count = 1 if steps is None else steps
        if self._rows_left < MOST_ROWS * count:
            self._rows_left = self.memory.ring.require_rows_left(count)
        self._few = None
        self._rows_left -= MOST_ROWS * count
        status = self._core.write(leaves, nexts, envs, count, steps is not None, then)
        if status >= 0:
            leaves, nexts = self.memory.conformed(leaves, nexts, envs, steps)
            status = self._core.write(leaves, nexts, envs, count, steps is not None, then)
            if status >= 0:
                raise self.memory.misplaced(status)
        if status < -1:
            if status not in _DOUBTS:
                raise self.memory.unstackable(-2 - status)
            self.warning = _DOUBTS[status](self.chains())

    def put(self, slots: torch.Tensor, leaves: dict[int, torch.Tensor]) -> None:
        self._write_back.write(slots, tuple(leaves.get(i) for i in self.memory.mutable))

    def chains(self) -> Chains:
        """How the steps that were written here are joined."""
        return Chains(*self._core.counted())

    def keep_touched(self) -> None:
        self._core.keep_touched(True)

    def touched(self) -> Touched:
        return torch.tensor(self._core.touched.slots, dtype=torch.int64, device="cpu"), None

    def cut(self, envs: torch.Tensor | None, then: Callable[[], None]) -> None:
        self._few = None
        self.memory.ring.cut(envs, then)

    def clear(self) -> None:
        self._few = None
        self.memory.ring.clear()

    def found(self) -> None:
        self._few = None
        self._rows_left = self.memory.ring.rows_left()

    def doubts(self) -> Iterator[str]:
        return iter(())  # they were told while rows were written

    # Drawing

    def __len__(self) -> int:
        return self._core.stored()

    @property
    def maybe_empty(self) -> bool:
        return not self._core.stored()

    def draw(self, count: int, random: Randomness) -> torch.Tensor:
        drawn = self._core.draw(count, random.capsule, None)
        return self._draw_of_few(count, random) if drawn is None else drawn

    def _draw_of_few(self, count: int, random: Randomness) -> torch.Tensor:
        """The same where transitions are so rare that the core does not find them by chance."""
        slots = self.stored() if self._few is None else self._few
        self._few = slots if self._is_alone else None
        shares = torch.arange(1, len(slots) + 1, dtype=torch.float64, device="cpu") / len(slots)
        return slots[torch.searchsorted(shares, random.uniform(count, slots.device), right=True)]

    def draw_and_read(
        self,
        count: int,
        random: Randomness,
        reading: Reading,
        run: Draws | None = None,
        out: lazy.TensorDict | None = None,
    ) -> lazy.TensorDict | None:
        n, gamma, length, _, _ = reading
        if length or out is not None:
            return None
        if n:
            if not self._sums_steps:
                return None
            n = min(n, self.memory.ring.slots)
        if not self._is_alone:
            return None
        if run is None:
            leaves = self._core.sample(count, random.capsule, n, gamma)
            return None if leaves is None else self._assemble[n > 0, False](leaves, torch.Size((count,)))
        if self.maybe_empty:
            return None
        room = self._core.reserve(count, n)
        drawn = run.draw(count)
        if len(drawn.slots) != count:  # the rest of an epoch
            room = self._core.reserve(len(drawn.slots), n)
        leaves = self._core.fill(room, drawn.slots, gamma)
        if drawn.weight is not None:
            leaves.append(drawn.weight)
        return self._assemble[n > 0, drawn.weight is not None](leaves, drawn.slots.shape)

    def copy_beside_writers(self, count: int, run: Draws, lock: AbstractContextManager[Any]) -> Leaves | None:
        """Transitions that `run` draws under the lock, copied without it; None if one was overwritten meanwhile."""
        room = self._core.reserve(count, 0)
        with lock:
            if self.maybe_empty:
                return None
            drawn = run.draw(count)
            ids = self.ids(drawn.slots)  # now: what a slot holds a moment later may be half of a row
        leaves = self._read_into(room, drawn.slots)
        with lock:
            if not self._core.holds(drawn.slots, ids):
                return None
            # Others may write these while they are copied.
            mutable = self.memory.mutable
            leaves |= composed.named(self.memory, self.take(drawn.slots, mutable), mutable) if mutable else {}
        leaves[("index",)] = ids
        if drawn.weight is not None:
            leaves[("weight",)] = drawn.weight
        return leaves

    def _read_into(self, room: Any, slots: torch.Tensor) -> Leaves:
        return dict(zip(self._transition_paths, self._core.fill(room, slots, 0.0), strict=True))

    def tree(self) -> NativeTree:
        if self._tree is None:
            self._tree = NativeTree(self.memory.ring.kind.numel() + 1, self.memory.allocator)
        return self._tree

    def mark(self, mass: float | torch.Tensor) -> None:
        self.tree().mark(self._core.touched, mass)

    # Reading

    def transitions(self, slots: torch.Tensor) -> Leaves:
        if self._reads_files:
            self._core.fetch(slots)
        # Without strict=: a keyword costs as much as the pairs.
        return dict(zip(self._transition_paths, self._core.transitions(slots)))  # noqa: B905

    def n_steps(self, slots: torch.Tensor, n: int, gamma: float) -> Leaves:
        if not self._sums_steps:
            return composed.n_steps(self, slots, n, gamma)
        self._fetch(slots)
        leaves = self._core.n_steps(slots, min(n, self.memory.ring.slots), gamma)
        return dict(zip(self._n_step_paths, leaves, strict=True))

    def sequences(self, slots: torch.Tensor, before: int, after: int, cross: bool) -> Leaves:
        leaves = self._core.sequences(slots, before, after, cross, self.memory.carried)
        return dict(zip(self._sequence_paths, leaves, strict=True))

    def windowed(self, slots: torch.Tensor, plan: OffsetPlan) -> Leaves:
        found = self._offset_readers.get(plan)
        if found is None:
            if not sums_natively(self.memory, plan):
                return windowed(self, slots, plan)
            found = self._offset_readers[plan] = OffsetReader(self.memory, plan)
        return found.read(slots)

    def windows(
        self, slots: torch.Tensor, before: int, after: int, *, cross: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        windows = slots.new_empty((len(slots), before + after))
        first = torch.empty_like(windows, dtype=torch.bool)
        self._core.window(slots, before, after, cross, windows, first)
        return windows, first

    def take(
        self, slots: torch.Tensor, leaves: Sequence[int] | None = None, *, padded: bool = False
    ) -> list[torch.Tensor]:
        self._fetch(slots)
        return super().take(slots, leaves, padded=padded)

    def take_next(self, slots: torch.Tensor, *, padded: bool = False) -> list[torch.Tensor]:
        if self.keeps_next:
            return self._take_kept_next(slots, padded)
        return self.take(self._core.following(slots, None), self.memory.observed, padded=padded)

    def _fetch(self, slots: torch.Tensor) -> None:
        """Rows of a file are about to be read, which may not be in memory."""
        if self._reads_files:
            self._core.fetch(slots.contiguous())

    def _stack(self, slots: torch.Tensor, leaf: int) -> torch.Tensor:
        out = self.memory.leaves[leaf].new_empty((len(slots), *caller_shape(self.schema.fields[leaf])))
        self._core.stack(slots, leaf, out)
        return out

    def ahead(self, slots: torch.Tensor) -> torch.Tensor:
        return self._core.ahead(slots, None)

    def preceding(self, slots: torch.Tensor) -> torch.Tensor:
        return self._core.behind(slots, None)

    # Naming

    def ids(self, slots: torch.Tensor) -> torch.Tensor:
        return self._core.ids(slots, None)

    def locate(self, ids: torch.Tensor) -> torch.Tensor:
        slots = self._core.locate(ids, None)
        if isinstance(slots, int):
            raise never_issued(ids, slots)
        return slots

    # Verifying, and what outlives a process

    def check(self) -> None:
        self.memory.check()
        check_kernels(self)
        if self._few is not None:
            require(torch.equal(self._few, self.stored()), "few transitions", "those of the ring", self._few)

    def mend(self) -> None:
        if self._write_back is not None:
            self._write_back.finish()
        self.memory.ring.mend()

    def torn_rows(self) -> torch.Tensor:
        torn = torch.zeros_like(self.memory.ring.first)
        if self._write_back is not None:
            self._write_back.find_torn(torn)
        return torn

    def forget_write_back(self) -> None:
        if self.memory.rewriting is not None:
            self.memory.rewriting[0] = 0

    def seal(self) -> None:
        self._core.seal_all()

    def broken_rows(self, since: torch.Tensor, until: torch.Tensor) -> torch.Tensor:
        broken = torch.zeros_like(self.memory.ring.first)
        self._core.find_broken(since, until, broken)
        return broken

    def check_bytes(self) -> None:
        """Verify that every row on the disk is what was written there."""
        ring = self.memory.ring
        if not self._reads_files:
            return
        broken = self.broken_rows(torch.zeros_like(ring.head), ring.head + 1) | self.torn_rows()
        if broken.any():
            slot, env = broken.nonzero()[0].tolist()
            where = f"row {int(ring.rows()[slot, env])}, environment {env} (slot {slot})"
            remedy = "Call clear(), or load a checkpoint: the disk has changed the row."
            got = f"other bytes (in {int(broken.sum())} rows)"
            raise InvariantError(explain(where, "the bytes that were written", got, remedy))

    def write_behind(self, file: int, offset: int, nbytes: int) -> None:
        self._core.write_behind(file, offset, nbytes)


_SUMMED = (torch.float32, torch.float64)
_DOUBTS: dict[int, Any] = {}
if kernels.native() is not None:
    _DOUBTS |= {kernels.native().LOOKS_CUT: Chains.of_cuts, kernels.native().LOOKS_RESET: Chains.of_resets}


def _write_back_of(ring: Any, memory: RowMemory) -> Any:
    """The native writer of mutable leaves, if there are any."""
    if not memory.mutable:
        return None
    return kernels.core().WriteBack(ring.memory, list(memory.mutable), memory.rewritten, memory.rewriting)


def _ring_of(memory: RowMemory) -> Any:
    """The native ring over the same memory."""
    schema, ring = memory.schema, memory.ring
    stacks = [(f.k, f.axis, f.pad == "repeat") if isinstance(f, Stacked) else None for f in schema.fields]
    return kernels.core().RingMemory(
        list(memory.leaves),
        stacks,
        list(memory.observed),
        list(memory.next_leaves),
        {**ring.state, "journal": ring.journal, "seals": memory.seals},
        ring.alive,
        memory.next_step,
        memory.same_step,
        not memory.lead,
        *(schema.leaf_indices[name][0] for name in ("reward", "terminated", "truncated")),
    )
