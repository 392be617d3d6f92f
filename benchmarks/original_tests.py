"""Run an original's own tests on our adapter, and keep how many pass for the tables of docs/migrating.

Run it as `python -m benchmarks.original_tests rsl_rl CHECKOUT [--python PATH]`. CHECKOUT is a clone of the original:
its package seldom has the tests. They are copied, and their imports get our prefix, as a user's would. `--python` names
the interpreter that has the original, if it is not this one. `python docs/front_page.py` then writes the tables.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from .adapters import ORIGINALS, copy_sources

KEPT = Path(__file__).parent.parent / "docs" / "migrating" / "originals.json"


@dataclass(frozen=True)
class Suite:
    """Which tests of an original are about what the adapter has."""

    folder: str
    """The folder of all tests, which is copied."""
    chosen: tuple[str, ...]
    """The files or folders in it that are run."""
    modules: tuple[str, ...]
    """What they import from our adapter instead."""


SUITES = {
    "agilerl": Suite("tests", ("test_components",), ("agilerl.components", "agilerl.typing")),
    "apexrl": Suite("test", ("",), ("apexrl.buffer",)),
    "rl_buffer": Suite("tests", ("",), ("rl_buffer",)),
    "rsl_rl": Suite(
        "tests",
        ("storage", "algorithms", "extensions", "runners"),
        ("rsl_rl.storage", "rsl_rl.algorithms", "rsl_rl.runners"),
    ),
    "stable_baselines3": Suite(
        "tests", ("test_buffers.py", "test_her.py", "test_n_step_replay.py"), ("stable_baselines3",)
    ),
}


def prefixed(code: str, modules: Sequence[str]) -> str:
    """The code with our prefix at the imports of these modules and of what is in them."""
    names = "|".join(map(re.escape, modules))
    return re.sub(rf"^(\s*)(from|import) (?=(?:{names})\b)", r"\1\2 relive.compat.", code, flags=re.MULTILINE)


def run(suite: Suite, checkout: Path, python: str) -> tuple[int, int]:
    """How many of the tests pass, of how many that are not skipped."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        copy_sources(folder)
        shutil.copytree(checkout / suite.folder, folder / suite.folder)
        for file in (folder / suite.folder).rglob("*.py"):
            file.write_text(prefixed(file.read_text(encoding="utf-8"), suite.modules), encoding="utf-8")
        found = folder / "found.xml"
        chosen = [str(folder / suite.folder / each) for each in suite.chosen]
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={found}", *chosen]
        path = os.pathsep.join(filter(None, (place, os.environ.get("PYTHONPATH"))))
        subprocess.run(command, cwd=place, env={**os.environ, "PYTHONPATH": path}, check=False)
        return counted(found.read_text(encoding="utf-8"))


def counted(report: str) -> tuple[int, int]:
    """How many tests of a JUnit report passed, and how many ran."""
    suites = list(ElementTree.fromstring(report).iter("testsuite"))
    total, skipped, failures, errors = (
        sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "skipped", "failures", "errors")
    )
    return total - skipped - failures - errors, total - skipped


def keep(original: str, passed: int, total: int, path: Path = KEPT) -> None:
    """Write the counts into the file that the tables come from."""
    kept = json.loads(path.read_text(encoding="utf-8"))
    if original not in kept:
        raise SystemExit(f"{path.name}: expected an entry for {original}. Add one with title, version and trainers.")
    kept[original]["tests"] |= {"passed": passed, "total": total}
    path.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests of one original; the exit code is 1 if one fails."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.original_tests", description=__doc__)
    parser.add_argument("original", choices=SUITES, help="whose tests")
    parser.add_argument("checkout", type=Path, help="a clone of the original")
    parser.add_argument(
        "--python", metavar="PATH", default=sys.executable, help="the interpreter that has the original"
    )
    options = parser.parse_args(arguments)
    passed, total = run(SUITES[options.original], options.checkout, options.python)
    keep(options.original, passed, total)
    print(f"{ORIGINALS[options.original]}: {passed} of {total} tests pass on relive.compat.{options.original}")
    return int(passed < total)


if __name__ == "__main__":
    raise SystemExit(main())
