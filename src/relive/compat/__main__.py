"""Run a program with relive's buffers: `python -m relive.compat agilerl script.py …`, or `-m module …`."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from relive.compat.patching import ORIGINALS, patch

_USAGE = f"usage: python -m relive.compat {{{','.join(ORIGINALS)}}} (script.py | -m module) [arguments …]"


def main(arguments: Sequence[str]) -> None:
    """Patch a library, then run a script or a module as Python would."""
    name, *program = arguments or [""]
    is_module = program[:1] == ["-m"]
    program = program[is_module:]
    if name not in ORIGINALS or not program:
        raise SystemExit(_USAGE)
    patch(name)
    sys.argv = program
    if is_module:
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(program[0]).resolve().parent)
        runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
