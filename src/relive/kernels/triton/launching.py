"""Launching kernels on the device of their tensors, and the small kernel that shows whether Triton works there."""

# What is jitted is Triton's language, which pyright takes for Python.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportInvalidTypeForm=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from relive.kernels.triton.variants import Variant
from relive.kernels.triton.words import INTERPRETED, Frames, Leaf

OPTIONS = {"enable_fp_fusion": False}


def launch(kernel: Any, near: torch.Tensor, *grid: int) -> Callable[..., None]:
    """A kernel on this grid, launched on the device of a tensor and on that device's current stream.

    Triton by itself launches on the device that is current in the calling thread.
    """

    def run(*arguments: Any, **options: Any) -> None:
        with torch.cuda.device_of(near):
            kernel[grid](*arguments, **options)

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
