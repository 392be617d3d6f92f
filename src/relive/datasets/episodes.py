"""The episodes of a replay buffer as arrays, for files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from relive.checkpoint.progress import watched
from relive.errors import SchemaError, explain
from relive.fields.checks import nonempty
from relive.fields.schema import DTYPES
from relive.replay.buffer import ReplayBuffer


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
