"""Files, dependencies and entry points of both wheels, built without the native core."""

from __future__ import annotations

import configparser
import email
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import relive_conformance

pytest.importorskip("scikit_build_core", reason="building a wheel needs scikit-build-core: requirements/build.txt")

ROOT = Path(__file__).parents[2]
BUILD = """
import sys
from scikit_build_core.build import build_wheel
print(build_wheel(sys.argv[1], {"wheel.cmake": "false", "wheel.py-api": "py3"}))
"""


class Wheel:
    """The files and metadata of a wheel."""

    def __init__(self, source: Path, folder: Path) -> None:
        command = [sys.executable, "-c", BUILD, str(folder)]
        subprocess.run(command, cwd=source, check=True, capture_output=True)
        (path,) = folder.iterdir()
        with zipfile.ZipFile(path) as archive:
            self.files = archive.namelist()
            (info,) = {name.split("/")[0] for name in self.files if ".dist-info/" in name}
            self.top_level = {name.split("/")[0] for name in self.files} - {info}
            metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
            self.entry_points = configparser.ConfigParser()
            self.entry_points.read_string(archive.read(f"{info}/entry_points.txt").decode())
        self.version = metadata["Version"]
        wanted = [text for text in metadata.get_all("Requires-Dist", []) if "extra ==" not in text]
        self.dependencies = {re.split(r"[^\w-]", text)[0] for text in wanted}
        self.license = f"{info}/licenses/LICENSE" in self.files


def test_the_wheel_of_relive_contains_only_the_package(tmp_path: Path) -> None:
    wheel = Wheel(ROOT, tmp_path)
    assert wheel.top_level == {"relive"}
    source = [path for path in (ROOT / "src" / "relive").rglob("*") if path.suffix in (".py", ".pyi")]
    code = {name for name in wheel.files if name.endswith((".py", ".pyi"))}
    assert code == {path.relative_to(ROOT / "src").as_posix() for path in source}
    workshop = re.compile(r"benchmark|demo|pytest|peers|adapters|reproductions|conformance")
    assert [name for name in wheel.files if workshop.search(name)] == []
    assert wheel.dependencies == {"torch", "tensordict", "numpy", "gymnasium"}
    assert wheel.entry_points.sections() == ["console_scripts"]
    assert wheel.license


def test_the_wheel_of_relive_conformance_has_its_own_files_and_does_not_need_relive(tmp_path: Path) -> None:
    wheel = Wheel(ROOT / "conformance", tmp_path)
    assert wheel.version == relive_conformance.__version__
    assert wheel.top_level == {"relive_conformance", "pytest_relive_conformance.py"}
    reproductions = [name for name in wheel.files if name.endswith(".md")]
    assert len(reproductions) == len(list((ROOT / "conformance").rglob("reproductions/*.md"))) > 5
    assert "relive_conformance/py.typed" in wheel.files
    assert wheel.dependencies == {"torch", "numpy", "gymnasium"}
    assert wheel.entry_points["console_scripts"]["relive-conformance"] == "relive_conformance.__main__:main"
    assert wheel.entry_points["pytest11"]["relive_conformance"] == "pytest_relive_conformance"
    assert wheel.license
