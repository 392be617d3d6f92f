"""Columns of rings: what a replay buffer writes steps into and what views read rows out of."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict

from relive import kernels
from relive.errors import SchemaError, explain
from relive.fields.batch import assembler
from relive.fields.conversion import conform, dotted, forms, light, misplaced, refuse_reused_leaves, true_flags
from relive.fields.schema import Field, Path, Schema, Stacked, given_shape
from relive.kernels.reader import Reader, reader
from relive.memory import Heap, Room
from relive.randomness import Randomness
from relive.replay.chains import Chains, Counter
from relive.replay.ring import FINAL, MOST_ROWS, TRANSITION, Ring
from relive.replay.torch_writer import Changes, TorchWriter, rebuilt

Touched = tuple[torch.Tensor, torch.Tensor | None]
"""Slots, and which of them really changed (None: all)."""


_MOST_IDS = 2**63 - 1


class ReplayStorage:
    """Every leaf of the schema as a column `[slots, num_envs, …]`; observations once, or with a copy of the next ones.

    A step is written whole or not at all. Reading is by flat slots; -1 reads as zeros.
    """

    def __init__(
        self,
        schema: Schema,
        rows: int,
        num_envs: int | None,
        room: Room,
        *,
        keeps_next: bool,
        next_step: bool,
        same_step: bool,
    ) -> None:
        self.schema = schema
        self.room = room
        self.keeps_next = keeps_next
        self.next_step = next_step
        self.same_step = same_step
        """Environments are known to reset in the step that ends an episode."""
        self.lead = () if num_envs is None else (num_envs,)
        self.observed = schema.columns["obs"]
        self.next_paths = tuple(("next_obs", *schema.paths[i][1:]) for i in self.observed)
        self._transition_paths = (*schema.paths, *self.next_paths, ("index",))
        self._n_step_paths = (*self._transition_paths, ("discount",))
        self._assemble = {
            (steps, weighted): assembler((*paths, ("weight",)) if weighted else paths)
            for steps, paths in ((False, self._transition_paths), (True, self._n_step_paths))
            for weighted in (False, True)
        }
        self.stacked = tuple(i for i, field in enumerate(schema.fields) if isinstance(field, Stacked))
        history = schema.deepest_stack - 1
        self.ring = Ring(rows if keeps_next else rows + 1, num_envs or 1, history, room)
        shape = (self.ring.slots, self.ring.num_envs)
        self.columns = tuple(
            room.allocate(f"column{i}", (*shape, *field.shape), field.dtype) for i, field in enumerate(schema.fields)
        )
        self.next_columns = tuple(
            room.allocate(f"next{i}", tuple(self.columns[i].shape), self.columns[i].dtype)
            for i in (self.observed if keeps_next else ())
        )
        self.device = self.columns[0].device
        self.seals = None if room.keeper is None else room.allocate("seals", (*shape, 2), torch.int64)
        """Checksums of each row's observation and of everything else in it, with its number."""
        self.broken = room.allocate("broken", (), torch.int64)
        """Stacks that cannot be rebuilt, counted where raising would need a host synchronisation."""
        self._native = self._native_twin()
        if room.outlives and self._native is None:
            remedy = "Declare fewer leaves, axes or frames, or keep the buffer in this process's own memory."
            got = f"{len(self.columns)} leaves that it cannot"
            raise SchemaError(
                explain("device", "fields that the native core can write, as shared and disk memory need", got, remedy)
            )
        self._is_alone = self._native is not None and not room.outlives
        """The native core works on memory that nobody else writes, and none of its pages are asked for."""
        agents = schema.columns["reward"]
        summable = len(agents) == 1 and self.columns[agents[0]].dtype in (torch.float32, torch.float64)
        self._sums_steps = summable and not keeps_next
        self.addresses = [tensor.data_ptr() for tensor in self.tensors]
        """Where the native twin and the readers find `tensors`."""
        self._readers: dict[Any, Reader] = {}
        self._changes: Changes = []
        self._counted = light(self.ring.count)
        self._shares: torch.Tensor | None = None
        self._row_ids: torch.Tensor | None = None
        self._next_slots: torch.Tensor | None = None
        self._rows_left = _MOST_IDS // self.ring.num_envs
        """How many rows an environment can be given yet, at least: what the host knows without asking the device."""
        if room.is_found:
            self.count_rows_left()
        self.chains = Counter(is_on=self.device.type == "cpu")
        """Of what torch ops have written on the host; the native twin counts for itself."""
        self.is_empty = True
        """Nothing was written since the last clear: what the host knows without asking the device."""

    def _native_twin(self) -> Any:
        if not kernels.runs_native(self.tensors):
            return None
        if self.schema.deepest_stack > kernels.native().MOST_FRAMES:
            return None
        stacks = [
            (field.k, field.axis, field.pad == "repeat") if isinstance(field, Stacked) else None
            for field in self.schema.fields
        ]
        return kernels.native().RingMemory(
            [kernels.buffer_of(column) for column in self.columns],
            stacks,
            list(self.observed),
            [kernels.buffer_of(column) for column in self.next_columns],
            tuple(kernels.buffer_of(tensor) for tensor in self.ring.state),
            kernels.buffer_of(self.ring.journal),
            kernels.buffer_of(self.seals),
            self.ring.alive,
            self.next_step,
            self.same_step,
            not self.lead,
            *(self.schema.columns[name][0] for name in ("reward", "terminated", "truncated")),
        )

    @property
    def native(self) -> Any:
        """The native twin of the ring, or None when torch ops are to be used."""
        return self._native if kernels._active is not None or self.room.outlives else None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Everything that is kept."""
        return *self.columns, *self.next_columns, *self.ring.state

    @property
    def nbytes(self) -> int:
        """The same, in bytes."""
        return sum(t.numel() * t.element_size() for t in self.tensors)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Everything that changes, sharing memory."""
        columns = zip(map(dotted, self.schema.paths), self.columns, strict=True)
        nexts = zip(map(dotted, self.next_paths), self.next_columns, strict=False)
        rings = zip(("kind", "first", "head", "open", "resetting", "count", "floor"), self.ring.state, strict=True)
        return {**dict(columns), **dict(nexts), **{f"ring.{name}": tensor for name, tensor in rings}}

    def candidate(self, state: Any) -> ReplayStorage:
        """A storage made alike over the tensors of a state, to be verified before it is loaded; torch ops read it."""
        own, given = self.state_dict(), forms(state)
        if given != forms(own):
            remedy = "Make the buffer with the settings of the saved buffer."
            raise SchemaError(explain("load_state_dict", f"tensors like {forms(own)}", given, remedy))
        tensors = [true_flags(state[name].detach().to(self.device).contiguous()) for name in own]
        other, columns, nexts = copy.copy(self), len(self.columns), len(self.next_columns)
        other.room, other.seals, other._native, other._is_alone = Heap(self.device), None, None, False
        other.columns, other.next_columns = tuple(tensors[:columns]), tuple(tensors[columns : columns + nexts])
        other.ring = self.ring.over(tensors[columns + nexts :])
        other.addresses = [tensor.data_ptr() for tensor in tensors]
        other.broken, other._counted = torch.zeros_like(self.broken), light(other.ring.count)
        other._readers, other._changes, other._next_slots = {}, [], None
        other.found()
        return other

    def load(self, other: ReplayStorage) -> None:
        """Become what a storage made alike is."""
        for mine, theirs in zip(self.tensors, other.tensors, strict=True):
            mine.copy_(theirs)
        self.broken.copy_(other.broken)
        self.found()

    def found(self) -> None:
        """Know what the host knows of rows that something else than `write` has put here."""
        self._forget_tables()
        self.is_empty = not bool((self.ring.head > self.ring.floor).any())
        self.count_rows_left()

    def broken_rows(self, since: torch.Tensor, until: torch.Tensor) -> torch.Tensor:
        """Which slots [S, N] hold rows, from `since` [N] on and before `until`, that are not what was written."""
        broken = torch.zeros_like(self.ring.first)
        self._native.find_broken(*map(kernels.buffer_of, (since, until, broken)))
        return broken

    def seal(self) -> None:
        """Take every row for what was written."""
        self._native.seal_all()

    # Writing

    def keep_touched(self) -> None:
        """Let writes report the slots that they changed."""
        if self._native is not None:
            self._native.keep_touched(True)

    def write(
        self, leaves: tuple[Any, ...], nexts: tuple[Any, ...], envs: torch.Tensor | None, steps: int | None = None
    ) -> str | None:
        """One step (or a block of `steps` steps in time order) of all environments, or of the environments `envs`.

        Returns None; or, once for each such doubt, what looks like a mistake, and then nothing was written.
        """
        native = self._native if kernels._active is not None or self.room.outlives else None
        blocks, count = steps is not None, 1 if steps is None else steps
        if self._rows_left < MOST_ROWS * count:
            self._require_rows_left(count)
        if native is not None:
            self._shares = self._row_ids = None
            ids = None if envs is None else kernels.buffer_of(envs)
            status = native.write(leaves, nexts, ids, count, blocks)
            if status >= 0:
                leaves, nexts = self._conformed(leaves, nexts, envs, steps)
                as_buffers = [tuple(map(kernels.buffer_of, group)) for group in (leaves, nexts)]
                status = native.write(*as_buffers, ids, count, blocks)
                if status >= 0:
                    raise misplaced((*map(dotted, self.schema.paths), *map(dotted, self.next_paths))[status])
            if status < -1:
                return self._refused(status)
        else:
            leaves, nexts = self._conformed(leaves, nexts, envs, steps)
            writer = TorchWriter(self, leaves, nexts, envs, blocks)
            coming = self.chains.seen + writer.chains() if self.chains.is_on else self.chains.seen
            doubt = self.chains.doubt(coming)
            if doubt is not None:
                return doubt
            self._shares = None
            self._changes = writer.write()
            self.chains.seen = coming
            self._renew_row_ids()
        self.is_empty = False
        self._rows_left -= MOST_ROWS * count
        return None

    def _refused(self, status: int) -> str:
        """What the native core has a doubt about; or the stack that it cannot store is raised."""
        core = kernels._native  # also where torch ops are forced: memory that outlives a process is written natively
        assert core is not None
        if status not in (core.LOOKS_CUT, core.LOOKS_RESET):
            raise self.unstackable(-2 - status)
        chains = Chains(*self._native.foreseen())
        return chains.of_cuts() if status == core.LOOKS_CUT else chains.of_resets()

    def count_rows_left(self) -> None:
        """Find out how many rows can be numbered yet; for whoever has set the heads."""
        self._row_ids = None
        self._rows_left = _MOST_IDS // self.ring.num_envs - int(self.ring.head.max())

    def _require_rows_left(self, steps: int) -> None:
        self.count_rows_left()  # fewer rows may have been used than were allowed for
        if self._rows_left < MOST_ROWS * steps:
            expected, got = "ids below 2^63", f"room for {self._rows_left} rows per environment"
            raise OverflowError(explain("add", expected, got, "Make a new buffer."))

    def _conformed(
        self, leaves: tuple[Any, ...], nexts: tuple[Any, ...], envs: torch.Tensor | None, steps: int | None
    ) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        schema = self.schema
        lead = self.lead if envs is None else (len(envs),)
        lead = lead if steps is None else (steps, *lead)

        def fit(column: int, value: Any, prefix: str = "") -> torch.Tensor:
            field = schema.fields[column]
            where = prefix + dotted(schema.paths[column])
            return conform(where, Field(given_shape(field), field.dtype), value, lead, self.device)

        if steps is None:
            refuse_reused_leaves(schema, [leaves[i] for i in self.observed], nexts)
        fitted = tuple(fit(i, value) for i, value in enumerate(leaves))
        fitted_nexts = tuple(fit(i, value, "next_") for i, value in zip(self.observed, nexts, strict=True))
        if steps is None:  # again: other objects than arrays and tensors are seen through only now
            refuse_reused_leaves(schema, [fitted[i] for i in self.observed], fitted_nexts)
        return fitted, fitted_nexts

    def unstackable(self, leaf: int) -> SchemaError:
        """What to say of a stack (of a column, or after those of a next observation) that cannot be rebuilt."""
        count = len(self.columns)
        is_next = leaf >= count
        column = self.observed[leaf - count] if is_next else leaf
        where = ("next_" if is_next else "") + dotted(self.schema.paths[column])
        expected = (
            "obs one frame later" if is_next else "the stored frames, or an episode's first frame and its padding"
        )
        remedy = "Check k, axis and pad: only stacks that single frames can rebuild are stored."
        return SchemaError(explain(where, f"a stack of {expected}", "a stack of other frames", remedy))

    def touched(self) -> Touched:
        """The slots that the last write made transitions or took away, in the order it happened."""
        native = self.native
        if native is None:
            return torch.cat([slots for slots, _ in self._changes]), torch.cat([which for _, which in self._changes])
        return torch.tensor(native.touched.slots, dtype=torch.int64, device="cpu"), None

    def cut(self, env: torch.Tensor) -> None:
        """The current episodes of these environments were abandoned."""
        ring, kind = self.ring, self.ring.kind.view(-1)
        self._shares = None
        pending, is_open = ring.at(ring.head[env], env), ring.open[env]
        if ring.journal is not None:
            ring.journal[env] = 1 + 2 * ring.head[env] + is_open
        kind[pending] = torch.where(is_open, FINAL, kind[pending]).to(torch.uint8)
        ring.head[env] += is_open.long()
        ring.open[env] = False
        ring.resetting[env] = False
        if ring.journal is not None:
            ring.journal[env] = 0

    def clear(self) -> None:
        """Forget every row."""
        self.ring.clear()
        self._forget_tables()
        self.is_empty = True

    # Reading

    def __len__(self) -> int:
        """How many rows may be drawn."""
        return self.native.stored() if self.native is not None else int(self._counted.sum())

    def draw(self, count: int, random: Randomness) -> torch.Tensor:
        """Flat slots of rows, uniformly and with replacement [count]; the caller has checked that there are any."""
        if self.native is not None:
            out = kernels.target(count)
            drawn = self.native.draw(count, random.capsule, kernels.buffer_of(out))
            if drawn is not None:
                return drawn if out is None else out
        return torch.searchsorted(self._running_shares(), random.uniform(count, self.device), right=True)

    # What torch ops look up in tables of all slots, where computing it for a batch would be several launches

    def _forget_tables(self) -> None:
        self._shares = self._row_ids = None

    def _running_shares(self) -> torch.Tensor:
        """Which part of all transitions lies up to each flat slot [S·N]; kept until something is written."""
        shares = self._shares
        if shares is None:
            # Of integers torch would make shares in float32, too coarse for many rows.
            counts = (self.ring.kind.view(-1) == TRANSITION).cumsum(0, dtype=torch.float64)
            shares = counts / counts[-1]
            shares[-1] = 1.0  # it is, unless there are no transitions: then a draw is wrong, but inside
            self._shares = None if self.room.outlives else shares  # others may write
        return shares

    def _known_ids(self) -> torch.Tensor:
        """The ids of the transitions at all flat slots [S·N], -1 where there is none; kept up to date by writes."""
        if self._row_ids is None:
            self._row_ids = self.ring.ids()
        return self._row_ids

    def _renew_row_ids(self) -> None:
        if self._row_ids is not None:
            slots, _ = self.touched()
            is_drawable = self.ring.kind_at(slots) == TRANSITION
            self._row_ids[slots] = torch.where(is_drawable, self.ring.id_of(slots), -1)

    def _following(self, slots: torch.Tensor) -> torch.Tensor:
        """`following` of slots that are some."""
        if self.native is not None:
            return self.following(slots)
        if self._next_slots is None:
            self._next_slots = self.ring.following()
        return self._next_slots.index_select(0, slots)

    def ids(self, slots: torch.Tensor) -> torch.Tensor:
        """The identities of the rows at flat slots."""
        return self._mapped("ids", slots) if self.native is not None else self.ring.id_of(slots)

    def following(self, slots: torch.Tensor) -> torch.Tensor:
        """The flat slots of the next rows; -1 stays."""
        if self.native is not None:
            return self._mapped("following", slots)
        return torch.where(slots < 0, slots, self.ring.after(slots))

    def ahead(self, slots: torch.Tensor) -> torch.Tensor:
        """How many more transitions of the same episode follow each row."""
        return self._mapped("ahead", slots) if self.native is not None else self.ring.ahead(slots)

    def behind(self, slots: torch.Tensor) -> torch.Tensor:
        """How many transitions of the same episode precede each row."""
        return self._mapped("behind", slots) if self.native is not None else self.ring.behind(slots)

    def windows(
        self, slots: torch.Tensor, before: int, after: int, *, cross: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Flat slots [B, before + after] of the steps around each row, then -1, and which of them start an episode."""
        if self.native is None:
            windows = self.ring.windows(slots, before, after, cross)
            return windows, self.ring.first.view(-1)[windows.clamp(min=0)] & (windows >= 0)
        windows = slots.new_empty((len(slots), before + after))
        first = torch.empty_like(windows, dtype=torch.bool)
        buffers = map(kernels.buffer_of, (windows, first))
        self.native.window(kernels.buffer_of(slots), before, after, cross, *buffers)
        return windows, first

    def locate(self, ids: torch.Tensor) -> torch.Tensor:
        """The flat slots of row ids; -1 for rows that can no longer be drawn, an IndexError for ids never given."""
        if self.native is not None:
            out = kernels.target(len(ids))
            found = self.native.locate(kernels.buffer_of(ids), kernels.buffer_of(out))
            slots, wrong = found if out is None else out, found if isinstance(found, int) else -1
        else:
            at = ids % (self.ring.slots * self.ring.num_envs)
            slots = at.masked_fill(self._known_ids().index_select(0, at) != ids, -1)
            # Elsewhere than on the host an id is taken on trust: looking would be a synchronisation.
            suspect = self.device.type == "cpu" and ((slots.numpy() < 0) | (ids.numpy() < 0)).any()
            wrong = self._never_issued(ids) if suspect else -1
        if wrong >= 0:
            remedy = "Pass ids from batch['index']."
            raise IndexError(explain(f"index[{wrong}]", "the id of a stored transition", int(ids[wrong]), remedy))
        return slots

    def _never_issued(self, ids: torch.Tensor) -> int:
        """The place of the first id that no row has ever had, or -1."""
        _, never = self.ring.locate(ids)
        return int(never.nonzero()[0]) if never.any() else -1

    def _mapped(self, kernel: str, slots: torch.Tensor) -> torch.Tensor:
        out = kernels.target(len(slots))
        mapped = getattr(self.native, kernel)(kernels.buffer_of(slots), kernels.buffer_of(out))
        return mapped if out is None else out

    def transitions(self, slots: torch.Tensor, room: Any = None) -> dict[Path, torch.Tensor]:
        """Every field of the rows at flat slots, the observations that they led to, and their ids.

        In fresh memory, or in `room` that was reserved for as many rows.
        """
        native = self.native
        if native is None or not kernels.exchange():
            ids = self.ids(slots) if native is not None else self._known_ids().index_select(0, slots)
            return dict(zip(self._transition_paths, [*self.take(slots), *self.take_next(slots), ids], strict=True))
        if self.seals is not None:
            self._fetch(slots)
        # Without strict=: a keyword costs as much as the pairs.
        leaves = native.transitions(slots) if room is None else native.fill(room, slots, 0.0)
        return dict(zip(self._transition_paths, leaves))  # noqa: B905

    def reads_at_once(self, n: int) -> bool:
        """Whether `sample` and `batch` work: for transitions, or for several steps as one if n > 0."""
        return self._is_alone and kernels.exchange() and (n == 0 or self._sums_steps)

    def sample(self, count: int, random: Randomness, n: int, gamma: float) -> TensorDict | None:
        """A batch of rows that are drawn uniformly, in one native call; None where so few are stored that it cannot."""
        leaves = self._native.sample(count, random.capsule, n, gamma)
        return None if leaves is None else self._assemble[n > 0, False](leaves, torch.Size((count,)))

    def reserve(self, count: int, n: int = 0) -> Any:
        """The memory of a batch, native: who has it before rows are drawn cannot fail for want of it after."""
        return self._native.reserve(count, n)

    def batch(self, room: Any, slots: torch.Tensor, weight: torch.Tensor | None, n: int, gamma: float) -> TensorDict:
        """A batch of the rows at flat slots in reserved memory, with their weights if there are any."""
        leaves = self._native.fill(room, slots, gamma)
        if weight is not None:
            leaves.append(weight)
        return self._assemble[n > 0, weight is not None](leaves, slots.shape)

    @property
    def has_neighbours(self) -> bool:
        """Other processes may write here, and would wait while rows are copied; `holds` tells what has changed."""
        return self.room.outlives and self.room.keeper is None and kernels.exchange()

    def holds(self, slots: torch.Tensor, ids: torch.Tensor) -> bool:
        """Whether the rows at flat slots are those of these ids still. Needs the native core."""
        return self._native.holds(slots, ids)

    def n_steps(self, slots: torch.Tensor, n: int, gamma: float) -> dict[Path, torch.Tensor] | None:
        """`transitions` of n steps as one, with "discount", from the native core; None where it cannot tell."""
        if self.native is None or not kernels.exchange() or not self._sums_steps:
            return None
        self._fetch(slots)
        leaves = self.native.n_steps(slots, n, gamma)
        return dict(zip(self._n_step_paths, leaves, strict=True))

    def sequences(
        self, slots: torch.Tensor, before: int, after: int, cross: bool, carried: Sequence[int]
    ) -> list[torch.Tensor] | None:
        """Everything around each row from the native core, see `Sequence`; None where it cannot tell.

        The leaves of steps in the order of their columns, next observations, "mask", "train", "is_first", the columns
        `carried` at the first step, ids.
        """
        if self.native is None or not kernels.exchange():
            return None
        return self.native.sequences(slots, before, after, cross, carried)

    def take(
        self, slots: torch.Tensor, columns: Sequence[int] | None = None, *, padded: bool = False
    ) -> list[torch.Tensor]:
        """The leaves at flat slots, in the schema's order (of all columns, or of `columns`); `padded`: -1 is zeros."""
        self._fetch(slots)
        columns = range(len(self.columns)) if columns is None else columns
        if not self.stacked:
            return self._reader(self.columns, tuple(columns)).take(slots, 0, len(slots), padded)
        whole = tuple(i for i in columns if i not in self.stacked)
        leaves = self._reader(self.columns, whole).take(slots, 0, len(slots), padded)
        found = dict(zip(whole, leaves, strict=True))
        return [found[i] if i in found else self.stack(slots, i) for i in columns]

    def take_next(self, slots: torch.Tensor, *, padded: bool = False) -> list[torch.Tensor]:
        """The leaves of the observations that the rows at flat slots led to."""
        if not self.keeps_next:
            following = self.following(slots) if padded else self._following(slots)
            return self.take(following, self.observed, padded=padded)
        return self._reader(self.next_columns, tuple(range(len(self.observed)))).take(slots, 0, len(slots), padded)

    def _fetch(self, slots: torch.Tensor) -> None:
        """Rows of a file are about to be read, which may not be in memory."""
        if self.seals is not None:
            self._native.fetch(kernels.buffer_of(slots.contiguous()))

    def _reader(self, source: tuple[torch.Tensor, ...], columns: tuple[int, ...]) -> Reader:
        key = (source is self.columns, columns, kernels.native() is not None, kernels.exchange())
        if key not in self._readers:
            self._readers[key] = reader([source[i] for i in columns], 2, self.ring.slots * self.ring.num_envs)
        return self._readers[key]

    def stack(self, slots: torch.Tensor, column: int) -> torch.Tensor:
        """The frame stacks at flat slots, rebuilt from single frames."""
        field = self.schema.fields[column]
        if self.native is None:
            assert isinstance(field, Stacked)
            return rebuilt(self.ring, field, self.columns[column], slots)
        out = self.columns[column].new_empty((len(slots), *given_shape(field)))
        self.native.stack(kernels.buffer_of(slots), column, kernels.buffer_of(out))
        return out
