"""Counter-based random numbers (Philox): a function of the key, a position, and the number of draws at that position.

A stream is int64 [1 + CELLS] on the device: the key, and a counter for every `CELL` adjacent positions. A program owns
whole cells: it reads their counters and increments them at the end. Programs are independent, and a captured graph
draws new numbers at every replay. Random bits are computed with integers only, so the interpreter and GPUs give the
same ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from relive.errors import verify
from relive.kernels.triton.launching import SIZES, launch, split_into_programs
from relive.rng import Randomness

if TYPE_CHECKING:
    from relive.storage.codec import SnapshotReader

CELL = tl.constexpr(16)
"""Number of adjacent positions that share a counter; a program draws for a multiple of it."""
CELLS = 2048
MAX_DRAWS = CELLS * CELL.value
"""Maximum number of positions per launch."""


@triton.jit
def draw_random_pair(key, call, position, attempt):
    """Draw two uniform non-negative int64 for each position [B].

    Another counter `call` [B] or another `attempt` gives other numbers.
    """
    low = (call & 0xFFFFFFFF).to(tl.uint32)
    high = ((call >> 32) & 0xFFFFFFFF).to(tl.uint32)
    a, b, c, d = tl.philox(key, position.to(tl.uint32), low, high, (position * 0 + attempt).to(tl.uint32))
    return _join_words(a, b), _join_words(c, d)


@triton.jit
def _join_words(a, b):
    return ((a.to(tl.uint64) << 31) ^ b.to(tl.uint64)).to(tl.int64) & 0x7FFFFFFFFFFFFFFF


@triton.jit
def load_draw_counts(stream, position, inside):
    """Load the number of previous draws at these positions [B]."""
    return tl.load(stream + 1 + position // CELL, inside, other=0)


@triton.jit
def increment_draw_counts(stream, position, call, inside):
    """Increment the counters of these positions, at the end of a program."""
    # All warps must have read the counters before any warp increments them.
    tl.debug_barrier()
    tl.store(stream + 1 + position // CELL, call + 1, inside & (position % CELL == 0))


@triton.jit(do_not_specialize=SIZES)
def uniform_kernel(stream, out, count: tl.int64, BLOCK: tl.constexpr):
    """Draw uniform float64 in [0, 1)."""
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = position < count
    call = load_draw_counts(stream, position, inside)
    bits, _ = draw_random_pair(tl.load(stream), call, position, 0)
    # The product is exact, because float64 represents 53 bits times a power of two.
    tl.store(out + position, (bits >> 10).to(tl.float64) * 1.1102230246251565e-16, inside)
    increment_draw_counts(stream, position, call, inside)


def draw_uniform(stream: torch.Tensor, count: int) -> torch.Tensor:
    """Draw uniform float64 in [0, 1)."""
    out = torch.empty(count, dtype=torch.float64, device=stream.device)
    for part in out.split(MAX_DRAWS):
        block, programs = split_draws_into_programs(len(part), 256)
        launch(uniform_kernel, stream, programs, stream, part, len(part), BLOCK=block)
    return out


def split_draws_into_programs(count: int, per_program: int) -> tuple[int, int]:
    """Return the number of positions per program, which are whole cells, and the number of programs."""
    block = max(split_into_programs(count, per_program)[0], CELL.value)
    return block, -(-count // block)


class DeviceStream(Randomness):
    """The random stream of a buffer on a device: Philox counters, keyed by the seed.

    The same seed gives the same draws on every device and under Triton's interpreter, except for shuffling, which uses
    torch's generator of the device.
    """

    def __init__(self, seed: int | None, device: torch.device) -> None:
        super().__init__(seed)
        self.device = device
        self.numbers = torch.zeros(1 + CELLS, dtype=torch.int64, device=device)
        """The key, and for each cell of positions the number of draws."""
        self._reset()

    def _reset(self) -> None:
        self.numbers.zero_()
        self.numbers[0] = self.draw_seed()

    def uniform(self, count: int, device: torch.device) -> torch.Tensor:
        if device != self.device:
            return super().uniform(count, device)
        return draw_uniform(self.numbers, count)

    def state(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        values, arrays = super().state()
        return values, {**arrays, "philox": self.numbers}

    def load_state(self, saved: SnapshotReader) -> None:
        """Restore a saved stream, also from another device. Reset this stream if no Philox counters were saved."""
        super().load_state(saved)
        if saved.find_spec("philox") is None:
            self._reset()
            return
        # Older checkpoints have one counter for all positions.
        has_one_counter = saved.find_spec("philox") == (torch.int64, (2,))
        numbers = saved.read_array("philox", (2 if has_one_counter else 1 + CELLS,), torch.int64)
        if bool((numbers < 0).any()):
            raise saved.array_node("philox", numbers.tolist()).error("a key and numbers of draws, all at least 0")
        self.numbers[0].copy_(numbers[0])
        self.numbers[1:].copy_(numbers[1:])

    def snapshot(self) -> Any:
        return super().snapshot(), self.numbers.clone()

    def restore(self, snapshot: Any) -> None:
        host, numbers = snapshot
        super().restore(host)
        self.numbers.copy_(numbers)

    def check(self) -> None:
        super().check()
        lowest = int(self.numbers.min())
        verify(lowest >= 0, "generator", "a key and numbers of draws, all at least 0", lowest)
