"""The plan of a replay service: its fields, its shards, and the environments of each shard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import numpy as np
import torch

import relive
from relive.errors import SchemaError, explain
from relive.fields.autoreset import parse_autoreset
from relive.fields.buffer_schemas import replay_schema
from relive.fields.checks import above_zero, positive
from relive.fields.conversion import convert, path_name
from relive.fields.schema import Field, Schema, caller_shape, config_of, declare
from relive.replay.buffer import ReplayBuffer
from relive.replay.samplers import Prioritized, Sampler, Uniform
from relive.replay.samplers.registry import config_of as sampler_config
from relive.storage import Memory
from relive.storage.shared import shares_memory

_HOST = torch.device("cpu")


@dataclass(frozen=True)
class Checkpoint:
    """Where and how often the shards of a service save themselves; a restarted shard continues from its checkpoint.

    A shard saves after a push if `seconds` have passed or `rows` steps have come since its last save, and on `save()`.

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
        above_zero("Checkpoint.seconds", self.seconds, "Pass a number above 0.")
        if self.rows is not None:
            positive("Checkpoint.rows", self.rows)
        positive("Checkpoint.keep", self.keep)

    def of_shard(self, shard: int) -> Path:
        """The folder of a shard."""
        return Path(fspath(self.path)).absolute() / f"shard-{shard}"


@dataclass(frozen=True)
class Plan:
    """The description that every shard and every client of a service has."""

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
        positive("num_envs", self.num_envs)
        if positive("num_shards", self.num_shards) > self.num_envs:
            remedy = "Start fewer shards: each environment belongs to one shard."
            raise SchemaError(explain("num_shards", f"at most num_envs={self.num_envs}", self.num_shards, remedy))
        if not isinstance(self.sampler, Uniform | Prioritized):
            remedy = "Pass one of these: other samplers cannot be split across shards."
            raise SchemaError(explain("sampler", "Uniform(…) or Prioritized(…)", repr(self.sampler), remedy))
        self._make(self.capacity, self.num_envs, self.sampler, "meta")  # a buffer without memory checks the rest

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

    def convert(self, leaf_index: int, leaf: Any, lead: tuple[int, ...], prefix: str = "") -> torch.Tensor:
        """A caller's value of a leaf as a tensor that fits its field [*lead, …]."""
        name, field = self._fields[leaf_index]
        return convert(prefix + name, field, leaf, lead, _HOST)

    @cached_property
    def first_envs(self) -> np.ndarray:
        """The first environment of each shard [S]; neighbours share a shard, so that an actor mostly writes to one."""
        return np.arange(self.num_shards) * self.num_envs // self.num_shards

    def envs(self, shard: int) -> range:
        """The environments of a shard."""
        first, stop = (number * self.num_envs // self.num_shards for number in (shard, shard + 1))
        return range(first, stop)

    def shard_of(self, env: np.ndarray) -> np.ndarray:
        """The shards of environments `env` [k]."""
        return np.searchsorted(self.first_envs, env, side="right") - 1

    @property
    def shard_sampler(self) -> Sampler:
        """The sampler of one shard: that of the service, without weights, which the client computes for all shards."""
        return replace(self.sampler, beta=0.0) if isinstance(self.sampler, Prioritized) else self.sampler

    def buffer(self, shard: int) -> ReplayBuffer:
        """An empty buffer for the environments of a shard."""
        envs = len(self.envs(shard))
        rows = self.capacity // self.num_envs
        return self._make(rows * envs, envs, self.shard_sampler, self.memory, self.seed_of(shard))

    @property
    def memory(self) -> Memory:
        """The memory of a shard: shared with other processes of its machine, if the machine can."""
        return Memory.shared() if shares_memory() else Memory.of("cpu")

    def seed_of(self, part: int) -> int | None:
        """The seed of shard number `part`, or of the client if `part` is `num_shards`."""
        if self.seed is None:
            return None
        return int(np.random.SeedSequence([self.seed, part]).generate_state(1, np.uint64)[0] >> 1)

    def described(self) -> dict[str, Any]:
        """The plan as plain data, which clients and restarted shards compare before they read anything else."""
        return {"relive": relive.__version__, **plain_arguments({name: getattr(self, name) for name in _COMPARED})}


_COMPARED = ("capacity", "num_envs", "num_shards", "obs", "action", "reward", "extra", "sampler", "autoreset")


def plain_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a service as plain data; raises if one is unknown."""
    unknown = set(arguments) - set(_COMPARED)
    if unknown:
        remedy = f"Pass only {', '.join(_COMPARED)}."
        raise SchemaError(explain("connect", "arguments of a service", sorted(unknown), remedy))
    return {name: _plain(name, value) for name, value in arguments.items()}


def _plain(name: str, value: Any) -> Any:
    if name in ("obs", "action", "reward"):
        return config_of(declare(name, value))
    if name == "extra":
        return {key: config_of(declare(f"extra.{key}", part)) for key, part in (value or {}).items()}
    if name == "sampler":
        return sampler_config(value) or type(value).__name__
    if name == "autoreset":
        mode = parse_autoreset(value)
        return None if mode is None else mode.name
    return value


def difference(expected: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """The differences of two descriptions, as part of a sentence; empty if they are equal."""
    return "; ".join(
        f"{name} {expected.get(name, 'nothing')!r} against {found.get(name, 'nothing')!r}"
        for name in {**expected, **found}
        if expected.get(name) != found.get(name)
    )
