"""`relive check PATH`: verifies every byte of checkpoints and disk memory."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from relive.errors import CheckpointError, escaped
from relive.inspector.saved import examined


def register(commands: Any) -> None:
    """Add this command to the parser."""
    parser = commands.add_parser(
        "check",
        help="verify every checkpoint in a folder, or a disk memory",
        description="Read every checkpoint below PATH, or a whole disk memory, to the last byte and print one line for "
        "each. No file is changed.",
        epilog="Exit code: 0 all are whole, 1 one is damaged or there is none, 2 wrong usage, 130 stopped by Ctrl-C.",
    )
    parser.add_argument("path", metavar="PATH", help="a folder of checkpoints, or of disk memory")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print one line for each checkpoint."""
    found: list[dict[str, Any]] = []
    try:
        for number, wrong in examined(arguments.path):
            found.append({"checkpoint": number, "whole": wrong is None, "wrong": wrong and str(wrong)})
            if not arguments.json:
                print(f"{number}: {escaped(str(wrong)) if wrong else 'whole'}", flush=True)
    except CheckpointError as error:
        print(f"relive check: {escaped(str(error))}", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps(found, indent=2))
    return 0 if all(checkpoint["whole"] for checkpoint in found) else 1
