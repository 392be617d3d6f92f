"""The command line: `relive <command>`."""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gymnasium
import tensordict
import torch

from relive import __version__
from relive.errors import CheckpointError, escape_controls
from relive.inspector import inspect
from relive.inspector.saved import verify
from relive.kernels import backend

EXIT_INTERRUPTED = 130
"""Exit code after Ctrl-C, as in shells: 128 + SIGINT."""
EXIT_BROKEN_PIPE = 141
"""Exit code if the reader of the output ends first, as `head` does: 128 + SIGPIPE."""
EXIT_NOT_INSTALLED = 2
"""Exit code of `relive conformance` without the package relive-conformance."""

EXIT_CODES = "Exit codes: 0 success, 1 the command found a fault, 2 wrong usage, 130 stopped by Ctrl-C."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code, one of `EXIT_CODES`."""
    arguments = _make_parser().parse_args(argv)
    # Characters that the encoding of the output lacks become "?".
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        code = arguments.run(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print(f"\nrelive {arguments.command}: stopped by Ctrl-C.", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Python flushes stdout once more at exit, which would fail again. So stdout is redirected to the null device.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    return code


def _make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; each command sets `run` to the function that executes it."""
    parser = argparse.ArgumentParser(
        prog="relive",
        description="Experience buffers for reinforcement learning in PyTorch.",
        epilog=f"`relive <command> --help` describes a command. {EXIT_CODES}",
    )
    parser.add_argument("--version", action="version", version=f"relive {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="<command>", required=True)
    command = commands.add_parser(
        "inspect",
        help="show the contents of a checkpoint, a disk memory or a dataset, with warnings",
        description=(
            "Show the contents of a checkpoint, a disk memory or a Minari dataset: episodes, returns, ends, every "
            "field, priorities and reuse, with warnings about likely mistakes. No file is changed."
        ),
        epilog="For example: relive inspect runs/replay --html report.html. "
        "Exit code: 0 PATH was read (whatever it holds), 1 it cannot be read, 2 wrong usage, 130 stopped by Ctrl-C.",
    )
    command.add_argument("path", metavar="PATH", help="a folder of checkpoints, of disk memory or of a Minari dataset")
    command.add_argument(
        "--html", type=Path, metavar="FILE", help="also write the report as one self-contained HTML page"
    )
    command.add_argument("--json", action="store_true", help="print the numbers as JSON")
    command.set_defaults(run=_run_inspect)
    command = commands.add_parser(
        "check",
        help="verify every checkpoint in a folder, or a disk memory",
        description="Read every checkpoint below PATH, or a whole disk memory, to the last byte and print one line for "
        "each. No file is changed.",
        epilog="Exit code: 0 all are whole, 1 one is damaged or there is none, 2 wrong usage, 130 stopped by Ctrl-C.",
    )
    command.add_argument("path", metavar="PATH", help="a folder of checkpoints, or of disk memory")
    command.add_argument("--json", action="store_true", help="print the result as JSON")
    command.set_defaults(run=_run_check)
    command = commands.add_parser(
        "conformance",
        help="test the installed libraries, or your own buffer, for correctness (needs relive-conformance)",
        description="Run the command relive-conformance with the same arguments.",
        epilog="Exit code: that of relive-conformance, or 2 if it is not installed.",
        add_help=False,
        # No argument begins with this character, so that all options, even --help, are passed on.
        prefix_chars="\0",
    )
    command.add_argument("arguments", nargs="*", help="the arguments of relive-conformance")
    command.set_defaults(run=_run_conformance)
    command = commands.add_parser(
        "version",
        help="print the versions of relive and its dependencies",
        description="Print the versions of relive and its dependencies, and the kernels in use.",
    )
    command.add_argument("--json", action="store_true", help="print the versions as JSON")
    command.set_defaults(run=_run_version)
    return parser


def _run_inspect(arguments: argparse.Namespace) -> int:
    try:
        report = inspect(arguments.path, html=arguments.html)
    except (CheckpointError, ValueError, KeyError, AssertionError, ImportError, OSError) as error:
        # Reading a broken Minari file may raise any of these errors.
        print(f"relive inspect: {escape_controls(str(error)) or type(error).__name__}", file=sys.stderr)
        return 1
    if arguments.json:
        print(report.to_json(indent=2))
        return 0
    try:
        from rich.console import Console
    except ImportError:
        print(report)
        print(
            "relive inspect: expected rich for tables, colours and histograms, got none. "
            'This is the short text; run pip install "relive[cli]" for the whole report.',
            file=sys.stderr,
        )
    else:
        Console(highlight=False).print(report)
    if arguments.html is not None:
        print(f"\npage: {escape_controls(str(arguments.html))}")
    return 0


def _run_check(arguments: argparse.Namespace) -> int:
    results: list[dict[str, Any]] = []
    try:
        for number, error in verify(arguments.path):
            results.append({"checkpoint": number, "whole": error is None, "wrong": error and str(error)})
            if not arguments.json:
                print(f"{number}: {escape_controls(str(error)) if error else 'whole'}", flush=True)
    except CheckpointError as error:
        print(f"relive check: {escape_controls(str(error))}", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps(results, indent=2))
    return 0 if all(checkpoint["whole"] for checkpoint in results) else 1


def _run_conformance(arguments: argparse.Namespace) -> int:
    if find_spec("relive_conformance") is None:
        print(
            "relive conformance: expected the package relive-conformance, got none. "
            "Run pip install ./conformance in a clone of relive.",
            file=sys.stderr,
        )
        return EXIT_NOT_INSTALLED
    return import_module("relive_conformance.__main__").main(arguments.arguments, prog="relive conformance")


def _run_version(arguments: argparse.Namespace) -> int:
    versions = {
        "relive": __version__,
        "kernels": backend(),
        "torch": str(torch.__version__),
        "tensordict": tensordict.__version__,
        "gymnasium": gymnasium.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if arguments.json:
        print(json.dumps(versions, indent=2))
        return 0
    for name, version in versions.items():
        print(f"{name:<11}{version}")
    return 0
