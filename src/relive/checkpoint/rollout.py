"""A rollout buffer in the words of a checkpoint. All of it is written every time: a rollout is thrown away anyhow."""

from __future__ import annotations

from typing import Any

import torch
from gymnasium.vector import AutoresetMode

from relive.checkpoint.contents import (
    Contents,
    Read,
    Rows,
    declared,
    describe,
    describe_listeners,
    device_of,
    listeners_of,
    random_state,
    restore_listeners,
    restore_random,
)
from relive.rollout.buffer import RolloutBuffer

_OWN = ("obs", "action", "reward", "value", "terminated", "truncated")


def contents(rollout: RolloutBuffer) -> Contents:
    """Take a rollout buffer apart."""
    trees = {name: describe(tree) for name, tree in rollout._schema.trees.items()}
    config = {
        "num_steps": rollout.num_steps,
        "num_envs": rollout.num_envs,
        **{name: trees[name] for name in ("obs", "action", "reward", "value")},
        "extra": {name: tree for name, tree in trees.items() if name not in _OWN},
        "autoreset": None if rollout.autoreset is None else rollout.autoreset.name,
        "device": str(rollout.device),
        "listeners": describe_listeners(rollout._observers),
    }
    found = Contents("RolloutBuffer", config)
    for name, part in rollout._parts().items():
        found.take(name, part.state())
    found.take("random", random_state(rollout._random))
    found.take("listeners", ({}, rollout._observers.snapshot()))
    return found


def columns(rollout: RolloutBuffer) -> dict[str, torch.Tensor]:
    """Its rows are part of the state."""
    return rollout._storage.rows()


def rows(rollout: RolloutBuffer) -> Rows | None:
    """None of them are written once for ever."""
    return None


def make(read: Read, options: dict[str, Any]) -> RolloutBuffer:
    """An empty buffer as the one that was saved, but for what `options` change."""
    config = read.config
    num_envs, autoreset = config.entry("num_envs").optional(), config.entry("autoreset").optional()
    envs = None if num_envs is None else num_envs.integer(1, 1 << 40)
    mode = None if autoreset is None else AutoresetMode[autoreset.one_of(AutoresetMode.__members__)]
    return RolloutBuffer(
        config.entry("num_steps").integer(1, 1 << 50),
        envs,
        *(declared(config.entry(name)) for name in ("obs", "action")),  # pyright: ignore[reportArgumentType]
        reward=declared(config.entry("reward")),
        value=declared(config.entry("value")),
        extra={name: declared(tree) for name, tree in config.entry("extra").entries().items()},
        autoreset=mode,
        device=options.get("device") or device_of(config.entry("device")),
        **listeners_of(read, envs),
    )


def restore(rollout: RolloutBuffer, read: Read, *, same_device: bool) -> torch.Tensor:
    """Fill everything."""
    for name, part in rollout._parts().items():
        part.load_state(read.part(name))
    restore_random(rollout._random, read.part("random"), devices=same_device)
    restore_listeners(rollout._observers, read)
    return torch.zeros(0, dtype=torch.int64)
