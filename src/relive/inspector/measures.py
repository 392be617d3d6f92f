"""The figures of a report, measured in one pass over a source, and the warnings that follow from them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from relive.inspector.source import ENDS, Episodes, RowSource
from relive.replay.chains import Chains
from relive.schema.conversion import path_name
from relive.schema.fields import Path

READ_VALUES = 1 << 25
"""About the most numbers that are read; of larger sources, evenly spaced stretches of rows are read."""
_STRETCHES = 32
_KEPT_VALUES = 1 << 20
"""The most values of a field that are kept for its histogram."""
_MOST_DIMENSIONS = 64
"""Fields with more numbers per row are measured as a whole, not number by number."""
_BINS, _DISTINCT, _FEW, _CURVE = 30, 24, 10, 240
_FLAGS = (("terminated",), ("truncated",))


@dataclass(frozen=True)
class StepColumns:
    """The reward (summed over agents) and the flags of every row [length], also of large sources."""

    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray


@dataclass(frozen=True)
class Measurements:
    """The report, and the arrays that the page needs besides it."""

    report: dict[str, Any]
    steps: StepColumns | None
    returns: np.ndarray
    """The return of every episode [E]."""
    ends: np.ndarray
    """The index in `ENDS` of how each episode stopped [E]."""


def measure(source: RowSource) -> Measurements:
    """Read the rows once, and measure them."""
    fields = {path: _Numbers(math.prod(shape)) for path, (shape, _) in source.columns.items()}
    rewards = [path for path in source.columns if path[0] == "reward"]
    always = [*rewards, *(path for path in _FLAGS if path in source.columns)]
    collected: dict[Path, list[np.ndarray]] = {path: [] for path in always}
    for start, stop, whole in _plan(source):
        leaves = source.read(start, stop, source.columns if whole else always)
        for path in always:
            collected[path].append(_matrix(leaves[path]))
        for path, leaf in leaves.items() if whole else ():
            fields[path].take(_matrix(leaf), source.length)
    steps = _steps(rewards, collected) if rewards and source.length else None
    returns, ends = _outcomes(source.episodes, steps)
    read = max((numbers.rows for numbers in fields.values()), default=0)
    report = {
        "source": source.about,
        "read": {"rows": read, "of": source.length},
        "episodes": _episodes(source, steps, returns, ends),
        "chains": asdict(source.chains),
        "reward": None if steps is None else _reward(steps),
        "fields": [_field(path, *source.columns[path], numbers) for path, numbers in fields.items()],
        "fit": _fit(fields),
        "priorities": None if source.mass is None else _priorities(source.mass.double().numpy()),
        "reuse": _reuse(source),
    }
    return Measurements(report, steps, returns, ends)


def _plan(source: RowSource) -> list[tuple[int, int, bool]]:
    """Stretches of rows (start, stop, whether all fields are read): all, or evenly spaced ones within the budget."""
    row = max(sum(math.prod(shape) for shape, _ in source.columns.values()), 1)
    stretches = source.stretches
    if stretches is None:
        size = max(READ_VALUES // row // _STRETCHES, 1)
        stretches = [(start, min(start + size, source.length)) for start in range(0, source.length, size)]
    every = max(math.ceil(source.length * row / READ_VALUES), 1)
    return [(start, stop, i % every == 0) for i, (start, stop) in enumerate(stretches)]


def _matrix(leaf: torch.Tensor) -> np.ndarray:
    """A leaf [B, …] as float64 [B, D]."""
    if leaf.is_complex():
        leaf = leaf.abs()
    return leaf.reshape(len(leaf), -1).to(torch.float64).numpy()


class _Numbers:
    """Running figures of a field, an array [D] each, and a sample of its rows for histograms."""

    def __init__(self, size: int) -> None:
        self.rows = 0
        self.nan, self.infinite = np.zeros(size, np.int64), np.zeros(size, np.int64)
        self.low, self.high = np.full(size, np.inf), np.full(size, -np.inf)
        self.finite = np.zeros(size, np.int64)
        self.shift: np.ndarray | None = None
        """A value near the mean that is subtracted first, so that sums of squares keep their digits."""
        self.sum, self.squares = np.zeros(size), np.zeros(size)
        self.sample: list[np.ndarray] = []

    def take(self, block: np.ndarray, rows: int) -> None:
        """Add a block [B, D]; the field has `rows` rows in all."""
        good = np.isfinite(block)
        if not good.all():
            self.nan += np.isnan(block).sum(0)
            self.infinite += np.isinf(block).sum(0)
        clean = good.all()
        if len(block):
            self.low = np.minimum(self.low, block.min(0) if clean else np.where(good, block, np.inf).min(0))
            self.high = np.maximum(self.high, block.max(0) if clean else np.where(good, block, -np.inf).max(0))
        if self.shift is None:
            self.shift = np.where(np.isfinite(self.low), self.low, 0.0)
        moved = block - self.shift if clean else np.where(good, block - self.shift, 0.0)
        self.sum += moved.sum(0)
        self.squares += (moved * moved).sum(0)
        self.finite += good.sum(0)
        stride = max(math.ceil(rows * block.shape[1] / _KEPT_VALUES), 1)
        self.sample.append(block[-self.rows % stride :: stride])
        self.rows += len(block)

    @property
    def values(self) -> np.ndarray:
        """The sampled rows [K, D]."""
        return np.concatenate(self.sample) if self.sample else np.zeros((0, len(self.low)))

    def summary(self, at: slice) -> dict[str, Any]:
        """The figures of the dimensions `at` taken together."""
        finite = int(self.finite[at].sum())
        found = {"nan": int(self.nan[at].sum()), "infinite": int(self.infinite[at].sum())}
        if not finite or self.shift is None:
            return {"min": None, "mean": None, "max": None, "std": None, **found}
        counts, shift = self.finite[at], self.shift[at]
        mean = float((self.sum[at] + shift * counts).sum() / finite)
        away = shift - mean  # Σ(x − mean)² = Σ(moved + away)²
        squares = self.squares[at] + 2 * away * self.sum[at] + counts * away * away
        std = math.sqrt(max(float(squares.sum()), 0.0) / finite)
        return {"min": float(self.low[at].min()), "mean": mean, "max": float(self.high[at].max()), "std": std, **found}

    @property
    def constant(self) -> np.ndarray:
        """Whether each dimension has the same value in all rows, of at least two [D]."""
        return (self.low == self.high) & (self.finite == self.rows) & (self.rows > 1)


def _field(path: Path, shape: tuple[int, ...], dtype: torch.dtype, numbers: _Numbers) -> dict[str, Any]:
    constant = numbers.constant.nonzero()[0]
    field: dict[str, Any] = {
        "name": path_name(path),
        "shape": list(shape),
        "dtype": str(dtype).removeprefix("torch."),
        "rows": numbers.rows,
        **numbers.summary(slice(None)),
        "constant": len(constant),
        "discrete": not (dtype.is_floating_point or dtype.is_complex),
        "histogram": histogram(numbers.values),
        "dimensions": [],
    }
    size = len(numbers.low)
    if shape and size <= _MOST_DIMENSIONS:
        values = numbers.values
        field["dimensions"] = [
            {
                "name": place(path_name(path), shape, i),
                **numbers.summary(slice(i, i + 1)),
                "constant": bool(numbers.constant[i]),
                "histogram": histogram(values[:, i]),
            }
            for i in range(size)
        ]
    return field


def place(name: str, shape: tuple[int, ...], i: int) -> str:
    """The name of the i-th number of a field: `obs[3]`, or `obs[1, 2]`."""
    return f"{name}[{', '.join(map(str, np.unravel_index(i, shape)))}]" if shape else name


def histogram(values: np.ndarray) -> dict[str, list[Any]] | None:
    """Counts of the finite values: per value if they are few or small whole numbers, otherwise per bin."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return None
    low, high = float(finite.min()), float(finite.max())
    if high - low < _DISTINCT and bool((finite == finite.round()).all()):
        counts = np.bincount((finite - low).astype(np.int64))
        return {"values": [low + i for i in range(len(counts))], "counts": counts.tolist()}
    distinct = np.unique(finite[: 1 << 16])
    if len(distinct) <= _FEW and bool(np.isin(finite, distinct).all()):
        return {"values": distinct.tolist(), "counts": [int((finite == value).sum()) for value in distinct]}
    if not math.isfinite(high - low) or (high - low) / _BINS <= np.spacing(max(abs(low), abs(high))):
        return None  # float64 cannot tell the bins apart
    bins = min(_BINS, max(8, round(2 * math.sqrt(len(finite)))))
    counts, edges = np.histogram(finite, bins=bins, range=(low, high))
    return {"edges": edges.tolist(), "counts": counts.tolist()}


