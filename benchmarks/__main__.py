"""Run all suites, one after the other: `python -m benchmarks [--quick] [--only replay,disk]`."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from time import perf_counter

from rich.console import Console
from rich.markup import escape

from .suite import names_type

SUITES = {
    "on_policy": "add, advantages, minibatches and the whole cycle of a rollout",
    "replay": "add, uniform, prioritized, n-step and sequence samples",
    "counters": "statistics, norms, lists and SAME_STEP, beside a plain step",
    "sequences": "sequence minibatches of a rollout",
    "memory": "bytes per transition",
    "save_load": "checkpoints",
    "disk": "memory on disk",
    "processes": "several writers and samplers: threads and shared memory",
    "prefetch": "a learner with and without prefetching",
    "training": "time in the buffers of whole trainings",
    "ray_service": "a memory in a Ray cluster",
    "scaling": "how cost grows with T, N, batch and capacity",
    "windows": "observation histories and action chunks, beside LeRobot's dataset",
    "adapters": "the calls of training loops on relive.compat and on the originals",
}
NEEDS = {"training": ("stable_baselines3", "sb3"), "ray_service": ("ray", "ray")}
"""Packages that a suite needs, each with the extra that installs it."""


def run_suite(suite: str, quick: bool, console: Console) -> bool:
    """Run a suite in a new process, which leaves no memory or threads behind; return whether it succeeded."""
    module, extra = NEEDS.get(suite, ("", ""))
    if module and find_spec(module) is None:
        remedy = escape(f'pip install ".[{extra}]"')
        console.print(f"[yellow]skipped[/yellow] {suite}: it needs {module}: {remedy}")
        return True
    console.rule(f"{suite}: {SUITES[suite]}")
    start = perf_counter()
    command = [sys.executable, "-m", f"{__package__}.{suite}", *["--quick"] * quick]
    succeeded = subprocess.run(command, check=False).returncode == 0
    console.print(f"{suite}: {perf_counter() - start:.0f} s")
    return succeeded


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen suites; the exit code is 1 if one failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Time relive beside the experience libraries that are installed here.",
        epilog="suites: " + "; ".join(f"{name}: {subject}" for name, subject in SUITES.items()),
    )
    parser.add_argument(
        "--quick", action="store_true", help="about twelve minutes, and not for claims (default: hours)"
    )
    parser.add_argument(
        "--only", metavar="A,B", type=names_type(SUITES), default=list(SUITES), help=f"some of {', '.join(SUITES)}"
    )
    options = parser.parse_args(arguments)
    console = Console(highlight=False)
    failures = [suite for suite in options.only if not run_suite(suite, options.quick, console)]
    if failures:
        console.print(f"[red]failed[/red]: {', '.join(failures)}")
    return int(bool(failures))


if __name__ == "__main__":
    raise SystemExit(main())
