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


def launched(device: str, *calls: str) -> list[Launch]:
    """The launches of some calls, or of all, in a process where Triton compiles."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": paths, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(CACHE)}
    command = [sys.executable, "-m", "tests.kernels.compiling.two_gpus", device, *calls]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [Launch(**json.loads(line)) for line in done.stdout.splitlines()]


CACHE = ROOT / "build" / "triton" / "cache"
"""What was compiled once; Triton compiles again where a kernel has changed."""


def assert_everything_on_the_second_device(launches: list[Launch]) -> None:
    """Its stream has the number 71; the device that was current was the first one."""
    assert launches
    elsewhere = [launch for launch in launches if (launch.loaded, launch.device, launch.stream) != (1, 1, 71)]
    assert not elsewhere


def test_launches_go_to_the_device_of_the_buffer_from_every_thread() -> None:
    launches = launched("cuda:1", "replay add", "minibatch of a rollout")
    assert_everything_on_the_second_device(launches)
    again = [launch.kernel for launch in launches if launch.call.endswith("in a new thread")]
    assert again == ["write_kernel", "read_kernel"]


@pytest.mark.thorough
def test_every_kernel_is_launched_there_and_host_memory_can_stand_for_the_device() -> None:
    launches = launched("cuda:1")
    assert_everything_on_the_second_device(launches)
    assert {launch.kernel for launch in launches} == {variant.kernel.__name__ for variant in variants()}
    forced = launched("cpu")  # by `rl.kernels.force("triton")`
    assert _called(forced) == _called(launches)


def _called(launches: list[Launch]) -> list[tuple[str, str]]:
    return [(launch.call, launch.kernel) for launch in launches if not launch.call.endswith("preparing")]
