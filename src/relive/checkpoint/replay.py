"""A replay buffer in the words of a checkpoint."""

from __future__ import annotations

import math
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
    describe_sampler,
    device_of,
    listeners_of,
    random_state,
    restore_listeners,
    restore_random,
    sampler_of,
)
from relive.errors import IncompatibleCheckpoint, explain
from relive.fields.schema import given_shape
from relive.memory.documents import Node
from relive.memory.saved import nbytes_of
from relive.replay.buffer import ReplayBuffer
from relive.replay.ring import EMPTY, FINAL, HISTORY, TRANSITION, Ring

_MOST_OF_SLOT = 64
"""Bytes that a sampler saves of a slot."""


def contents(replay: ReplayBuffer) -> Contents:
    """Take a replay buffer apart."""
    storage = replay.storage.memory
    found = Contents("ReplayBuffer", config_of(replay))
    found.take("ring", ({"broken": int(storage.broken)}, storage.ring.state))
    # The newest observations wait in rows that are not complete, and so are no part of a segment.
    pending = storage.ring.pending()
    arrays = {f"obs{i}": storage.leaves[i].flatten(0, 1)[pending] for i in storage.observed}
    found.take("pending", ({}, arrays))
    found.take("sampler", ({}, replay.run.saved()))
    take_beside(replay, found)
    found.rows = rows(replay)
    return found


def config_of(replay: ReplayBuffer) -> dict[str, Any]:
    """How an equal, empty buffer is made; also of one that has no arrays yet."""
    trees = {name: describe(tree) for name, tree in replay._schema.trees.items()}
    return {
        "capacity": replay.capacity,
        "num_envs": replay.num_envs,
        **{name: trees.pop(name) for name in ("obs", "action", "reward")},
        "extra": {name: tree for name, tree in trees.items() if name not in ("terminated", "truncated")},
        "next_obs": replay._next_obs,
        "autoreset": None if replay.autoreset is None else replay.autoreset.name,
        "device": str(replay.device),
        "sampler": describe_sampler(replay.sampler),
        "listeners": describe_listeners(replay._listeners),
    }


def take_beside(replay: ReplayBuffer, found: Contents) -> None:
    """What is kept beside the rows and their sampler."""
    found.take("random", random_state(replay._random))
    found.take("listeners", ({}, replay._listeners.snapshot()))
    staged = {f"{name}.{i}": leaf for name, leaves in replay._given.staged.items() for i, leaf in enumerate(leaves)}
    found.take("staged", ({"names": list(replay._given.staged)}, staged))


def columns(replay: ReplayBuffer) -> dict[str, torch.Tensor]:
    """What a row consists of."""
    memory = replay.storage.memory
    found = {f"column{i}": leaf for i, leaf in enumerate(memory.leaves)}
    return found | {f"next{i}": leaf for i, leaf in enumerate(memory.next_leaves)}


def rows(replay: ReplayBuffer) -> Rows:
    """Its rows that are complete."""
    ring = replay.storage.memory.ring
    oldest = torch.maximum(ring.newest() - ring.slots + 1, ring.floor).clamp(min=0)
    return Rows(columns(replay), torch.minimum(oldest, ring.head).cpu(), ring.head.cpu().clone())


def make(read: Read, options: dict[str, Any]) -> ReplayBuffer:
    """An empty buffer as the one that was saved, but for what `options` change."""
    if options.get("capacity") is None:
        _require_backing(read)
    replay = made(read, options)
    if replay.storage.memory.room.is_found:
        replay.close()
        remedy = "Load into an empty folder; relive.load(folder) reopens the buffer that is there."
        raise IncompatibleCheckpoint(
            explain("device", "an empty folder for disk memory", "a folder that holds a buffer", remedy)
        )
    return replay


def made(read: Read, options: dict[str, Any]) -> ReplayBuffer:
    """A buffer of this description, in memory that may hold rows already."""
    config = read.config
    num_envs, autoreset = config.entry("num_envs").optional(), config.entry("autoreset").optional()
    envs = None if num_envs is None else num_envs.integer(1, 1 << 40)
    capacity = options.get("capacity") or config.entry("capacity").integer(1, 1 << 50)
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


def _require_backing(read: Read) -> None:
    """Every slot has a byte in the state: a capacity that is only claimed is refused before memory is asked for."""
    num_envs = read.config.entry("num_envs").optional()
    envs = 1 if num_envs is None else num_envs.integer(1, 1 << 40)
    least = read.config.entry("capacity").integer(1, 1 << 50) // envs
    form = read.form("ring.kind")
    if form is None or len(form[1]) != 2 or form[1][1] != envs or form[1][0] < least:
        raise read.at("ring.kind").wrong(f"at least {least} slots for each of {envs} environments")


