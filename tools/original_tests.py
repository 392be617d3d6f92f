"""Run the originals' own tests on our adapters, and save the counts for the tables of docs/migrating.

Run it as `python -m tools.original_tests [NAMES] --checkouts FOLDER [--python agilerl=PATH] [--path NAME=FOLDER]`.
Without names it runs every suite. FOLDER has a clone of each original at its commit, `FOLDER/agilerl` and so on, since
few packages include the tests. `--clone` makes missing clones. Unchanged copies of the tests run after
`relive.compat.patch`. `--python` names another interpreter that has the original, `--path` a folder with its package
if it is not installed. Then `python docs/front_page.py` writes the tables; `make originals` does both.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks import interpreters
from benchmarks.adapters import ORIGINALS

RESULTS = Path(__file__).parent.parent / "docs" / "migrating" / "originals.json"
"""Results of the originals' tests and trainers, the source of the tables of docs/migrating."""


@dataclass(frozen=True)
class Suite:
    """The tests of an original that concern its adapter."""

    folder: str
    """Folder with all tests of the original, which is copied."""
    selected: tuple[str, ...]
    """Files or folders of tests to run, below `folder`."""
    subject: str = ""
    """Subject of the selected tests, for the table."""
    source: str = ""
    """Repository on GitHub."""
    commit: str = ""
    package: str | None = None
    """Folder of the clone with the package, for an original that no registry has."""
    page: str | None = None
    """Name of the page in docs/migrating that shows the counts; by default the original's name."""
    mocked_modules: tuple[str, ...] = ()
    """Imported but unused modules, such as a simulator; mocks replace them."""


_SIMULATOR = (
    "embodichain.lab", "embodichain.lab.sim", "embodichain.lab.sim.cfg", "embodichain.lab.gym",
    "embodichain.lab.gym.utils", "embodichain.lab.gym.utils.registration", "embodichain.lab.gym.utils.gym_utils",
    "embodichain.utils.utility",
)  # fmt: skip

