"""`relive version`: the versions that a bug report needs."""

from __future__ import annotations

import argparse
import json
import platform
from typing import Any

import gymnasium
import tensordict
import torch

import relive
from relive.kernels import backend


def register(commands: Any) -> None:
    """Add this command to the parser."""
    parser = commands.add_parser(
        "version",
        help="print the versions of relive and its dependencies",
        description="Print the versions of relive and its dependencies, and the kernels in use.",
    )
    parser.add_argument("--json", action="store_true", help="print the versions as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print one line for each part."""
    parts = {
        "relive": relive.__version__,
        "kernels": backend(),
        "torch": str(torch.__version__),
        "tensordict": tensordict.__version__,
        "gymnasium": gymnasium.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if arguments.json:
        print(json.dumps(parts, indent=2))
        return 0
    for name, version in parts.items():
        print(f"{name:<11}{version}")
    return 0
