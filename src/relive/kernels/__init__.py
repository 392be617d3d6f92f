"""The choice of kernels: native C++ on the CPU, Triton on CUDA and ROCm, torch ops everywhere else.

The decision is made here and nowhere else. Estimators have no Triton kernel: once per rollout, torch ops will do.
`_native` takes only exact fits (plain CPU arrays of the right dtype and shape) and answers "no" otherwise; nothing in
it converts or explains. Installs without a compiler have no `_native` and use the torch kernels throughout. Under a
torch without DLPack's C exchange API the classes of `bridge` stand in for those of `_native`.
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
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from relive import locking
from relive.errors import SchemaError, explain
from relive.kernels import torch_ops

try:
    from relive.kernels import _native
except ImportError:  # installed without a compiler
    _native = None

if TYPE_CHECKING:
    from relive.kernels._native import Columns

if _native is not None:
    _native.set_torch(torch.Tensor, torch.nn.Parameter)
    # Arrays of every dtype, and of different axes and strides: read as add reads them, they must be what numpy says.
    _probes = [np.zeros((3, i + 2, 2), letter)[:, :, 0] for i, letter in enumerate("?bBhHiIlLqQfd")]
    _native.set_numpy(np.ndarray, [*_probes, np.zeros((), np.float32), *_probes[-1]])
    del _probes

_active = _native
_forced: Literal["torch", "triton"] | None = None

crc32: Callable[..., int] = getattr(_native, "crc32", zlib.crc32)
"""The checksum of bytes, after those whose checksum is the second argument: zlib's, by the fastest code there is."""

complete: Callable[[Callable[[], object]], None] = getattr(_native, "complete", locking.complete)
"""Make a change that an exception from a signal handler (Ctrl-C) cannot leave half-done: see `locking.complete`."""


def backend() -> Literal["native", "torch", "triton"]:
    """The kernels that work on CPU tensors at this moment: the C++ core, torch ops, or Triton's interpreter."""
    return _forced or ("torch" if _active is None else "native")


def native() -> Any:
    """The native module, or None when it is not installed or another backend is forced."""
    return _active


@contextmanager
def force(name: Literal["torch", "triton"]) -> Iterator[None]:
    """Run everything that is made and called inside with the kernels of one backend, for tests and comparisons.

    "torch" runs CPU tensors as on a device that has no native kernels. "triton" runs them by Triton's interpreter as on
    CUDA: nothing waits for a result, and what only the device knows is counted until `check()`. It needs
    TRITON_INTERPRET=1 in the environment of the process, or an active driver of Triton that takes CPU tensors, such as
    one that counts launches and runs nothing. A replay buffer keeps the backend that it was made with.
    """
    if name not in ("torch", "triton"):
        raise SchemaError(explain("kernels.force", '"torch" or "triton"', repr(name), "Pass one of them."))
    if name == "triton":
        _require_launches_on_the_host()
    global _active, _forced
    before = _active, _forced
    _active, _forced = None, name
    try:
        yield
    finally:
        _active, _forced = before


def _require_launches_on_the_host() -> None:
    if not _has_triton():
        remedy = "Install it: pip install 'relive[triton]'."
        raise RuntimeError(explain('kernels.force("triton")', "an installed Triton", "no module triton", remedy))
    try:
        _probe(torch.device("cpu"))
    except Exception as error:
        expected = "Triton's interpreter, or a driver that takes CPU tensors"
        remedy = (
            "Set the environment variable TRITON_INTERPRET=1 before Python starts: it is read when Triton is imported."
        )
        raise RuntimeError(explain('kernels.force("triton")', expected, _failure(error), remedy)) from error


def _probe(device: torch.device) -> None:
    from relive.kernels.triton.launching import probe  # noqa: PLC0415 (which needs Triton)

    probe(device)


