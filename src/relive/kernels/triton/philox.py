"""Counter-based random numbers: what is drawn depends on the key, a place, and how often that place was drawn at.

A stream is int64 [1 + CELLS] on the device: the key, and a counter for every `CELL` neighbouring places. A program has
whole cells to itself: it reads their counters, and writes them one higher when it is done. No program depends on
another one, so nothing can be left over that would make draws repeat, and the captured graph of a call draws anew
whenever it is replayed. Only integers are computed: the same stream gives the same numbers under the interpreter and on
a GPU.
"""

# What is jitted is Triton's language, which pyright takes for Python.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportInvalidTypeForm=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from relive.kernels.triton.launching import OPTIONS, SIZES, launch
from relive.kernels.triton.variants import Variant
from relive.kernels.triton.words import blocks

CELL = tl.constexpr(16)
"""Places that share a counter. A program draws for a multiple of them."""
CELLS = 2048
MOST_DRAWS = CELLS * CELL.value
"""Places of one launch."""


@triton.jit
def random_pair(key, call, place, turn):
    """Two uniform int64 of at least 0 for every place [B] and its counter [B]; a place may have many turns."""
    low = (call & 0xFFFFFFFF).to(tl.uint32)
    high = ((call >> 32) & 0xFFFFFFFF).to(tl.uint32)
    a, b, c, d = tl.philox(key, place.to(tl.uint32), low, high, (place * 0 + turn).to(tl.uint32))
    return _joined(a, b), _joined(c, d)


@triton.jit
def _joined(a, b):
    return ((a.to(tl.uint64) << 31) ^ b.to(tl.uint64)).to(tl.int64) & 0x7FFFFFFFFFFFFFFF


@triton.jit
def load_calls(stream, place, inside):
    """How often there were draws at these places [B]."""
    return tl.load(stream + 1 + place // CELL, inside, other=0)


@triton.jit
def count_calls(stream, place, call, inside):
    """Every program does this last, for the places that it has drawn at."""
    tl.debug_barrier()  # each warp has read the counters
    tl.store(stream + 1 + place // CELL, call + 1, inside & (place % CELL == 0))


@triton.jit(do_not_specialize=SIZES)
def uniform_kernel(stream, out, count: tl.int64, BLOCK: tl.constexpr):
    """Uniform float64 in [0, 1)."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    call = load_calls(stream, place, inside)
    bits, _ = random_pair(tl.load(stream), call, place, 0)
    # 53 bits and a power of two: nothing is rounded.
    tl.store(out + place, (bits >> 10).to(tl.float64) * 1.1102230246251565e-16, inside)
    count_calls(stream, place, call, inside)


def uniform_numbers(stream: torch.Tensor, count: int) -> torch.Tensor:
    """Random float64 in [0, 1)."""
    out = torch.empty(count, dtype=torch.float64, device=stream.device)
    for part in out.split(MOST_DRAWS):
        block, programs = draw_blocks(len(part), 256)
        launch(uniform_kernel, stream, programs)(stream, part, len(part), BLOCK=block, **OPTIONS)
    return out


def draw_blocks(count: int, most: int) -> tuple[int, int]:
    """`blocks` that consist of whole cells."""
    block = max(blocks(count, most)[0], CELL.value)
    return block, -(-count // block)


_TYPES = {"stream": "*i64", "out": "*fp64", "count": "i64"}
VARIANTS = (Variant(uniform_kernel, "256 numbers", _TYPES, {"BLOCK": 256}, OPTIONS, ("stream", "out")),)
