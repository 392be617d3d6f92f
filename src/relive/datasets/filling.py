"""Steps between files and buffers: rows of a file into a buffer, and episodes of a buffer as arrays."""

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

from relive.checkpoint.progress import show_progress
from relive.distillation import DistillationBuffer
from relive.errors import BufferFullError, DataWarning, SchemaError, explain
from relive.replay.buffer import ReplayBuffer
from relive.rollout.buffer import RolloutBuffer
from relive.schema.checks import nonempty, one_of
from relive.schema.fields import DTYPES, Tree, map_leaves

STEP = ("obs", "action", "reward", "terminated", "truncated")
"""The fields of a step that every buffer has."""

BLOCK_BYTES = 1 << 21
"""The approximate number of bytes of a file that a reader holds at once."""

FinalObs: TypeAlias = Literal["drop", "repeat"] | None
"""The treatment of a last step that a time limit cut and whose next observation is not in the file."""

_HELD = 2
"""Rows that wait for their successors. Two, so that an episode's last block has the step before the last one too."""

_OWN: dict[type, tuple[str, ...]] = {
    ReplayBuffer: STEP,
    RolloutBuffer: (*STEP, "value", "log_prob"),
    DistillationBuffer: ("obs", "action"),
}
"""The kinds of buffers that can be filled, each with the fields that are not extra."""


class FileRows(NamedTuple):
    """Consecutive rows of a file, which may belong to several episodes."""

    fields: dict[str, Any]
    """Arrays [K, …] by field: "obs" and "action"; the file may lack "reward", "terminated" and "truncated"."""
    episode: np.ndarray
    """The episode of each row."""
    next_obs: dict[str, Any] = {}  # noqa: RUF012 (never changed)
    """The next observations as "obs", if the file has them."""


class EpisodeBlock(NamedTuple):
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

    def without_last(self) -> EpisodeBlock:
        """All steps but the last, whose observation becomes the final one; a truncated end moves to the step before."""
        truncated = self.truncated[:-1].copy()
        truncated[-1:] |= self.truncated[-1]
        names = ("obs", "next_obs", "action", "reward", "terminated", "extra")
        shorter = {name: slice_leaves(getattr(self, name), slice(None, -1)) for name in names}
        return self._replace(**shorter, truncated=truncated, knows_next=True)


def slice_leaves(tree: Any, at: Any) -> Any:
    """A nested dict with every leaf indexed by `at`."""
    return map_leaves(lambda leaf: leaf[at], tree)


def join_leaves(tree: Any, more: Any) -> Any:
    """Two nested dicts with the same keys as one: leaves are concatenated along their first axis."""
    return map_leaves(lambda *leaves: np.concatenate(leaves), tree, more)


def split_episodes(
    name: str, parts: Iterable[FileRows], final_obs: Callable[[int], Any] | None = None
) -> Iterator[EpisodeBlock]:
    """Split the rows of a file into blocks of one episode each.

    If a file has no next observations, the next observation of a row is the row after it; `final_obs` gives the true
    final observation [1, …] of an episode. If a file does not say which steps were truncated, an episode that does not
    terminate is truncated at its last step.
    """
    held: FileRows | None = None
    for part in parts:
        rows = part if held is None else FileRows(*map(join_leaves, held, part))
        edges = [0, *(np.flatnonzero(np.diff(rows.episode)) + 1).tolist(), len(rows.episode)]
        for start, stop in pairwise(edges[:-1]):
            yield _block(name, rows, start, stop, final_obs, is_last=True)
        last = max(edges[-2], edges[-1] - _HELD)
        if last > edges[-2]:
            yield _block(name, rows, edges[-2], last, final_obs, is_last=False)
        held = FileRows(*(slice_leaves(tree, slice(last, None)) for tree in rows))
    if held is not None:
        yield _block(name, held, 0, len(held.episode), final_obs, is_last=True)


