"""The command `relive-conformance`: tests the libraries that are installed, or your own buffer, for correctness."""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from relive_conformance import __version__
from relive_conformance.adapters.discovery import MODULES, discover
from relive_conformance.case import Case
from relive_conformance.cases import CASES
from relive_conformance.page import page
from relive_conformance.report import Report, ask, markdown
from relive_conformance.table import printable, table
from relive_conformance.target import find

PASSED, DIFFERED, WRONG_USAGE, INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None, prog: str = "relive-conformance") -> int:
    """Run the cases, print and write the report, and return whether the subject passed."""
    arguments = make_parser(prog).parse_args(argv)
    # Characters that the encoding of the output lacks become "?".
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        if not arguments.json:
            arguments.out.mkdir(parents=True, exist_ok=True)
        report = _report(arguments)
    except KeyboardInterrupt:
        print(f"\n{prog}: stopped by Ctrl-C.", file=sys.stderr)
        return INTERRUPTED
    except (ValueError, TypeError, ImportError, AttributeError, OSError) as error:
        print(f"{prog}: {printable(str(error))}", file=sys.stderr)
        return WRONG_USAGE
    finally:
        _show_progress("")
    if arguments.json:
        print(json.dumps(report.to_json(), indent=1, ensure_ascii=False))
    else:
        print(table(report, arguments.cases))
        _write(arguments.out, report)
    subjects = report.results if arguments.target else [r for r in report.results if r.name == "relive"]
    return DIFFERED if any(result.differences for result in subjects) else PASSED


def make_parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Run 28 cases on every experience library that is installed, and print pass, differs or not "
        "offered, with the expected and the actual result of every difference. With TARGET, test only your own buffer.",
        epilog=f"For example: {prog} my_package:MyBuffer --cases T4,T7. "
        "Exit code: 0 TARGET (without it, relive, where it is installed) has no difference, 1 it has one, "
        "2 wrong usage, 130 stopped by Ctrl-C.",
    )
    parser.add_argument("--version", action="version", version=f"relive-conformance {__version__}")
    parser.add_argument(
        "target",
        metavar="TARGET",
        nargs="?",
        help="my_package:MyBuffer, a class with add, sample and len; the README of relive-conformance shows one",
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
        help="also test libraries that are missing here in this interpreter, which needs torch, numpy and gymnasium, "
        "but not relive-conformance itself; may be repeated",
    )
    parser.add_argument(
        "--out",
        metavar="FOLDER",
        type=Path,
        default=Path("runs/conformance"),
        help="folder for report.json, report.html and report.md (default: runs/conformance)",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON and write no files")
    return parser


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


def _report(arguments: argparse.Namespace) -> Report:
    def progress(name: str, number: str) -> None:
        _show_progress(f"testing {name}: {number}")

    if arguments.target:
        return Report([ask(find(arguments.target), arguments.cases, progress, arguments.target)])
    discovery = discover(arguments.libraries)
    results = [ask(adapter, arguments.cases, progress) for adapter in discovery.adapters]
    report = Report(results, {missing.name: missing.reason for missing in discovery.missing})
    for python in arguments.python:
        if report.missing:
            _show_progress(f"testing with {python}")
            report.add(_ask_with(python, tuple(report.missing), arguments.cases))
    return report


def _show_progress(text: str) -> None:
    """Replace the progress line of a terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{printable(text)}", end="", file=sys.stderr, flush=True)


def _ask_with(python: str, libraries: Sequence[str], cases: Sequence[Case]) -> Report:
    """Return the report of the same command in another interpreter, with a copy of this package on the path.

    Only this package is copied: its folder also holds our torch, which the other interpreter must not import.
    """
    package = Path(__file__).parent
    numbers = ",".join(case.number for case in cases)
    command = [python, "-m", package.name, "--json", "--cases", numbers, "--libraries", ",".join(libraries)]
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(package, Path(folder) / package.name, ignore=shutil.ignore_patterns("*.pyc"))
        path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        settings = {**os.environ, "PYTHONPATH": path}
        answer = subprocess.run(command, env=settings, capture_output=True, text=True, check=False)
    if answer.returncode not in (PASSED, DIFFERED) or "{" not in answer.stdout:
        raise ValueError(f"{python} ended with {answer.returncode}: {answer.stderr.strip()[-400:]}")
    return Report.from_json(answer.stdout[answer.stdout.index("{") :])


def _write(folder: Path, report: Report) -> None:
    (folder / "report.json").write_text(json.dumps(report.to_json(), indent=1, ensure_ascii=False) + "\n", "utf-8")
    (folder / "report.html").write_text(page(report), "utf-8")
    (folder / "report.md").write_text(markdown(report), "utf-8")
    print(f"\nwritten: report.json, report.html and report.md in {printable(str(folder))}")


if __name__ == "__main__":
    raise SystemExit(main())
