"""The episodes of a replay buffer as arrays, for files."""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from relive.checkpoint.progress import watched
from relive.errors import SchemaError, explain
from relive.fields.schema import DTYPES
from relive.replay.buffer import ReplayBuffer


def require_ordered(name: str, replay: Any) -> None:
    """Raise unless `replay` stores the observations of an episode in order."""
    if type(replay) is not ReplayBuffer or replay.storage.keeps_next:
        remedy = 'Use a ReplayBuffer with next_obs="shared": only it stores the observations of an episode in order.'
        raise SchemaError(explain(name, "a replay buffer in time order", repr(replay), remedy))


def require_free(name: str, path: str | PathLike[str]) -> Path:
    """The path; raises if it exists."""
    path = Path(path)
    if path.exists():
        raise FileExistsError(explain(name, "a path where nothing is", repr(str(path)), "Delete it, or pass another."))
    return path


def written(replay: ReplayBuffer) -> Iterator[dict[str, Any]]:
    """Each episode as nested dicts of arrays [T, …]; a terminal shows the progress of long writes."""
    for episode in watched(replay.episodes(), len(replay), "writing episodes", len):
        yield {name: arrays(value) for name, value in episode.items() if name != "index"}


def arrays(value: Any) -> Any:
    """Tensors as arrays, nested as they are; bfloat16, which numpy lacks, becomes float32."""
    if isinstance(value, torch.Tensor):
        return (value.float() if DTYPES[value.dtype] is None else value).cpu().numpy()
    return {name: arrays(part) for name, part in value.items()}
