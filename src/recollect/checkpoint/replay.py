"""A replay buffer in the words of a checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from gymnasium.vector import AutoresetMode

from recollect.checkpoint.contents import (
    Contents,
    Read,
    Rows,
    declared,
    describe,
    describe_listeners,
    describe_sampler,
    device_of,
    listeners_of,
    random_state,
    restore_random,
    sampler_of,
)
from recollect.checkpoint.manifest import Node
from recollect.errors import IncompatibleCheckpoint, explain
from recollect.memory import Heap
from recollect.replay import ReplayBuffer
from recollect.ring import EMPTY, FINAL, HISTORY, PENDING, TRANSITION, Ring

_STATE = ("kind", "first", "head", "open", "resetting", "count", "floor")
_OF_SLOTS = {"mass", "drawn"}
"""What samplers keep of every slot."""


def contents(replay: ReplayBuffer) -> Contents:
    """Take a replay buffer apart."""
    storage, schema = replay._storage, replay._schema
    trees = {name: describe(tree) for name, tree in schema.trees.items()}
    config = {
        "capacity": replay.capacity,
        "num_envs": replay.num_envs,
        **{name: trees.pop(name) for name in ("obs", "action", "reward")},
        "extra": {name: tree for name, tree in trees.items() if name not in ("terminated", "truncated")},
        "next_obs": "stored" if storage.keeps_next else "shared",
        "autoreset": None if replay.autoreset is None else replay.autoreset.name,
        "device": str(replay.device),
        "sampler": describe_sampler(replay.sampler),
        "listeners": describe_listeners(replay._listeners),
    }
    found = Contents("ReplayBuffer", config)
    found.take("ring", ({"broken": int(storage.broken)}, dict(zip(_STATE, storage.ring.state, strict=True))))
    # The newest observations wait in rows that are not complete, and so are no part of a segment.
    pending = storage.ring.at(storage.ring.head, torch.arange(storage.ring.num_envs, device=replay.device))
    arrays = {f"obs{i}": storage.columns[i].flatten(0, 1)[pending] for i in storage.observed}
    found.take("pending", ({}, arrays))
    found.take("sampler", ({}, replay._draws.saved()))
    found.take("random", random_state(replay._random))
    found.take("listeners", ({}, replay._listeners.snapshot()))
    staged = {f"{name}.{i}": leaf for name, leaves in replay._staged.items() for i, leaf in enumerate(leaves)}
    found.take("staged", ({"names": list(replay._staged)}, staged))
    found.rows = rows(replay)
    return found


def columns(replay: ReplayBuffer) -> dict[str, torch.Tensor]:
    """What a row consists of."""
    storage = replay._storage
    found = {f"column{i}": column for i, column in enumerate(storage.columns)}
    return found | {f"next{i}": column for i, column in enumerate(storage.next_columns)}


def rows(replay: ReplayBuffer) -> Rows:
    """Its rows that are complete."""
    storage = replay._storage
    ring = storage.ring
    oldest = torch.maximum(ring.newest() - ring.slots + 1, ring.floor).clamp(min=0)
    return Rows(columns(replay), torch.minimum(oldest, ring.head).cpu(), ring.head.cpu().clone())


def make(read: Read, options: dict[str, Any]) -> ReplayBuffer:
    """An empty buffer as the one that was saved, but for what `options` change."""
    config = read.config
    num_envs, autoreset = config.entry("num_envs").optional(), config.entry("autoreset").optional()
    envs = None if num_envs is None else num_envs.integer(1, 1 << 40)
    saved = config.entry("capacity").integer(1, 1 << 50)
    capacity = options.get("capacity") or saved
    if options.get("capacity") is None:
        _require_backing(read, saved // (envs or 1), envs or 1)
    mode = None if autoreset is None else AutoresetMode[autoreset.one_of(AutoresetMode.__members__)]
    keeps: Any = config.entry("next_obs").one_of(("shared", "stored"))
    return ReplayBuffer(
        capacity,
        *(declared(config.entry(name)) for name in ("obs", "action")),  # pyright: ignore[reportArgumentType]
        num_envs=envs,
        reward=declared(config.entry("reward")),
        extra={name: declared(tree) for name, tree in config.entry("extra").entries().items()},
        sampler=sampler_of(config.entry("sampler"), options.get("sampler")),
        device=options.get("device") or device_of(config.entry("device")),
        next_obs=keeps,
        autoreset=mode,
        **listeners_of(read, envs),
    )


def _require_backing(read: Read, least: int, envs: int) -> None:
    """Every slot has a byte in the state: a capacity that is only claimed is refused before memory is asked for."""
    kind = read.arrays.get("ring.kind")
    if kind is None or kind.ndim != 2 or kind.shape[1] != envs or kind.shape[0] < least:
        got = None if kind is None else tuple(kind.shape)
        raise Node("state: ring.kind", got).wrong(f"a slot for each of {least} rows of {envs} environments")


def restore(replay: ReplayBuffer, read: Read, *, same_device: bool) -> torch.Tensor:
    """Fill everything but the rows; returns the rows [N] that the next save goes on from."""
    storage = replay._storage
    ring = storage.ring
    _, arrays = read.part("ring")
    if tuple(arrays["kind"].shape) == tuple(ring.kind.shape):
        read.copy_into("ring", dict(zip(_STATE, ring.state, strict=True)))
        placed = None
    else:
        placed = _resize(ring, read)
    values = read.values.entry("ring")
    storage.broken.fill_(values.entry("broken").integer())
    storage.is_empty = bool((ring.head == ring.floor).all())
    storage.count_rows_left()
    _check_ring(ring)
    pending = ring.at(ring.head, torch.arange(ring.num_envs, device=replay.device))
    for i in storage.observed:
        column = storage.columns[i].flatten(0, 1)
        column[pending] = read.array(f"pending.obs{i}", column[: ring.num_envs]).to(replay.device)
    _resume_sampler(replay, read, placed)
    restore_random(replay._random, *read.part("random"), devices=same_device)
    replay._listeners.restore(read.part("listeners")[1])
    _restore_staged(replay, read)
    return ring.head.cpu().clone()


def _check_ring(ring: Ring) -> None:
    """Numbers that everything else is computed from: a wrong one would lead out of the memory."""
    known = torch.tensor([EMPTY, TRANSITION, FINAL, PENDING, HISTORY], dtype=torch.uint8, device=ring.kind.device)
    most = (1 << 62) // (2 * ring.num_envs)
    right = bool(torch.isin(ring.kind, known).all())
    right = right and bool(
        ((ring.head >= 0) & (ring.head < most) & (ring.floor >= 0) & (ring.floor <= ring.head)).all()
    )
    right = right and bool((ring.count == (ring.kind == TRANSITION).sum(0)).all())
    if not right:
        raise Node("state: ring", "others").wrong("kinds, heads and counts that agree")


def _resize(ring: Ring, read: Read) -> tuple[torch.Tensor, torch.Tensor]:
    """Move the marks of rows that fit into a ring of another size; returns their old and their new flat slots."""
    old = {name: read.arrays[f"ring.{name}"] for name in _STATE}
    for name in _STATE[2:]:
        getattr(ring, name).copy_(read.array(f"ring.{name}", getattr(ring, name)))
    before = Ring(len(old["kind"]), ring.num_envs, 0, Heap(torch.device("cpu")))
    newest = (old["head"] - (~old["open"]).long()).cpu()
    oldest = torch.maximum(newest - min(before.slots, ring.slots) + 1, old["floor"]).clamp(min=0)
    kept = Rows({"kind": old["kind"]}, oldest, newest + 1)
    source, target = kept.places(before.slots), kept.places(ring.slots)
    row, env = kept.numbers()
    kind = old["kind"].view(-1)[source]
    if ring.slots > before.slots:
        # There is room for older rows, which are gone; ends of episodes that went with them mean nothing.
        begins = torch.where(kind == FINAL, int(newest.max()) + 2, row)
        floor = (newest + 1).scatter_reduce(0, env, begins, "amin")
        kind = torch.where(row < floor[env], EMPTY, kind.long()).to(torch.uint8)
        ring.floor.copy_(torch.maximum(floor, old["floor"]))
    expired = HISTORY if ring.slots > ring.alive else EMPTY
    kind = torch.where((kind == TRANSITION) & (row <= newest[env] - ring.alive), expired, kind.long()).to(torch.uint8)
    device = ring.kind.device
    ring.kind.view(-1)[target.to(device)] = kind.to(device)
    ring.first.view(-1)[target.to(device)] = old["first"].view(-1)[source].to(device)
    ring.count.copy_((ring.kind == TRANSITION).sum(0))
    return source, target


def _resume_sampler(replay: ReplayBuffer, read: Read, placed: tuple[torch.Tensor, torch.Tensor] | None) -> None:
    _, saved = read.part("sampler")
    expected = replay._draws.saved()
    if saved.keys() != expected.keys() or any(saved[name].dtype != expected[name].dtype for name in saved):
        remedy = "Pass the sampler that the buffer had."
        raise IncompatibleCheckpoint(explain("sampler", f"the state of {replay.sampler}", sorted(saved), remedy))
    if placed is not None:
        source, target = placed
        drawable = (replay._storage.ring.kind.view(-1) == TRANSITION).cpu()
        for name in _OF_SLOTS & saved.keys():
            moved = torch.zeros_like(expected[name], device="cpu")
            moved[target] = saved[name][source]
            saved[name] = torch.where(drawable, moved, 0)
    try:
        replay._draws.resume(saved)
    except ValueError as error:
        raise Node("state: sampler", str(error)).wrong("the state of a sampler") from None


def _restore_staged(replay: ReplayBuffer, read: Read) -> None:
    node, arrays = read.part("staged")
    for name in node.entry("names").items(1 << 10):
        columns = replay._schema.columns.get(name.text())
        if columns is None:
            raise name.wrong("a declared field")
        leaves = [arrays.get(f"{name.value}.{i}") for i in range(len(columns))]
        fitted = [replay._conform(i, leaf, replay._storage.lead) for i, leaf in zip(columns, leaves, strict=True)]
        replay._staged[name.value] = tuple(fitted)
