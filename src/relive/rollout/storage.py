"""Rows of a rollout: a tensor per leaf; staged, optional and attached fields; and flags of episodes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from gymnasium.vector import AutoresetMode

from relive import lazy
from relive.checkpoint.snapshot import State
from relive.errors import InvariantError, NotReadyError, SchemaError, explain, verify
from relive.kernels import complete
from relive.kernels.sequences import find_reset_rows
from relive.kernels.steps import StepFlattener, make_row_writer
from relive.schema.assembly import assemble_batch
from relive.schema.checks import check_nonempty
from relive.schema.conversion import convert, make_misaligned_error, normalize_bools, path_name
from relive.schema.fields import OPTIONAL_ROLLOUT_FIELDS, Path, Schema, parse_path
from relive.schema.invariants import overflow_warnings, verify_addresses, verify_elements, verify_flags, verify_layout
from relive.statistics.counting import lock
from relive.statistics.observers import Observers
from relive.storage import Memory
from relive.storage.codec import SnapshotReader


class FinalRows(NamedTuple):
    """Final observations: (step, environment) of K truncated steps, and observation leaves [K, …]."""

    positions: list[tuple[int, int]]
    leaves: list[torch.Tensor]


class Storage:
    """Tensors `[rows, num_envs, …]` on one device, one for each leaf of the schema.

    A step is one row, written whole or not at all. The row after the last step holds the last observation and value.
    With `num_envs=None` the tensors have an environment axis of length 1 that callers never see.
    """

    def __init__(self, schema: Schema, rows: int, num_envs: int | None, memory: Memory) -> None:
        self.schema, self.num_envs = schema, num_envs or 1
        self.leading_shape = () if num_envs is None else (num_envs,)
        """Leading shape of the values of one step."""
        self._num_rows = rows
        layouts = [((rows, self.num_envs, *field.shape), field.dtype) for field in schema.fields]
        memory.require_free_bytes(sum(math.prod(shape) * dtype.itemsize for shape, dtype in layouts), "num_steps")
        allocator = memory.open_own_memory("RolloutBuffer")
        self.tensors = tuple(allocator.allocate("column", *layout) for layout in layouts)
        self.device = self.tensors[0].device
        self.has_values = self.device.type != "meta"
        self.overflowed = torch.zeros((), dtype=torch.int64, device=self.device)
        """Number of finite values that became infinite in their field; counted on devices other than the host."""
        self._flatten = StepFlattener(schema, schema.names[:7], schema.names[7:])
        self._is_plain = schema.is_flat and len(schema.names) == 7
        """Whether no field is nested and there are no extra fields."""
        self._is_optional = tuple(path[0] in OPTIONAL_ROLLOUT_FIELDS for path in schema.paths)
        self.lacks_optional = (False, False)
        """Whether the steps lack a value, and a log_prob."""
        self.num_stored = 0
        self.generation = 0
        """Number of calls of `clear`."""
        self.staged: set[str] = set()
        """Fields of the next step that are already written."""
        self.attached: dict[Path, torch.Tensor] = {}
        """Attached tensors [rows, N, …] by path; an attached optional field is its stored tensor."""
        self.finals: list[FinalRows] = []
        """Final observations of each step that has at least one; after a load they are one entry."""
        self.is_exposed = False
        """Whether callers have tensors that share this memory."""
        self._bind_writer()

    def _bind_writer(self) -> None:
        self._writer = make_row_writer(self.tensors, self._is_optional, has_env_axis=bool(self.leading_shape))
        self._addresses = [tensor.data_ptr() for tensor in self.tensors]

    def write_step(self, row: int, values: tuple[Any, ...], extra: dict[str, Any]) -> None:
        """Write the fields of a step that are not staged: `values` of the first seven fields, and `extra` by name."""
        lacks_optional, leaf_indices = (values[5] is None, values[6] is None), None
        # This fast branch handles every step except the first one and steps after `stage`.
        if lacks_optional == self.lacks_optional and not self.staged:
            leaves = values if self._is_plain and not extra else self._flatten(values, extra)
        else:
            lacks_optional = (
                lacks_optional[0] and "value" not in self.staged,
                lacks_optional[1] and "log_prob" not in self.staged,
            )
            for name, lacks, lacked in zip(OPTIONAL_ROLLOUT_FIELDS, lacks_optional, self.lacks_optional, strict=True):
                if row and lacks is not lacked:
                    raise _optional_field_error(name, was_present=not lacked)
            fields = self._flatten.flatten_by_field(values, extra, self.staged)
            leaves = tuple(itertools.chain.from_iterable(fields.values()))
            leaf_indices = tuple(i for name in fields for i in self.schema.leaf_indices[name])
        if row != self.num_stored:
            raise _reentry_error()
        self.write_row(row, leaves, leaf_indices)
        self.lacks_optional = lacks_optional

    @property
    def omitted_fields(self) -> frozenset[str]:
        """Optional fields that the steps do not have."""
        return frozenset(itertools.compress(OPTIONAL_ROLLOUT_FIELDS, self.lacks_optional))

    def stage(self, fields: Mapping[str, Any]) -> None:
        leaves: list[Any] = []
        leaf_indices: list[int] = []
        for name in fields:
            if self.num_stored and name in self.omitted_fields:
                raise _optional_field_error(name, was_present=False)
        for name, value in fields.items():
            self.schema.check_declared(name)
            if name in self.staged:
                raise SchemaError(explain(name, "one value per step", "a second value", "Stage it once per step."))
            if value is None:
                raise SchemaError(explain(name, "a value", None, "Leave it out of stage."))
            leaves.extend(self.schema.flatten(name, value))
            leaf_indices.extend(self.schema.leaf_indices[name])
        self.write_row(self.num_stored, tuple(leaves), tuple(leaf_indices))
        self.staged.update(fields)

    def write_row(self, row: int, leaves: tuple[Any, ...], leaf_indices: tuple[int, ...] | None = None) -> None:
        """Write one row of all tensors, or of the tensors `leaf_indices`; after an error the row is unchanged."""
        if self.is_exposed and self._writer.have_moved():
            self._bind_writer()
        if self._writer.write(row, leaves, leaf_indices) >= 0:
            self._convert_and_write(row, leaves, leaf_indices)

    def _convert_and_write(self, row: int, leaves: tuple[Any, ...], leaf_indices: tuple[int, ...] | None) -> None:
        """Convert and write leaves that the writer rejected; raise if the conversion called `add` or `stage`."""
        paths, fields = self.schema.paths, self.schema.fields
        indices = range(len(self.tensors)) if leaf_indices is None else leaf_indices
        before = self.clear_and_step_counts, len(self.staged)
        converted_leaves = tuple(
            None
            if leaf is None and self._is_optional[i]
            else convert(
                path_name(paths[i]), fields[i], leaf, self.leading_shape, self.device, overflowed=self.overflowed
            )
            for i, leaf in zip(indices, leaves, strict=True)
        )
        if before != (self.clear_and_step_counts, len(self.staged)):
            raise _reentry_error()
        bad_position = self._writer.write_converted(row, converted_leaves, leaf_indices)
        if bad_position >= 0:
            raise make_misaligned_error(path_name(paths[indices[bad_position]]))

    def commit_row(self, row: int, finals: list[FinalRows] | None = None) -> None:
        """Make the written row a stored step; `finals`, unless None, replaces the final observations of all steps."""
        if finals is not None or self.staged or self.attached:
            staged: set[str] = set()
            finals = self.finals if finals is None else finals
            # All attributes are set by one statement without a call, which a signal cannot interrupt.
            self.staged, self.attached, self.finals, self.num_stored = staged, {}, finals, row + 1
            return
        self.num_stored = row + 1

    def take_back(self, num_steps: int) -> None:
        """Make the first `num_steps` rows, which a collector has written with every field, the stored steps."""
        self.clear()
        self.lacks_optional, self.num_stored = (False, False), num_steps

    @property
    def final_positions(self) -> list[tuple[int, int]]:
        """Step and environment of each final observation."""
        return [position for finals in self.finals for position in finals.positions]

    def flag(self, name: str) -> torch.Tensor:
        """Return the tensor [rows, N] of the field "terminated" or "truncated"."""
        return self.tensors[self.schema.leaf_indices[name][0]]

    def copy_row(self, name: str, row: int) -> list[torch.Tensor]:
        """Return copies of a field's leaves in one row, in the shapes that callers pass."""
        fields, leading_shape = self.schema.fields, self.leading_shape
        return [
            self.tensors[i][row].reshape((*leading_shape, *fields[i].shape)).clone()
            for i in self.schema.leaf_indices[name]
        ]

    def clean_bools(self) -> None:
        """Set every byte of the bool tensors to 0 or 1, after a collector wrote into them."""
        for tensor in self.tensors:
            tensor.copy_(normalize_bools(tensor))

    def zero_row(self, row: int) -> None:
        """Zero one row of all tensors."""
        torch._foreach_zero_([tensor[row] for tensor in self.tensors])

    def clear(self) -> None:
        """Remove the steps, their final observations, staged fields and attached leaves."""
        self.generation += 1
        self.num_stored = 0
        self.finals = []
        self.staged.clear()
        self.attached.clear()

    @property
    def clear_and_step_counts(self) -> tuple[int, int]:
        """Number of calls of `clear`, and number of stored steps; the pair changes when a step is stored or removed."""
        return self.generation, self.num_stored

    def require_steps(self, where: str) -> int:
        """Return the number of stored steps; raise a NotReadyError if it is 0."""
        return check_nonempty(where, self.num_stored)

    def require_complete_steps(self, where: str) -> int:
        """Return the number of stored steps; raise a NotReadyError if it is 0, or if a step is only staged."""
        if self.staged:
            got = f"a step with staged {', '.join(sorted(self.staged))}"
            raise NotReadyError(explain(where, "complete steps", got, "Complete the staged step with add first."))
        return self.require_steps(where)

    @property
    def absent_fields(self) -> frozenset[str]:
        """Optional fields that are neither part of the steps nor attached."""
        return self.omitted_fields.difference(path[0] for path in self.attached)

    def declared_leaves(self) -> dict[Path, torch.Tensor]:
        """Return every declared leaf [rows, N, …]."""
        return dict(zip(self.schema.paths, self.tensors, strict=True))

    def present_leaves(self) -> dict[Path, torch.Tensor]:
        """Return the leaves [rows, N, …] that are part of the steps or attached."""
        absent_fields = self.absent_fields
        return {path: x for path, x in self.declared_leaves().items() if path[0] not in absent_fields} | self.attached

    def select_leaves(
        self, leaves: dict[Path, torch.Tensor], fields: Iterable[str | Path] | None
    ) -> dict[Path, torch.Tensor]:
        """Return the leaves of `fields`, names or paths; return all leaves if it is None."""
        if fields is None:
            return leaves
        paths = [(field,) if isinstance(field, str) else tuple(field) for field in fields]
        for path in paths:
            if not any(leaf_path[: len(path)] == path for leaf_path in leaves):
                names = ", ".join(sorted({leaf_path[0] for leaf_path in leaves}))
                remedy = "Name only stored fields."
                is_absent = not any(leaf_path[0] == path[0] for leaf_path in leaves)
                message = self.explain_absence(path[0]) if is_absent else None
                raise SchemaError(message or explain("fields", f"stored fields ({names})", ".".join(path), remedy))
        return {
            path: leaf
            for path, leaf in leaves.items()
            if any(path[:depth] in paths for depth in range(1, len(path) + 1))
        }

    def explain_absence(self, name: str) -> str | None:
        """Return the error message for an optional or computed field that is absent; None for other names."""
        if name in self.absent_fields:
            remedy = f"Pass {name}= to every add, or attach({name}=…) afterwards."
            return explain(name, "a field that the steps gave", "none", remedy)
        if name in ("advantage", "return"):
            remedy = "Call compute_advantage(last_value) first; clear() and another step remove its result."
            return explain(name, "a rollout whose advantages are computed", "none", remedy)
        return None

    def make_clear_check(self) -> Callable[[], None]:
        """Return a function that raises a NotReadyError if `clear` was called after this call."""
        generation = self.generation

        def check() -> None:
            if self.generation != generation:
                got, remedy = "a cleared one", "Finish the epochs before clear()."
                raise NotReadyError(explain("batch", "the rollout that the epochs began with", got, remedy))

        return check

    def view_time_major(self, steps: int, leaves: Mapping[Path, torch.Tensor]) -> lazy.TensorDict:
        """Return the first `steps` rows of leaves as a TensorDict `[T, N]` that shares their memory."""
        self.is_exposed = True
        first = {path: leaf[:steps] if self.leading_shape else leaf[:steps].squeeze(1) for path, leaf in leaves.items()}
        return assemble_batch(first, torch.Size((steps, *self.leading_shape)))

    def view_env_major(self, steps: int, leaves: Mapping[Path, torch.Tensor]) -> lazy.TensorDict:
        """Return the first `steps` + 1 rows of leaves as a TensorDict `[N, T + 1]` that shares their memory."""
        self.is_exposed = True
        transposed_leaves = {path: leaf[: steps + 1].transpose(0, 1) for path, leaf in leaves.items()}
        return assemble_batch(transposed_leaves, torch.Size((self.num_envs, steps + 1)))

    @property
    def nbytes(self) -> int:
        """Bytes of the declared and attached leaves."""
        return sum(leaf.nbytes for leaf in (self.declared_leaves() | self.attached).values())

    def attach(self, leaves: Mapping[Path, torch.Tensor]) -> None:
        """Attach leaves [T, N, …] to the stored steps; they replace attached leaves of the same fields."""
        names = {path[0] for path in leaves}
        for path in [path for path in self.attached if path[0] in names]:
            del self.attached[path]
        steps, declared_leaves = self.num_stored, self.declared_leaves()
        for path, tensor in leaves.items():
            if path in declared_leaves:
                # `tensor` may overlap the leaf that is written, so it is copied first.
                declared_leaves[path][:steps] = tensor.clone()
                self.attached[path] = declared_leaves[path]
                continue
            padding = tensor.new_zeros((self._num_rows - steps, *tensor.shape[1:]))
            self.attached[path] = torch.cat([tensor, padding])

    def leaves_by_file_name(self) -> dict[str, torch.Tensor]:
        """Return the declared leaves by their names in files."""
        return {f"column{i}": tensor for i, tensor in enumerate(self.tensors)}

    def state(self) -> State:
        """Return every row, and the names of staged and attached fields."""
        num_steps, declared_paths = self.num_stored, set(self.schema.paths)
        attached = {
            f"attached{i}": leaf for i, (path, leaf) in enumerate(self.attached.items()) if path not in declared_paths
        }
        present_fields = [name for name in OPTIONAL_ROLLOUT_FIELDS if num_steps and name not in self.omitted_fields]
        values = {
            "num_stored": num_steps,
            "valued": num_steps if "value" in present_fields else 0,
            "given": present_fields,
            "staged": sorted(self.staged),
            "attached": [list(path) for path in self.attached],
        }
        return State(values, self.leaves_by_file_name() | attached)

    def load_state(self, saved: SnapshotReader) -> None:
        """Restore a saved state."""
        node, declared_leaves = saved.values, self.declared_leaves()
        num_steps = node.entry("num_stored").integer(0, self._num_rows - 1)
        saved.copy_arrays_into(self.leaves_by_file_name())
        self.clear()
        self.num_stored = num_steps
        self.lacks_optional = self._read_lacks_optional(saved, num_steps)
        for name in node.entry("staged").items():
            if name.text() not in self.schema.leaf_indices:
                raise name.error("a declared field")
            self.staged.add(name.value)
        for i, entry in enumerate(node.entry("attached").items()):
            path = parse_path(entry)
            if path[0] in self.schema.names and path[0] not in self.omitted_fields:
                raise entry.error("a name of its own")
            # An attached optional field is stored in its declared leaf; every other attached path has a saved array.
            if path not in declared_leaves:
                saved.require_array(f"attached{i}", (self._num_rows, self.num_envs), only_leading=True)
                declared_leaves[path] = saved.read_verified(f"attached{i}").to(self.device)
            self.attached[path] = declared_leaves[path]

    def _read_lacks_optional(self, saved: SnapshotReader, num_stored: int) -> tuple[bool, bool]:
        node = saved.values
        if "given" in node.entries():
            entries = node.entry("given").items(len(OPTIONAL_ROLLOUT_FIELDS))
            names = {name.one_of(OPTIONAL_ROLLOUT_FIELDS) for name in entries}
            return "value" not in names, "log_prob" not in names
        # Checkpoints without the entry "given" have the number of steps with a value, and zeros for a missing log_prob.
        leaves = (self.tensors[i][:num_stored] for i in self.schema.leaf_indices["log_prob"])
        has_log_prob = any(bool((leaf != 0).any()) for leaf in leaves)
        return node.entry("valued").integer(0, num_stored) != num_stored, not has_log_prob

    def check(self) -> None:
        """Verify the shape and dtype of every tensor, and that staged and attached fields fit the stored steps."""
        schema, steps = self.schema, self.num_stored
        for path, field, tensor in zip(schema.paths, schema.fields, self.tensors, strict=True):
            shape = (self._num_rows, self.num_envs, *field.shape)
            verify_layout(path_name(path), tensor, shape, field.dtype, self.device)
        # Addresses of exposed memory are not checked: its tensors may move, and the next `write_row` then uses the new
        # ones.
        if not self.is_exposed:
            verify_addresses(schema.paths, self.tensors, self._addresses)
        max_steps = self._num_rows - 1
        verify(0 <= steps <= max_steps, "num_stored", f"0 to {max_steps} steps", steps)
        staged, omitted = sorted(self.staged), sorted(self.omitted_fields)
        verify(not steps or not self.staged & self.omitted_fields, "staged fields", f"none of {omitted}", staged)
        names = schema.names
        verify(self.staged <= set(names), "staged fields", f"declared fields ({', '.join(names)})", staged)
        verify(not staged or steps < max_steps, "staged fields", "no staged fields in a full rollout", staged)
        self._check_attached_leaves()
        for message in overflow_warnings(self.overflowed):
            raise InvariantError(message)

    def _check_attached_leaves(self) -> None:
        """Verify that attached tensors have the rollout's rows, and zeros after the stored steps."""
        steps, declared_leaves = self.num_stored, self.declared_leaves()
        for path, leaf in self.attached.items():
            is_present = path[0] in self.schema.names and path[0] not in self.omitted_fields
            verify(not is_present, path_name(path), "a name that no field has", "the name of a field")
            if path in declared_leaves:
                verify(leaf is declared_leaves[path], path_name(path), "the memory of the field", "other memory")
                continue
            shape = (self._num_rows, self.num_envs, *leaf.shape[2:])
            verify_layout(path_name(path), leaf, shape, leaf.dtype, self.device)
            if self.has_values:
                verify_elements(leaf[steps:] == 0, path_name(path), f"zeros after step {steps - 1}", leaf[steps:])


