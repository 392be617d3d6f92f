"""Two simulated GPUs that record launches: `python -m tests.kernels.compiling.two_gpus` prints each launch.

Triton's JIT and compiler work as on a GPU, and a driver in Python records the launches. Tensors of `cuda:1` are torch's
fake tensors, which have a device and no values: reading one back raises. The script needs a process of its own, in
which Triton is no interpreter.
"""

from __future__ import annotations

import json
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import relive as rl
from benchmarks import launches
from relive.rng import Randomness

CAPABILITY = 80


class Launch(NamedTuple):
    """A launch as received by the driver."""

    call: str
    kernel: str
    loaded: int
    """Device on which the kernel was loaded."""
    device: int
    """Current device of the calling thread."""
    stream: int


class Gpus:
    """The current device of each thread, and all launches; the stream of device i has number 70 + i."""

    def __init__(self) -> None:
        self._thread = threading.local()
        self.call = "preparing"
        self.launches: list[Launch] = []

    def current(self) -> int:
        return getattr(self._thread, "device", 0)

    def exchange(self, device: int) -> int:
        """Make a device current unless it is negative; return the previous one."""
        before = self.current()
        if device >= 0:
            self._thread.device = device
        return before

    def record(self, kernel: tuple[str, int], stream: int) -> None:
        self.launches.append(Launch(self.call, *kernel, self.current(), stream))


class Stream(NamedTuple):
    """A stream of a device."""

    cuda_stream: int

    def wait_stream(self, other: Stream) -> None:
        """Do nothing: no launch runs."""


def get_stream(gpus: Gpus, device: Any = None) -> Stream:
    index = gpus.current() if device is None or torch.device(device).index is None else torch.device(device).index
    return Stream(70 + index)


def install_driver(gpus: Gpus) -> None:
    """Make Triton launch its kernels on the simulated GPUs."""
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415 (optional)
    from triton.backends.driver import DriverBase  # noqa: PLC0415
    from triton.runtime import driver  # noqa: PLC0415

    class Launcher:
        def __init__(self, *_: Any) -> None: ...

        def __call__(self, x: int, y: int, z: int, stream: int, function: tuple[str, int], *_: Any) -> None:
            gpus.record(function, stream)

    class Utils:
        @staticmethod
        def load_binary(name: str, kernel: bytes, shared: int, device: int) -> Any:
            return object(), (name, device), 0, 0, 1024

        @staticmethod
        def get_device_properties(device: int) -> dict[str, int]:
            return {"max_shared_mem": 160 << 10}

        @staticmethod
        def unload_module(module: Any) -> None: ...

    class Driver(DriverBase):
        launcher_cls, utils = Launcher, Utils

        @classmethod
        def is_active(cls) -> Any:
            return True

        def get_current_device(self) -> int:
            return gpus.current()

        def get_current_stream(self, device: int) -> int:
            return get_stream(gpus, f"cuda:{device}").cuda_stream

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", CAPABILITY, 32)

        def get_active_torch_device(self) -> Any:
            return torch.device("cuda", gpus.current())

        def get_benchmarker(self) -> Any:
            return None

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty

    driver.set_active(Driver())


@contextmanager
def patch_torch(gpus: Gpus) -> Iterator[FakeTensorMode]:
    """Make torch report these GPUs, and return the mode of fake tensors."""
    functions: dict[str, Any] = {
        "_exchange_device": gpus.exchange,
        "_maybe_exchange_device": gpus.exchange,
        "current_device": gpus.current,
        "current_stream": lambda device=None: get_stream(gpus, device),
        "get_device_capability": lambda device=None: divmod(CAPABILITY, 10),
        "is_available": lambda: True,
        "is_current_stream_capturing": lambda: False,
    }
    with ExitStack() as stack:
        for name, function in functions.items():
            stack.enter_context(patch.object(torch.cuda, name, function))
        stack.enter_context(patch.object(fake_tensor, "init_gpu_context", lambda *_: None))
        stack.enter_context(patch.object(FakeTensorMode, "avoid_device_init", True))
        methods = {"data_ptr": _address, "__getitem__": _part, "__setitem__": _write_part, "copy_": _copy}
        for name, method in methods.items():
            stack.enter_context(patch.object(FakeTensor, name, method, create=True))
        stack.enter_context(patch.object(Randomness, "generator", lambda *_: None))
        yield FakeTensorMode()


