"""Fills a buffer with a dataset: columns become fields, and consecutive rows become episodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np

from relive.checkpoint.progress import show_progress
from relive.datasets.files import compute_decoding_limit, dataset_error, refuse_oversized_buffer
from relive.distillation import DistillationBuffer
from relive.errors import BufferFullError, SchemaError, explain, warn_user
from relive.replay.buffer import ReplayBuffer
from relive.rollout.buffer import RolloutBuffer
from relive.schema.checks import check_choice
from relive.schema.fields import DTYPES_FROM_NUMPY, Field, Path, Tree, map_leaves, narrow_dtype
from relive.schema.suggestions import NAME_PATTERN
from relive.storage.allocator import available_host_bytes

Columns: TypeAlias = Mapping[str, str | None]
"""The field of each column ("obs.camera", "action", "stage"); None leaves the column out."""
Encoders: TypeAlias = Mapping[str, Callable[[str], Any]]
"""For each column of texts, a function that converts a text to numbers."""
FinalObs: TypeAlias = Literal["drop", "repeat"] | None
"""Treatment of an episode's last step if it was truncated and the file lacks its next observation."""

FilledBuffer = TypeVar("FilledBuffer", bound=ReplayBuffer | RolloutBuffer | DistillationBuffer)
"""A buffer that a dataset can fill."""

STEP_FIELDS = ("obs", "action", "reward", "terminated", "truncated")
"""The standard fields of a step."""
_FLAG_FIELDS = ("terminated", "truncated")
_STANDARD_FIELDS: dict[type, tuple[str, ...]] = {
    ReplayBuffer: STEP_FIELDS,
    RolloutBuffer: (*STEP_FIELDS, "value", "log_prob"),
    DistillationBuffer: ("obs", "action"),
}
"""The classes of buffers that can be filled, and the fields that buffers of each class always have."""

BLOCK_BYTES = 1 << 21
"""Approximate number of bytes per read."""
FLAG_ROWS_PER_READ = 1 << 18
"""Number of rows per read of flags, when the ends of episodes are counted."""
_OVERLAP_ROWS = 2
"""Number of rows to hold back until the next block is read: dropping an episode's last step changes the one before."""
_MAX_COLUMNS = 1 << 10
_COPIES_PER_STEP = 8
"""Number of copies of a step that a reader has in memory: as read, as overlap, concatenated, and as fields."""


class ColumnSpec(NamedTuple):
    """Shape, dtype and field of a column."""

    shape: tuple[int, ...]
    """Shape of one step."""
    dtype: np.dtype
    path: Path | None
    """Field path of the column unless the user names another; None leaves the column out."""
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

    def describe_columns(self, user_columns: Columns) -> Mapping[str, ColumnSpec]:
        """Return the columns that may become fields; for `user_columns` the user chose a field or None."""
        ...

    def read_rows(self, columns: Sequence[str], max_rows: int) -> Iterator[tuple[np.ndarray, Mapping[str, Any]]]:
        """Yield (episodes [K], columns) for up to `max_rows` rows at a time; a column is numbers [K, …] or K texts."""
        ...

    def find_next_columns(self, obs_columns: list[str]) -> Mapping[str, str]:
        """Return the column of next observations for each column of the observation; empty if the file has none."""
        return {}

    def make_final_obs_reader(self, obs_columns: list[str]) -> Callable[[int], Mapping[str, Any]] | None:
        """Return a function that reads an episode's final observation [1, …] by column; None if the file has none.

        The function is called with ascending episode numbers.
        """
        return None


