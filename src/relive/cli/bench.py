"""`relive bench`: timings of relive and of the other installed libraries on this machine."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

NOT_INSTALLED = 2
_MODULES = ("relive.benchmarks", "benchmarks")
"""The benchmarks of an installed package, and of the folder of a clone."""
MISSING = (
    "relive bench: expected the benchmarks of relive, got neither relive.benchmarks nor a folder benchmarks. "
    "Run it in a clone of relive, or after pip install . there."
)


def register(commands: Any) -> None:
    """Add this command to the parser."""
    parser = commands.add_parser(
        "bench",
        help="time relive and the other experience libraries that are installed",
        description="Time every hot path of relive and of the other experience libraries that are installed. Check "
        "their results first, print tables, and report what became slower since the last kept run. A suite whose "
        "packages are missing is skipped and says so.",
        epilog='Libraries to compare with: pip install ".[bench]" in a clone of relive. Exit code: 0 if all suites '
        "ran, 1 if one failed, 2 if none could run.",
    )
    parser.add_argument(
        "--quick", action="store_true", help="take about twelve minutes; too noisy for claims (default: hours)"
    )
    parser.add_argument("--only", metavar="A,B", help="run only these suites; an unknown name lists all")
    parser.add_argument("--json", metavar="FILE", help="also write the results of all suites to FILE")
    parser.add_argument(
        "--device", metavar="D", help="time the calls of training loops on this device, such as cuda, and write a page"
    )
    parser.add_argument("--fasttd3", metavar="FILE", help="fast_td3_utils.py of a clone of FastTD3: with --device only")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the chosen suites."""
    suites = _suites()
    if suites is None:
        print(MISSING, file=sys.stderr)
        return NOT_INSTALLED
    given = [(f"--{name}", getattr(arguments, name)) for name in ("only", "json", "device", "fasttd3")]
    options = [text for name, value in given if value for text in (name, value)]
    return suites.main([*["--quick"] * arguments.quick, *options], prog="relive bench")


def _suites() -> Any:
    """The module that runs all suites, or None if it is not installed."""
    for module in _MODULES:
        if _is_ours(module):
            return import_module(f"{module}.__main__")
    return None


def _is_ours(module: str) -> bool:
    # Other projects have a folder called benchmarks, too.
    found = find_spec(module)
    return found is not None and found.origin is not None and find_spec(f"{module}.verify_replay") is not None
