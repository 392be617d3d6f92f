"""A Minari dataset as a source of rows: read episode by episode, never all at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from relive.datasets.minari.dataset import Episode, episodes_of
from relive.errors import SchemaError
from relive.fields.conversion import as_tensor
from relive.fields.schema import Path, leaves_of
from relive.inspector.source import Columns, Episodes, Source

_HOST = torch.device("cpu")
_FIELDS = ("obs", "action", "reward", "terminated", "truncated", "info")


def source_of_dataset(dataset: Any) -> Source:
    """A source of the steps of all episodes, one episode after the other."""
    metadata = list(dataset.storage.get_episode_metadata(dataset.episode_indices))
    found = [
        (int(number), int(facts["total_steps"]))
        for number, facts in zip(dataset.episode_indices, metadata, strict=True)
        if facts["total_steps"]
    ]
    stops = np.cumsum([steps for _, steps in found], dtype=np.int64)
    starts = np.concatenate([[0], stops[:-1]]).astype(np.int64) if found else stops
    infos = _numeric(dataset, found[0][0]) if found else []
    recent: dict[int, dict[Path, torch.Tensor]] = {}

    def episode(at: int) -> dict[Path, torch.Tensor]:
        if at not in recent:
            recent.clear()
            recent[at] = _leaves(next(episodes_of(dataset, infos, [found[at][0]])))
        return recent[at]

    def read(start: int, stop: int, paths: Iterable[Path]) -> dict[Path, torch.Tensor]:
        at = int(np.searchsorted(stops, start, "right"))
        first = int(starts[at])
        return {path: episode(at)[path][start - first : stop - first] for path in paths}

    columns: Columns = {}
    if found:
        columns = {path: (tuple(leaf.shape[1:]), leaf.dtype) for path, leaf in episode(0).items()}
    complete = np.ones(len(found), bool)
    spans = Episodes(starts, stops, np.zeros(len(found), np.int64), complete, ~complete, np.arange(len(found)))
    size = dataset.storage.metadata.get("dataset_size")
    about = {
        "kind": "MinariDataset",
        "id": dataset.id,
        "rows": int(stops[-1]) if found else 0,
        "episodes": len(found),
        "bytes": None if size is None else round(1e6 * float(size)),
    }
    return Source(
        about,
        about["rows"],
        columns,
        read,
        episodes=spans,
        stretches=list(zip(starts.tolist(), stops.tolist(), strict=True)),
    )


def _leaves(episode: Episode) -> dict[Path, torch.Tensor]:
    found = {path: leaf for name in _FIELDS for path, leaf in leaves_of((name,), getattr(episode, name))}
    return {path: as_tensor(".".join(path), leaf, _HOST)[: episode.size] for path, leaf in found.items()}


def _numeric(dataset: Any, number: int) -> list[str]:
    """The names of an episode's infos that are numbers per step; only these are shown as fields."""

    def is_numeric(name: str) -> bool:
        try:
            next(episodes_of(dataset, [name], [number]))
        except SchemaError:
            return False
        return True

    return list(filter(is_numeric, next(dataset.iterate_episodes([number])).infos or {}))