def fill_from_rows(
    where: str,
    source: RowSource,
    buffer: Any,
    columns: Columns | None,
    encode: Encoders | None,
    final_obs: FinalObs,
    **settings: Any,
) -> Any:
    """Read the rows of a source into a buffer; return the buffer.

    Args:
        where: the public function, for error messages.
        source: the rows.
        buffer: the buffer to fill; None makes a replay buffer with space for all rows.
        columns: the field of each column, as the user asked; None leaves every column its default.
        encode: the user's function for each column of texts.
        final_obs: what the user wants of last steps without a next observation.
        settings: settings of the replay buffer to make.
    """
    remedy = "Choose what to do with a last step without a next observation."
    check_choice("final_obs", final_obs, ("drop", "repeat", None), remedy)
    plan = _ColumnPlan(where, source, columns, encode, buffer)
    counts = plan.count_steps()
    if buffer is None:
        buffer = plan.make_buffer(counts.steps + counts.ends, **settings)
    obs_columns = plan.find_columns("obs")
    next_columns, read_columns = source.find_next_columns(obs_columns), source.make_final_obs_reader(obs_columns)
    read_final_obs = None if read_columns is None else lambda episode: plan.make_fields(read_columns(episode))["obs"]
    lacks_final_obs = not next_columns and read_columns is None
    drops_last_step = lacks_final_obs and final_obs != "repeat" and not isinstance(buffer, DistillationBuffer)
    rows = plan.read_blocks(next_columns)
    rows = show_progress(rows, counts.steps, "reading episodes", lambda block: len(block[0]))
    blocks = filter(len, _split_into_episodes(source.name, rows, read_final_obs, drops_last_step=drops_last_step))
    num_dropped = counts.unterminated if drops_last_step else 0
    return fill_from_blocks(where, buffer, blocks, counts.steps - num_dropped, num_dropped if final_obs is None else 0)


class _StepCounts(NamedTuple):
    """Counts of the rows of a source."""

    steps: int
    ends: int
    """The number of steps at which an episode ends, by its number or by a flag."""
    unterminated: int
    """The number of episodes whose last step is not terminated."""


