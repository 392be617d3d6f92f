"""What the installed package is: a hardened native module, and an import that leaves other people's state alone."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from relive import kernels


@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("readelf"), reason="reads ELF files with readelf")
@pytest.mark.skipif(kernels.native() is None, reason="this install has no native core (no compiler)")
def test_the_native_module_is_hardened() -> None:
    def told(*options: str) -> str:
        command = ["readelf", "-W", *options, kernels.native().__file__]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    assert "GNU_RELRO" in told("-l")
    assert "BIND_NOW" in told("-d")
    assert "__stack_chk_fail" in told("--dyn-syms")
    assert "RWE" not in told("-l")


@pytest.mark.thorough
def test_importing_leaves_the_generators_of_others_alone() -> None:
    """rich draws from Python's when it is imported."""
    lines = (
        "import random, numpy, torch",
        "kept = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()",
        "import relive",
        "found = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()",
        "assert found == kept, 'import relive has drawn numbers'",
    )
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)
