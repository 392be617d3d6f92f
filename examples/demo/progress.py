"""The progress of a training run: a live bar in a terminal, a line now and then in a file."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from relive.cli.demo.cartpole import Report, Settings

LINE_EVERY = 20_000
"""Transitions between two lines if the output is not a terminal."""


def watch(console: Console, reports: Generator[Report], settings: Settings) -> Report:
    """Show the training while it runs; returns its last report."""
    # Closed here, also after Ctrl-C, because the training changes the seed and the number of threads of the process.
    with closing(reports):
        if not console.is_terminal:
            return _last(reports, _Lines(console))
        # The bar shows the return on its way to the goal, which says more than the number of steps.
        columns = (BarColumn(12), TextColumn("{task.description}"))
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("starting", total=settings.target)

            def show(report: Report) -> None:
                progress.update(task, completed=max(report.mean("return"), 0.0), description=describe(report))

            return _last(reports, show)


class _Lines:
    """Prints a line after every `LINE_EVERY` transitions."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._due = LINE_EVERY

    def __call__(self, report: Report) -> None:
        if report.solved or report.stats.num_steps >= self._due:
            self._console.print(describe(report), soft_wrap=True)
            self._due += LINE_EVERY


def _last(reports: Generator[Report], show: Callable[[Report], None]) -> Report:
    report = next(reports)
    show(report)
    for report in reports:
        show(report)
    return report


def describe(report: Report) -> str:
    """One line: return, length, speed, and the buffer's share of the time."""
    steps = report.stats.num_steps
    return (
        f"return {report.mean('return'):5.1f}  length {report.mean('length'):5.1f}  {steps:7,} steps  "
        f"{steps / report.seconds:6,.0f}/s  buffer {report.buffer_share:4.1%}"
    )
