"""The data of a report behind one interface: the rows of any buffer, or of a Minari dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode

from relive.datasets.filling import declared_fields
from relive.datasets.minari import read_episodes
from relive.distillation import DistillationBuffer
from relive.errors import SchemaError, explain
from relive.replay.buffer import ReplayBuffer
from relive.replay.continuity import StepContinuityStats, count_stored_continuity
from relive.replay.ids import sort_rows_by_time
from relive.replay.ring import FINAL
from relive.rollout.buffer import RolloutBuffer
from relive.schema.conversion import as_tensor
from relive.schema.fields import Path, Stacked, caller_shape, iter_leaves
from relive.statistics.episodes import EpisodeStats

ENDS = ("terminated", "truncated", "cut", "running")
"""The ways in which a stored episode stops. "cut": it was abandoned; "running": it has not ended yet."""

_ROUND = ("round",)
_HOST = torch.device("cpu")

Columns = dict[Path, tuple[tuple[int, ...], torch.dtype]]
"""The shape and dtype of each leaf of a row."""

ReadRows = Callable[[int, int, Iterable[Path]], dict[Path, torch.Tensor]]
"""A function of start, stop and paths that returns the leaves [B, …] of these rows."""


@dataclass(frozen=True)
class EpisodeSpans:
    """First and last rows of E episodes and facts about them, as arrays [E] in the order of rows."""

    start: np.ndarray
    """The first row."""
    stop: np.ndarray
    """The row after the last."""
    env: np.ndarray
    has_start: np.ndarray
    """Whether the first step of the episode is stored."""
    is_open: np.ndarray
    """Whether the episode's last step is the newest of its environment: if it is no end, the episode is running."""
    time: np.ndarray
    """A key that sorts the episodes of all environments by the time of their end."""

    def __len__(self) -> int:
        return len(self.start)


@dataclass
class ReportSource:
    """A buffer or a dataset as rows 0 to `length`, by environment and then by time."""

    facts: dict[str, Any]
    """Facts about the buffer or dataset, known without reading its rows."""
    length: int
    columns: Columns
    read: ReadRows
    episodes: EpisodeSpans | None = None
    stats: EpisodeStats | None = None
    priority_mass: torch.Tensor | None = None
    """The priority of each row, to the power of alpha."""
    draw_counts: torch.Tensor | None = None
    """The number of draws of each row."""
    reuse: dict[str, Any] = field(default_factory=dict)
    """Figures of the sampler about its draws."""
    stacks: dict[Path, int] = field(default_factory=dict)
    """For each leaf of stacked frames, the stacking axis of a row; the newest frame is last."""
    continuity: StepContinuityStats = field(default_factory=StepContinuityStats)
    """Counts of steps that continue the step before them."""
    stretches: list[tuple[int, int]] | None = None
    """Ranges of rows (start, stop) that must be read one by one; None if any rows can be read together."""


def make_buffer_source(buffer: Any) -> ReportSource:
    """Return the source of a buffer; the caller holds the buffer's lock."""
    for kind, make in _SOURCES.items():
        if isinstance(buffer, kind):
            return make(buffer)
    remedy = "Pass one of them, or the path of a checkpoint or a Minari dataset."
    kinds = ", ".join(kind.__name__ for kind in _SOURCES)
    raise SchemaError(explain("inspect", f"one of {kinds}", type(buffer).__name__, remedy))


def _collect_facts(buffer: Any, **other_facts: Any) -> dict[str, Any]:
    """Collect facts about a buffer; an autoreset mode becomes its name."""
    if "autoreset" in other_facts:
        other_facts["autoreset"] = getattr(other_facts["autoreset"], "name", None)
    facts = {"kind": type(buffer).__name__, "rows": len(buffer), "bytes": buffer.nbytes, "device": str(buffer.device)}
    return facts | other_facts


def _list_declared_columns(buffer: Any) -> Columns:
    fields = iter_leaves((), declared_fields(buffer))
    return {path: (caller_shape(leaf), leaf.dtype) for path, leaf in fields}


