"""A report on a buffer: measured once, shown in the terminal, as JSON or as a page."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from datetime import datetime
from io import StringIO
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relive.datasets.minari import dataset_folder, open_dataset
from relive.inspector.measures import find_warnings, measure, number
from relive.inspector.saved import look
from relive.inspector.source import buffer_source, dataset_source
from relive.inspector.text import episode_texts, fact_texts, form_text, html_card, text_card
from relive.statistics.episodes import EpisodeStats

if TYPE_CHECKING:
    from rich.console import RenderableType

# rich is imported only to show a report: its import draws from Python's global generator.


class Report:
    """A report: `print(report)` shows it, `report.as_dict()` returns its figures, `report.warnings` its warnings."""

    def __init__(self, contents: dict[str, Any]) -> None:
        self._contents = contents

    @property
    def warnings(self) -> list[str]:
        """A sentence for each thing that looks odd."""
        return list(self._contents["warnings"])

    def as_dict(self) -> dict[str, Any]:
        """The report as plain data: dicts, lists, strings, finite numbers and None."""
        return json.loads(self.to_json())

    def to_json(self, indent: int | None = None) -> str:
        """The report as JSON text."""
        return json.dumps(self._contents, indent=indent, allow_nan=False)

    def __rich__(self) -> RenderableType:
        from relive.inspector.terminal import render  # noqa: PLC0415

        return render(self._contents)

    def __str__(self) -> str:
        try:
            from rich.console import Console  # noqa: PLC0415
        except ImportError:
            return self._summary(text_card)
        console = Console(file=StringIO(), width=120, highlight=False, color_system=None)
        console.print(self)
        lines = console.file.getvalue().splitlines()  # pyright: ignore[reportAttributeAccessIssue]
        return "\n".join(map(str.rstrip, lines))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self._summary(html_card)

    def _summary(self, card: Callable[..., str]) -> str:
        """Facts, warnings and a table of the fields, without histograms."""
        contents, episodes = self._contents, self._contents["episodes"] or {}
        facts = [*fact_texts(contents["source"])]
        if episodes.get("count"):
            facts += ((f"episodes: {name}", text) for name, text in episode_texts(episodes))
        figures = ("min", "mean", "max", "std")
        rows = [
            (field["name"], form_text(field), *(number(field[name]) for name in figures))
            for field in contents["fields"]
        ]
        return card("Report", facts, ("field", "form", *figures), rows, contents["warnings"])


def inspect(
    buffer_or_path: Any, html: str | PathLike[str] | None = None, *, stats: EpisodeStats | None = None
) -> Report:
    """Report on stored data: episodes and how they end, every field, priorities, reuse, and what looks odd.

    The data is not changed. Fields of large buffers are read in evenly spaced stretches, and the report says how many
    rows it read.

    Args:
        buffer_or_path: a buffer (also of `relive.compat`, if it has a core), the path of a checkpoint, a Minari dataset
            or its path.
        html: a file to write the report to as one self-contained page, which also shows episodes step by step.
        stats: statistics to show instead of the buffer's own.

    >>> from relive import ReplayBuffer
    >>> replay = ReplayBuffer(100, obs=2, action=())
    >>> for step in range(10):
    ...     replay.add([step, 0.5], 0.1 * step, 1.0, step == 9, False, next_obs=[step + 1, 0.5])
    >>> for warning in inspect(replay).warnings:
    ...     print(warning)
    obs[1] never changes: it is 0.5 in all 10 rows.
    The reward is 1 in every row.
    """
    from relive import __version__  # noqa: PLC0415 (the package imports this module)
    from relive.inspector.page import choose_episodes, write_page  # noqa: PLC0415

    thing, facts = _open(buffer_or_path)
    with getattr(thing, "_lock", contextlib.nullcontext()):
        source = dataset_source(thing) if type(thing).__name__ == "MinariDataset" else buffer_source(thing)
        source.stats = stats or source.stats
        source.about |= facts
        measurements = measure(source)
        episodes = None if html is None else choose_episodes(source, measurements)
    contents = {"relive": __version__, **measurements.report}
    contents["warnings"] = list(find_warnings(contents))
    if html is not None:
        write_page(Path(html), contents, episodes)
    return Report(contents)


def _open(thing: Any) -> tuple[Any, dict[str, Any]]:
    """The buffer or dataset at a path, and facts about the path; other objects unchanged."""
    if not isinstance(thing, str | PathLike):
        return getattr(thing, "core", getattr(thing, "_core", thing)), {}  # classes of relive.compat have one
    path = Path(thing)
    folder = dataset_folder(path)
    if folder is not None:
        return open_dataset(folder), {"path": str(path)}
    times = [file.stat().st_mtime for file in path.glob("manifests/*.json")]
    saved = datetime.fromtimestamp(max(times)).astimezone().isoformat(" ", "seconds") if times else None
    return look(path), {"path": str(path), "saved": saved}
