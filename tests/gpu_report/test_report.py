"""The GPU report, run in Triton's interpreter; sections that need a GPU run on a simulated one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton: pip install 'relive[triton]'")

from relive import gpu_report, kernels
from relive.gpu_report import SMALL, CheckedDevice
from tests.kernels.triton.interpreter import interpreted, quick_arithmetic
from tests.kernels.triton.test_graphs import Graph


def make_target() -> CheckedDevice:
    return CheckedDevice(torch.device("cpu"), SMALL)


def test_a_report_has_a_page_and_a_file_of_every_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(target: CheckedDevice) -> Iterator[dict[str, Any]]:
        yield {"what": "before"}
        raise ValueError("on purpose")

    sections = {
        "Machine": gpu_report.describe_machine, "Bandwidth": gpu_report.measure_bandwidth,
        "Waits": gpu_report.check_synchronisation, "Broken": breaks,
    }  # fmt: skip
    monkeypatch.setattr(gpu_report, "SECTIONS", sections)
    with quick_arithmetic():
        assert gpu_report.main(["--device", "interpreter", "--out", str(tmp_path / "report")]) == 1
    report = json.loads((tmp_path / "report.json").read_text())
    results = {section["title"]: section["result"] for section in report["sections"]}
    assert results == {"Machine": "passed", "Bandwidth": "passed", "Waits": "left out: needs a GPU", "Broken": "FAILED"}
    page = (tmp_path / "report.md").read_text()
    assert "| kernels | triton |" in page
    assert "| before |" in page
    assert "**ValueError: on purpose**" in page


def test_rows_that_differ_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_report, "find_differences", lambda a, b: ["reward"])
    with quick_arithmetic(), pytest.raises(AssertionError, match="reward"):
        list(gpu_report.compare_rows(make_target()))


@contextmanager
def simulated_gpu() -> Iterator[CheckedDevice]:
    """Simulate a GPU: captured launches are recorded, and all streams are the same."""

    stream = SimpleNamespace(wait_stream=lambda other: None)
    modes = ["default"]
    fakes: dict[str, Any] = {
        "CUDAGraph": Graph, "graph": lambda graph: graph.captured(), "Stream": lambda device: stream,
        "stream": lambda each: nullcontext(), "current_stream": lambda device: stream,
        "get_sync_debug_mode": lambda: modes[-1], "set_sync_debug_mode": modes.append,
    }  # fmt: skip
    target = make_target()
    with interpreted(), patch.multiple(torch.cuda, **fakes), patch.object(CheckedDevice, "require_gpu", lambda _: None):
        yield target
    assert modes[-1] == "default"


@pytest.mark.thorough
@pytest.mark.parametrize("section", [gpu_report.check_cuda_graphs, gpu_report.check_synchronisation])
def test_sections_that_need_a_gpu_run_on_a_simulated_one(section: Any) -> None:
    with simulated_gpu() as target:
        rows = list(section(target))
    assert rows
    assert all(row["result"] in ("equal", "does not wait") for row in rows)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "section",
    [
        gpu_report.compare_rows, gpu_report.compare_priorities, gpu_report.check_draws, gpu_report.check_streams,
        gpu_report.time_first_calls, gpu_report.time_images, gpu_report.time_priority_trees, gpu_report.time_replay,
        gpu_report.time_rollouts,
    ],
)  # fmt: skip
def test_every_other_section_runs(section: Any) -> None:
    with simulated_gpu() as target:
        assert list(section(target))


def test_a_failed_call_leaves_no_backend_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_with_torch(target: CheckedDevice, name: str, *_: object) -> dict[str, Any]:
        if name.endswith("torch ops"):
            raise ValueError(name)
        return {}

    monkeypatch.setattr(gpu_report, "measure_call", fail_with_torch)
    backend = kernels.backend()
    with quick_arithmetic():
        assert gpu_report.run_section("Replay", gpu_report.time_replay, make_target())["result"] == "FAILED"
    assert kernels.backend() == backend
