"""Stored rows behind one interface, for reports: a buffer of any kind, or a Minari dataset read episode by episode."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from relive.datasets.minari import Episode, read_episodes
from relive.distillation import DistillationBuffer
from relive.errors import SchemaError, explain
from relive.replay.buffer import ReplayBuffer
from relive.replay.chains import Chains, of_stored
from relive.replay.ids import sort_rows
from relive.replay.ring import FINAL
from relive.rollout.buffer import RolloutBuffer
from relive.schema.conversion import as_tensor
from relive.schema.fields import Field, Path, Schema, Stacked, caller_shape, leaves_of
from relive.statistics.episodes import EpisodeStats

ENDS = ("terminated", "truncated", "cut", "running")
"""The ways in which an episode stops: terminated, truncated, cut without an end, or still running."""

_ROUND = ("round",)

Columns = dict[Path, tuple[tuple[int, ...], torch.dtype]]
"""The shape and dtype of each leaf of a row."""

Read = Callable[[int, int, Iterable[Path]], dict[Path, torch.Tensor]]
"""A function of start, stop and paths that returns the leaves [B, …] of these rows."""


@dataclass(frozen=True)
class Episodes:
    """The places of E episodes: arrays [E], in the order of rows."""

    start: np.ndarray
    """The number of the first row."""
    stop: np.ndarray
    env: np.ndarray
    began: np.ndarray
    """Whether the first step of the episode is stored."""
    is_open: np.ndarray
    """Whether the last stored step is the newest of its environment, so that an episode without an end goes on."""
    time: np.ndarray
    """A number that orders the episodes of all environments by the time of their end."""

    def __len__(self) -> int:
        return len(self.start)


@dataclass
class RowSource:
    """A buffer or a dataset as rows 0 to `length`, by environment and then by time."""

    about: dict[str, Any]
    """Facts that need no reading of rows, in the order of the report."""
    length: int
    columns: Columns
    read: Read
    episodes: Episodes | None = None
    stats: EpisodeStats | None = None
    mass: torch.Tensor | None = None
    """The priorities of rows, to the power of alpha."""
    drawn: torch.Tensor | None = None
    """The number of draws of each row."""
    reuse: dict[str, Any] = field(default_factory=dict)
    """The sampler's own figures about its draws."""
    stacks: dict[Path, int] = field(default_factory=dict)
    """The axis of a row along which frames are stacked, the newest last."""
    chains: Chains = field(default_factory=Chains)
    """Counts of steps that continue the step before them."""
    stretches: list[tuple[int, int]] | None = None
    """Stretches of rows that are read together; None if any rows can be."""


def buffer_source(thing: Any) -> RowSource:
    """The source of a buffer; the caller holds the buffer's lock."""
    for kind, take in _KINDS.items():
        if isinstance(thing, kind):
            return take(thing)
    remedy = "Pass one of them, or the path of a checkpoint or a Minari dataset."
    kinds = ", ".join(kind.__name__ for kind in _KINDS)
    raise SchemaError(explain("inspect", f"one of {kinds}", type(thing).__name__, remedy))


def _facts(buffer: Any, **more: Any) -> dict[str, Any]:
    about = {"kind": type(buffer).__name__, "rows": len(buffer), **more}
    return {**about, "bytes": buffer.nbytes, "device": str(buffer.device)}


def _autoreset(buffer: ReplayBuffer | RolloutBuffer) -> str | None:
    return None if buffer.autoreset is None else buffer.autoreset.name


def _leaves_of(schema: Schema) -> Iterable[tuple[Path, Field]]:
    return zip(schema.paths, schema.fields, strict=True)


def _columns_of(schema: Schema) -> Columns:
    return {path: (caller_shape(leaf), leaf.dtype) for path, leaf in _leaves_of(schema)}


def _numbers(*tensors: torch.Tensor) -> tuple[np.ndarray, ...]:
    return tuple(tensor.cpu().numpy() for tensor in tensors)


