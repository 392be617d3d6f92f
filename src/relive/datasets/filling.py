"""Filling a buffer with the episodes of a dataset, and reading the episodes of a buffer to write a dataset."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from relive.checkpoint.progress import show_progress
from relive.datasets.untrusted import dataset_error
from relive.distillation import DistillationBuffer
from relive.errors import BufferFullError, explain, warn_user
from relive.replay.buffer import ReplayBuffer
from relive.rollout.buffer import RolloutBuffer
from relive.schema.checks import check_choice, check_nonempty
from relive.schema.fields import DTYPES, Tree, map_leaves

STEP_FIELDS = ("obs", "action", "reward", "terminated", "truncated")
"""The standard fields of a step."""

FinalObs: TypeAlias = Literal["drop", "repeat"] | None
"""Treatment of an episode's last step if it was truncated and the file lacks its next observation."""

_OVERLAP_ROWS = 2
"""Number of rows to hold back until the next part is read: dropping an episode's last step changes the one before."""

_STANDARD_FIELDS: dict[type, tuple[str, ...]] = {
    ReplayBuffer: STEP_FIELDS,
    RolloutBuffer: (*STEP_FIELDS, "value", "log_prob"),
    DistillationBuffer: ("obs", "action"),
}
"""The classes of buffers that can be filled, and the fields that buffers of each class always have."""


@dataclass(frozen=True)
class EpisodeBlock:
    """Consecutive steps of one episode."""

    where: str
    """The name of the episode, for error messages."""
    steps: dict[str, Any]
    """Arrays [T, …], or nested dicts of them: the fields of `STEP_FIELDS`, "next_obs" and extra fields."""
    is_last: bool = True
    """Whether the episode ends with this block."""
    has_final_obs: bool = True
    """Whether the next observation of the last step is known; otherwise it repeats the last observation."""

    def __len__(self) -> int:
        return len(self.steps["terminated"])

    def drop_last_step(self) -> EpisodeBlock:
        """Return the block without its last step, whose observation becomes final; a truncation moves one step back."""
        steps = slice_leaves(self.steps, slice(None, -1))
        truncated = steps["truncated"].copy()
        truncated[-1:] |= self.steps["truncated"][-1]
        return replace(self, steps={**steps, "truncated": truncated}, has_final_obs=True)


def slice_leaves(tree: Any, at: Any) -> Any:
    """Index every leaf of a nested dict with `at`."""
    return map_leaves(lambda leaf: leaf[at], tree)


def join_leaves(tree: Any, next_tree: Any) -> Any:
    """Concatenate the leaves of two nested dicts along their first axis."""
    return map_leaves(lambda *leaves: np.concatenate(leaves), tree, next_tree)


def split_episodes(
    name: str, parts: Iterable[tuple[np.ndarray, dict[str, Any]]], final_obs: Callable[[int], Any] | None
) -> Iterator[EpisodeBlock]:
    """Split consecutive rows into blocks of one episode each.

    Without next observations, the next observation of a row is the row after it. Without flags of truncated steps, an
    episode that does not terminate is truncated at its last step. Without rewards, they are 0.

    Args:
        name: the dataset, for messages.
        parts: the episodes [K] of rows and their fields [K, …]: "obs", "action", and more if the dataset has them.
        final_obs: a function that reads the final observation [1, …] of an episode; None if the file has none.
    """
    overlap: tuple[np.ndarray, dict[str, Any]] | None = None

    def make_block(start: int, stop: int, *, is_last: bool) -> EpisodeBlock:
        number = int(episode[start])
        steps, has_final_obs = slice_leaves(fields, slice(start, stop)), True
        if "next_obs" not in steps and not is_last:
            steps["next_obs"] = slice_leaves(fields["obs"], slice(start + 1, stop + 1))
        elif "next_obs" not in steps:
            has_final_obs = final_obs is not None
            final = slice_leaves(steps["obs"], slice(-1, None)) if final_obs is None else final_obs(number)
            steps["next_obs"] = join_leaves(slice_leaves(steps["obs"], slice(1, None)), final)
        steps.setdefault("reward", np.zeros(stop - start, np.float32))
        terminated = steps.setdefault("terminated", np.zeros(stop - start, bool))
        if "truncated" not in steps:
            steps["truncated"] = np.zeros(stop - start, bool)
            steps["truncated"][-1] = is_last and not terminated[-1]
        return EpisodeBlock(f"{name}, episode {number}", steps, is_last, has_final_obs)

    for part in parts:
        episode, fields = part
        if overlap is not None:
            episode, fields = np.concatenate([overlap[0], episode]), join_leaves(overlap[1], fields)
        edges = [0, *(np.flatnonzero(np.diff(episode)) + 1).tolist(), len(episode)]
        for start, stop in pairwise(edges[:-1]):
            yield make_block(start, stop, is_last=True)
        last = max(edges[-2], edges[-1] - _OVERLAP_ROWS)
        if last > edges[-2]:
            yield make_block(edges[-2], last, is_last=False)
        overlap = episode[last:], slice_leaves(fields, slice(last, None))
    if overlap is not None:
        episode, fields = overlap
        yield make_block(0, len(episode), is_last=True)


