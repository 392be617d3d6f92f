"""Draws the timelines of docs/why.md: one episode that ends at a time limit, under each autoreset mode.

Run it as `python docs/pictures/timelines.py`; it writes docs/images/timeline_*.svg, which are kept.
"""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

IMAGES = Path(__file__).parent.parent / "images"
CELL, GAP, LEFT, TOP = 118, 14, 130, 64
COLORS = {"step": "#2f6f9f", "end": "#b5651d", "reset": "#8a8f98", "new": "#3c8d5a"}

# Each cell: what is stored at a time, and how it counts.
TIMELINES = {
    "next_step": (
        "NEXT_STEP: the step after an end only resets",
        [
            ("t = 0", ["obs s₀", "reward r₀", "→ s₁"], "step"),
            ("t = 1", ["obs s₁", "reward r₁", "truncated → s₂"], "end"),
            ("t = 2", ["obs s₂ (final)", "reward 0, no action", "→ s′₀, a new one"], "reset"),
            ("t = 3", ["obs s′₀", "reward r′₀", "→ s′₁"], "new"),
        ],
        "The row at t = 2 is no transition: in no batch, advantage 0. Its value V(s₂) is what t = 1 bootstraps from.",
    ),
    "same_step": (
        "SAME_STEP: the step that ends also resets",
        [
            ("t = 0", ["obs s₀", "reward r₀", "→ s₁"], "step"),
            ("t = 1", ["obs s₁", "reward r₁", "truncated → s′₀ !"], "end"),
            ("t = 2", ["obs s′₀", "reward r′₀", "→ s′₁"], "new"),
            ("t = 3", ["obs s′₁", "reward r′₁", "→ s′₂"], "new"),
        ],
        'What comes back at t = 1 is the new episode\'s first observation. The true s₂ is in info["final_obs"].',
    ),
    "disabled": (
        "DISABLED: you reset what has ended",
        [
            ("t = 0", ["obs s₀", "reward r₀", "→ s₁"], "step"),
            ("t = 1", ["obs s₁", "reward r₁", "truncated → s₂"], "end"),
            ("reset", ["your call", "gives s′₀", ""], "reset"),
            ("t = 2", ["obs s′₀", "reward r′₀", "→ s′₁"], "new"),
        ],
        "s₂ came back as it is; the loop must not store s′₀ as the next observation of t = 1.",
    ),
}


def picture(title: str, cells: list[tuple[str, list[str], str]], remark: str) -> str:
    """One timeline as SVG, for light and dark pages."""
    width = LEFT + len(cells) * (CELL + 2 * GAP + 14)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 208" role="img" aria-label="{escape(title)}">',
        "<style>text{font:13px system-ui,sans-serif;fill:#7a828e}.t{font-weight:600;font-size:15px}"
        ".c{fill:#fff}.h{fill:#fff;font-weight:600}</style>",
        f'<text class="t" x="8" y="26">{escape(title)}</text>',
    ]
    step = CELL + 2 * GAP + 14
    for number, (head, lines, kind) in enumerate(cells):
        x = 8 + number * step
        dashed = ' stroke-dasharray="6 5" stroke="#fff" stroke-width="2"' if kind == "reset" else ""
        parts.append(
            f'<rect x="{x}" y="{TOP - 18}" width="{CELL + 28}" height="104" rx="9" fill="{COLORS[kind]}"{dashed}/>'
        )
        parts.append(f'<text class="h" x="{x + 12}" y="{TOP + 4}">{escape(head)}</text>')
        for row, line in enumerate(lines):
            parts.append(f'<text class="c" x="{x + 12}" y="{TOP + 28 + 21 * row}">{escape(line)}</text>')
    parts.append(f'<text x="8" y="{TOP + 118}">{escape(remark)}</text></svg>')
    return "".join(parts) + "\n"


if __name__ == "__main__":
    for name, (title, cells, remark) in TIMELINES.items():
        (IMAGES / f"timeline_{name}.svg").write_text(picture(title, cells, remark), encoding="utf-8")
