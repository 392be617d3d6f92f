"""Checkpoints and disk memory of another format are refused, whatever else is in their files."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import relive as rl
from relive import kernels
from relive.schema.fields import parse_declaration
from relive.storage import codec

GOLDEN = Path(__file__).parent / "golden"
NEEDS_DISK = pytest.mark.skipif(
    kernels.native_core() is None or sys.platform != "linux", reason="disk memory needs Linux and the native core"
)


DOCUMENTS = [
    ("format-1/prioritized", "manifests/*"),
    ("format-1/rollout", "manifests/*"),
    pytest.param("disk-1/uniform", "commit*", marks=NEEDS_DISK),
]


@pytest.mark.parametrize(
    ("golden", "files"), [*DOCUMENTS, ("format-1/rollout", "FORMAT"), ("disk-1/uniform", "FORMAT")]
)
def test_a_newer_format_is_refused(golden: str, files: str, tmp_path: Path) -> None:
    change_format(tmp_path / "saved", golden, files, 2)
    with pytest.raises(rl.IncompatibleCheckpoint, match="format 1 at most, got 2. Load it with a newer version"):
        rl.load(tmp_path / "saved")


@pytest.mark.parametrize(("golden", "files"), DOCUMENTS)
def test_format_0_does_not_exist(golden: str, files: str, tmp_path: Path) -> None:
    change_format(tmp_path / "saved", golden, files, 0)
    with pytest.raises(rl.CorruptCheckpoint, match=r"expected one of the formats \[1\], got 0"):
        rl.load(tmp_path / "saved")


def change_format(root: Path, golden: str, files: str, version: int) -> None:
    """Copy a golden folder, and change the format in some of its files; a newer format may change the rest too."""
    shutil.copytree(GOLDEN / golden, root)
    for path in root.glob(files):
        data = path.read_bytes()
        changed = re.sub(rb"(recollect [a-z ]*)1", rb"\g<1>%d" % version, data, count=1)
        path.write_bytes(changed if path.name == "FORMAT" else changed.replace(b"\n", b" and more\n", 1))


@pytest.mark.parametrize("steps", [1, 2])
def test_a_carry_of_every_few_steps_is_refused_with_a_sentence(steps: int) -> None:
    """Settings that format 1 could contain before the first release."""
    node: Any = codec.JsonNode("obs", ["carry", [3], "float32", steps])
    if steps == 1:
        assert parse_declaration(node) == rl.Carry(3)
        return
    message = r"Carry: expected a state of every step, got one every 2 steps"
    with pytest.raises(rl.IncompatibleCheckpoint, match=message):
        parse_declaration(node)