def declared_fields(buffer: Any) -> Mapping[str, Tree]:
    """Return all declared fields of a buffer."""
    return buffer._schema.trees


def extra_fields(name: str, buffer: Any) -> Mapping[str, Tree]:
    """Return the extra fields of a buffer; raises if the buffer cannot be filled."""
    standard_fields = _STANDARD_FIELDS.get(type(buffer))
    if standard_fields is None:
        remedy = "Pass a ReplayBuffer, a RolloutBuffer or a DistillationBuffer."
        raise dataset_error(name, "a buffer", type(buffer).__name__, remedy)
    return {field: tree for field, tree in declared_fields(buffer).items() if field not in standard_fields}


def fill(name: str, buffer: Any, blocks: Iterable[EpisodeBlock], steps: int, final_obs: FinalObs = "repeat") -> Any:
    """Stream `steps` steps into a buffer; returns the buffer.

    Args:
        name: the function that the caller called, for messages.
        buffer: a buffer that `extra_fields` accepts.
        blocks: the steps, with the buffer's extra fields.
        steps: the number of steps of all blocks.
        final_obs: the treatment of the last step of an episode that did not terminate, if the dataset lacks its next
            observation: "repeat" stores its own observation as the next one, "drop" leaves it out, and None leaves it
            out and warns.
    """
    remedy = "Choose what to do with a last step without a next observation."
    check_choice("final_obs", final_obs, ("drop", "repeat", None), remedy)
    shortened_episodes: list[str] = []
    blocks = show_progress(blocks, steps, "reading episodes", len)
    if final_obs != "repeat" and not isinstance(buffer, DistillationBuffer):
        blocks = _drop_unknown_next(blocks, shortened_episodes)
    if isinstance(buffer, RolloutBuffer):
        room = buffer.num_steps - buffer.num_stored
        if final_obs == "repeat":
            _require_room(name, steps, room)
        elif steps > room:
            blocks = _collect_blocks(name, blocks, room)
    write = {ReplayBuffer: _to_replay, RolloutBuffer: _to_rollout, DistillationBuffer: _to_distillation}[type(buffer)]
    num_stored = write(name, buffer, blocks)
    if shortened_episodes and final_obs is None:
        got = f"{len(shortened_episodes)} last step{'s' if len(shortened_episodes) > 1 else ''} without"
        remedy = 'They were left out. Pass final_obs="drop" if that is right, or "repeat" to keep them.'
        warn_user(explain(name, "a next observation for every step", got, remedy))
    steps -= len(shortened_episodes)
    if num_stored < steps:
        remedy = "the oldest were overwritten. Make the buffer larger: the last observation of an episode is a row too."
        warn_user(_explain_lack_of_space(name, steps, num_stored, remedy))
    return buffer


def _drop_unknown_next(blocks: Iterable[EpisodeBlock], shortened_episodes: list[str]) -> Iterator[EpisodeBlock]:
    """Drop last steps without a next observation to bootstrap from; collects the names of their episodes."""
    for block in blocks:
        if not block.has_final_obs and not block.steps["terminated"][-1]:
            shortened_episodes.append(block.where)
            block = block.drop_last_step()  # noqa: PLW2901
        if len(block):
            yield block


def _collect_blocks(name: str, blocks: Iterable[EpisodeBlock], room: int) -> list[EpisodeBlock]:
    """Read all blocks into a list; raises if they have more than `room` steps."""
    fitting_blocks: list[EpisodeBlock] = []
    steps = 0
    for block in blocks:
        steps += len(block)
        if steps <= room:
            fitting_blocks.append(block)
    _require_room(name, steps, room)
    return fitting_blocks


def _require_room(name: str, steps: int, room: int) -> None:
    if steps > room:
        raise BufferFullError(_explain_lack_of_space(name, steps, room, f"make the rollout with num_steps={steps}."))


def _explain_lack_of_space(name: str, steps: int, room: int, remedy: str) -> str:
    message = f"{steps - room} step{'s' if steps - room > 1 else ''} did not fit: {remedy}"
    return explain(name, f"room for {steps} steps", f"room for {room}", message)


