"""Build and check tools are pinned by hash in one place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = ("requirements/build.txt", "requirements/check.txt")


def entries(name: str) -> dict[str, str]:
    """Return the requirement lines of each package in a file."""
    text = "\n".join(line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#"))
    return {re.split(r"[=\s]", entry)[0]: entry for entry in text.replace("\\\n", " ").splitlines()}


@pytest.mark.parametrize("name", FILES)
def test_every_tool_is_pinned_with_hashes(name: str) -> None:
    for entry in entries(name).values():
        assert re.match(r"[a-z0-9-]+==[0-9.]+ ", entry), entry
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), entry


def test_the_tools_are_those_that_the_packages_ask_for_and_are_pinned_once() -> None:
    for project in (ROOT, ROOT / "conformance"):
        asked = re.search(r"^requires = \[(.*)\]", (project / "pyproject.toml").read_text(), re.MULTILINE)
        assert asked is not None
        assert set(re.findall(r'"([a-z-]+)', asked[1])) <= entries(FILES[0]).keys()
    assert {"ruff", "pyright", "pytest", "pytest-xdist", "hypothesis"} <= entries(FILES[1]).keys()
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    assert not pinned & (entries(FILES[0]).keys() | entries(FILES[1]).keys())
    for name in entries(FILES[0]).keys() & entries(FILES[1]).keys():
        versions = {entries(file)[name].split(" ")[0] for file in FILES}
        assert len(versions) == 1, versions


def test_nothing_is_pinned_that_a_torch_for_cuda_asks_for_in_its_own_version() -> None:
    """pip finds no solution for a CUDA `torch==x` together with another version of Triton."""
    names = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert not [name for name in names if name in ("triton", "pytorch-triton-rocm") or name.startswith("nvidia-")]
