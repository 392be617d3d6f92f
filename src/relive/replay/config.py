"""The config of a replay buffer in files, and the choice of its backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gymnasium.vector import AutoresetMode

from relive import kernels
from relive.errors import IncompatibleCheckpoint, SchemaError, explain
from relive.replay.backend import Backend
from relive.replay.native_backend import NativeBackend
from relive.replay.row_storage import RowStorage
from relive.replay.samplers.registry import load_sampler
from relive.replay.torch_backend import TorchBackend
from relive.schema.fields import Mutable, make_replay_schema, parse_declaration, parse_device
from relive.statistics.episodes import EpisodeStats
from relive.statistics.norm import Norms
from relive.statistics.observers import read_saved_observers
from relive.storage import Memory
from relive.storage.codec import JsonNode, SnapshotReader


def make_backend(rows: RowStorage) -> Backend:
    """Make the backend of the device that holds these rows."""
    backend_name = kernels.choose_backend(rows.tensors, rows.schema.max_stack_frames)
    if backend_name == "native":
        return NativeBackend(rows)
    if rows.allocator.persistent:
        remedy = "Declare fewer leaves, axes or frames, or keep the buffer in this process's own memory."
        got = f"{len(rows.leaves)} leaves that it cannot"
        expected = "fields that the native core can write, as shared and disk memory need"
        raise SchemaError(explain("device", expected, got, remedy))
    if backend_name == "torch":
        return TorchBackend(rows)
    from relive.replay.triton_backend import TritonBackend  # noqa: PLC0415 (imports Triton)

    return TritonBackend(rows)


def refuse_observers_in_shared_memory(
    memory: Memory, stats: EpisodeStats | None, norm: Norms | None, error: type[Exception]
) -> None:
    """Raise an `error` if a buffer in shared memory has statistics or norms."""
    for name, is_passed in (("stats", stats is not None), ("norm", bool(norm))):
        if is_passed and memory.is_shared:
            expected = "None in shared memory, where other processes add steps that it would not count"
            remedy = (
                "Count in each process that adds steps: EpisodeStats.update and RunningNorm.update take every step."
            )
            raise error(explain(name, expected, "one", remedy))


def read_saved_arguments(config: JsonNode, saved: SnapshotReader, changes: dict[str, Any]) -> dict[str, Any]:
    """Read a buffer's arguments from a saved config; `changes` that are not None override the config."""
    num_envs, autoreset = config.entry("num_envs").none_if_null(), config.entry("autoreset").none_if_null()
    envs = None if num_envs is None else num_envs.integer(1, 1 << 40)
    observers = read_saved_observers(config.entry("listeners"), saved.part_without_values("listeners"), envs)
    device = changes.get("device") or parse_device(config.entry("device"))
    refuse_observers_in_shared_memory(Memory.of(device), **observers, error=IncompatibleCheckpoint)
    return {
        "capacity": config.entry("capacity").integer(1, 1 << 50),
        **{name: parse_declaration(config.entry(name)) for name in ("obs", "action", "reward")},
        "num_envs": envs,
        "extra": {name: parse_declaration(tree) for name, tree in config.entry("extra").entries().items()},
        "sampler": load_sampler(config.entry("sampler"), changes.get("sampler")),
        "device": device,
        "next_obs": config.entry("next_obs").one_of(("shared", "stored")),
        "autoreset": None if autoreset is None else autoreset.one_of(AutoresetMode.__members__),
        **observers,
    }


def check_saved_sizes(arguments: Mapping[str, Any], saved: SnapshotReader) -> None:
    """Raise unless the saved arrays have the sizes that a buffer's arguments declare.

    An untrusted file could declare any size, which the buffer would then allocate.
    """
    envs = arguments["num_envs"] or 1
    min_slots = arguments["capacity"] // envs
    spec = saved.find_spec("ring.kind")
    if spec is None or len(spec[1]) != 2 or spec[1][1] != envs or spec[1][0] < min_slots:
        raise saved.array_node("ring.kind").error(f"at least {min_slots} slots for each of {envs} environments")
    schema = make_replay_schema(*(arguments[name] for name in ("obs", "action", "reward", "extra")))
    columns = {f"column{i}": field for i, field in enumerate(schema.fields) if not isinstance(field, Mutable)}
    if arguments["next_obs"] == "stored":
        columns |= {f"next{i}": schema.fields[leaf] for i, leaf in enumerate(schema.leaf_indices["obs"])}
    saved.require_columns({name: (field.dtype, field.shape) for name, field in columns.items()})
