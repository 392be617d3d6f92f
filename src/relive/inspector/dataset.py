"""A Minari dataset as a source of rows: read episode by episode, never all at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from relive.datasets.minari import Episode, read_episodes
from relive.errors import SchemaError
from relive.fields.conversion import as_tensor
from relive.fields.schema import Path, leaves_of
from relive.inspector.source import Columns, Episodes, Source

_HOST = torch.device("cpu")
_FIELDS = ("obs", "action", "reward", "terminated", "truncated", "info")


def source_of_dataset(dataset: Any) -> Source:
    """A source of the steps of all episodes, one episode after the other."""
    reader = _EpisodeReader(dataset)
    starts, stops = reader.starts, reader.stops
    columns: Columns = {}
    if len(starts):
        columns = {path: (tuple(leaf.shape[1:]), leaf.dtype) for path, leaf in reader.episode(0).items()}
    complete = np.ones(len(starts), bool)
    spans = Episodes(starts, stops, np.zeros(len(starts), np.int64), complete, ~complete, np.arange(len(starts)))
    size = dataset.storage.metadata.get("dataset_size")
    about = {
        "kind": "MinariDataset",
        "id": dataset.id,
        "rows": int(stops[-1]) if len(stops) else 0,
        "episodes": len(starts),
        "bytes": None if size is None else round(1e6 * float(size)),
    }
    stretches = list(zip(starts.tolist(), stops.tolist(), strict=True))
    return Source(about, about["rows"], columns, reader.read, episodes=spans, stretches=stretches)


class _EpisodeReader:
    """Reads rows of a dataset's episodes, and keeps the last episode in memory."""

    def __init__(self, dataset: Any) -> None:
        metadata = dataset.storage.get_episode_metadata(dataset.episode_indices)
        steps = {
            int(number): int(facts["total_steps"])
            for number, facts in zip(dataset.episode_indices, metadata, strict=True)
            if facts["total_steps"]
        }
        self._dataset = dataset
        self._numbers = list(steps)
        self.stops = np.cumsum(list(steps.values()), dtype=np.int64)
        self.starts = self.stops - np.array(list(steps.values()), np.int64)
        self._infos = _numeric(dataset, self._numbers[0]) if steps else []
        self._last: tuple[int, dict[Path, torch.Tensor]] | None = None

    def episode(self, at: int) -> dict[Path, torch.Tensor]:
        """The leaves [T, …] of an episode by its place."""
        if self._last is None or self._last[0] != at:
            self._last = at, _leaves(next(read_episodes(self._dataset, self._infos, [self._numbers[at]])))
        return self._last[1]

    def read(self, start: int, stop: int, paths: Iterable[Path]) -> dict[Path, torch.Tensor]:
        """The leaves [B, …] of rows from `start` to `stop`, which lie in one episode."""
        at = int(np.searchsorted(self.stops, start, "right"))
        first = int(self.starts[at])
        return {path: self.episode(at)[path][start - first : stop - first] for path in paths}


def _leaves(episode: Episode) -> dict[Path, torch.Tensor]:
    found = {path: leaf for name in _FIELDS for path, leaf in leaves_of((name,), getattr(episode, name))}
    return {path: as_tensor(".".join(path), leaf, _HOST)[: episode.size] for path, leaf in found.items()}


def _numeric(dataset: Any, number: int) -> list[str]:
    """The names of an episode's infos that are numbers per step; only these are shown as fields."""

    def is_numeric(name: str) -> bool:
        try:
            next(read_episodes(dataset, [name], [number]))
        except SchemaError:
            return False
        return True

    return list(filter(is_numeric, next(dataset.iterate_episodes([number])).infos or {}))
