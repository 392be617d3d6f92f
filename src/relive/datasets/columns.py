"""Datasets whose rows are steps: their columns, and the fields of a buffer that columns become."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from relive.datasets.filling import STEP, FinalObs, declared_fields, extra_fields, fill, split_episodes
from relive.datasets.untrusted import damage, decode_budget, require_similar_size
from relive.errors import SchemaError, explain
from relive.replay.buffer import ReplayBuffer
from relive.schema.fields import FROM_NUMPY, Field, Path, Tree, kept_dtype, leaves_of, map_leaves
from relive.schema.vocabulary import NAME
from relive.storage.allocator import available_bytes

Columns: TypeAlias = Mapping[str, str | None]
"""The field of each column ("obs.camera", "action", "stage"); None leaves the column out."""
Encoders: TypeAlias = Mapping[str, Callable[[str], Any]]
"""A function that turns a text into numbers, for each column of texts."""

_FLAGS = ("terminated", "truncated")
_NUMBERS = ("reward", *_FLAGS)
_MOST_COLUMNS = 1 << 10
BLOCK_BYTES = 1 << 21
"""The approximate number of bytes of a file that a reader holds at once."""
_ROWS_OF_FLAGS = 1 << 16
"""Rows whose flags are read at once to count the ends of episodes."""
_COPIES = 8
"""Copies of a step that a reader holds at least: two rows, two held before them, all of these joined, and fields."""


class ColumnSpec(NamedTuple):
    """Shape and dtype of one step in a column."""

    shape: tuple[int, ...]
    dtype: np.dtype
    is_text: bool = False
    has_loose_axis: bool = False
    """Whether shape (1,) may mean a single number: writers of this format add an axis."""


class RowSource(Protocol):
    """A dataset whose rows are steps, one episode after the other."""

    name: str
    """The file, for messages."""
    nbytes: int
    """The number of bytes of the dataset on the disk."""
    separator: str = "/"
    """The text between the name of a group of columns and the names of its columns."""

    def columns(self, chosen: Columns) -> Mapping[str, ColumnSpec]:
        """The columns that can be fields; `chosen` is the caller's `columns=`."""
        ...

    def usual_path(self, column: str) -> Path | None:
        """The path of the field that a column becomes unless the caller says otherwise; None leaves it out."""
        ...

    def rows(self, columns: Sequence[str], count: int) -> Iterator[tuple[np.ndarray, Mapping[str, Any]]]:
        """Yield up to `count` rows at a time: their episodes [K], and by column numbers [K, …] or K texts."""
        ...

    def next_columns(self, obs: list[str]) -> Mapping[str, str]:
        """The column of next observations for each column of the observation; empty if the file has none."""
        return {}

    def final_obs(self, obs: list[str]) -> Callable[[int], Mapping[str, Any]] | None:
        """A function that reads an episode's final observation [1, …] by column; None if the file has none.

        Episodes are asked for in order.
        """
        return None


def fill_from_rows(
    name: str,
    source: RowSource,
    buffer: Any,
    columns: Columns | None,
    encode: Encoders | None,
    final_obs: FinalObs,
    **settings: Any,
) -> Any:
    """Read the rows of a source into a buffer; returns the buffer.

    Args:
        name: the function that the caller called, for messages.
        source: the rows.
        buffer: the buffer to fill; None makes a replay buffer with space for all rows.
        columns: the caller's `columns=`.
        encode: the caller's `encode=`.
        final_obs: the caller's `final_obs=`.
        settings: settings of the replay buffer to make.
    """
    chosen = _check_dict("columns", columns, "a field or None", lambda field: field is None or isinstance(field, str))
    encoders = _check_dict("encode", encode, "a function of a text", callable)
    plan = ColumnPlan(name, source, chosen, encoders, buffer)
    steps, ends = plan.count()
    if buffer is None:
        buffer = plan.make_buffer(steps + ends, **settings)
    read_columns = source.final_obs(plan.columns_of("obs"))
    read_final_obs = None if read_columns is None else lambda episode: plan.to_fields(read_columns(episode))["obs"]
    return fill(name, buffer, split_episodes(source.name, plan.read(), read_final_obs), steps, final_obs)


