"""Sequences of a rollout for recurrent networks: where they start, and the hidden states that are kept there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Literal, NamedTuple, get_args

import torch
from tensordict import TensorDict

from relive.errors import CorruptCheckpoint, SchemaError, explain
from relive.fields.assembly import to_device
from relive.fields.conversion import path_name
from relive.fields.invariants import require, require_all, require_form
from relive.fields.schema import Carry, Path, is_sparse, positive
from relive.kernels.reader import Following
from relive.kernels.sequence_index import Cuts, find_sequences
from relive.kernels.sequence_reader import Carried, Layout, SequenceReader, sequence_reader
from relive.memory.documents import Node
from relive.memory.saved import Saved, State
from relive.rollout.episode_flags import EpisodeFlags
from relive.rollout.storage import Storage

Mode = Literal["chunked", "overlap", "every"]

_STRIDES: dict[str, Callable[[int], int]] = {
    "chunked": lambda length: length,
    "overlap": lambda length: max(length // 2, 1),
    "every": lambda _: 1,
}
_LAYOUTS = get_args(Layout)


def cuts_of(length: int | None, mode: str, split_episodes: bool, keep_tail: bool) -> Cuts:
    """What the arguments of `sequences` ask for."""
    if mode not in _STRIDES:
        known = ", ".join(map(repr, _STRIDES))
        raise SchemaError(explain("mode", f"one of {known}", repr(mode), "Pass one of them."))
    stride = 1 if length is None else _STRIDES[mode](positive("length", length))
    return Cuts(length, stride, split_episodes, keep_tail)


def check_layout(layout: str) -> None:
    """Refuse an unknown layout."""
    if layout not in _LAYOUTS:
        known = ", ".join(map(repr, _LAYOUTS))
        raise SchemaError(explain("layout", f"one of {known}", repr(layout), "Pass one of them."))


def moved_sequences(batch: TensorDict, device: torch.device) -> TensorDict:
    """The batch on another device; torch wants the sizes of packed sequences on the host, wherever the steps are."""
    sizes = batch.get("batch_sizes", None)
    there = to_device(batch, device)
    return there if sizes is None else there.clear_device_().set("batch_sizes", sizes)


class Sequences(NamedTuple):
    """The sequences of the stored steps: how many, and how batches of them are read."""

    size: int
    source: Following[SequenceReader]
    paths: list[Path]


class HiddenStates:
    """The leaves declared as `Carry`, which sequences have at their first step only.

    Those declared as `Carry(every=k)` are kept at every k-th step of the rollout and of each episode in it. These are
    all the steps where sequences start whose starts lie a multiple of k apart, whether episodes cut them or not; memory
    grows with T / k and the number of episodes.
    """

    def __init__(self, storage: Storage, flags: EpisodeFlags, num_steps: int) -> None:
        self._storage, self._flags = storage, flags
        fields = dict(zip(storage.schema.paths, storage.schema.fields, strict=True))
        self._paths = [path for path, field in fields.items() if isinstance(field, Carry)]
        self._num_steps = num_steps
        self._kept = {
            i: _Kept(path, field, num_steps * storage.num_envs, storage.device)
            for i, (path, field) in enumerate(fields.items())
            if isinstance(field, Carry) and is_sparse(field)
        }
        self.is_sparse = bool(self._kept)
        """Some leaves are kept every few steps only; in most rollouts there are none."""
        # The coming step's place in its episode and among the valid steps of the rollout; -1 is a row that only resets.
        self._in_episode = torch.zeros(storage.num_envs, dtype=torch.int64, device=storage.device)
        self._in_rollout = torch.zeros_like(self._in_episode)

    @torch.inference_mode(False)  # the places are written later, in whatever mode
    def begin(self) -> None:
        """A rollout begins."""
        self._in_rollout = torch.zeros_like(self._in_rollout)  # a state that is being loaded may share the old one
        self._in_episode = torch.where(self._flags.resetting, -1, 0)
        for kept in self._kept.values():
            kept.clear()

    def plan(self, row: int) -> Callable[[], None]:
        """A change that keeps what is due of the newest step; calling it twice leads to the same."""
        valid = self._in_episode >= 0
        plans = []
        for i, kept in self._kept.items():
            due = valid & ((self._in_episode % kept.every == 0) | (self._in_rollout % kept.every == 0))
            envs = due.nonzero().squeeze(1)
            plans.append(kept.plan(row * len(due) + envs, self._storage.tensors[i][0][envs]))
        in_rollout = self._in_rollout + valid
        after_end = -1 if self._flags.has_reset_rows else 0
        in_episode = torch.where(self._flags.ended(row) & valid, after_end, self._in_episode + 1)

        def change() -> None:
            for put in plans:
                put()
            self._in_rollout.copy_(in_rollout)
            self._in_episode = in_episode

        return change

    def sequences(self, cuts: Cuts, layout: Layout, fields: Iterable[str | Path] | None) -> Sequences:
        """The stored steps cut into sequences."""
        steps = self._storage.stored("sequences")
        self._require(cuts)
        chosen = self._storage.selected(self._storage.leaves(sparse=True), fields)
        carried = {path: Carried(chosen.pop(path), 2, None) for path in self._paths if path in chosen}
        carried |= {kept.path: kept.carried() for kept in self._kept.values() if kept.path in carried}
        leaves, firsts = list(chosen.values()), list(carried.values())
        tensors = [*leaves, *(each.items for each in firsts)]
        index = find_sequences(self._flags.for_sequences(steps), cuts, tensors)
        length = cuts.length or max(index.longest, 1)
        source = self._storage.following(tensors, lambda: sequence_reader(index, length, layout, leaves, firsts))
        sizes = "batch_sizes" if layout == "packed" else "mask"
        return Sequences(len(index), source, [*chosen, ("is_first",), (sizes,), ("index",), *carried])

    def _require(self, cuts: Cuts) -> None:
        """Refuse sequences that start where nothing was kept."""
        for kept in self._kept.values():
            if cuts.length is not None and cuts.stride % kept.every:
                where = f"sequences with {path_name(kept.path)} kept every {kept.every} steps"
                expected = f"starts at multiples of {kept.every} steps"
                remedy = "Change length or mode, or declare Carry(every=1)."
                raise SchemaError(explain(where, expected, f"a start every {cuts.stride} steps", remedy))

    def state(self) -> State:
        """What is kept sparsely, and the place of the coming step."""
        if not self._kept:
            return State({}, {})
        kept = {f"{i}.{name}": x for i, kept in self._kept.items() for name, x in kept.arrays().items()}
        return State({}, {"in_episode": self._in_episode, "in_rollout": self._in_rollout, **kept})

    def load_state(self, saved: Saved) -> None:
        """Become what was saved."""
        own = self.state().arrays
        most = (self._num_steps + 1) * self._storage.num_envs
        arrays = saved.tensors(most * sum(x.element_size() * x.shape[1:].numel() for x in own.values()))
        forms = [{name: (x.dtype, x.ndim, x.shape[1:]) for name, x in each.items()} for each in (arrays, own)]
        places = ("in_episode", "in_rollout") if own else ()
        if forms[0] != forms[1] or any(len(arrays[name]) != self._storage.num_envs for name in places):
            got = f"carries: expected arrays like {forms[1]}, got {forms[0]}"
            raise _wrong(got)
        for i, kept in self._kept.items():
            kept.load(*(arrays[f"{i}.{name}"] for name in ("rows", "values")))
        for name in places:
            getattr(self, f"_{name}").copy_(arrays[name])

    def check(self) -> None:
        """Verify that what is kept is what was due."""
        if not self._kept or not self._storage.has_values:
            return
        steps = self._storage.num_stored
        # One row more than there are steps: the coming one.
        valid, ended = self._flags.whole_mask(steps + 1), self._flags.ended(slice(0, steps))
        none = torch.zeros_like(valid[:1])
        in_rollout = torch.cat([none, valid[:-1]]).cumsum(0)
        after_end = torch.cat([none, ended & valid[:-1]])
        in_episode = in_rollout - torch.where(after_end, in_rollout, 0).cummax(0).values
        for name, found, expected in (
            ("rollout", self._in_rollout, in_rollout[-1]),
            ("episode", self._in_episode, torch.where(valid[-1], in_episode[-1], -1)),
        ):
            require_all(found == expected, f"place in the {name}", f"{expected.tolist()}", found)
        for kept in self._kept.values():
            due = (in_episode % kept.every == 0) | (in_rollout % kept.every == 0)
            kept.check((due & valid)[:-1])


class _Kept:
    """Some rows of one leaf, in the order they came."""

    def __init__(self, path: Path, field: Carry, num_rows: int, device: torch.device) -> None:
        self.path, self.every, self._field = path, field.every, field
        self._values = torch.zeros((0, *field.shape), dtype=field.dtype, device=device)
        self._place = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._rows = torch.zeros(0, dtype=torch.int64, device=device)
        """Which rows the values are of."""
        self._count = 0

    def clear(self) -> None:
        self._count = 0

    def plan(self, rows: torch.Tensor, values: torch.Tensor) -> Callable[[], None]:
        """A change that lets these come after the rows that are kept; calling it twice leads to the same."""
        return partial(self._put, self._count, rows, values)

    @torch.inference_mode(False)  # what grows now is written later, in whatever mode
    def _put(self, start: int, rows: torch.Tensor, values: torch.Tensor) -> None:
        count = start + len(rows)
        if count > len(self._values):
            size = max(count, 2 * len(self._values))
            self._values, self._rows = (_grown(x, size, start) for x in (self._values, self._rows))
        self._values[start:count], self._rows[start:count] = values, rows
        self._place[rows] = torch.arange(start, count, device=rows.device)
        self._count = count

    def carried(self) -> Carried:
        return Carried(self._values, 1, self._place)

    def arrays(self) -> dict[str, torch.Tensor]:
        return {"rows": self._rows[: self._count], "values": self._values[: self._count]}

    def load(self, rows: torch.Tensor, values: torch.Tensor) -> None:
        if len(rows) != len(values) or not bool(((rows >= 0) & (rows < len(self._place))).all()):
            got = f"{len(values)} values for {len(rows)} rows, first {rows[:8].tolist()}"
            expected = f"one value for each row, rows below {len(self._place)}"
            raise _wrong(f"carries: expected {expected}, got {got}")
        self._put(0, rows.to(self._rows.device), values.to(self._rows.device))

    def check(self, due: torch.Tensor) -> None:
        """What is kept is that of the steps `due` [T, N], one after the other."""
        where, rows = path_name(self.path), due.flatten().nonzero().squeeze(1)
        require(self._count == len(rows), where, f"{len(rows)} kept rows", self._count)
        shape = (max(self._count, len(self._values)), *self._field.shape)
        require_form(where, self._values, shape, self._field.dtype, due.device)
        place = self._place[rows]
        require_all(place == torch.arange(len(rows), device=due.device), where, "rows in order", place)


def _wrong(got: str) -> CorruptCheckpoint:
    return Node("state: carries", got).wrong("hidden states of the rollout")


def _grown(tensor: torch.Tensor, size: int, count: int) -> torch.Tensor:
    """A longer tensor with the first `count` rows of this one."""
    grown = tensor.new_zeros((size, *tensor.shape[1:]))
    grown[:count] = tensor[:count]
    return grown