def _block(
    name: str, rows: FileRows, start: int, stop: int, final_obs: Callable[[int], Any] | None, *, is_last: bool
) -> EpisodeBlock:
    number, size = int(rows.episode[start]), stop - start
    fields = slice_leaves(rows.fields, slice(start, stop))
    obs, action, reward = fields.pop("obs"), fields.pop("action"), fields.pop("reward", np.zeros(size, np.float32))
    knows_next = True
    if rows.next_obs:
        following = slice_leaves(rows.next_obs["obs"], slice(start, stop))
    elif not is_last:
        following = slice_leaves(rows.fields["obs"], slice(start + 1, stop + 1))
    else:
        knows_next = final_obs is not None
        final = slice_leaves(obs, slice(-1, None)) if final_obs is None else final_obs(number)
        following = join_leaves(slice_leaves(obs, slice(1, None)), final)
    terminated = fields.pop("terminated", np.zeros(size, bool))
    truncated = fields.pop("truncated", None)
    if truncated is None:
        truncated = np.zeros(size, bool)
        truncated[-1] = is_last and not terminated[-1]
    where = f"{name}, episode {number}"
    return EpisodeBlock(where, obs, following, action, reward, terminated, truncated, fields, is_last, knows_next)


# Filling a buffer


def declared_fields(buffer: Any) -> Mapping[str, Tree]:
    """All fields that a buffer declares."""
    return buffer._schema.trees


def extra_fields(name: str, buffer: Any) -> Mapping[str, Tree]:
    """The extra fields that a buffer declares; raises if it cannot be filled."""
    own = _OWN.get(type(buffer))
    if own is None:
        remedy = "Pass a ReplayBuffer, a RolloutBuffer or a DistillationBuffer."
        raise SchemaError(explain(name, "a buffer", type(buffer).__name__, remedy))
    return {field: tree for field, tree in declared_fields(buffer).items() if field not in own}


def fill(name: str, buffer: Any, blocks: Iterable[EpisodeBlock], steps: int, final_obs: FinalObs = "repeat") -> Any:
    """Stream `steps` steps into a buffer; returns the buffer.

    Args:
        name: the function that the caller called, for messages.
        buffer: a buffer that `extra_fields` accepts.
        blocks: the steps, whose `extra` are the buffer's extra fields.
        steps: the number of steps of all blocks.
        final_obs: the treatment of the last step of an episode that did not terminate, if the dataset lacks its next
            observation: "repeat" stores its own observation as the next one, "drop" leaves it out, and None leaves it
            out and warns.
    """
    remedy = "Say what becomes of a last step without a next observation."
    one_of("final_obs", final_obs, ("drop", "repeat", None), remedy)
    left_out: list[int] = []
    blocks = show_progress(blocks, steps, "reading episodes", lambda block: block.size)
    if final_obs != "repeat" and not isinstance(buffer, DistillationBuffer):
        blocks = _drop_unknown_next(blocks, left_out)
    if isinstance(buffer, RolloutBuffer):
        room = buffer.num_steps - buffer.num_stored
        if final_obs == "repeat":
            _require_room(name, steps, room)
        elif steps > room:
            blocks = _collect(name, blocks, room)
    write = {ReplayBuffer: _to_replay, RolloutBuffer: _to_rollout, DistillationBuffer: _to_distillation}[type(buffer)]
    stored = write(name, buffer, blocks)
    if left_out and final_obs is None:
        lost = f"{len(left_out)} last step{'s' if len(left_out) > 1 else ''} without"
        remedy = 'They were left out. Pass final_obs="drop" if that is right, or "repeat" to keep them.'
        warnings.warn(explain(name, "a next observation of every step", lost, remedy), DataWarning, stacklevel=3)
    steps -= len(left_out)
    if stored < steps:
        remedy = "the oldest were overwritten. Make the buffer larger: the last observation of an episode is a row too."
        warnings.warn(_too_small(name, steps, stored, remedy), DataWarning, stacklevel=3)
    return buffer


def _drop_unknown_next(blocks: Iterable[EpisodeBlock], left_out: list[int]) -> Iterator[EpisodeBlock]:
    """The blocks without steps that would bootstrap from an unknown next observation."""
    for block in blocks:
        if block.knows_next or block.terminated[-1]:
            yield block
            continue
        left_out.append(1)
        shorter = block.without_last()
        if shorter.size:
            yield shorter


def _collect(name: str, blocks: Iterable[EpisodeBlock], room: int) -> list[EpisodeBlock]:
    """All blocks; raises if they have more than `room` steps, which is unknown before they are read."""
    fitting: list[EpisodeBlock] = []
    steps = 0
    for block in blocks:
        steps += block.size
        if steps <= room:
            fitting.append(block)
    _require_room(name, steps, room)
    return fitting


def _require_room(name: str, steps: int, room: int) -> None:
    if steps > room:
        raise BufferFullError(_too_small(name, steps, room, f"make the rollout with num_steps={steps}."))


