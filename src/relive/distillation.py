"""The imitation buffer: observations and a teacher's actions, for training a student."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from numbers import Real
from os import PathLike
from typing import Any, TypeAlias

import numpy as np
import torch

from relive import lazy
from relive.checkpoint.snapshot import Rows, State, register_buffer
from relive.checkpoint.state_dict import StateDictMixin
from relive.errors import NotReadyError, SchemaError, explain, verify
from relive.kernels import complete
from relive.kernels.reader import make_reader
from relive.locking import make_lock
from relive.replay.buffer import ReplayBuffer
from relive.replay.ring import HostRing
from relive.rng import Randomness
from relive.rollout.batching import iter_epochs
from relive.rollout.buffer import RolloutBuffer
from relive.schema.assembly import (
    assemble_field,
    check_batch_size,
    check_destination,
    check_targets,
    import_tensordict,
    make_assembler,
    memory_range,
    to_device,
)
from relive.schema.checks import check_fraction, check_nonempty, check_positive_int
from relive.schema.conversion import as_indexable, as_tensor, convert_leaves, convert_row_ids, path_name
from relive.schema.fields import (
    Declaration,
    Field,
    Schema,
    Tree,
    declare_caller_fields,
    declare_fields,
    narrow_dtype,
    parse_declaration,
    parse_device,
    refuse_mutable_leaves,
    refuse_reserved_names,
)
from relive.schema.invariants import verify_elements, verify_layout
from relive.schema.suggestions import suggests_keywords, suggests_methods
from relive.storage import Memory
from relive.storage.codec import JsonNode, SnapshotReader

_MAX_ROUNDS = 1 << 24
_RESERVED_NAMES = ("obs", "action", "index", "round", "self")

Recent: TypeAlias = "int | Mapping[int, float] | None"
"""Rounds to draw a batch from: an int k for the newest k rounds, {k: share} for a share of the batch from the newest k
rounds and the rest from all rows, or None for all rows."""


@register_buffer
@suggests_methods
class DistillationBuffer(StateDictMixin):
    """Ring buffer of `capacity` rows: observations, a teacher's actions, and the round in which each row was added.

    `add` takes one row or a batch of rows, depending on the observation's number of axes.

    Args:
        capacity: maximum number of rows; the next row overwrites the oldest.
        obs: one observation: a shape, a `Field`, or a dict or tuple of them.
        action: the teacher's action, declared likewise. If it is None, the first `add` sets the shapes and dtypes of
            the action and of extra fields (float64 is stored as float32).
        extra: additional fields by name, such as parameters of the teacher's distribution, weights or values.
        device: where the rows are stored: a torch device, or a `Memory`.
        seed: seed of sampling; by default a seed from the system.

    In DAgger (Ross et al., A Reduction of Imitation Learning to No-Regret Online Learning, 2011) each round adds the
    teacher's actions in states visited by a mixture of teacher and student:

    >>> buffer = DistillationBuffer(1000, obs=1, seed=0)
    >>> teacher, student = torch.sin, torch.zeros_like
    >>> for _ in range(3):
    ...     obs = torch.rand(8, 1)
    ...     label = teacher(obs)
    ...     buffer.add(obs, label)
    ...     action = buffer.mix(label, student(obs), beta=lambda round: 0.5**round)  # for the environments
    ...     for batch in buffer.epochs(4):
    ...         loss = (student(batch["obs"]) - batch["action"]).square().mean()
    ...     round = buffer.next_round()
    >>> len(buffer), buffer.round
    (24, 3)
    """

    @suggests_keywords
    def __init__(
        self, capacity: int, obs: Declaration, action: Declaration | None = None, *,
        extra: Mapping[str, Declaration] | None = None, device: torch.device | str | Memory = "cpu",
        seed: int | None = None,
    ) -> None:  # fmt: skip
        self.capacity = check_positive_int("capacity", capacity)
        refuse_reserved_names(extra or {}, _RESERVED_NAMES)
        trees = {"obs": declare_caller_fields("obs", obs)}
        if action is not None:
            trees["action"] = declare_caller_fields("action", action)
        trees |= {name: declare_caller_fields(f"extra.{name}", tree) for name, tree in (extra or {}).items()}
        self._memory = Memory.of(device)
        self._allocator = self._memory.open_own_memory("DistillationBuffer")
        # The device of a tensor includes its index: "cuda" becomes "cuda:0".
        self.device = torch.empty(0, device=self._memory.device).device
        self._schema = Schema(trees)
        refuse_mutable_leaves(self._schema, trees, "a field that is added once", "Declare a plain field.")
        self._columns: tuple[torch.Tensor, ...] = ()
        """A tensor [capacity, …] per leaf; empty before the fields are known."""
        self._ring = HostRing(self.capacity)
        self._set_rounds([0])
        self._random = Randomness(seed)
        self._lock = make_lock(self)
        if action is not None:
            self._allocate_columns(self._schema)

    def _set_rounds(self, round_starts: list[int]) -> None:
        device_starts = torch.tensor(round_starts, device=self.device)
        self._starts, self._device_starts = round_starts, device_starts
        """First row of each round, on the host and on the device."""

    def _allocate_columns(self, schema: Schema) -> None:
        sizes = [math.prod(field.shape) * field.dtype.itemsize for field in schema.fields]
        self._memory.require_free_bytes(self.capacity * sum(sizes))
        columns = tuple(self._allocator.allocate("column", (self.capacity, *f.shape), f.dtype) for f in schema.fields)
        self._reader = make_reader(columns, 1, self.capacity)
        self._paths = (*schema.paths, ("index",), ("round",))
        self._build = make_assembler(self._paths)
        self._schema, self._columns = schema, columns

    def add(self, obs: Any, action: Any, **extra: Any) -> None:
        """Store one row, or a batch of rows [B, …] in order; if B exceeds `capacity`, the last rows stay."""
        with self._lock:
            leading_shape = self._find_leading_shape("obs", obs)
            schema = self._schema if self._columns else self._extend_schema(action, extra, leading_shape)
            for name in extra:
                schema.check_declared(name)
            values = {"obs": obs, "action": action, **extra}
            leaves = [
                leaf
                for name in schema.names
                for leaf in convert_leaves(schema, name, values.get(name), leading_shape, self.device, unit="rows")
            ]
            if not self._columns:
                self._allocate_columns(schema)
            # If the conversion of a value has called `add`, which declared the fields, start again with these fields.
            elif schema is not self._schema:
                return self.add(obs, action, **extra)
            count = leading_shape[0] if leading_shape else 1
            leaves = leaves if leading_shape else [leaf.unsqueeze(0) for leaf in leaves]
            pieces, head = self._ring.find_next_slices(count), self._ring.head + count

            def change() -> None:
                for rows, slots in pieces:
                    for column, leaf in zip(self._columns, leaves, strict=True):
                        column[slots].copy_(leaf[rows])
                self._ring.head = head

            complete(change)

    def _find_leading_shape(self, name: str, value: Any, prefix: str = "") -> tuple[int, ...]:
        """Return the leading shape of a value: `()` for one row, `(B,)` for a batch."""
        column, leaf = self._schema.leaf_indices[name][0], self._schema.flatten(name, value)[0]
        where, row_shape = prefix + path_name(self._schema.paths[column]), self._schema.fields[column].shape
        if leaf is None:
            raise SchemaError(explain(where, "a value", None, "Pass one row or a batch of rows."))
        shape = tuple(leaf.shape if hasattr(leaf, "shape") else as_tensor(where, leaf, self.device).shape)
        if len(shape) not in (len(row_shape), len(row_shape) + 1):
            expected = f"shape {row_shape}, or {('rows', *row_shape)} for a batch"
            raise SchemaError(explain(where, expected, shape, "Pass one row or a batch of rows."))
        return shape[: len(shape) - len(row_shape)]

    def _extend_schema(self, action: Any, extra: Mapping[str, Any], leading_shape: tuple[int, ...]) -> Schema:
        """Return the schema with undeclared fields added, in the shapes and dtypes of their first values."""
        refuse_reserved_names(extra, _RESERVED_NAMES)
        declared, values = self._schema.trees, {"action": action, **extra}
        new_trees = {
            name: declare_fields(name, _infer_declaration(name, value, leading_shape, self.device))
            for name, value in values.items()
            if name not in declared
        }
        return Schema({"obs": declared["obs"], "action": new_trees["action"], **declared, **new_trees})

    def fill(
        self, source: ReplayBuffer | RolloutBuffer, teacher: Callable[[Any], Any] | None = None, *,
        batch_size: int = 4096,
    ) -> None:  # fmt: skip
        """Add the observations and actions of every transition of another buffer, oldest first.

        With `teacher`, the actions are `teacher(obs)`: an action [B, …], or (action, extra) with a dict of extra
        fields. It is called without gradients, on `batch_size` rows at a time. Without `teacher`, extra fields are
        read from the fields of the same names in `source`.
        """
        check_positive_int("batch_size", batch_size)
        check_nonempty("fill", len(source), "transition", "Add steps to the source first.")
        import_tensordict()
        has_grad = torch.is_grad_enabled()
        with self._lock:
            before = self._schema, self._columns, self._ring.head
            will_overwrite = len(self._ring) + len(source) > self.capacity
            old_columns = [column.clone() for column in self._columns] if will_overwrite and len(self._ring) else []
            try:
                torch.set_grad_enabled(False)
                for batch in _read_transitions(source, batch_size):
                    action, extra = self._label_batch(batch, teacher)
                    self.add(batch["obs"].to(self.device), action, **extra)
            except BaseException:
                self._schema, self._columns, self._ring.head = before
                if old_columns:
                    complete(partial(torch._foreach_copy_, self._columns, old_columns))
                raise
            finally:
                # A signal in the exit of `torch.no_grad()` would leave gradients disabled.
                torch._C._set_grad_enabled(has_grad)

    def _label_batch(
        self, batch: lazy.TensorDict, teacher: Callable[[Any], Any] | None
    ) -> tuple[Any, Mapping[str, Any]]:
        """Return the action and extra fields for a batch: the result of the teacher, or fields of the batch."""
        if teacher is not None:
            result = teacher(batch["obs"])
            has_extra = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)
            return result if has_extra else (result, {})
        names = [name for name in self._schema.names if name not in ("obs", "action")]
        for name in names:
            if name not in batch.keys():
                expected = f"fields of the source ({', '.join(sorted(map(str, batch.keys())))})"
                raise SchemaError(explain("fill", expected, repr(name), "Pass a teacher that returns it."))
        return batch["action"].to(self.device), {name: batch[name].to(self.device) for name in names}

    def clear(self) -> None:
        """Remove every row; ids and rounds continue, and the fields stay."""
        with self._lock:
            self._ring.clear()

    def save(self, path: str | PathLike[str], *, keep: int = 2) -> int:
        """Write a checkpoint into the folder `path`, whole or not at all, and return its number.

        Only rows added since this buffer's last save to `path` are written, and the newest `keep` checkpoints stay.
        Everything is saved: rows, rounds and the generator. `relive.load(path)` restores exactly this state.
        """
        from relive.checkpoint.saving import save  # noqa: PLC0415 (checkpoint imports every buffer)

        return save(self, path, keep=keep)

    @classmethod
    def from_config(cls, config: JsonNode, saved: SnapshotReader, **changes: Any) -> DistillationBuffer:
        """Return an empty buffer of this config, on another device if `changes` has one; see `relive.load`."""
        trees = {name: parse_declaration(tree) for name, tree in config.entry("fields").entries().items()}
        if "obs" not in trees:
            raise config.entry("fields").error("an entry 'obs'")
        has_columns = saved.values.entry("ring").entry("known").flag()
        fields = Schema(trees).fields if has_columns else ()
        saved.require_columns({f"column{i}": (field.dtype, field.shape) for i, field in enumerate(fields)})
        obs, action = trees.pop("obs"), trees.pop("action", None)
        device = changes.get("device") or parse_device(config.entry("device"))
        return cls(config.entry("capacity").integer(1, 1 << 50), obs, action, extra=trees, device=device)

    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments as JSON."""
        return {"capacity": self.capacity, "fields": self._schema.config(), "device": str(self.device)}

    def state(self) -> State:
        """Return the state to save, without the rows."""
        ring = {"head": self._ring.head, "floor": self._ring.floor, "known": bool(self._columns)}
        parts = {
            "ring": (ring, {"starts": torch.tensor(self._starts, device="cpu")}),
            "random": self._random.state(),
        }
        return State.of_parts(parts)

    def rows(self) -> Rows | None:
        """Return the rows as the rows of a single environment; None before the fields are known."""
        if not self._columns:
            return None
        columns = {f"column{i}": column.unsqueeze(1) for i, column in enumerate(self._columns)}
        return Rows(columns, *(torch.tensor([row], device="cpu") for row in (self._ring.oldest_row, self._ring.head)))

    def load_state(self, saved: SnapshotReader) -> None:
        """Restore a saved state, except the rows; raise a CorruptCheckpoint if it is inconsistent."""
        node, ring = saved.values.entry("ring"), self._ring
        head = node.entry("head").integer()
        floor = node.entry("floor").integer(0, head)
        round_starts = saved.read_array("ring.starts", (range(1, _MAX_ROUNDS),), torch.int64)
        if round_starts[0] != 0 or bool((round_starts.diff() < 0).any()) or int(round_starts[-1]) > head:
            raise saved.array_node("ring.starts", round_starts.tolist()).error(f"rising rows from 0 to the head {head}")
        self._random.load_state(saved.part("random"))
        if node.entry("known").flag() and not self._columns:
            fields = saved.config.entry("fields").entries()
            self._allocate_columns(Schema({name: parse_declaration(tree) for name, tree in fields.items()}))
        ring.head, ring.floor = head, floor
        self._set_rounds(round_starts.tolist())

    @property
    def round(self) -> int:
        """Number of the current round, counted from 0."""
        return len(self._starts) - 1

    def next_round(self) -> int:
        """Begin the next round and return its number."""
        with self._lock:
            self._set_rounds([*self._starts, self._ring.head])
            return self.round

    def mix(self, teacher_action: Any, student_action: Any, beta: float | Callable[[int], float]) -> Any:
        """Return the actions to take: in each environment the teacher's with probability β, else the student's.

        `beta` is a number or a function of the round. Actions are for one environment, or for a batch
        of environments. The result is a tensor, or a TensorDict if the action is nested.
        """
        import_tensordict()
        with self._lock:
            if "action" not in self._schema.names:
                remedy = "Declare action=, or add a row first."
                raise NotReadyError(explain("mix", "a declared action", f"the fields {self._schema.names}", remedy))
            schema, probability = self._schema, check_fraction("beta", beta(self.round) if callable(beta) else beta)
            leading_shape = self._find_leading_shape("action", teacher_action, "teacher_")
            teacher, student = (
                convert_leaves(schema, "action", action, leading_shape, self.device, prefix=prefix, unit="rows")
                for prefix, action in (("teacher_", teacher_action), ("student_", student_action))
            )
            is_teacher = self._random.uniform(leading_shape[0] if leading_shape else 1, self.device) < probability
            leaves = [
                torch.where(
                    is_teacher.view((*leading_shape, *(1,) * (a.ndim - len(leading_shape)))),
                    as_indexable(a),
                    as_indexable(b),
                ).view(a.dtype)
                for a, b in zip(teacher, student, strict=True)
            ]  # fmt: skip
            return assemble_field(schema, "action", leaves, torch.Size(leading_shape))

    def sample(
        self, batch_size: int, *, recent: Recent = None, device: torch.device | str | None = None,
        out: lazy.TensorDict | None = None,
    ) -> lazy.TensorDict:  # fmt: skip
        """Return a batch of rows [B], drawn uniformly with replacement, with their ids ("index") and rounds ("round").

        `recent=2` draws from the newest two rounds only; `recent={1: 0.5}` draws each row with probability one half
        from the newest round, else from all rows. The batch does not share the buffer's memory; `out` is filled
        and returned instead of new tensors.
        """
        check_batch_size("sample", batch_size)
        target = check_destination(device, out)
        with self._lock:
            windows = self._choose_windows(recent)
            targets = self._check_out_tensors(out, batch_size)
            before = self._random.snapshot()
            try:
                batch = self._read_batch(self._draw_rows(windows, batch_size), targets, out)
            except BaseException:
                self._random.restore(before)
                raise
        return batch if target is None else to_device(batch, target)

    def epochs(
        self, batch_size: int, *, epochs: int = 1, shuffle: bool = True, drop_last: bool = False,
        recent: int | None = None, device: torch.device | str | None = None, out: lazy.TensorDict | None = None,
    ) -> Iterator[lazy.TensorDict]:  # fmt: skip
        """Yield every row, or every row of the newest `recent` rounds, once per epoch in batches `[B]`.

        Only rows stored at the call are read. If one of these rows is overwritten before the last epoch ends, the next
        batch raises a NotReadyError.
        """
        check_positive_int("batch_size", batch_size)
        check_positive_int("epochs", epochs)
        target = check_destination(device, out)
        with self._lock:
            oldest = self._find_oldest_row("epochs", recent)
            rows = torch.arange(oldest, self._ring.head, device=self.device)
            targets = self._check_out_tensors(out, batch_size)

        def read(index: torch.Tensor, start: int, stop: int) -> lazy.TensorDict:
            return self._read_batch(index[start:stop].clone(), targets, out)

        def check() -> None:
            if oldest < self._ring.oldest_row:
                remedy = "Finish the epochs before you add rows that overwrite theirs."
                expected = f"row {oldest}, the oldest of these epochs, to be stored"
                raise NotReadyError(explain("epochs", expected, f"rows from {self._ring.oldest_row}", remedy))

        batches = iter_epochs(
            read, rows, batch_size, epochs, shuffle=shuffle, drop_last=drop_last, reads_into_out=out is not None,
            where="epochs", unit="rows", random=self._random, device=self.device, lock=self._lock, check_items=check,
        )  # fmt: skip
        return batches if target is None else (to_device(batch, target) for batch in batches)

    def __getitem__(self, index: Any) -> lazy.TensorDict:
        """Return the batch of rows with the ids `index` [B]; for a single id, its row."""
        if isinstance(index, int | np.integer) and not isinstance(index, bool):
            return self[np.array([index])][0]
        import_tensordict()
        with self._lock:
            ids = convert_row_ids(index, self.device).clone()
            is_absent = (ids < self._ring.oldest_row) | (ids >= self._ring.head)
            if is_absent.any():
                expected = f"stored rows ({self._ring.oldest_row} to {self._ring.head - 1})"
                raise IndexError(explain("index", expected, int(ids[is_absent][0]), "Sample again."))
            return self._read_batch(ids, None, None)

    _loop_over = "Loop over epochs(batch_size), or draw batches with sample(batch_size)."

    def _find_oldest_row(self, where: str, recent: int | None) -> int:
        """Return the oldest stored row, or the oldest of the newest `recent` rounds; raise if there are no rows."""
        start = 0 if recent is None else self._starts[-min(check_positive_int("recent", recent), len(self._starts))]
        start = max(start, self._ring.oldest_row)
        if start == self._ring.head:
            rows = "at least 1 stored row" if recent is None else f"at least 1 row in the newest {recent} rounds"
            raise NotReadyError(explain(where, rows, 0, "Add rows first."))
        return start

    def _choose_windows(self, recent: Recent) -> list[tuple[int, float]]:
        """Return pairs (first row, share of the batch) of the windows to draw from; a window ends at the newest row."""
        if not isinstance(recent, Mapping):
            return [(self._find_oldest_row("sample", recent), 1.0)]
        windows = [
            (self._find_oldest_row("sample", check_positive_int("recent", rounds)), check_fraction("recent", share))
            for rounds, share in recent.items()
        ]
        remaining_share = 1.0 - sum(share for _, share in windows)
        if remaining_share < -1e-9:
            raise SchemaError(
                explain("recent", "shares that add up to at most 1", 1.0 - remaining_share, "Lower them.")
            )
        return [*windows, (self._find_oldest_row("sample", None), remaining_share)]

    def _draw_rows(self, windows: list[tuple[int, float]], count: int) -> torch.Tensor:
        """Draw random rows [count] from the windows."""
        oldest = torch.tensor([row for row, _ in windows], device=self.device)
        if len(windows) > 1:
            edges = torch.tensor([share for _, share in windows], dtype=torch.float64, device=self.device).cumsum(0)
            oldest = oldest[torch.bucketize(self._random.uniform(count, self.device), edges[:-1], right=True)]
        return oldest + self._random.integers_below(self._ring.head - oldest, count)

    def _check_out_tensors(self, out: lazy.TensorDict | None, count: int) -> list[torch.Tensor] | None:
        """Return the checked tensors of `out`, for a batch of `count` rows; None without `out`."""
        if out is None:
            return None
        layouts = [*(((count, *c.shape[1:]), c.dtype) for c in self._columns), *[((count,), torch.int64)] * 2]
        own_ranges = map(memory_range, self._columns)
        return check_targets(out, dict(zip(self._paths, layouts, strict=True)), self.device, own_ranges)

    def _read_batch(
        self, rows: torch.Tensor, targets: list[torch.Tensor] | None, out: lazy.TensorDict | None
    ) -> lazy.TensorDict:
        """Read the batch of these rows into new tensors, or into the tensors `targets` of `out`."""
        slots, rounds = self._ring.slots(rows), torch.bucketize(rows, self._device_starts, right=True) - 1
        if targets is None or out is None:
            return self._build([*self._reader.take(slots, 0, len(slots)), rows, rounds], rows.shape)
        self._reader.take_into(slots, 0, len(slots), targets[:-2])
        targets[-2].copy_(rows)
        targets[-1].copy_(rounds)
        return out

    def check(self) -> None:
        """Verify every invariant; raise an InvariantError for the first violation. Nothing is changed."""
        with self._lock:
            ring, schema, round_starts = self._ring, self._schema, self._starts
            columns, fields = self._columns, schema.fields
            verify(ring.capacity == self.capacity, "capacity", self.capacity, ring.capacity)
            verify(0 <= ring.floor <= ring.head, "rows", f"a first row of 0 to {ring.head}", ring.floor)
            got = f"0 columns for {ring.head} rows"
            verify(columns or not ring.head, "fields", "columns before the first row", got)
            verify(len(columns) in (0, len(fields)), "fields", f"{len(fields)} columns", len(columns))
            for path, field, column in zip(schema.paths, fields, columns, strict=False):
                verify_layout(path_name(path), column, (self.capacity, *field.shape), field.dtype, self.device)
            is_sorted = all(start <= stop for start, stop in pairwise([0, *round_starts, ring.head]))
            expected = f"first rows from 0 to {ring.head}, in order"
            verify(round_starts and round_starts[0] == 0 and is_sorted, "rounds", expected, round_starts)
            device_starts = self._device_starts
            verify_layout("rounds", device_starts, (len(round_starts),), torch.int64, self.device)
            # Tensors on the meta device have no values, so only their layout is checked.
            if self.device.type != "meta":
                is_equal = device_starts == torch.tensor(round_starts, device=self.device)
                verify_elements(is_equal, "rounds", "equal first rows on the device", device_starts)
            self._random.check()

    def __len__(self) -> int:
        """Number of stored rows."""
        with self._lock:
            return len(self._ring)

    @property
    def is_full(self) -> bool:
        """Whether the next row overwrites the oldest."""
        return len(self) == self.capacity

    @property
    def nbytes(self) -> int:
        """Bytes of the rows; 0 before the fields are known."""
        return sum(column.nbytes for column in self._columns)

    def __repr__(self) -> str:
        return (
            f"DistillationBuffer({len(self)} of {self.capacity} rows, round={self.round}, "
            f"fields=({', '.join(self._schema.names)}), device={str(self.device)!r})"
        )


def _infer_declaration(where: str, value: Any, leading_shape: tuple[int, ...], device: torch.device) -> Tree:
    """Return a declaration that fits a value. A tuple of numbers is an array; any other tuple is nested."""
    if isinstance(value, tuple) and not all(isinstance(part, Real) for part in value):
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        return {
            str(key): _infer_declaration(f"{where}.{key}", part, leading_shape, device) for key, part in value.items()
        }
    if value is None:
        # The returned field does not matter, because the conversion of None raises an error later.
        return Field()
    tensor = as_tensor(where, value, device)
    return Field(tensor.shape[len(leading_shape) :], narrow_dtype(tensor.dtype))


def _read_transitions(source: ReplayBuffer | RolloutBuffer, batch_size: int) -> Iterator[lazy.TensorDict]:
    """Return the transitions of another buffer in batches, oldest first."""
    if isinstance(source, ReplayBuffer):
        return (source[ids] for ids in source.ids().split(batch_size))
    if isinstance(source, RolloutBuffer):
        return source.minibatches(batch_size, shuffle=False)
    raise SchemaError(explain("fill", "a ReplayBuffer or a RolloutBuffer", type(source).__name__, "Add rows with add."))
