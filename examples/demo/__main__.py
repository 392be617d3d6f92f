"""`relive demo`: shows in about a minute why relive exists, what it saves, and PPO learning with it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from relive.cli.demo.cartpole import AVERAGED, Report, Settings, train
from relive.cli.demo.curve import save_curve
from relive.cli.demo.progress import watch
from relive.cli.demo.replay import SHAPE, show
from relive.cli.demo.timeline import TIME_LIMIT, render, tell_all
from relive.inspector import inspect

SOLVED, UNSOLVED = 0, 1


def register(commands: Any) -> None:
    """Add this command to the parser."""
    parser = commands.add_parser(
        "demo",
        help="watch one truncation handled correctly, the cost of a replayed frame, and PPO solving CartPole-v1",
        description=(
            "Show one truncation as a timeline under each autoreset mode, next to the result of a naive loop. Show the "
            "memory of an Atari transition in a replay buffer, next to the other libraries that are installed. "
            "Then train PPO on CartPole-v1 until the mean return of the last 100 episodes is 475, and save the "
            "learning curve and a report on the last rollout."
        ),
        epilog="Exit code: 0 solved (or --no-train), 1 not solved within --steps, 2 wrong usage, 130 Ctrl-C.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--seed", metavar="N", type=int, default=1, help="seed of the environments, the networks and the minibatches"
    )
    parser.add_argument(
        "--steps",
        metavar="N",
        type=_positive,
        default=Settings.max_transitions,
        help="train for at most this many transitions, in whole rollouts",
    )
    parser.add_argument("--out", metavar="FOLDER", type=Path, default=Path("runs"), help="folder for all runs")
    parser.add_argument("--name", default="demo", help="name of this run's folder in --out")
    parser.add_argument("--no-train", action="store_true", help="show only the tables")
    parser.set_defaults(run=run)


def _positive(text: str) -> int:
    number = int(text.replace("_", ""))
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {number}")
    return number


def run(arguments: argparse.Namespace) -> int:
    """Show the tables, train, and print the result."""
    console = Console(highlight=False)
    _title(console, f"One truncation: a time limit cuts a walk off after {TIME_LIMIT} steps")
    console.print(render(tell_all()))
    console.print()
    height, width, frames = SHAPE.obs
    _title(console, f"Replay of Atari: {frames} stacked frames of {height} × {width}")
    show(console)
    if arguments.no_train:
        return SOLVED
    settings = Settings(max_transitions=arguments.steps)
    console.print()
    _title(console, f"PPO on CartPole-v1: {settings.num_envs} environments, seed {arguments.seed}")
    report = watch(console, train(settings, arguments.seed), settings)
    folder = arguments.out / arguments.name
    console.print(_summary(report, settings))
    console.print(_save(folder / "learning_curve.png", report, settings, arguments.seed), soft_wrap=True)
    inspect(report.rollout, html=folder / "report.html", stats=report.stats)
    console.print(Text.assemble("report on the last rollout: ", (str(folder / "report.html"), "cyan")), soft_wrap=True)
    return SOLVED if report.solved else UNSOLVED


def _title(console: Console, title: str) -> None:
    console.rule(Text(title, "bold"), align="left", characters="─")


def _summary(report: Report, settings: Settings) -> Table:
    episodes, steps = report.stats.num_episodes, report.stats.num_steps
    verdict = Text("solved", "bold green") if report.solved else Text("not solved within --steps", "bold yellow")
    table = Table.grid(padding=(0, 2))
    for name, value in (
        ("result", verdict),
        (
            "mean return",
            f"{report.mean('return'):.1f} over the last {min(AVERAGED, episodes)} episodes, goal {settings.target:g}",
        ),
        ("transitions", f"{steps:,} in {episodes:,} episodes"),
        ("time", f"{report.seconds:.1f} s, {steps / report.seconds:,.0f} steps/s"),
        ("buffer", f"{report.buffer_share:.1%} of the time"),
    ):
        table.add_row(Text(name, "dim"), value)
    return table


def _save(path: Path, report: Report, settings: Settings, seed: int) -> Text:
    title = f"PPO on CartPole-v1, seed {seed}: {report.stats.num_steps:,} transitions, {report.seconds:.0f} s"
    saved = save_curve(path, report.stats, window=AVERAGED, target=settings.target, title=title)
    if saved:
        return Text.assemble("learning curve: ", (str(path), "cyan"))
    return Text('No picture: matplotlib is not installed. Run pip install ".[plots]" in a clone of relive.', "yellow")
