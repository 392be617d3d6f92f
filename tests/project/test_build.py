"""The native module is hardened, and importing relive has no side effects."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from relive import kernels

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not hasattr(kernels.native_core(), "set_avx2"), reason="the stub is that of an x86-64 processor")
def test_the_stub_matches_the_native_module() -> None:
    stubgen = pytest.importorskip("nanobind.stubgen", reason="nanobind is not installed")
    stub = stubgen.StubGen(kernels.native_core())
    stub.put(kernels.native_core())
    assert (ROOT / "src" / "relive" / "kernels" / "_native.pyi").read_text(encoding="utf-8") == stub.get(), "make stub"


@pytest.mark.skipif(kernels.native_core() is None, reason="this install has no native core (no compiler)")
def test_planted_bugs_are_not_in_the_module() -> None:
    module = Path(kernels.native_core().__file__).read_bytes()
    bugs = re.findall(r"^PLANTED (\w+)", (ROOT / "tests/sanitizers/planted_bugs.cpp").read_text(), re.MULTILINE)
    assert len(bugs) == 3
    assert not [bug for bug in bugs if f"\0{bug}\0".encode() in module]


@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("readelf"), reason="reads ELF files with readelf")
@pytest.mark.skipif(kernels.native_core() is None, reason="this install has no native core (no compiler)")
def test_the_native_module_is_hardened() -> None:
    def readelf(*options: str) -> str:
        command = ["readelf", "-W", *options, kernels.native_core().__file__]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    assert "GNU_RELRO" in readelf("-l")
    assert "BIND_NOW" in readelf("-d")
    assert "__stack_chk_fail" in readelf("--dyn-syms")
    assert "RWE" not in readelf("-l")


@pytest.mark.thorough
def test_importing_leaves_global_random_generators_alone() -> None:
    """`rich` uses Python's random generator on import."""
    lines = (
        "import random, numpy, torch",
        "before = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()",
        "import relive",
        "after = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()",
        "assert after == before, 'import relive has drawn numbers'",
    )
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)