def _to_replay(name: str, replay: ReplayBuffer, blocks: Iterable[EpisodeBlock]) -> int:
    """Add the steps; returns the number of them that are still stored at the end."""
    before = replay.storage.heads.clone()
    steps = [0] * (replay.num_envs or 1)
    env: int | None = None

    def env_ids() -> list[int] | None:
        return None if replay.num_envs is None else [env or 0]

    try:
        for block in blocks:
            env = steps.index(min(steps)) if env is None else env
            steps[env] += len(block)
            batch = block.steps if replay.num_envs is None else slice_leaves(block.steps, (slice(None), None))
            replay.extend(batch, env_ids=env_ids())
            if block.is_last:
                replay.cut(env_ids())
                env = None
    finally:
        if env is not None:  # an error occurred inside an episode: end the episode
            replay.cut(env_ids())
    if int((replay.storage.heads - before).max()) <= replay.capacity // len(steps):
        return sum(steps)  # no added row was overwritten: all are still stored
    row, column = replay.ids() // len(steps), replay.ids() % len(steps)
    return int((row >= before[column]).sum())


def _to_rollout(name: str, rollout: RolloutBuffer, blocks: Iterable[EpisodeBlock]) -> int:
    before = rollout.num_stored
    if rollout.num_envs is not None:
        remedy = "Make it with num_envs=None: episodes are read one after the other."
        raise dataset_error(name, "a rollout with num_envs=None", rollout.num_envs, remedy)
    for block in blocks:
        terminated, truncated = block.steps["terminated"], block.steps["truncated"]
        if block.is_last and not (terminated[-1] or truncated[-1]):
            remedy, got = "Read the dataset into a ReplayBuffer.", "an episode without an end"
            raise dataset_error(block.where, "terminated or truncated at its last step", got, remedy)
        for t in range(len(block)):
            step = slice_leaves(block.steps, t)
            final = step.pop("next_obs")
            rollout.add(**step, final_obs=final if truncated[t] else None)
    return rollout.num_stored - before


def _to_distillation(name: str, buffer: DistillationBuffer, blocks: Iterable[EpisodeBlock]) -> int:
    ring = buffer._ring
    before = ring.head
    fields = {"obs", "action", *declared_fields(buffer)}
    for block in blocks:
        buffer.add(**{field: values for field, values in block.steps.items() if field in fields})
    return ring.head - max(ring.oldest, before)


def require_ordered(name: str, replay: Any) -> None:
    """Raise unless `replay` stores the observations of an episode in order."""
    if type(replay) is not ReplayBuffer or replay.storage.stores_next_obs:
        remedy = 'Use a ReplayBuffer with next_obs="shared": only it stores the observations of an episode in order.'
        raise dataset_error(name, "a replay buffer in time order", repr(replay), remedy)


def require_steps(name: str, replay: Any) -> None:
    """Raise unless `replay` stores observations in order and has at least one step."""
    require_ordered(name, replay)
    check_nonempty(name, len(replay))


@contextmanager
def write_atomically(name: str, path: str | PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path to write to; afterwards the file or folder is moved to `path`, which must not exist."""
    path = Path(path)
    _require_absent(name, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".relive-", dir=path.parent) as folder:
        unfinished = Path(folder) / path.name
        yield unfinished
        try:
            if unfinished.is_dir():
                unfinished.rename(path)
            else:
                os.link(unfinished, path)  # a rename would replace a file that appeared at `path` meanwhile
        except OSError:
            _require_absent(name, path)
            unfinished.rename(path)  # for file systems without hard links


def _require_absent(name: str, path: Path) -> None:
    if os.path.lexists(path):
        raise FileExistsError(
            explain(name, "a path that does not exist", repr(str(path)), "Delete it, or pass another.")
        )


def episode_arrays(replay: ReplayBuffer) -> Iterator[dict[str, Any]]:
    """Yield each episode as nested dicts of arrays [T, …]; a terminal shows the progress of long writes."""
    for episode in show_progress(replay.episodes(), len(replay), "writing episodes", len):
        yield {name: _to_arrays(value) for name, value in episode.items() if name != "index"}


def _to_arrays(value: Any) -> Any:
    """Convert nested tensors to nested arrays; bfloat16, which numpy lacks, becomes float32."""
    if isinstance(value, torch.Tensor):
        return (value.float() if DTYPES[value.dtype] is None else value).cpu().numpy()
    return {name: _to_arrays(part) for name, part in value.items()}
