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
    ends_text,
    episode_texts,
    fact_texts,
    form_text,
    number,
    percent,
    reuse_texts,
    share_text,
    spread_text,
)

_BAR_CHARACTERS = " ▁▂▃▄▅▆▇█"
_MAX_DIMENSION_LINES = 16
"""Maximum number of lines for the dimensions of a field."""
_NARROW_WIDTH = 12
"""Width of a histogram in the table of fields, so that the table fits in 80 columns."""


def render(report: dict[str, Any]) -> RenderableType:
    """Render the whole report, with warnings first."""
    report = _escape(report)
    parts: list[RenderableType] = [_pairs((title, Text(text)) for title, text in fact_texts(report["source"]))]
    for title, body in _sections(report):
        parts += [Text(), Rule(Text(title, "bold"), align="left", characters="─", style="dim"), body]
    return Group(*parts)


def _escape(part: Any) -> Any:
    """Escape the control characters of all names and texts of a report."""
    if isinstance(part, str):
        return escape_controls(part)
    if isinstance(part, dict):
        return {_escape(name): _escape(value) for name, value in part.items()}
    return [_escape(value) for value in part] if isinstance(part, list) else part


def _sections(report: dict[str, Any]) -> Iterator[tuple[str, RenderableType]]:
    if report["warnings"]:
        yield "Warnings", Group(*(Text.assemble(("! ", "yellow"), line) for line in report["warnings"]))
    episodes = report["episodes"] or {}
    if episodes.get("count"):
        yield "Episodes", _pairs(_episode_rows(episodes))
    if episodes.get("stats"):
        yield "Statistics of finished episodes", _pairs(_stats_rows(episodes["stats"]))
    if report["reward"] is not None:
        yield "Reward", _pairs(_reward_rows(report))
    if report["fields"]:
        read = report["read"]
        sampled = "" if read["rows"] == read["of"] else f", from {read['rows']:,} of {read['of']:,} rows"
        yield f"Fields{sampled}", _field_table(report["fields"])
    if report["priorities"] is not None and report["priorities"]["effective"] is not None:
        yield "Priorities", _pairs(_priority_rows(report["priorities"]))
    if report["reuse"] is not None:
        yield "Reuse", _pairs(_reuse_rows(report["reuse"]))


def _pairs(rows: Iterable[tuple[str, RenderableType]]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, value in rows:
        table.add_row(Text(name, "dim"), value)
    return table


def draw_bars(histogram: dict[str, Any] | None, width: int = 40) -> str:
    """Draw a histogram as a line of at most `width` bars; neighbouring bins are merged to fit."""
    if histogram is None:
        return ""
    counts = histogram["counts"]
    bins_per_bar = -(-len(counts) // width)
    counts = [sum(counts[start : start + bins_per_bar]) for start in range(0, len(counts), bins_per_bar)]
    max_count = max(counts) or 1
    # Rounded up: every count above 0 is visible.
    return "".join(_BAR_CHARACTERS[min(-(-8 * count // max_count), 8)] for count in counts)


def _spread_row(moments: dict[str, Any]) -> Text:
    return Text.assemble(f"{spread_text(moments)}  ", (draw_bars(moments["histogram"]), "cyan"))


def _episode_rows(episodes: dict[str, Any]) -> Iterator[tuple[str, RenderableType]]:
    bars_by_name = {name: draw_bars((episodes[name] or {}).get("histogram")) for name in ("returns", "lengths")}
    for name, text in episode_texts(episodes):
        yield name, Text.assemble(text, (f"  {bars_by_name[name]}" if bars_by_name.get(name) else "", "cyan"))


def _stats_rows(stats: dict[str, Any]) -> Iterator[tuple[str, RenderableType]]:
    yield "finished", Text(f"{stats['episodes']:,} in {stats['steps']:,} steps, the last {stats['window']:,} below")
    for name in ("returns", "lengths"):
        if stats[name] is not None:
            yield name, _spread_row(stats[name])
    yield "ends", Text(ends_text({name: stats[name] for name in ("terminated", "truncated")}, stats["window"]))
    for name, count in stats["reasons"].items():
        yield f"reason: {name}", Text(share_text(count, stats["window"]))
    for name, moments in stats["metrics"].items():
        if moments is not None:
            yield f"metric: {name}", _spread_row(moments)


def _reward_rows(report: dict[str, Any]) -> Iterator[tuple[str, RenderableType]]:
    reward = report["reward"]
    yield "zero", Text(f"{reward['zero']:,} of {reward['rows']:,} rows ({percent(reward['zero'] / reward['rows'])})")
    yield "values", Text(draw_bars(reward["histogram"]), "cyan")
    if report["fit"] is not None:
        yield "explained variance", Text(f"{number(report['fit'])} of the returns, by the values")


def _field_table(fields: list[dict[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    for name in ("field", "form"):
        table.add_column(name)
    for name in ("min", "mean", "max", "std"):
        table.add_column(name, justify="right")
    table.add_column("values", no_wrap=True)
    table.add_column("")
    for field in fields:
        _field_row(table, field, field["name"], form_text(field))
        for part in field["dimensions"][:_MAX_DIMENSION_LINES] if len(field["dimensions"]) > 1 else ():
            _field_row(table, part, f"  {part['name']}", "")
        if len(field["dimensions"]) > _MAX_DIMENSION_LINES:
            table.add_row(Text(f"  and {len(field['dimensions']) - _MAX_DIMENSION_LINES} more", "dim"))
    return table


def _field_row(table: Table, part: dict[str, Any], name: str, type_text: str) -> None:
    notes = [f"{part[kind]:,} {word}" for kind, word in (("nan", "NaN"), ("infinite", "infinite")) if part[kind]]
    if part["constant"]:
        all_constant = part["constant"] is True or part["min"] == part["max"]
        notes.append("constant" if all_constant else f"{part['constant']:,} constant")
    table.add_row(
        Text(name),
        Text(type_text, "dim"),
        *(number(part[figure]) for figure in ("min", "mean", "max", "std")),
        Text(draw_bars(part["histogram"], _NARROW_WIDTH), "cyan"),
        Text(", ".join(notes), "yellow"),
    )


def _priority_rows(priorities: dict[str, Any]) -> Iterator[tuple[str, RenderableType]]:
    rows, effective = priorities["rows"], priorities["effective"]
    yield "effective sample", Text(f"{number(round(effective))} of {rows:,} rows ({percent(effective / rows)})")
    rows_with = ", ".join(f"{share} in {count:,} rows" for share, count in priorities["rows_with"].items())
    yield "mass", Text(rows_with)
    yield "largest", Text(f"{percent(priorities['largest'])} of the mass")
    spectrum = draw_bars(priorities["relative"])
    yield "spectrum", Text.assemble((spectrum, "cyan"), "  relative to the mean, in powers of ten")


def _reuse_rows(reuse: dict[str, Any]) -> Iterator[tuple[str, RenderableType]]:
    for name, sentence in reuse_texts(reuse):
        yield name, Text(sentence)
    if "counted" in reuse:
        yield "draws per row", Text(draw_bars(reuse["counted"]["histogram"]), "cyan")
