"""Fields of a step, their declarations, and the schema: the named fields of a buffer in a fixed order."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias, cast

import gymnasium as gym
import numpy as np
import torch

from relive import lazy
from relive.errors import IncompatibleCheckpoint, SchemaError, explain
from relive.schema.checks import check_choice, check_device_available, check_int, check_keys, type_name
from relive.schema.suggestions import NAME_PATTERN, suggest_field_remedy

DTYPES: dict[torch.dtype, np.dtype | None] = {
    torch.bool: np.dtype(np.bool_),
    torch.uint8: np.dtype(np.uint8),
    torch.uint16: np.dtype(np.uint16),
    torch.uint32: np.dtype(np.uint32),
    torch.uint64: np.dtype(np.uint64),
    torch.int8: np.dtype(np.int8),
    torch.int16: np.dtype(np.int16),
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: None,
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.complex64: np.dtype(np.complex64),
    torch.complex128: np.dtype(np.complex128),
}
"""Dtypes that a field may have, with their numpy equivalents; numpy has no bfloat16."""

MAX_NESTING = 64
"""Maximum number of names on the path to a leaf."""

_PAD_MODES = ("repeat", "zero")
DTYPES_FROM_NUMPY = {numpy_dtype: dtype for dtype, numpy_dtype in DTYPES.items() if numpy_dtype is not None}
"""Dtypes that a field may have, by their numpy equivalents."""

_DTYPE_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in DTYPES}
DTYPES_BY_NAME = {name: dtype for dtype, name in _DTYPE_NAMES.items()}
"""Dtypes that a field may have, by their names in files."""
_DEVICE_PATTERN = re.compile(r"[a-z]{1,32}(:[0-9]{1,3})?")

Path: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, init=False)
class Field:
    """One leaf of one environment's step.

    Args:
        shape: the shape in one environment, an int for one axis; one number by default.
        dtype: a dtype of torch or numpy.

    >>> Field(3)
    Field(shape=(3,), dtype=torch.float32)
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __init__(self, shape: int | Sequence[int] = (), dtype: torch.dtype | np.dtype | type = torch.float32) -> None:
        name, sizes = type(self).__name__, (shape,) if isinstance(shape, int | np.integer) else shape
        object.__setattr__(self, "shape", _parse_shape(name, sizes))
        object.__setattr__(self, "dtype", _parse_dtype(name, dtype))

    def config(self) -> list[Any]:
        """Return the declaration as JSON: class, shape, dtype and the settings of the class."""
        return [type(self).__name__.lower(), list(self.shape), dtype_name(self.dtype), *self.settings()]

    def settings(self) -> list[Any]:
        """Return the settings of the class, without shape and dtype, as JSON; the inverse of `_restore_field`."""
        return []


@dataclass(frozen=True, init=False)
class Carry(Field):
    """A field that sequences return only at their start: the hidden state of a recurrent policy."""

    def settings(self) -> list[Any]:
        # Files contain the number of steps between two stored states, which is always 1.
        return [1]


@dataclass(frozen=True, init=False)
class Stacked(Field):
    """k frames stacked along `axis`, stored as single frames and rebuilt when they are sampled.

    A rollout buffer stores the stacks as they are.

    Args:
        field: one frame.
        k: the number of frames in one observation, at least 2.
        axis: the axis of the observation along which the frames are stacked, oldest first.
        pad: the frames before an episode's first frame: that frame again ("repeat") or zeros ("zero").

    >>> Stacked(Field((84, 84), torch.uint8), 4)
    Stacked(shape=(84, 84), dtype=torch.uint8, k=4, axis=2, pad='repeat')
    """

    k: int
    axis: int
    pad: str

    def __init__(self, field: Declaration, k: int, axis: int = -1, pad: str = "repeat") -> None:
        frame = declare_fields("Stacked", field)
        if not isinstance(frame, Field) or type(frame) is not Field:
            raise SchemaError(explain("Stacked", "one plain field", frame, "Stack the leaves of a dict one by one."))
        super().__init__(frame.shape, frame.dtype)
        ndim = len(frame.shape) + 1
        if isinstance(axis, bool) or not isinstance(axis, int) or not -ndim <= axis < ndim:
            expected = f"an axis from {-ndim} to {ndim - 1}"
            raise SchemaError(explain("Stacked", expected, repr(axis), "Pass the axis of the frames."))
        object.__setattr__(self, "k", check_int("Stacked.k", k, min=2, remedy="For one frame, declare a plain Field."))
        object.__setattr__(self, "axis", axis % ndim)
        object.__setattr__(self, "pad", check_choice("Stacked.pad", pad, _PAD_MODES))

    def settings(self) -> list[Any]:
        return [self.k, self.axis, self.pad]


