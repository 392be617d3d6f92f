"""Every version of Triton that comes with a supported torch compiles every variant of every kernel.

The installed version compiles for three GPUs in `test_variants`. `make tritons` puts the other versions into
`build/triton`: they compile for one GPU here, and for three in `make kernels`.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.kernels.compiling.test_variants import ROOT, compile_kernels, read_rows

FOLDER = ROOT / "build" / "triton"
FOUND = re.search(r"^TRITONS := (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
VERSIONS = FOUND[1].split() if FOUND else []


@pytest.mark.thorough
@pytest.mark.parametrize("version", VERSIONS)
def test_every_variant_compiles(version: str, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="needs Triton: pip install 'relive[triton]'")
    if not (FOLDER / version).exists():
        pytest.skip(f"Triton {version} is not in {FOLDER}: make tritons downloads it")
    done = compile_kernels("--target", "sm_90", "--may-spill", cache=tmp_path, triton=FOLDER / version)
    assert done.returncode == 0, done.stdout + done.stderr
    # A process of its own lists them: under Triton's interpreter, as here, launches differ.
    expected = compile_kernels("--list", cache=tmp_path).stdout.split()
    assert len(expected) > 40
    assert [row.kernel for row in read_rows(done.stdout)] == expected
    assert f"Triton {version}" in done.stderr
