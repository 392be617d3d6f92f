"""The words of a report: texts of its figures, and its short forms as HTML for a notebook and as plain text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Any

from relive.errors import escaped
from relive.inspector.measures import number, percent

FACTS = {
    "kind": "kind",
    "id": "dataset",
    "path": "path",
    "saved": "saved",
    "rows": "rows",
    "capacity": "capacity",
    "num_steps": "maximum steps",
    "num_stored": "steps",
    "reset_rows": "rows that only reset",
    "num_envs": "environments",
    "episodes": "episodes",
    "round": "round",
    "written": "written",
    "oldest": "oldest",
    "bytes": "memory",
    "device": "device",
    "autoreset": "autoreset",
    "next_obs": "next_obs",
    "sampler": "sampler",
}


def fact_texts(source: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (title, text) for each fact that needs no reading of rows."""
    several = (source.get("num_envs") or 1) > 1
    for name, title in FACTS.items():
        value = source.get(name)
        if value is None:
            continue
        if name == "bytes":
            text = size_text(value)
        elif name == "oldest":
            text = f"{value:,} rows ago" + (", counted in its own environment" if several else "")
        elif name == "written":
            text = f"{value:,} rows so far" + (
                f", in all {source['num_envs']:,} environments together" if several else ""
            )
        else:
            text = f"{value:,}" if isinstance(value, int) else str(value)
        yield title, text


def size_text(nbytes: float) -> str:
    """A number of bytes with a unit that leaves few digits: `7.1 KiB`."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:,.0f} {unit}" if unit == "B" else f"{nbytes:,.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:,.2f} GiB"


def spread_text(moments: dict[str, Any]) -> str:
    """The range, mean and median of a quantity."""
    words = f"{number(moments['min'])} to {number(moments['max'])}, mean {number(moments['mean'])}"
    return f"{words}, median {number(moments['median'])}"


def share_text(count: int, of: int) -> str:
    """A count and its share: `3 (12 %)`."""
    return f"{count:,} ({percent(count / (of or 1))})"


def end_texts(ends: dict[str, int], stopped: int) -> dict[str, str]:
    """The number of episodes that stopped in each way, and their share of all stopped episodes."""
    return {
        name: f"{count:,}" if name == "running" else share_text(count, stopped) for name, count in ends.items() if count
    }


def ends_text(ends: dict[str, int], stopped: int) -> str:
    """The text of `end_texts` in one line."""
    return ", ".join(f"{name} {text}" for name, text in end_texts(ends, stopped).items())


def episode_texts(episodes: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (title, text) for the number of stored episodes, their returns, lengths and ends."""
    yield "stored", f"{episodes['count']:,}, {episodes['whole']:,} of them whole"
    if episodes["returns"] is not None:
        yield "returns", spread_text(episodes["returns"])
        yield "lengths", spread_text(episodes["lengths"])
    yield "ends", ends_text(episodes["ends"], episodes["stopped"])


def form_text(field: dict[str, Any]) -> str:
    """The dtype and shape of a field: `float32[3]`."""
    return f"{field['dtype']}{field['shape'] or ''}"


def reuse_texts(reuse: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (title, text) for how often rows were drawn, or that it was not counted."""
    if "draws" in reuse:
        each = "" if reuse["per_row"] is None else f", {number(round(reuse['per_row'], 2))} per row written"
        yield "drawn in total", f"{reuse['draws']:,} rows{each}"
    if "left_in_epoch" in reuse:
        yield "this epoch", f"{reuse['left_in_epoch']:,} rows left"
    counted = reuse.get("counted")
    if counted is None:
        yield "each row", "not counted; sampler=rl.Counted(…) counts the draws of every row"
    else:
        never = percent(counted["never"] / counted["rows"])
        yield (
            "each row",
            f"{number(round(counted['mean'], 2))} times on average, {counted['max']:,} at most, {never} never",
        )


# Text inherits the notebook's colour, and labels are fainter, so that tables suit light and dark notebooks.
_BOX = "display:inline-block;max-width:100%;overflow-x:auto;font:13px/1.5 system-ui,sans-serif;text-align:left"
_TABLE = "border-collapse:collapse;margin:6px 0;border:0;background:none;font-size:inherit"
_CELL = "text-align:left;vertical-align:top;padding:1px 16px 1px 0;border:0;background:none;color:inherit"
_FAINT = f"{_CELL};opacity:.65;font-weight:400"
_MOST_ROWS = 40
"""Longer tables are cut and end with the number of hidden rows."""


def html_card(
    title: str,
    facts: Iterable[tuple[str, object]],
    head: Sequence[str] = (),
    rows: Sequence[Sequence[object]] = (),
    notes: Iterable[str] = (),
) -> str:
    """HTML of a title, notes, facts (without None values) and a table. All arguments are shown as text, not as HTML.

    >>> html_card("<b>", [("rows", 3), ("sampler", None)]).count("<b>")
    0
    """
    more = [(f"and {len(rows) - _MOST_ROWS:,} more",)] if len(rows) > _MOST_ROWS else []
    parts = [
        f"<strong>{escape(title)}</strong>",
        *(f'<div style="margin:4px 0">⚠ {escape(note)}</div>' for note in notes),
        _table(_row(name, value) for name, value in facts if value is not None),
        _table([_row(*head, style=_FAINT), *(_row(*row) for row in (*rows[:_MOST_ROWS], *more))]) if rows else "",
    ]
    return f'<div style="{_BOX}">{"".join(parts)}</div>'


def text_card(
    title: str,
    facts: Iterable[tuple[str, object]],
    head: Sequence[str] = (),
    rows: Sequence[Sequence[object]] = (),
    notes: Iterable[str] = (),
) -> str:
    """A card as plain text, with control characters escaped.

    >>> print(text_card("Report", [("rows", 3), ("sampler", None)], ("field", "min"), [("obs", 0.5)], ["odd"]))
    Report
    ! odd
    rows  3
    field  min
    obs    0.5
    """
    pairs = [(name, value) for name, value in facts if value is not None]
    table = [head, *rows] if rows else []
    return escaped("\n".join([title, *(f"! {note}" for note in notes), *_columns(pairs), *_columns(table)]))


def _columns(rows: Iterable[Sequence[object]]) -> list[str]:
    columns = [[str(cell) for cell in column] for column in zip(*rows, strict=True)]
    widths = [max(map(len, column)) for column in columns]
    lines = zip(*columns, strict=True)
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]


def _table(rows: Iterable[str]) -> str:
    return f'<table style="{_TABLE}"><tbody>{"".join(rows)}</tbody></table>'


def _row(first: object, *others: object, style: str = _CELL) -> str:
    cells = ((_FAINT, first), *((style, other) for other in others))
    body = "".join(f'<td style="{style}">{escape(str(value))}</td>' for style, value in cells)
    return f'<tr style="background:none">{body}</tr>'
