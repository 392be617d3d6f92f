"""Counter-based random numbers: what is drawn depends on the key, the number of the call and the place in it.

A stream is int64 [3] on the device: the key, the number of the coming call, and how many programs of this call are
done. The last of them counts the call, so that the captured graph of a call draws anew whenever it is replayed. Only
integers are computed: the same stream gives the same numbers under the interpreter and on a GPU.
"""

# What is jitted is Triton's language, which pyright takes for Python.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportInvalidTypeForm=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from relive.kernels.triton.launching import launch
from relive.kernels.triton.variants import Variant
from relive.kernels.triton.words import blocks

STREAM = 3
"""How many numbers a stream has."""


@triton.jit
def random_pair(key, call, place, turn):
    """Two uniform int64 of at least 0 for every place [B] of a call; a place may have many turns."""
    low = (call & 0xFFFFFFFF).to(tl.uint32)
    high = ((call >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zero = (place * 0).to(tl.uint32)
    a, b, c, d = tl.philox(key, place.to(tl.uint32), zero + low, zero + high, zero + turn.to(tl.uint32))
    return _joined(a, b), _joined(c, d)


@triton.jit
def _joined(a, b):
    return ((a.to(tl.uint64) << 31) ^ b.to(tl.uint64)).to(tl.int64) & 0x7FFFFFFFFFFFFFFF


@triton.jit
def count_call(stream, call):
    """Every program of a call does this last; the call is over when all have."""
    tl.debug_barrier()  # each warp has read the number of the call
    done = tl.atomic_add(stream + 2, tl.full((), 1, tl.int64))
    if done == tl.num_programs(0) - 1:
        tl.store(stream + 2, tl.full((), 0, tl.int64))
        tl.store(stream + 1, call + 1)


@triton.jit
def uniform_kernel(stream, out, count, BLOCK: tl.constexpr):
    """Uniform float64 in [0, 1)."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    key, call = tl.load(stream), tl.load(stream + 1)
    bits, _ = random_pair(key, call, place, place * 0)
    # 53 bits and a power of two: nothing is rounded.
    tl.store(out + place, (bits >> 10).to(tl.float64) * 1.1102230246251565e-16, place < count)
    count_call(stream, call)


def uniform_numbers(stream: torch.Tensor, count: int) -> torch.Tensor:
    """So many float64 in [0, 1)."""
    out = torch.empty(count, dtype=torch.float64, device=stream.device)
    block, programs = blocks(count, 256)
    launch(uniform_kernel, stream, programs)(stream, out, count, BLOCK=block, enable_fp_fusion=False)
    return out


_TYPES = {"stream": "*i64", "out": "*fp64", "count": "i32"}
VARIANTS = (
    Variant(uniform_kernel, "256 numbers", _TYPES, {"BLOCK": 256}, {"enable_fp_fusion": False}, ("stream", "out")),
)
