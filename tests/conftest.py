"""Fixtures that every test folder shares."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from recollect import kernels
from tests.totals import taken

BACKENDS = {"native": nullcontext, "torch": kernels.force_torch, "no_exchange": kernels.without_exchange}


_totals: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep what a test has told, with the time it took."""
    if report.when == "call":
        _totals.extend(f"{line} [{report.outcome}, {report.duration:.1f} s]" for line in taken())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what was tried: faults, inputs, kills, and the places that they hit."""
    if _totals:
        terminalreporter.section("what was tried")
        for line in _totals:
            terminalreporter.write_line(line)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each way that kernels run: native, torch ops, and native under a torch without the exchange API."""
    if request.param != "torch" and kernels.native() is None:
        pytest.skip("this install has no native core (no compiler)")
    with BACKENDS[request.param]():
        yield request.param
