"""G2: direct calls of the native core with almost valid arguments raise or return, and never crash."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from relive import kernels
from tests.totals import SEED, tell, trials

pytestmark = pytest.mark.skipif(kernels.native_core() is None, reason="this install has no native core (no compiler)")


def called(folder: Path, first: int, count: int) -> int:
    """Run trials in another process; return the number of calls. An AssertionError names the trial that crashed."""
    place = folder / "trial"
    place.write_bytes(bytes(8))
    command = [sys.executable, "-m", "tests.faults.native_calls", *map(str, (SEED, first, count))]
    environment = os.environ | {"RELIVE_NATIVE_TRIAL": str(place)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=3600)
    number = int.from_bytes(place.read_bytes(), "little")
    again = f"RELIVE_NATIVE_TRIAL=$(mktemp) python -m tests.faults.native_calls {SEED} {number} 1"
    assert done.returncode == 0, f"trial {number} ended with {done.returncode}: {again}\n{done.stderr[-4000:]}"
    return int(done.stdout)


def test_every_name_of_the_core_is_called() -> None:
    from tests.faults.native_calls import core_names, covered  # noqa: PLC0415 (needs the native core)

    assert covered() >= core_names()


@pytest.mark.promise("G2")
def test_almost_valid_calls_raise_or_return(tmp_path: Path) -> None:
    calls = called(tmp_path, 0, trials("G2", 8_000))
    tell(f"G2: {calls} calls of the native core with arguments that are almost right, seed {SEED}: no crash")


@pytest.mark.long
def test_a_million_almost_valid_calls_do_not_crash(tmp_path: Path) -> None:
    calls, first, wanted = 0, 10**6, trials("G2_LONG", 10**6)
    while calls < wanted:
        calls += called(tmp_path, first, 20_000)
        first += 20_000
    tell(f"G2: {calls} calls of the native core with arguments that are almost right, seed {SEED}: no crash")
