"""The choice of kernels: native C++ on the CPU, Triton on CUDA and ROCm, torch ops everywhere else.

The backend is chosen here and nowhere else. Estimators have no Triton kernel: they run once per rollout, and torch ops
are fast enough. `_native` accepts only plain CPU arrays of the right dtype and shape, and converts nothing. Installs
without a compiler lack `_native` and always use torch ops.
"""

from __future__ import annotations

import sys
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, reduce
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import torch

from relive import locking
from relive.errors import SchemaError, explain
from relive.kernels import torch_ops

if TYPE_CHECKING:
    from relive.kernels._native import ProcessLock

try:
    from relive.kernels import _native
except ImportError:
    # Installs without a compiler lack `_native` and use torch ops.
    _native = None

if _native is not None:
    _native.set_torch(torch.Tensor, torch.nn.Parameter)
    # `_native` reads numpy arrays directly only if that gives the same views as the buffer protocol for these arrays,
    # which have every dtype and several kinds of axes and strides.
    _probes = [np.zeros((3, i + 2, 2), type_code)[:, :, 0] for i, type_code in enumerate("?bBhHiIlLqQfd")]
    _native.set_numpy(np.ndarray, [*_probes, np.zeros((), np.float32), *_probes[-1]])
    del _probes

_active = _native
Estimates = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
_forced: Literal["torch", "triton"] | None = None

crc32: Callable[..., int] = getattr(_native, "crc32", zlib.crc32)
"""`zlib.crc32`, or a faster native equivalent; the second argument is the checksum of the preceding bytes."""

complete: Callable[[Callable[[], object]], None] = getattr(_native, "complete", locking.complete)
"""Run a change atomically despite exceptions from signal handlers (Ctrl-C): see `locking.complete`."""


def backend() -> Literal["native", "torch", "triton"]:
    """Return the current backend for CPU tensors: the C++ core, torch ops, or Triton's interpreter."""
    return _forced or ("torch" if _active is None else "native")


def native_core() -> Any:
    """Return the native module; None if it is not installed or another backend is forced."""
    return _active


@contextmanager
def force(name: Literal["torch", "triton"]) -> Iterator[None]:
    """Use one backend for all objects made and calls made inside, for tests and comparisons.

    "torch" treats CPU tensors like those of a device without native kernels. "triton" runs them in Triton's interpreter
    as on CUDA: nothing synchronises, and device-side faults are counted until `check()`. It needs TRITON_INTERPRET=1 in
    the environment of the process, or an active Triton driver that accepts CPU tensors, such as one that only counts
    launches. A replay buffer keeps the backend of its construction.
    """
    if name not in ("torch", "triton"):
        raise SchemaError(explain("kernels.force", '"torch" or "triton"', repr(name), "Pass one of them."))
    if name == "triton":
        _require_host_launches()
    global _active, _forced
    previous = _active, _forced
    _active, _forced = None, name
    try:
        yield
    finally:
        _active, _forced = previous


def _require_host_launches() -> None:
    if not _has_triton():
        remedy = "Install it: pip install 'relive[triton]'."
        raise RuntimeError(explain('kernels.force("triton")', "an installed Triton", "no module triton", remedy))
    try:
        _launch_probe(torch.device("cpu"))
    except Exception as error:
        expected = "Triton's interpreter, or a driver that takes CPU tensors"
        remedy = (
            "Set the environment variable TRITON_INTERPRET=1 before Python starts: it is read when Triton is imported."
        )
        raise RuntimeError(explain('kernels.force("triton")', expected, _describe_failure(error), remedy)) from error


def _launch_probe(device: torch.device) -> None:
    from relive.kernels.triton.launching import launch_probe  # noqa: PLC0415 (needs Triton)

    launch_probe(device)


