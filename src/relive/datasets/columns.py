"""Reads datasets with one row per step, and maps their columns to the fields of a buffer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from relive.datasets.filling import STEP_FIELDS, FinalObs, declared_fields, extra_fields, fill, split_episodes
from relive.datasets.untrusted import dataset_error, decode_budget, require_similar_size
from relive.errors import SchemaError
from relive.replay.buffer import ReplayBuffer
from relive.schema.fields import DTYPES_FROM_NUMPY, Field, Path, Tree, iter_leaves, map_leaves, narrow_dtype
from relive.schema.suggestions import NAME_PATTERN
from relive.storage.allocator import available_bytes

Columns: TypeAlias = Mapping[str, str | None]
"""The field of each column ("obs.camera", "action", "stage"); None leaves the column out."""
Encoders: TypeAlias = Mapping[str, Callable[[str], Any]]
"""For each column of texts, a function that converts a text to numbers."""

_FLAG_FIELDS = ("terminated", "truncated")
_NUMBER_FIELDS = ("reward", *_FLAG_FIELDS)
_MAX_COLUMNS = 1 << 10
BLOCK_BYTES = 1 << 21
"""Approximate number of bytes per read."""
FLAG_ROWS_PER_READ = 1 << 18
"""Number of rows per read of flags, when the ends of episodes are counted."""
_COPIES_PER_STEP = 8
"""Number of copies of a step that a reader has in memory: as read, as overlap, concatenated, and as fields."""


class ColumnSpec(NamedTuple):
    """Shape and dtype of one step in a column."""

    shape: tuple[int, ...]
    dtype: np.dtype
    is_text: bool = False
    has_loose_axis: bool = False
    """Whether shape (1,) may stand for a single number, because some writers of the format add an axis."""


class RowSource(Protocol):
    """A dataset whose rows are steps, one episode after the other."""

    name: str
    """The name of the file, for error messages."""
    nbytes: int
    """The number of bytes of the dataset on the disk."""
    separator: str = "/"
    """The separator between the names of a group and its columns."""

    def columns(self, user_columns: Columns) -> Mapping[str, ColumnSpec]:
        """Return the columns that may become fields; `user_columns` is the `columns=` argument."""
        ...

    def default_path(self, column: str) -> Path | None:
        """Return the field path of a column that `columns=` does not mention; None skips the column."""
        ...

    def rows(self, columns: Sequence[str], count: int) -> Iterator[tuple[np.ndarray, Mapping[str, Any]]]:
        """Yield (episodes [K], columns) for up to `count` rows at a time; a column is numbers [K, …] or K texts."""
        ...

    def next_columns(self, obs: list[str]) -> Mapping[str, str]:
        """Return the column of next observations for each column of the observation; empty if the file has none."""
        return {}

    def final_obs(self, obs: list[str]) -> Callable[[int], Mapping[str, Any]] | None:
        """Return a function that reads an episode's final observation [1, …] by column; None if the file has none.

        It is called with ascending episode numbers.
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
        name: the public function, for error messages.
        source: the rows.
        buffer: the buffer to fill; None makes a replay buffer with space for all rows.
        columns: the caller's `columns=`.
        encode: the caller's `encode=`.
        final_obs: the caller's `final_obs=`.
        settings: settings of the replay buffer to make.
    """
    user_columns = _check_dict(
        "columns", columns, "a field or None", lambda field: field is None or isinstance(field, str)
    )
    encoders = _check_dict("encode", encode, "a function of a text", callable)
    plan = ColumnPlan(name, source, user_columns, encoders, buffer)
    steps, ends = plan.count()
    if buffer is None:
        buffer = plan.make_buffer(steps + ends, **settings)
    read_columns = source.final_obs(plan.find_columns("obs"))
    read_final_obs = None if read_columns is None else lambda episode: plan.to_fields(read_columns(episode))["obs"]
    return fill(name, buffer, split_episodes(source.name, plan.read(), read_final_obs), steps, final_obs)


def _check_dict(argument: str, value: Any, expected_value: str, is_valid: Callable[[Any], bool]) -> dict[str, Any]:
    by_column = {} if value is None else value
    if not isinstance(by_column, Mapping) or not all(isinstance(k, str) and is_valid(v) for k, v in by_column.items()):
        remedy = "Pass a dict whose keys are names of columns."
        raise dataset_error(argument, f"{expected_value} for each column", repr(value), remedy)
    return dict(by_column)


class ColumnPlan:
    """The columns to read from a source, and the field of each.

    Args:
        name: the public function, for error messages.
        source: the rows.
        user_columns: the caller's `columns=`.
        encode: the caller's `encode=`.
        buffer: the buffer to fill, or None for a new one.
    """

    def __init__(self, name: str, source: RowSource, user_columns: Columns, encode: Encoders, buffer: Any) -> None:
        self._source, self._encode = source, encode
        self._columns = dict(source.columns(user_columns))
        self._encodings: dict[str, dict[str, np.ndarray]] = {column: {} for column in self._encode}
        if len(self._columns) > _MAX_COLUMNS:
            raise self._error("", f"at most {_MAX_COLUMNS} columns", len(self._columns), "Split the file.")
        self._require_columns("columns", user_columns)
        self._require_columns("encode", encode)
        declared = None if buffer is None else extra_fields(name, buffer)
        self.paths: dict[str, Path] = {}
        """The field path of each column."""
        for column, spec in self._columns.items():
            path = self._choose_path(column, user_columns, declared or {})
            if path is not None:
                if spec.has_loose_axis and path[0] in _NUMBER_FIELDS and not _declares_vector(buffer, path):
                    self._columns[column] = spec._replace(shape=())
                self._require_field(column, path)
                self.paths[column] = path
        obs_columns = self.find_columns("obs")
        if len(obs_columns) == 1 and declared is not None and isinstance(declared_fields(buffer)["obs"], Field):
            self.paths[obs_columns[0]] = ("obs",)
        self._require_tree()
        self._require_memory()
        if declared is not None:
            self._require_declared(declared)

    def find_columns(self, *fields: str) -> list[str]:
        """Return the columns of these fields and of their parts."""
        return [column for column, path in self.paths.items() if path[0] in fields]

    def count(self) -> tuple[int, int]:
        """Return the number of steps and the number of episode ends."""
        steps, ends, last, was_end = 0, 0, None, True
        for episode, flags in self._source.rows(self.find_columns(*_FLAG_FIELDS), FLAG_ROWS_PER_READ):
            is_end = np.zeros(len(episode), bool)
            for _, flag in iter_leaves((), self.to_fields(flags)):
                is_end |= flag
            # An episode ends where its number changes or a flag is set; both at one step are one end.
            changes = np.diff(episode, prepend=episode[0] if last is None else last) != 0
            before = np.concatenate([[was_end], is_end[:-1]])
            ends += int(is_end.sum()) + int((changes & ~before).sum())
            steps, last, was_end = steps + len(episode), episode[-1], bool(is_end[-1])
        if not steps:
            raise dataset_error(self._source.name, "at least 1 step", 0)
        return steps, ends + (not was_end)

    def read(self) -> Iterator[tuple[np.ndarray, dict[str, Any]]]:
        """Yield (episodes [K], fields [K, …]) of consecutive rows, about `BLOCK_BYTES` at a time."""
        next_columns = self._source.next_columns(self.find_columns("obs"))
        count = max(2, BLOCK_BYTES // max(1, sum(map(self._row_bytes, self.paths))))
        for episode, values in self._source.rows([*self.paths, *next_columns.values()], count):
            fields = self.to_fields({column: values[column] for column in self.paths})
            if next_columns:
                following = self.to_fields({column: values[following] for column, following in next_columns.items()})
                fields["next_obs"] = following["obs"]
            yield episode, fields

    def _row_bytes(self, column: str) -> int:
        spec = self._columns[column]
        return math.prod(spec.shape) * spec.dtype.itemsize

    def _require_memory(self) -> None:
        max_bytes = min(decode_budget(self._source.nbytes), available_bytes() or 1 << 62)
        needed_bytes = _COPIES_PER_STEP * sum(map(self._row_bytes, self.paths))
        if needed_bytes > max_bytes:
            where = f"{self._source.name}: {max(self.paths, key=self._row_bytes)}"
            expected = f"steps that fit into {max_bytes:,} bytes, {_COPIES_PER_STEP} times"
            raise dataset_error(where, expected, f"{needed_bytes:,} bytes")

    def to_fields(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Convert values [K, …] by column to nested dicts of fields."""
        fields: dict[str, Any] = {}
        for column, values in columns.items():
            numbers = self._encode_texts(column, values) if column in self._encode else values
            path = self.paths[column]
            if path[0] in _FLAG_FIELDS:
                numbers = to_flags(f"{self._source.name}: {column}", numbers)
            elif self._columns[column].has_loose_axis:
                numbers = numbers.reshape(len(numbers), *self._columns[column].shape)
            _insert_leaf(fields, path, numbers)
        return fields

    def make_buffer(self, capacity: int, **settings: Any) -> ReplayBuffer:
        """Make a replay buffer with the fields of the file; raises if it would be much larger than the file."""
        trees: dict[str, Any] = {}
        for column, path in self.paths.items():
            _insert_leaf(trees, path, self._make_field(column))
        leaves = [leaf for name, tree in trees.items() for _, leaf in iter_leaves((name,), tree)]
        row = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
        require_similar_size(self._source.name, capacity, row, self._source.nbytes)
        extra = {name: tree for name, tree in trees.items() if name not in STEP_FIELDS}
        reward = map_leaves(_to_reward_field, trees.get("reward", Field()))
        return ReplayBuffer(capacity, trees["obs"], trees["action"], reward=reward, extra=extra or None, **settings)

    def _make_field(self, column: str) -> Field:
        shape, dtype, *_ = self._columns[column]
        if column in self._encode:
            _, values = next(self._source.rows([column], 1))
            first = self._encode_texts(column, values[column])
            shape, dtype = first.shape[1:], first.dtype
        return Field(shape, narrow_dtype(DTYPES_FROM_NUMPY[dtype.newbyteorder("=")]))

    def _encode_texts(self, column: str, texts: Any) -> np.ndarray:
        expected, remedy = "numbers of one shape from encode=", "Return an array of a fixed shape."
        encodings = self._encodings[column]
        for text in texts:
            if text not in encodings:
                numbers = self._encode[column](text)
                try:
                    encodings[text] = np.asarray(numbers)
                # numpy raises these for ragged lists, and for tensors on a GPU or with gradients.
                except (ValueError, TypeError, RuntimeError) as error:
                    raise self._error(column, expected, repr(numbers), remedy) from error
        rows = [encodings[text] for text in texts]
        dtypes, shapes = {row.dtype for row in rows}, {row.shape for row in rows}
        if len(shapes) > 1 or any(dtype.kind not in "biuf" or dtype not in DTYPES_FROM_NUMPY for dtype in dtypes):
            got = f"{', '.join(sorted(map(str, dtypes)))} of shapes {sorted(shapes)}"
            raise self._error(column, expected, got, remedy)
        return np.stack(rows)

    def _choose_path(self, column: str, user_columns: Columns, declared: Mapping[str, Tree]) -> Path | None:
        separator = self._source.separator
        for name, field in user_columns.items():
            if column == name or column.startswith(f"{name}{separator}"):
                parts = column[len(name) + 1 :].split(separator) if column != name else []
                return None if field is None else (*field.split("."), *parts)
        path = (column,) if column in declared else self._source.default_path(column)
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
        if not all(NAME_PATTERN.fullmatch(part) for part in path):
            remedy = f'Rename it: columns={{{column!r}: "a_name"}}.'
            raise self._error(column, f"names like {NAME_PATTERN.pattern}", repr(".".join(path)), remedy)
        if is_text and column not in self._encode:
            remedy = f"Pass encode={{{column!r}: a function of a text}}, or {leave_out}."
            raise self._error(column, "numbers", "texts", remedy)
        if not is_text and column in self._encode:
            raise self._error(column, "texts to encode", f"dtype {dtype}", "Leave it out of encode=.")
        if not is_text and dtype.newbyteorder("=") not in DTYPES_FROM_NUMPY:
            raise self._error(column, "numbers", f"dtype {dtype}", f"Leave it out: {leave_out}.")
        if not all(shape) or (path[0] in _FLAG_FIELDS and shape):
            expected = "one flag per step" if path[0] in _FLAG_FIELDS else "numbers in every step"
            raise self._error(column, expected, f"shape {shape}", f"Pass {leave_out}.")

    def _require_tree(self) -> None:
        fields: dict[str, Any] = {}
        for column, path in self.paths.items():
            try:
                _insert_leaf(fields, path, column)
            except KeyError as error:
                remedy = f'Give one of them another field: columns={{{column!r}: "a_name"}}.'
                raise self._error(column, "one column per field", f"{'.'.join(path)!r} twice", remedy) from error
        self._require_columns_for(("obs", "action"), fields)

    def _require_declared(self, declared: Mapping[str, Tree]) -> None:
        names = {path[0]: column for column, path in self.paths.items() if path[0] not in STEP_FIELDS}
        for name, column in names.items():
            if name not in declared:
                remedy = f"Declare it in extra=, or leave it out: columns={{{column!r}: None}}."
                raise self._error(column, f"a field {name!r} of the buffer", f"{', '.join(declared) or 'none'}", remedy)
        self._require_columns_for(declared, names)

    def _require_columns_for(self, fields: Iterable[str], mapped_fields: Mapping[str, Any]) -> None:
        for name in fields:
            if name not in mapped_fields:
                remedy = f'Say which column it is: columns={{"…": "{name}"}}.'
                got = f"the columns {', '.join(self._columns) or '(none)'}"
                raise self._error("", f"a column for {name!r}", got, remedy)

    def _error(self, column: str, expected: str, got: object, remedy: str) -> SchemaError:
        where = f"{self._source.name}: {column}" if column else self._source.name
        return dataset_error(where, expected, got, remedy)


