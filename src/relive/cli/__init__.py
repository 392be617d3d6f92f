"""The command line: `relive <command>`. Each command is a module of this package."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

from relive import __version__
from relive.cli import check, conformance, inspect, version

COMMANDS = (inspect, check, conformance, version)
"""Modules with a function `register(commands)`, which adds the command's parser with its `run(arguments) -> int`."""

INTERRUPTED = 130
"""The exit code that shells expect after Ctrl-C: 128 + SIGINT."""
BROKEN_PIPE = 141
"""The exit code that shells expect if the reader of the output ends first, as `head` does: 128 + SIGPIPE."""

EXIT_CODES = "Exit codes: 0 success, 1 the command found a fault, 2 wrong usage, 130 stopped by Ctrl-C."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code, one of `EXIT_CODES`."""
    arguments = _parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a file in an old encoding gets a "?", not a traceback
    try:
        code = arguments.run(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print(f"\nrelive {arguments.command}: stopped by Ctrl-C.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout when it ends
        return BROKEN_PIPE
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="relive",
        description="Experience memory for reinforcement learning in PyTorch.",
        epilog=f"`relive <command> --help` describes a command. {EXIT_CODES}",
    )
    parser.add_argument("--version", action="version", version=f"relive {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="<command>", required=True)
    for command in COMMANDS:
        command.register(commands)
    return parser