@dataclass(frozen=True, init=False)
class Mutable(Field):
    """A field that `ReplayBuffer.write` may overwrite, such as latent states or relabelled rewards.

    Any leaf can be mutable except those of the observation, which is also the next observation of another row.
    Checkpoints save all rows of mutable fields each time, and every row of other fields once.

    Args:
        field: a shape, a `Field` or a `Carry`. Declare the leaves of a dict one by one.

    >>> Mutable(32)
    Mutable(shape=(32,), dtype=torch.float32, field=Field(shape=(32,), dtype=torch.float32))
    """

    field: Field

    def __init__(self, field: Declaration) -> None:
        inner = declare_fields("Mutable", field)
        if type(inner) not in (Field, Carry):
            got = "a dict" if isinstance(inner, dict) else inner
            remedy = "Declare the leaves of a dict as Mutable one by one."
            raise SchemaError(explain("Mutable", "one Field or Carry", got, remedy))
        assert isinstance(inner, Field)
        super().__init__(inner.shape, inner.dtype)
        object.__setattr__(self, "field", inner)

    def settings(self) -> list[Any]:
        kind, _, _, *settings = self.field.config()
        return [kind, *settings]


def narrow_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for data without a declared dtype: float32 for float64, to halve the memory."""
    return torch.float32 if dtype == torch.float64 else dtype


def caller_shape(field: Field) -> tuple[int, ...]:
    """Return the shape that callers pass and receive; the shape of a stacked field has an axis of frames."""
    if not isinstance(field, Stacked):
        return field.shape
    return (*field.shape[: field.axis], field.k, *field.shape[field.axis :])


def caller_field(field: Field) -> Field:
    """Return the field as callers pass it: a stacked field becomes a plain field with an axis of frames."""
    return Field(caller_shape(field), field.dtype) if isinstance(field, Stacked) else field


def is_initial_state(field: Field) -> bool:
    """Whether sequences return a field only at their start."""
    return isinstance(field.field if isinstance(field, Mutable) else field, Carry)


Tree: TypeAlias = "Field | dict[str, Tree]"
Declaration: TypeAlias = Field | int | tuple[Any, ...] | gym.Space[Any] | Mapping[str, Any]


def _parse_shape(where: str, shape: object) -> tuple[int, ...]:
    if isinstance(shape, str) or not isinstance(shape, Sequence):
        raise SchemaError(explain(where, "a shape", repr(shape), "Pass an int or a tuple of ints."))
    sizes = tuple(shape)
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 1:
            raise SchemaError(explain(where, "a shape of positive ints", sizes, "Pass an int or a tuple of ints."))
    return tuple(int(size) for size in sizes)


def _parse_dtype(where: str, dtype: object) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        torch_dtype = dtype if dtype in DTYPES else None
    else:
        try:
            torch_dtype = DTYPES_FROM_NUMPY.get(np.dtype(cast(Any, dtype)))
        except TypeError:
            torch_dtype = None
    if torch_dtype is None:
        names = ", ".join(DTYPES_BY_NAME)
        raise SchemaError(explain(where, f"one of the dtypes {names}", dtype, "Pass a torch dtype."))
    return torch_dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in files and messages."""
    return _DTYPE_NAMES[dtype]