def _check_dict(argument: str, value: Any, what: str, fits: Callable[[Any], bool]) -> dict[str, Any]:
    by_column = {} if value is None else value
    if not isinstance(by_column, Mapping) or not all(isinstance(k, str) and fits(v) for k, v in by_column.items()):
        remedy = "Pass a dict whose keys are names of columns."
        raise SchemaError(explain(argument, f"{what} for each column", repr(value), remedy))
    return dict(by_column)


class ColumnPlan:
    """The columns of a source that are read, each with the path of its field.

    Args:
        name: the function that the caller called, for messages.
        source: the rows.
        chosen: the caller's `columns=`.
        encode: the caller's `encode=`.
        buffer: the buffer to fill, or None for a new one.
    """

    def __init__(self, name: str, source: RowSource, chosen: Columns, encode: Encoders, buffer: Any) -> None:
        self._source, self._encode = source, encode
        self._columns = dict(source.columns(chosen))
        self._encoded: dict[str, dict[str, np.ndarray]] = {column: {} for column in self._encode}
        if len(self._columns) > _MOST_COLUMNS:
            raise self._error("", f"at most {_MOST_COLUMNS} columns", len(self._columns), "Split the file.")
        self._require_columns("columns", chosen)
        self._require_columns("encode", encode)
        declared = None if buffer is None else extra_fields(name, buffer)
        self.paths: dict[str, Path] = {}
        """The path of the field that each column becomes."""
        for column, spec in self._columns.items():
            path = self._path(column, chosen, declared or {})
            if path is not None:
                if spec.has_loose_axis and path[0] in _NUMBERS and not _declares_vector(buffer, path):
                    self._columns[column] = spec._replace(shape=())
                self._require_field(column, path)
                self.paths[column] = path
        of_obs = self.columns_of("obs")
        if len(of_obs) == 1 and declared is not None and isinstance(declared_fields(buffer)["obs"], Field):
            self.paths[of_obs[0]] = ("obs",)
        self._require_tree()
        self._require_memory()
        if declared is not None:
            self._require_declared(declared)

    def columns_of(self, *fields: str) -> list[str]:
        """The columns that become these fields, or parts of them."""
        return [column for column, path in self.paths.items() if path[0] in fields]

    def count(self) -> tuple[int, int]:
        """The number of steps, and of steps that end an episode."""
        steps, ends, last, was_end = 0, 0, None, True
        for episode, flags in self._source.rows(self.columns_of(*_FLAGS), _ROWS_OF_FLAGS):
            is_end = np.zeros(len(episode), bool)
            for _, flag in leaves_of((), self.to_fields(flags)):
                is_end |= flag
            # An episode ends where its number changes, or where a flag says so; both together are one end.
            changes = np.diff(episode, prepend=episode[0] if last is None else last) != 0
            before = np.concatenate([[was_end], is_end[:-1]])
            ends += int(is_end.sum()) + int((changes & ~before).sum())
            steps, last, was_end = steps + len(episode), episode[-1], bool(is_end[-1])
        if not steps:
            raise damage(self._source.name, "at least 1 step", 0)
        return steps, ends + (not was_end)

    def read(self) -> Iterator[tuple[np.ndarray, dict[str, Any]]]:
        """Yield the episodes [K] and the fields [K, …] of consecutive rows, which take about `BLOCK_BYTES`."""
        nexts = self._source.next_columns(self.columns_of("obs"))
        count = max(2, BLOCK_BYTES // max(1, sum(map(self._row_bytes, self.paths))))
        for episode, values in self._source.rows([*self.paths, *nexts.values()], count):
            fields = self.to_fields({column: values[column] for column in self.paths})
            if nexts:
                following = self.to_fields({column: values[following] for column, following in nexts.items()})
                fields["next_obs"] = following["obs"]
            yield episode, fields

    def _row_bytes(self, column: str) -> int:
        spec = self._columns[column]
        return math.prod(spec.shape) * spec.dtype.itemsize

    def _require_memory(self) -> None:
        nbytes = self._source.nbytes
        free, most = available_bytes() or 1 << 62, decode_budget(nbytes)
        largest = max(self.paths, key=self._row_bytes)
        needed = _COPIES * sum(map(self._row_bytes, self.paths))
        if needed > min(free, most):
            limit = f"{most:,} bytes for a file of {nbytes:,}" if most < free else f"{free:,} bytes, the free memory"
            where = f"{self._source.name}: {largest}"
            raise damage(where, f"steps that fit into {limit}, {_COPIES} times", f"{needed:,} bytes")

    def to_fields(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Values [K, …] by column as nested dicts of fields."""
        fields: dict[str, Any] = {}
        for column, values in columns.items():
            numbers = self._numbers(column, values) if column in self._encode else values
            path = self.paths[column]
            if self._columns[column].has_loose_axis:
                numbers = numbers.reshape(len(numbers), *self._columns[column].shape)
            _put(fields, path, self._flags(column, numbers) if path[0] in _FLAGS else numbers)
        return fields

    def make_buffer(self, capacity: int, **settings: Any) -> ReplayBuffer:
        """Make a replay buffer with the fields of the file; raises if it would be much larger than the file."""
        trees: dict[str, Any] = {}
        for column, path in self.paths.items():
            _put(trees, path, self._field(column))
        leaves = [leaf for name, tree in trees.items() for _, leaf in leaves_of((name,), tree)]
        row = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
        require_similar_size(self._source.name, capacity, row, self._source.nbytes)
        extra = {name: tree for name, tree in trees.items() if name not in STEP}
        reward = map_leaves(_real, trees.get("reward", Field()))
        return ReplayBuffer(capacity, trees["obs"], trees["action"], reward=reward, extra=extra or None, **settings)

    def _field(self, column: str) -> Field:
        shape, dtype, *_ = self._columns[column]
        if column in self._encode:
            _, values = next(self._source.rows([column], 1))
            first = self._numbers(column, values[column])
            shape, dtype = first.shape[1:], first.dtype
        return Field(shape, kept_dtype(FROM_NUMPY[dtype.newbyteorder("=")]))

    def _numbers(self, column: str, texts: Any) -> np.ndarray:
        expected, remedy = "numbers of one shape from encode=", "Return an array of a fixed shape."
        encoded = self._encoded[column]
        for text in texts:
            if text not in encoded:
                numbers = self._encode[column](text)
                try:
                    encoded[text] = np.asarray(numbers)
                except (ValueError, TypeError, RuntimeError) as error:  # lists of several lengths, a tensor elsewhere
                    raise self._error(column, expected, repr(numbers), remedy) from error
        rows = [encoded[text] for text in texts]
        dtypes, shapes = {row.dtype for row in rows}, {row.shape for row in rows}
        if len(shapes) > 1 or any(dtype.kind not in "biuf" or dtype not in FROM_NUMPY for dtype in dtypes):
            got = f"{', '.join(sorted(map(str, dtypes)))} of shapes {sorted(shapes)}"
            raise self._error(column, expected, got, remedy)
        return np.stack(rows)

    def _flags(self, column: str, values: np.ndarray) -> np.ndarray:
        if values.dtype != np.bool_ and not np.isin(values, (0, 1)).all():
            raise self._error(column, "only 0 and 1", "different numbers", "Leave it out of columns=.")
        return values.astype(bool)

    # The fields of columns, and checks of what the caller and the file say

    def _path(self, column: str, chosen: Columns, declared: Mapping[str, Tree]) -> Path | None:
        separator = self._source.separator
        for name, field in chosen.items():
            if column == name or column.startswith(f"{name}{separator}"):
                rest = column[len(name) + 1 :].split(separator) if column != name else []
                return None if field is None else (*field.split("."), *rest)
        path = (column,) if column in declared else self._source.usual_path(column)
        return (column,) if path is None and column in self._encode else path

    def _require_columns(self, argument: str, names: Iterable[str]) -> None:
        for name in names:
            group = f"{name}{self._source.separator}"
            if not any(column == name or column.startswith(group) for column in self._columns):
                expected, remedy = f"one of the columns {', '.join(self._columns)}", f"Correct {argument}=."
                raise self._error("", expected, repr(name), remedy)

    def _require_field(self, column: str, path: Path) -> None:
        shape, dtype, is_text, _ = self._columns[column]
        leave_out = f"columns={{{column!r}: None}}"
        if not all(NAME.fullmatch(part) for part in path):
            remedy = f'Rename it: columns={{{column!r}: "a_name"}}.'
            raise self._error(column, f"names like {NAME.pattern}", repr(".".join(path)), remedy)
        if is_text and column not in self._encode:
            remedy = f"Pass encode={{{column!r}: a function of a text}}, or {leave_out}."
            raise self._error(column, "numbers", "texts", remedy)
        if not is_text and column in self._encode:
            raise self._error(column, "texts to encode", f"dtype {dtype}", "Leave it out of encode=.")
        if not is_text and dtype.newbyteorder("=") not in FROM_NUMPY:
            raise self._error(column, "numbers", f"dtype {dtype}", f"Leave it out: {leave_out}.")
        if not all(shape) or (path[0] in _FLAGS and shape):
            expected = "one flag per step" if path[0] in _FLAGS else "numbers in every step"
            raise self._error(column, expected, f"shape {shape}", f"Pass {leave_out}.")

    def _require_tree(self) -> None:
        fields: dict[str, Any] = {}
        for column, path in self.paths.items():
            try:
                _put(fields, path, column)
            except KeyError as error:
                remedy = f'Give one of them another field: columns={{{column!r}: "a_name"}}.'
                raise self._error(column, "a field of its own", f"{'.'.join(path)!r} twice", remedy) from error
        for name in ("obs", "action"):
            if name not in fields:
                remedy = f'Say which column it is: columns={{"…": "{name}"}}.'
                got = f"the columns {', '.join(self._columns) or '(none)'}"
                raise self._error("", f"a column for {name!r}", got, remedy)

    def _require_declared(self, declared: Mapping[str, Tree]) -> None:
        names = {path[0]: column for column, path in self.paths.items() if path[0] not in STEP}
        for name, column in names.items():
            if name not in declared:
                remedy = f"Declare it in extra=, or leave it out: columns={{{column!r}: None}}."
                raise self._error(column, f"a field {name!r} of the buffer", f"{', '.join(declared) or 'none'}", remedy)
        for name in declared:
            if name not in names:
                remedy = f'Say which column it is: columns={{"…": "{name}"}}.'
                raise self._error("", f"a column for {name!r}", f"the columns {', '.join(self._columns)}", remedy)

    def _error(self, column: str, expected: str, got: object, remedy: str) -> SchemaError:
        where = f"{self._source.name}: {column}" if column else self._source.name
        return SchemaError(explain(where, expected, got, remedy))


def _declares_vector(buffer: Any, path: Path) -> bool:
    """Whether a buffer has a field of shape (1,) at a path."""
    tree: Any = {} if buffer is None else declared_fields(buffer)
    for name in path:
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return isinstance(tree, Field) and tree.shape == (1,)


def _put(tree: dict[str, Any], path: Path, value: Any) -> None:
    """Put a leaf into nested dicts; raises a KeyError if another leaf has its path."""
    *groups, last = path
    for name in groups:
        tree = tree.setdefault(name, {})
        if not isinstance(tree, dict):
            raise KeyError(name)
    if last in tree:
        raise KeyError(last)
    tree[last] = value


def _real(field: Field) -> Field:
    """The field of a reward: whole numbers and flags become float32."""
    return field if field.dtype.is_floating_point else Field(field.shape)
