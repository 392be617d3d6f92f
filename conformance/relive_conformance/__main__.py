"""`relive conformance`: tests the correctness of the installed libraries, or of your own buffer."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from relive.conformance.case import Case
from relive.conformance.cases import CASES
from relive.conformance.page import page
from relive.conformance.peers.discovery import MODULES, discover
from relive.conformance.report import Progress, Report, ask, markdown
from relive.conformance.table import show
from relive.conformance.target import find
from relive.errors import escaped

PASSED, DIFFERED, WRONG_USAGE = 0, 1, 2


def register(commands: Any) -> None:
    """Add this command to the parser."""
    parser = commands.add_parser(
        "conformance",
        help="test the installed libraries, or your own buffer, for correctness",
        description="Run 28 cases on every experience library that is installed, and print pass, differs or not "
        "offered, with the expected and the actual result of every difference. With TARGET, test only your own buffer.",
        epilog="For example: relive conformance my_package:MyBuffer --cases T4,T7. "
        "Exit code: 0 TARGET (without it, relive) has no difference, 1 it has one, 2 wrong usage, "
        "130 stopped by Ctrl-C.",
    )
    parser.add_argument(
        "target",
        metavar="TARGET",
        nargs="?",
        help="my_package:MyBuffer, a class with add, sample and len; see docs/conformance.md",
    )
    parser.add_argument("--cases", metavar="T1,T2", type=_cases, default=CASES, help="run only these cases")
    parser.add_argument(
        "--libraries", metavar="A,B", type=_libraries, default=MODULES, help=f"test only these of {', '.join(MODULES)}"
    )
    parser.add_argument(
        "--python",
        metavar="PATH",
        action="append",
        default=[],
        help="also test libraries that are missing here in this interpreter, which needs the dependencies of "
        "relive, but not relive itself; may be repeated",
    )
    parser.add_argument(
        "--out",
        metavar="FOLDER",
        type=Path,
        default=Path("runs/conformance"),
        help="folder for report.json, report.html and report.md (default: runs/conformance)",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON and write no files")
    parser.set_defaults(run=run)


def _cases(text: str) -> tuple[Case, ...]:
    wanted = text.split(",")
    if unknown := set(wanted) - {case.number for case in CASES}:
        raise argparse.ArgumentTypeError(f"expected cases from T1 to T28, got {', '.join(sorted(unknown))}")
    return tuple(case for case in CASES if case.number in wanted)


def _libraries(text: str) -> tuple[str, ...]:
    wanted = tuple(text.split(","))
    if unknown := set(wanted) - set(MODULES):
        raise argparse.ArgumentTypeError(f"expected names from {', '.join(MODULES)}, got {', '.join(sorted(unknown))}")
    return wanted


def run(arguments: argparse.Namespace) -> int:
    """Run the cases, print and write the report, and return whether the subject passed."""
    console = Console(highlight=False, stderr=arguments.json)
    try:
        if not arguments.json:
            arguments.out.mkdir(parents=True, exist_ok=True)
        report = _report(arguments, console)
    except (ValueError, TypeError, ImportError, AttributeError, OSError) as error:
        print(f"relive conformance: {escaped(str(error))}", file=sys.stderr)
        return WRONG_USAGE
    if arguments.json:
        print(json.dumps(report.to_json(), indent=1, ensure_ascii=False))
    else:
        show(console, report, arguments.cases)
        _write(arguments.out, report, console)
    subjects = report.results if arguments.target else [r for r in report.results if r.name == "relive"]
    return DIFFERED if any(result.differences for result in subjects) else PASSED


def _report(arguments: argparse.Namespace, console: Console) -> Report:
    with console.status("testing") as status:

        def progress(name: str, number: str) -> None:
            status.update(Text(escaped(f"testing {name}: {number}")))

        if arguments.target:
            return Report([ask(find(arguments.target), arguments.cases, progress, arguments.target)])
        report = _ask_installed(arguments.libraries, arguments.cases, progress)
        for python in arguments.python:
            if report.missing:
                status.update(Text(escaped(f"testing with {python}")))
                report.add(_ask_with(python, tuple(report.missing), arguments.cases))
        return report


def _ask_installed(libraries: Sequence[str], cases: Sequence[Case], progress: Progress) -> Report:
    found = discover(libraries)
    results = [ask(peer, cases, progress) for peer in found.peers]
    return Report(results, {missing.name: missing.reason for missing in found.missing})


def _ask_with(python: str, libraries: Sequence[str], cases: Sequence[Case]) -> Report:
    """The report of the same command in another interpreter, with a copy of this relive on its path.

    Only relive is copied: its folder also holds our torch, which the other interpreter must not import.
    """
    numbers = ",".join(case.number for case in cases)
    command = [python, "-m", "relive", "conformance", "--json", "--cases", numbers]
    command += ["--libraries", ",".join(libraries)]
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(Path(__file__).parents[1], Path(folder) / "relive", ignore=shutil.ignore_patterns("*.pyc"))
        path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        settings = {**os.environ, "PYTHONPATH": path}
        answer = subprocess.run(command, env=settings, capture_output=True, text=True, check=False)
    if answer.returncode not in (PASSED, DIFFERED) or "{" not in answer.stdout:
        raise ValueError(f"{python} ended with {answer.returncode}: {answer.stderr.strip()[-400:]}")
    return Report.from_json(answer.stdout[answer.stdout.index("{") :])


def _write(folder: Path, report: Report, console: Console) -> None:
    (folder / "report.json").write_text(json.dumps(report.to_json(), indent=1, ensure_ascii=False) + "\n", "utf-8")
    (folder / "report.html").write_text(page(report), "utf-8")
    (folder / "report.md").write_text(markdown(report), "utf-8")
    written = f"\nwritten: report.json, report.html and report.md in {escaped(str(folder))}"
    console.print(written, markup=False, soft_wrap=True)
