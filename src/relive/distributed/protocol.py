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
from relive.replay.samplers.registry import sampler_config
from relive.schema.autoreset import parse_autoreset
from relive.schema.checks import check_above_zero, check_positive_int
from relive.schema.conversion import convert, path_name
from relive.schema.fields import Field, Schema, caller_shape, declaration_config, declare, replay_schema
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
        seconds: the time between saves.
        rows: the number of steps between saves; None does not count steps.
        keep: the number of newest checkpoints to keep.
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
        """Return the folder of a shard."""
        return Path(fspath(self.path)).absolute() / f"shard-{shard}"


@dataclass(frozen=True)
class ServicePlan:
    """The settings of a service, the same in every shard and client."""

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
        # A buffer on the meta device, which has no memory, checks the other arguments.
        self._make(self.capacity, self.num_envs, self.sampler, "meta")

    def _make(self, capacity: int, num_envs: int, sampler: Sampler, device: Any, seed: int | None = None) -> Any:
        return ReplayBuffer(
            capacity,
            self.obs,
            self.action,
            num_envs=num_envs,
            reward=self.reward,
            extra=self.extra,
            sampler=sampler,
            device=Memory.of(device),
            autoreset=self.autoreset,
            seed=seed,
        )

    @cached_property
    def schema(self) -> Schema:
        """The schema of the rows."""
        return replay_schema(self.obs, self.action, self.reward, self.extra)

    @cached_property
    def _fields(self) -> list[tuple[str, Field]]:
        return [
            (path_name(path), Field(caller_shape(field), field.dtype))
            for path, field in zip(self.schema.paths, self.schema.fields, strict=True)
        ]

    def convert(self, leaf_index: int, leaf: Any, leading_shape: tuple[int, ...], prefix: str = "") -> torch.Tensor:
        """Convert a caller's value of a leaf to a tensor [*leading_shape, …] of its field."""
        name, field = self._fields[leaf_index]
        return convert(prefix + name, field, leaf, leading_shape, _HOST)

    def envs(self, shard: int) -> range:
        """Return the environments of a shard. They are consecutive, so that most actors write to a single shard."""
        first, stop = (number * self.num_envs // self.num_shards for number in (shard, shard + 1))
        return range(first, stop)

    def find_shards(self, env: np.ndarray) -> np.ndarray:
        """Return the shard of each environment in `env` [k]."""
        return ((env + 1) * self.num_shards - 1) // self.num_envs

    @property
    def shard_sampler(self) -> Sampler:
        """The sampler of a shard, with beta=0: the client computes the weights from the rows of all shards."""
        return replace(self.sampler, beta=0.0) if isinstance(self.sampler, Prioritized) else self.sampler

    def buffer(self, shard: int) -> ReplayBuffer:
        """Return an empty buffer for the environments of a shard."""
        envs = len(self.envs(shard))
        rows = self.capacity // self.num_envs
        return self._make(rows * envs, envs, self.shard_sampler, self.memory, self.derive_seed(shard))

    @property
    def memory(self) -> Memory:
        """The memory of a shard: shared memory where the machine supports it."""
        return Memory.shared() if supports_persistent_memory() else Memory.of("cpu")

    def derive_seed(self, part: int) -> int | None:
        """Return the seed of the shard `part`; `num_shards` gives the seed of the client."""
        if self.seed is None:
            return None
        return int(np.random.SeedSequence([self.seed, part]).generate_state(1, np.uint64)[0] >> 1)

    def describe(self) -> dict[str, Any]:
        """Return the plan as plain data, for clients and restarted shards to compare with their own."""
        return {"relive": relive.__version__, **to_plain({name: getattr(self, name) for name in _COMPARED_SETTINGS})}


_COMPARED_SETTINGS = ("capacity", "num_envs", "num_shards", "obs", "action", "reward", "extra", "sampler", "autoreset")


def to_plain(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Convert arguments of a service to plain data; raises if one is unknown."""
    unknown_names = set(arguments) - set(_COMPARED_SETTINGS)
    if unknown_names:
        remedy = f"Pass only {', '.join(_COMPARED_SETTINGS)}."
        raise SchemaError(explain("connect", "arguments of a service", sorted(unknown_names), remedy))
    return {name: _to_plain_value(name, value) for name, value in arguments.items()}


def _to_plain_value(name: str, value: Any) -> Any:
    if name in ("obs", "action", "reward"):
        return declaration_config(declare(name, value))
    if name == "extra":
        return {key: declaration_config(declare(f"extra.{key}", part)) for key, part in (value or {}).items()}
    if name == "sampler":
        return sampler_config(value) or type(value).__name__
    if name == "autoreset":
        mode = parse_autoreset(value)
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
    """The ids of one shard: (row + life · 2^32) · num_envs + env.

    In a shard's first life the ids equal those of a single buffer. A shard that restarts from a checkpoint reuses the
    row numbers of lost rows; the number of its life distinguishes the new rows.
    """

    def __init__(self, envs: range, num_envs: int, starts: np.ndarray, life: int) -> None:
        self.starts = starts
        """The first row of each environment in each stored life [lives, envs]; a life ends where the next starts."""
        self.life = life
        """The number of the newest life."""
        self._envs, self._num_envs = envs, num_envs
        if (life + 1) * ROWS_PER_LIFE * num_envs >= 1 << 63:
            raise OverflowError(explain("index", "ids below 2^63", f"{life} restarts", "Start a new service."))

    def after_restart(self, head: np.ndarray, oldest: np.ndarray) -> ShardIds:
        """Return the ids after a restart, with a new life from row `head` [envs], and without lives before `oldest`."""
        starts = np.concatenate([self.starts, head[None]])
        num_expired = int((starts[1:] <= oldest).all(1).sum())
        return ShardIds(self._envs, self._num_envs, starts[num_expired:], self.life + 1)

    def to_service(self, ids: np.ndarray) -> np.ndarray:
        """Convert ids [B] of the shard's buffer to ids of the service."""
        row, env = np.divmod(ids, len(self._envs))
        before = (self.starts[:, env] <= row).sum(0)
        life = self.life - len(self.starts) + before
        return (row + life * ROWS_PER_LIFE) * self._num_envs + env + self._envs.start

    def to_shard(self, ids: np.ndarray, head: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Convert ids [B] of the service to ids of the shard's buffer, with a mask of rows that were not lost."""
        rows, env = np.divmod(ids, self._num_envs)
        env = env - self._envs.start
        life, row = np.divmod(rows, ROWS_PER_LIFE)
        inside = row * len(self._envs) + env
        is_outside = (row >= head[env]) | (row < self.starts[-1, env])
        never_issued = (ids < 0) | (life > self.life) | ((life == self.life) & is_outside)
        if never_issued.any():
            remedy = "Pass ids from batch['index']."
            raise IndexError(explain("index", "the id of a stored transition", int(ids[never_issued][0]), remedy))
        return inside, (row < head[env]) & (self.to_service(inside) == ids)


_BFLOAT16 = np.dtype("V2")
"""The dtype of arrays of bfloat16, which numpy lacks: two raw bytes."""


class StepBlock(NamedTuple):
    """T steps of k environments. The next observation of a step is the observation of the step after it, except at
    `breaks`."""

    leaves: list[np.ndarray]
    """The leaves in the schema's order: observations [T + 1, k, …], all others [T, k, …]."""
    breaks: np.ndarray
    """The steps t · k + e whose next observation differs from the observation after them, int64 [M]."""
    next_obs: list[np.ndarray]
    """The leaves of the next observations at `breaks` [M, …]."""

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays."""
        return sum(array.nbytes for array in (*self.leaves, self.breaks, *self.next_obs))


def pack(schema: Schema, leaves: Sequence[torch.Tensor], next_leaves: Sequence[torch.Tensor]) -> StepBlock:
    """Copy converted leaves and next observations [T, k, …] into a block."""
    arrays = [to_array(leaf) for leaf in leaves]
    following = [to_array(leaf) for leaf in next_leaves]
    obs_leaves = schema.leaf_indices["obs"]
    is_break = np.zeros(arrays[0].shape[:2], np.bool_)
    for i, after in zip(obs_leaves, following, strict=True):
        is_break[:-1] |= _find_differing_rows(arrays[i][1:], after[:-1])
    breaks = np.flatnonzero(is_break)
    finals = [after.reshape(-1, *after.shape[2:])[breaks] for after in following]
    for i, after in zip(obs_leaves, following, strict=True):
        arrays[i] = np.concatenate([arrays[i], after[-1:]])
    return StepBlock([array if i in obs_leaves else array.copy() for i, array in enumerate(arrays)], breaks, finals)


def unpack(schema: Schema, block: StepBlock) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the leaves and the next observations of a block as arguments of `ReplayBuffer._write`."""
    arrays, next_leaves = list(block.leaves), []
    for i, finals in zip(schema.leaf_indices["obs"], block.next_obs, strict=True):
        after = arrays[i][1:]
        if len(block.breaks):
            after = after.copy()
            after.reshape(-1, *after.shape[2:])[block.breaks] = finals
        arrays[i] = arrays[i][:-1]
        next_leaves.append(after)
    return tuple(map(_restore_bfloat16, arrays)), tuple(map(_restore_bfloat16, next_leaves))


def to_array(tensor: torch.Tensor) -> np.ndarray:
    """Return an array that shares the memory of a host tensor."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(_BFLOAT16)
    return tensor.numpy()


def to_tensor(arrays: Sequence[np.ndarray]) -> torch.Tensor:
    """Concatenate arrays [b, …] into a new tensor."""
    array = np.concatenate(arrays)
    if array.dtype == _BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def concatenate_parts(parts: Sequence[np.ndarray | torch.Tensor]) -> torch.Tensor:
    """Concatenate parts of a batch [b, …] into one tensor; a single tensor is not copied."""
    arrays = [part for part in parts if isinstance(part, np.ndarray)]
    if len(arrays) == len(parts):
        return to_tensor(arrays)
    tensors = [to_tensor([part]) if isinstance(part, np.ndarray) else part for part in parts]
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _restore_bfloat16(array: np.ndarray) -> torch.Tensor | np.ndarray:
    return to_tensor([array]) if array.dtype == _BFLOAT16 else array


def _find_differing_rows(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return a mask of the rows [T, k, …] whose bytes differ: NaN equals itself, and 0.0 differs from -0.0."""
    size = a.itemsize * math.prod(a.shape[2:])
    width = next(width for width in (8, 4, 2, 1) if size % width == 0)  # compare words as wide as the row size allows

    def words(x: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(x).reshape(-1).view(f"u{width}").reshape(*x.shape[:2], size // width)

    return (words(a) != words(b)).any(-1)


# Messages between clients and shards


class ShardTotals(NamedTuple):
    """Figures of a shard that sampling across shards needs."""

    rows: int
    """The number of stored transitions."""
    mass: tuple[float, int]
    """The sum of the shard's priorities as (m, e), meaning m · 2^e; the shard is drawn in proportion to it."""
    smallest: float
    """The smallest priority in the shard."""
    drawn: int
    """The number of rows drawn from the shard so far."""


class Draw(NamedTuple):
    """The rows of a batch that come from one shard."""

    totals: ShardTotals
    """The shard's figures before the draw."""
    leaves: dict[FieldPath, Any]
    """Tensors [B, …], or arrays if the shard is in another process."""
    masses: np.ndarray | None
    """The priority of each row, float64 [B]; None for uniform draws."""


class Push(NamedTuple):
    """A block of a client, and its position in the client's stream."""

    position: int
    """The number of rows in earlier blocks of the client."""
    envs: np.ndarray
    """The environments of the block [k], numbered within the shard."""
    block: StepBlock
    cut: np.ndarray
    """The environments whose rows begin a new episode, numbered within the shard."""

    @property
    def rows(self) -> int:
        """The number of rows in the block."""
        return (len(self.block.leaves[0]) - 1) * len(self.envs)

    @property
    def end(self) -> int:
        """The number of rows in the blocks of the client up to and including this one."""
        return self.position + self.rows


class Ack(NamedTuple):
    """A shard's answer to a client: the state of the client's stream."""

    applied: int
    """The number of rows that the shard has."""
    durable: int
    """The number of rows that are saved in a checkpoint; in a service without checkpoints, the same as `applied`."""
    lost: int = 0
    """The number of rows that a restart has lost and that the client has not kept."""
    refused: Exception | None = None
    """The error of a block that the buffer refused."""
    warnings: tuple[str, ...] = ()
    """Warnings about stored data that looks like a mistake."""
    trouble: str | None = None
    """The reason why the shard cannot write checkpoints; sent once to each client."""


class MemoryLocation(NamedTuple):
    """The process of a shard, and the handle with which other processes of the machine open its memory."""

    process: int
    handle: Handle
    ids: ShardIds
