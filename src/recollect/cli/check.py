"""`recollect check PATH`: whether checkpoints are whole, read to the last byte."""

from __future__ import annotations

import argparse
from typing import Any

from recollect.checkpoint.loading import examined
from recollect.errors import CheckpointError


def register(commands: Any) -> None:
    """Add this command to the parser."""
    parser = commands.add_parser(
        "check",
        help="say of each checkpoint in a folder whether it is whole",
        description="Read every checkpoint below PATH to its last byte and print a line for each. "
        "The exit code is 0 if all can be loaded, and 1 if one cannot or there is none.",
    )
    parser.add_argument("path", metavar="PATH", help="the folder that a buffer was saved to")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print one line for each checkpoint."""
    code = 0
    try:
        for number, wrong in examined(arguments.path):
            print(f"{number}: {'whole' if wrong is None else wrong}")
            code = code if wrong is None else 1
    except CheckpointError as error:
        print(error)
        return 1
    return code
