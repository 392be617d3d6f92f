"""The command line: `relive <command>`. Each command is a module here that describes itself to the parser."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

from relive import __version__
from relive.cli import bench, check, conformance, demo, inspect, version

COMMANDS = (demo, inspect, check, conformance, bench, version)
"""A command is a module with `register(commands)`, which adds its parser and names its `run(arguments) -> int`."""

INTERRUPTED = 130
"""What shells expect of a program that Ctrl-C ended: 128 + SIGINT."""
UNREAD = 141
"""And of one whose reader went away, as `head` does: 128 + SIGPIPE."""

EXIT_CODES = "Exit codes: 0 success, 1 the command found a fault, 2 wrong usage, 130 stopped by Ctrl-C."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code, as `EXIT_CODES` has it."""
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
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes when it ends
        return UNREAD
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
