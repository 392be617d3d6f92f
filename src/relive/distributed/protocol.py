"""Definitions that clients and shards share: the plan of a service, ids of rows, blocks of steps, and messages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from os import PathLike, fspath
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import relive
from relive.concurrent.processes import Handle
from relive.errors import SchemaError, explain
from relive.replay.buffer import ReplayBuffer
from relive.replay.samplers import Prioritized, Sampler, Uniform
from relive.replay.samplers.registry import make_sampler_config
from relive.schema.autoreset import parse_autoreset_mode
from relive.schema.checks import check_above_zero, check_positive_int
from relive.schema.conversion import convert, path_name
from relive.schema.fields import Field, Schema, caller_shape, declaration_to_json, declare_fields, make_replay_schema
from relive.schema.fields import Path as FieldPath
from relive.storage import Memory
from relive.storage.allocator import supports_persistent_memory

_HOST = torch.device("cpu")


@dataclass(frozen=True)
class Checkpoint:
    """The folder and the interval of a service's checkpoints; a restarted shard continues from its newest one.

    A shard saves after a push if `seconds` or `rows` steps have passed since its last save, and on `save()`.

    Args:
        path: a folder that all machines of the service can access.
        seconds: time between saves, in seconds.
        rows: number of steps between saves; None does not count steps.
        keep: number of newest checkpoints to keep.
    """

    path: str | PathLike[str]
    seconds: float = 60.0
    rows: int | None = None
    keep: int = 2

    def __post_init__(self) -> None:
        check_above_zero("Checkpoint.seconds", self.seconds, "Pass a number above 0.")
        if self.rows is not None:
            check_positive_int("Checkpoint.rows", self.rows)
        check_positive_int("Checkpoint.keep", self.keep)

    def shard_folder(self, shard: int) -> Path:
        return Path(fspath(self.path)).absolute() / f"shard-{shard}"


@dataclass(frozen=True)
class ServicePlan:
    """The settings of a service, equal in every shard and client."""

    capacity: int
    obs: Any
    action: Any
    reward: Any
    extra: Mapping[str, Any]
    num_envs: int
    num_shards: int
    sampler: Sampler
    autoreset: Any
    checkpoint: Checkpoint | None
    seed: int | None

    def __post_init__(self) -> None:
        check_positive_int("num_envs", self.num_envs)
        if check_positive_int("num_shards", self.num_shards) > self.num_envs:
            remedy = "Start fewer shards: each environment belongs to one shard."
            raise SchemaError(explain("num_shards", f"at most num_envs={self.num_envs}", self.num_shards, remedy))
        if not isinstance(self.sampler, Uniform | Prioritized):
            remedy = "Pass one of these: other samplers cannot be split across shards."
            raise SchemaError(explain("sampler", "Uniform(…) or Prioritized(…)", repr(self.sampler), remedy))
        # A buffer is made on the meta device, to check the other arguments without allocating memory.
        self._make_replay_buffer(self.capacity, self.num_envs, self.sampler, "meta")

    def _make_replay_buffer(
        self, capacity: int, num_envs: int, sampler: Sampler, device: Any, seed: int | None = None
    ) -> ReplayBuffer:
        return ReplayBuffer(
            capacity, self.obs, self.action, num_envs=num_envs, reward=self.reward, extra=self.extra, sampler=sampler,
            device=device, autoreset=self.autoreset, seed=seed,
        )  # fmt: skip

    @cached_property
    def schema(self) -> Schema:
        """Schema of the rows."""
        return make_replay_schema(self.obs, self.action, self.reward, self.extra)

    @cached_property
    def _caller_fields(self) -> list[tuple[str, Field]]:
        return [
            (path_name(path), Field(caller_shape(field), field.dtype))
            for path, field in zip(self.schema.paths, self.schema.fields, strict=True)
        ]

    def convert(self, leaf_index: int, leaf: Any, leading_shape: tuple[int, ...], prefix: str = "") -> torch.Tensor:
        """Convert a caller's value of a leaf to a tensor [*leading_shape, …] of its field."""
        name, field = self._caller_fields[leaf_index]
        return convert(prefix + name, field, leaf, leading_shape, _HOST)

    def envs_of_shard(self, shard: int) -> range:
        """Return the environments of a shard. They are consecutive, so that most actors write to a single shard."""
        first, stop = (number * self.num_envs // self.num_shards for number in (shard, shard + 1))
        return range(first, stop)

    def find_shards(self, env: np.ndarray) -> np.ndarray:
        """Return the shard of each environment in `env` [k]."""
        return ((env + 1) * self.num_shards - 1) // self.num_envs

    @property
    def shard_sampler(self) -> Sampler:
        """Sampler of a shard, with beta=0, because the client computes weights from the rows of all shards."""
        return replace(self.sampler, beta=0.0) if isinstance(self.sampler, Prioritized) else self.sampler

    def make_buffer(self, shard: int) -> ReplayBuffer:
        """Return an empty buffer for the environments of a shard."""
        envs, seed = len(self.envs_of_shard(shard)), self.derive_seed(shard)
        rows = self.capacity // self.num_envs
        return self._make_replay_buffer(rows * envs, envs, self.shard_sampler, self.shard_memory, seed)

    @property
    def shard_memory(self) -> Memory:
        """Memory of a shard: shared memory if the machine supports it."""
        return Memory.shared() if supports_persistent_memory() else Memory.of("cpu")

    def derive_seed(self, number: int) -> int | None:
        """Return the seed of the shard `number`; with the number `num_shards`, return the seed of the client."""
        if self.seed is None:
            return None
        return int(np.random.SeedSequence([self.seed, number]).generate_state(1, np.uint64)[0] >> 1)

    def describe_settings(self) -> dict[str, Any]:
        """Return the plan as plain data, which clients and restarted shards compare with their own plan."""
        settings = {name: getattr(self, name) for name in _COMPARED_SETTINGS}
        return {"relive": relive.__version__, **to_plain_data(settings)}


_COMPARED_SETTINGS = ("capacity", "num_envs", "num_shards", "obs", "action", "reward", "extra", "sampler", "autoreset")


def to_plain_data(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Convert arguments of a service to plain data; raises if one is unknown."""
    unknown_names = set(arguments) - set(_COMPARED_SETTINGS)
    if unknown_names:
        remedy = f"Pass only {', '.join(_COMPARED_SETTINGS)}."
        raise SchemaError(explain("connect", "arguments of a service", sorted(unknown_names), remedy))
    return {name: _to_plain_value(name, value) for name, value in arguments.items()}


def _to_plain_value(name: str, value: Any) -> Any:
    if name in ("obs", "action", "reward"):
        return declaration_to_json(declare_fields(name, value))
    if name == "extra":
        return {key: declaration_to_json(declare_fields(f"extra.{key}", part)) for key, part in (value or {}).items()}
    if name == "sampler":
        return make_sampler_config(value) or type(value).__name__
    if name == "autoreset":
        mode = parse_autoreset_mode(value)
        return None if mode is None else mode.name
    return value


def describe_difference(expected: Mapping[str, Any], actual: Mapping[str, Any]) -> str:
    """Return the differences between two descriptions as text; empty if they are equal."""
    return "; ".join(
        f"{name} {expected.get(name, 'nothing')!r} against {actual.get(name, 'nothing')!r}"
        for name in {**expected, **actual}
        if expected.get(name) != actual.get(name)
    )


ROWS_PER_LIFE = 1 << 32
"""Maximum number of rows per environment between two restarts of a shard; it keeps the ids of its lives apart."""


class ShardIds:
    """The ids of one shard: (row + life · 2^32) · num_envs + env. A life of a shard ends when its process restarts.

    In a shard's first life its ids equal the ids of a single buffer. A shard that restarts from a checkpoint reuses the
    row numbers of lost rows; the number of its life distinguishes the new rows.
    """

    def __init__(self, envs: range, num_envs: int, starts: np.ndarray, life: int) -> None:
        self.starts = starts
        """First row of each environment in each stored life [lives, envs]; a life ends where the next life starts."""
        self.life = life
        """Number of the newest life."""
        self._envs, self._num_envs = envs, num_envs
        if (life + 1) * ROWS_PER_LIFE * num_envs >= 1 << 63:
            raise OverflowError(explain("index", "ids below 2^63", f"{life} restarts", "Start a new service."))

    def begin_life(self, head: np.ndarray, oldest: np.ndarray) -> ShardIds:
        """Return ids with a new life that starts at row `head` [envs], and drop lives that end before row `oldest`."""
        starts = np.concatenate([self.starts, head[None]])
        num_expired = int((starts[1:] <= oldest).all(1).sum())
        return ShardIds(self._envs, self._num_envs, starts[num_expired:], self.life + 1)

    def to_service_ids(self, ids: np.ndarray) -> np.ndarray:
        """Return ids of the service for ids [B] of the shard's buffer."""
        row, env = np.divmod(ids, len(self._envs))
        num_begun = (self.starts[:, env] <= row).sum(0)
        life = self.life - len(self.starts) + num_begun
        return (row + life * ROWS_PER_LIFE) * self._num_envs + env + self._envs.start

    def to_shard_ids(self, ids: np.ndarray, head: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return ids of the shard's buffer for ids [B] of the service, and a mask of rows that were not lost."""
        rows, env = np.divmod(ids, self._num_envs)
        env = env - self._envs.start
        life, row = np.divmod(rows, ROWS_PER_LIFE)
        buffer_ids = row * len(self._envs) + env
        is_outside = (row >= head[env]) | (row < self.starts[-1, env])
        is_unissued = (ids < 0) | (life > self.life) | ((life == self.life) & is_outside)
        if is_unissued.any():
            remedy = "Pass ids from batch['index']."
            raise IndexError(explain("index", "the id of a stored transition", int(ids[is_unissued][0]), remedy))
        return buffer_ids, (row < head[env]) & (self.to_service_ids(buffer_ids) == ids)


_BFLOAT16 = np.dtype("V2")
"""The dtype of arrays of bfloat16: two raw bytes, because numpy lacks bfloat16."""


class StepBlock(NamedTuple):
    """T steps of k environments, with every observation once: next observations are stored only at `breaks`."""

    leaves: list[np.ndarray]
    """Leaves in the schema's order: observations [T + 1, k, …], all others [T, k, …]."""
    breaks: np.ndarray
    """Steps t · k + e whose next observation differs from the observation of the following step, int64 [M]."""
    next_obs: list[np.ndarray]
    """Leaves of the next observations at `breaks` [M, …]."""

    @property
    def nbytes(self) -> int:
        """Number of bytes of all arrays."""
        return sum(array.nbytes for array in (*self.leaves, self.breaks, *self.next_obs))


def pack_block(schema: Schema, leaves: Sequence[torch.Tensor], next_leaves: Sequence[torch.Tensor]) -> StepBlock:
    """Copy converted leaves and next observations [T, k, …] into a block."""
    arrays = [as_shared_array(leaf) for leaf in leaves]
    next_arrays = [as_shared_array(leaf) for leaf in next_leaves]
    obs_leaves = schema.leaf_indices["obs"]
    is_break = np.zeros(arrays[0].shape[:2], np.bool_)
    for i, next_array in zip(obs_leaves, next_arrays, strict=True):
        is_break[:-1] |= _find_differing_rows(arrays[i][1:], next_array[:-1])
    breaks = np.flatnonzero(is_break)
    next_obs = [array.reshape(-1, *array.shape[2:])[breaks] for array in next_arrays]
    for i, next_array in zip(obs_leaves, next_arrays, strict=True):
        arrays[i] = np.concatenate([arrays[i], next_array[-1:]])
    return StepBlock([array if i in obs_leaves else array.copy() for i, array in enumerate(arrays)], breaks, next_obs)


def unpack_block(schema: Schema, block: StepBlock) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the leaves and the next observations of a block as arguments of `ReplayBuffer._write`."""
    arrays, next_leaves = list(block.leaves), []
    for i, next_obs in zip(schema.leaf_indices["obs"], block.next_obs, strict=True):
        next_array = arrays[i][1:]
        if len(block.breaks):
            next_array = next_array.copy()
            next_array.reshape(-1, *next_array.shape[2:])[block.breaks] = next_obs
        arrays[i] = arrays[i][:-1]
        next_leaves.append(next_array)
    return tuple(map(_restore_bfloat16, arrays)), tuple(map(_restore_bfloat16, next_leaves))


def as_shared_array(tensor: torch.Tensor) -> np.ndarray:
    """Return an array that shares the memory of a host tensor."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(_BFLOAT16)
    return tensor.numpy()


def concatenate_arrays(arrays: Sequence[np.ndarray]) -> torch.Tensor:
    """Concatenate arrays [b, …] into a new tensor."""
    array = np.concatenate(arrays)
    if array.dtype == _BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def concatenate_parts(parts: Sequence[np.ndarray | torch.Tensor]) -> torch.Tensor:
    """Concatenate arrays and tensors [b, …] of a batch into one tensor; a single tensor is not copied."""
    arrays = [part for part in parts if isinstance(part, np.ndarray)]
    if len(arrays) == len(parts):
        return concatenate_arrays(arrays)
    tensors = [concatenate_arrays([part]) if isinstance(part, np.ndarray) else part for part in parts]
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _restore_bfloat16(array: np.ndarray) -> torch.Tensor | np.ndarray:
    return concatenate_arrays([array]) if array.dtype == _BFLOAT16 else array


def _find_differing_rows(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return a mask [T, k] of the rows [T, k, …] whose bytes differ: NaN equals itself, and 0.0 differs from -0.0."""
    size = a.itemsize * math.prod(a.shape[2:])
    # Rows are compared in words that are as wide as the size of a row allows.
    width = next(width for width in (8, 4, 2, 1) if size % width == 0)

    def words(x: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(x).reshape(-1).view(f"u{width}").reshape(*x.shape[:2], size // width)

    return (words(a) != words(b)).any(-1)


class ShardTotals(NamedTuple):
    """The numbers of a shard that sampling from all shards needs."""

    rows: int
    """Number of stored transitions."""
    mass: tuple[float, int]
    """Sum of the shard's priorities as (m, e), meaning m · 2^e. Shards are drawn in proportion to this sum."""
    smallest_mass: float
    """Smallest mass of a row in the shard."""
    num_drawn: int
    """Number of rows drawn from the shard so far."""


class ShardDraw(NamedTuple):
    """The rows of a batch that come from one shard."""

    totals: ShardTotals
    """Numbers of the shard before the draw."""
    leaves: dict[FieldPath, Any]
    """Tensors [B, …], or arrays if the shard is in another process."""
    masses: np.ndarray | None
    """Priority of each row, float64 [B]; None for uniform draws."""


class Push(NamedTuple):
    """A block of a client, and its position in the client's stream."""

    position: int
    """Number of rows in earlier blocks of the client."""
    envs: np.ndarray
    """Environments of the block [k], numbered within the shard."""
    block: StepBlock
    cut_envs: np.ndarray
    """Environments whose rows begin a new episode, numbered within the shard."""

    @property
    def num_rows(self) -> int:
        """Number of rows in the block."""
        return (len(self.block.leaves[0]) - 1) * len(self.envs)

    @property
    def end_position(self) -> int:
        """Number of rows in this block and all earlier blocks of the client."""
        return self.position + self.num_rows


class PushAck(NamedTuple):
    """A shard's answer to a client: the state of the client's stream of blocks."""

    num_stored: int
    """Number of the client's rows that the shard has stored."""
    num_saved: int
    """Number of the client's rows in the newest checkpoint; in a service without checkpoints, equal to `num_stored`."""
    num_lost: int = 0
    """Number of rows that a restart has lost and that the client has not kept."""
    write_error: Exception | None = None
    """Error of a block that the buffer refused."""
    warnings: tuple[str, ...] = ()
    """Warnings about stored data that looks like a mistake."""
    save_error: str | None = None
    """Reason why the shard cannot write checkpoints; sent once to each client."""


class MemoryLocation(NamedTuple):
    """The process of a shard, and the handle with which other processes of the machine open the shard's memory."""

    process: int
    handle: Handle
    ids: ShardIds
