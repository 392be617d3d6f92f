"""Reports on buffers and datasets: shown as text, HTML card, JSON or page."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Sequence
from datetime import datetime
from html import escape
from io import StringIO
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from relive.datasets.minari import find_dataset_folder, open_dataset
from relive.errors import escape_controls
from relive.inspector.measures import measure_source
from relive.inspector.saved import load_read_only
from relive.inspector.source import make_buffer_source, make_dataset_source
from relive.inspector.text import find_warnings, format_facts, format_number, format_type, make_episode_lines
from relive.statistics.episodes import EpisodeStats

if TYPE_CHECKING:
    from rich.console import RenderableType

# rich is imported only to show a report, because its import uses Python's global random generator.


class Report:
    """A report: `print(report)` shows it, `report.as_dict()` returns its figures, `report.warnings` its warnings."""

    def __init__(self, contents: dict[str, Any]) -> None:
        self._contents = contents

    @property
    def warnings(self) -> list[str]:
        """Warnings about data that looks like a mistake."""
        return list(self._contents["warnings"])

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain data: dicts, lists, strings, finite numbers and None."""
        return json.loads(self.to_json())

    def to_json(self, indent: int | None = None) -> str:
        """Return the report as JSON text."""
        return json.dumps(self._contents, indent=indent, allow_nan=False)

    def __rich__(self) -> RenderableType:
        from relive.inspector.terminal import render_report  # noqa: PLC0415

        return render_report(self._contents)

    def __str__(self) -> str:
        try:
            from rich.console import Console  # noqa: PLC0415
        except ImportError:
            return format_text_card(self._make_card())
        console = Console(file=StringIO(), width=120, highlight=False, color_system=None)
        console.print(self)
        lines = console.file.getvalue().splitlines()  # pyright: ignore[reportAttributeAccessIssue]
        return "\n".join(map(str.rstrip, lines))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return format_html_card(self._make_card())

    def _make_card(self) -> ReportCard:
        contents, episodes = self._contents, self._contents["episodes"] or {}
        facts = [*format_facts(contents["source"])]
        if episodes.get("count"):
            facts += ((f"episodes: {line.name}", line.text) for line in make_episode_lines(episodes))
        rows = [
            (
                field["name"],
                format_type(field),
                *(format_number(field[figure]) for figure in ("min", "mean", "max", "std")),
            )
            for field in contents["fields"]
        ]
        return ReportCard(facts, rows, contents["warnings"])


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
    from relive.inspector.page import read_shown_episodes, write_page  # noqa: PLC0415

    target, path_facts = _open_target(buffer_or_path)
    with getattr(target, "_lock", contextlib.nullcontext()):
        source = make_dataset_source(target) if type(target).__name__ == "MinariDataset" else make_buffer_source(target)
        source.stats = stats or source.stats
        source.facts |= path_facts
        measurements = measure_source(source)
        episodes = None if html is None else read_shown_episodes(source, measurements)
    contents = {"relive": __version__, **measurements.report}
    contents["warnings"] = list(find_warnings(contents))
    if html is not None:
        write_page(Path(html), contents, episodes)
    return Report(contents)


def _open_target(target: Any) -> tuple[Any, dict[str, Any]]:
    """Return the buffer or dataset at a path, and facts about the path; return other objects as they are."""
    if not isinstance(target, str | PathLike):
        # A buffer of relive.compat wraps a relive buffer, its core, which is reported instead.
        return getattr(target, "core", getattr(target, "_core", target)), {}
    path = Path(target)
    folder = find_dataset_folder(path)
    if folder is not None:
        return open_dataset(folder), {"path": str(path)}
    times = [file.stat().st_mtime for file in path.glob("manifests/*.json")]
    save_time = datetime.fromtimestamp(max(times)).astimezone().isoformat(" ", "seconds") if times else None
    return load_read_only(path), {"path": str(path), "saved": save_time}


# Text inherits the notebook's colour and labels are fainter, which suits light and dark notebooks.
_BOX_STYLE = "display:inline-block;max-width:100%;overflow-x:auto;font:13px/1.5 system-ui,sans-serif;text-align:left"
_TABLE_STYLE = "border-collapse:collapse;margin:6px 0;border:0;background:none;font-size:inherit"
_CELL_STYLE = "text-align:left;vertical-align:top;padding:1px 16px 1px 0;border:0;background:none;color:inherit"
_FAINT_STYLE = f"{_CELL_STYLE};opacity:.65;font-weight:400"
_MAX_ROWS = 40
"""Maximum number of rows of a table; a last line gives the number of hidden rows."""


class ReportCard(NamedTuple):
    """The short form of a report, without histograms."""

    facts: Sequence[tuple[str, str]]
    rows: Sequence[Sequence[str]]
    """Texts of the table of fields, in the order of `_COLUMN_TITLES`."""
    warnings: Sequence[str]


_COLUMN_TITLES = ("field", "form", "min", "mean", "max", "std")


def format_html_card(card: ReportCard) -> str:
    """Return a card as HTML, in which all texts of the card are text and never markup.

    >>> format_html_card(ReportCard([("rows", "<b>3")], (), ())).count("<b>")
    0
    """
    num_hidden = len(card.rows) - _MAX_ROWS
    rows = [*card.rows[:_MAX_ROWS], *([(f"and {num_hidden:,} more",)] if num_hidden > 0 else [])]
    parts = [
        "<strong>Report</strong>",
        *(f'<div style="margin:4px 0">⚠ {escape(warning)}</div>' for warning in card.warnings),
        _to_html_table(_to_html_row(*fact) for fact in card.facts),
        _to_html_table([_to_html_row(*_COLUMN_TITLES, style=_FAINT_STYLE), *(_to_html_row(*row) for row in rows)])
        if rows
        else "",
    ]
    return f'<div style="{_BOX_STYLE}">{"".join(parts)}</div>'


def format_text_card(card: ReportCard) -> str:
    """Return a card as plain text, with control characters escaped.

    >>> print(format_text_card(ReportCard([("rows", "3")], [("obs", "float32", "0.5", "1", "2", "0.3")], ["odd"])))
    Report
    ! odd
    rows  3
    field  form     min  mean  max  std
    obs    float32  0.5  1     2    0.3
    """
    table = [_COLUMN_TITLES, *card.rows] if card.rows else []
    warnings = (f"! {warning}" for warning in card.warnings)
    return escape_controls("\n".join(["Report", *warnings, *_align_columns(card.facts), *_align_columns(table)]))


def _align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align the cells of a table; return its lines."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _to_html_table(rows: Iterable[str]) -> str:
    return f'<table style="{_TABLE_STYLE}"><tbody>{"".join(rows)}</tbody></table>'


def _to_html_row(first: str, *others: str, style: str = _CELL_STYLE) -> str:
    cells = ((_FAINT_STYLE, first), *((style, other) for other in others))
    body = "".join(f'<td style="{style}">{escape(text)}</td>' for style, text in cells)
    return f'<tr style="background:none">{body}</tr>'