# Episodes


def _steps(rewards: list[Path], collected: dict[Path, list[np.ndarray]]) -> StepColumns:
    whole = {path: np.concatenate(blocks) for path, blocks in collected.items()}
    # Rewards of several agents are summed, as in EpisodeStats.
    reward = sum((whole[path].sum(1) for path in rewards), np.zeros(1))
    return StepColumns(reward, *(whole[path][:, 0] != 0 for path in _FLAGS))


def _outcomes(episodes: Episodes | None, steps: StepColumns | None) -> tuple[np.ndarray, np.ndarray]:
    """The return of every episode [E], and the index in `ENDS` of how it stopped [E]."""
    if episodes is None or steps is None or not len(episodes):
        return np.zeros(0), np.zeros(0, np.int64)
    last = episodes.stop - 1
    terminated, truncated = steps.terminated[last], steps.truncated[last]
    ends = np.where(terminated, 0, np.where(truncated, 1, np.where(episodes.is_open, 3, 2)))
    return np.add.reduceat(steps.reward, episodes.start), ends


def _episodes(
    source: RowSource, steps: StepColumns | None, returns: np.ndarray, ends: np.ndarray
) -> dict[str, Any] | None:
    episodes = source.episodes
    stats = source.stats
    if episodes is None or steps is None:
        return None if stats is None else {"stats": _statistics(stats)}
    whole = episodes.began & (ends <= 1)
    lengths = episodes.stop - episodes.start
    order = np.argsort(episodes.time[whole], kind="stable")
    return {
        "count": len(episodes),
        "whole": int(whole.sum()),
        "ends": {name: int((ends == i).sum()) for i, name in enumerate(ENDS)},
        "stopped": int((ends != ENDS.index("running")).sum()),
        "both_flags": int((steps.terminated & steps.truncated).sum()),
        "returns": _moments(returns[whole]),
        "lengths": _moments(lengths[whole]),
        "curve": _curve(returns[whole][order]),
        "stats": None if stats is None else _statistics(stats),
    }