FLAG_FIELD, NUMBER_FIELD = Field((), torch.bool), Field((), torch.float64)


def declare_fields(where: str, declaration: object) -> Tree:
    """Return the field, or dict of fields, of a declaration.

    A declaration is a Field, an int, a shape, a Gymnasium space, or a nested dict or tuple of these.
    """
    if isinstance(declaration, Field):
        return declaration
    if isinstance(declaration, gym.Space):
        return _declare_from_space(where, declaration)
    if isinstance(declaration, int | np.integer) and not isinstance(declaration, bool):
        return Field(_parse_shape(where, (declaration,)))
    if isinstance(declaration, Mapping):
        if not declaration:
            raise SchemaError(explain(where, "at least one field", "an empty dict", "Declare a field or leave it out."))
        return {_parse_name(where, key): declare_fields(f"{where}.{key}", value) for key, value in declaration.items()}
    if isinstance(declaration, tuple):
        if all(isinstance(size, int | np.integer) for size in declaration):
            return Field(_parse_shape(where, declaration))
        return {str(i): declare_fields(f"{where}.{i}", value) for i, value in enumerate(declaration)}
    expected = "a Field, an int, a shape, a space, a dict or a tuple"
    remedy = "Declare the field as one of these."
    if isinstance(declaration, type) and issubclass(declaration, Field):
        remedy = f"Pass {declaration.__name__}(shape)."
    raise SchemaError(explain(where, expected, repr(declaration), remedy))


def declare_caller_fields(where: str, declaration: object) -> Tree:
    """Declare fields of a buffer that stores whole stacks: every stacked field becomes a plain field."""
    return map_leaves(caller_field, declare_fields(where, declaration))


def declare_float_fields(where: str, declaration: object) -> Tree:
    """Declare a reward or a value: a floating-point field, or a dict with a field per agent."""
    tree = declare_fields(where, declaration)
    for path, field in iter_leaves((where,), tree):
        if not field.dtype.is_floating_point:
            raise SchemaError(explain(".".join(path), "a floating-point field", field, "Pass a floating-point dtype."))
    return tree


def _parse_name(where: str, key: object) -> str:
    if not isinstance(key, str) or not key:
        raise SchemaError(explain(where, "field names that are strings", repr(key), "Rename the field."))
    return key


def _declare_from_space(where: str, space: gym.Space[Any]) -> Tree:
    spaces = gym.spaces
    if isinstance(space, spaces.Dict):
        return declare_fields(where, dict(space.spaces))
    if isinstance(space, spaces.Tuple):
        return {str(i): declare_fields(f"{where}.{i}", part) for i, part in enumerate(space.spaces)}
    if isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        return Field(space.shape or (), narrow_dtype(_parse_dtype(where, space.dtype)))
    expected = "a Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple space"
    remedy = "Wrap the environment so that its observations have a fixed shape."
    raise SchemaError(explain(where, expected, type(space).__name__, remedy))


def declaration_to_json(tree: Tree) -> Any:
    """Return a declaration as JSON: a list per leaf, an object per dict."""
    if isinstance(tree, dict):
        return {name: declaration_to_json(child) for name, child in tree.items()}
    return tree.config()


def parse_declaration(node: lazy.JsonNode) -> Tree:
    """Read a declaration from the JSON of `declaration_to_json`; raise a CorruptCheckpoint if it is invalid."""
    if isinstance(node.value, dict):
        if not node.value:
            raise node.error("at least one field")
        return {name: parse_declaration(child) for name, child in node.entries().items()}
    parts = node.items(8)
    if not parts:
        raise node.error("a field")
    kind = parts[0].one_of(("field", "carry", "stacked", "mutable"))
    if len(parts) < 3:
        raise node.error("a kind, a shape and a dtype")
    shape, dtype = parts[1].shape(), DTYPES_BY_NAME[parts[2].one_of(DTYPES_BY_NAME)]
    if any(size < 1 for size in shape):
        raise parts[1].error("positive sizes")
    try:
        return _restore_field(kind, Field(shape, dtype), parts[3:])
    # The settings are unpacked, so a wrong number of them raises a ValueError.
    except ValueError as error:
        raise node.error(f"the settings of a {kind.capitalize()} ({error})") from None


