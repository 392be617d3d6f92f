"""A replay buffer from its config: what is only claimed is refused before memory is asked for."""

from __future__ import annotations

from typing import Any

from gymnasium.vector import AutoresetMode

from relive.errors import IncompatibleCheckpoint, explain
from relive.fields.declarations import device_of, tree_of
from relive.memory.documents import Node
from relive.memory.saved import Saved
from relive.replay.samplers.registry import sampler_of
from relive.statistics.observers import observers_of


def settings_of(config: Node, saved: Saved, changes: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a buffer that `config` describes, but for changes that are not None."""
    num_envs, autoreset = config.entry("num_envs").optional(), config.entry("autoreset").optional()
    envs = None if num_envs is None else num_envs.integer(1, 1 << 40)
    return {
        "capacity": changes.get("capacity") or config.entry("capacity").integer(1, 1 << 50),
        **{name: tree_of(config.entry(name)) for name in ("obs", "action", "reward")},
        "num_envs": envs,
        "extra": {name: tree_of(tree) for name, tree in config.entry("extra").entries().items()},
        "sampler": sampler_of(config.entry("sampler"), changes.get("sampler")),
        "device": changes.get("device") or device_of(config.entry("device")),
        "next_obs": config.entry("next_obs").one_of(("shared", "stored")),
        "autoreset": None if autoreset is None else autoreset.one_of(AutoresetMode.__members__),
        **observers_of(config.entry("listeners"), saved.part_without_values("listeners"), envs),
    }


def require_backing(config: Node, saved: Saved, capacity: int | None) -> None:
    """Every slot has a byte in the state: a capacity that is only claimed is refused. A new one must fit."""
    num_envs = config.entry("num_envs").optional()
    envs = 1 if num_envs is None else num_envs.integer(1, 1 << 40)
    if capacity is not None:
        if capacity % envs:
            remedy = f"Pass {max(capacity // envs, 1) * envs}."
            raise IncompatibleCheckpoint(explain("capacity", f"a multiple of num_envs={envs}", capacity, remedy))
        return
    least = config.entry("capacity").integer(1, 1 << 50) // envs
    form = saved.form("ring.kind")
    if form is None or len(form[1]) != 2 or form[1][1] != envs or form[1][0] < least:
        raise saved.at("ring.kind").wrong(f"at least {least} slots for each of {envs} environments")
