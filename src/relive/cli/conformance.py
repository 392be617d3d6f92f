"""`relive conformance`: the command of relive-conformance, a package of its own, where it is installed."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

NOT_INSTALLED = 2
MISSING = (
    "relive conformance: expected the package relive-conformance, got none. "
    "Run pip install ./conformance in a clone of relive."
)


def register(commands: Any) -> None:
    """Add this command to the parser."""
    parser = commands.add_parser(
        "conformance",
        help="test the installed libraries, or your own buffer, for correctness (needs relive-conformance)",
        description="Run the command relive-conformance with the same arguments.",
        epilog="Exit code: that of relive-conformance, or 2 if it is not installed.",
        add_help=False,
        prefix_chars="\0",  # no argument begins with it: options are passed on, --help among them
    )
    parser.add_argument("arguments", nargs="*", help="the arguments of relive-conformance")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Pass the arguments on, or say how to install the package."""
    if find_spec("relive_conformance") is None:
        print(MISSING, file=sys.stderr)
        return NOT_INSTALLED
    return import_module("relive_conformance.__main__").main(arguments.arguments, prog="relive conformance")
