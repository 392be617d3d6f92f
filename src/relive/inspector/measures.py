"""The figures of a report, measured in one pass over a source."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
import torch

from relive.inspector.source import ENDS, EpisodeSpans, ReportSource
from relive.schema.conversion import path_name
from relive.schema.fields import Path
from relive.statistics.episodes import EpisodeStats

READ_VALUES = 1 << 25
"""Approximate maximum of numbers to read. From larger sources, evenly spaced stretches of rows are read."""
_NUM_STRETCHES = 32
_MAX_SAMPLE_VALUES = 1 << 20
"""Maximum number of values per field that are sampled for histograms."""
_MAX_DIMENSIONS = 64
"""Fields with at most this number of dimensions are also measured per dimension."""
_HISTOGRAM_BINS, _MAX_INTEGER_RANGE, _MAX_DISTINCT_VALUES, _CURVE_BINS = 30, 24, 10, 240
_FLAGS = (("terminated",), ("truncated",))


class StepColumns(NamedTuple):
    """The reward, summed over agents, and the flags of every row [length]. They are never sampled."""

    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray


class Measurements(NamedTuple):
    """The report, and arrays that only the page needs."""

    report: dict[str, Any]
    returns: np.ndarray
    """The return of every episode [E]."""
    ends: np.ndarray
    """How each episode stopped, as an index into `ENDS` [E]."""


def measure_source(source: ReportSource) -> Measurements:
    """Measure all rows, in one pass."""
    fields = {path: _FieldStats(math.prod(shape)) for path, (shape, _) in source.columns.items()}
    rewards = [path for path in source.columns if path[0] == "reward"]
    step_paths = [*rewards, *(path for path in _FLAGS if path in source.columns)]
    step_columns: dict[Path, list[np.ndarray]] = {path: [] for path in step_paths}
    for start, stop, reads_all_fields in _plan_row_ranges(source):
        leaves = source.read(start, stop, source.columns if reads_all_fields else step_paths)
        for path in step_paths:
            step_columns[path].append(_flatten_to_matrix(leaves[path]))
        for path, leaf in leaves.items() if reads_all_fields else ():
            fields[path].add_block(_flatten_to_matrix(leaf), source.length)
    steps = None
    if rewards and source.length:
        whole_columns = {path: np.concatenate(blocks) for path, blocks in step_columns.items()}
        # Rewards of several agents are summed, so that returns equal the returns of EpisodeStats.
        reward = sum((whole_columns[path].sum(1) for path in rewards), np.zeros(1))
        steps = StepColumns(reward, *(whole_columns[path][:, 0] != 0 for path in _FLAGS))
    returns, ends = _find_episode_outcomes(source.episodes, steps)
    report = {
        "source": source.facts,
        "read": {"rows": max((numbers.rows for numbers in fields.values()), default=0), "of": source.length},
        "episodes": _summarise_episodes(source, steps, returns, ends),
        "chains": asdict(source.continuity),
        "reward": None if steps is None else _summarise_rewards(steps.reward),
        "fields": [_describe_field(path, *source.columns[path], numbers) for path, numbers in fields.items()],
        "fit": _compute_explained_variance(fields),
        "priorities": _summarise_priorities(source.priority_mass),
        "reuse": _summarise_reuse(source),
    }
    return Measurements(report, returns, ends)


def _plan_row_ranges(source: ReportSource) -> list[tuple[int, int, bool]]:
    """Split the rows into ranges (start, stop, whether to read all fields), to read about `READ_VALUES` numbers."""
    values_per_row = max(sum(math.prod(shape) for shape, _ in source.columns.values()), 1)
    stretches = source.stretches
    if stretches is None:
        length = max(READ_VALUES // values_per_row // _NUM_STRETCHES, 1)
        stretches = [(start, min(start + length, source.length)) for start in range(0, source.length, length)]
    stretch_stride = max(math.ceil(source.length * values_per_row / READ_VALUES), 1)
    return [(start, stop, i % stretch_stride == 0) for i, (start, stop) in enumerate(stretches)]


def _flatten_to_matrix(leaf: torch.Tensor) -> np.ndarray:
    """Convert a leaf [B, …] to float64 [B, D]."""
    if leaf.is_complex():
        leaf = leaf.abs()
    return leaf.reshape(len(leaf), -1).to(torch.float64).numpy()


class _FieldStats:
    """Running figures of a field per dimension [D], and a sample of rows for histograms."""

    def __init__(self, size: int) -> None:
        self.rows = 0
        self.nan, self.infinite = np.zeros(size, np.int64), np.zeros(size, np.int64)
        self.low, self.high = np.full(size, np.inf), np.full(size, -np.inf)
        self.finite = np.zeros(size, np.int64)
        self.shift: np.ndarray | None = None
        """A value that is subtracted before summing, so that sums of squares keep their precision."""
        self.sum, self.squares = np.zeros(size), np.zeros(size)
        self.sample: list[np.ndarray] = []

    def add_block(self, block: np.ndarray, num_rows: int) -> None:
        """Add a block [B, D]; the field has `num_rows` rows in all."""
        is_finite = np.isfinite(block)
        all_finite = is_finite.all()
        if not all_finite:
            self.nan += np.isnan(block).sum(0)
            self.infinite += np.isinf(block).sum(0)
        if len(block):
            self.low = np.minimum(self.low, block.min(0) if all_finite else np.where(is_finite, block, np.inf).min(0))
            self.high = np.maximum(
                self.high, block.max(0) if all_finite else np.where(is_finite, block, -np.inf).max(0)
            )
        if self.shift is None:
            self.shift = np.where(np.isfinite(self.low), self.low, 0.0)
        shifted = block - self.shift if all_finite else np.where(is_finite, block - self.shift, 0.0)
        self.sum += shifted.sum(0)
        self.squares += (shifted * shifted).sum(0)
        self.finite += is_finite.sum(0)
        stride = max(math.ceil(num_rows * block.shape[1] / _MAX_SAMPLE_VALUES), 1)
        self.sample.append(block[-self.rows % stride :: stride])
        self.rows += len(block)

    @property
    def sampled_values(self) -> np.ndarray:
        """The sampled rows [K, D]."""
        return np.concatenate(self.sample) if self.sample else np.zeros((0, len(self.low)))

    def summarise(self, dimensions: slice) -> dict[str, Any]:
        """Return the figures of all numbers in some dimensions."""
        finite = int(self.finite[dimensions].sum())
        nonfinite = {"nan": int(self.nan[dimensions].sum()), "infinite": int(self.infinite[dimensions].sum())}
        if not finite or self.shift is None:
            return {"min": None, "mean": None, "max": None, "std": None, **nonfinite}
        counts, shift, shifted_sum = self.finite[dimensions], self.shift[dimensions], self.sum[dimensions]
        mean = float((shifted_sum + shift * counts).sum() / finite)
        # Σ(x − mean)² = Σ(shifted + offset)², where shifted = x − shift.
        offset = shift - mean
        squares = self.squares[dimensions] + 2 * offset * shifted_sum + counts * offset * offset
        std = math.sqrt(max(float(squares.sum()), 0.0) / finite)
        low, high = float(self.low[dimensions].min()), float(self.high[dimensions].max())
        return {"min": low, "mean": mean, "max": high, "std": std, **nonfinite}

    @property
    def is_constant(self) -> np.ndarray:
        """Whether all rows have the same finite value, per dimension [D]; False with fewer than two rows."""
        return (self.low == self.high) & (self.finite == self.rows) & (self.rows > 1)


def _describe_field(path: Path, shape: tuple[int, ...], dtype: torch.dtype, stats: _FieldStats) -> dict[str, Any]:
    name, values, size = path_name(path), stats.sampled_values, len(stats.low)
    return {
        "name": name,
        "shape": list(shape),
        "dtype": str(dtype).removeprefix("torch."),
        "rows": stats.rows,
        **stats.summarise(slice(None)),
        "constant": int(stats.is_constant.sum()),
        "discrete": not (dtype.is_floating_point or dtype.is_complex),
        "histogram": compute_histogram(values),
        "dimensions": [
            {
                "name": format_element_name(name, shape, i),
                **stats.summarise(slice(i, i + 1)),
                "constant": bool(stats.is_constant[i]),
                "histogram": compute_histogram(values[:, i]),
            }
            for i in (range(size) if shape and size <= _MAX_DIMENSIONS else ())
        ],
    }


def format_element_name(name: str, shape: tuple[int, ...], index: int) -> str:
    """Return the name of the number at a flat index of a field: `obs[3]`, or `obs[1, 2]`."""
    return f"{name}[{', '.join(map(str, np.unravel_index(index, shape)))}]" if shape else name


def compute_histogram(values: np.ndarray) -> dict[str, list[Any]] | None:
    """Count the finite values: per value if there are few or small integers, otherwise per bin."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return None
    low, high = float(finite.min()), float(finite.max())
    if high - low < _MAX_INTEGER_RANGE and bool((finite == finite.round()).all()):
        counts = np.bincount((finite - low).astype(np.int64))
        return {"values": [low + i for i in range(len(counts))], "counts": counts.tolist()}
    distinct_values = np.unique(finite[: 1 << 16])
    if len(distinct_values) <= _MAX_DISTINCT_VALUES and bool(np.isin(finite, distinct_values).all()):
        return {
            "values": distinct_values.tolist(),
            "counts": [int((finite == value).sum()) for value in distinct_values],
        }
    # No histogram is made if its bins would be narrower than the spacing of float64 numbers.
    if not math.isfinite(high - low) or (high - low) / _HISTOGRAM_BINS <= np.spacing(max(abs(low), abs(high))):
        return None
    bins = min(_HISTOGRAM_BINS, max(8, round(2 * math.sqrt(len(finite)))))
    counts, edges = np.histogram(finite, bins=bins, range=(low, high))
    return {"edges": edges.tolist(), "counts": counts.tolist()}


