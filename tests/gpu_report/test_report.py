"""The report that a stranger with a GPU makes: here by the interpreter, and a GPU's part on a simulated one."""

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

from relive.gpu_report import __main__ as command
from relive.gpu_report import checking, timing
from relive.gpu_report.place import SMALL, Place
from tests.kernels.triton.interpreter import interpreted, quick_arithmetic
from tests.kernels.triton.test_graphs import Graph


def here() -> Place:
    return Place(torch.device("cpu"), SMALL)


def test_a_report_has_a_page_and_a_file_of_every_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(place: Place) -> Iterator[dict[str, Any]]:
        """It breaks."""
        yield {"what": "before"}
        raise ValueError("on purpose")

    some = {"Machine": command.machine, "Bandwidth": timing.bandwidth, "Waits": checking.waits, "Broken": breaks}
    monkeypatch.setattr(command, "sections", lambda: some)
    with quick_arithmetic():
        assert command.main(["--device", "interpreter", "--out", str(tmp_path / "report")]) == 1
    report = json.loads((tmp_path / "report.json").read_text())
    results = {section["title"]: section["result"] for section in report["sections"]}
    assert results == {"Machine": "passed", "Bandwidth": "passed", "Waits": "left out: needs a GPU", "Broken": "FAILED"}
    page = (tmp_path / "report.md").read_text()
    assert "| kernels | triton |" in page
    assert "| before |" in page
    assert "**ValueError: on purpose**" in page


def test_rows_that_differ_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "differences", lambda a, b: ["reward"])
    with quick_arithmetic(), pytest.raises(AssertionError, match="reward"):
        list(checking.correctness(here()))


@contextmanager
def simulated_gpu() -> Iterator[Place]:
    """The host says that it is a GPU: launches of a capture are recorded, streams are one."""

    stream = SimpleNamespace(wait_stream=lambda other: None)
    modes = ["default"]
    fakes: dict[str, Any] = {
        "CUDAGraph": Graph, "graph": lambda graph: graph.captured(), "Stream": lambda device: stream,
        "stream": lambda each: nullcontext(), "current_stream": lambda device: stream,
        "get_sync_debug_mode": lambda: modes[-1], "set_sync_debug_mode": modes.append,
    }  # fmt: skip
    place = here()
    with interpreted(), patch.multiple(torch.cuda, **fakes), patch.object(Place, "require_gpu", lambda place: None):
        yield place
    assert modes[-1] == "default"


@pytest.mark.thorough
@pytest.mark.parametrize("section", [checking.graphs, checking.waits])
def test_what_only_a_gpu_does_is_called_as_it_would_be_there(section: Any) -> None:
    with simulated_gpu() as place:
        rows = list(section(place))
    assert rows
    assert all(row["result"] in ("equal", "does not wait") for row in rows)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "section",
    [checking.correctness, checking.priorities, checking.draws, checking.streams, checking.compiling, timing.images,
     timing.trees, timing.replay_calls, timing.rollouts],
)  # fmt: skip
def test_every_other_section_runs(section: Any) -> None:
    with simulated_gpu() as place:
        assert list(section(place))
