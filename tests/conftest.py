"""Fixtures, options and reports of all tests."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest
import torch
from hypothesis import HealthCheck, settings

if not (torch.cuda.is_available() and "cuda" in " ".join([os.environ.get("RELIVE_TEST_DEVICE", ""), *sys.argv])):
    # Must be set before Triton is imported, which the imports below may do: kernels then run on the host.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from relive import kernels
from tests.tiers import select
from tests.totals import take_lines

# No deadline: a busy machine must not fail a test.
# The same examples in every run: a passing run stays passing; the long tier searches for new ones.
settings.register_profile("relive", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("relive")


@contextmanager
def without_exchange() -> Iterator[None]:
    """Simulate a torch without DLPack's C exchange API (before 2.10), where DLPack's capsules exchange tensors."""
    kernels.native_core().set_exchange(False)
    try:
        yield
    finally:
        kernels.native_core().set_exchange(True)


BACKENDS = {"native": nullcontext, "torch": kernels.force_torch, "no_exchange": without_exchange}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--device`: `pytest tests/devices --device cuda`; by default the host with torch ops stands for a device."""
    default = os.environ.get("RELIVE_TEST_DEVICE", "cpu")
    parser.addoption("--device", default=default, help="where the tests of tests/devices run (RELIVE_TEST_DEVICE)")


COLLECTED = pytest.StashKey[list[pytest.Item]]()
"""Key of all collected tests in the config's stash."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Store the list of all tests before pytest deselects some of them."""
    config.stash[COLLECTED] = list(items)


_totals: list[str] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Attach the lines of `tell` to the report, which xdist sends to the process that prints the summary."""
    report = yield
    if call.when == "call":
        report.user_properties.extend(("told", line) for line in take_lines())
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Collect the lines of `tell`, each with the duration of its test."""
    if report.when == "call":
        told = (line for name, line in report.user_properties if name == "told")
        _totals.extend(f"{line} [{report.outcome}, {report.duration:.1f} s]" for line in told)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the lines of `tell`."""
    if _totals:
        terminalreporter.section("what was tried")
    for line in _totals:
        terminalreporter.write_line(line)


@pytest.fixture(autouse=True)
def _restore_num_threads() -> Iterator[None]:
    """Restore torch's number of threads, which some code of the docs changes."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=select("native", "torch", of=BACKENDS))
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test on each backend: native, torch ops, and native under a torch without the exchange API.

    The last one is thorough, except in `tests/kernels` and in tests that loop over `BACKENDS`.
    """
    with running(request.param):
        yield request.param


def running(backend: str) -> AbstractContextManager[None]:
    """Context manager that selects a backend; skips the test if the backend is missing."""
    if backend != "torch" and kernels.native_core() is None:
        pytest.skip("this install has no native core (no compiler)")
    return BACKENDS[backend]()


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """Address of a Ray cluster, started once for all tests that need it and always shut down."""
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 (else 15: on a busy machine they hardly ever come to run)
    ray = pytest.importorskip("ray", reason="needs Ray: pip install '.[ray]'")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray warns about settings of later versions
        ray.init(num_cpus=2, include_dashboard=False, object_store_memory=256 << 20, log_to_driver=False)
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()
