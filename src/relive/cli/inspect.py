"""`relive inspect PATH`: a report on a checkpoint, a disk memory or a dataset, also as a page."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from relive.errors import CheckpointError, escaped
from relive.inspector import inspect

WITHOUT_RICH = (
    "relive inspect: expected rich for tables, colours and histograms, got none. "
    'This is the short text; run pip install "relive[cli]" for the whole report.'
)


def register(commands: Any) -> None:
    """Add this command to the parser."""
    parser = commands.add_parser(
        "inspect",
        help="show the contents of a checkpoint, a disk memory or a dataset, and what looks odd",
        description=(
            "Show the contents of a checkpoint, a disk memory or a Minari dataset: episodes, returns, ends, every "
            "field, priorities and reuse, and say what looks odd. No file is changed."
        ),
        epilog="For example: relive inspect runs/replay --html report.html. "
        "Exit code: 0 PATH was read (whatever it holds), 1 it cannot be read, 2 wrong usage, 130 stopped by Ctrl-C.",
    )
    parser.add_argument("path", metavar="PATH", help="a folder of checkpoints, of disk memory or of a Minari dataset")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="also write the report as one self-contained HTML page"
    )
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the report, and say where the page is."""
    try:
        report = inspect(arguments.path, html=arguments.html)
    except (CheckpointError, ValueError, KeyError, AssertionError, ImportError, OSError) as error:
        # Minari raises all of these for broken files.
        print(f"relive inspect: {escaped(str(error)) or type(error).__name__}", file=sys.stderr)
        return 1
    if arguments.json:
        print(report.to_json(indent=2))
        return 0
    try:
        from rich.console import Console
    except ImportError:
        print(report)
        print(WITHOUT_RICH, file=sys.stderr)
    else:
        Console(highlight=False).print(report)
    if arguments.html is not None:
        print(f"\npage: {escaped(str(arguments.html))}")
    return 0