def _find_episode_outcomes(episodes: EpisodeSpans | None, steps: StepColumns | None) -> tuple[np.ndarray, np.ndarray]:
    """Compute the return of every episode [E], and how it stopped, as an index into `ENDS` [E]."""
    if episodes is None or steps is None or not len(episodes):
        return np.zeros(0), np.zeros(0, np.int64)
    last = episodes.stop - 1
    terminated, truncated = steps.terminated[last], steps.truncated[last]
    ends = np.where(terminated, 0, np.where(truncated, 1, np.where(episodes.is_open, 3, 2)))
    return np.add.reduceat(steps.reward, episodes.start), ends


def _summarise_episodes(
    source: ReportSource, steps: StepColumns | None, returns: np.ndarray, ends: np.ndarray
) -> dict[str, Any] | None:
    episodes = source.episodes
    stats = None if source.stats is None else _summarise_stats(source.stats)
    if episodes is None or steps is None:
        return None if stats is None else {"stats": stats}
    is_complete = episodes.has_start & (ends <= 1)
    lengths = episodes.stop - episodes.start
    order = np.argsort(episodes.time[is_complete], kind="stable")
    return {
        "count": len(episodes),
        "whole": int(is_complete.sum()),
        "ends": {name: int((ends == i).sum()) for i, name in enumerate(ENDS)},
        "stopped": int((ends != ENDS.index("running")).sum()),
        "both_flags": int((steps.terminated & steps.truncated).sum()),
        "returns": _summarise_values(returns[is_complete]),
        "lengths": _summarise_values(lengths[is_complete]),
        "curve": _summarise_curve(returns[is_complete][order]),
        "stats": stats,
    }