def _optional_field_error(name: str, *, was_present: bool) -> SchemaError:
    expected, got = ("one, as at the first step", "none") if was_present else ("none, as at the first step", "one")
    return SchemaError(explain(name, expected, got, f"Pass {name}= to every step of a rollout, or to none."))


def _reentry_error() -> SchemaError:
    remedy = "Convert the arguments before add: reading one of them changed the rollout."
    return SchemaError(explain("add", "a rollout that stays as it is meanwhile", "another step in it", remedy))


class EpisodeFlags:
    """Masks of the rows of a rollout that end or start an episode or are dummy steps.

    Also passes new rows to the `Observers`, which update statistics and norms.

    Under NEXT_STEP the row after an end is a dummy step: it holds the final observation and is no transition.
    """

    def __init__(self, storage: Storage, autoreset: AutoresetMode | None, observers: Observers) -> None:
        self._storage, self._observers = storage, observers
        self.terminated, self.truncated = storage.flag("terminated"), storage.flag("truncated")
        self.is_observed = bool(observers.observed_leaves)
        self.has_reset_rows = autoreset is AutoresetMode.NEXT_STEP
        """Whether the autoreset mode is NEXT_STEP."""
        self.first_resets = torch.zeros(storage.num_envs, dtype=torch.bool, device=storage.device)
        """Environments whose first row of the rollout is a dummy step [N]."""
        self.first_starts = torch.ones_like(self.first_resets)
        """Environments whose first transition of the rollout starts an episode [N]."""
        self._observed_columns: dict[tuple[bool, bool], tuple[torch.Tensor | None, ...]] = {}
        """Tensors that observers count, by whether the steps lack a value, and a log_prob."""
        self._next_resets = self.first_resets.clone().unsqueeze(0)
        """Environments whose next row is a dummy step [1, N]; kept up to date only for observers."""

    def next_row_masks(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the masks [N] of environments whose next row starts an episode, and whose next row is a dummy step."""
        steps = self._storage.num_stored
        if not steps:
            return self.first_starts.clone(), self.first_resets.clone()
        if not self.has_reset_rows:
            return self.end_mask(steps - 1), self.first_resets.clone()
        resets = self.reset_mask(steps + 1)
        return resets[-2].clone(), resets[-1].clone()

    def begin_rollout(self, first_starts: torch.Tensor, first_resets: torch.Tensor) -> None:
        """Begin a rollout with masks [N] of environments whose first row starts an episode, or is a dummy step."""
        self.first_starts.copy_(first_starts)
        self.first_resets.copy_(first_resets)
        self._next_resets = first_resets.clone().unsqueeze(0)

    def end_mask(self, rows: int | slice) -> torch.Tensor:
        """Return the mask of rows that are terminated or truncated."""
        return self.terminated[rows] | self.truncated[rows]

    def reset_mask(self, num_steps: int) -> torch.Tensor:
        """Return the mask of dummy steps among the first rows [T, N], under NEXT_STEP."""
        return find_reset_rows(self.first_resets, self.end_mask(slice(0, num_steps - 1)))

    def start_mask(self, num_steps: int) -> torch.Tensor:
        """Return the mask of the first rows [T, N] that start an episode; undefined at dummy steps."""
        next_starts = self.reset_mask(num_steps)[:-1] if self.has_reset_rows else self.end_mask(slice(0, num_steps - 1))
        return torch.cat([self.first_starts.unsqueeze(0), next_starts])

    def transition_mask(self, num_steps: int) -> torch.Tensor | None:
        """Return the mask of transitions among the first rows [T, N]; None if all rows are transitions."""
        return ~self.reset_mask(num_steps) if self.has_reset_rows and num_steps else None

    def full_transition_mask(self, num_steps: int) -> torch.Tensor:
        """Return the mask of transitions among the first rows [T, N]; all True if all rows are transitions."""
        mask = self.transition_mask(num_steps)
        return torch.ones_like(self.terminated[:num_steps]) if mask is None else mask

    def transition_rows(self) -> torch.Tensor | int:
        """Return the flat rows t·N + n of the stored transitions; or the number of rows, if all are transitions."""
        steps = self._storage.num_stored
        mask = self.transition_mask(steps)
        return steps * self._storage.num_envs if mask is None else mask.flatten().nonzero().squeeze(1)

    def count_rows(
        self, first_row: int, num_rows: int, lacks_optional: tuple[bool, bool], measurements: Mapping[str, Any],
        commit: Callable[[], None],
    ) -> None:  # fmt: skip
        """Count `num_rows` rows from `first_row` on in the observers, and call `commit`, which makes them stored steps.

        An exception before `commit` leaves everything unchanged. `commit` may be called twice and must be idempotent.
        """
        observers = self._observers
        if num_rows < 1 or not observers.observed_leaves:
            complete(commit)
            return
        if lacks_optional not in self._observed_columns:
            self._observed_columns[lacks_optional] = self._select_columns(lacks_optional)
        columns = self._observed_columns[lacks_optional]
        first_resets = self._next_resets if self.has_reset_rows else None
        if observers.native is not None:
            observers.set_measurements(measurements)
            observers.native.count(columns, first_row, num_rows, None, first_resets, commit)
            return
        block = {i: column[first_row : first_row + num_rows] for i, column in enumerate(columns) if column is not None}
        with lock:
            resets = None if first_resets is None else first_resets[0]
            count, next_resets = observers.make_update(block, resets, measurements)

            def change() -> None:
                count()
                if next_resets is not None:
                    self._next_resets = next_resets.unsqueeze(0)
                commit()

            complete(change)

    def _select_columns(self, lacks_optional: tuple[bool, bool]) -> tuple[torch.Tensor | None, ...]:
        """Return the tensor of each leaf; None if observers do not count the leaf, or if the steps lack its field."""
        omitted = set(itertools.compress(OPTIONAL_ROLLOUT_FIELDS, lacks_optional))
        leaves = enumerate(zip(self._storage.schema.paths, self._storage.tensors, strict=True))
        columns = self._observers.observed_leaves
        return tuple(leaf if i in columns and path[0] not in omitted else None for i, (path, leaf) in leaves)

    def update_next_resets(self) -> None:
        """Update the next dummy steps after a collector wrote the rows."""
        if self.has_reset_rows:
            self._next_resets = self.reset_mask(self._storage.num_stored + 1)[-1:].clone()

    def state(self) -> State:
        """Return the masks of the first row, and the next dummy steps."""
        return State({}, {"resetting": self.first_resets, "starting": self.first_starts, "coming": self._next_resets})

    def load_state(self, saved: SnapshotReader) -> None:
        """Restore a saved state."""
        saved.copy_arrays_into({"resetting": self.first_resets, "starting": self.first_starts})
        next_resets = saved.read_like("coming", self.first_resets.unsqueeze(0))
        self._next_resets = next_resets.to(self._storage.device, copy=True)

    def check(self) -> None:
        """Verify every flag, and that the next dummy steps follow from the stored flags."""
        storage, steps = self._storage, self._storage.num_stored
        first_masks = {"resetting": self.first_resets, "starting": self.first_starts}
        for name, flags in first_masks.items():
            verify_layout(name, flags, (storage.num_envs,), torch.bool, storage.device)
        ends = {"terminated": self.terminated[:steps], "truncated": self.truncated[:steps]}
        if not storage.has_values:
            return
        for name, flags in {**ends, **first_masks}.items():
            verify_flags(name, flags)
        is_allowed = ~self.first_resets | self.has_reset_rows
        verify_elements(is_allowed, "resetting", "False unless autoreset=NEXT_STEP", self.first_resets)
        if self.is_observed and self.has_reset_rows:
            actual, expected = self._next_resets, self.reset_mask(steps + 1)[-1:]
            verify_elements(actual == expected, "next resets", "the resets that follow from the stored flags", actual)
