"""Reading a LeRobot dataset (v3) into a buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch

from relive.datasets.blocks import Stretch, split
from relive.datasets.columns import Column, Columns, Encoders, Plan, chosen_columns, chosen_encoders
from relive.datasets.filling import FinalObs, fill
from relive.datasets.installed import required
from relive.datasets.lerobot.frames import Frames
from relive.datasets.lerobot.info import Info
from relive.datasets.metadata import wrong
from relive.fields.schema import Path as FieldPath
from relive.replay.samplers import Sampler
from relive.storage import Memory

NAMES = {"observation": "obs", "action": "action"}
NEXT = {"next.reward": "reward", "next.done": "terminated", "next.truncated": "truncated"}
FINAL_OBS = "meta/final_obs.parquet"
"""The final observation of each episode, where `to_lerobot` wrote the dataset."""
_COUNTED = ("index", "episode_index", "frame_index", "timestamp", "task")
"""Columns that are left out unless the caller names them: the order of rows says what they count, and task_index is the
number of the task."""
_ROWS_OF_FLAGS = 1 << 16


def from_lerobot(
    path: str | PathLike[str],
    buffer: Any = None,
    *,
    columns: Columns | None = None,
    encode: Encoders | None = None,
    final_obs: FinalObs = "repeat",
    sampler: Sampler | None = None,
    device: torch.device | str | Memory = "cpu",
    seed: int | None = None,
) -> Any:
    """Read a LeRobot dataset (v3), block by block, into a buffer; returns the buffer.

    The feature `observation.images.top` is the part ("images", "top") of the observation, `action` the action,
    `next.reward` the reward, `next.done` terminated and `next.truncated` truncated; all others, like `task_index`, are
    extra fields. `index`, `episode_index`, `frame_index` and `timestamp` are left out unless `columns` names them, or
    the buffer has extra fields of these names. A dataset without rewards gives 0; an episode that does not end with
    `next.done` is truncated at its last step, unless the dataset has `next.truncated`.

    Images are [height, width, channels] of uint8. So are the frames of videos, which are lossy: they are not the pixels
    that the camera saw, and decoders may differ in their last bits.

    The format has no final observations. A last step stores its own observation as the next one unless `final_obs` says
    otherwise: imitation needs every action, and never looks at the next observation.

    Args:
        path: the folder of the dataset, which has `meta/info.json`.
        buffer: the buffer to fill: a ReplayBuffer, a RolloutBuffer with num_envs=None or a DistillationBuffer. None
            makes a ReplayBuffer with space for all steps, in which float64 becomes float32.
        columns: the fields of features that are not the usual ones: `{"observation.images": None}` leaves out all
            cameras, `{"next.success": "success"}` renames a feature.
        encode: for each feature of texts, a function that turns a text into numbers; each text is encoded once. "task"
            is the text of the task: `{"task": embed}` makes it the extra field "task".
        final_obs: "repeat" stores a truncated last step with its own observation as the next one, from which a learner
            then bootstraps; "drop" leaves it out. None is "drop" with a `DataWarning`.
        sampler: the sampler of the new buffer.
        device: the device or memory of the new buffer.
        seed: the seed of the new buffer.
    """
    required("pyarrow", "lerobot")
    chosen, encoders = chosen_columns(columns), chosen_encoders(encode)
    info = Info(Path(path))
    frames = Frames(info)
    found = _columns(info, frames, encoders)
    plan = Plan("from_lerobot", info.name, info.nbytes, found, _usual_path, chosen, encoders, buffer, ".")
    steps, ends = _counted(info, frames, plan)
    if buffer is None:
        buffer = plan.made(steps + ends, sampler, device, seed)
    blocks = split(info.name, _stretches(frames, plan), _finals(frames, plan))
    return fill("from_lerobot", buffer, blocks, steps, final_obs)


def _usual_path(column: str) -> FieldPath | None:
    if column in _COUNTED:
        return None
    first, *rest = column.split(".")
    if first == "next" and rest and f"next.{rest[0]}" in NEXT:
        return (NEXT[f"next.{rest[0]}"], *rest[1:])
    return (NAMES.get(first, first), *rest)


def _columns(info: Info, frames: Frames, encode: Encoders) -> dict[str, Column]:
    found = {name: feature.column for name, feature in info.features.items()}
    if "task_index" in found:
        found["task"] = Column((), np.dtype(object), "")
    for name in encode.keys() & found.keys():  # the first text tells how long an encoded one is
        for rows in frames.rows([name], 1):
            found[name] = Column((), found[name].dtype, rows[name][0])
            break
    return found


def _counted(info: Info, frames: Frames, plan: Plan) -> tuple[int, int]:
    """How many steps a dataset has, and how many of them end an episode."""
    steps, ends, last, was_end, flags = 0, 0, None, True, plan.flags
    for rows in frames.rows(flags, _ROWS_OF_FLAGS):
        episode = rows["episode_index"]
        is_end = np.any([rows[name] != 0 for name in flags], 0) if flags else np.zeros(len(episode), bool)
        # An episode ends where its number changes, or where a flag says so; both together are one end.
        changes = np.diff(episode, prepend=episode[0] if last is None else last) != 0
        before = np.concatenate([[was_end], is_end[:-1]])
        ends += int(is_end.sum()) + int((changes & ~before).sum())
        steps, last, was_end = steps + len(episode), episode[-1], bool(is_end[-1])
    if not steps:
        raise wrong(info.name, "at least 1 frame", 0)
    return steps, ends + (not was_end)


def _stretches(frames: Frames, plan: Plan) -> Iterator[Stretch]:
    for rows in frames.rows(plan.paths, plan.rows_at_once):
        yield Stretch(plan.trees({column: rows[column] for column in plan.paths}), rows["episode_index"])


def _finals(frames: Frames, plan: Plan) -> Callable[[int], Any] | None:
    """The final observation of an episode by its number, where `to_lerobot` wrote the dataset."""
    following = frames.finals(FINAL_OBS, plan.columns_of("obs"))
    return following and (lambda number: plan.trees(following(number))["obs"])