def restore(replay: ReplayBuffer, read: Read, *, same_device: bool) -> torch.Tensor:
    """Fill everything but the rows; returns the rows [N] that the next save goes on from."""
    storage = replay.storage.memory
    ring = storage.ring
    saved = read.config.entry("capacity").value
    # Everything but the rows of an environment is as it was, so that its slots were as many more or fewer.
    slots = ring.slots + (saved - replay.capacity) // ring.num_envs
    _check_saved(read, slots, ring.num_envs)
    placed = None
    if saved == replay.capacity:
        read.part("ring").copy_into(ring.state)
    else:
        placed = _resize(ring, read)
    values = read.values.entry("ring")
    storage.broken.fill_(values.entry("broken").integer())
    replay.storage.found()
    pending = ring.pending()
    for i in storage.observed:
        column = storage.leaves[i].flatten(0, 1)
        column[pending] = read.array(f"pending.obs{i}", column[: ring.num_envs]).to(replay.device)
    resume_sampler(replay, read, placed)
    restore_random(replay._random, read.part("random"), devices=same_device)
    restore_listeners(replay._listeners, read)
    restore_staged(replay, read)
    return ring.head.cpu().clone()


def _check_saved(read: Read, slots: int, num_envs: int) -> None:
    """The ring's arrays are of the shapes that they must have, and their numbers can be."""
    lead = (slots, num_envs)
    kind, _ = (
        read.shaped(f"ring.{name}", lead, dtype) for name, dtype in (("kind", torch.uint8), ("first", torch.bool))
    )
    head, count, floor = (read.shaped(f"ring.{name}", lead[1:], torch.int64) for name in ("head", "count", "floor"))
    for name in ("open", "resetting"):
        read.shaped(f"ring.{name}", lead[1:], torch.bool)
    check_ring(kind, head, count, floor)


def check_ring(kind: torch.Tensor, head: torch.Tensor, count: torch.Tensor, floor: torch.Tensor) -> None:
    """Numbers that everything else is computed from: a wrong one would lead out of the memory."""
    most = (1 << 62) // (2 * len(head))
    for name, right, found, expected in (
        ("kind", kind <= HISTORY, kind, f"a kind of 0 to {HISTORY}"),
        ("head", (head >= 0) & (head < most), head, f"a row of 0 to {most}"),
        ("floor", (floor >= 0) & (floor <= head), floor, "a row of 0 to the head"),
        ("count", count == (kind == TRANSITION).sum(0), count, "the number of transitions"),
    ):
        if not bool(right.all()):
            place = (~right).nonzero()[0].tolist()
            raise Node(f"state: ring.{name}{place}", found[tuple(place)].item()).wrong(expected)


def _resize(ring: Ring, read: Read) -> tuple[torch.Tensor, torch.Tensor]:
    """Move the marks of rows that fit into a ring of another size; returns their old and their new flat slots."""
    old = {name: read.tensor(f"ring.{name}") for name in ring.state}
    slots = len(old["kind"])
    for name in ("head", "open", "resetting", "count", "floor"):
        getattr(ring, name).copy_(read.array(f"ring.{name}", getattr(ring, name)))
    newest = (old["head"] - (~old["open"]).long()).cpu()
    oldest = torch.maximum(newest - min(slots, ring.slots) + 1, old["floor"]).clamp(min=0)
    kept = Rows({"kind": old["kind"]}, oldest, newest + 1)
    source, target = kept.places(slots), kept.places(ring.slots)
    row, env = kept.numbers()
    kind = old["kind"].view(-1)[source]
    if ring.slots > slots:
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


def resume_sampler(replay: ReplayBuffer, read: Read, placed: tuple[torch.Tensor, torch.Tensor] | None = None) -> None:
    """Go on with draws that were saved, whose slots may be `placed` elsewhere now."""
    expected = replay.run.saved()
    slots = replay.storage.memory.ring.kind.numel() if placed is None else read.tensor("ring.kind").numel()
    saved = read.part("sampler").tensors(max(nbytes_of(expected), _MOST_OF_SLOT * slots) + (1 << 20))
    forms = [{name: (array.dtype, array.ndim) for name, array in arrays.items()} for arrays in (saved, expected)]
    if forms[0] != forms[1]:
        remedy = "Pass sampler= to load, equal to the sampler of the saved buffer."
        raise IncompatibleCheckpoint(explain("sampler", f"the state of {replay.sampler}", sorted(saved), remedy))
    if placed is not None:
        source, target = placed
        drawable = (replay.storage.memory.ring.kind.view(-1) == TRANSITION).cpu()
        for name in replay.run.of_slots:
            read.shaped(f"sampler.{name}", (read.tensor("ring.kind").numel(),), expected[name].dtype)
            moved = torch.zeros_like(expected[name], device="cpu")
            moved[target] = saved[name][source]
            saved[name] = torch.where(drawable, moved, 0)
    try:
        replay.run.resume(saved)
    except ValueError as error:
        raise Node("state: sampler", str(error)).wrong("the state of a sampler") from None


def restore_staged(replay: ReplayBuffer, read: Read) -> None:
    """Fields that wait for the rest of their step."""
    fields, envs = replay._schema.fields, replay.storage.num_envs
    step = envs * sum(math.prod(given_shape(field)) * field.dtype.itemsize for field in fields)
    saved = read.part("staged")
    arrays = saved.tensors(step)
    for name in saved.values.entry("names").items(1 << 10):
        columns = replay._schema.columns.get(name.text())
        if columns is None:
            raise name.wrong("a declared field")
        leaves = [arrays.get(f"{name.value}.{i}") for i in range(len(columns))]
        memory = replay.storage.memory
        fitted = [memory.conform(i, leaf, memory.lead) for i, leaf in zip(columns, leaves, strict=True)]
        replay._given.staged[name.value] = tuple(fitted)
