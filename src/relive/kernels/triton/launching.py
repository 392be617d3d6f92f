"""Launches of kernels on the device of their tensors, and a small kernel that tests whether Triton works there."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs

INTERPRETED: bool = bool(knobs.runtime.interpret)
"""Whether Triton's interpreter runs the kernels. Tiles are large then: it takes time per operation, not per element."""
MAX_INTERPRETED = 1024
"""Maximum number of items per program under the interpreter."""
OPTIONS = {"enable_fp_fusion": False}
"""Options of every launch. Products are rounded before they are added, as in the native core."""
SIZES = (
    "slots", "num_envs", "size", "num_sampleable", "writers", "steps", "rows", "count", "num_leaves", "root", "levels",
    "start", "length", "n", "before", "after",
)  # fmt: skip
"""Names of integer parameters for `do_not_specialize`: a new size must not trigger compilation of a kernel."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


class BoundKernel:
    """A kernel bound to fixed arguments.

    The parameters of a kernel are the arguments of each call, then the fixed arguments, then the constants. Addresses
    are passed as integers to keep the host time of a call low. A kernel is compiled for each combination of constants,
    once for addresses that are all divisible by 16, and once for other addresses. The dtype of an argument must be the
    same in every call. The names of integer parameters must be in `SIZES`, and the kernel must declare their types.
    """

    def __init__(
        self, kernel: Any, fixed: tuple[Any, ...] = (), words: tuple[tuple[torch.Tensor, ...], ...] = (),
        **constants: Any,
    ) -> None:  # fmt: skip
        """Bind a kernel. The i-th argument of a call is a tuple of tensors, viewed in the dtypes of `words[i]`.

        `constants` are constants of the kernel and options of its launches that do not vary between calls.
        """
        self._kernel, self._fixed, self._words, self._constants = kernel, fixed, words, OPTIONS | constants
        self._fixed_addresses = tuple(map(_to_addresses, fixed))
        self._compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
        """Compiled kernels and their last arguments, by whether addresses are aligned and the constants of a call."""

    def __call__(
        self, device_tensor: torch.Tensor, grid: tuple[int, int, int], *arguments: Any, **constants: Any
    ) -> None:
        """Launch on the device of `device_tensor`, on its current stream. Triton alone would use the current device.

        `constants` are the other constants of the kernel, in the same order in every call.
        """
        if INTERPRETED:
            self._kernel[grid](*self.view_arguments_as_words(arguments), *self._fixed, **self._constants, **constants)
            return
        plain, low_bits = [], 0
        for argument in arguments:
            if type(argument) is tuple:
                addresses = tuple([tensor.data_ptr() for tensor in argument])
                for address in addresses:
                    low_bits |= address
                plain.append(addresses)
            elif type(argument) is int or type(argument) is float:
                plain.append(argument)
            else:
                address = argument.data_ptr()
                low_bits |= address
                plain.append(address)
        key = low_bits % 16 == 0, *constants.values()
        with torch.cuda.device_of(device_tensor):
            compiled = self._compiled.get(key)
            if compiled is None:
                compiled = self._compiled[key] = self._compile(low_bits % 16 == 0, arguments, constants)
            kernel, rest = compiled
            kernel[grid](*plain, *rest)

    def view_arguments_as_words(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of a call with tensors viewed as words."""
        views = (tuple(map(as_words, tensors, like)) for tensors, like in zip(arguments, self._words, strict=False))
        return *views, *arguments[len(self._words) :]

    def _compile(
        self, is_aligned: bool, arguments: tuple[Any, ...], constants: dict[str, Any]
    ) -> tuple[Any, tuple[Any, ...]]:
        """Compile the kernel for the arguments of a call; return it with its fixed arguments and constants."""
        constants = self._constants | constants
        pointers = [
            _to_pointers(argument, 16 if is_aligned else 1) for argument in self.view_arguments_as_words(arguments)
        ]
        kernel = self._kernel.warmup(*pointers, *map(_to_pointers, self._fixed), grid=(1, 1, 1), **constants)
        values = (constants[name] for name in self._kernel.arg_names if name in constants)
        return kernel, (*self._fixed_addresses, *values)


@dataclass(frozen=True)
class _Pointer:
    """Placeholder for a tensor during compilation."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address


def _to_pointers(argument: Any, address: int | None = None) -> Any:
    """Replace the tensors of an argument by pointers, to `address` or to their memory."""
    if type(argument) is tuple:
        return tuple(_to_pointers(item, address) for item in argument)
    if not isinstance(argument, torch.Tensor):
        return argument
    return _Pointer(argument.dtype, address or argument.data_ptr())


def _to_addresses(argument: Any) -> Any:
    """Replace the tensors of an argument by their addresses."""
    if type(argument) is tuple:
        return tuple(map(_to_addresses, argument))
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument


@cache
def _bind_no_arguments(kernel: Any, device: torch.device) -> BoundKernel:
    return BoundKernel(kernel)


def launch(kernel: Any, device_tensor: torch.Tensor, programs: int, *arguments: Any, **constants: Any) -> None:
    """Launch a kernel that has no fixed arguments."""
    _bind_no_arguments(kernel, device_tensor.device)(device_tensor, (programs, 1, 1), *arguments, **constants)


def as_words(tensor: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """View a contiguous tensor as flat integers of its item size, or of the dtype of `like`."""
    # Axes of length one may have any stride, with which `view` would fail to change the dtype. as_strided flattens
    # them.
    flat = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    word = _INTEGERS[tensor.element_size()] if like is None else like.dtype
    return (torch.view_as_real(flat).view(-1) if tensor.is_complex() else flat).view(word)


def split_into_programs(count: int, per_program: int) -> tuple[int, int]:
    """Return the number of items per program and the number of programs for `count` items.

    On a GPU every program takes `per_program` items, because every other number would need another compilation.
    """
    block = min(triton.next_power_of_2(max(count, 1)), MAX_INTERPRETED) if INTERPRETED else per_program
    return block, -(-count // block)


@triton.jit
def _copy_row(source, out, LAYOUT: tl.constexpr):
    column = tl.arange(0, LAYOUT[1])
    words = tl.load(source + column, column < LAYOUT[0], other=0)
    tl.store(out + column, tl.zeros(column.shape, words.dtype) + words, column < LAYOUT[0])


@triton.jit
def probe_kernel(sources, outs, LAYOUTS: tl.constexpr):
    """Copy one row of each leaf. The code uses language features that old versions of Triton lack."""
    for i in tl.static_range(len(LAYOUTS)):
        _copy_row(sources[i], outs[i], tl.constexpr(LAYOUTS[i]))


def launch_probe(device: torch.device) -> None:
    """Compile and launch a small kernel on a device. Raises the errors of Triton."""
    # If TRITON_INTERPRET was set after Triton was imported, Triton's own functions are compiled instead of interpreted.
    if INTERPRETED and isinstance(tl.standard.zeros, triton.JITFunction):
        raise RuntimeError("TRITON_INTERPRET was set after Triton had been imported")
    words = torch.zeros(12, dtype=torch.int32, device=device)
    launch(probe_kernel, words, 1, (words,), (torch.empty_like(words),), LAYOUTS=((12, 16),))