def _moments(values: np.ndarray) -> dict[str, Any] | None:
    if not len(values):
        return None
    found = {"min": values.min(), "mean": values.mean(), "median": np.median(values), "max": values.max()}
    return {**{name: _number(x) for name, x in found.items()}, "histogram": histogram(values.astype(float))}


def _number(value: Any) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


def _curve(values: np.ndarray) -> dict[str, list[Any]] | None:
    """A series in at most `_CURVE` bins: the last place, mean, minimum and maximum of each bin."""
    if not len(values):
        return None
    bins = np.array_split(values, min(len(values), _CURVE))
    stops = np.cumsum([len(part) for part in bins])
    return {
        "at": stops.tolist(),
        "mean": [_number(part.mean()) for part in bins],
        "min": [_number(part.min()) for part in bins],
        "max": [_number(part.max()) for part in bins],
    }


def _statistics(stats: Any) -> dict[str, Any]:
    """The figures of an EpisodeStats, which include episodes that are no longer stored."""
    window = {name: column.cpu().numpy() for name, column in stats.episodes().items()}
    count = len(window["return"])
    found: dict[str, Any] = {
        "episodes": stats.num_episodes,
        "window": count,
        "steps": stats.num_steps,
        "returns": _moments(window["return"]),
        "lengths": _moments(window["length"]),
        "curve": _curve(window["return"]),
        "terminated": int(window["terminated"].sum()),
        "truncated": int(window["truncated"].sum()),
        "reasons": {name: int(window[name].sum()) for name in stats.reasons},
        "metrics": {name: _moments(window[name]) for name in stats.metrics},
    }
    return found


# Rewards, values, priorities, reuse


def _reward(steps: StepColumns) -> dict[str, Any]:
    reward = steps.reward
    return {
        "rows": len(reward),
        "zero": int((reward == 0).sum()),
        "nonfinite": int((~np.isfinite(reward)).sum()),
        "constant": float(reward[0]) if len(reward) > 1 and bool((reward == reward[0]).all()) else None,
        "histogram": histogram(reward),
    }


def _fit(fields: dict[Path, _Numbers]) -> float | None:
    """The share of the returns' variance that the values explain; None unless a rollout has both."""
    if ("value",) not in fields or ("return",) not in fields:
        return None
    value, target = fields["value",].values, fields["return",].values
    spread = float(target.var()) if target.size else 0.0
    return 1 - float((target - value).var()) / spread if spread > 0 else None


