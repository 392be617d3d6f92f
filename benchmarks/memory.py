"""Measure the bytes per stored transition, for each library in a new process.

Run it as `python -m benchmarks.memory [--quick] [--only image] [--json PATH]`.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from relive_conformance.adapters import Adapter, NotOffered, Replay, ReplayShape

from .bars import BYTES_PER_TRANSITION
from .experience import make_experience
from .replay import ATARI, ROBOT
from .suite import Session, get_role
from .timing import Role
from .verify_replay import check_transitions, fill

Make = Callable[[ReplayShape], Replay]
SHAPES = {"image": ATARI._replace(capacity=4_000), "obs(17)": ROBOT}
TRUNCATED_SHARE = 0.5
"""Share of truncated ends, where libraries that save memory make mistakes."""


@dataclass(frozen=True)
class Bytes:
    """Memory of one library per sampleable transition."""

    name: str
    role: Role
    held: float | None
    """Bytes of all arrays of the buffer; None if the library hides them."""
    resident: float | None
    """Growth of the process while the buffer was filled, in bytes; None if the system does not report it."""
    wrong: str | None
    """Difference between a sampled and the stored transition; None if there is none."""

    @property
    def figure(self) -> float | None:
        """Bytes that are compared with the bar."""
        return self.resident if self.held is None else self.held


@dataclass(frozen=True)
class MemoryResult:
    """Results of all libraries at one shape."""

    case: str
    lines: list[Bytes] = field(default_factory=list)
    not_offered: list[str] = field(default_factory=list)

    def meets(self, line: Bytes) -> bool | None:
        """Return whether our smallest form meets the bar; None for other libraries."""
        smallest = next((other for other in self.lines if other.role == "ours"), None)
        if line is not smallest or line.figure is None:
            return None
        return line.figure <= BYTES_PER_TRANSITION[self.case] and line.wrong is None


def measure_memory(case: str, shape: ReplayShape, entrants: Iterable[tuple[str, Role, Make]]) -> MemoryResult:
    """Fill a buffer of each entrant in a new process; return the results, smallest first."""
    result = MemoryResult(case)
    for name, role, make in entrants:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            try:
                result.lines.append(pool.submit(_measure, name, role, make, shape).result())
            except NotOffered:
                result.not_offered.append(name)
    result.lines.sort(key=lambda line: line.figure or 0.0)
    return result


def _measure(name: str, role: Role, make: Make, shape: ReplayShape) -> Bytes:
    # A small buffer first: memory of a library's first use must not count.
    small = shape._replace(capacity=512)
    fill(make(small), make_experience(small, small.capacity, seed=0))
    data = make_experience(shape, shape.capacity, seed=0, truncated_share=TRUNCATED_SHARE)
    before = _resident()
    replay = make(shape)
    fill(replay, data)
    after = _resident()
    grown = None if before is None or after is None else (after - before) / replay.stored
    held = None if replay.nbytes is None else replay.nbytes / replay.stored
    return Bytes(name, role, held, grown, check_transitions(replay, data, batch_size=1024))


def _resident() -> int | None:
    gc.collect()
    status = Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if status.exists() else None


def print_memory(results: Iterable[MemoryResult], console: Console) -> None:
    """Print one table of all shapes."""
    table = Table("case", "library", title="bytes per transition")
    for heading in ("held", "process grew by", "bar", "met"):
        table.add_column(heading, justify="right")
    table.add_column("wrong")
    for result in results:
        for number, line in enumerate(result.lines):
            met = result.meets(line)
            bar = "" if met is None else f"≤ {BYTES_PER_TRANSITION[result.case]:,.0f}"
            cells = [
                line.name,
                _number(line.held),
                _number(line.resident),
                bar,
                {True: "yes", False: "no", None: ""}[met],
            ]
            style = {True: "green", False: "red", None: ""}[met]
            table.add_row("" if number else result.case, *cells, line.wrong or "", style=style)
        table.add_section()
    console.print(table)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f}"


def entrants(peers: Sequence[Adapter]) -> list[tuple[str, Role, Make]]:
    """Return every library, with and without the settings that save memory."""
    found: list[tuple[str, Role, Make]] = []
    for peer in peers:
        forms = {peer.name: peer.replay} if peer.replay else {}
        forms |= {f"{peer.name}, {settings}": make for settings, make in peer.replay_saving.items()}
        found.extend((name, get_role(peer), make) for name, make in forms.items())
    return found


def memory_json(results: Iterable[MemoryResult]) -> dict[str, Any]:
    """Return the results as data for a file."""
    return {
        result.case: {
            "bar": BYTES_PER_TRANSITION[result.case],
            "libraries": {line.name: {**asdict(line), "met": result.meets(line)} for line in result.lines},
            "not_offered": result.not_offered,
        }
        for result in results
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Fill a buffer of every library."""
    session = Session.start("memory", __doc__ or "", SHAPES, arguments)
    results = []
    for name in session.options.only:
        shape = SHAPES[name]
        shape = shape._replace(capacity=min(shape.capacity, 10**5 if session.options.quick else 10**6))
        with session.console.status(name):
            results.append(measure_memory(f"memory {name}", shape, entrants(session.discovery.adapters)))
    print_memory(results, session.console)
    return session.finish([], memory=memory_json(results))


if __name__ == "__main__":
    raise SystemExit(main())
