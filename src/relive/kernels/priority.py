"""Drawing leaves in proportion to their priorities."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

import torch

from relive import kernels
from relive.rng import Randomness
from relive.storage import Allocator, LocalAllocator


class RingTensors(NamedTuple):
    """The tensors of a ring that locate the row of an id: see `replay.ring.Ring`."""

    kind: torch.Tensor
    head: torch.Tensor
    is_open: torch.Tensor
    alive: int


class PriorityTree(Protocol):
    """Leaves with a priority each, at first all zero; a leaf is drawn with the probability priority / total.

    Leaves are int64 [K]. Priorities are float64, finite and not negative (which the caller has made sure of), and are
    kept exactly. From 5e-324 to 1.8e308 all of them work: sums are kept in a scale of their own and cannot overflow. A
    leaf that is less than about 1e-16 of the total may never be drawn.

    A leaf outside the tree is an IndexError and changes nothing. Other devices than the CPU are not waited for: there
    the caller makes sure of the leaves too.
    """

    num_leaves: int
    keeps_largest: bool
    """It accepts priorities itself and remembers the largest: see `triton.priority_tree.TritonTree`."""

    def set(self, leaves: torch.Tensor, priorities: torch.Tensor | float) -> None:
        """Give each of `leaves` [K] its priority [K], or one number to all. If a leaf comes twice, the last counts."""
        ...

    def get(self, leaves: torch.Tensor) -> torch.Tensor:
        """The priorities of `leaves`: float64 [K]."""
        ...

    def total(self) -> torch.Tensor | float:
        """The sum of all priorities; infinite if it exceeds float64, which draws do not mind."""
        ...

    def smallest(self) -> torch.Tensor | float:
        """The smallest priority that is not zero, or infinity if there is none."""
        ...

    def draw(self, count: int, random: Randomness) -> torch.Tensor | None:
        """Leaves [count]: the i-th falls into the i-th of `count` equal slices of the total. None has priority 0.

        Returns None if all priorities are zero. Other devices than the CPU are not asked, and draw leaves of priority
        zero then: look at `total()` first where that can happen.
        """
        ...

    def draw_weighted(
        self, count: int, random: Randomness, beta: float, by_smallest: bool, weights: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The slots that `draw` returns, with weights (smallest / priority)^beta, float32 [count] in (0, 1].

        The smallest is that of these leaves, or of all leaves. Weights are written to `weights` if it is given.
        """
        ...

    def update(
        self, leaves: torch.Tensor, priorities: torch.Tensor, alpha: float, eps: float, numbers: Any
    ) -> tuple[int, int] | None:
        """`set` to (priority + eps)^alpha, checked: (first bad position or -1, skipped leaves of -1).

        The first of `numbers` becomes the largest priority if that is larger. None: this tree cannot, and nothing has
        changed. So has nothing after a bad position.
        """
        ...

    def leaves_view(self) -> torch.Tensor:
        """The priorities of all leaves [num_leaves], sharing memory. Whoever writes there calls `rebuild()` after."""
        ...

    def rebuild(self) -> None:
        """Add up everything again from the leaves."""
        ...

    def check(self) -> float:
        """The largest relative error of any sum against the leaves that it is of. Infinite if a minimum is wrong."""
        ...


def priority_tree(num_leaves: int, device: torch.device, allocator: Allocator | None = None) -> PriorityTree:
    """A tree of `num_leaves` (at least one) zero priorities, or the one that was found in `allocator`."""
    if device.type == "cpu" and kernels.native() is not None:
        return NativeTree(num_leaves, LocalAllocator(device) if allocator is None else allocator)
    return _TorchTree(num_leaves, device)


class NativeTree:
    """The tree of the native core, which also does in one call what samplers otherwise do in several."""

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
        return _written(self._tree.draw_weighted(count, random.capsule, beta, by_smallest), weights)

    def leaves_view(self) -> torch.Tensor:
        return self._leaves[: self.num_leaves]


