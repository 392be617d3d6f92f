"""Columns of a file and the fields of a buffer that they become."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from relive.datasets.filling import BLOCK_BYTES, STEP, declared_fields, extra_fields
from relive.datasets.untrusted import damage, decode_budget, require_similar_size
from relive.errors import SchemaError, explain
from relive.replay.buffer import ReplayBuffer
from relive.replay.samplers import Sampler
from relive.schema.fields import FROM_NUMPY, Field, Path, Tree, kept_dtype, leaves_of, map_leaves
from relive.schema.vocabulary import NAME
from relive.storage import Memory
from relive.storage.allocator import available_bytes

Columns: TypeAlias = Mapping[str, str | None]
"""The field of each column ("obs.camera", "action", "stage"); None leaves the column out."""
Encoders: TypeAlias = Mapping[str, Callable[[str], Any]]
"""A function that turns a text into numbers, for each column of texts."""

_FLAGS = ("terminated", "truncated")
_NUMBERS = ("reward", *_FLAGS)
_MOST_COLUMNS = 1 << 10
_COPIES = 8
"""Copies of a step that a reader holds at least: two rows, two held before them, all of these joined, and fields."""


class ColumnSpec(NamedTuple):
    """Shape and dtype of one step in a column."""

    shape: tuple[int, ...]
    dtype: np.dtype
    text: str | None = None
    """The first text of a column of texts; None for numbers."""
    has_loose_axis: bool = False
    """Whether shape (1,) may mean a single number: writers of this format add an axis."""


def check_columns(columns: Columns | None) -> Columns:
    """Check the argument `columns=`; None becomes an empty dict."""
    return _check_dict("columns", columns, "a field or None", lambda field: field is None or isinstance(field, str))


def check_encoders(encode: Encoders | None) -> Encoders:
    """Check the argument `encode=`; None becomes an empty dict."""
    return _check_dict("encode", encode, "a function of a text", callable)


def _check_dict(argument: str, given: Any, what: str, fits: Callable[[Any], bool]) -> dict[str, Any]:
    by_column = {} if given is None else given
    if not isinstance(by_column, Mapping) or not all(isinstance(k, str) and fits(v) for k, v in by_column.items()):
        remedy = "Pass a dict whose keys are names of columns."
        raise SchemaError(explain(argument, f"{what} for each column", repr(given), remedy))
    return dict(by_column)


class ColumnPlan:
    """The columns that are read, each with the path of its field.

    Args:
        name: the function that the caller called, for messages.
        file: the file, for messages.
        nbytes: the number of bytes of the dataset on the disk.
        columns: the columns that the file has.
        usual_path: the field of a column that the caller does not name; None leaves it out.
        chosen: the caller's `columns=`.
        encode: the caller's `encode=`.
        buffer: the buffer to fill, or None for a new one.
        separator: the text between the name of a group of columns and the names of its columns.
    """

    def __init__(
        self,
        name: str,
        file: str,
        nbytes: int,
        columns: Mapping[str, ColumnSpec],
        usual_path: Callable[[str], Path | None],
        chosen: Columns,
        encode: Encoders,
        buffer: Any,
        separator: str = "/",
    ) -> None:
        self._file, self._nbytes, self._separator = file, nbytes, separator
        self._columns, self._encode = dict(columns), encode
        self._encoded: dict[str, dict[str, np.ndarray]] = {column: {} for column in self._encode}
        if len(columns) > _MOST_COLUMNS:
            raise self._error("", f"at most {_MOST_COLUMNS} columns", len(columns), "Split the file.")
        self._require_known("columns", chosen)
        self._require_known("encode", encode)
        declared = None if buffer is None else extra_fields(name, buffer)
        self.paths: dict[str, Path] = {}
        """The path of the field that each column becomes."""
        for column in columns:
            path = self._path(column, usual_path, chosen, declared or {})
            if path is not None:
                if columns[column].has_loose_axis and path[0] in _NUMBERS and not _declares_vector(buffer, path):
                    self._columns[column] = columns[column]._replace(shape=())
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

    @property
    def flags(self) -> list[str]:
        """The columns that say where episodes end."""
        return self.columns_of(*_FLAGS)

    @property
    def rows_per_block(self) -> int:
        """The number of rows that a reader holds at once."""
        return max(2, BLOCK_BYTES // max(1, sum(map(self._row_bytes, self.paths))))

    def _row_bytes(self, column: str) -> int:
        spec = self._columns[column]
        return math.prod(spec.shape) * spec.dtype.itemsize

    def _require_memory(self) -> None:
        free, most = available_bytes() or 1 << 62, decode_budget(self._nbytes)
        largest = max(self.paths, key=self._row_bytes)
        needed = _COPIES * sum(map(self._row_bytes, self.paths))
        if needed > min(free, most):
            limit = (
                f"{most:,} bytes for a file of {self._nbytes:,}" if most < free else f"{free:,} bytes, the free memory"
            )
            raise damage(
                f"{self._file}: {largest}", f"steps that fit into {limit}, {_COPIES} times", f"{needed:,} bytes"
            )

    def to_fields(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Values [K, …] by column as nested dicts of fields."""
        fields: dict[str, Any] = {}
        for column, values in arrays.items():
            numbers = self._numbers(column, values) if column in self._encode else values
            path = self.paths[column]
            if self._columns[column].has_loose_axis:
                numbers = numbers.reshape(len(numbers), *self._columns[column].shape)
            _put(fields, path, self._flags(column, numbers) if path[0] in _FLAGS else numbers)
        return fields

    def make_buffer(
        self, capacity: int, sampler: Sampler | None, device: torch.device | str | Memory, seed: int | None
    ) -> Any:
        """Make a replay buffer with the fields of the file; raises if it would be much larger than the file."""
        trees: dict[str, Any] = {}
        for column, path in self.paths.items():
            _put(trees, path, self._field(column))
        leaves = [leaf for name, tree in trees.items() for _, leaf in leaves_of((name,), tree)]
        row = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
        require_similar_size(self._file, capacity, row, self._nbytes)
        extra = {name: tree for name, tree in trees.items() if name not in STEP}
        reward = map_leaves(_real, trees.get("reward", Field()))
        return ReplayBuffer(
            capacity, trees["obs"], trees["action"], reward=reward, extra=extra or None, sampler=sampler,
            device=device, seed=seed,
        )  # fmt: skip

    def _field(self, column: str) -> Field:
        shape, dtype, text, _ = self._columns[column]
        if column in self._encode:
            first = self._numbers(column, [text])
            shape, dtype = first.shape[1:], first.dtype
        return Field(shape, kept_dtype(FROM_NUMPY[dtype.newbyteorder("=")]))

    def _numbers(self, column: str, texts: Any) -> np.ndarray:
        known = self._encoded[column]
        for text in texts:
            if text not in known:
                known[text] = self._array(column, self._encode[column](text))
        rows = [known[text] for text in texts]
        if rows[0].dtype.kind not in "biuf" or any(row.shape != rows[0].shape for row in rows):
            got = f"{rows[0].dtype} of shapes {sorted({row.shape for row in rows})}"
            raise self._error(column, "numbers of one shape from encode=", got, "Return an array of a fixed shape.")
        return np.stack(rows)

    def _array(self, column: str, numbers: Any) -> np.ndarray:
        try:
            return np.asarray(numbers)
        except ValueError as error:  # lists of several lengths
            expected, remedy = "numbers of one shape from encode=", "Return an array of a fixed shape."
            raise self._error(column, expected, repr(numbers), remedy) from error

    def _flags(self, column: str, values: np.ndarray) -> np.ndarray:
        if values.dtype != np.bool_ and not np.isin(values, (0, 1)).all():
            raise self._error(column, "only 0 and 1", "different numbers", "Leave it out of columns=.")
        return values.astype(bool)

    # The fields of columns, and checks of what the caller and the file say

    def _path(
        self, column: str, usual_path: Callable[[str], Path | None], chosen: Columns, declared: Mapping[str, Tree]
    ) -> Path | None:
        for name, field in chosen.items():
            if column == name or column.startswith(f"{name}{self._separator}"):
                rest = column[len(name) + 1 :].split(self._separator) if column != name else []
                return None if field is None else (*field.split("."), *rest)
        path = (column,) if column in declared else usual_path(column)
        return (column,) if path is None and column in self._encode else path

    def _require_known(self, argument: str, given: Mapping[str, Any]) -> None:
        for column in given:
            if not any(known == column or known.startswith(f"{column}{self._separator}") for known in self._columns):
                remedy = f"Correct {argument}=."
                raise self._error("", f"one of the columns {', '.join(self._columns)}", repr(column), remedy)

    def _require_field(self, column: str, path: Path) -> None:
        shape, dtype, text, _ = self._columns[column]
        if not all(NAME.fullmatch(part) for part in path):
            remedy = f'Rename it: columns={{{column!r}: "a_name"}}.'
            raise self._error(column, f"names like {NAME.pattern}", repr(".".join(path)), remedy)
        if text is not None and column not in self._encode:
            remedy = f"Pass encode={{{column!r}: a function of a text}}, or columns={{{column!r}: None}}."
            raise self._error(column, "numbers", "texts", remedy)
        if text is None and column in self._encode:
            raise self._error(column, "texts to encode", f"dtype {dtype}", "Leave it out of encode=.")
        if text is None and dtype.newbyteorder("=") not in FROM_NUMPY:
            remedy = f"Leave it out: columns={{{column!r}: None}}."
            raise self._error(column, "numbers", f"dtype {dtype}", remedy)
        if not all(shape) or (path[0] in _FLAGS and shape):
            expected = "one flag per step" if path[0] in _FLAGS else "numbers in every step"
            raise self._error(column, expected, f"shape {shape}", f"Pass columns={{{column!r}: None}}.")

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
                known = f"the columns {', '.join(self._columns) or '(none)'}"
                raise self._error("", f"a column for {name!r}", known, remedy)

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
        where = f"{self._file}: {column}" if column else self._file
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