def _restore_field(kind: str, plain: Field, settings: list[lazy.JsonNode]) -> Field:
    """Make a field with the shape and dtype of `plain` from its class name in files and its settings."""
    if kind == "carry":
        (steps,) = settings
        if steps.integer(1) > 1:
            got = f"one every {steps.value} steps"
            remedy = "Load it with the version that saved it: a state of every step is stored since."
            raise IncompatibleCheckpoint(explain("Carry", "a state of every step", got, remedy))
        return Carry(plain.shape, plain.dtype)
    if kind == "stacked":
        k, axis, pad = settings
        return Stacked(plain, k.integer(2, 1 << 16), axis.integer(0, len(plain.shape)), pad.one_of(_PAD_MODES))
    if kind == "mutable":
        inner_kind, *rest = settings
        return Mutable(_restore_field(inner_kind.one_of(("field", "carry")), plain, rest))
    if settings:
        raise settings[0].error("no further setting")
    return plain


class Schema:
    """The declared fields by name, and the flat order of their leaves for storage and kernels."""

    def __init__(self, trees: Mapping[str, Tree]) -> None:
        self.trees = dict(trees)
        self.names = tuple(self.trees)
        self.paths: tuple[Path, ...] = ()
        self.fields: tuple[Field, ...] = ()
        self.leaf_indices: dict[str, tuple[int, ...]] = {}
        """Indices of the leaves of each field."""
        for name, tree in self.trees.items():
            leaves = tuple(iter_leaves((name,), tree))
            check_path_names(path for path, _ in leaves)
            self.leaf_indices[name] = tuple(range(len(self.paths), len(self.paths) + len(leaves)))
            self.paths += tuple(path for path, _ in leaves)
            self.fields += tuple(field for _, field in leaves)
        self.is_flat = all(isinstance(tree, Field) for tree in self.trees.values())
        """Whether no field is nested, so that the value of every field is its only leaf."""

    def config(self) -> dict[str, Any]:
        """Return the declarations by name, as JSON."""
        return {name: declaration_to_json(tree) for name, tree in self.trees.items()}

    @property
    def max_stack_frames(self) -> int:
        """Number of frames of the largest stack; 1 without stacked fields."""
        return max((field.k for field in self.fields if isinstance(field, Stacked)), default=1)

    def check_declared(self, name: str) -> None:
        """Raise if `name` was not declared."""
        if name not in self.leaf_indices:
            remedy = suggest_field_remedy(name, (*self.names, "next_obs"))
            raise SchemaError(explain(name, f"a declared field ({', '.join(self.names)})", name, remedy))

    def flatten(self, name: str, value: Any, where: str = "") -> tuple[Any, ...]:
        """Flatten the value of the field `name` to leaves; None is flattened to None for every leaf.

        Error messages name the value `where`, by default `name`.
        """
        tree = self.trees[name]
        if isinstance(tree, Field):
            return (value,)
        if value is None:
            return (None,) * len(self.leaf_indices[name])
        return tuple(_flatten_value(where or name, tree, value))


def iter_leaves(path: Path, tree: Any) -> Iterable[tuple[Path, Any]]:
    """Yield (path, leaf) for every leaf of nested dicts."""
    if not isinstance(tree, Mapping):
        yield path, tree
        return
    for key, child in tree.items():
        yield from iter_leaves((*path, key), child)


