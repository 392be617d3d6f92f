"""Plots of results: bars for each operation, curves over sizes. The physical limit is a line in every plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .timing import MEMCPY

OURS, PEER, LIMIT = "#c1272d", "#8fa3b5", "#222222"
COLOURS = {
    "relive": OURS,
    "rlox": "#4c72b0",
    "cpprb": "#55a868",
    "Tianshou": "#8172b3",
    "Stable-Baselines3": "#937860",
    "skrl": "#da8bc3",
    MEMCPY: LIMIT,
}
PANELS = {
    ("gae", "T"): "advantages (GAE), N = 64",
    ("gae", "N"): "advantages (GAE), T = 128",
    ("epoch", "batch"): "one epoch of minibatches, 128×64",
    ("uniform", "capacity"): "uniform sample of 256",
    ("prioritized", "capacity"): "prioritized sample + update of 256",
    ("add", "capacity"): "add one step",
    ("uniform", "batch"): "uniform sample of 10⁶",
    ("prioritized", "batch"): "prioritized sample + update of 10⁶",
}
AXES = {"T": "steps T", "N": "environments N", "batch": "batch size", "capacity": "capacity, transitions"}


def bars(cases: Mapping[str, Any], path: Path) -> None:
    """Draw a group of horizontal bars for each case, fastest on top; the limit is a dashed line through its group.

    Cases with only one contestant are shown only if there are no others.
    """
    cases = {case: found for case, found in cases.items() if len(found["timings"]) > 1} or cases
    heights = [max(1, len(_contestants(found))) + 1.6 for found in cases.values()]
    columns = 2 if sum(heights) > 40 else 1
    figure = _figure(13.0 if columns == 2 else 8.5, 0.9 + 0.21 * sum(heights) / columns * 1.05)
    names = list(cases)
    halves = _split(names, heights, columns)
    grid = figure.add_gridspec(1, columns)
    for column, group in enumerate(halves):
        ratios = [heights[names.index(name)] for name in group]
        inner = grid[column].subgridspec(len(group), 1, height_ratios=ratios, hspace=1.2 / (sum(ratios) / len(ratios)))
        for row, name in enumerate(group):
            _draw_case(figure.add_subplot(inner[row]), name, cases[name])
    _save(figure, path)


def _split(names: Sequence[str], heights: Sequence[float], columns: int) -> list[list[str]]:
    """Distribute the cases in order over columns of similar height."""
    halves: list[list[str]] = [[] for _ in range(columns)]
    done = 0.0
    for name, height in zip(names, heights, strict=True):
        halves[min(columns - 1, int(columns * (done + height / 2) / sum(heights)))].append(name)
        done += height
    return halves


def _contestants(found: Mapping[str, Any]) -> dict[str, Any]:
    ordered = sorted(found["timings"].items(), key=lambda item: item[1]["median_us"])
    return {name: timing for name, timing in ordered if timing["role"] != "limit"}


def _draw_case(axes: Any, case: str, found: Mapping[str, Any]) -> None:
    shown = _contestants(found)
    medians = [timing["median_us"] for timing in shown.values()]
    spread = [
        [max(0.0, timing["median_us"] - timing["p10_us"]) for timing in shown.values()],
        [max(0.0, timing["p90_us"] - timing["median_us"]) for timing in shown.values()],
    ]
    colours = [OURS if timing["role"] == "ours" else PEER for timing in shown.values()]
    error = {"ecolor": "0.35", "elinewidth": 0.8}
    axes.barh(range(len(shown)), medians, color=colours, xerr=spread, error_kw=error, height=0.72)
    limits = [timing["median_us"] for timing in found["timings"].values() if timing["role"] == "limit"]
    for limit in limits:
        axes.axvline(limit, color=LIMIT, linestyle="--", linewidth=1.3)
    every = [*medians, *limits]
    axes.set_xscale("log")
    axes.set_xlim(min(every) / 1.6, max(every) * 6)
    for row, median in enumerate(medians):
        right = max(median, list(shown.values())[row]["p90_us"])
        axes.text(right * 1.08, row, duration(median), va="center", fontsize=7, color="0.25")
    axes.set_yticks(range(len(shown)), shown, fontsize=7.5)
    axes.invert_yaxis()
    axes.set_title(case, fontsize=8.5, loc="left", fontweight="bold", pad=3)
    if limits:
        axes.set_title("dashed: limit", fontsize=6.5, loc="right", color=LIMIT, pad=3)
    axes.tick_params(axis="x", labelsize=6.5, length=2, pad=1)
    axes.xaxis.set_major_formatter(lambda us, _: duration(us))
    axes.xaxis.set_minor_formatter(lambda *_: "")
    axes.spines[["top", "right"]].set_visible(False)


def duration(micros: float) -> str:
    """Format a duration with a suitable unit."""
    for minimum, unit in ((1e6, "s"), (1e3, "ms"), (1.0, "µs")):
        if micros >= minimum:
            number = micros / minimum
            return f"{number:.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"
    return f"{micros * 1e3:.3g} ns"


def curves(points: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw a panel per operation and size."""
    panels = {title: [p for p in points if (p["operation"], p["axis"]) == key] for key, title in PANELS.items()}
    panels = {title: chosen for title, chosen in panels.items() if chosen}
    columns = min(3, len(panels) + 1)
    rows = -(-(len(panels) + 1) // columns)
    figure = _figure(4.2 * columns, 3.4 * rows)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, (title, chosen) in zip(grid, panels.items(), strict=False):
        _panel(axes, chosen)
        axes.set_title(title, fontsize=10)
    lines = {line.get_label(): line for axes in grid[: len(panels)] for line in axes.get_lines()}
    for axes in grid[len(panels) :]:
        axes.axis("off")
    legend = grid[len(panels)]
    legend.legend(lines.values(), lines.keys(), loc="center", frameon=False, fontsize=10)
    legend.text(0.5, 0.02, "medians; shaded: the middle half", ha="center", fontsize=9, color="0.35")
    _save(figure, path)


def _panel(axes: Any, points: Sequence[Mapping[str, Any]]) -> None:
    from matplotlib.ticker import LogLocator

    for library in dict.fromkeys(point["library"] for point in points):
        line = sorted((point for point in points if point["library"] == library), key=lambda point: point["size"])
        sizes, colour = [point["size"] for point in line], COLOURS.get(library)
        style: dict[str, Any] = {"marker": "o", "markersize": 3.5, "linewidth": 2.6 if library == "relive" else 1.4}
        if library == MEMCPY:
            style = {"linestyle": "--", "linewidth": 1.3}
        axes.plot(sizes, [point["median_us"] for point in line], color=colour, label=library, **style)
        spread = ([point["p25_us"] for point in line], [point["p75_us"] for point in line])
        axes.fill_between(sizes, *spread, color=colour, alpha=0.15, linewidth=0)
    axes.set(xscale="log", yscale="log", xlabel=AXES[points[0]["axis"]])
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=8))
    axes.yaxis.set_major_formatter(lambda us, _: duration(us))
    axes.yaxis.set_minor_formatter(lambda *_: "")
    sizes = sorted({point["size"] for point in points})
    powers = [f"$10^{{{len(str(size)) - 1}}}$" if points[0]["axis"] == "capacity" else f"{size:,}" for size in sizes]
    axes.set_xticks(sizes, powers)
    axes.tick_params(labelsize=8)
    axes.xaxis.set_minor_formatter(lambda *_: "")
    axes.grid(alpha=0.3)


def _figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")  # readable on dark pages
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
