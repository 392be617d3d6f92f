"""Plot how the cost of a replay buffer grows with its capacity and with the batch, beside the fastest peers.

Run it as `python -m benchmarks.scaling [--quick] [--out PICTURE] [--json PATH]`, or with `--redraw RESULTS` to draw
an earlier run again.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.experience import Experience, make_experience
from benchmarks.replay import ROBOT, sample_and_update
from benchmarks.suite import RESULTS, contestant, describe, enter, file_name, refuse
from benchmarks.timing import QUICK, Contestant, Effort, race
from benchmarks.verify_replay import check_transitions, fill
from recollect.conformance.peers import NotOffered, Peer, discover
from recollect.memory.space import available_bytes

SUBJECT = "Plot how the cost of a replay buffer grows with its capacity and with the batch."
CAPACITIES = tuple(10**power for power in range(3, 8))
BATCHES = (32, 128, 512, 2048, 8192)
USUAL_CAPACITY, USUAL_BATCH = 10**6, 256
"""What stays the same while the other one grows."""
ADDED_STEPS = 1000
BYTES_A_ROW = 250
"""More than any of the libraries needs for a row of ROBOT, with a priority."""
EFFORT = Effort(rounds=40, fewest_rounds=7, seconds=8.0, sample_seconds=2e-3)
LIBRARIES = {
    "uniform": ("recollect", "rlox", "cpprb"),
    "prioritized": ("recollect", "rlox", "cpprb", "Tianshou"),
    "add": ("recollect", "rlox", "Stable-Baselines3"),
}
"""Ours, and for each operation the peers that are fastest at it."""
PICTURE = Path(__file__).parents[1] / "docs" / "images" / "replay_scaling.png"


@dataclass(frozen=True)
class Point:
    """One library at one size; `batch_size` is 0 for add."""

    operation: str
    library: str
    capacity: int
    batch_size: int
    median_us: float
    p25_us: float
    p75_us: float


class Full:
    """The replay buffers of all libraries at one capacity, filled; made once for all batch sizes."""

    def __init__(self, operation: str, data: Experience, peers: Sequence[Peer], console: Console) -> None:
        self._operation, self._data = operation, data
        chosen = [peer for peer in peers if peer.name in LIBRARIES[operation]]
        self._runs: dict[str, Callable[[int], Callable[[], object]]] = {}
        result, _ = enter(operation, chosen, self._fill)
        for name, reason in result.refused.items():
            console.print(f"[red]not timed[/red] {operation} at {data.shape.capacity:,}: {name}: {reason}")
        self._peers = [peer for peer in chosen if peer.name in self._runs]

    def _fill(self, peer: Peer) -> Contestant:
        shape = self._data.shape
        free = available_bytes()
        if free is not None and 2 * shape.capacity * BYTES_A_ROW > free:
            refuse(f"{shape.capacity * BYTES_A_ROW / 2**30:.1f} GiB are too much for this machine now")
        make = peer.prioritized if self._operation == "prioritized" else peer.replay
        if make is None:
            raise NotOffered
        replay: Any = make(shape)
        fill(replay, self._data)
        refuse(check_transitions(replay, self._data, USUAL_BATCH))
        if self._operation == "prioritized":
            self._runs[peer.name] = lambda batch_size: sample_and_update(replay, batch_size)
        elif self._operation == "uniform":
            self._runs[peer.name] = lambda batch_size: lambda: replay.sample(batch_size)
        else:
            steps = make_experience(shape, ADDED_STEPS, seed=1).steps()
            prepared = [replay.prepare(step) for step in steps]
            self._runs[peer.name] = lambda _: lambda: [replay.add(step) for step in prepared]
        return contestant(peer, lambda: None)

    def time(self, batch_size: int, effort: Effort, rng: np.random.Generator) -> list[Point]:
        """Race them at one batch size."""
        units = 1 if batch_size else ADDED_STEPS
        entered = [contestant(peer, self._runs[peer.name](batch_size), units=units) for peer in self._peers]
        capacity = self._data.shape.capacity
        return [
            Point(
                self._operation,
                timing.contestant.name,
                capacity,
                batch_size,
                *(seconds * 1e6 for seconds in (timing.median, timing.percentile(25), timing.percentile(75))),
            )
            for timing in race(entered, effort, rng)
        ]


def measure(peers: Sequence[Peer], quick: bool, console: Console) -> list[Point]:
    """Every operation at every capacity with the usual batch, and every batch at the usual capacity."""
    rng = np.random.default_rng(0)
    usual, effort = (10**5, QUICK) if quick else (USUAL_CAPACITY, EFFORT)
    points: list[Point] = []
    for capacity in CAPACITIES:
        if quick and capacity > usual:
            break
        with console.status(f"capacity {capacity:,}"):
            data = make_experience(ROBOT._replace(capacity=capacity), capacity, seed=0)
            for operation in LIBRARIES:
                full = Full(operation, data, peers, console)
                for batch_size in _batches(operation, capacity == usual):
                    points += full.time(batch_size, effort, rng)
                del full
                gc.collect()
    return points


def _batches(operation: str, at_usual_capacity: bool) -> tuple[int, ...]:
    if operation == "add":
        return (0,)
    return (USUAL_BATCH, *BATCHES) if at_usual_capacity else (USUAL_BATCH,)


TITLES = {"uniform": "uniform sample", "prioritized": "prioritized sample + update", "add": "add one step"}
COLOURS = {
    "recollect": "#c1272d",
    "rlox": "#4c72b0",
    "cpprb": "#55a868",
    "Tianshou": "#8172b3",
    "Stable-Baselines3": "#937860",
}


def draw(points: Sequence[Point], path: Path) -> None:
    """Five panels: the three operations over capacity, the two samples over batch size."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 3)
    usual = max((point.capacity for point in points if point.batch_size not in (0, USUAL_BATCH)), default=0)
    for axes, operation in zip(panels[0], LIBRARIES, strict=True):
        size = 0 if operation == "add" else USUAL_BATCH
        chosen = [p for p in points if p.operation == operation and p.batch_size == size]
        _panel(axes, chosen, lambda point: point.capacity, "capacity, transitions")
        axes.set_title(TITLES[operation] + (f", batch {size}" if size else ""), fontsize=11)
    for axes, operation in zip(panels[1], ("uniform", "prioritized"), strict=False):
        chosen = [p for p in points if p.operation == operation and p.capacity == usual and p.batch_size > 0]
        _panel(axes, chosen, lambda point: point.batch_size, "batch size")
        axes.set_title(f"{TITLES[operation]}, capacity {usual:,}", fontsize=11)
    _legend(panels[1][2], panels.flat)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _panel(axes: Any, points: Sequence[Point], size: Callable[[Point], int], label: str) -> None:
    for library in dict.fromkeys(point.library for point in points):
        line = sorted((point for point in points if point.library == library), key=size)
        sizes = [size(point) for point in line]
        style = {"color": COLOURS.get(library), "linewidth": 2.6 if library == "recollect" else 1.5}
        axes.plot(sizes, [point.median_us for point in line], marker="o", markersize=4, label=library, **style)
        spread = ([point.p25_us for point in line], [point.p75_us for point in line])
        axes.fill_between(sizes, *spread, color=COLOURS.get(library), alpha=0.15, linewidth=0)
    axes.set(xscale="log", yscale="log", xlabel=label, ylabel="µs")
    axes.yaxis.set_major_formatter(lambda us, _: f"{us:,.0f}" if us >= 1 else f"{us:g}")
    axes.set_xticks(sorted({size(point) for point in points} & {*CAPACITIES, *BATCHES}))
    if label == "batch size":
        axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.minorticks_off()
    axes.grid(alpha=0.3)