SUITES = {
    "agilerl": Suite(
        "tests", ("test_components",), "components", "AgileRL/AgileRL", "549d85e4",
    ),
    "apexrl": Suite("test", ("",), "all", "Atticlmr/Apex_rl", "49815f4", "src"),
    "embodichain": Suite(
        "tests", ("learning/test_shared_rollout.py::test_shared_rollout_collects_policy_and_env_fields",),
        "the one of the shared rollout that needs no simulator",
        "DexForce/EmbodiChain", "df06818a", mocked_modules=_SIMULATOR,
    ),
    "rl_buffer": Suite("tests", ("",), "all", "WindLX/rl_buffer", "1d8b3f3", "src"),
    "rsl_rl": Suite("tests", ("",), "all", "leggedrobotics/rsl_rl", "c281c32"),
    "stable_baselines3": Suite(
        "tests",
        (
            "test_buffers.py", "test_deterministic.py", "test_dict_env.py", "test_gae.py", "test_her.py",
            "test_identity.py", "test_n_step_replay.py", "test_run.py", "test_save_load.py", "test_spaces.py",
            "test_train_eval_mode.py", "test_vec_normalize.py",
        ),
        "the 12 files about buffers, training and saving",
        "DLR-RM/stable-baselines3", "e05d2dbe",
    ),
    "sb3_contrib": Suite(
        "tests", ("",), "sb3-contrib, all",
        "Stable-Baselines-Team/stable-baselines3-contrib", "0ca7fdd", page="stable_baselines3",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Counts:
    """Counts of passed and failed tests."""

    passed: int
    total: int
    failed: list[str]


_PROGRAM = """
import sys, unittest.mock, pytest
for module in {mocked_modules}: sys.modules[module] = unittest.mock.MagicMock()
from relive.compat import patch
patch({name!r})
sys.exit(pytest.main(sys.argv[1:]))
"""


def run(name: str, suite: Suite, checkout: Path, python: str, paths: Sequence[Path] = ()) -> Counts:
    """Run the tests of an original on our adapter and count the results, without skipped tests."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        copy_sources(folder)
        shutil.copytree(checkout / suite.folder, folder / suite.folder)
        report = folder / "report.xml"
        selected = [str(folder / suite.folder / path) for path in suite.selected]
        options = ["-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        environment = interpreters.make_environment(folder, *paths)
        code = _PROGRAM.format(name=name, mocked_modules=suite.mocked_modules)
        subprocess.run([python, "-c", code, *options, *selected], cwd=folder, env=environment, check=False)
        if not report.exists():
            raise SystemExit(f"{python} made no report. It needs pytest and the dependencies of relive.")
        return count_results(report.read_text(encoding="utf-8"))


def copy_sources(folder: Path) -> None:
    """Copy relive, the benchmarks and these tools into a folder."""
    interpreters.copy_sources(folder)
    shutil.copytree(Path(__file__).parent, folder / "tools", ignore=shutil.ignore_patterns("*.pyc"))


def count_results(report: str) -> Counts:
    """Count the results in a JUnit report."""
    cases = list(ElementTree.fromstring(report).iter("testcase"))
    completed = [case for case in cases if case.find("skipped") is None]
    failed = [
        case.get("name", "") for case in completed if case.find("failure") is not None or case.find("error") is not None
    ]
    return Counts(len(completed) - len(failed), len(completed), failed)


@contextmanager
def edit_results(original: str) -> Iterator[dict[str, Any]]:
    """Yield the existing entry of an original in the results file; write it back when the block ends."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    if original not in results:
        raise SystemExit(f"{RESULTS.name}: expected an entry for {original}. Add one with title and version.")
    yield results[original]
    RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def save_counts(name: str, suite: Suite, counts: Counts) -> None:
    """Write the counts into the results file."""
    row = {"passed": counts.passed, "total": counts.total, "of": suite.subject, "failed": counts.failed}
    with edit_results(suite.page or name) as entry:
        entry.setdefault("tests", {})[name] = row


def clone(suite: Suite, folder: Path) -> None:
    """Clone an original at its commit."""
    address = f"https://github.com/{suite.source}"
    subprocess.run(["git", "clone", "--quiet", "--filter=blob:none", address, str(folder)], check=True)
    subprocess.run(["git", "-C", str(folder), "checkout", "--quiet", suite.commit], check=True)


def make_parser(module: str, description: str) -> argparse.ArgumentParser:
    """Return a parser of the options that `original_tests` and `original_trainers` share."""
    parser = argparse.ArgumentParser(prog=f"python -m tools.{module}", description=description)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(SUITES)}; all without one")
    parser.add_argument("--checkouts", type=Path, default=Path("build/originals"), help="has a clone of each original")
    for option, help_text in (
        ("--python", "the interpreter that has an original"),
        ("--path", "a folder with its package"),
    ):
        parser.add_argument(option, metavar="NAME=PATH", action="append", default=[], help=help_text)
    return parser


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; interpreters and paths become dicts by original."""
    options = parser.parse_args(arguments)
    options.checkouts = options.checkouts.resolve()
    options.python = {name: interpreters.resolve_interpreter(path) for name, path in _split_names(options.python)}
    options.path = {name: Path(path).resolve() for name, path in _split_names(options.path)}
    if unknown := {*options.names, *options.python, *options.path} - SUITES.keys():
        parser.error(f"expected some of {', '.join(SUITES)}, got {', '.join(sorted(unknown))}")
    return options


def _split_names(options: Sequence[str]) -> list[tuple[str, str]]:
    return [(name, path) for name, _, path in (option.partition("=") for option in options)]


def find_package(name: str, checkouts: Path, paths: Mapping[str, Path]) -> list[Path]:
    """Return the folder with an original's package; no folder if the package is installed."""
    package = SUITES[name].package
    return [paths[name]] if name in paths else [] if package is None else [checkouts / name / package]


def run_original(name: str, options: argparse.Namespace) -> None:
    """Run the tests of an original and save their counts; without a clone, only print a message."""
    suite, checkout = SUITES[name], options.checkouts / name
    if not checkout.exists():
        if not options.clone:
            print(f"{name}: not run, since {checkout} does not exist. Pass --clone.")
            return
        clone(suite, checkout)
    python = options.python.get(name, sys.executable)
    counts = run(name, suite, checkout, python, find_package(name, options.checkouts, options.path))
    save_counts(name, suite, counts)
    print(f"{ORIGINALS[suite.page or name]}: {counts.passed} of {counts.total} tests pass: {suite.subject}")
    for test in counts.failed:
        print(f"  failed: {test}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suites that the command line names."""
    parser = make_parser("original_tests", __doc__ or "")
    parser.add_argument("--clone", action="store_true", help="clone the originals that are missing")
    options = parse(parser, arguments)
    for name in options.names or SUITES:
        run_original(name, options)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
