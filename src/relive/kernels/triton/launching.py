"""Launching kernels on the device of their tensors, and the small kernel that shows whether Triton works there."""

# What is jitted is Triton's language, which pyright takes for Python.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportInvalidTypeForm=false

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from relive.kernels.triton.variants import Variant
from relive.kernels.triton.words import INTERPRETED, Frames, Leaf, as_words

OPTIONS = {"enable_fp_fusion": False}
SIZES = (
    "slots", "num_envs", "size", "alive", "writers", "steps", "rows", "count", "num_leaves", "root", "levels", "start",
    "length", "n", "before", "after",
)  # fmt: skip
"""Integers of kernels, for `do_not_specialize`: another size compiles nothing."""


class Launch:
    """A kernel with its constants, bound to the memory and the sizes that it always works with.

    The parameters of a kernel are in this order: what every call passes, `own`, constants. Addresses are passed as
    integers, so that a call costs little more than the launch. A kernel is compiled once for addresses that are all
    divisible by 16, and once for any others; the dtype of an argument is the same in every call. Integers that a call
    passes should be `SIZES` and annotated: others compile again for 1, for multiples of 16 and beyond 32 bits.
    """

    def __init__(
        self, kernel: Any, own: tuple[Any, ...], constants: Mapping[str, Any],
        words: tuple[tuple[torch.Tensor, ...], ...] = (),
    ) -> None:  # fmt: skip
        """`words`: the first arguments of a call are tuples of tensors, seen as words like these."""
        self._kernel, self._own, self._constants, self._words = kernel, own, constants, words
        names = kernel.arg_names
        self._rest = *map(_address, own), *(constants[name] for name in names if name in constants)
        self._compiled: dict[Any, Any] = {}
        self._specialised: list[int] = []
        """Positions of the integer arguments that the kernel is compiled for."""

    def __call__(self, near: torch.Tensor, grid: tuple[int, int, int], *arguments: Any) -> None:
        """Launch on the device of `near` and on that device's current stream.

        Triton by itself launches on the device that is current in the calling thread.
        """
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
        seen = (tuple(map(as_words, each, like)) for each, like in zip(arguments, self._words, strict=False))
        return *seen, *arguments[len(self._words) :]

    def _compile(self, aligned: bool, arguments: tuple[Any, ...]) -> Any:
        """The compiled kernel, for what this call passes."""
        parameters = self._kernel.params
        self._specialised = [
            i for i, argument in enumerate(arguments) if type(argument) is int and not parameters[i].do_not_specialize
        ]
        given = [_pointers(argument, 16 if aligned else 1) for argument in self._as_words(arguments)]
        return self._kernel.warmup(*given, *map(_pointers, self._own), grid=(1, 1, 1), **self._constants)


@dataclass(frozen=True)
class _Pointer:
    """Stands for a tensor when Triton compiles a kernel."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address


def _pointers(argument: Any, address: int | None = None) -> Any:
    """An argument with pointers for its tensors, to `address` or to where they are."""
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
    """A kernel on this grid, for calls whose memory changes: `launch(kernel, near, programs)(*arguments, **constants)`.

    It is bound at its first call with these constants.
    """
    whole = *grid, *(1, 1)[: 3 - len(grid)]

    def run(*arguments: Any, **constants: Any) -> None:
        key = kernel, near.device, *constants.items()
        bound = _launches.get(key)
        if bound is None:
            bound = _launches[key] = Launch(kernel, (), constants)
        bound(near, whole, *arguments)

    return run


@triton.jit
def _copy_row(source, out, FORM: tl.constexpr):
    column = tl.arange(0, FORM[1])
    words = tl.load(source + column, column < FORM[0], other=0)
    tl.store(out + column, tl.zeros(column.shape, words.dtype) + words, column < FORM[0])


@triton.jit
def probe_kernel(sources, outs, FORMS: tl.constexpr):
    """Copy one row of each leaf, by the parts of the language that all kernels need and old versions of Triton lack."""
    for i in tl.static_range(len(FORMS)):
        _copy_row(sources[i], outs[i], tl.constexpr(FORMS[i]))


def probe(device: torch.device) -> None:
    """Compile and launch a small kernel on a device; raise what Triton raises there."""
    if INTERPRETED and isinstance(tl.standard.zeros, triton.JITFunction):  # its own functions compile, ours do not
        raise RuntimeError("TRITON_INTERPRET was set after Triton had been imported")
    leaf = Leaf.of(torch.zeros(1, 1, 12, device=device), Frames(), 16)
    launch(probe_kernel, leaf.words, 1)((leaf.words,), (torch.empty_like(leaf.words),), FORMS=(leaf.form,), **OPTIONS)


_TYPES = {"sources": ("*i32",), "outs": ("*i32",)}
VARIANTS = (Variant(probe_kernel, "12 words", _TYPES, {"FORMS": ((12, 16, 1, 1, False),)}, OPTIONS, tuple(_TYPES)),)
