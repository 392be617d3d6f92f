"""Priority trees: sampling of leaves in proportion to their priorities."""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch

from relive import kernels
from relive.rng import Randomness
from relive.storage import Allocator, LocalAllocator


class PriorityTree(Protocol):
    """Leaves with priorities, initially zero; a leaf is drawn with probability priority / total.

    Leaves are int64 [K]. Priorities are float64 and stored exactly; the caller ensures that they are finite and not
    negative. The whole range from 5e-324 to 1.8e308 is supported: sums are scaled and cannot overflow. A leaf below
    about 1e-16 of the total may never be drawn.

    On the CPU a leaf outside the tree raises an IndexError before any change. On other devices the check would
    synchronise, so the caller ensures valid leaves.
    """

    num_leaves: int
    keeps_largest: bool
    """Whether the tree checks priorities itself and stores the largest one, as `TritonTree` does."""

    def set(self, leaves: torch.Tensor, priorities: torch.Tensor | float) -> None:
        """Set priorities [K], or one number, for `leaves` [K]. The last value wins if a leaf repeats."""
        ...

    def get(self, leaves: torch.Tensor) -> torch.Tensor:
        """Return the priorities of `leaves`: float64 [K]."""
        ...

    def total_priority(self) -> torch.Tensor | float:
        """Return the sum of all priorities. A sum that exceeds float64 is infinite, which does not affect draws."""
        ...

    def smallest_priority(self) -> torch.Tensor | float:
        """Return the smallest positive priority; infinity if all are zero."""
        ...

    def draw(self, count: int, random: Randomness) -> torch.Tensor | None:
        """Draw leaves [count] of positive priority, the i-th from the i-th of `count` equal slices of the total.

        If all priorities are zero, the CPU returns None. Other devices draw arbitrary leaves, because the check would
        synchronise.
        """
        ...

    def draw_weighted(
        self, count: int, random: Randomness, beta: float, by_global_min: bool, weights: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Draw with weights (smallest / priority)^beta, float32 [count] in (0, 1].

        With `by_global_min`, `smallest` is the smallest positive priority of the tree, else the smallest one of the
        drawn leaves. Weights are written to `weights` if passed.
        """
        ...

    def update_priorities(
        self, leaves: torch.Tensor, priorities: torch.Tensor, alpha: float, eps: float, largest: Any
    ) -> tuple[int, int] | None:
        """Check priorities and set leaves to (priority + eps)^alpha; leaves of -1 are skipped.

        Return the position of the first invalid priority, or -1, and the number of skipped leaves. If a priority is
        invalid, nothing changes. If a priority exceeds `largest[0]`, `largest[0]` becomes that priority. A tree that
        does not support this call returns None and changes nothing.
        """
        ...

    def leaves_view(self) -> torch.Tensor:
        """Return the priorities of all leaves [num_leaves] as a view. Call `rebuild()` after writing to it."""
        ...

    def rebuild(self) -> None:
        """Recompute all sums from the leaves."""
        ...

    def max_sum_error(self) -> float:
        """Return the largest relative error of a sum; infinity if a stored minimum is wrong."""
        ...


def make_priority_tree(num_leaves: int, device: torch.device, allocator: Allocator | None = None) -> PriorityTree:
    """Make a tree of `num_leaves` zero priorities, or restore the tree that is stored in the memory of `allocator`."""
    if device.type == "cpu" and kernels.native_core() is not None:
        return NativeTree(num_leaves, LocalAllocator(device) if allocator is None else allocator)
    return _TorchTree(num_leaves, device)


class NativeTree:
    """The tree of the native core. `set_written_slots` sets the leaves of all slots that a native write changed."""

    keeps_largest = False

    def __init__(self, num_leaves: int, allocator: Allocator) -> None:
        native = kernels.native_core().PriorityTree
        self.num_leaves = num_leaves
        sizes = zip(("leaves", "sums", "least", "summary"), native.sizes(num_leaves), strict=True)
        memory = tuple(allocator.allocate(f"tree.{name}", (size,), torch.float64) for name, size in sizes)
        self._leaves = memory[0]
        self._tree = native(memory, num_leaves)
        self.total_priority = self._tree.total
        self.smallest_priority = self._tree.smallest
        self.rebuild = self._tree.rebuild
        self.max_sum_error = self._tree.deviation
        self.update_priorities = self._tree.update
        self.set_written_slots = self._tree.set_written_slots

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
        self, count: int, random: Randomness, beta: float, by_global_min: bool, weights: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        return _copy_weights(self._tree.draw_weighted(count, random.capsule, beta, by_global_min), weights)

    def leaves_view(self) -> torch.Tensor:
        return self._leaves[: self.num_leaves]


def _copy_weights(
    draw: tuple[torch.Tensor, torch.Tensor] | None, out: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Copy the weights of a draw into `out`, unless it is None."""
    if draw is None or out is None:
        return draw
    with torch.inference_mode():
        # Outside inference mode, torch refuses to write to an inference tensor, which `out` may be.
        return draw[0], out.copy_(draw[1])


def importance_weights(priorities: torch.Tensor, smallest: torch.Tensor | float, beta: float) -> torch.Tensor:
    """Return (smallest / priority)^beta, float32 [K] in (0, 1]."""
    # Torch would divide a Python number by multiplying it with 1 / priorities, which is infinite for denormals. It
    # divides tensors exactly.
    smallest = torch.as_tensor(smallest, dtype=torch.float64, device=priorities.device)
    # A weight that underflows becomes the smallest normal float32, because a weight of zero would drop the row.
    out = torch.empty(priorities.shape, dtype=torch.float32, device=priorities.device)
    return torch.pow(smallest / priorities, beta, out=out).clamp_(min=torch.finfo(torch.float32).tiny)


# Leaves are multiplied by one of these factors before they are summed. With _NORMAL the sum of 2^64 leaves of any size
# is finite. With _TINY denormal leaves keep their digits; _TINY is used if the sum with _NORMAL is below _TINY_TOTAL.
_NORMAL, _TINY = 2.0**-64, 2.0**512
_TINY_TOTAL = 2.0**-400


class _TorchTree:
    """A tree of two levels: leaves, and sums of blocks of leaves. Each sum is stored with both factors.

    The device chooses the factor, because a choice on the host would synchronise.
    """

    keeps_largest = False

    def __init__(self, num_leaves: int, device: torch.device) -> None:
        # The block size balances the reads of a draw: the sums of all blocks, and all leaves of a block per drawn leaf.
        self._size = 1 << max(6, num_leaves.bit_length() // 2 - 4)
        num_blocks = -(-num_leaves // self._size)
        self.num_leaves = num_leaves
        # Arguments are checked on the CPU only, because a check on another device would synchronise.
        self._is_cpu = device.type == "cpu"
        self._blocks = torch.zeros(num_blocks, self._size, dtype=torch.float64, device=device)
        self._leaves = self._blocks.view(-1)
        self._rows = self._blocks.unsqueeze(1)
        self._sums = torch.zeros(num_blocks, 2, dtype=torch.float64, device=device)
        self._normal, self._tiny = self._sums.unbind(1)
        # The factors are a tensor because Python numbers may be rounded to float32 in operations with tensors.
        self._scales = torch.tensor([[_NORMAL], [_TINY]], dtype=torch.float64, device=device)
        self._running = _RunningSums(num_blocks, self._scales)

    def set(self, leaves: torch.Tensor, priorities: torch.Tensor | float) -> None:
        self._require_leaves_in_range(leaves)
        if isinstance(priorities, torch.Tensor):
            self._leaves.scatter_(0, leaves, _take_last_value_per_leaf(leaves, priorities))
        else:
            self._leaves.scatter_(0, leaves, priorities)
        if len(leaves) >= len(self._blocks):
            self.rebuild()
        else:
            self._recompute_sums(leaves // self._size)

    def get(self, leaves: torch.Tensor) -> torch.Tensor:
        self._require_leaves_in_range(leaves)
        return self._leaves.index_select(0, leaves)

    def total_priority(self) -> torch.Tensor:
        normal, tiny = self._sums.sum(0)
        return torch.where(normal >= _TINY_TOTAL, normal / self._scales[0, 0], tiny / self._scales[1, 0])

    def smallest_priority(self) -> torch.Tensor:
        # Reading all leaves takes two launches. Minima of blocks would cost more in every update.
        return torch.where(self._leaves > 0, self._leaves, math.inf).amin()

    def draw(self, count: int, random: Randomness) -> torch.Tensor | None:
        running = self._running
        running.compute_from(self._sums)
        if self._is_cpu and not running.total.numpy() > 0:
            return None
        # Points are in (0, total], so the first block whose running sum reaches a point is not empty.
        points = random.uniform_in_slices(count, self._leaves.device) * running.total
        block = torch.searchsorted(running.ends, points)
        points -= running.starts.index_select(0, block)
        leaf = _find_where_sum_reaches(self._blocks.index_select(0, block).mul_(running.scale), points)
        return leaf.add_(block, alpha=self._size)

    def draw_weighted(
        self, count: int, random: Randomness, beta: float, by_global_min: bool, weights: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        leaves = self.draw(count, random)
        if leaves is None:
            return None
        priorities = self._leaves.index_select(0, leaves)
        smallest = self.smallest_priority() if by_global_min else priorities.min()
        return _copy_weights((leaves, importance_weights(priorities, smallest, beta)), weights)

    def update_priorities(
        self, leaves: torch.Tensor, priorities: torch.Tensor, alpha: float, eps: float, largest: Any
    ) -> None:
        """Return None: updates are not supported, because checking the priorities would synchronise with the device."""

    def leaves_view(self) -> torch.Tensor:
        return self._leaves[: self.num_leaves]

    def rebuild(self) -> None:
        torch.sum(self._blocks * _NORMAL, 1, out=self._normal)
        torch.sum(self._blocks * _TINY, 1, out=self._tiny)

    def max_sum_error(self) -> float:
        worst = 0.0
        for stored, scale in ((self._normal, _NORMAL), (self._tiny, _TINY)):
            expected = (self._blocks * scale).sum(1)
            error = torch.where(stored == expected, 0.0, (stored - expected).abs() / expected)
            worst = max(worst, error.nan_to_num(math.inf).max().item())
        return worst

    def _recompute_sums(self, blocks: torch.Tensor) -> None:
        """Recompute the sums of `blocks`. The sum of a repeated block is written twice with the same number."""
        rows = self._rows.index_select(0, blocks)
        self._sums.index_copy_(0, blocks, (rows * self._scales).sum(2))

    def _require_leaves_in_range(self, leaves: torch.Tensor) -> None:
        if self._is_cpu and len(leaves):
            numbers = leaves.numpy()
            if numbers.min() < 0 or numbers.max() >= self.num_leaves:
                raise IndexError(f"leaf: expected 0 to {self.num_leaves - 1}, got {numbers.min()} to {numbers.max()}.")


def _take_last_value_per_leaf(leaves: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Replace each value by the value of the last entry with the same leaf, to make scattering deterministic."""
    # `torch.searchsorted` would warn about an input that is not contiguous.
    leaves = leaves.contiguous()
    sorted_leaves, order = leaves.sort(stable=True)
    last_positions = torch.searchsorted(sorted_leaves[1:], leaves, right=True)
    return values.index_select(0, order.index_select(0, last_positions))


class _RunningSums:
    """Running sums of blocks that never fall, and that do not rise at an empty block.

    A parallel cumulative sum adds in a different order at each position, so that rounding may make it fall, or rise at
    an empty block. All memory and views are allocated once, which saves launches per draw.
    """

    def __init__(self, num_blocks: int, scales: torch.Tensor) -> None:
        # Row 0 is zero, the last row holds the two factors, and the other rows hold the running sums in both scales.
        sums_and_scale = scales.new_zeros(num_blocks + 2, 2)
        sums_and_scale[-1] = scales.view(2)
        self._sums, self._normal_total = sums_and_scale[1:-1], sums_and_scale[-2, 0]
        self._normal, self._tiny = sums_and_scale.unbind(1)
        self._positions = torch.zeros_like(self._sums, dtype=torch.int64)
        self._running = torch.zeros_like(self._normal)
        self.starts, self.ends, self.total, self.scale = (
            self._running[:-2], self._running[1:-1], self._running[-2], self._running[-1],
        )  # fmt: skip

    def compute_from(self, block_sums: torch.Tensor) -> None:
        """Compute the running sums from the sums of blocks [blocks, 2] with both factors."""
        torch.cummax(block_sums.cumsum(0).masked_fill_(block_sums == 0, 0.0), 0, out=(self._sums, self._positions))
        torch.where(self._normal_total >= _TINY_TOTAL, self._normal, self._tiny, out=self._running)


def _find_where_sum_reaches(rows: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """Return for each row of [n, m] the first entry whose running sum reaches the row's point, one of [n].

    The entry is positive, because points are. A point above the sum of its row selects the last positive entry.
    """
    ends = rows.cumsum(1).masked_fill_(rows == 0, 0.0)
    inside = points.minimum(ends.amax(1)).unsqueeze(1)
    # The comparison gives zeros and ones, of which argmax returns the position of the first 1.
    return ends.ge_(inside).argmax(1)
