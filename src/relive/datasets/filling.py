"""Steps between datasets and buffers: blocks of an episode's steps into a buffer, and a buffer's episodes as arrays."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch

from relive.checkpoint.progress import watched
from relive.distillation import DistillationBuffer
from relive.errors import BufferFullError, DataWarning, SchemaError, explain
from relive.fields.checks import nonempty, one_of
from relive.fields.schema import DTYPES, Tree, map_leaves
from relive.replay.buffer import ReplayBuffer
from relive.rollout.buffer import RolloutBuffer

STEP = ("obs", "action", "reward", "terminated", "truncated")
"""The fields of a step that every buffer has."""

BLOCK_BYTES = 1 << 21
"""Readers hold about this much of a file at once."""

_HELD = 2
"""Rows that wait for their successors. Two, so that an episode's last block has the step before the last one too."""


class Block(NamedTuple):
    """Consecutive steps of one episode: arrays [T, …], or nested dicts of them."""

    where: str
    """The episode, for messages."""
    obs: Any
    next_obs: Any
    action: Any
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    extra: dict[str, Any]
    is_last: bool = True
    """Whether the episode ends with this block."""
    knows_next: bool = True
    """Whether the last next observation is the true one, not the last observation again."""

    @property
    def size(self) -> int:
        """The number of steps."""
        return len(self.terminated)

    def without_last(self) -> Block:
        """All steps but the last, whose observation is the final one now; its time limit is the one before's."""
        truncated = self.truncated[:-1].copy()
        truncated[-1:] |= self.truncated[-1]
        names = ("obs", "next_obs", "action", "reward", "terminated", "extra")
        kept = {name: sliced(getattr(self, name), slice(None, -1)) for name in names}
        return self._replace(**kept, truncated=truncated, knows_next=True)


class Stretch(NamedTuple):
    """Consecutive rows of a file, which may belong to several episodes."""

    fields: dict[str, Any]
    """Arrays [K, …] by field: "obs" and "action"; the file may lack "reward", "terminated" and "truncated"."""
    episode: np.ndarray
    """The episode of each row."""
    next_obs: Any = None
    """The next observations, where the file has its own."""


def split(name: str, stretches: Iterable[Stretch], final_obs: Callable[[int], Any] | None = None) -> Iterator[Block]:
    """The blocks that stretches consist of.

    Where a file has no next observations, the next observation of a row is the row after it; `final_obs` gives the true
    final observation [1, …] of an episode. Where a file does not say what was truncated, an episode that does not
    terminate is truncated at its last step.
    """
    held: Stretch | None = None
    for stretch in stretches:
        rows = stretch if held is None else _joined(held, stretch)
        edges = [0, *(np.flatnonzero(np.diff(rows.episode)) + 1).tolist(), len(rows.episode)]
        for start, stop in pairwise(edges[:-1]):
            yield _block(name, rows, start, stop, final_obs, is_last=True)
        last = max(edges[-2], edges[-1] - _HELD)
        if last > edges[-2]:
            yield _block(name, rows, edges[-2], last, final_obs, is_last=False)
        held = _part(rows, slice(last, None))
    if held is not None:
        yield _block(name, held, 0, len(held.episode), final_obs, is_last=True)


def _block(
    name: str, rows: Stretch, start: int, stop: int, final_obs: Callable[[int], Any] | None, *, is_last: bool
) -> Block:
    number, at = int(rows.episode[start]), slice(start, stop)
    fields = {field: sliced(tree, at) for field, tree in rows.fields.items()}
    knows_next = True
    if rows.next_obs is not None:
        following = sliced(rows.next_obs, at)
    elif not is_last:
        following = sliced(rows.fields["obs"], slice(start + 1, stop + 1))
    else:
        knows_next = final_obs is not None
        final = sliced(fields["obs"], slice(-1, None)) if final_obs is None else final_obs(number)
        following = joined(sliced(fields["obs"], slice(1, None)), final)
    size = stop - start
    terminated = fields.pop("terminated", np.zeros(size, bool))
    truncated = fields.pop("truncated", None)
    if truncated is None:
        truncated = np.zeros(size, bool)
        truncated[-1] = is_last and not terminated[-1]
    obs, action, reward = fields.pop("obs"), fields.pop("action"), fields.pop("reward", np.zeros(size, np.float32))
    where = f"{name}, episode {number}"
    return Block(where, obs, following, action, reward, terminated, truncated, fields, is_last, knows_next)


def _joined(first: Stretch, second: Stretch) -> Stretch:
    next_obs = None if first.next_obs is None else joined(first.next_obs, second.next_obs)
    return Stretch(joined(first.fields, second.fields), np.concatenate([first.episode, second.episode]), next_obs)


def _part(rows: Stretch, at: slice) -> Stretch:
    next_obs = None if rows.next_obs is None else sliced(rows.next_obs, at)
    return Stretch(sliced(rows.fields, at), rows.episode[at], next_obs)


def sliced(tree: Any, at: Any) -> Any:
    """A nested dict with every leaf indexed by `at`."""
    return map_leaves(lambda leaf: leaf[at], tree)


def joined(tree: Any, more: Any) -> Any:
    """Two nested dicts with the same keys as one, each leaf joined along its first axis."""
    return map_leaves(lambda *leaves: np.concatenate(leaves), tree, more)


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


def require_ordered(name: str, replay: Any) -> None:
    """Raise unless `replay` stores the observations of an episode in order."""
    if type(replay) is not ReplayBuffer or replay.storage.keeps_next:
        remedy = 'Use a ReplayBuffer with next_obs="shared": only it stores the observations of an episode in order.'
        raise SchemaError(explain(name, "a replay buffer in time order", repr(replay), remedy))


def require_steps(name: str, replay: Any) -> None:
    """`require_ordered`, and raise if `replay` has no step."""
    require_ordered(name, replay)
    nonempty(name, len(replay))


@contextmanager
def appearing(name: str, path: str | PathLike[str]) -> Iterator[Path]:
    """Where to write the file or folder `path`, which must not exist: it appears when it is whole, or not at all."""
    path = Path(path)
    _require_absent(name, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".relive-", dir=path.parent) as folder:  # a new one, which is ours alone
        unfinished = Path(folder) / path.name
        yield unfinished
        try:
            if unfinished.is_dir():
                unfinished.rename(path)
            else:
                os.link(unfinished, path)  # a rename would replace what somebody else has put there meanwhile
        except OSError:
            _require_absent(name, path)
            unfinished.rename(path)  # a disk without hard links


def _require_absent(name: str, path: Path) -> None:
    if os.path.lexists(path):
        raise FileExistsError(explain(name, "a path where nothing is", repr(str(path)), "Delete it, or pass another."))


def written(replay: ReplayBuffer) -> Iterator[dict[str, Any]]:
    """Each episode as nested dicts of arrays [T, …]; a terminal shows the progress of long writes."""
    for episode in watched(replay.episodes(), len(replay), "writing episodes", len):
        yield {name: arrays(value) for name, value in episode.items() if name != "index"}


def arrays(value: Any) -> Any:
    """Tensors as arrays, nested as they are; bfloat16, which numpy lacks, becomes float32."""
    if isinstance(value, torch.Tensor):
        return (value.float() if DTYPES[value.dtype] is None else value).cpu().numpy()
    return {name: arrays(part) for name, part in value.items()}
