"""Run all suites, one after the other: `python -m benchmarks [--quick] [--only replay,disk] [--json FILE]`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.markup import escape

from .suite import RESULTS, file_name

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
    "devices": "calls on an accelerator, beside the buffers of others there (with --device only)",
}
NEEDS = {"training": ("stable_baselines3", "sb3"), "ray_service": ("ray", "ray")}
"""Packages that a suite needs, each with the extra that installs it."""
DONE, FAILED, NONE_RAN = 0, 1, 2


def options_of(arguments: Sequence[str] | None, prog: str) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Time relive beside the experience libraries that are installed here.",
        epilog="suites: " + "; ".join(f"{name}: {what}" for name, what in SUITES.items()),
    )
    parser.add_argument(
        "--quick", action="store_true", help="about twelve minutes, and not for claims (default: hours)"
    )
    parser.add_argument("--only", metavar="A,B", type=_suites, help=f"of {', '.join(SUITES)}")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the results of all suites there, too")
    parser.add_argument("--device", metavar="D", help="time the calls on this device, such as cuda, and write a page")
    parser.add_argument("--fasttd3", metavar="FILE", help="fast_td3_utils.py of a clone of FastTD3, with --device")
    options = parser.parse_args(arguments)
    on_device = ["devices"] if options.device else [suite for suite in SUITES if suite != "devices"]
    options.only = options.only or on_device
    return options


def _suites(text: str) -> list[str]:
    wanted = text.split(",")
    if unknown := set(wanted) - SUITES.keys():
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(SUITES)}, got {', '.join(sorted(unknown))}")
    return wanted


def run(options: argparse.Namespace) -> int:
    """Run each suite in a new process, which leaves no memory or threads behind; return a sentence per suite."""
    console = Console(highlight=False)
    files: dict[str, Path] = {}
    failed = []
    for suite in options.only:
        module, extra = NEEDS.get(suite, ("", ""))
        if module and find_spec(module) is None:
            remedy = escape(f'pip install ".[{extra}]"')
            console.print(f"[yellow]skipped[/yellow] {suite}: it needs {module}: {remedy}")
            continue
        if suite == "devices" and (reason := _missing(options.device or "cuda")):
            console.print(f"[yellow]skipped[/yellow] {suite}: {escape(reason)}", soft_wrap=True)
            continue
        console.rule(f"{suite}: {SUITES[suite]}")
        about = {"quick": options.quick, "date": datetime.now(timezone.utc).isoformat(timespec="seconds")}
        path, start = RESULTS / file_name(suite, about), perf_counter()
        command = [sys.executable, "-m", f"{__package__}.{suite}", "--json", str(path), *["--quick"] * options.quick]
        if suite == "devices":
            command += [
                "--device",
                options.device or "cuda",
                *(["--fasttd3", options.fasttd3] if options.fasttd3 else []),
            ]
        if subprocess.run(command, check=False).returncode:
            failed.append(suite)
            continue
        files[suite] = path
        console.print(f"{suite}: {perf_counter() - start:.0f} s")
    if options.json and files:
        found: dict[str, Any] = {suite: json.loads(path.read_text(encoding="utf-8")) for suite, path in files.items()}
        options.json.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        console.print(f"all of it: {options.json}", soft_wrap=True)
    if failed:
        console.print(f"[red]failed[/red]: {', '.join(failed)}")
    return FAILED if failed else DONE if files else NONE_RAN


def _missing(device: str) -> str | None:
    from .devices import missing  # late: imports torch

    return missing(device)


def main(arguments: Sequence[str] | None = None, prog: str = "python -m benchmarks") -> int:
    """Run the chosen suites."""
    return run(options_of(arguments, prog))


if __name__ == "__main__":
    raise SystemExit(main())
