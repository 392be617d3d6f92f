"""Host time of calls on a GPU, beside FastTD3's buffer: `python -m benchmarks.host_time --fasttd3 PATH`.

No GPU is needed: Triton's own JIT, compiler and launcher use a driver that accepts launches and runs nothing (built by
a C compiler), and CPU tensors stand for device tensors. FastTD3's torch operations do their small copies on
the host meanwhile, so only the columns of one run can be compared. It also counts what new sizes compile.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
STUB = ROOT / "build" / "stub"
ENVS, ROWS, ROUNDS, CALLS = 64, 64, 40, 100
Calls = dict[str, Callable[[], object]]


def install_stub_driver() -> None:
    """Install a fake GPU driver for Triton, which must not have been imported before."""
    spec = find_spec("triton")
    if spec is None or spec.origin is None:
        raise SystemExit("host_time: expected an installed Triton, got none. Install relive[triton].")
    triton = Path(spec.origin).parent
    STUB.mkdir(parents=True, exist_ok=True)
    library, include = STUB / "libcuda.so.1", triton / "backends/nvidia/include"
    source = Path(__file__).with_name("stub_driver.c")
    command = ["cc", "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", f"-I{include}", "-o", library, source]
    subprocess.run(command, check=True)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    os.environ |= {"TRITON_INTERPRET": "0", "TRITON_LIBCUDA_PATH": str(STUB), "LD_LIBRARY_PATH": str(STUB)}
    os.environ.setdefault("TRITON_CACHE_DIR", str(ROOT / "build" / "triton" / "cache"))
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaDriver
    from triton.runtime import driver

    class Stub(CudaDriver):
        def __init__(self) -> None:
            super().__init__()
            self.get_current_device = lambda: 0
            self.get_current_stream = lambda device=0: 7
            self.get_device_capability = lambda device=0: (8, 0)

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", 80, 32)

    driver.set_active(Stub())


def relive_calls(replay: Any, prioritized: Any) -> Calls:
    """Return the calls of relive."""
    import torch

    import relive as rl

    from . import launch_peers

    launch_peers.NUM_ENVS = ENVS
    step = launch_peers.transition("cpu")
    for _ in range(3):
        replay.add(**step)
        prioritized.add(**step)
    index, errors = torch.arange(ENVS), torch.ones(ENVS)
    return {
        "add": lambda: replay.add(**step),
        "sample": lambda: replay.sample(ENVS),
        "3-step sample": lambda: replay.sample(ENVS, rl.NStep(3, 0.99)),
        "sequences of 16": lambda: replay.sample(ENVS, rl.Sequence(16)),
        "prioritized add": lambda: prioritized.add(**step),
        "prioritized sample": lambda: prioritized.sample(ENVS),
        "update_priority": lambda: prioritized.update_priority(index, errors),
    }


def fasttd3_calls(path: Path) -> Calls:
    """Return the calls of FastTD3 on a full buffer."""
    from . import launch_peers

    launch_peers.NUM_ENVS, launch_peers.ROWS = ENVS, ROWS
    calls = launch_peers._fasttd3(path, "cpu")
    names = {"add": "replay add", "sample": "uniform sample after a write", "3-step sample": "3-step sample"}
    return {name: calls[original]() for name, original in names.items()}


def measure_calls(contestants: dict[str, Calls]) -> dict[tuple[str, str], float]:
    """Return the lower quartile of each call in µs of CPU time; the calls take turns."""
    samples: dict[tuple[str, str], list[float]] = {
        (title, name): [] for title, calls in contestants.items() for name in calls
    }
    for turn in range(ROUNDS + 1):
        for (title, name), every in samples.items():
            call = contestants[title][name]
            start = time.thread_time_ns()
            for _ in range(CALLS):
                call()
            if turn:  # the first call compiles
                every.append((time.thread_time_ns() - start) / 1e3 / CALLS)
    return {key: sorted(every)[len(every) // 4] for key, every in samples.items()}


def compiled_for_new_sizes(replay: Any, prioritized: Any) -> dict[str, int]:
    """Return the number of kernels compiled for the third and each further batch size or sequence length."""
    import torch
    from triton import knobs

    import relive as rl

    names: list[str] = []
    knobs.runtime.jit_post_compile_hook = lambda **event: names.append(event["fn"].name)
    sizes: dict[str, Callable[[int], object]] = {
        "sample": replay.sample,
        "3-step sample": lambda size: replay.sample(size, rl.NStep(3, 0.99)),
        "sequences": lambda size: replay.sample(64, rl.Sequence(size % 61 + 2)),
        "prioritized sample": prioritized.sample,
        "update_priority": lambda size: prioritized.update_priority(torch.arange(size) % 64, torch.ones(size)),
    }
    counts = {}
    for name, call in sizes.items():
        for size in (64, 100):
            call(size)
        names.clear()
        for size in (1, 16, 17, 255, 256, 1000, 4096):
            call(size)
        counts[name] = len(names)
    return counts


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, and the number of kernels that new sizes compile."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_time", description=__doc__)
    parser.add_argument("--fasttd3", metavar="PATH", type=Path, help="the file fast_td3_utils.py of a clone of FastTD3")
    options = parser.parse_args(arguments)
    install_stub_driver()
    import torch

    import relive as rl

    torch.set_num_threads(1)
    contestants = {"FastTD3": fasttd3_calls(options.fasttd3)} if options.fasttd3 else {}
    with rl.kernels.force("triton"):
        buffers = [
            rl.ReplayBuffer(ROWS * ENVS, 48, 12, num_envs=ENVS, sampler=sampler, seed=0)
            for sampler in (None, rl.Prioritized())
        ]
        contestants["relive"] = relive_calls(*buffers)
        found = measure_calls(contestants)
        counts = compiled_for_new_sizes(*buffers)
    print("| host µs | relive | FastTD3 | ratio |\n|---|--:|--:|--:|")
    for name in contestants["relive"]:
        mine, other = found["relive", name], found.get(("FastTD3", name))
        print(f"| {name} | {mine:.1f} | " + ("– | – |" if other is None else f"{other:.1f} | {mine / other:.2f} |"))
    print("\nCompiled by the third and further sizes:", counts)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
