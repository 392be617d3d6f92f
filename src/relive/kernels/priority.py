"""Priority trees: sampling of leaves in proportion to their priorities."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

import torch

from relive import kernels
from relive.rng import Randomness
from relive.storage import Allocator, LocalAllocator


class RingTensors(NamedTuple):
    """Tensors of a ring that map ids to rows: see `replay.ring.Ring`."""

    kind: torch.Tensor
    head: torch.Tensor
    is_open: torch.Tensor
    alive: int


class PriorityTree(Protocol):
    """Leaves with priorities, initially zero; a leaf is drawn with probability priority / total.

    Leaves are int64 [K]. Priorities are float64 and stored exactly; the caller ensures that they are finite and not
    negative. The whole range from 5e-324 to 1.8e308 is supported: sums are scaled and cannot overflow. A leaf below
    about 1e-16 of the total may never be drawn.

    A leaf outside the tree raises an IndexError before any change, but only on the CPU: on other devices the check
    would synchronise, and the caller ensures valid leaves.
    """

    num_leaves: int
    keeps_largest: bool
    """Whether the tree checks priorities itself and tracks the largest: see `triton.priority_tree.TritonTree`."""

    def set(self, leaves: torch.Tensor, priorities: torch.Tensor | float) -> None:
        """Set priorities [K], or one number, for `leaves` [K]. The last value wins if a leaf repeats."""
        ...

    def get(self, leaves: torch.Tensor) -> torch.Tensor:
        """Return the priorities of `leaves`: float64 [K]."""
        ...

    def total(self) -> torch.Tensor | float:
        """Return the sum of all priorities; infinite if it exceeds float64, which does not affect draws."""
        ...

    def smallest(self) -> torch.Tensor | float:
        """Return the smallest positive priority; infinity if all are zero."""
        ...

    def draw(self, count: int, random: Randomness) -> torch.Tensor | None:
        """Draw leaves [count] of positive priority, the i-th from the i-th of `count` equal slices of the total.

        Returns None if all priorities are zero, but only on the CPU: on other devices the check would synchronise, and
        arbitrary leaves are drawn. Check `total()` first where that can happen.
        """
        ...

    def draw_weighted(
        self, count: int, random: Randomness, beta: float, by_smallest: bool, weights: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Draw with weights (smallest / priority)^beta, float32 [count] in (0, 1].

        The smallest priority is that of all leaves with `by_smallest`, otherwise that of the drawn leaves. Weights are
        written to `weights` if passed.
        """
        ...

    def update(
        self, leaves: torch.Tensor, priorities: torch.Tensor, alpha: float, eps: float, numbers: Any
    ) -> tuple[int, int] | None:
        """Check priorities and set leaves to (priority + eps)^alpha; leaves of -1 are skipped.

        Returns (position of the first invalid priority or -1, number of skipped leaves). Nothing changes if a priority
        is invalid. Raises `numbers[0]` to the largest priority. Returns None, without any change, if unsupported.
        """
        ...

    def leaves_view(self) -> torch.Tensor:
        """Return the priorities of all leaves [num_leaves] as a view. Call `rebuild()` after writing to it."""
        ...

    def rebuild(self) -> None:
        """Recompute all sums from the leaves."""
        ...

    def check(self) -> float:
        """Return the largest relative error of a sum; infinity if a stored minimum is wrong."""
        ...


def priority_tree(num_leaves: int, device: torch.device, allocator: Allocator | None = None) -> PriorityTree:
    """Make a tree of `num_leaves` zero priorities, or restore the tree stored in `allocator`."""
    if device.type == "cpu" and kernels.native() is not None:
        return NativeTree(num_leaves, LocalAllocator(device) if allocator is None else allocator)
    return _TorchTree(num_leaves, device)


