"""Every launch goes to the device of its buffer, and to the current stream of that device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.compile_kernels import variants
from tests.kernels.compiling.two_gpus import Launch

pytest.importorskip("triton", reason="needs Triton: pip install 'relive[triton]'")
ROOT = Path(__file__).parents[3]


def run_calls(device: str, *calls: str) -> list[Launch]:
    """Return the launches of these calls, by default of all, in a process where Triton compiles."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": paths, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(CACHE)}
    command = [sys.executable, "-m", "tests.kernels.compiling.two_gpus", device, *calls]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [Launch(**json.loads(line)) for line in done.stdout.splitlines()]


CACHE = ROOT / "build" / "triton" / "cache"
"""Folder of compiled kernels; Triton recompiles a changed kernel."""


def assert_everything_on_the_second_device(launches: list[Launch]) -> None:
    """Check that all launches are on device 1, whose stream has number 71, while device 0 was current."""
    assert launches
    wrong = [launch for launch in launches if (launch.loaded, launch.device, launch.stream) != (1, 1, 71)]
    assert not wrong


def test_launches_go_to_the_device_of_the_buffer_from_every_thread() -> None:
    launches = run_calls("cuda:1", "replay add", "minibatch of a rollout")
    assert_everything_on_the_second_device(launches)
    again = [launch.kernel for launch in launches if launch.call.endswith("in a new thread")]
    assert again == ["write_kernel", "read_kernel"]


@pytest.mark.thorough
def test_every_kernel_is_launched_on_the_device_or_on_simulated_host_memory() -> None:
    launches = run_calls("cuda:1")
    assert_everything_on_the_second_device(launches)
    assert {launch.kernel for launch in launches} == {variant.kernel.__name__ for variant in variants()}
    host_launches = run_calls("cpu")
    assert _list_calls(host_launches) == _list_calls(launches)


def _list_calls(launches: list[Launch]) -> list[tuple[str, str]]:
    return [(launch.call, launch.kernel) for launch in launches if not launch.call.endswith("preparing")]