def _describe_failure(error: Exception) -> str:
    """Return the installed version of Triton and the last line of an error."""
    version = getattr(sys.modules.get("triton"), "__version__", "that cannot be imported")
    lines = str(error).strip().splitlines() or ["no message"]
    return f"Triton {version} ({type(error).__name__}: {lines[-1]})"


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def runs_triton(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether Triton kernels handle all these tensors."""
    if _forced is not None or not tensors or not tensors[0].is_cuda:
        return _forced == "triton" and all(tensor.is_cpu for tensor in tensors)
    return _triton_works_on(tensors[0].device) and all(tensor.is_cuda for tensor in tensors)


@cache
def _triton_works_on(device: torch.device) -> bool:
    """Whether Triton works on a GPU: AMD, or NVIDIA from Turing on, if a small kernel compiles and launches.

    Evaluated once per device. Warns about the fallback to torch ops if Triton is installed but fails.
    """
    if not _has_triton() or (torch.version.hip is None and torch.cuda.get_device_capability(device) < (7, 5)):
        return False
    try:
        _launch_probe(device)
    except Exception as error:
        # Every error is caught, because Triton, its assembler and its C compiler raise errors of many classes.
        remedy = "Torch ops serve instead, with more launches per call; install the Triton that comes with your torch."
        warnings.warn(
            explain("kernels", "Triton 3.4 or later that compiles", _describe_failure(error), remedy), stacklevel=2
        )
        return False
    return True


def force_torch() -> AbstractContextManager[None]:
    """Use torch ops inside, as on a device without native kernels; short for `force("torch")`."""
    return force("torch")


def choose_backend(tensors: Sequence[torch.Tensor], num_frames: int = 1) -> Literal["native", "triton", "torch"]:
    """Return the backend for a ring in these tensors, with stacks of `num_frames` frames."""
    if runs_triton(tensors):
        return "triton"
    return "native" if runs_native(tensors) and num_frames <= native_core().MAX_FRAMES else "torch"


def supports_process_locks() -> bool:
    """Whether locks shared between processes are supported."""
    return hasattr(_active, "ProcessLock")


def process_lock_bytes() -> int:
    """Return the size in bytes of a lock shared between processes."""
    return native_core().LOCK_BYTES


def make_process_lock(
    memory: torch.Tensor, is_new: bool, recover: Callable[[], None], max_seconds: float
) -> ProcessLock:
    """Make a re-entrant lock in shared memory, which calls `recover` if its last holder died.

    Waiting for the lock ends with a TimeoutError after `max_seconds`.
    """
    return native_core().ProcessLock(memory, is_new, recover, max_seconds)


def make_guarded_lock(guard: Callable[[], object]) -> AbstractContextManager[None]:
    """Make a re-entrant lock for threads that calls `guard` after locking, and unlocks if it raises."""
    if _native is None:
        return locking.GuardedLock(guard)
    return _native.GuardedLock(threading.RLock(), guard)


def runs_native(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the native core can handle all these tensors."""
    if _active is None or not tensors or len(tensors) > _active.MAX_LEAVES:
        return False
    return all(tensor.is_cpu and tensor.ndim <= _active.MAX_AXES for tensor in tensors)


@overload
def run_estimator(
    name: Literal["gae", "vtrace"], tensors: Sequence[torch.Tensor | None], settings: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def run_estimator(
    name: Literal["lambda_return", "n_step_return"], tensors: Sequence[torch.Tensor | None], settings: Sequence[float]
) -> torch.Tensor: ...


def run_estimator(name: str, tensors: Sequence[torch.Tensor | None], settings: Sequence[float]) -> Estimates:
    """Run the estimator `name` on converted tensors, in their promoted float dtype, at least float32.

    The last three tensors are the flags: terminated, truncated and the mask.
    """
    values, flags = [tensor for tensor in tensors[:-3] if tensor is not None], tensors[-3:]
    dtype = reduce(torch.promote_types, (value.dtype for value in values), torch.float32)
    cast = [*(value.to(dtype) for value in values), *flags]
    if not torch.compiler.is_compiling() and _active is not None:
        result = _run_native_estimator(name, cast, settings)
        if result is not None:
            return result
    return getattr(torch_ops, name)(*cast, *settings)


def _run_native_estimator(
    name: str, tensors: Sequence[torch.Tensor | None], settings: Sequence[float]
) -> Estimates | None:
    if not all(t is None or (type(t) is torch.Tensor and t.device.type == "cpu") for t in tensors):
        return None
    kernel = getattr(native_core(), name)
    result = kernel(*tensors, *settings)
    if result is None:
        # The kernels need one stride for all axes after time, so they are called again with contiguous copies.
        result = kernel(*(None if t is None else t.contiguous() for t in tensors), *settings)
    return result