def map_leaves(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Apply `function` to the corresponding leaves of `tree` and `others`; return nested dicts like `tree`."""
    if not isinstance(tree, dict):
        return function(tree, *others)
    return {name: map_leaves(function, part, *(other[name] for other in others)) for name, part in tree.items()}


def named_leaves(name: str, tree: Any) -> list[tuple[Path, Any]]:
    """List (path, leaf) of a caller's value; raise if it is empty or has invalid names."""
    leaves = list(iter_leaves((name,), tree))
    if not leaves:
        raise SchemaError(explain(name, "at least one field", "an empty dict", "Leave it out."))
    check_path_names(path for path, _ in leaves)
    return leaves


def check_path_names(paths: Iterable[Path]) -> None:
    """Raise if a name on a path is not allowed in files, or if a leaf is nested too deeply."""
    for path in paths:
        for depth, name in enumerate(path):
            if not isinstance(name, str) or not NAME_PATTERN.fullmatch(name):
                outer, _, inner = str(name).partition("/")
                remedy = f"Rename it{f', or nest it: {{{outer!r}: {{{inner!r}: …}}}}' if inner else ''}."
                where = ".".join(path[:depth]) or "field"
                raise SchemaError(explain(where, f"names like {NAME_PATTERN.pattern}, for files", repr(name), remedy))
        if len(path) > MAX_NESTING:
            expected = f"at most {MAX_NESTING} names around a field"
            raise SchemaError(explain(path[0], expected, len(path), "Nest fields less deeply."))


def _flatten_value(where: str, tree: Tree, value: Any) -> Iterable[Any]:
    if isinstance(tree, Field):
        if value is None:
            remedy = "Pass every leaf of the field, or leave out the whole field."
            raise SchemaError(explain(where, "a value", None, remedy))
        yield value
        return
    parts = {str(i): part for i, part in enumerate(value)} if isinstance(value, tuple | list) else value
    check_keys(where, parts, tree)
    for key, child in tree.items():
        yield from _flatten_value(f"{where}.{key}", child, parts[key])


def refuse_reserved_names(extra: Mapping[str, object], reserved: Collection[str]) -> None:
    """Raise unless `extra` is a dict of fields whose names the buffer itself does not use."""
    if not isinstance(extra, Mapping):
        raise SchemaError(explain("extra", "a dict of fields by name", type_name(extra), 'Pass {"name": shape}.'))
    for name in extra:
        if name in reserved:
            expected = f"other names than {', '.join(sorted(reserved))}, which are reserved"
            raise SchemaError(explain("extra", expected, repr(name), "Rename the field."))


# Every write calls this function, so its results are cached.
@lru_cache(maxsize=64)
def select_mutable_fields(schema: Schema) -> Schema:
    """Return the schema of the mutable leaves."""
    mutable_trees = {name: _select_mutable(tree) for name, tree in schema.trees.items()}
    return Schema({name: tree for name, tree in mutable_trees.items() if tree is not None})


def _select_mutable(tree: Tree) -> Tree | None:
    """Return the mutable leaves of a declaration; None without mutable leaves."""
    if isinstance(tree, Field):
        return tree if isinstance(tree, Mutable) else None
    mutable_children = {name: _select_mutable(child) for name, child in tree.items()}
    return {name: child for name, child in mutable_children.items() if child is not None} or None


def refuse_mutable_leaves(schema: Schema, names: Iterable[str], expected: str, remedy: str) -> None:
    """Raise if a leaf of one of the fields `names` is mutable."""
    for path in select_mutable_fields(schema).paths:
        if path[0] in names:
            raise SchemaError(explain(".".join(path), expected, "Mutable", remedy))


OPTIONAL_ROLLOUT_FIELDS = ("value", "log_prob")
"""Optional fields of a rollout: either all of its steps have a value of the field, or none of them."""

ROLLOUT_BATCH_FIELDS = ("mask", "index", "is_first", "batch_sizes")
"""Fields that a rollout adds to its batches."""

_RESERVED = ("obs", "action", "reward", "terminated", "truncated", "step", "self")
_RESERVED_IN_ROLLOUT = (*_RESERVED, *ROLLOUT_BATCH_FIELDS, "value", "advantage", "return", "final_obs")
_RESERVED_IN_REPLAY = (*_RESERVED, "next_obs", "mask", "index", "weight", "discount", "train", "is_first", "env_ids")


def make_rollout_schema(obs: Any, action: Any, reward: Any, value: Any, extra: Mapping[str, Any]) -> Schema:
    """Make the schema of a rollout: seven fixed fields, then the extra fields."""
    refuse_reserved_names(extra, _RESERVED_IN_ROLLOUT)
    rewards, values = declare_float_fields("reward", reward), declare_float_fields("value", value)
    extra_trees = {name: declare_caller_fields(f"extra.{name}", tree) for name, tree in extra.items()}
    log_prob = extra_trees.pop("log_prob", rewards)
    schema = Schema(
        {
            "obs": declare_caller_fields("obs", obs),
            "action": declare_caller_fields("action", action),
            "reward": rewards,
            "terminated": FLAG_FIELD,
            "truncated": FLAG_FIELD,
            "value": values,
            "log_prob": log_prob,
            **extra_trees,
        }
    )
    remedy = "Declare a plain field: rollout.attach gives the stored steps new fields."
    refuse_mutable_leaves(schema, schema.names, "a field that a rollout can store", remedy)
    return schema


def make_replay_schema(obs: Any, action: Any, reward: Any, extra: Mapping[str, Any]) -> Schema:
    """Make the schema of a replay buffer: five fixed fields, then the extra fields."""
    refuse_reserved_names(extra, _RESERVED_IN_REPLAY)
    return Schema(
        {
            "obs": declare_fields("obs", obs),
            "action": declare_fields("action", action),
            "reward": declare_float_fields("reward", reward),
            "terminated": FLAG_FIELD,
            "truncated": FLAG_FIELD,
            **{name: declare_fields(f"extra.{name}", declaration) for name, declaration in extra.items()},
        }
    )


def check_replay_settings(capacity: int, num_envs: int | None, next_obs: object, schema: Schema) -> None:
    """Raise if capacity is not divisible by num_envs, or if a field cannot be stored in a replay buffer."""
    if capacity % (num_envs or 1):
        remedy = f"Pass {capacity - capacity % (num_envs or 1) or num_envs}."
        raise SchemaError(explain("capacity", f"a multiple of num_envs={num_envs}", capacity, remedy))
    check_choice("next_obs", next_obs, ("shared", "stored"))
    for i, field in enumerate(schema.fields):
        if isinstance(field, Stacked) and (next_obs == "stored" or i not in schema.leaf_indices["obs"]):
            remedy = 'Use Stacked for leaves of obs only, with next_obs="shared".'
            raise SchemaError(explain(".".join(schema.paths[i]), "a plain Field", "Stacked", remedy))
    remedy = (
        "Declare a plain field: an observation is the next observation of another row. Put what changes into extra."
    )
    refuse_mutable_leaves(schema, ("obs",), "an observation that never changes", remedy)


def replay_nbytes(schema: Schema, capacity: int, num_envs: int, next_obs: str) -> int:
    """Return the number of bytes of the rows of a replay buffer."""
    rows = capacity // num_envs
    slots = (rows if next_obs == "stored" else rows + schema.max_stack_frames) * num_envs
    sizes = [math.prod(field.shape) * field.dtype.itemsize for field in schema.fields]
    next_obs_bytes = sum(sizes[i] for i in schema.leaf_indices["obs"]) if next_obs == "stored" else 0
    return slots * (sum(sizes) + next_obs_bytes + 2) + num_envs * 26


def parse_device(node: lazy.JsonNode) -> torch.device:
    """Read the device of a saved buffer; raise if this machine lacks it."""
    if node.text(_DEVICE_PATTERN).startswith("meta"):
        raise node.error("a device that holds data")
    check_device_available(node.value, IncompatibleCheckpoint)
    return torch.device(node.value)


def parse_path(node: lazy.JsonNode) -> Path:
    """Read the path of a leaf."""
    names = node.items(MAX_NESTING)
    if not names:
        raise node.error("at least one name")
    return tuple(name.text() for name in names)