class _ColumnPlan:
    """The columns to read from a source, and the field of each."""

    def __init__(
        self, where: str, source: RowSource, columns: Columns | None, encode: Encoders | None, buffer: Any
    ) -> None:
        self._source = source
        user_columns = _check_by_column(
            "columns", columns, "a field or None", lambda field: field is None or isinstance(field, str)
        )
        self._encode = _check_by_column("encode", encode, "a function of a text", callable)
        self._encodings: dict[str, dict[str, np.ndarray]] = {column: {} for column in self._encode}
        self._specs = dict(source.describe_columns(user_columns))
        if len(self._specs) > _MAX_COLUMNS:
            raise self._make_error("", f"at most {_MAX_COLUMNS} columns", len(self._specs), "Split the file.")
        for argument, names in (("columns", user_columns), ("encode", self._encode)):
            for column in names:
                if not any(each == column or each.startswith(f"{column}{source.separator}") for each in self._specs):
                    expected = f"one of the columns {', '.join(self._specs)}"
                    raise self._make_error("", expected, repr(column), f"Correct {argument}=.")
        extra = {} if buffer is None else find_extra_fields(where, buffer)
        declared = {} if buffer is None else declared_fields(buffer)
        self._paths: dict[str, Path] = {}
        """The field path of each column."""
        for column, spec in self._specs.items():
            path = self._choose_field_path(column, user_columns, extra)
            if path is None:
                continue
            is_number = path[0] in ("reward", *_FLAG_FIELDS)
            if spec.has_loose_axis and is_number and not _declares_vector(declared, path):
                self._specs[column] = spec._replace(shape=())
            self._require_valid_field(column, path)
            self._paths[column] = path
        obs_columns = self.find_columns("obs")
        if len(obs_columns) == 1 and isinstance(declared.get("obs"), Field):
            self._paths[obs_columns[0]] = ("obs",)
        self._require_complete_fields(extra, has_buffer=buffer is not None)
        self._require_memory_for_steps()

    def find_columns(self, *fields: str) -> list[str]:
        """Return the columns of these fields and of their parts."""
        return [column for column, path in self._paths.items() if path[0] in fields]

    def count_steps(self) -> _StepCounts:
        """Count the steps of the source, and the ends of its episodes."""
        num_steps, num_ends, num_unterminated = 0, 0, 0
        last_episode, was_end, was_terminated = None, True, True
        for episode, columns in self._source.read_rows(self.find_columns(*_FLAG_FIELDS), FLAG_ROWS_PER_READ):
            flags = self.make_fields(columns)
            no_flags = np.zeros(len(episode), bool)
            terminated = flags.get("terminated", no_flags)
            is_end = terminated | flags.get("truncated", no_flags)
            # An episode ends where its number changes or a flag is set; both at one step count as one end.
            changes = np.diff(episode, prepend=episode[0] if last_episode is None else last_episode) != 0
            num_ends += int(is_end.sum()) + int((changes & ~np.append(was_end, is_end[:-1])).sum())
            num_unterminated += int((changes & ~np.append(was_terminated, terminated[:-1])).sum())
            num_steps, last_episode = num_steps + len(episode), episode[-1]
            was_end, was_terminated = is_end[-1], terminated[-1]
        if not num_steps:
            raise dataset_error(self._source.name, "at least 1 step", 0)
        return _StepCounts(num_steps, num_ends + (not was_end), num_unterminated + (not was_terminated))

    def read_blocks(self, next_columns: Mapping[str, str]) -> Iterator[tuple[np.ndarray, dict[str, Any]]]:
        """Yield (episodes [K], fields [K, …]) of consecutive rows, about `BLOCK_BYTES` at a time.

        Args:
            next_columns: the column of next observations for each column of the observation; empty without them.
        """
        count = max(2, BLOCK_BYTES // max(1, sum(map(self._count_row_bytes, self._paths))))
        for episode, values in self._source.read_rows([*self._paths, *next_columns.values()], count):
            fields = self.make_fields({column: values[column] for column in self._paths})
            if next_columns:
                next_values = {column: values[next_column] for column, next_column in next_columns.items()}
                fields["next_obs"] = self.make_fields(next_values)["obs"]
            yield episode, fields

    def make_fields(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Convert values [K, …] by column to nested dicts of fields."""
        fields: dict[str, Any] = {}
        for column, values in columns.items():
            path, spec = self._paths[column], self._specs[column]
            numbers = self._encode_texts(column, values) if column in self._encode else values
            if path[0] in _FLAG_FIELDS:
                numbers = parse_flags(f"{self._source.name}: {column}", numbers)
            elif spec.has_loose_axis:
                numbers = numbers.reshape(len(numbers), *spec.shape)
            _insert_leaf(fields, path, numbers)
        return fields

    def make_buffer(self, capacity: int, **settings: Any) -> ReplayBuffer:
        """Make a replay buffer with the fields of the file; raise if it would be much larger than the file."""
        trees: dict[str, Any] = {}
        row_bytes = 0
        for column, path in self._paths.items():
            shape, dtype, *_ = self._specs[column]
            if column in self._encode:
                _, values = next(self._source.read_rows([column], 1))
                first = self._encode_texts(column, values[column])
                shape, dtype = first.shape[1:], first.dtype
            leaf = Field(shape, narrow_dtype(DTYPES_FROM_NUMPY[dtype.newbyteorder("=")]))
            if path[0] == "reward" and not leaf.dtype.is_floating_point:
                leaf = Field(shape)
            row_bytes += math.prod(shape) * leaf.dtype.itemsize
            _insert_leaf(trees, path, leaf)
        refuse_oversized_buffer(self._source.name, capacity, row_bytes, self._source.nbytes)
        extra = {name: tree for name, tree in trees.items() if name not in STEP_FIELDS}
        reward = trees.get("reward", ())
        return ReplayBuffer(capacity, trees["obs"], trees["action"], reward=reward, extra=extra or None, **settings)

    def _encode_texts(self, column: str, texts: Any) -> np.ndarray:
        expected, remedy = "numbers of one shape from encode=", "Return an array of a fixed shape."
        encodings = self._encodings[column]
        for text in texts:
            if text not in encodings:
                numbers = self._encode[column](text)
                try:
                    encodings[text] = np.asarray(numbers)
                # numpy raises one of these errors for ragged lists, and for tensors on a GPU or with gradients.
                except (ValueError, TypeError, RuntimeError) as error:
                    raise self._make_error(column, expected, repr(numbers), remedy) from error
        rows = [encodings[text] for text in texts]
        dtypes, shapes = {row.dtype for row in rows}, {row.shape for row in rows}
        if len(shapes) > 1 or any(dtype.kind not in "biuf" or dtype not in DTYPES_FROM_NUMPY for dtype in dtypes):
            got = f"{', '.join(sorted(map(str, dtypes)))} of shapes {sorted(shapes)}"
            raise self._make_error(column, expected, got, remedy)
        return np.stack(rows)

    def _choose_field_path(self, column: str, user_columns: Columns, extra_fields: Mapping[str, Tree]) -> Path | None:
        separator = self._source.separator
        for name, field in user_columns.items():
            if column == name or column.startswith(f"{name}{separator}"):
                parts = column[len(name) + 1 :].split(separator) if column != name else []
                return None if field is None else (*field.split("."), *parts)
        path = (column,) if column in extra_fields else self._specs[column].path
        return (column,) if path is None and column in self._encode else path

    def _count_row_bytes(self, column: str) -> int:
        spec = self._specs[column]
        return math.prod(spec.shape) * spec.dtype.itemsize

    def _require_memory_for_steps(self) -> None:
        max_bytes = min(compute_decoding_limit(self._source.nbytes), available_host_bytes() or 1 << 62)
        needed_bytes = _COPIES_PER_STEP * sum(map(self._count_row_bytes, self._paths))
        if needed_bytes > max_bytes:
            where = f"{self._source.name}: {max(self._paths, key=self._count_row_bytes)}"
            expected = f"steps that fit into {max_bytes:,} bytes, {_COPIES_PER_STEP} times"
            raise dataset_error(where, expected, f"{needed_bytes:,} bytes")

    def _require_valid_field(self, column: str, path: Path) -> None:
        """Raise unless the column can be stored in a field at `path`."""
        shape, dtype, _, is_text, _ = self._specs[column]
        leave_out = f"columns={{{column!r}: None}}"
        if not all(NAME_PATTERN.fullmatch(part) for part in path):
            remedy = f'Rename it: columns={{{column!r}: "a_name"}}.'
            raise self._make_error(column, f"names like {NAME_PATTERN.pattern}", repr(".".join(path)), remedy)
        if is_text and column not in self._encode:
            remedy = f"Pass encode={{{column!r}: a function of a text}}, or {leave_out}."
            raise self._make_error(column, "numbers", "texts", remedy)
        if not is_text and column in self._encode:
            raise self._make_error(column, "texts to encode", f"dtype {dtype}", "Leave it out of encode=.")
        if not is_text and dtype.newbyteorder("=") not in DTYPES_FROM_NUMPY:
            raise self._make_error(column, "numbers", f"dtype {dtype}", f"Leave it out: {leave_out}.")
        if path[0] in _FLAG_FIELDS and path[1:]:
            raise self._make_error(column, "one flag per step", f"the part {'.'.join(path)!r}", f"Name it {path[0]!r}.")
        if not all(shape) or (path[0] in _FLAG_FIELDS and shape):
            expected = "one flag per step" if path[0] in _FLAG_FIELDS else "numbers in every step"
            raise self._make_error(column, expected, f"shape {shape}", f"Pass {leave_out}.")

    def _require_complete_fields(self, extra: Mapping[str, Tree], *, has_buffer: bool) -> None:
        """Raise unless each field has one column, and the caller's buffer has the extra fields of the columns."""
        fields: dict[str, Any] = {}
        for column, path in self._paths.items():
            try:
                _insert_leaf(fields, path, column)
            except KeyError as error:
                remedy = f'Give one of them another field: columns={{{column!r}: "a_name"}}.'
                raise self._make_error(column, "one column per field", f"{'.'.join(path)!r} twice", remedy) from error
            if has_buffer and path[0] not in (*STEP_FIELDS, *extra):
                remedy = f"Declare it in extra=, or leave it out: columns={{{column!r}: None}}."
                raise self._make_error(column, f"a field {path[0]!r} of the buffer", ", ".join(extra) or "none", remedy)
        for name in ("obs", "action", *extra):
            if name not in fields:
                remedy = f'Say which column it is: columns={{"…": "{name}"}}.'
                got = f"the columns {', '.join(self._specs) or '(none)'}"
                raise self._make_error("", f"a column for {name!r}", got, remedy)

    def _make_error(self, column: str, expected: str, got: object, remedy: str) -> SchemaError:
        where = f"{self._source.name}: {column}" if column else self._source.name
        return dataset_error(where, expected, got, remedy)


def _check_by_column(argument: str, value: Any, expected_value: str, is_valid: Callable[[Any], bool]) -> dict[str, Any]:
    by_column = {} if value is None else value
    if not isinstance(by_column, Mapping) or not all(isinstance(k, str) and is_valid(v) for k, v in by_column.items()):
        remedy = "Pass a dict whose keys are names of columns."
        raise dataset_error(argument, f"{expected_value} for each column", repr(value), remedy)
    return dict(by_column)


def parse_flags(where: str, values: Any) -> np.ndarray:
    """Convert numbers 0 and 1 of K rows to bools [K]; raise for other numbers."""
    flags = np.asarray(values)
    if flags.size != len(flags) or (flags.dtype != np.bool_ and not np.isin(flags, (0, 1)).all()):
        remedy = "Repair the file, or leave the column out: pass None for it in columns=."
        raise dataset_error(where, "a 0 or 1 per step", f"other numbers, of shape {flags.shape}", remedy)
    return flags.reshape(-1).astype(bool)


def _declares_vector(tree: Any, path: Path) -> bool:
    """Return True if a tree of declared fields has a field of shape (1,) at `path`."""
    for name in path:
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return isinstance(tree, Field) and tree.shape == (1,)


def _insert_leaf(tree: dict[str, Any], path: Path, value: Any) -> None:
    """Put a leaf into nested dicts; raise a KeyError if the path is in use."""
    *groups, last = path
    for name in groups:
        tree = tree.setdefault(name, {})
        if not isinstance(tree, dict):
            raise KeyError(name)
    if last in tree:
        raise KeyError(last)
    tree[last] = value


def slice_leaves(tree: Any, index: Any) -> Any:
    """Index every leaf of a nested dict."""
    return map_leaves(lambda leaf: leaf[index], tree)


def concatenate_leaves(tree: Any, next_tree: Any) -> Any:
    """Concatenate the leaves of two nested dicts along their first axis."""
    return map_leaves(lambda *leaves: np.concatenate(leaves), tree, next_tree)


@dataclass(frozen=True)
class EpisodeBlock:
    """Consecutive steps of one episode."""

    where: str
    """The name of the episode, for error messages."""
    steps: dict[str, Any]
    """Arrays [T, …], or nested dicts of them: the fields of `STEP_FIELDS`, "next_obs" and extra fields."""
    is_last: bool = True
    """Whether the episode ends with this block."""

    def __len__(self) -> int:
        return len(self.steps["terminated"])


def _split_into_episodes(
    name: str,
    blocks: Iterable[tuple[np.ndarray, dict[str, Any]]],
    read_final_obs: Callable[[int], Any] | None,
    *,
    drops_last_step: bool,
) -> Iterator[EpisodeBlock]:
    """Split consecutive rows into blocks of one episode each.

    Without next observations, the next observation of a row is the row after it, and an unknown one repeats the last
    observation. Without flags of truncated steps, an episode that does not terminate is truncated at its last step.
    Without rewards, they are 0.

    Args:
        name: the dataset, for messages.
        blocks: the episodes [K] of rows and their fields [K, …]: "obs", "action", and more if the dataset has them.
        read_final_obs: returns the final observation [1, …] of an episode; None if the file has none.
        drops_last_step: whether to drop the last step of each episode that does not terminate; a truncation moves one
            step back. A block may become empty.
    """
    overlap: tuple[np.ndarray, dict[str, Any]] | None = None

    def make_block(start: int, stop: int, *, is_last: bool) -> EpisodeBlock:
        number = int(episode[start])
        steps = slice_leaves(fields, slice(start, stop))
        if "next_obs" not in steps and not is_last:
            steps["next_obs"] = slice_leaves(fields["obs"], slice(start + 1, stop + 1))
        elif "next_obs" not in steps:
            final = read_final_obs(number) if read_final_obs else slice_leaves(steps["obs"], slice(-1, None))
            steps["next_obs"] = concatenate_leaves(slice_leaves(steps["obs"], slice(1, None)), final)
        steps.setdefault("reward", np.zeros(stop - start, np.float32))
        terminated = steps.setdefault("terminated", np.zeros(stop - start, bool))
        if "truncated" not in steps:
            steps["truncated"] = np.zeros(stop - start, bool)
            steps["truncated"][-1] = is_last and not terminated[-1]
        if drops_last_step and is_last and not terminated[-1]:
            was_truncated = steps["truncated"][-1]
            steps = slice_leaves(steps, slice(None, -1))
            steps["truncated"] = steps["truncated"].copy()
            steps["truncated"][-1:] |= was_truncated
        return EpisodeBlock(f"{name}, episode {number}", steps, is_last)

    for block in blocks:
        episode, fields = block
        if overlap is not None:
            episode, fields = np.concatenate([overlap[0], episode]), concatenate_leaves(overlap[1], fields)
        edges = [0, *(np.flatnonzero(np.diff(episode)) + 1).tolist(), len(episode)]
        for start, stop in pairwise(edges[:-1]):
            yield make_block(start, stop, is_last=True)
        overlap_start = max(edges[-2], edges[-1] - _OVERLAP_ROWS)
        if overlap_start > edges[-2]:
            yield make_block(edges[-2], overlap_start, is_last=False)
        overlap = episode[overlap_start:], slice_leaves(fields, slice(overlap_start, None))
    if overlap is not None:
        episode, fields = overlap
        yield make_block(0, len(episode), is_last=True)


def declared_fields(buffer: Any) -> Mapping[str, Tree]:
    """Return all declared fields of a buffer."""
    return buffer._schema.trees


def find_extra_fields(where: str, buffer: Any) -> Mapping[str, Tree]:
    """Return the extra fields of a buffer; raise if the buffer cannot be filled."""
    standard_fields = _STANDARD_FIELDS.get(type(buffer))
    if standard_fields is None:
        remedy = "Pass a ReplayBuffer, a RolloutBuffer or a DistillationBuffer."
        raise dataset_error(where, "a buffer", type(buffer).__name__, remedy)
    return {field: tree for field, tree in declared_fields(buffer).items() if field not in standard_fields}


def fill_from_blocks(
    where: str, buffer: FilledBuffer, blocks: Iterable[EpisodeBlock], num_steps: int, num_steps_left_out: int = 0
) -> FilledBuffer:
    """Stream `num_steps` steps into a buffer; return the buffer.

    Args:
        where: the public function, for messages.
        buffer: a buffer that `find_extra_fields` accepts.
        blocks: the steps, with the buffer's extra fields.
        num_steps: the number of steps of all blocks.
        num_steps_left_out: the number of steps left out for lack of a next observation; above 0, a warning is issued.
    """
    if isinstance(buffer, RolloutBuffer):
        space = buffer.num_steps - buffer.num_stored
        if num_steps > space:
            remedy = f"make the rollout with num_steps={num_steps}."
            raise BufferFullError(_explain_lack_of_space(where, num_steps, space, remedy))
    writers = {ReplayBuffer: _fill_replay, RolloutBuffer: _fill_rollout, DistillationBuffer: _fill_distillation}
    num_stored = writers[type(buffer)](where, buffer, blocks)
    if num_steps_left_out:
        got = f"{num_steps_left_out} last step{'s' if num_steps_left_out > 1 else ''} without"
        remedy = 'They were left out. Pass final_obs="drop" if that is right, or "repeat" to keep them.'
        warn_user(explain(where, "a next observation for every step", got, remedy))
    if num_stored < num_steps:
        remedy = "the oldest were overwritten. Make the buffer larger: the last observation of an episode is a row too."
        warn_user(_explain_lack_of_space(where, num_steps, num_stored, remedy))
    return buffer


def _explain_lack_of_space(where: str, num_steps: int, space: int, remedy: str) -> str:
    message = f"{num_steps - space} step{'s' if num_steps - space > 1 else ''} did not fit: {remedy}"
    return explain(where, f"room for {num_steps} steps", f"room for {space}", message)


def _fill_replay(where: str, replay: ReplayBuffer, blocks: Iterable[EpisodeBlock]) -> int:
    """Add the steps; return the number of them that are still stored at the end."""
    old_heads = replay.storage.ring.head.clone()
    num_steps = [0] * (replay.num_envs or 1)
    env: int | None = None

    def env_ids() -> list[int] | None:
        return None if replay.num_envs is None else [env or 0]

    try:
        for block in blocks:
            env = num_steps.index(min(num_steps)) if env is None else env
            num_steps[env] += len(block)
            batch = block.steps if replay.num_envs is None else slice_leaves(block.steps, (slice(None), None))
            replay.extend(batch, env_ids=env_ids())
            if block.is_last:
                replay.cut(env_ids())
                env = None
    finally:
        # The episode is cut after an error inside it, because later steps must not continue it.
        if env is not None:
            replay.cut(env_ids())
    if int((replay.storage.ring.head - old_heads).max()) <= replay.capacity // len(num_steps):
        # No ring has wrapped around, so every added step is still stored.
        return sum(num_steps)
    row, column = replay.ids() // len(num_steps), replay.ids() % len(num_steps)
    return int((row >= old_heads[column]).sum())


def _fill_rollout(where: str, rollout: RolloutBuffer, blocks: Iterable[EpisodeBlock]) -> int:
    old_num_stored = rollout.num_stored
    if rollout.num_envs is not None:
        remedy = "Make it with num_envs=None: episodes are read one after the other."
        raise dataset_error(where, "a rollout with num_envs=None", rollout.num_envs, remedy)
    for block in blocks:
        terminated, truncated = block.steps["terminated"], block.steps["truncated"]
        if block.is_last and not (terminated[-1] or truncated[-1]):
            remedy, got = "Read the dataset into a ReplayBuffer.", "an episode without an end"
            raise dataset_error(block.where, "terminated or truncated at its last step", got, remedy)
        for t in range(len(block)):
            step = slice_leaves(block.steps, t)
            next_obs = step.pop("next_obs")
            rollout.add(**step, final_obs=next_obs if truncated[t] else None)
    return rollout.num_stored - old_num_stored


def _fill_distillation(where: str, buffer: DistillationBuffer, blocks: Iterable[EpisodeBlock]) -> int:
    ring = buffer._ring
    old_head = ring.head
    fields = {"obs", "action", *declared_fields(buffer)}
    for block in blocks:
        buffer.add(**{field: values for field, values in block.steps.items() if field in fields})
    return ring.head - max(ring.oldest_row, old_head)
