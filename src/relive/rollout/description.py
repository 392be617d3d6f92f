"""A rollout buffer as JSON: how an equal one is made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gymnasium.vector import AutoresetMode

from relive.checkpoint.snapshot import SnapshotReader
from relive.fields.declarations import device_of, tree_of
from relive.fields.schema import Schema
from relive.statistics.observers import Observers, observers_of
from relive.storage.codec import Node

if TYPE_CHECKING:
    from relive.rollout.buffer import RolloutBuffer

_DECLARED, _FLAGS = ("obs", "action", "reward", "value"), ("terminated", "truncated")


def config_of(rollout: RolloutBuffer, schema: Schema, observers: Observers) -> dict[str, Any]:
    """How an equal, empty buffer is made, as JSON."""
    trees = schema.config()
    return {
        "num_steps": rollout.num_steps,
        "num_envs": rollout.num_envs,
        **{name: trees[name] for name in _DECLARED},
        "extra": {name: tree for name, tree in trees.items() if name not in (*_DECLARED, *_FLAGS)},
        "autoreset": None if rollout.autoreset is None else rollout.autoreset.name,
        "device": str(rollout.device),
        "listeners": observers.config(),
    }


def arguments_of(config: Node, saved: SnapshotReader, *, device: Any = None, **_other: Any) -> dict[str, Any]:
    """The arguments of a rollout buffer of this config, each with its numbers in what was saved."""
    num_envs, autoreset = config.entry("num_envs").optional(), config.entry("autoreset").optional()
    envs = None if num_envs is None else num_envs.integer(1, 1 << 40)
    return {
        "num_steps": config.entry("num_steps").integer(1, 1 << 50),
        "num_envs": envs,
        **{name: tree_of(config.entry(name)) for name in _DECLARED},
        "extra": {name: tree_of(tree) for name, tree in config.entry("extra").entries().items()},
        "autoreset": None if autoreset is None else AutoresetMode[autoreset.one_of(AutoresetMode.__members__)],
        "device": device or device_of(config.entry("device")),
        **observers_of(config.entry("listeners"), saved.part_without_values("listeners"), envs),
    }