def _priorities(mass: np.ndarray) -> dict[str, Any]:
    total = float(mass.sum())
    ordered = np.sort(mass)[::-1] / total if total > 0 else np.zeros(0)
    cumulative = np.cumsum(ordered)
    ranks = np.unique(np.geomspace(1, len(mass), 60).round().astype(int)) if len(ordered) else np.zeros(0, int)
    shares = (0.1, 0.3, 0.6, 0.9)
    return {
        "rows": len(mass),
        "zero": int((mass == 0).sum()),
        "effective": float(1 / np.square(ordered).sum()) if len(ordered) else None,
        "rows_with": {f"{share:.0%}": int(np.searchsorted(cumulative, share - 1e-12) + 1) for share in shares}
        if len(ordered)
        else {},
        "largest": float(ordered[0]) if len(ordered) else None,
        "ranks": ranks.tolist(),
        "cumulative": cumulative[ranks - 1].tolist(),
        "relative": histogram(np.log10(mass[mass > 0] / mass.mean())) if total > 0 else None,
    }


def _reuse(source: RowSource) -> dict[str, Any] | None:
    if "sampler" not in source.about:
        return None
    known = dict(source.reuse)
    if source.drawn is not None and len(source.drawn):
        drawn = source.drawn.double().numpy()
        known["counted"] = {
            "mean": float(drawn.mean()),
            "max": int(drawn.max()),
            "never": int((drawn == 0).sum()),
            "rows": len(drawn),
            "histogram": histogram(drawn),
        }
    return known


_FEW_EPISODES = 5
"""With fewer episodes, warnings about shares of episodes are left out."""


def find_warnings(report: dict[str, Any]) -> list[str]:
    """The warnings for a report, the gravest first."""
    return [
        *_emptiness(report),
        *_broken_numbers(report["fields"]),
        *_chains(Chains(**report["chains"])),
        *_constants(report["fields"], report["read"]),
        *_endings(report["episodes"] or {}),
        *_rewards(report["reward"]),
        *_actions(report["fields"]),
        *_values(report["fit"]),
        *_priority_concentration(report["priorities"]),
        *_reuse_warnings(report["reuse"] or {}),
    ]


def percent(share: float) -> str:
    """A share in percent; only 0 and 1 are shown as 0 % and 100 %."""
    text = f"{share:.0%}" if 0.01 <= share <= 0.99 or share in (0, 1) else f"{share:.1%}"
    if text == "100.0%" and share < 1:
        return "more than 99.9 %"
    if text == "0.0%" and share > 0:
        return "less than 0.1 %"
    return f"{text[:-1]} %"


def number(value: float | None) -> str:
    """A number with few digits, and a dash for None."""
    if value is None:
        return "–"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.4g}"


def _emptiness(report: dict[str, Any]) -> Iterator[str]:
    if not report["source"]["rows"]:
        rewarded = any(field["name"].partition(".")[0] == "reward" for field in report["fields"])
        yield f"{report['source']['kind']} is empty: it holds no {'transitions' if rewarded else 'rows'}."


def _parts(field: dict[str, Any]) -> list[dict[str, Any]]:
    return field["dimensions"] or [field]


def _join_names(names: list[str], most: int = 4) -> str:
    rest = len(names) - most
    if rest > 1:
        return f"{', '.join(names[:most])} and {rest:,} more"
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]


def _broken_numbers(fields: list[dict[str, Any]]) -> Iterator[str]:
    for field in fields:
        for part in _parts(field):
            for kind, word in (("nan", "NaN"), ("infinite", "infinite")):
                if part[kind]:
                    many = part[kind] > 1
                    yield f"{part['name']}: {part[kind]:,} number{'s are' if many else ' is'} {word}."


def _constants(fields: list[dict[str, Any]], read: dict[str, int]) -> Iterator[str]:
    rows = f"all {read['of']:,} rows" if read["rows"] == read["of"] else f"the {read['rows']:,} rows that were read"
    for field in fields:
        if field["name"].partition(".")[0] in ("reward", "terminated", "truncated", "round") or not field["constant"]:
            continue  # has a warning of its own, or needs none
        size = math.prod(field["shape"])
        still = [part["name"] for part in field["dimensions"] if part["constant"]] or [field["name"]]
        if field["constant"] == size:
            value = f" it is {number(field['min'])} in {rows}." if field["min"] == field["max"] else f" in {rows}."
            yield f"{field['name']} never changes" + (":" if field["min"] == field["max"] else "") + value
        elif not field["dimensions"]:
            yield f"{field['constant']:,} of the {size:,} numbers of {field['name']} never change in {rows}."
        elif len(still) == 1:
            only = next(part for part in field["dimensions"] if part["constant"])
            yield f"{only['name']} never changes: it is {number(only['min'])} in {rows}."
        else:
            yield f"{_join_names(still)} never change in {rows}."


