"""The priority tree on a device: its memory and launches. The kernels are in `priorities`."""

# Constants of kernels are passed as plain values.
# pyright: reportArgumentType=false

from __future__ import annotations

import math
from typing import Any

import torch

from relive.kernels.priority import RingTensors
from relive.kernels.triton import priorities as kernels
from relive.kernels.triton.launching import Launch
from relive.kernels.triton.stream import MAX_DRAWS, draw_blocks
from relive.kernels.triton.words import blocks


class TritonTree:
    """A `PriorityTree` whose changes and draws take a few launches and never synchronise.

    Draws use a `DeviceStream`. The tree also keeps device-side state: the largest accepted priority, and counters of
    faults.
    """

    keeps_largest = True

    def __init__(self, num_leaves: int, device: torch.device) -> None:
        self.num_leaves, self._device = num_leaves, device
        nodes, self._levels = 0, 0
        entries = num_leaves
        while self._levels == 0 or entries > 1:
            entries = -(-entries // 16)
            nodes, self._levels = nodes + entries, self._levels + 1
        self._size = nodes * 16
        """Number of sums per scale; the last sum is the total."""
        self._leaves = torch.zeros(num_leaves, dtype=torch.float64, device=device)
        self._sums = torch.zeros(2, self._size, dtype=torch.float64, device=device)
        """Sums in the normal and in the tiny scale."""
        self._least = torch.full((nodes,), math.inf, dtype=torch.float64, device=device)
        self._subtrees = -(-num_leaves // kernels.SUBTREE.value)
        self._dirty = torch.zeros(self._subtrees, dtype=torch.uint8, device=device)
        """Flags of subtrees with changed leaves."""
        self._stamps = torch.zeros(num_leaves, dtype=torch.int32, device=device)
        """1 + the last position of each leaf in the current update; 0 for leaves that are not updated."""
        self.largest = torch.ones((), dtype=torch.float64, device=device)
        """Largest priority passed to `accept`."""
        self.faults = torch.zeros(3, dtype=torch.int64, device=device)
        """Numbers of invalid priorities, of ids or leaves never issued, and of draws from an empty tree."""
        self._keeps_least = False
        """Whether minima are maintained: from their first use on, because they cost time."""
        self._launches: dict[Any, Launch] = {}

    def _bind(self, key: Any, kernel: Any, own: tuple[Any, ...], **constants: Any) -> Launch:
        """Bind a kernel to its fixed arguments and cache the launch under `key`."""
        self._launches[key] = launch = Launch(kernel, own, {**kernels.OPTIONS, **constants})
        return launch

    # Changes

    def set(self, leaves: torch.Tensor, priorities: torch.Tensor | float) -> None:
        if not isinstance(priorities, torch.Tensor):
            priorities = torch.full_like(leaves, priorities, dtype=torch.float64)
        self._update(leaves, priorities, None, 1.0, 0.0, is_mass=True)

    def update(self, leaves: torch.Tensor, priorities: torch.Tensor, alpha: float, eps: float, numbers: Any) -> None:
        """Not supported: use `accept`, which does not synchronise."""

    def accept(
        self, index: torch.Tensor, priority: torch.Tensor, alpha: float, eps: float, ring: RingTensors | None = None
    ) -> torch.Tensor:
        """Set leaves [K], or with a ring rows by id, to the mass (priority + eps)^alpha.

        Returns the number of skipped leaves of -1 and overwritten rows (int64 []). Invalid priorities and ids never
        issued are skipped too, and counted in `faults`. The last priority wins if a leaf repeats.
        """
        return self._update(index, priority, ring, alpha, eps, is_mass=False)

    def mark(self, touched: torch.Tensor, changed: torch.Tensor, kind: torch.Tensor, alpha: float, eps: float) -> None:
        """Set changed leaves to the mass of the largest priority for transitions (by `kind`), otherwise to zero."""
        count = len(touched)
        if not count:
            return
        block, programs = blocks(count, kernels.BLOCK)
        key = "mark", alpha, eps, block, kind.data_ptr()
        mark = self._launches.get(key) or self._bind(
            key, kernels.mark_kernel, (kind, self._leaves, self._dirty, self.largest, alpha, eps), BLOCK=block
        )
        mark(kind, (programs, 1, 1), touched, changed, count)
        self._renew()

    def _update(
        self, index: torch.Tensor, priority: torch.Tensor, ring: RingTensors | None, alpha: float, eps: float, *,
        is_mass: bool,
    ) -> torch.Tensor:  # fmt: skip
        count, leaves = len(index), self._leaves
        stale = torch.zeros((), dtype=torch.int64, device=self._device)
        if not count:
            return stale
        index, priority = index.contiguous(), priority.contiguous()
        touched, masses = torch.empty_like(index), torch.empty(count, dtype=torch.float64, device=self._device)
        block, programs = blocks(count, kernels.BLOCK)
        key = alpha, eps, is_mass, priority.dtype, block, None if ring is None else ring.kind.data_ptr()
        accept = self._launches.get(key) or self._bind_accept(key, ring, alpha, eps, is_mass, block)
        accept(leaves, (programs, 1, 1), index, priority, touched, masses, stale, count)
        key = "set", block
        put = self._launches.get(key) or self._bind(
            key, kernels.set_kernel, (leaves, self._stamps, self._dirty), BLOCK=block
        )
        put(leaves, (programs, 1, 1), touched, masses, count)
        self._renew()
        return stale

    def _bind_accept(
        self, key: Any, ring: RingTensors | None, alpha: float, eps: float, is_mass: bool, block: int
    ) -> Launch:
        where = (self._dirty, self.faults, self._dirty) if ring is None else ring[:3]
        sizes = (1, 1, 1) if ring is None else (*ring.kind.shape, ring.alive)
        own = self._stamps, self.largest.view(torch.int64), self.faults, *where, self.num_leaves, *sizes, alpha, eps
        return self._bind(key, kernels.accept_kernel, own, BY_ID=ring is not None, IS_MASS=is_mass, BLOCK=block)

    def _renew(self) -> None:
        """Recompute dirty subtrees and the levels above them."""
        sums, least, sizes = self._sums, self._least, (self.num_leaves, self._size)
        by_least = self._keeps_least
        renew = self._launches.get(("renew", by_least)) or self._bind(
            ("renew", by_least), kernels.renew_kernel, (self._leaves, sums, least, self._dirty, *sizes),
            LEVELS=min(self._levels, kernels.LOWER), LEAST=by_least,
        )  # fmt: skip
        renew(sums, (self._subtrees, 1, 1))
        if self._levels > kernels.LOWER:
            top = self._launches.get(("top", by_least)) or self._bind(
                ("top", by_least), kernels.renew_top_kernel, (sums, least, *sizes, self._levels), LEAST=by_least,
                BLOCK=kernels.BLOCK, **kernels.TOP_OPTIONS,
            )  # fmt: skip
            top(sums, (1, 1, 1))

    # Reading

    def get(self, leaves: torch.Tensor) -> torch.Tensor:
        return self._leaves.index_select(0, leaves)

    def total(self) -> torch.Tensor:
        normal, tiny = self._sums[:, -1]
        is_tiny = normal < kernels.TINY_TOTAL.value
        return torch.where(is_tiny, tiny / kernels.TINY.value, normal / kernels.NORMAL.value)

    def smallest(self) -> torch.Tensor:
        self._keep_least()
        return self._least[-1].clone()

    def _keep_least(self) -> None:
        if not self._keeps_least:
            self._keeps_least = True
            self.rebuild()

    # Draws

    def draw(self, count: int, random: Any) -> torch.Tensor:
        return self._draw(count, random, 0.0, None)[0]

    def draw_weighted(
        self, count: int, random: Any, beta: float, by_smallest: bool, weights: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if by_smallest:
            self._keep_least()
        if weights is None:
            weights = torch.empty(count, dtype=torch.float32, device=self._device)
        leaves, priorities = self._draw(count, random, beta, weights if by_smallest else None)
        if count and not by_smallest:
            block, programs = blocks(count, kernels.BLOCK)
            key = "weigh", block
            weigh = self._launches.get(key) or self._bind(key, kernels.weigh_kernel, (), BLOCK=block)
            weigh(priorities, (programs, 1, 1), priorities, weights, count, beta)
        return leaves, weights

    def _draw(
        self, count: int, random: Any, beta: float, weights: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = random.numbers
        leaves = torch.empty(count, dtype=torch.int64, device=self._device)
        priorities = torch.empty(count, dtype=torch.float64, device=self._device)
        out = leaves, priorities, priorities if weights is None else weights
        for start in range(0, count, MAX_DRAWS):
            part = out if count <= MAX_DRAWS else tuple(each[start : start + MAX_DRAWS] for each in out)
            rows = min(count - start, MAX_DRAWS)
            block, programs = draw_blocks(rows, kernels.DRAW_BLOCK)
            key = weights is None, block, numbers.data_ptr()
            launch = self._launches.get(key) or self._bind(
                key, kernels.prioritized_draw_kernel,
                (numbers, self._leaves, self._sums, self._least, self.faults,
                 self.num_leaves, self._levels, self._size - 1, self._size),
                IS_WEIGHED=weights is not None, BLOCK=block,
            )  # fmt: skip
            launch(numbers, (programs, 1, 1), *part, start, rows, count, beta)
        return leaves, priorities

    # All leaves

    def leaves_view(self) -> torch.Tensor:
        return self._leaves

    def rebuild(self) -> None:
        self._dirty.fill_(1)
        self._renew()

    def check(self) -> float:
        worst = 0.0
        for scale, sums in zip((kernels.NORMAL.value, kernels.TINY.value), self._sums, strict=True):
            values, least, first = self._leaves * scale, self._leaves, 0
            while first < self._size // 16:
                groups = -(-len(values) // 16)
                padding = (0, groups * 16 - len(values))
                running = torch.nn.functional.pad(values, padding).view(groups, 16).cumsum(1)
                stored = sums[first * 16 : (first + groups) * 16].view(groups, 16)
                error = torch.where(stored == running, 0.0, (stored - running).abs() / running)
                worst = max(worst, error.nan_to_num(math.inf).max().item())
                positive = torch.where(least > 0, least, math.inf)
                least = torch.nn.functional.pad(positive, padding, value=math.inf).view(groups, 16).amin(1)
                if self._keeps_least and not torch.equal(least, self._least[first : first + groups]):
                    worst = math.inf
                values, first = stored[:, -1], first + groups
        return worst
