"""Checkpoints of every format that was ever written load for ever.

`python -m tests.checkpoint.test_golden` wrote those of the present format; those of older formats are never written
again.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import recollect as rc
from tests.checkpoint.traffic import KINDS, fingerprint

GOLDEN = Path(__file__).parent / "golden" / "format-1"


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_format_1_loads_as_it_was_saved(kind: str, tmp_path: Path) -> None:
    expected = json.loads((GOLDEN / "fingerprints.json").read_text())
    root = tmp_path / "copy"
    shutil.copytree(GOLDEN / kind.replace(" ", "_"), root)
    assert fingerprint(rc.load(root)) == expected[kind]


def _write() -> None:
    if GOLDEN.exists():
        raise SystemExit(f"{GOLDEN} is there: a format that was written once is not written again")
    found = {}
    for kind, subject in KINDS.items():
        buffer = subject.make()
        for n in range(35):
            subject.act(buffer, n)
            if n in (15, 34):
                buffer.save(GOLDEN / kind.replace(" ", "_"), keep=1)
        found[kind] = fingerprint(buffer)
    for folder in GOLDEN.glob("*/tmp"):
        folder.rmdir()
    (GOLDEN / "fingerprints.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    _write()