class NativeTree:
    """The tree of the native core, with fused calls for samplers (`update`, `draw_weighted`, `mark`)."""

    keeps_largest = False

    def __init__(self, num_leaves: int, allocator: Allocator) -> None:
        native = kernels.core().PriorityTree
        self.num_leaves = num_leaves
        sizes = zip(("leaves", "sums", "least", "summary"), native.sizes(num_leaves), strict=True)
        memory = tuple(allocator.allocate(f"tree.{name}", (size,), torch.float64) for name, size in sizes)
        self._leaves = memory[0]
        self._tree = native(memory, num_leaves)
        self.total = self._tree.total
        self.smallest = self._tree.smallest
        self.rebuild = self._tree.rebuild
        self.check = self._tree.deviation
        self.update = self._tree.update
        self.mark = self._tree.mark

    def set(self, leaves: torch.Tensor, priorities: torch.Tensor | float) -> None:
        if self._tree.set(leaves, priorities):
            return
        values = priorities.contiguous() if isinstance(priorities, torch.Tensor) else float(priorities)
        if not self._tree.set(leaves.contiguous(), values):
            raise ValueError(f"set: expected int64 [K] and float64 [K] or a float, got {leaves!r} and {priorities!r}.")

    def get(self, leaves: torch.Tensor) -> torch.Tensor:
        return self._tree.get(leaves.contiguous())

    def draw(self, count: int, random: Randomness) -> torch.Tensor | None:
        return self._tree.draw(count, random.capsule)

    def draw_weighted(
        self, count: int, random: Randomness, beta: float, by_smallest: bool, weights: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        return _copy_weights(self._tree.draw_weighted(count, random.capsule, beta, by_smallest), weights)

    def leaves_view(self) -> torch.Tensor:
        return self._leaves[: self.num_leaves]


def _copy_weights(
    draw: tuple[torch.Tensor, torch.Tensor] | None, out: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Copy the weights of a draw into `out`, unless it is None."""
    if draw is None or out is None:
        return draw
    with torch.inference_mode():  # `out` may be an inference tensor
        return draw[0], out.copy_(draw[1])


def importance_weights(priorities: torch.Tensor, smallest: torch.Tensor | float, beta: float) -> torch.Tensor:
    """Return (smallest / priority)^beta, float32 [K] in (0, 1]."""
    # `smallest` as a tensor: torch would multiply a number with a reciprocal, which is infinite for denormals.
    smallest = torch.as_tensor(smallest, dtype=torch.float64, device=priorities.device)
    # Underflow becomes the smallest normal float32: a weight of zero would drop the row.
    out = torch.empty(priorities.shape, dtype=torch.float32, device=priorities.device)
    return torch.pow(smallest / priorities, beta, out=out).clamp_(min=torch.finfo(torch.float32).tiny)


# Factors of leaves in sums. The normal scale leaves room for 2^64 leaves of any size. If a total is below _TINY_TOTAL
# in it, all leaves fit into the tiny scale, in which denormal leaves keep their digits.
_NORMAL, _TINY = 2.0**-64, 2.0**512
_TINY_TOTAL = 2.0**-400


class _TorchTree:
    """A tree of two levels: leaves, and a sum per block of leaves in both scales. The device chooses the scale."""

    keeps_largest = False

    def __init__(self, num_leaves: int, device: torch.device) -> None:
        # A draw scans the sums of all blocks once, and one block per drawn leaf.
        self._size = 1 << max(6, num_leaves.bit_length() // 2 - 4)
        num_blocks = -(-num_leaves // self._size)
        self.num_leaves = num_leaves
        self._is_cpu = device.type == "cpu"  # other devices are not checked: it would synchronise
        self._blocks = torch.zeros(num_blocks, self._size, dtype=torch.float64, device=device)
        self._leaves = self._blocks.view(-1)
        self._rows = self._blocks.unsqueeze(1)
        self._sums = torch.zeros(num_blocks, 2, dtype=torch.float64, device=device)
        self._normal, self._tiny = self._sums.unbind(1)
        # Scales as a tensor: Python numbers in mixed operations may pass through float32.
        self._scales = torch.tensor([[_NORMAL], [_TINY]], dtype=torch.float64, device=device)
        self._running = _RunningSums(num_blocks, self._scales)

    def set(self, leaves: torch.Tensor, priorities: torch.Tensor | float) -> None:
        self._require_range(leaves)
        if isinstance(priorities, torch.Tensor):
            self._leaves.scatter_(0, leaves, _repeat_last_values(leaves, priorities))
        else:
            self._leaves.scatter_(0, leaves, priorities)
        if len(leaves) >= len(self._blocks):
            self.rebuild()
        else:
            self._recompute_sums(leaves // self._size)

    def get(self, leaves: torch.Tensor) -> torch.Tensor:
        self._require_range(leaves)
        return self._leaves.index_select(0, leaves)

    def total(self) -> torch.Tensor:
        normal, tiny = self._sums.sum(0)
        return torch.where(normal >= _TINY_TOTAL, normal / self._scales[0, 0], tiny / self._scales[1, 0])

    def smallest(self) -> torch.Tensor:
        # A pass over all leaves takes two launches; block minima would cost more in every update.
        return torch.where(self._leaves > 0, self._leaves, math.inf).amin()

    def draw(self, count: int, random: Randomness) -> torch.Tensor | None:
        running = self._running
        running.compute(self._sums)
        if self._is_cpu and not running.total.numpy() > 0:
            return None
        # In (0, total]: the first block with a running sum of at least a point is not empty.
        points = random.slices(count, self._leaves.device) * running.total
        block = torch.searchsorted(running.ends, points)
        points -= running.starts.index_select(0, block)
        leaf = _find_first_reaching(self._blocks.index_select(0, block).mul_(running.scale), points)
        return leaf.add_(block, alpha=self._size)

    def draw_weighted(
        self, count: int, random: Randomness, beta: float, by_smallest: bool, weights: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        leaves = self.draw(count, random)
        if leaves is None:
            return None
        priorities = self._leaves.index_select(0, leaves)
        smallest = self.smallest() if by_smallest else priorities.min()
        return _copy_weights((leaves, importance_weights(priorities, smallest, beta)), weights)

    def update(self, leaves: torch.Tensor, priorities: torch.Tensor, alpha: float, eps: float, numbers: Any) -> None:
        """Not supported: checking the priorities would synchronise with the device."""

    def leaves_view(self) -> torch.Tensor:
        return self._leaves[: self.num_leaves]

    def rebuild(self) -> None:
        torch.sum(self._blocks * _NORMAL, 1, out=self._normal)
        torch.sum(self._blocks * _TINY, 1, out=self._tiny)

    def check(self) -> float:
        worst = 0.0
        for stored, scale in ((self._normal, _NORMAL), (self._tiny, _TINY)):
            expected = (self._blocks * scale).sum(1)
            error = torch.where(stored == expected, 0.0, (stored - expected).abs() / expected)
            worst = max(worst, error.nan_to_num(math.inf).max().item())
        return worst

    def _recompute_sums(self, blocks: torch.Tensor) -> None:
        """Recompute the sums of these blocks. A repeated block is written twice with the same number."""
        rows = self._rows.index_select(0, blocks)
        self._sums.index_copy_(0, blocks, (rows * self._scales).sum(2))

    def _require_range(self, leaves: torch.Tensor) -> None:
        if self._is_cpu and len(leaves):
            numbers = leaves.numpy()
            if numbers.min() < 0 or numbers.max() >= self.num_leaves:
                raise IndexError(f"leaf: expected 0 to {self.num_leaves - 1}, got {numbers.min()} to {numbers.max()}.")


def _repeat_last_values(leaves: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Replace each value by that of the last entry with the same leaf, to make scattering deterministic."""
    leaves = leaves.contiguous()  # searchsorted warns about input that is not contiguous
    sorted_leaves, order = leaves.sort(stable=True)
    # For each entry, the sorted position of the last entry with the same leaf.
    last = torch.searchsorted(sorted_leaves[1:], leaves, right=True)
    return values.index_select(0, order.index_select(0, last))


class _RunningSums:
    """Non-decreasing running sums of blocks, constant across empty blocks, in the suitable scale.

    A parallel cumulative sum adds in a different order at each position: rounding may make it fall, or rise at a zero.
    All memory and views are allocated once, which saves launches per draw.
    """

    def __init__(self, num_blocks: int, scales: torch.Tensor) -> None:
        # The rows are a zero, the running sum of each block, and the scale.
        sums_and_scale = scales.new_zeros(num_blocks + 2, 2)
        sums_and_scale[-1] = scales.view(2)
        self._sums, self._normal_total = sums_and_scale[1:-1], sums_and_scale[-2, 0]
        self._normal, self._tiny = sums_and_scale.unbind(1)
        self._positions = torch.zeros_like(self._sums, dtype=torch.int64)
        self._running = torch.zeros_like(self._normal)
        self.starts, self.ends, self.total, self.scale = (
            self._running[:-2], self._running[1:-1], self._running[-2], self._running[-1],
        )  # fmt: skip

    def compute(self, sums: torch.Tensor) -> None:
        """Compute the running sums from the sums of blocks [blocks, 2] in both scales."""
        torch.cummax(sums.cumsum(0).masked_fill_(sums == 0, 0.0), 0, out=(self._sums, self._positions))
        torch.where(self._normal_total >= _TINY_TOTAL, self._normal, self._tiny, out=self._running)


def _find_first_reaching(rows: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """Return, per row of [n, m], the first positive entry whose running sum reaches the point [n] > 0, or the last."""
    ends = rows.cumsum(1).masked_fill_(rows == 0, 0.0)
    inside = points.minimum(ends.amax(1)).unsqueeze(1)
    return ends.ge_(inside).argmax(1)  # argmax finds the first 1 among zeros and ones
