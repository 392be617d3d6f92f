"""The C++ core includes no Python, the native module is hardened, and importing relive has no side effects."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from relive import kernels
from tests.tiers import select

ROOT = Path(__file__).parents[2]
CORE, BIND = (ROOT / "csrc" / folder for folder in ("core", "bind"))
SOURCES = sorted([*CORE.iterdir(), *BIND.iterdir()])
HEADERS = sorted(CORE.glob("*.hpp"))
COMPILER = shutil.which("c++")


def includes(source: Path) -> list[str]:
    """Return the names in the `#include` lines of a C++ file."""
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', source.read_text(encoding="utf-8"), re.MULTILINE)


def test_the_core_includes_no_python() -> None:
    assert {path.suffix for path in SOURCES} == {".hpp", ".cpp"}
    for source in (path for path in SOURCES if path.parent == CORE):
        # Only files of the core and the standard library; bindings are in another folder.
        foreign = [name for name in includes(source) if "/" in name and not name.startswith("sys/")]
        binding = [name for name in includes(source) if re.search("python|nanobind|dlpack|torch|numpy", name, re.I)]
        assert not foreign + binding, f"{source.name} includes {foreign + binding}"


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    "header", select(CORE / "ring.hpp", CORE / "priority_tree.hpp", of=HEADERS), ids=lambda path: path.stem
)
def test_every_header_of_the_core_compiles_alone(header: Path) -> None:
    assert COMPILER is not None
    command = [COMPILER, "-fsyntax-only", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-I", CORE, "-x", "c++", "-"]
    alone = {name: value for name, value in os.environ.items() if "INCLUDE_PATH" not in name and name != "CPATH"}
    told = subprocess.run(
        command, input=f'#include "{header.name}"\n', env=alone, capture_output=True, text=True, check=False
    )
    assert told.returncode == 0, told.stderr


@pytest.mark.skipif(not hasattr(kernels.native(), "set_avx2"), reason="the stub is that of an x86-64 processor")
def test_the_stub_matches_the_native_module() -> None:
    stubgen = pytest.importorskip("nanobind.stubgen", reason="nanobind is not installed")
    stub = stubgen.StubGen(kernels.native())
    stub.put(kernels.native())
    assert (ROOT / "src" / "relive" / "kernels" / "_native.pyi").read_text(encoding="utf-8") == stub.get(), "make stub"


@pytest.mark.skipif(kernels.native() is None, reason="this install has no native core (no compiler)")
def test_planted_bugs_are_not_in_the_module() -> None:
    module = Path(kernels.native().__file__).read_bytes()
    bugs = re.findall(r"^PLANTED (\w+)", (ROOT / "tests/sanitizers/planted_bugs.cpp").read_text(), re.MULTILINE)
    assert len(bugs) == 3
    assert not [bug for bug in bugs if f"\0{bug}\0".encode() in module]


@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("readelf"), reason="reads ELF files with readelf")
@pytest.mark.skipif(kernels.native() is None, reason="this install has no native core (no compiler)")
def test_the_native_module_is_hardened() -> None:
    def readelf(*options: str) -> str:
        command = ["readelf", "-W", *options, kernels.native().__file__]
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
        "kept = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()",
        "import relive",
        "found = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()",
        "assert found == kept, 'import relive has drawn numbers'",
    )
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)
