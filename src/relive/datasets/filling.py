"""Blocks of steps, from whatever dataset, streamed into a buffer."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, TypeAlias

from relive.checkpoint.progress import watched
from relive.datasets.blocks import STEP, Block, sliced
from relive.distillation import DistillationBuffer
from relive.errors import BufferFullError, DataWarning, SchemaError, explain
from relive.fields.checks import one_of
from relive.fields.schema import Tree
from relive.replay.buffer import ReplayBuffer
from relive.rollout.buffer import RolloutBuffer

FinalObs: TypeAlias = Literal["drop", "repeat"] | None
"""What becomes of a last step that a time limit cut and whose next observation is not in the file."""

_OWN: dict[type, tuple[str, ...]] = {
    ReplayBuffer: STEP,
    RolloutBuffer: (*STEP, "value", "log_prob"),
    DistillationBuffer: ("obs", "action"),
}
"""The kinds of buffers that can be filled, each with the fields that are not extra."""


def extra_of(name: str, buffer: Any) -> Mapping[str, Tree]:
    """The extra fields that a buffer declares; raises if it cannot be filled."""
    own = _OWN.get(type(buffer))
    if own is None:
        remedy = "Pass a ReplayBuffer, a RolloutBuffer or a DistillationBuffer."
        raise SchemaError(explain(name, "a buffer", type(buffer).__name__, remedy))
    return {field: tree for field, tree in declared_of(buffer).items() if field not in own}


def declared_of(buffer: Any) -> Mapping[str, Tree]:
    """All fields that a buffer declares."""
    return buffer._schema.trees


def fill(name: str, buffer: Any, blocks: Iterable[Block], steps: int, final_obs: FinalObs = "repeat") -> Any:
    """Stream `steps` steps into a buffer; returns the buffer.

    Args:
        name: the function that the caller called, for messages.
        buffer: a buffer that `extra_of` accepts.
        blocks: the steps, whose `extra` are the buffer's extra fields.
        steps: how many steps the blocks have.
        final_obs: what becomes of the last step of an episode that did not terminate, where the dataset lacks its next
            observation: "repeat" stores its own observation as the next one, "drop" leaves it out, and None leaves it
            out and warns.
    """
    remedy = "Say what becomes of a last step without a next observation."
    one_of("final_obs", final_obs, ("drop", "repeat", None), remedy)
    left_out: list[int] = []
    blocks = watched(blocks, steps, "reading episodes", lambda block: block.size)
    if final_obs != "repeat" and not isinstance(buffer, DistillationBuffer):
        blocks = _with_known_next(blocks, left_out)
    if isinstance(buffer, RolloutBuffer):
        room = buffer.num_steps - buffer.num_stored
        if final_obs == "repeat":
            _require_room(name, steps, room)
        elif steps > room:
            blocks = _fitting(name, blocks, room)
    write = {ReplayBuffer: _to_replay, RolloutBuffer: _to_rollout, DistillationBuffer: _to_distillation}[type(buffer)]
    kept = write(name, buffer, blocks)
    if left_out and final_obs is None:
        lost = f"{len(left_out)} last step{'s' if len(left_out) > 1 else ''} without"
        remedy = 'They were left out. Pass final_obs="drop" if that is right, or "repeat" to keep them.'
        warnings.warn(explain(name, "a next observation of every step", lost, remedy), DataWarning, stacklevel=3)
    steps -= len(left_out)
    if kept < steps:
        remedy = "the oldest were overwritten. Make the buffer larger: the last observation of an episode is a row too."
        warnings.warn(_too_small(name, steps, kept, remedy), DataWarning, stacklevel=3)
    return buffer


def _with_known_next(blocks: Iterable[Block], left_out: list[int]) -> Iterator[Block]:
    """The blocks without steps that would bootstrap from a next observation that nobody knows."""
    for block in blocks:
        if block.knows_next or block.terminated[-1]:
            yield block
            continue
        left_out.append(1)
        shorter = block.without_last()
        if shorter.size:
            yield shorter


def _fitting(name: str, blocks: Iterable[Block], room: int) -> list[Block]:
    """All blocks; raises if they have more than `room` steps, which nobody knows before they are read."""
    kept: list[Block] = []
    steps = 0
    for block in blocks:
        steps += block.size
        if steps <= room:
            kept.append(block)
    _require_room(name, steps, room)
    return kept


def _require_room(name: str, steps: int, room: int) -> None:
    if steps > room:
        raise BufferFullError(_too_small(name, steps, room, f"make the rollout with num_steps={steps}."))


def _too_small(name: str, steps: int, room: int, remedy: str) -> str:
    lost = f"{steps - room} step{'s' if steps - room > 1 else ''} did not fit: {remedy}"
    return explain(name, f"room for {steps} steps", f"room for {room}", lost)


def _to_replay(name: str, replay: ReplayBuffer, blocks: Iterable[Block]) -> int:
    """Add the steps; returns how many of them are stored at the end."""
    before = replay.storage.heads.clone()
    taken = [0] * (replay.num_envs or 1)
    env: int | None = None
    try:
        for block in blocks:
            env = taken.index(min(taken)) if env is None else env
            taken[env] += block.size
            _extend(replay, block, env)
            if block.is_last:
                env = _cut(replay, env)
    finally:
        if env is not None:  # the file broke off inside an episode
            _cut(replay, env)
    if int((replay.storage.heads - before).max()) <= replay.capacity // len(taken):
        return sum(taken)  # nothing was overwritten; the ids of all rows take memory
    row, column = replay.ids() // len(taken), replay.ids() % len(taken)
    return int((row >= before[column]).sum())


def _extend(replay: ReplayBuffer, block: Block, env: int) -> None:
    batch = {field: getattr(block, field) for field in (*STEP, "next_obs")} | block.extra
    if replay.num_envs is None:
        replay.extend(batch)
    else:
        replay.extend(sliced(batch, (slice(None), None)), env_ids=[env])


def _cut(replay: ReplayBuffer, env: int) -> None:
    replay.cut(None if replay.num_envs is None else [env])


def _to_rollout(name: str, rollout: RolloutBuffer, blocks: Iterable[Block]) -> int:
    before = rollout.num_stored
    if rollout.num_envs is not None:
        remedy = "Make it with num_envs=None: episodes are read one after the other."
        raise SchemaError(explain(name, "a rollout with num_envs=None", rollout.num_envs, remedy))
    for block in blocks:
        if block.is_last and not (block.terminated[-1] or block.truncated[-1]):
            remedy, got = "Read the dataset into a ReplayBuffer.", "an episode without an end"
            raise SchemaError(explain(block.where, "terminated or truncated at its last step", got, remedy))
        for t in range(block.size):
            step = {field: sliced(getattr(block, field), t) for field in STEP}
            final = {"final_obs": sliced(block.next_obs, t)} if block.truncated[t] else {}
            rollout.add(**step, **final, **sliced(block.extra, t))
    return rollout.num_stored - before


def _to_distillation(name: str, buffer: DistillationBuffer, blocks: Iterable[Block]) -> int:
    ring = buffer._ring
    before = ring.head
    for block in blocks:
        buffer.add(block.obs, block.action, **block.extra)
    return ring.head - max(ring.oldest, before)
