"""The short forms of a report: the HTML that a notebook shows, and plain text where rich is not installed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from relive.errors import escaped

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
    """The same as plain text, with control characters escaped.

    >>> print(text_card("Report", [("rows", 3), ("sampler", None)], ("field", "min"), [("obs", 0.5)], ["odd"]))
    Report
    ! odd
    rows  3
    field  min
    obs    0.5
    """
    table = [head, *rows] if rows else []
    known = [(name, value) for name, value in facts if value is not None]
    return escaped("\n".join([title, *(f"! {note}" for note in notes), *_columns(known), *_columns(table)]))


def _columns(rows: Iterable[Sequence[object]]) -> list[str]:
    columns = [[str(cell) for cell in column] for column in zip(*rows, strict=True)]
    widths = [max(map(len, column)) for column in columns]
    lines = zip(*columns, strict=True)
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]


def _table(rows: Iterable[str]) -> str:
    return f'<table style="{_TABLE}"><tbody>{"".join(rows)}</tbody></table>'


def _row(first: object, *others: object, style: str = _CELL) -> str:
    cells = ((_FAINT, first), *((style, other) for other in others))
    return '<tr style="background:none">' + "".join(_cell(style, value) for style, value in cells) + "</tr>"


def _cell(style: str, value: object) -> str:
    return f'<td style="{style}">{escape(str(value))}</td>'