def _summarise_values(values: np.ndarray) -> dict[str, Any] | None:
    if not len(values):
        return None
    figures = {"min": values.min(), "mean": values.mean(), "median": np.median(values), "max": values.max()}
    return {
        **{name: finite_or_none(x) for name, x in figures.items()},
        "histogram": compute_histogram(values.astype(float)),
    }


def finite_or_none(value: Any) -> float | None:
    """Convert a number to a float; None if it is infinite or NaN, which JSON lacks."""
    number = float(value)
    return number if math.isfinite(number) else None


def _summarise_curve(values: np.ndarray) -> dict[str, list[Any]] | None:
    """Summarise a series in at most `_CURVE_BINS` bins: the last position, mean, minimum and maximum of each bin."""
    if not len(values):
        return None
    bins = np.array_split(values, min(len(values), _CURVE_BINS))
    figures = {name: [finite_or_none(getattr(part, name)()) for part in bins] for name in ("mean", "min", "max")}
    return {"at": np.cumsum([len(part) for part in bins]).tolist(), **figures}


def _summarise_stats(stats: EpisodeStats) -> dict[str, Any]:
    """Return the figures of an EpisodeStats, which include episodes that are no longer stored."""
    window = {name: column.cpu().numpy() for name, column in stats.episodes().items()}
    return {
        "episodes": stats.num_episodes,
        "window": len(window["return"]),
        "steps": stats.num_steps,
        "returns": _summarise_values(window["return"]),
        "lengths": _summarise_values(window["length"]),
        "curve": _summarise_curve(window["return"]),
        "terminated": int(window["terminated"].sum()),
        "truncated": int(window["truncated"].sum()),
        "reasons": {name: int(window[name].sum()) for name in stats.reasons},
        "metrics": {name: _summarise_values(window[name]) for name in stats.metrics},
    }


