"""Fixtures that every test folder shares."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from hypothesis import HealthCheck, settings

if not (torch.cuda.is_available() and "cuda" in " ".join([os.environ.get("RELIVE_TEST_DEVICE", ""), *sys.argv])):
    # Read when Triton is imported, which anything below may do: its kernels then run on the host, else on the GPU.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from relive import kernels
from tests.tiers import select
from tests.times import Times
from tests.totals import take_lines

# No test fails because the machine is busy.
# The same examples in every run, so that a run that was green stays green; the long tier searches for new ones.
settings.register_profile("relive", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("relive")

BACKENDS = {"native": nullcontext, "torch": kernels.force_torch, "no_exchange": kernels.without_exchange}


def pytest_addoption(parser: pytest.Parser) -> None:
    """`pytest tests/devices --device cuda`; without it the host with torch ops stands for a device."""
    default = os.environ.get("RELIVE_TEST_DEVICE", "cpu")
    parser.addoption("--device", default=default, help="where the tests of tests/devices run (RELIVE_TEST_DEVICE)")


COLLECTED = pytest.StashKey[list[pytest.Item]]()
"""All tests, in the stash of a run's config."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep all tests before those without the marks of this run are left out."""
    config.stash[COLLECTED] = list(items)


_totals: list[str] = []
_times = Times()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Put the lines of `tell` into the report, which reaches the process that prints the summary."""
    report = yield
    if call.when == "call":
        report.user_properties.extend(("told", line) for line in take_lines())
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep the lines of `tell` and the time that a test took."""
    _times.add(report.nodeid, report.duration)
    if report.when == "call":
        told = (line for name, line in report.user_properties if name == "told")
        _totals.extend(f"{line} [{report.outcome}, {report.duration:.1f} s]" for line in told)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what was tried (faults, inputs, kills, and the places that they hit), and where the time went."""
    for title, lines in (("what was tried", _totals), ("where the time went", list(_times.lines()))):
        if lines:
            terminalreporter.section(title)
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture(autouse=True)
def _the_same_threads_after() -> Iterator[None]:
    """Pages whose code trains set the number of torch's threads."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=select("native", "torch", of=BACKENDS))
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each way that kernels run: native, torch ops, and native under a torch without the exchange API.

    The last one is thorough, but for `tests/kernels`, and tests that go through all `BACKENDS` themselves.
    """
    with running(request.param):
        yield request.param


def running(backend: str) -> AbstractContextManager[None]:
    """Run everything inside on a backend; skip the test where there is none."""
    if backend != "torch" and kernels.native() is None:
        pytest.skip("this install has no native core (no compiler)")
    return BACKENDS[backend]()


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """Address of a Ray cluster, started once for all tests that need it and always shut down."""
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 (else 15: on a busy machine they hardly ever come to run)
    ray = pytest.importorskip("ray", reason="needs Ray: pip install '.[ray]'")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own, about settings of later versions
        ray.init(num_cpus=2, include_dashboard=False, object_store_memory=256 << 20, log_to_driver=False)
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()
