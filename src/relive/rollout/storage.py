"""The steps of a rollout: one tensor a leaf, fields that are staged or left out, and tensors that are attached."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from relive import lazy
from relive.checkpoint.snapshot import SnapshotReader, State
from relive.errors import InvariantError, NotReadyError, SchemaError, explain
from relive.kernels.flattening import Flattening
from relive.kernels.reader import Following, Reader, T, reader
from relive.kernels.row_writer import Which, row_writer
from relive.schema.assembly import assemble, selected_leaves
from relive.schema.conversion import clean_bools, convert, misaligned_error, path_name
from relive.schema.declarations import path_of
from relive.schema.fields import Path, Schema
from relive.schema.invariants import overflows_of, require, require_addresses, require_all, require_form
from relive.storage import Memory


class Storage:
    """Tensors `[rows, num_envs, …]`, one for each leaf of the schema, on one device.

    A step is one row, written whole or not at all. There is one row more than steps: it holds the last observation and
    value. `num_envs=None` keeps an environment axis of length one that callers never see.
    """

    def __init__(
        self, schema: Schema, rows: int, num_envs: int | None, memory: Memory, optional: tuple[str, ...] = ()
    ) -> None:
        self.schema, self.num_envs = schema, num_envs or 1
        self.lead = () if num_envs is None else (num_envs,)
        """The leading shape of what a caller passes for one row."""
        self._num_rows = rows
        kinds = [((rows, self.num_envs, *field.shape), field.dtype) for field in schema.fields]
        memory.require(sum(math.prod(shape) * dtype.itemsize for shape, dtype in kinds), "num_steps")
        allocator = memory.own("RolloutBuffer")
        self.tensors = tuple(allocator.allocate("column", *kind) for kind in kinds)
        self.device = self.tensors[0].device
        self.has_values = self.device.type != "meta"
        self.overflowed = torch.zeros((), dtype=torch.int64, device=self.device)
        """Finite numbers that became infinite in their field, counted on other devices than the host."""
        self._extra_names = schema.names[7:]
        self._flatten = Flattening(schema, schema.names[:7], self._extra_names)
        self._is_plain = schema.is_flat and not self._extra_names
        """Fields are leaves, and there are no extra ones."""
        self._optional_names = optional
        self._optional = tuple(path[0] in optional for path in schema.paths)
        self._set_given((True,) * len(optional))
        self.num_stored = 0
        self.generation = 0
        """Counts how often the steps were forgotten."""
        self.staged: set[str] = set()
        """Fields of the coming step that have been written."""
        self.attached: dict[Path, torch.Tensor] = {}
        """Tensors [rows, N, …]. An optional field that was attached is its stored tensor."""
        self._is_exposed = False
        """Somebody outside has tensors that share this memory."""
        self._bind()

    def _bind(self) -> None:
        self._writer = row_writer(self.tensors, self._optional, has_env_axis=bool(self.lead))
        self._addresses = [tensor.data_ptr() for tensor in self.tensors]

    def follow(self) -> None:
        """Find the tensors again if they have moved, as `share_memory_` moves them."""
        if self._is_exposed and self._writer.have_moved():
            self._bind()

    def write_step(self, row: int, values: tuple[Any, ...], extra: dict[str, Any]) -> None:
        """Write the fields of a step that are not staged: the seven of every rollout in order, and the extra ones."""
        before, gives = self._gives, (values[5] is not None, values[6] is not None)
        if gives == before and not self.staged:  # every step but a first one, or one that was staged
            self._write_whole(row, values, extra)
            return
        try:
            self._expect(row, (gives[0] or "value" in self.staged, gives[1] or "log_prob" in self.staged))
            if self.staged:
                self.write(row, *self._unstaged(values, extra))
            else:
                self._write_whole(row, values, extra)
        except BaseException:
            self._set_given(before)
            raise

    def _write_whole(self, row: int, values: tuple[Any, ...], extra: dict[str, Any]) -> None:
        leaves = values if self._is_plain and not extra else self._flatten(values, extra)
        if self._is_exposed:
            self.follow()
        if self._writer.write(row, leaves, None) >= 0:
            self._convert_and_write(row, leaves, None)

    def _expect(self, row: int, gives: tuple[bool, ...]) -> None:
        """Refuse a step that gives other optional fields than the first one, whose choice it is."""
        for name, now, before in zip(self._optional_names, gives, self._gives, strict=True):
            if row and now is not before:
                raise _differs(name, before)
        self._set_given(gives)

    def _set_given(self, gives: tuple[bool, ...]) -> None:
        self._gives = gives
        """Which optional fields the steps give: the first step of a rollout chooses."""
        self.missing = frozenset(itertools.compress(self._optional_names, map(operator.not_, gives)))
        """The optional fields that they do not give."""

    def _unstaged(self, values: tuple[Any, ...], extra: dict[str, Any]) -> tuple[tuple[Any, ...], Which]:
        """The leaves of a step that are not staged, and which they are."""
        schema = self.schema
        for name in extra:
            schema.require(name)
        named = zip(schema.names, (*values, *map(extra.get, self._extra_names)), strict=True)
        leaves: list[Any] = []
        which: list[int] = []
        for name, value in named:
            if name not in self.staged:
                leaves.extend(schema.flatten(name, value))
                which.extend(schema.leaf_indices[name])
            elif value is not None:
                remedy = "It is staged already: leave it out."
                raise SchemaError(explain(name, "one value per step", "a second value", remedy))
        return tuple(leaves), tuple(which)

    def stage(self, fields: Mapping[str, Any]) -> None:
        """Write some fields of the coming step."""
        leaves: tuple[Any, ...] = ()
        which: tuple[int, ...] = ()
        row = self.num_stored
        for name in fields:
            if row and name in self.missing:
                raise _differs(name, first=False)
        for name, value in fields.items():
            self.schema.require(name)
            if name in self.staged:
                raise SchemaError(explain(name, "one value per step", "a second value", "Stage it once per step."))
            if value is None:
                raise SchemaError(explain(name, "a value", None, "Leave it out of stage."))
            leaves += self.schema.flatten(name, value)
            which += self.schema.leaf_indices[name]
        self.write(row, leaves, which)
        self.staged.update(fields)

    def write(self, row: int, leaves: tuple[Any, ...], which: Which = None) -> None:
        """Copy one row of all tensors (or of the tensors `which`); an error leaves the row as it was."""
        self.follow()
        if self._writer.write(row, leaves, which) >= 0:
            self._convert_and_write(row, leaves, which)

    def _convert_and_write(self, row: int, leaves: tuple[Any, ...], which: Which) -> None:
        places = range(len(self.tensors)) if which is None else which
        before = self.age, len(self.staged)
        converted = tuple(self._converted(i, leaf) for i, leaf in zip(places, leaves, strict=True))
        if before != (self.age, len(self.staged)):
            raise _reentered()
        misfit = self._writer.put(row, converted, which)
        if misfit >= 0:
            raise misaligned_error(path_name(self.schema.paths[places[misfit]]))

    def _converted(self, i: int, leaf: Any) -> torch.Tensor | None:
        if leaf is None and self._optional[i]:
            return None
        where, field = path_name(self.schema.paths[i]), self.schema.fields[i]
        return convert(where, field, leaf, self.lead, self.device, overflowed=self.overflowed)

    def require_next(self, row: int) -> None:
        """Refuse to go on with a step whose arguments added another one when they were converted."""
        if self.num_stored != row:
            raise _reentered()

    def commit(self, row: int) -> None:
        """Make the written row a stored step."""
        if self.staged or self.attached:
            staged: set[str] = set()
            self.staged, self.attached, self.num_stored = staged, {}, row + 1  # without a call: no signal comes between
            return
        self.num_stored = row + 1

    def take_back(self, steps: int) -> None:
        """Make the first rows, whoever wrote them, the stored steps; every field counts as given."""
        self.clear()
        self._set_given((True,) * len(self._gives))
        self.num_stored = steps

    def row(self, name: str, row: int) -> list[torch.Tensor]:
        """Copies of a field's leaves in one row, as a caller passes them."""
        fields, lead = self.schema.fields, self.lead
        return [self.tensors[i][row].reshape((*lead, *fields[i].shape)).clone() for i in self.schema.leaf_indices[name]]

    def adopt(self) -> None:
        """Find what somebody else has written; whatever is in bool tensors becomes bools."""
        self.follow()
        for tensor in self.tensors:
            tensor.copy_(clean_bools(tensor))

    def zero(self, row: int) -> None:
        """Zero one row of all tensors."""
        torch._foreach_zero_([tensor[row % len(tensor)] for tensor in self.tensors])

    def clear(self) -> None:
        """Forget the steps and what belongs to them."""
        self.generation += 1
        self.num_stored = 0
        self.staged.clear()
        self.attached.clear()

    @property
    def age(self) -> tuple[int, int]:
        """Changes with every step that is stored or forgotten."""
        return self.generation, self.num_stored

    def stored(self, where: str) -> int:
        """How many steps are stored: at least one."""
        if not self.num_stored:
            raise NotReadyError(explain(where, "at least 1 stored step", 0, "Add steps first."))
        return self.num_stored

    def complete(self, where: str) -> int:
        """How many steps are stored, if no field is staged in the row after them."""
        if self.staged:
            got = f"a step with staged {', '.join(sorted(self.staged))}"
            raise NotReadyError(explain(where, "complete steps", got, "Complete the staged step with add first."))
        return self.stored(where)

    @property
    def absent(self) -> frozenset[str]:
        """The optional fields that neither the steps gave nor anybody attached."""
        return self.missing.difference(path[0] for path in self.attached)

    def named(self) -> dict[Path, torch.Tensor]:
        """Every declared leaf."""
        return dict(zip(self.schema.paths, self.tensors, strict=True))

    def leaves(self) -> dict[Path, torch.Tensor]:
        """The leaves that the steps gave, and those that are attached."""
        absent = self.absent
        given = {path: leaf for path, leaf in self.named().items() if path[0] not in absent}
        return given | self.attached

    def all_leaves(self) -> dict[Path, torch.Tensor]:
        """The same, and after them the optional fields that nobody gave."""
        absent = self.absent
        return self.leaves() | {path: leaf for path, leaf in self.named().items() if path[0] in absent}

    def selected(self, leaves: dict[Path, torch.Tensor], fields: Iterable[str | Path] | None) -> dict[Path, Any]:
        """Those of the leaves that `fields` names; all of them by default."""
        chosen = None if fields is None else [(field,) if isinstance(field, str) else tuple(field) for field in fields]
        for path in chosen or ():
            if path[0] in self.absent:
                raise SchemaError(absence_of(path[0]))
            if path[0] in COMPUTED and path not in leaves and not any(leaf[0] == path[0] for leaf in leaves):
                raise SchemaError(uncomputed(path[0]))
        return selected_leaves(leaves, chosen)

    def rows_reader(self, fields: Iterable[str | Path] | None) -> tuple[dict[Path, torch.Tensor], Following[Reader]]:
        """What `fields` names of the leaves and of "index", t·N + n; and a reader of the stored rows of it."""
        items = self.stored("minibatches") * self.num_envs
        index = torch.arange(self._num_rows * self.num_envs, device=self.device).view(self._num_rows, -1)
        leaves = self.selected({**self.leaves(), ("index",): index}, fields)
        tensors = list(leaves.values())
        return leaves, self.following(tensors, lambda: reader(tensors, 2, items))

    def following(self, tensors: list[torch.Tensor], make: Callable[[], T]) -> Following[T]:
        """A reader of some tensors that finds them again when they have moved."""
        return Following(make, tensors, lambda: self._is_exposed)

    def shared(self, steps: int, leaves: Mapping[Path, torch.Tensor]) -> lazy.TensorDict:
        """The first steps of some leaves as a TensorDict `[T, N]` of the same memory."""
        self._is_exposed = True
        first = {path: leaf[:steps] if self.lead else leaf[:steps].squeeze(1) for path, leaf in leaves.items()}
        return assemble(first, torch.Size((steps, *self.lead)))

    def env_major(self, steps: int, leaves: Mapping[Path, torch.Tensor]) -> lazy.TensorDict:
        """The first steps and the row after them as a TensorDict `[N, T + 1]` of the same memory."""
        self._is_exposed = True
        turned = {path: leaf[: steps + 1].transpose(0, 1) for path, leaf in leaves.items()}
        return assemble(turned, torch.Size((self.num_envs, steps + 1)))

    @property
    def nbytes(self) -> int:
        """The bytes of the tensors, and of what is attached."""
        return sum(t.nbytes for t in {**self.named(), **self.attached}.values())

    def attach(self, leaves: Mapping[Path, torch.Tensor]) -> None:
        """Let these [T, N, …] belong to the stored steps, in place of what was attached under their names."""
        names = {path[0] for path in leaves}
        for path in [path for path in self.attached if path[0] in names]:
            del self.attached[path]
        steps, stored = self.num_stored, self.named()
        for path, tensor in leaves.items():
            if path in stored:
                stored[path][:steps] = tensor.clone()  # it may be of the same memory
                self.attached[path] = stored[path]
                continue
            rest = tensor.new_zeros((self._num_rows - steps, *tensor.shape[1:]))
            self.attached[path] = torch.cat([tensor, rest])

    def rows(self) -> dict[str, torch.Tensor]:
        """The rows of every declared leaf, by the names that they are saved under."""
        return {f"column{i}": tensor for i, tensor in enumerate(self.tensors)}

    def state(self) -> State:
        """Every row, and what is staged or attached."""
        stored, own = self.num_stored, set(self.schema.paths)
        attached = {f"attached{i}": leaf for i, (path, leaf) in enumerate(self.attached.items()) if path not in own}
        given = [name for name in self._optional_names if stored and name not in self.missing]
        values = {
            "num_stored": stored,
            "valued": stored if "value" in given else 0,
            "given": given,
            "staged": sorted(self.staged),
            "attached": [list(path) for path in self.attached],
        }
        return State(values, self.rows() | attached)

    def load_state(self, saved: SnapshotReader) -> None:
        """Become what was saved."""
        node, own = saved.values, self.named()
        stored = node.entry("num_stored").integer(0, self._num_rows - 1)
        saved.copy_into(self.rows())
        self.clear()
        self.num_stored = stored
        given = self._given_in(saved, stored)
        self._set_given(tuple(name in given for name in self._optional_names))
        for name in node.entry("staged").items():
            if name.text() not in self.schema.leaf_indices:
                raise name.error("a declared field")
            self.staged.add(name.value)
        for i, entry in enumerate(node.entry("attached").items()):
            path = path_of(entry)
            if path[0] in self.schema.names and path[0] not in self.missing:
                raise entry.error("a name of its own")
            if path not in own:  # an optional field was read with all others
                saved.require(f"attached{i}", (self._num_rows, self.num_envs))
                own[path] = saved.tensor(f"attached{i}").to(self.device)
            self.attached[path] = own[path]

    def _given_in(self, saved: SnapshotReader, stored: int) -> set[str]:
        """Which optional fields the steps gave."""
        node = saved.values
        if "given" in node.entries():
            names = self._optional_names
            return {name.one_of(names) for name in node.entry("given").items(len(names))}
        # An older checkpoint counts the steps that had a value, and says nothing of log_prob: zeros were not given.
        leaves = (self.tensors[i][:stored] for i in self.schema.leaf_indices["log_prob"])
        found = {"log_prob"} if any(bool((leaf != 0).any()) for leaf in leaves) else set()
        return found | ({"value"} if node.entry("valued").integer(0, stored) == stored else set())

    def check(self) -> None:
        """Verify the form of every tensor, and that whatever is staged or attached belongs to the stored steps."""
        schema, steps = self.schema, self.num_stored
        for path, field, tensor in zip(schema.paths, schema.fields, self.tensors, strict=True):
            shape = (self._num_rows, self.num_envs, *field.shape)
            require_form(path_name(path), tensor, shape, field.dtype, self.device)
        if not self._is_exposed:  # then tensors may move, and are followed
            require_addresses(schema.paths, self.tensors, self._addresses)
        most = self._num_rows - 1
        require(0 <= steps <= most, "num_stored", f"0 to {most} steps", steps)
        staged, missing = sorted(self.staged), sorted(self.missing)
        require(not steps or not self.staged & self.missing, "staged fields", f"none of {missing}", staged)
        names = schema.names
        require(self.staged <= set(names), "staged fields", f"declared fields ({', '.join(names)})", staged)
        require(not staged or steps < most, "staged fields", "no staged fields in a full rollout", staged)
        self._check_attached()
        for fault in overflows_of(self.overflowed):
            raise InvariantError(fault)

    def _check_attached(self) -> None:
        """Attached tensors have the rows of the rollout, zeros after the stored ones."""
        steps, own = self.num_stored, self.named()
        for path, leaf in self.attached.items():
            is_given = path[0] in self.schema.names and path[0] not in self.missing
            require(not is_given, path_name(path), "a name that no field has", "the name of a field")
            if path in own:
                require(leaf is own[path], path_name(path), "the memory of the field", "other memory")
                continue
            shape = (self._num_rows, self.num_envs, *leaf.shape[2:])
            require_form(path_name(path), leaf, shape, leaf.dtype, self.device)
            if self.has_values:
                require_all(leaf[steps:] == 0, path_name(path), f"zeros after step {steps - 1}", leaf[steps:])


def absence_of(name: str) -> str:
    """What an error says of an optional field that is not there."""
    remedy = f"Pass {name}= to every add, or attach({name}=…) afterwards."
    return explain(name, "a field that the steps gave", "none", remedy)


COMPUTED = ("advantage", "return")
"""What `compute_advantage` attaches."""


def uncomputed(name: str) -> str:
    """What an error says of a field that `compute_advantage` has not attached yet."""
    remedy = "Call compute_advantage(last_value) first; adding another step, and clear(), forget what it attached."
    return explain(name, "a rollout whose advantages are computed", "none", remedy)


def _differs(name: str, first: bool) -> SchemaError:
    expected, got = ("one, as the first step gave", "none") if first else ("none, as at the first step", "one")
    return SchemaError(explain(name, expected, got, f"Pass {name}= to every step of a rollout, or to none."))


def _reentered() -> SchemaError:
    remedy = "Convert the arguments before add: reading one of them changed the rollout."
    return SchemaError(explain("add", "a rollout that stays as it is meanwhile", "another step in it", remedy))