def _too_small(name: str, steps: int, room: int, remedy: str) -> str:
    lost = f"{steps - room} step{'s' if steps - room > 1 else ''} did not fit: {remedy}"
    return explain(name, f"room for {steps} steps", f"room for {room}", lost)


def _to_replay(name: str, replay: ReplayBuffer, blocks: Iterable[EpisodeBlock]) -> int:
    """Add the steps; returns how many of them are stored at the end."""
    before = replay.storage.heads.clone()
    steps = [0] * (replay.num_envs or 1)
    env: int | None = None
    try:
        for block in blocks:
            env = steps.index(min(steps)) if env is None else env
            steps[env] += block.size
            _extend(replay, block, env)
            if block.is_last:
                env = _cut(replay, env)
    finally:
        if env is not None:  # the file broke off inside an episode
            _cut(replay, env)
    if int((replay.storage.heads - before).max()) <= replay.capacity // len(steps):
        return sum(steps)  # nothing was overwritten; the ids of all rows take memory
    row, column = replay.ids() // len(steps), replay.ids() % len(steps)
    return int((row >= before[column]).sum())


def _extend(replay: ReplayBuffer, block: EpisodeBlock, env: int) -> None:
    batch = {field: getattr(block, field) for field in (*STEP, "next_obs")} | block.extra
    if replay.num_envs is None:
        replay.extend(batch)
    else:
        replay.extend(slice_leaves(batch, (slice(None), None)), env_ids=[env])


def _cut(replay: ReplayBuffer, env: int) -> None:
    replay.cut(None if replay.num_envs is None else [env])


def _to_rollout(name: str, rollout: RolloutBuffer, blocks: Iterable[EpisodeBlock]) -> int:
    before = rollout.num_stored
    if rollout.num_envs is not None:
        remedy = "Make it with num_envs=None: episodes are read one after the other."
        raise SchemaError(explain(name, "a rollout with num_envs=None", rollout.num_envs, remedy))
    for block in blocks:
        if block.is_last and not (block.terminated[-1] or block.truncated[-1]):
            remedy, got = "Read the dataset into a ReplayBuffer.", "an episode without an end"
            raise SchemaError(explain(block.where, "terminated or truncated at its last step", got, remedy))
        for t in range(block.size):
            step = {field: slice_leaves(getattr(block, field), t) for field in STEP}
            final = {"final_obs": slice_leaves(block.next_obs, t)} if block.truncated[t] else {}
            rollout.add(**step, **final, **slice_leaves(block.extra, t))
    return rollout.num_stored - before


def _to_distillation(name: str, buffer: DistillationBuffer, blocks: Iterable[EpisodeBlock]) -> int:
    ring = buffer._ring
    before = ring.head
    for block in blocks:
        buffer.add(block.obs, block.action, **block.extra)
    return ring.head - max(ring.oldest, before)


# Writing a file


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
def write_atomically(name: str, path: str | PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path to write to; afterwards the file or folder is moved to `path`, which must not exist."""
    path = Path(path)
    _require_absent(name, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".relive-", dir=path.parent) as folder:  # new, so that nobody else uses it
        unfinished = Path(folder) / path.name
        yield unfinished
        try:
            if unfinished.is_dir():
                unfinished.rename(path)
            else:
                os.link(unfinished, path)  # a rename would replace a file that appeared at `path` meanwhile
        except OSError:
            _require_absent(name, path)
            unfinished.rename(path)  # a disk without hard links


def _require_absent(name: str, path: Path) -> None:
    if os.path.lexists(path):
        raise FileExistsError(explain(name, "a path where nothing is", repr(str(path)), "Delete it, or pass another."))


def episode_arrays(replay: ReplayBuffer) -> Iterator[dict[str, Any]]:
    """Each episode as nested dicts of arrays [T, …]; a terminal shows the progress of long writes."""
    for episode in show_progress(replay.episodes(), len(replay), "writing episodes", len):
        yield {name: _to_arrays(value) for name, value in episode.items() if name != "index"}


def _to_arrays(value: Any) -> Any:
    """Tensors as arrays, nested as they are; bfloat16, which numpy lacks, becomes float32."""
    if isinstance(value, torch.Tensor):
        return (value.float() if DTYPES[value.dtype] is None else value).cpu().numpy()
    return {name: _to_arrays(part) for name, part in value.items()}