def _replay_source(replay: ReplayBuffer) -> RowSource:
    storage = replay.storage
    ring = storage.ring
    ids, slots, starts = sort_rows(storage)
    columns = _columns_of(replay._schema)
    places = {path: i for i, path in enumerate(columns)}

    def read(start: int, stop: int, paths: Iterable[Path]) -> dict[Path, torch.Tensor]:
        paths = list(paths)
        leaves = storage.take(slots[start:stop], [places[path] for path in paths])
        return {path: leaf.cpu() for path, leaf in zip(paths, leaves, strict=True)}

    rows = ids // ring.num_envs
    written = int((ring.head - ring.floor).sum())
    oldest = int((ring.newest()[ids % ring.num_envs] - rows).max()) if len(ids) else None
    about = _facts(replay, capacity=replay.capacity, num_envs=replay.num_envs, written=written, oldest=oldest)
    about |= {
        "autoreset": _autoreset(replay),
        "next_obs": "stored" if storage.keeps_next else "shared",
        "sampler": repr(replay.sampler),
    }
    saved = {name: tensor.cpu() for name, tensor in replay.sampler.state().items()}
    place = slots.cpu()
    return RowSource(
        about,
        len(ids),
        columns,
        read,
        episodes=None if storage.keeps_next else _replay_episodes(replay, ids, slots, starts),
        stats=replay.stats,
        mass=saved["mass"][place] if "mass" in saved else None,
        drawn=saved["drawn"][place] if "drawn" in saved else None,
        reuse=_sampler_figures(saved, written),
        chains=of_stored(storage.rows),
        stacks={path: leaf.axis for path, leaf in _leaves_of(replay._schema) if isinstance(leaf, Stacked)},
    )


def _replay_episodes(replay: ReplayBuffer, ids: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor) -> Episodes:
    ring = replay.storage.ring
    begin = starts.nonzero().squeeze(1)
    stop = torch.cat([begin[1:], begin.new_tensor([len(ids)])]) if len(begin) else begin
    last, env = stop - 1, ids[begin] % ring.num_envs
    # How long ago it was, if the environments are stepped together. Rows that only reset take time, others do not.
    ago = ring.newest()[env] - ids[last] // ring.num_envs
    if not replay.storage.rows.next_step:
        ago = (ids % ring.num_envs).bincount(minlength=ring.num_envs).cumsum(0)[env] - stop
    is_open = ring.kind_at(ring.after(slots[last])) != FINAL
    began = ring.first.view(-1)[slots[begin]]
    return Episodes(*_numbers(begin, stop, env, began, is_open, -ago))


def _sampler_figures(saved: dict[str, torch.Tensor], written: int) -> dict[str, Any]:
    """The figures that every sampler keeps: how many rows were drawn in all, or how many an epoch has left."""
    known: dict[str, Any] = {}
    if "draws" in saved:
        known["draws"] = int(saved["draws"])
        known["per_row"] = known["draws"] / written if written else None
    if "ids" in saved:
        known["left_in_epoch"] = len(saved["ids"])
    return known


def _rollout_source(rollout: RolloutBuffer) -> RowSource:
    steps, envs = rollout.num_stored, rollout.num_envs or 1
    kept = rollout._flags.whole_mask(steps)
    # By environment, then time: t·N + n sorted by n.
    flat = torch.arange(steps * envs, device=rollout.device).view(steps, envs).T[kept.T]
    leaves = rollout._storage.leaves()
    columns: Columns = {path: (tuple(leaf.shape[2:]), leaf.dtype) for path, leaf in leaves.items()}

    def read(start: int, stop: int, paths: Iterable[Path]) -> dict[Path, torch.Tensor]:
        at = flat[start:stop]
        return {path: leaves[path].flatten(0, 1)[at].cpu() for path in paths}

    about = _facts(rollout, num_steps=rollout.num_steps, num_stored=steps, num_envs=rollout.num_envs)
    about |= {"reset_rows": int((~kept).sum()), "autoreset": _autoreset(rollout)}
    episodes = _rollout_episodes(rollout, flat) if len(flat) else None
    return RowSource(about, len(flat), columns, read, episodes=episodes, stats=rollout.stats)


