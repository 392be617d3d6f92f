"""`relive inspect PATH`: what is stored there, what looks odd, and a page to step through it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from relive.errors import CheckpointError, shown
from relive.inspector import inspect


def register(commands: Any) -> None:
    """Add this command to the parser."""
    parser = commands.add_parser(
        "inspect",
        help="show what a checkpoint, a disk memory or a dataset holds, and what looks odd",
        description=(
            "Show what a checkpoint, a disk memory or a Minari dataset holds: episodes, returns, ends, every field, "
            "priorities, reuse, and what looks odd, in words. Nothing is changed."
        ),
        epilog="For example: relive inspect runs/replay --html report.html. "
        "Exit code: 0 it was read (whatever it holds), 1 it cannot be read, 2 wrong usage, 130 Ctrl-C.",
    )
    parser.add_argument(
        "path", metavar="PATH", help="the folder that a buffer was saved to or lives in, or of a Minari dataset"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the same as one self-contained page")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON, for programs")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the report, and say where the page is."""
    try:
        report = inspect(arguments.path, html=arguments.html)
    except (CheckpointError, ValueError, KeyError, AssertionError, ImportError, OSError) as error:
        # Minari says what is wrong with its files in all of these ways.
        print(f"relive inspect: {shown(str(error)) or type(error).__name__}", file=sys.stderr)
        return 1
    if arguments.json:
        print(report.to_json(indent=2))
        return 0
    console = Console(highlight=False)
    console.print(report)
    if arguments.html is not None:
        console.print(f"\npage: {shown(str(arguments.html))}", markup=False, soft_wrap=True)
    return 0
