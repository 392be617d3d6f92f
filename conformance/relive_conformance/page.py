"""The report as one HTML page, light and dark, that needs no network and shows the figures of every difference."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from relive_conformance.cases import CASES
from relive_conformance.outcome import DIFFERS, NOT_OFFERED, PASSES, Outcome
from relive_conformance.report import SYMBOLS, Report, Result

_NAMES = {case.number: case.name for case in CASES}
_CLASSES = {PASSES: "pass", DIFFERS: "differs", NOT_OFFERED: "none"}

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --paper: #fff; --line: #d9dce1; --soft: #6b7280; --code: #f3f4f6;
  --pass: #15803d; --pass-back: #dcfce7; --differs: #b91c1c; --differs-back: #fee2e2; }
@media (prefers-color-scheme: dark) { :root { --ink: #e5e7eb; --paper: #14161a; --line: #33373e; --soft: #9ca3af;
  --code: #1f2329; --pass: #4ade80; --pass-back: #14331f; --differs: #f87171; --differs-back: #3b1719; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 78rem; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; } p.note { color: var(--soft); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; } th, td { border: 1px solid var(--line); padding: .3rem .4rem; text-align: center; }
th { font-weight: 600; font-size: .87rem; } th small { display: block; color: var(--soft); font-weight: 400; }
td.case { text-align: left; min-width: 17rem; } td.case b { display: block; }
td.case small { display: block; color: var(--soft); }
.pass { color: var(--pass); background: var(--pass-back); } .none { color: var(--soft); }
.differs { color: var(--differs); background: var(--differs-back); } td.differs a { color: inherit; font-weight: 700; }
.difference { border-left: 3px solid var(--differs); padding: .1rem 0 .1rem 1rem; margin: 1rem 0; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; margin: .4rem 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
pre { background: var(--code); padding: .7rem; overflow-x: auto; font-size: 13px; border-radius: 4px; }
"""

_MEANING = """
<p><b class="pass">✓</b> passes. <b class="differs">✗</b> differs: the call was accepted, or failed, and the outcome is
not the expected one; the figures are below. <b class="none">·</b> not offered: the library has no such operation, or
documents that it means something else (hover to read why). Every library is held to its own documentation. Cases
marked <i>misuse</i> are about input that no documentation allows: most libraries promise nothing there, and the cell
shows what happens.</p>
"""


def page(report: Report) -> str:
    """Return the HTML of the whole page."""
    return "\n".join(_page(report)) + "\n"


def _page(report: Report) -> Iterator[str]:
    yield "<!doctype html>"
    yield '<html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>Experience buffers: conformance</title><style>{_STYLE}</style></head><body>"
    yield "<h1>What a correct experience buffer does</h1>"
    yield f'<p class="note">Written by <code>relive-conformance</code> on {escape(report.date)}, '
    yield f"Python {escape(report.python)}.</p>{_MEANING}"
    yield '<div class="wide"><table><thead><tr><th>case</th>'
    for result in report.results:
        yield f"<th>{escape(result.name)}<small>{escape(result.version)}</small></th>"
    yield "</tr></thead><tbody>"
    for case in CASES:
        misuse = " <i>misuse</i>" if case.misuse else ""
        yield f'<tr><td class="case"><b>{escape(case.name)}</b>{escape(case.sentence)}{misuse}'
        yield f"<small>Expected: {escape(case.expected)}.</small></td>"
        for result in report.results:
            yield _cell(result, case.number)
        yield "</tr>"
    yield "<tr><td class='case'><b>passes / differs / not offered</b></td>"
    for result in report.results:
        yield f"<td>{' / '.join(str(result.count(status)) for status in SYMBOLS)}</td>"
    yield "</tr></tbody></table></div>"
    for result in report.results:
        if result.differences:
            yield f"<h2>{escape(result.name)} {escape(result.version)}</h2>"
        for number, outcome in result.differences.items():
            yield _difference(result, number, outcome)
    yield "</body></html>"


def _anchor(result: Result, number: str) -> str:
    return escape(f"{result.name}-{number}".replace(" ", "-"))


def _cell(result: Result, number: str) -> str:
    outcome = result.outcomes.get(number, Outcome(NOT_OFFERED, reason="not asked"))
    symbol = SYMBOLS[outcome.status]
    if outcome.status == DIFFERS:
        symbol = f'<a href="#{_anchor(result, number)}">{symbol}</a>'
    title = f' title="{escape(outcome.reason)}"' if outcome.reason else ""
    return f'<td class="{_CLASSES[outcome.status]}"{title}>{symbol}</td>'


def _difference(result: Result, number: str, outcome: Outcome) -> str:
    code = f"<pre>{escape(outcome.reproduction)}</pre>" if outcome.reproduction else ""
    return (
        f'<div class="difference" id="{_anchor(result, number)}"><b>{escape(_NAMES[number])}</b>'
        f"<dl><dt>expected</dt><dd>{escape(outcome.expected)}</dd><dt>got</dt><dd>{escape(outcome.got)}</dd></dl>"
        f"{code}</div>"
    )
