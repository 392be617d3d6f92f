"""Time the calls of training loops on our adapters and on the originals, interleaved.

Run it as `python -m benchmarks.adapters [--quick] [--only agilerl,rsl_rl] [--python PATH] [--json PATH]`. An original
that conflicts with this environment is timed in another one: `--python` names its interpreter.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import relive
import relive_conformance

from .adapter_cases import Case
from .machine import version_of
from .report import Line, Result
from .suite import RESULTS, Session, file_name, parser_of
from .timing import Contestant, Role

SUBJECT = "Time the calls of training loops on our adapters and on the originals."
ORIGINALS = {
    "agilerl": "AgileRL",
    "apexrl": "ApexRL",
    "embodichain": "EmbodiChain",
    "rl_buffer": "rl-buffer",
    "rsl_rl": "rsl_rl",
    "stable_baselines3": "Stable-Baselines3",
}
"""The name in reports of each original, by the module name that the original, our adapter and the cases share."""
DISTRIBUTIONS = {"rl_buffer": "rl-buffer", "rsl_rl": "rsl-rl-lib", "stable_baselines3": "stable-baselines3"}


def cases_of(original: str) -> list[Case] | str:
    """The cases of an original, or the reason why it cannot be timed."""
    try:
        import_module(original)
        return import_module(f"{__package__}.adapter_cases.{original}").cases()
    except ModuleNotFoundError as error:
        return "not installed" if error.name == original else f"{error}"
    # A half-installed library may raise anything at import: a missing symbol, a binary of another ABI.
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def enter(original: str, case: Case) -> tuple[Result, list[Contestant]]:
    """Set up both sides of a case; the result names a side that did not start."""
    title = ORIGINALS[original]
    result, contestants = Result(f"{title}: {case.name}", []), []
    sides: list[tuple[str, Role, Callable[[], Callable[[], Any]]]] = [
        ("relive", "ours", case.ours),
        (title, "peer", case.theirs),
    ]
    for name, role, make in sides:
        try:
            contestants.append(Contestant(name, role, make()))
        # A call that raises must not end the run; the report has its error.
        except Exception as error:
            result.refused[name] = f"{type(error).__name__}: {error}"
    return result, contestants


def run_here(session: Session, originals: Sequence[str]) -> list[tuple[Result, list[Line]]]:
    """Time every original that is installed, and note those that are not."""
    judged = []
    for original in originals:
        cases, title = cases_of(original), ORIGINALS[original]
        if isinstance(cases, str):
            session.about["missing"][title] = cases
            continue
        session.about["peers"][title] = version_of(DISTRIBUTIONS.get(original, original)) or "a source tree"
        for case in cases:
            with session.console.status(f"{title}: {case.name}"):
                judged.append(session.time(enter(original, case)))
    return judged


def run_elsewhere(python: str, only: Sequence[str], quick: bool, suite: str = "adapters") -> dict[str, Any]:
    """Run the suite in another interpreter, with copies of our packages on its path, and return the results."""
    command = [interpreter(python), "-m", f"{__package__}.{suite}", "--only", ",".join(only), *["--quick"] * quick]
    with tempfile.TemporaryDirectory() as folder:
        copy_sources(Path(folder))
        found = Path(folder) / "found.json"
        path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        settings = {**os.environ, "PYTHONPATH": path}
        code = subprocess.run([*command, "--json", str(found)], cwd=folder, env=settings, check=False).returncode
        if code:
            raise SystemExit(f"{python} ended with {code}. It needs the dependencies of relive and rich.")
        return json.loads(found.read_text(encoding="utf-8"))


def interpreter(path: str) -> str:
    """Absolute path of an interpreter; links are not resolved, since the link selects its environment."""
    return str(Path(shutil.which(path) or path).absolute())


def copy_sources(folder: Path) -> None:
    """Copy relive, relive_conformance and the benchmarks into a folder.

    The folder of an installed relive also has a torch, which another interpreter must not import: hence the copy.
    """
    unwanted = shutil.ignore_patterns("*.pyc", "results")
    for place in (relive.__file__, relive_conformance.__file__, __file__):
        package = Path(place).parent
        shutil.copytree(package, folder / package.name, ignore=unwanted)


def merge(path: Path, elsewhere: dict[str, Any]) -> None:
    """Add the results of another interpreter to a results file."""
    run = json.loads(path.read_text(encoding="utf-8"))
    run["cases"] |= elsewhere["cases"]
    run["peers"] |= elsewhere["peers"]
    run["missing"] = {name: why for name, why in run["missing"].items() if name not in elsewhere["peers"]}
    run["elsewhere"] = [
        *run.get("elsewhere", []),
        {key: elsewhere[key] for key in ("machine", "peers")},
    ]
    path.write_text(json.dumps(run, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of("adapters", SUBJECT)
    parser.add_argument("--only", default=",".join(ORIGINALS), help=f"some of {','.join(ORIGINALS)}")
    parser.add_argument(
        "--python",
        metavar="PATH",
        action="append",
        default=[],
        help="also time originals that are missing here in this interpreter, which needs the dependencies of relive, "
        "but not relive itself; may be repeated",
    )
    options = parser.parse_args(arguments)
    options.only = options.only.split(",")
    if unknown := set(options.only) - ORIGINALS.keys():
        parser.error(f"--only: expected some of {','.join(ORIGINALS)}, got {','.join(sorted(unknown))}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite."""
    options = options_of(arguments)
    session = Session.of("adapters", options)
    options.json = options.json or RESULTS / file_name("adapters", session.about)
    judged = run_here(session, options.only)
    session.finish(judged)
    for python in options.python:
        missing = [name for name in options.only if ORIGINALS[name] in missing_in(options.json)]
        if missing:
            session.console.rule(f"with {python}")
            merge(options.json, run_elsewhere(python, missing, options.quick))
    for name, reason in missing_in(options.json).items():
        session.console.print(f"[yellow]not timed[/yellow] {name}: {reason}", highlight=False)
    return 0


def missing_in(path: Path) -> dict[str, str]:
    """Lines about originals that were not timed, with the reason."""
    return json.loads(path.read_text(encoding="utf-8"))["missing"]


if __name__ == "__main__":
    raise SystemExit(main())