def _summarise_rewards(reward: np.ndarray) -> dict[str, Any]:
    return {
        "rows": len(reward),
        "zero": int((reward == 0).sum()),
        "nonfinite": int((~np.isfinite(reward)).sum()),
        "constant": float(reward[0]) if len(reward) > 1 and bool((reward == reward[0]).all()) else None,
        "histogram": compute_histogram(reward),
    }


def _compute_explained_variance(fields: dict[Path, _FieldStats]) -> float | None:
    """Return the share of the variance of the returns that the values explain; None unless a rollout has both."""
    if ("value",) not in fields or ("return",) not in fields:
        return None
    value, target = fields["value",].sampled_values, fields["return",].sampled_values
    variance = float(target.var()) if target.size else 0.0
    return 1 - float((target - value).var()) / variance if variance > 0 else None


def _summarise_priorities(priority_mass: torch.Tensor | None) -> dict[str, Any] | None:
    if priority_mass is None:
        return None
    mass = priority_mass.double().numpy()
    total = float(mass.sum())
    sorted_shares = np.sort(mass)[::-1] / total if total > 0 else np.zeros(0)
    cumulative = np.cumsum(sorted_shares)
    ranks = np.unique(np.geomspace(1, len(mass), 60).round().astype(int)) if len(sorted_shares) else np.zeros(0, int)
    shares = (0.1, 0.3, 0.6, 0.9) if len(sorted_shares) else ()
    return {
        "rows": len(mass),
        "zero": int((mass == 0).sum()),
        "effective": float(1 / np.square(sorted_shares).sum()) if len(sorted_shares) else None,
        "rows_with": {f"{share:.0%}": int(np.searchsorted(cumulative, share - 1e-12) + 1) for share in shares},
        "largest": float(sorted_shares[0]) if len(sorted_shares) else None,
        "ranks": ranks.tolist(),
        "cumulative": cumulative[ranks - 1].tolist(),
        "relative": compute_histogram(np.log10(mass[mass > 0] / mass.mean())) if total > 0 else None,
    }


def _summarise_reuse(source: ReportSource) -> dict[str, Any] | None:
    if "sampler" not in source.facts:
        return None
    if source.draw_counts is None or not len(source.draw_counts):
        return source.reuse
    draws = source.draw_counts.double().numpy()
    draw_counts = {
        "mean": float(draws.mean()),
        "max": int(draws.max()),
        "never": int((draws == 0).sum()),
        "rows": len(draws),
        "histogram": compute_histogram(draws),
    }
    return {**source.reuse, "counted": draw_counts}