def _legend(empty: Any, panels: Any) -> None:
    lines = {line.get_label(): line for axes in panels for line in axes.get_lines()}
    empty.axis("off")
    empty.legend(lines.values(), lines.keys(), loc="center", frameon=False, fontsize=12)
    note = "medians; shaded: the middle half\nobs(17), action(6), float32, full buffers"
    empty.text(0.5, 0.12, note, ha="center", fontsize=10, color="0.35", transform=empty.transAxes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the figures, draw the picture."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=SUBJECT)
    parser.add_argument("--quick", action="store_true", help="up to 100,000 transitions: for development")
    parser.add_argument("--out", type=Path, default=PICTURE, help="where to draw (default: docs/images)")
    parser.add_argument("--json", type=Path, help="where to write the figures (default: benchmarks/results/<date>)")
    parser.add_argument("--redraw", type=Path, help="figures of an earlier run; nothing is measured")
    options = parser.parse_args(arguments)
    console = Console()
    if options.redraw:
        points = [Point(**point) for point in json.loads(options.redraw.read_text(encoding="utf-8"))["points"]]
    else:
        found = discover()
        about = describe("scaling", found, options.quick)
        points = measure(found.peers, options.quick, console)
        path = options.json or RESULTS / file_name("scaling", about)
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {**about, "points": [asdict(point) for point in points]}
        path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        console.print(f"written to {path}")
    draw(points, options.out)
    console.print(f"drawn to {options.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