def _written(
    drawn: tuple[torch.Tensor, torch.Tensor] | None, weights: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Leaves and weights, these in the tensor of the caller if there is one."""
    if drawn is None or weights is None:
        return drawn
    with torch.inference_mode():  # which takes tensors that were made in it, and others
        return drawn[0], weights.copy_(drawn[1])


def weights(priorities: torch.Tensor, smallest: torch.Tensor | float, beta: float) -> torch.Tensor:
    """(smallest / priority)^beta, float32 [K] in (0, 1]."""
    # A tensor: torch divides a number by multiplying with a reciprocal, which is infinite for denormal priorities.
    smallest = torch.as_tensor(smallest, dtype=torch.float64, device=priorities.device)
    # What is too small for a float32 is its smallest number: a weight of zero would hide the row.
    found = torch.empty(priorities.shape, dtype=torch.float32, device=priorities.device)
    return torch.pow(smallest / priorities, beta, out=found).clamp_(min=torch.finfo(torch.float32).tiny)


# What leaves are multiplied by before they are summed. The usual scale leaves room for 2^64 leaves of any size. Totals
# that are faint in it have only leaves that are small enough for the other, in which denormal ones keep their digits.
_USUAL, _FAINT = 2.0**-64, 2.0**512
_FAINT_TOTAL = 2.0**-400


class _TorchTree:
    """Two levels, leaves in blocks and a sum a block, in both scales: which one counts is decided on the device."""

    keeps_largest = False

    def __init__(self, num_leaves: int, device: torch.device) -> None:
        # A draw goes through the sums of all blocks once, and through one block for each leaf that it draws.
        self._size = 1 << max(6, num_leaves.bit_length() // 2 - 4)
        num_blocks = -(-num_leaves // self._size)
        self.num_leaves = num_leaves
        self._waits = device.type == "cpu"  # elsewhere a look at a result would hold up the device
        self._blocks = torch.zeros(num_blocks, self._size, dtype=torch.float64, device=device)
        self._leaves = self._blocks.view(-1)
        self._rows = self._blocks.unsqueeze(1)
        self._sums = torch.zeros(num_blocks, 2, dtype=torch.float64, device=device)
        self._usual, self._faint = self._sums.unbind(1)
        # A tensor, since a number that an operation takes beside tensors may pass through float32.
        self._scales = torch.tensor([[_USUAL], [_FAINT]], dtype=torch.float64, device=device)
        self._running = _Running(num_blocks, self._scales)

    def set(self, leaves: torch.Tensor, priorities: torch.Tensor | float) -> None:
        self._require_range(leaves)
        if isinstance(priorities, torch.Tensor):
            self._leaves.scatter_(0, leaves, _last_of_each(leaves, priorities))
        else:
            self._leaves.scatter_(0, leaves, priorities)
        if len(leaves) >= len(self._blocks):
            self.rebuild()
        else:
            self._renew(leaves // self._size)

    def get(self, leaves: torch.Tensor) -> torch.Tensor:
        self._require_range(leaves)
        return self._leaves.index_select(0, leaves)

    def total(self) -> torch.Tensor:
        usual, faint = self._sums.sum(0)
        return torch.where(usual >= _FAINT_TOTAL, usual / self._scales[0, 0], faint / self._scales[1, 0])

    def smallest(self) -> torch.Tensor:
        # One pass over all leaves is two launches; block minima would cost more at every update.
        return torch.where(self._leaves > 0, self._leaves, math.inf).amin()

    def draw(self, count: int, random: Randomness) -> torch.Tensor | None:
        running = self._running
        running.add_up(self._sums)
        if self._waits and not running.total.numpy() > 0:
            return None
        # In (0, total]: the first block that ends there or later has something in it.
        points = random.slices(count, self._leaves.device) * running.total
        block = torch.searchsorted(running.ends, points)
        points -= running.starts.index_select(0, block)
        leaf = _first_reaching(self._blocks.index_select(0, block).mul_(running.scale), points)
        return leaf.add_(block, alpha=self._size)

    def draw_weighted(
        self, count: int, random: Randomness, beta: float, by_smallest: bool, weights: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        return _written(self._weighted(count, random, beta, by_smallest), weights)

    def _weighted(
        self, count: int, random: Randomness, beta: float, by_smallest: bool
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        leaves = self.draw(count, random)
        if leaves is None:
            return None
        priorities = self._leaves.index_select(0, leaves)
        return leaves, weights(priorities, self.smallest() if by_smallest else priorities.min(), beta)

    def update(self, leaves: torch.Tensor, priorities: torch.Tensor, alpha: float, eps: float, numbers: Any) -> None:
        """It would look at the priorities, which other devices are not asked for."""

    def leaves_view(self) -> torch.Tensor:
        return self._leaves[: self.num_leaves]

    def rebuild(self) -> None:
        torch.sum(self._blocks * _USUAL, 1, out=self._usual)
        torch.sum(self._blocks * _FAINT, 1, out=self._faint)

    def check(self) -> float:
        worst = 0.0
        for stored, scale in ((self._usual, _USUAL), (self._faint, _FAINT)):
            expected = (self._blocks * scale).sum(1)
            error = torch.where(stored == expected, 0.0, (stored - expected).abs() / expected)
            worst = max(worst, error.nan_to_num(math.inf).max().item())
        return worst

    def _renew(self, blocks: torch.Tensor) -> None:
        """The sums of these blocks again. One that comes twice is written twice, with the same number."""
        rows = self._rows.index_select(0, blocks)
        self._sums.index_copy_(0, blocks, (rows * self._scales).sum(2))

    def _require_range(self, leaves: torch.Tensor) -> None:
        if self._waits and len(leaves):
            numbers = leaves.numpy()
            if numbers.min() < 0 or numbers.max() >= self.num_leaves:
                raise IndexError(f"leaf: expected 0 to {self.num_leaves - 1}, got {numbers.min()} to {numbers.max()}.")


def _last_of_each(leaves: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Each entry's value replaced by that of the last entry with the same leaf: scattering it then has one outcome."""
    leaves = leaves.contiguous()  # searchsorted warns of anything else
    ordered, order = leaves.sort(stable=True)
    last = torch.searchsorted(ordered[1:], leaves, right=True)  # all but one of those up to here
    return values.index_select(0, order.index_select(0, last))


class _Running:
    """Running sums of blocks that never fall and that zeros do not raise, in the scale that suits them.

    Made in parallel, a cumulative sum adds in another order at each place: a rounding may make it fall, or rise at a
    zero. All memory and all views of it are made once: a draw is so many launches fewer.
    """

    def __init__(self, num_blocks: int, scales: torch.Tensor) -> None:
        both = scales.new_zeros(num_blocks + 2, 2)  # a zero, the running sums, and the scale they are in
        both[-1] = scales.view(2)
        self._sums, self._usual_total = both[1:-1], both[-2, 0]
        self._usual, self._faint = both.unbind(1)
        self._where = torch.zeros_like(self._sums, dtype=torch.int64)
        self._chosen = torch.zeros_like(self._usual)
        self.starts, self.ends, self.total, self.scale = (
            self._chosen[:-2], self._chosen[1:-1], self._chosen[-2], self._chosen[-1],
        )  # fmt: skip

    def add_up(self, sums: torch.Tensor) -> None:
        """The total of the blocks' sums [blocks, 2] in both scales."""
        torch.cummax(sums.cumsum(0).masked_fill_(sums == 0, 0.0), 0, out=(self._sums, self._where))
        torch.where(self._usual_total >= _FAINT_TOTAL, self._usual, self._faint, out=self._chosen)


def _first_reaching(rows: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """In each row of [n, m] the first positive entry whose running sum reaches the point [n] > 0; else the last one."""
    ends = rows.cumsum(1).masked_fill_(rows == 0, 0.0)
    inside = points.minimum(ends.amax(1)).unsqueeze(1)
    return ends.ge_(inside).argmax(1)  # of ones and zeros: the first one