def _address(tensor: torch.Tensor) -> int:
    """Return an address that no other memory has."""
    return (tensor.untyped_storage()._cdata << 16) + tensor.storage_offset() * tensor.element_size()


def _part(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    """Compute `tensor[index]`: for this and for `copy_` torch's bindings need a linked CUDA."""
    axis = 0
    for each in index if isinstance(index, tuple) else (index,):
        if isinstance(each, int):
            tensor = tensor.select(axis, each)
            continue
        if each is None:
            tensor = tensor.unsqueeze(axis)
        elif isinstance(each, slice):
            tensor = torch.ops.aten.slice.Tensor(tensor, axis, each.start, each.stop, each.step or 1)
        else:
            tensor = torch.ops.aten.index.Tensor(tensor, [None] * axis + [each])
        axis += 1
    return tensor


def _write_part(tensor: torch.Tensor, index: Any, value: Any) -> None:
    part = _part(tensor, index)
    if isinstance(value, torch.Tensor):
        part.copy_(value)
    else:
        part.fill_(value)


def _copy(tensor: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return torch.ops.aten.copy_.default(tensor, source, non_blocking)


def calls(device: str) -> dict[str, Callable[[], Callable[[], object]]]:
    """Return the calls of training loops, and calls of all other kernels."""
    from relive.kernels.triton.priority_tree import TritonTree  # noqa: PLC0415 (which needs Triton)
    from relive.kernels.triton.stream import DeviceStream  # noqa: PLC0415

    launches.NUM_ENVS = launches.launch_peers.NUM_ENVS = 8
    launches.BATCH = 16
    by_all = rl.Prioritized(normalize="global")

    def drawing_numbers() -> Callable[[], object]:
        there = torch.zeros(1, device=device).device
        stream = DeviceStream(0, there)
        return lambda: stream.uniform(8, there)

    def changing_large_trees() -> Callable[[], object]:
        leaves = torch.zeros(8, dtype=torch.int64, device=device)
        tree = TritonTree(1 << 15, leaves.device)
        return lambda: tree.set(leaves, torch.ones(8, dtype=torch.float64, device=device))

    more = {
        "priorities of a large tree": changing_large_trees,
        "prioritized draw, weights by all": lambda: launches._prepare_prioritized_update(
            launches._replay(device, by_all)
        ),
        "uniform numbers": drawing_numbers,
    }
    return {**launches.ours(device), **more}


def run(gpus: Gpus, device: str, names: list[str], inside: Callable[[], AbstractContextManager[Any]]) -> None:
    """Make each call, run it, and run it again in a new thread."""
    for name, prepare in calls(device).items():
        if names and name not in names:
            continue
        with inside():
            gpus.call = f"{name}, preparing"
            call = prepare()
            gpus.call = name
            call()

        def again(call: Callable[[], object] = call) -> None:
            # Each thread has a mode of its own.
            with inside():
                call()

        gpus.call = f"{name}, in a new thread"
        with ThreadPoolExecutor(1) as threads:
            threads.submit(again).result()


def main(device: str, names: list[str]) -> None:
    """Run calls on `cuda:1` or, with `rl.kernels.force("triton")`, on the host; print every launch."""
    warnings.simplefilter("error")
    # Triton reads the data pointer of a tensor to find its alignment.
    warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
    gpus = Gpus()
    install_driver(gpus)
    if device == "cpu":
        with rl.kernels.force("triton"):
            run(gpus, device, names, nullcontext)
    else:
        with patch_torch(gpus) as mode:
            run(gpus, device, names, lambda: mode)
    for launch in gpus.launches:
        sys.stdout.write(json.dumps(launch._asdict()) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
