"""The demo: one time limit step by step, the cost of a replayed Atari frame, and PPO that solves CartPole-v1.

    make demo    # or python -m examples.demo, which needs relive[cli,plots] and relive-conformance

It shows one truncation as a timeline under each autoreset mode, next to the result of a naive loop, and the memory of
an Atari transition, next to the other libraries that are installed. Then it trains until the mean return of the last
100 episodes is 475, and saves the learning curve and a report on the last rollout.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Generator
from contextlib import closing
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from relive import inspect

from .cartpole import NUM_AVERAGED, Report, Settings, save_curve, train
from .replay import SHAPE, show
from .timeline import TIME_LIMIT, play_all, render

SOLVED, UNSOLVED = 0, 1
LINE_EVERY = 20_000
"""Transitions between two lines if the output is not a terminal."""


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo",
        description="Show why relive exists, what it saves, and PPO learning with it, in about a minute.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the environments, the networks and minibatches")
    parser.add_argument("--steps", type=int, default=Settings.max_transitions, help="train for at most this many")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for the picture and the report")
    parser.add_argument("--no-train", action="store_true", help="show only the tables")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Show the tables, train, and print the result; the exit code is 0 if the task is solved."""
    options = arguments(argv)
    console = Console(highlight=False)
    _title(console, f"One truncation: a time limit cuts a walk off after {TIME_LIMIT} steps")
    console.print(render(play_all()))
    console.print()
    height, width, frames = SHAPE.obs
    _title(console, f"Replay of Atari: {frames} stacked frames of {height} × {width}")
    show(console)
    if options.no_train:
        return SOLVED
    settings = Settings(max_transitions=options.steps)
    console.print()
    _title(console, f"PPO on CartPole-v1: {settings.num_envs} environments, seed {options.seed}")
    report = watch(console, train(settings, options.seed), settings)
    console.print(_summary(report, settings))
    console.print(_save(options.out / "learning_curve.png", report, settings, options.seed), soft_wrap=True)
    inspect(report.rollout, html=options.out / "report.html", stats=report.stats)
    console.print(
        Text.assemble("report on the last rollout: ", (str(options.out / "report.html"), "cyan")), soft_wrap=True
    )
    return SOLVED if report.solved else UNSOLVED


def _title(console: Console, title: str) -> None:
    console.rule(Text(title, "bold"), align="left", characters="─")


def _summary(report: Report, settings: Settings) -> Table:
    episodes, steps = report.stats.num_episodes, report.stats.num_steps
    averaged = min(NUM_AVERAGED, episodes)
    verdict = Text("solved", "bold green") if report.solved else Text("not solved within --steps", "bold yellow")
    table = Table.grid(padding=(0, 2))
    for name, value in (
        ("result", verdict),
        ("mean return", f"{report.mean('return'):.1f} over the last {averaged} episodes, goal {settings.target:g}"),
        ("transitions", f"{steps:,} in {episodes:,} episodes"),
        ("time", f"{report.seconds:.1f} s, {steps / report.seconds:,.0f} steps/s"),
        ("buffer", f"{report.buffer_share:.1%} of the time"),
    ):
        table.add_row(Text(name, "dim"), value)
    return table


def _save(path: Path, report: Report, settings: Settings, seed: int) -> Text:
    title = f"PPO on CartPole-v1, seed {seed}: {report.stats.num_steps:,} transitions, {report.seconds:.0f} s"
    saved = save_curve(path, report.stats, target=settings.target, title=title)
    if saved:
        return Text.assemble("learning curve: ", (str(path), "cyan"))
    return Text('No picture: matplotlib is not installed. Run pip install ".[plots]" in a clone of relive.', "yellow")


def watch(console: Console, reports: Generator[Report], settings: Settings) -> Report:
    """Show the training while it runs; return its last report."""
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
    """Return one line with return, length, speed, and the buffer's share of the time."""
    steps = report.stats.num_steps
    return (
        f"return {report.mean('return'):5.1f}  length {report.mean('length'):5.1f}  {steps:7,} steps  "
        f"{steps / report.seconds:6,.0f}/s  buffer {report.buffer_share:4.1%}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
