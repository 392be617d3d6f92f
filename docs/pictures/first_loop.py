"""Draws the learning curve of the README's first loop: it runs the loop as printed.

Run it as `python docs/pictures/first_loop.py`; it writes docs/images/first_loop.png, which is kept.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from relive import EpisodeStats

ROOT = Path(__file__).parents[2]
WINDOW = 50


def trained() -> EpisodeStats:
    """Run the loop of the README and return its statistics."""
    loop = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)[0]
    names: dict[str, Any] = {}
    exec(compile(loop, "README.md", "exec"), names)
    return names["stats"]


def draw(path: Path, stats: EpisodeStats) -> None:
    """Draw every episode as a point, with a colour for how it ended, and the mean as a line."""
    episodes = {name: column.numpy() for name, column in stats.episodes().items()}
    steps, returns = episodes["step"], episodes["return"]
    figure = Figure(figsize=(8, 3.2), layout="constrained", facecolor="white")
    axes = figure.add_subplot(xlabel="environment steps", ylabel="return", ylim=(0, 520))
    for name, color, told in (
        ("terminated", "tab:blue", "an episode: the pole fell"),
        ("truncated", "tab:orange", "an episode: the time limit of 500 steps"),
    ):
        ended = episodes[name]
        axes.plot(steps[ended], returns[ended], ".", color=color, alpha=0.5, label=told)
    mean = [np.mean(returns[max(end - WINDOW, 0) : end]) for end in range(1, len(returns) + 1)]
    axes.plot(steps, mean, color="black", linewidth=2, label=f"mean of the last {WINDOW}")
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    draw(ROOT / "docs" / "images" / "first_loop.png", trained())
