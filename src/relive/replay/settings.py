"""The settings of a replay buffer: arguments, their verification, and their description in files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from gymnasium.vector import AutoresetMode

from relive import kernels
from relive.checkpoint.snapshot import SnapshotReader
from relive.errors import IncompatibleCheckpoint, SchemaError, explain
from relive.replay.native_backend import NativeBackend
from relive.replay.row_storage import RowStorage
from relive.replay.samplers import Sampler, Uniform
from relive.replay.samplers.registry import load_sampler, sampler_config
from relive.replay.samplers.sampler import require_sampler
from relive.replay.torch_backend import TorchBackend
from relive.schema.autoreset import parse_autoreset
from relive.schema.checks import check_positive_int
from relive.schema.fields import (
    Declaration,
    Mutable,
    check_replay,
    parse_declaration,
    parse_device,
    replay_nbytes,
    replay_schema,
)
from relive.statistics.episodes import EpisodeStats
from relive.statistics.norm import Norms
from relive.statistics.observers import Observers, saved_observers
from relive.storage import Allocator, Memory
from relive.storage.codec import Node

_SHARED_MEMORY_REFUSAL = (
    "None in shared memory, where other processes add steps that it would not count",
    "one",
    "Count in each process that adds steps: EpisodeStats.update and RunningNorm.update take every step.",
)


class ReplaySettings:
    """Verified arguments of a replay buffer; raises if arguments are invalid or the rows do not fit in memory."""

    def __init__(
        self, capacity: int, obs: Declaration, action: Declaration, num_envs: int | None, reward: Declaration,
        extra: Mapping[str, Declaration], sampler: Sampler | None, device: torch.device | str | Memory,
        next_obs: Literal["shared", "stored"], autoreset: AutoresetMode | str | None, stats: EpisodeStats | None,
        norm: Norms | None,
    ) -> None:  # fmt: skip
        self.capacity = check_positive_int("capacity", capacity)
        self.num_envs = None if num_envs is None else check_positive_int("num_envs", num_envs)
        self.autoreset = parse_autoreset(autoreset)
        self.memory = Memory.of(device)
        self.schema = replay_schema(obs, action, reward, extra)
        check_replay(self.capacity, self.num_envs, next_obs, self.schema)
        self.memory.require(replay_nbytes(self.schema, self.capacity, self.num_envs or 1, next_obs))
        self.device = torch.empty(0, device=self.memory.device).device
        for name, is_passed in (("stats", stats is not None), ("norm", bool(norm))):
            if is_passed and self.memory.is_shared:
                raise SchemaError(explain(name, *_SHARED_MEMORY_REFUSAL))
        self.observers = Observers(stats, norm, self.schema, self.num_envs, self.device)
        self.sampler: Sampler = require_sampler(Uniform() if sampler is None else sampler)
        self.next_obs = next_obs
        self.is_plain = self.schema.is_flat and not extra
        """Whether the buffer has neither nested nor extra fields."""

    def make_backend(self, allocator: Allocator) -> Any:
        """Make the backend of the device; the allocator provides the memory of the rows."""
        rows = RowStorage(
            self.schema, self.capacity // (self.num_envs or 1), self.num_envs, allocator,
            stores_next_obs=self.next_obs == "stored", next_step=self.autoreset is AutoresetMode.NEXT_STEP,
            same_step=self.autoreset is AutoresetMode.SAME_STEP, has_stats=self.observers.stats is not None,
        )  # fmt: skip
        backend_name = kernels.choose_backend(rows.tensors, rows.schema.deepest_stack)
        if backend_name == "native":
            return NativeBackend(rows)
        if allocator.persistent:
            remedy = "Declare fewer leaves, axes or frames, or keep the buffer in this process's own memory."
            got = f"{len(rows.leaves)} leaves that it cannot"
            expected = "fields that the native core can write, as shared and disk memory need"
            raise SchemaError(explain("device", expected, got, remedy))
        if backend_name == "torch":
            return TorchBackend(rows)
        from relive.replay.triton_backend import TritonBackend  # noqa: PLC0415 (imports Triton)

        return TritonBackend(rows)

    def config(self) -> dict[str, Any]:
        """Return the buffer's arguments as JSON."""
        trees = self.schema.config()
        return {
            "capacity": self.capacity,
            "num_envs": self.num_envs,
            **{name: trees.pop(name) for name in ("obs", "action", "reward")},
            "extra": {name: tree for name, tree in trees.items() if name not in ("terminated", "truncated")},
            "next_obs": self.next_obs,
            "autoreset": None if self.autoreset is None else self.autoreset.name,
            "device": str(self.device),
            "sampler": sampler_config(self.sampler),
            "listeners": self.observers.config(),
        }


def read_saved_arguments(config: Node, saved: SnapshotReader, changes: dict[str, Any]) -> dict[str, Any]:
    """Read a buffer's arguments from a saved config; `changes` that are not None override the config."""
    num_envs, autoreset = config.entry("num_envs").optional(), config.entry("autoreset").optional()
    envs = None if num_envs is None else num_envs.integer(1, 1 << 40)
    observers = saved_observers(config.entry("listeners"), saved.part_without_values("listeners"), envs)
    device = changes.get("device")
    if isinstance(device, Memory) and device.is_shared:
        for name in (name for name, observer in observers.items() if observer):
            raise IncompatibleCheckpoint(explain(name, *_SHARED_MEMORY_REFUSAL))
    return {
        "capacity": config.entry("capacity").integer(1, 1 << 50),
        **{name: parse_declaration(config.entry(name)) for name in ("obs", "action", "reward")},
        "num_envs": envs,
        "extra": {name: parse_declaration(tree) for name, tree in config.entry("extra").entries().items()},
        "sampler": load_sampler(config.entry("sampler"), changes.get("sampler")),
        "device": device or parse_device(config.entry("device")),
        "next_obs": config.entry("next_obs").one_of(("shared", "stored")),
        "autoreset": None if autoreset is None else autoreset.one_of(AutoresetMode.__members__),
        **observers,
    }


def require_saved_sizes(arguments: Mapping[str, Any], saved: SnapshotReader) -> None:
    """Raise unless the saved arrays have the sizes that a buffer's arguments declare.

    An untrusted file could declare any size, which the buffer would then allocate.
    """
    envs = arguments["num_envs"] or 1
    min_slots = arguments["capacity"] // envs
    spec = saved.spec("ring.kind")
    if spec is None or len(spec[1]) != 2 or spec[1][1] != envs or spec[1][0] < min_slots:
        raise saved.array_node("ring.kind").error(f"at least {min_slots} slots for each of {envs} environments")
    schema = replay_schema(*(arguments[name] for name in ("obs", "action", "reward", "extra")))
    columns = {f"column{i}": field for i, field in enumerate(schema.fields) if not isinstance(field, Mutable)}
    if arguments["next_obs"] == "stored":
        columns |= {f"next{i}": schema.fields[leaf] for i, leaf in enumerate(schema.leaf_indices["obs"])}
    saved.require_columns({name: (field.dtype, field.shape) for name, field in columns.items()})