def to_flags(where: str, values: Any) -> np.ndarray:
    """Convert numbers 0 and 1 of K rows to bools [K]; raises for other numbers."""
    flags = np.asarray(values)
    if flags.size != len(flags) or (flags.dtype != np.bool_ and not np.isin(flags, (0, 1)).all()):
        remedy = "Repair the file, or leave the column out: pass None for it in columns=."
        raise dataset_error(where, "a 0 or 1 per step", f"other numbers, of shape {flags.shape}", remedy)
    return flags.reshape(-1).astype(bool)


def _declares_vector(buffer: Any, path: Path) -> bool:
    """Whether a buffer has a field of shape (1,) at a path."""
    tree: Any = {} if buffer is None else declared_fields(buffer)
    for name in path:
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return isinstance(tree, Field) and tree.shape == (1,)


def _insert_leaf(tree: dict[str, Any], path: Path, value: Any) -> None:
    """Put a leaf into nested dicts; raises a KeyError if the path is in use."""
    *groups, last = path
    for name in groups:
        tree = tree.setdefault(name, {})
        if not isinstance(tree, dict):
            raise KeyError(name)
    if last in tree:
        raise KeyError(last)
    tree[last] = value


def _to_reward_field(field: Field) -> Field:
    """Return the field of a reward: integers and flags become float32."""
    return field if field.dtype.is_floating_point else Field(field.shape)
