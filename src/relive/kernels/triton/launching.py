"""Launches of kernels on the device of their tensors, and a small kernel that tests whether Triton works there."""

# Jitted functions are Triton's language, which pyright takes for Python.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportInvalidTypeForm=false

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from relive.kernels.triton.words import INTERPRETED, Frames, Leaf, as_words

OPTIONS = {"enable_fp_fusion": False}
SIZES = (
    "slots", "num_envs", "size", "alive", "writers", "steps", "rows", "count", "num_leaves", "root", "levels", "start",
    "length", "n", "before", "after",
)  # fmt: skip
"""Integer parameters of kernels for `do_not_specialize`: a new size must not trigger compilation."""


class Launch:
    """A kernel bound to its constants and to fixed arguments.

    Parameters of a kernel are ordered: arguments of each call, `own` (fixed arguments), constants. Addresses are passed
    as integers to keep the host time of a call low. A kernel is compiled once for addresses that are all divisible by
    16, and once for others. The dtype of an argument must be the same in every call. Integer arguments of a call should
    be in `SIZES` and annotated: others trigger compilation for 1, for multiples of 16 and beyond 32 bits.
    """

    def __init__(
        self, kernel: Any, own: tuple[Any, ...], constants: Mapping[str, Any],
        words: tuple[tuple[torch.Tensor, ...], ...] = (),
    ) -> None:  # fmt: skip
        """`words`: the first arguments of a call are tuples of tensors, viewed as words of these dtypes."""
        self._kernel, self._own, self._constants, self._words = kernel, own, constants, words
        names = kernel.arg_names
        self._rest = *map(_address, own), *(constants[name] for name in names if name in constants)
        self._compiled: dict[Any, Any] = {}
        self._specialised: list[int] = []
        """Positions of integer arguments on whose values the compilation depends."""

    def __call__(self, near: torch.Tensor, grid: tuple[int, int, int], *arguments: Any) -> None:
        """Launch on the device of `near` and its current stream; Triton alone uses the thread's current device."""
        if INTERPRETED:
            self._kernel[grid](*self._as_words(arguments), *self._own, **self._constants)
            return
        plain, low = [], 0
        for argument in arguments:
            if type(argument) is tuple:
                addresses = tuple([tensor.data_ptr() for tensor in argument])
                for address in addresses:
                    low |= address
                plain.append(addresses)
            elif type(argument) is int or type(argument) is float:
                plain.append(argument)
            else:
                address = argument.data_ptr()
                low |= address
                plain.append(address)
        key: Any = low % 16 == 0
        if self._specialised:
            key = key, *[(plain[i] == 1, plain[i] % 16 == 0, plain[i] >> 31 == 0) for i in self._specialised]
        with torch.cuda.device_of(near):
            compiled = self._compiled.get(key)
            if compiled is None:
                compiled = self._compile(low % 16 == 0, arguments)
                self._compiled[key] = compiled
            compiled[grid](*plain, *self._rest)

    def _as_words(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        word_views = (tuple(map(as_words, each, like)) for each, like in zip(arguments, self._words, strict=False))
        return *word_views, *arguments[len(self._words) :]

    def _compile(self, aligned: bool, arguments: tuple[Any, ...]) -> Any:
        """Compile the kernel for the arguments of a call."""
        parameters = self._kernel.params
        self._specialised = [
            i for i, argument in enumerate(arguments) if type(argument) is int and not parameters[i].do_not_specialize
        ]
        pointers = [_pointers(argument, 16 if aligned else 1) for argument in self._as_words(arguments)]
        return self._kernel.warmup(*pointers, *map(_pointers, self._own), grid=(1, 1, 1), **self._constants)


@dataclass(frozen=True)
class _Pointer:
    """Placeholder for a tensor during compilation."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address


def _pointers(argument: Any, address: int | None = None) -> Any:
    """Replace the tensors of an argument by pointers, to `address` or to their memory."""
    if type(argument) is tuple:
        return tuple(_pointers(each, address) for each in argument)
    if not isinstance(argument, torch.Tensor):
        return argument
    return _Pointer(argument.dtype, address or argument.data_ptr())


def _address(argument: Any) -> Any:
    if type(argument) is tuple:
        return tuple(map(_address, argument))
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument


_launches: dict[Any, Launch] = {}


def launch(kernel: Any, near: torch.Tensor, *grid: int) -> Callable[..., None]:
    """Launch a kernel without fixed arguments: `launch(kernel, near, programs)(*arguments, **constants)`.

    The `Launch` is cached per kernel, device and constants.
    """
    full_grid = *grid, *(1, 1)[: 3 - len(grid)]

    def run(*arguments: Any, **constants: Any) -> None:
        key = kernel, near.device, *constants.items()
        bound = _launches.get(key)
        if bound is None:
            bound = _launches[key] = Launch(kernel, (), constants)
        bound(near, full_grid, *arguments)

    return run


@triton.jit
def _copy_row(source, out, FORM: tl.constexpr):
    column = tl.arange(0, FORM[1])
    words = tl.load(source + column, column < FORM[0], other=0)
    tl.store(out + column, tl.zeros(column.shape, words.dtype) + words, column < FORM[0])


@triton.jit
def probe_kernel(sources, outs, FORMS: tl.constexpr):
    """Copy one row of each leaf, using the language features that old versions of Triton lack."""
    for i in tl.static_range(len(FORMS)):
        _copy_row(sources[i], outs[i], tl.constexpr(FORMS[i]))


def probe(device: torch.device) -> None:
    """Compile and launch a small kernel on a device. Raises the errors of Triton."""
    if INTERPRETED and isinstance(
        tl.standard.zeros, triton.JITFunction
    ):  # Triton's own functions are then not interpreted
        raise RuntimeError("TRITON_INTERPRET was set after Triton had been imported")
    leaf = Leaf.of(torch.zeros(1, 1, 12, device=device), Frames(), 16)
    launch(probe_kernel, leaf.words, 1)((leaf.words,), (torch.empty_like(leaf.words),), FORMS=(leaf.form,), **OPTIONS)


class Variant(NamedTuple):
    """One compiled form of a kernel: argument types and values of constants."""

    kernel: Any
    """The function under `@triton.jit`."""
    name: str
    """Description of this form, for the table in the docs."""
    types: Mapping[str, Any]
    """Argument types in Triton's notation ("*fp32", "i64"); a tuple of types for a tuple."""
    constants: Mapping[str, Any]
    """Values of the `tl.constexpr` parameters."""
    options: Mapping[str, Any] = {}
    """Launch options: `num_warps`, `enable_fp_fusion`."""
    aligned: tuple[str, ...] = ()
    """Names of arguments whose addresses are divisible by 16."""


_TYPES = {"sources": ("*i32",), "outs": ("*i32",)}
VARIANTS = (Variant(probe_kernel, "12 words", _TYPES, {"FORMS": ((12, 16, 1, 1, False),)}, OPTIONS, tuple(_TYPES)),)
