"""The plot of a training run: every episode, the trailing mean, and the goal."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from relive import EpisodeStats


def save_curve(path: Path, stats: EpisodeStats, *, window: int, target: float, title: str) -> bool:
    """Plot the returns over the transitions into `path`; returns False if matplotlib is not installed."""
    try:
        # A separate Figure: pyplot would choose a window system and keep global state.
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return False
    episodes = stats.episodes()
    steps, returns = episodes["step"].numpy(), episodes["return"].numpy()
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(steps, returns, ".", color="tab:blue", alpha=0.3, markersize=4, label="one episode")
    axes.plot(steps, trailing_mean(returns, window), color="tab:blue", linewidth=2, label=f"mean of the last {window}")
    axes.axhline(target, color="tab:green", linestyle="--", linewidth=1, label=f"solved: {target:g}")
    axes.set(title=title, xlabel="transitions", ylabel="return", ylim=(0, None))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1000:g}k" if x else "0")
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return True


def trailing_mean(values: np.ndarray, window: int) -> np.ndarray:
    """The mean of each value and the `window - 1` values before it, or of as many as exist [E]."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    end = np.arange(1, len(values) + 1)
    start = np.maximum(end - window, 0)
    return (total[end] - total[start]) / (end - start)