def _rollout_episodes(rollout: RolloutBuffer, flat: torch.Tensor) -> Episodes:
    steps, envs = rollout.num_stored, rollout.num_envs or 1
    begins = rollout._flags.starts(steps).flatten()[flat]
    env = flat % envs
    starts = begins | torch.cat([env.new_ones(1, dtype=torch.bool), env[1:] != env[:-1]])
    begin = starts.nonzero().squeeze(1)
    stop = torch.cat([begin[1:], begin.new_tensor([len(flat)])])
    is_open = torch.ones_like(begin, dtype=torch.bool)
    return Episodes(*_numbers(begin, stop, env[begin], begins[begin], is_open, flat[stop - 1] // envs))


def _distillation_source(buffer: DistillationBuffer) -> RowSource:
    ring = buffer._ring
    rows = torch.arange(ring.oldest, ring.head, device=buffer.device)
    columns = _columns_of(buffer._schema) if buffer._columns else {}
    leaves = dict(zip(columns, buffer._columns, strict=True))
    columns[_ROUND] = ((), torch.int64)

    def read(start: int, stop: int, paths: Iterable[Path]) -> dict[Path, torch.Tensor]:
        at = rows[start:stop]
        rounds = torch.bucketize(at, buffer._starts_there, right=True) - 1
        return {path: (rounds if path == _ROUND else leaves[path][ring.slots(at)]).cpu() for path in paths}

    about = _facts(
        buffer,
        capacity=buffer.capacity,
        written=ring.head - ring.floor,
        oldest=len(rows) - 1 if len(rows) else None,
        round=buffer.round,
    )
    return RowSource(about, len(rows), columns, read)


_KINDS: dict[type, Callable[[Any], RowSource]] = {
    ReplayBuffer: _replay_source,
    RolloutBuffer: _rollout_source,
    DistillationBuffer: _distillation_source,
}


_HOST = torch.device("cpu")
_EPISODE_FIELDS = ("obs", "action", "reward", "terminated", "truncated", "info")


def dataset_source(dataset: Any) -> RowSource:
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
    return RowSource(about, about["rows"], columns, reader.read, episodes=spans, stretches=stretches)


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
        self._infos = _numeric_infos(dataset, self._numbers[0]) if steps else []
        self._last: tuple[int, dict[Path, torch.Tensor]] | None = None

    def episode(self, at: int) -> dict[Path, torch.Tensor]:
        """The leaves [T, …] of an episode by its place."""
        if self._last is None or self._last[0] != at:
            self._last = at, _episode_leaves(next(read_episodes(self._dataset, self._infos, [self._numbers[at]])))
        return self._last[1]

    def read(self, start: int, stop: int, paths: Iterable[Path]) -> dict[Path, torch.Tensor]:
        """The leaves [B, …] of rows from `start` to `stop`, which lie in one episode."""
        at = int(np.searchsorted(self.stops, start, "right"))
        first = int(self.starts[at])
        return {path: self.episode(at)[path][start - first : stop - first] for path in paths}


def _episode_leaves(episode: Episode) -> dict[Path, torch.Tensor]:
    found = {path: leaf for name in _EPISODE_FIELDS for path, leaf in leaves_of((name,), getattr(episode, name))}
    return {path: as_tensor(".".join(path), leaf, _HOST)[: episode.size] for path, leaf in found.items()}


def _numeric_infos(dataset: Any, number: int) -> list[str]:
    """The names of an episode's infos that are numbers per step; only these are shown as fields."""

    def is_numeric(name: str) -> bool:
        try:
            next(read_episodes(dataset, [name], [number]))
        except SchemaError:
            return False
        return True

    return list(filter(is_numeric, next(dataset.iterate_episodes([number])).infos or {}))