def _find_episode_bounds(is_first: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first row of each episode and the row after its last, from a mask of first rows."""
    start = is_first.nonzero().squeeze(1)
    return start, torch.cat([start, start.new_tensor([len(is_first)])])[1:] if len(start) else start


def _make_episode_spans(*columns: torch.Tensor) -> EpisodeSpans:
    return EpisodeSpans(*(column.cpu().numpy() for column in columns))


def _make_replay_source(replay: ReplayBuffer) -> ReportSource:
    storage, envs = replay.storage, replay.num_envs or 1
    ring = storage.ring
    ids, slots, is_first = sort_rows_by_time(storage)
    columns = _list_declared_columns(replay)
    leaf_numbers = {path: i for i, path in enumerate(columns)}

    def read(start: int, stop: int, paths: Iterable[Path]) -> dict[Path, torch.Tensor]:
        paths = list(paths)
        leaves = storage.read_leaves(slots[start:stop], [leaf_numbers[path] for path in paths])
        return {path: leaf.cpu() for path, leaf in zip(paths, leaves, strict=True)}

    def episodes() -> EpisodeSpans:
        start, stop = _find_episode_bounds(is_first)
        last, env = stop - 1, ids[start] % envs
        # All environments step together. A dummy step takes a step of time; a final observation does not.
        age = ages[last]
        if replay.autoreset is not AutoresetMode.NEXT_STEP:
            age = (ids % envs).bincount(minlength=envs).cumsum(0)[env] - stop
        is_open = ring.kind_at(ring.shift(slots[last])) != FINAL
        return _make_episode_spans(start, stop, env, ring.first.view(-1)[slots[start]], is_open, -age)

    ages = ring.newest_rows()[ids % envs] - ids // envs
    num_written = int((ring.head - ring.floor).sum())
    facts = _collect_facts(
        replay,
        capacity=replay.capacity,
        num_envs=replay.num_envs,
        written=num_written,
        oldest=int(ages.max()) if len(ids) else None,
        autoreset=replay.autoreset,
        next_obs="stored" if storage.stores_next_obs else "shared",
        sampler=repr(replay.sampler),
    )
    sampler_state = {name: tensor.cpu() for name, tensor in replay.sampler.state().items()}
    by_row = {name: sampler_state[name][slots.cpu()] for name in ("mass", "drawn") if name in sampler_state}
    reuse: dict[str, Any] = {}
    if "draws" in sampler_state:
        num_drawn = int(sampler_state["draws"])
        reuse = {"draws": num_drawn, "per_row": num_drawn / num_written if num_written else None}
    if "ids" in sampler_state:
        reuse["left_in_epoch"] = len(sampler_state["ids"])
    return ReportSource(
        facts,
        len(ids),
        columns,
        read,
        episodes=None if storage.stores_next_obs else episodes(),
        stats=replay.stats,
        priority_mass=by_row.get("mass"),
        draw_counts=by_row.get("drawn"),
        reuse=reuse,
        continuity=count_stored_continuity(storage.rows),
        stacks={
            path: leaf.axis for path, leaf in iter_leaves((), declared_fields(replay)) if isinstance(leaf, Stacked)
        },
    )


def _make_rollout_source(rollout: RolloutBuffer) -> ReportSource:
    steps, envs = rollout.num_stored, rollout.num_envs or 1
    is_step = rollout._flags.full_transition_mask(steps)
    # The positions t·N + n of all steps are ordered by environment n and then by time t.
    positions = torch.arange(steps * envs, device=rollout.device).view(steps, envs).T[is_step.T]
    leaves = rollout._storage.present_leaves()
    columns: Columns = {path: (tuple(leaf.shape[2:]), leaf.dtype) for path, leaf in leaves.items()}

    def read(start: int, stop: int, paths: Iterable[Path]) -> dict[Path, torch.Tensor]:
        return {path: leaves[path].flatten(0, 1)[positions[start:stop]].cpu() for path in paths}

    def episodes() -> EpisodeSpans:
        env, has_start = positions % envs, rollout._flags.start_mask(steps).flatten()[positions]
        start, stop = _find_episode_bounds(has_start | (env != env.roll(1)).index_fill(0, positions.new_zeros(1), True))
        is_open = torch.ones_like(start, dtype=torch.bool)
        return _make_episode_spans(start, stop, env[start], has_start[start], is_open, positions[stop - 1] // envs)

    facts = _collect_facts(
        rollout,
        num_steps=rollout.num_steps,
        num_stored=steps,
        num_envs=rollout.num_envs,
        reset_rows=int((~is_step).sum()),
        autoreset=rollout.autoreset,
    )
    stored_episodes = episodes() if len(positions) else None
    return ReportSource(facts, len(positions), columns, read, episodes=stored_episodes, stats=rollout.stats)


def _make_distillation_source(buffer: DistillationBuffer) -> ReportSource:
    ring = buffer._ring
    rows = torch.arange(ring.oldest_row, ring.head, device=buffer.device)
    columns = _list_declared_columns(buffer) if buffer._columns else {}
    leaves = dict(zip(columns, buffer._columns, strict=True))
    columns[_ROUND] = ((), torch.int64)

    def read(start: int, stop: int, paths: Iterable[Path]) -> dict[Path, torch.Tensor]:
        read_rows = rows[start:stop]
        rounds = torch.bucketize(read_rows, buffer._device_starts, right=True) - 1
        return {path: (rounds if path == _ROUND else leaves[path][ring.slots(read_rows)]).cpu() for path in paths}

    oldest = len(rows) - 1 if len(rows) else None
    num_written = ring.head - ring.floor
    facts = _collect_facts(buffer, capacity=buffer.capacity, written=num_written, oldest=oldest, round=buffer.round)
    return ReportSource(facts, len(rows), columns, read)


_SOURCES: dict[type, Callable[[Any], ReportSource]] = {
    ReplayBuffer: _make_replay_source,
    RolloutBuffer: _make_rollout_source,
    DistillationBuffer: _make_distillation_source,
}


def make_dataset_source(dataset: Any) -> ReportSource:
    """Return a source of the steps of all episodes of a Minari dataset, one episode after the other."""
    metadata = dataset.storage.get_episode_metadata(dataset.episode_indices)
    steps = {
        int(number): int(episode_metadata["total_steps"])
        for number, episode_metadata in zip(dataset.episode_indices, metadata, strict=True)
        if episode_metadata["total_steps"]
    }
    numbers, lengths = list(steps), np.array(list(steps.values()), np.int64)
    stops = np.cumsum(lengths)
    starts = stops - lengths
    infos = _find_numeric_infos(dataset, numbers[0]) if steps else []

    @lru_cache(maxsize=1)
    def read_episode(index: int) -> dict[Path, torch.Tensor]:
        """Return the leaves [T, …] of an episode, by its place among the episodes that have steps."""
        fields = dict(next(read_episodes(dataset, infos, [numbers[index]])).steps)
        fields.pop("next_obs")
        return {path: as_tensor(".".join(path), leaf, _HOST) for path, leaf in iter_leaves((), fields)}

    def read(start: int, stop: int, paths: Iterable[Path]) -> dict[Path, torch.Tensor]:
        index = int(np.searchsorted(stops, start, "right"))
        first = int(starts[index])
        return {path: read_episode(index)[path][start - first : stop - first] for path in paths}

    size = dataset.storage.metadata.get("dataset_size")
    facts = {
        "kind": "MinariDataset",
        "id": dataset.id,
        "rows": int(lengths.sum()),
        "episodes": len(numbers),
        "bytes": None if size is None else round(1e6 * float(size)),
    }
    leaves = read_episode(0).items() if numbers else ()
    columns = {path: (tuple(leaf.shape[1:]), leaf.dtype) for path, leaf in leaves}
    has_start = np.ones(len(numbers), bool)
    env, time = np.zeros(len(numbers), np.int64), np.arange(len(numbers))
    episodes = EpisodeSpans(starts, stops, env, has_start, ~has_start, time)
    stretches = list(zip(starts.tolist(), stops.tolist(), strict=True))
    return ReportSource(facts, facts["rows"], columns, read, episodes=episodes, stretches=stretches)


def _find_numeric_infos(dataset: Any, episode_number: int) -> list[str]:
    """Return the names of an episode's infos that are numbers per step; the report shows no other infos as fields."""

    def is_numeric(name: str) -> bool:
        try:
            next(read_episodes(dataset, [name], [episode_number]))
        except SchemaError:
            return False
        return True

    return list(filter(is_numeric, next(dataset.iterate_episodes([episode_number])).infos or {}))
