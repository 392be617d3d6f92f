"""Run a suite in other interpreters, for libraries that conflict with this environment."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import relive
import relive_conformance

from .report import Line, Result
from .suite import RESULTS, Session, file_name


def add_python_option(parser: argparse.ArgumentParser) -> None:
    """Add `--python`, which may be repeated."""
    parser.add_argument(
        "--python",
        metavar="PATH",
        action="append",
        default=[],
        help="also time libraries that are missing here in this interpreter, which needs the dependencies of relive, "
        "but not relive itself; may be repeated",
    )


def finish_with_interpreters(
    session: Session, outcomes: list[tuple[Result, list[Line]]], get_peer: Callable[[str], str]
) -> int:
    """Write the results, then run the operations whose peer is missing here in each interpreter of `--python`."""
    options = session.options
    options.json = options.json or RESULTS / file_name(session.suite, session.about)
    session.finish(outcomes)
    for python in options.python:
        operations = [operation for operation in options.only if get_peer(operation) in _read_missing(options.json)]
        if operations:
            session.console.rule(f"with {python}")
            _merge(options.json, _run(python, session.suite, operations, options.quick))
    for name, reason in _read_missing(options.json).items():
        session.console.print(f"[yellow]not timed[/yellow] {name}: {reason}", highlight=False)
    return 0


def resolve_interpreter(path: str) -> str:
    """Return the absolute path of an interpreter. Links are not resolved: the link selects the environment."""
    return str(Path(shutil.which(path) or path).absolute())


def copy_sources(folder: Path) -> None:
    """Copy relive, relive_conformance and the benchmarks into a folder.

    The folder of an installed relive also has a torch, which another interpreter must not import: hence the copy.
    """
    unwanted = shutil.ignore_patterns("*.pyc", "results")
    for file in (relive.__file__, relive_conformance.__file__, __file__):
        package = Path(file).parent
        shutil.copytree(package, folder / package.name, ignore=unwanted)


def make_environment(*paths: Path) -> dict[str, str]:
    """Return the environment variables of a process that imports from `paths` first."""
    path = os.pathsep.join([*map(str, paths), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path}


def _run(python: str, suite: str, operations: Sequence[str], quick: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_sources(folder)
        results = folder / "results.json"
        command = [resolve_interpreter(python), "-m", f"{__package__}.{suite}", "--only", ",".join(operations)]
        command += [*["--quick"] * quick, "--json", str(results)]
        code = subprocess.run(command, cwd=folder, env=make_environment(folder), check=False).returncode
        if code:
            raise SystemExit(f"{python} ended with {code}. It needs the dependencies of relive and rich.")
        return json.loads(results.read_text(encoding="utf-8"))


def _merge(path: Path, other: dict[str, Any]) -> None:
    """Add the results of another interpreter to a results file."""
    run = json.loads(path.read_text(encoding="utf-8"))
    run["cases"] |= other["cases"]
    run["peers"] |= other["peers"]
    run["missing"] = {name: reason for name, reason in run["missing"].items() if name not in other["peers"]}
    run["elsewhere"] = [*run.get("elsewhere", []), {key: other[key] for key in ("machine", "peers")}]
    path.write_text(json.dumps(run, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _read_missing(path: Path) -> dict[str, str]:
    """Return the reasons why libraries were not timed, from a results file."""
    return json.loads(path.read_text(encoding="utf-8"))["missing"]