def _chains(chains: Chains) -> Iterator[str]:
    doubts = dict(chains.doubts())
    if "cuts" in doubts:
        yield (
            f"{chains.cut:,} of {chains.followed:,} steps do not start where the step before led, and cut their "
            'episodes. Are observations normalised between the steps, or rows in no order (next_obs="stored")?'
        )
    if "resets" in doubts:
        yield (
            f"All {chains.ended:,} ends lead to the observation that the next episode starts with. Was the observation "
            'after the reset passed as next_obs, in place of info["final_obs"]?'
        )


def _endings(episodes: dict[str, Any]) -> Iterator[str]:
    if "count" not in episodes:
        return
    ends, stopped = episodes["ends"], episodes["stopped"]
    if stopped >= _FEW_EPISODES and ends["truncated"] >= 0.9 * stopped:
        yield f"{percent(ends['truncated'] / stopped)} of episodes end by time limit."
    if not ends["terminated"] + ends["truncated"] and episodes["count"]:
        yield "No episode ends: neither terminated nor truncated is ever set."
    if stopped >= _FEW_EPISODES and ends["cut"] >= 0.1 * stopped:
        yield (
            f"{percent(ends['cut'] / stopped)} of episodes stop without an end: the next step did not start "
            "where the last one led. Are observations changed between steps?"
        )
    if episodes["both_flags"]:
        yield f"{_rows(episodes['both_flags'])} both terminated and truncated; they count as terminated."
    lengths = (episodes["lengths"] or {}).get("histogram") or {}
    single = dict(zip(lengths.get("values", ()), lengths["counts"], strict=False)).get(1.0, 0) if lengths else 0
    if episodes["whole"] >= _FEW_EPISODES and single >= 0.1 * episodes["whole"]:
        yield f"{percent(single / episodes['whole'])} of episodes are one step long. Are resets stored as steps?"


def _rows(count: int) -> str:
    return "1 row is" if count == 1 else f"{count:,} rows are"


def _rewards(reward: dict[str, Any] | None) -> Iterator[str]:
    if reward is None or reward["rows"] < 2:
        return
    if reward["constant"] is not None:
        yield f"The reward is {number(reward['constant'])} in every row."
    elif reward["zero"] >= 0.95 * reward["rows"]:
        yield f"The reward is 0 in {percent(reward['zero'] / reward['rows'])} of rows."


def _actions(fields: list[dict[str, Any]]) -> Iterator[str]:
    for part in (part for field in fields if field["name"].partition(".")[0] == "action" for part in _parts(field)):
        bars = part["histogram"]
        if bars is None or "values" not in bars or part["constant"]:
            continue
        total, most = sum(bars["counts"]), max(bars["counts"])
        if most >= 0.95 * total and total >= 20:
            value = bars["values"][bars["counts"].index(most)]
            yield f"{part['name']} is {number(value)} in {percent(most / total)} of rows."
    for field in fields:
        if field["name"].partition(".")[0] == "action" and not field["discrete"]:
            yield from _saturation(field)


def _saturation(field: dict[str, Any]) -> Iterator[str]:
    for part in _parts(field):
        bars = part["histogram"]
        if bars is None or "edges" not in bars:
            continue
        total = sum(bars["counts"])
        outer = (bars["counts"][0] + bars["counts"][-1]) / total
        if outer >= 0.5:
            low, high = number(part["min"]), number(part["max"])
            yield f"{part['name']} is at its extremes ({low} and {high}) in {percent(outer)} of rows."


def _values(fit: float | None) -> Iterator[str]:
    if fit is not None and fit <= 0:
        yield f"The values explain none of the variance of the returns (explained variance {number(fit)})."


def _priority_concentration(priorities: dict[str, Any] | None) -> Iterator[str]:
    if priorities is None or priorities["rows"] < 20:
        return
    if priorities["effective"] is None:
        yield "Every priority is 0: nothing can be drawn."
        return
    few, rows = priorities["rows_with"]["60%"], priorities["rows"]
    if few <= 0.05 * rows:
        yield f"{few:,} row{'s hold' if few > 1 else ' holds'} 60 % of the priority mass."
    elif priorities["effective"] <= 0.1 * rows:
        yield f"The effective sample of the priorities is {number(round(priorities['effective']))} of {rows:,} rows."
    if priorities["zero"] >= 0.5 * rows:
        yield f"{percent(priorities['zero'] / rows)} of rows have priority 0 and are never drawn."


def _reuse_warnings(reuse: dict[str, Any]) -> Iterator[str]:
    counted = reuse.get("counted")
    if counted is None or not counted["max"]:
        return
    if counted["never"] >= 0.5 * counted["rows"]:
        yield f"{percent(counted['never'] / counted['rows'])} of rows were never drawn."
