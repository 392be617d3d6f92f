"""`recollect version`: what is installed, as a bug report needs it."""

from __future__ import annotations

import argparse
import platform
from typing import Any

import gymnasium
import tensordict
import torch

import recollect
from recollect.kernels import backend


def register(commands: Any) -> None:
    """Add this command to the parser."""
    parser = commands.add_parser(
        "version",
        help="print the versions of recollect and of what it stands on",
        description="Print the versions of recollect and of what it stands on, and which kernels are in use.",
    )
    parser.set_defaults(run=run)


def run(_arguments: argparse.Namespace) -> int:
    """Print one line for each part."""
    parts = {
        "recollect": f"{recollect.__version__} ({backend()} kernels)",
        "torch": torch.__version__,
        "tensordict": tensordict.__version__,
        "gymnasium": gymnasium.__version__,
        "python": platform.python_version(),
    }
    for name, version in parts.items():
        print(f"{name:<11}{version}")
    return 0