def _failure(error: Exception) -> str:
    """The installed version of Triton, and the last line of an error of it."""
    version = getattr(sys.modules.get("triton"), "__version__", "that cannot be imported")
    lines = str(error).strip().splitlines() or ["no message"]
    return f"Triton {version} ({type(error).__name__}: {lines[-1]})"


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def runs_triton(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether Triton's kernels work on the memory of all these tensors."""
    if _forced is not None or not tensors or not tensors[0].is_cuda:
        return _forced == "triton" and all(tensor.is_cpu for tensor in tensors)
    return _serves(tensors[0].device) and all(tensor.is_cuda for tensor in tensors)


@cache
def _serves(device: torch.device) -> bool:
    """Whether Triton serves a GPU: AMD's, and NVIDIA's from Turing on, where a small kernel compiles and is launched.

    Asked once for each device. Where Triton is installed and fails, a warning says that torch ops serve instead.
    """
    if not _has_triton() or (torch.version.hip is None and torch.cuda.get_device_capability(device) < (7, 5)):
        return False
    try:
        _probe(device)
    except Exception as error:  # whatever Triton, its assembler or the compiler of its launcher raises
        remedy = "Torch ops serve instead, with more launches per call; install the Triton that comes with your torch."
        warnings.warn(explain("kernels", "Triton 3.4 or later that compiles", _failure(error), remedy), stacklevel=2)
        return False
    return True


def force_torch() -> AbstractContextManager[None]:
    """`force("torch")`: run everything inside with the torch kernels, as on a device that has no native ones."""
    return force("torch")


@contextmanager
def without_exchange() -> Iterator[None]:
    """Run everything inside as with a torch that lacks DLPack's C exchange API (before 2.10)."""
    if _native is None:
        yield
        return
    _native.set_exchange(False)
    try:
        yield
    finally:
        _native.set_exchange(True)


def serving(tensors: Sequence[torch.Tensor], frames: int = 1) -> Literal["native", "bridged", "triton", "torch"]:
    """The kernels that serve rows in these tensors, with stacks of so many frames."""
    if runs_triton(tensors):
        return "triton"
    if not runs_native(tensors) or frames > native().MAX_FRAMES:
        return "torch"
    return "native" if exchange() else "bridged"


def core() -> Any:
    """The classes of the native core, or those of the bridge to it."""
    if exchange():
        return _active
    from relive.kernels import bridge  # noqa: PLC0415 (which needs the native core)

    return bridge


def locks_processes() -> bool:
    """Whether there is a lock that several processes can take."""
    return hasattr(_active, "ProcessLock")


def lock_bytes() -> int:
    """How much memory such a lock takes."""
    return native().LOCK_BYTES


def process_lock(memory: torch.Tensor, is_new: bool, recover: Callable[[], None], seconds: float) -> Any:
    """A re-entrant lock in shared memory; `recover` is called when its last holder died."""
    return native().ProcessLock(buffer_of(memory), is_new, recover, seconds)


def guarded_lock(guard: Callable[[], object]) -> Any:
    """A re-entrant lock of threads. Whoever has taken it calls `guard` first, and has not taken it if that raises."""
    if _native is None:
        return locking.GuardedLock(guard)
    return _native.GuardedLock(threading.RLock(), guard)


def exchange() -> bool:
    """Whether the native core reads and makes torch tensors directly."""
    return _active is not None and _active.exchange()


def buffer_of(tensor: torch.Tensor | None) -> Any:
    """The object that the native core reads a CPU tensor through: the tensor, or numpy's view under an older torch."""
    if tensor is None or _native is None or _native.exchange():
        return tensor
    return tensor.numpy()


def columns(tensors: Sequence[torch.Tensor], optional: Sequence[bool], *, lead: int) -> Columns | None:
    """The native writer of rows into these tensors, or None where there is none."""
    if not runs_native(tensors):
        return None
    return native().Columns([buffer_of(t) for t in tensors], list(optional), lead)


def runs_native(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the native core can work on the memory of all these tensors."""
    if _active is None or not tensors or len(tensors) > _active.MAX_LEAVES:
        return False
    # numpy has no bfloat16: without the exchange API such columns go the torch way.
    exchange = _active.exchange()
    return all(t.is_cpu and t.ndim <= _active.MAX_AXES and (exchange or t.dtype != torch.bfloat16) for t in tensors)


def reads_natively(tensors: list[torch.Tensor]) -> bool:
    """Whether the native core reads these tensors as they are, and makes others like them."""
    return exchange() and native().reads(tensors)


def estimate(name: str, outputs: int, tensors: Sequence[torch.Tensor | None], settings: Sequence[float]) -> Any:
    """The estimator `name` on conformed tensors, in the float dtype that holds all of them, at least float32.

    The last three tensors are the flags: terminated, truncated and the mask.
    """
    values, flags = [tensor for tensor in tensors[:-3] if tensor is not None], tensors[-3:]
    dtype = reduce(torch.promote_types, (value.dtype for value in values), torch.float32)
    cast = [*(value.to(dtype) for value in values), *flags]
    if not torch.compiler.is_compiling() and _active is not None:
        result = _estimate_natively(name, outputs, cast, settings)
        if result is not None:
            return result
    return getattr(torch_ops, name)(*cast, *settings)


def _estimate_natively(
    name: str, outputs: int, tensors: Sequence[torch.Tensor | None], settings: Sequence[float]
) -> Any:
    core, like = native(), tensors[0]
    kernel = getattr(core, name)
    if like is None or not all(t is None or (type(t) is torch.Tensor and t.device.type == "cpu") for t in tensors):
        return None
    out = None
    if not core.exchange():
        out = tuple(torch.empty(like.shape, dtype=like.dtype, device="cpu") for _ in range(outputs))
    into = None if out is None else tuple(map(buffer_of, out))
    try:
        result = kernel(*map(buffer_of, tensors), *settings, into)
    except RuntimeError:  # of numpy(): tensors of torch.func have no memory
        return None
    if result is None:  # axes after time that are not one stride apart
        result = kernel(*(buffer_of(None if t is None else t.contiguous()) for t in tensors), *settings, into)
    if result is None or out is None:
        return result
    return out if outputs > 1 else out[0]
