"""`relive check PATH`: whether checkpoints and disk memories are whole, read to the last byte."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from relive.checkpoint.loading import examined
from relive.errors import CheckpointError, shown


def register(commands: Any) -> None:
    """Add this command to the parser."""
    parser = commands.add_parser(
        "check",
        help="say of each checkpoint in a folder whether it is whole",
        description="Read every checkpoint below PATH, or all of a disk memory, to its last byte and print a line for "
        "each. Nothing is changed.",
        epilog="Exit code: 0 all are whole, 1 one is not or there is none, 2 wrong usage, 130 Ctrl-C.",
    )
    parser.add_argument("path", metavar="PATH", help="the folder that a buffer was saved to, or lives in")
    parser.add_argument("--json", action="store_true", help="print the same as JSON, for programs")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print one line for each checkpoint."""
    found: list[dict[str, Any]] = []
    try:
        for number, wrong in examined(arguments.path):
            found.append({"checkpoint": number, "whole": wrong is None, "wrong": wrong and str(wrong)})
            if not arguments.json:
                print(f"{number}: {shown(str(wrong)) if wrong else 'whole'}", flush=True)
    except CheckpointError as error:
        print(f"relive check: {shown(str(error))}", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps(found, indent=2))
    return 0 if all(checkpoint["whole"] for checkpoint in found) else 1
