"""The report in a terminal, with tables and colours; it needs rich."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from relive.errors import escape_controls
from relive.inspector.text import (
    ReportLine,
    format_facts,
    format_number,
    format_type,
    make_episode_lines,
    make_priority_lines,
    make_reuse_lines,
    make_reward_lines,
    make_stats_lines,
)

_BAR_CHARACTERS = " ▁▂▃▄▅▆▇█"
_MAX_SHOWN_DIMENSIONS = 16
"""Maximum number of rows in the table of fields for the dimensions of one field."""
_NARROW_WIDTH = 12
"""Width of a histogram in the table of fields, so that the table fits in 80 columns."""


def render_report(report: dict[str, Any]) -> RenderableType:
    """Render the whole report, with warnings first."""
    report = _escape_texts(report)
    parts: list[RenderableType] = [
        _make_line_table(ReportLine(title, text) for title, text in format_facts(report["source"]))
    ]
    for title, body in _render_sections(report):
        parts += [Text(), Rule(Text(title, "bold"), align="left", characters="─", style="dim"), body]
    return Group(*parts)


def _escape_texts(part: Any) -> Any:
    """Escape the control characters of all names and texts of a report."""
    if isinstance(part, str):
        return escape_controls(part)
    if isinstance(part, dict):
        return {_escape_texts(name): _escape_texts(value) for name, value in part.items()}
    return [_escape_texts(value) for value in part] if isinstance(part, list) else part


def _render_sections(report: dict[str, Any]) -> Iterator[tuple[str, RenderableType]]:
    if report["warnings"]:
        yield "Warnings", Group(*(Text.assemble(("! ", "yellow"), line) for line in report["warnings"]))
    episodes, priorities = report["episodes"] or {}, report["priorities"] or {}
    if episodes.get("count"):
        yield "Episodes", _make_line_table(make_episode_lines(episodes))
    if episodes.get("stats"):
        yield "Statistics of finished episodes", _make_line_table(make_stats_lines(episodes["stats"]))
    if report["reward"] is not None:
        yield "Reward", _make_line_table(make_reward_lines(report))
    if report["fields"]:
        read = report["read"]
        sampled = "" if read["rows"] == read["of"] else f", from {read['rows']:,} of {read['of']:,} rows"
        yield f"Fields{sampled}", _make_field_table(report["fields"])
    if priorities.get("effective") is not None:
        yield "Priorities", _make_line_table(make_priority_lines(priorities))
    if report["reuse"] is not None:
        yield "Reuse", _make_line_table(make_reuse_lines(report["reuse"]))


def _make_line_table(lines: Iterable[ReportLine]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, text, histogram, note in lines:
        parts = [(text, ""), (_draw_bars(histogram), "cyan"), (note, "")]
        shown_parts = [part for part in parts if part[0]]
        table.add_row(Text(name, "dim"), Text("  ").join(Text(*part) for part in shown_parts))
    return table


def _draw_bars(histogram: dict[str, Any] | None, width: int = 40) -> str:
    """Draw a histogram as a line of at most `width` bars; neighbouring bins are merged to fit."""
    if histogram is None:
        return ""
    counts = histogram["counts"]
    bins_per_bar = -(-len(counts) // width)
    counts = [sum(counts[start : start + bins_per_bar]) for start in range(0, len(counts), bins_per_bar)]
    max_count = max(counts) or 1
    # Heights are rounded up, so that every count above 0 is visible.
    return "".join(_BAR_CHARACTERS[min(-(-8 * count // max_count), 8)] for count in counts)


def _make_field_table(fields: list[dict[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    for title in ("field", "form"):
        table.add_column(title)
    for title in ("min", "mean", "max", "std"):
        table.add_column(title, justify="right")
    table.add_column("values", no_wrap=True)
    table.add_column("")
    for field in fields:
        _add_field_row(table, field, field["name"], format_type(field))
        for part in field["dimensions"][:_MAX_SHOWN_DIMENSIONS] if len(field["dimensions"]) > 1 else ():
            _add_field_row(table, part, f"  {part['name']}", "")
        if len(field["dimensions"]) > _MAX_SHOWN_DIMENSIONS:
            table.add_row(Text(f"  and {len(field['dimensions']) - _MAX_SHOWN_DIMENSIONS} more", "dim"))
    return table


def _add_field_row(table: Table, part: dict[str, Any], name: str, form: str) -> None:
    notes = [f"{part[kind]:,} {word}" for kind, word in (("nan", "NaN"), ("infinite", "infinite")) if part[kind]]
    if part["constant"]:
        all_constant = part["constant"] is True or part["min"] == part["max"]
        notes.append("constant" if all_constant else f"{part['constant']:,} constant")
    table.add_row(
        Text(name),
        Text(form, "dim"),
        *(format_number(part[figure]) for figure in ("min", "mean", "max", "std")),
        Text(_draw_bars(part["histogram"], _NARROW_WIDTH), "cyan"),
        Text(", ".join(notes), "yellow"),
    )
