"""The tree of priorities on a device: its memory and its launches. The kernels are in `priorities`."""

# At a launch the constants of kernels are plain values.
# pyright: reportArgumentType=false

from __future__ import annotations

import math
from typing import Any

import torch

from relive.kernels.priority import RingTensors
from relive.kernels.triton import priorities as kernels
from relive.kernels.triton.launching import launch


class TritonTree:
    """A `PriorityTree` whose every change and every draw is one launch, or two for weights by a batch's smallest.

    Draws come from a `DeviceStream`. Beside the leaves it keeps what only the device knows: the largest priority that
    was accepted, and faults.
    """

    keeps_largest = True

    def __init__(self, num_leaves: int, device: torch.device) -> None:
        self.num_leaves, self._device = num_leaves, device
        nodes, self._levels = 0, 0
        entries = num_leaves
        while self._levels == 0 or entries > 1:
            entries = -(-entries // 16)
            nodes, self._levels = nodes + entries, self._levels + 1
        self._root = nodes * 16 - 1
        """Where the total is among the sums."""
        self._leaves = torch.zeros(num_leaves, dtype=torch.float64, device=device)
        self._sums = torch.zeros(nodes * 16, dtype=torch.float64, device=device)
        self._least = torch.full((nodes,), math.inf, dtype=torch.float64, device=device)
        self._state = torch.tensor([kernels.USUAL.value, 0.0], dtype=torch.float64, device=device)
        """The scale of the sums, and whether a tiny leaf was ever set."""
        self._stamps = torch.zeros(num_leaves, dtype=torch.int32, device=device)
        """Of each leaf, the last place where a running update has it; else 0."""
        self._smallest = torch.tensor([kernels.NOTHING_DRAWN, 0], device=device)
        """The bits of the smallest priority of a running draw, and how many programs have read it."""
        self.largest = torch.ones((), dtype=torch.float64, device=device)
        """The largest priority that `accept` was given."""
        self.faults = torch.zeros(3, dtype=torch.int64, device=device)
        """How many priorities were none, how many ids or leaves were never given, how many draws found only zeros."""
        self._keeps_least = False
        """The minima are up to date: from the first time on that somebody asks for them, since they cost time."""

    # Changes

    def set(self, leaves: torch.Tensor, priorities: torch.Tensor | float) -> None:
        if not isinstance(priorities, torch.Tensor):
            priorities = torch.full_like(leaves, priorities, dtype=torch.float64)
        self._update(leaves, priorities, None, 1.0, 0.0, is_mass=True)

    def update(self, leaves: torch.Tensor, priorities: torch.Tensor, alpha: float, eps: float, numbers: Any) -> None:
        """`accept` does this, and waits for nothing."""

    def accept(
        self, index: torch.Tensor, priority: torch.Tensor, alpha: float, eps: float, ring: RingTensors | None = None
    ) -> torch.Tensor:
        """Give leaves [K], or with a ring the rows of ids, the mass (priority + eps)^alpha.

        Returns how many leaves were -1 or rows were gone (int64 []), and skipped. Priorities that are none and ids that
        were never given are skipped too, and counted in `faults`. Of a leaf that comes twice the last one counts.
        """
        return self._update(index, priority, ring, alpha, eps, is_mass=False)

    def mark(self, touched: torch.Tensor, changed: torch.Tensor, kind: torch.Tensor, alpha: float, eps: float) -> None:
        """Give changed leaves the mass of the largest priority, or zero where by its `kind` a slot is no transition."""
        if not len(touched):
            return
        launch(kernels.mark_kernel, self._leaves, 1)(
            touched, changed.view(torch.uint8), kind, self._leaves, self._sums, self._least, self._state, self.largest,
            len(touched), self.num_leaves, self._levels, self._root, alpha, eps,
            LEAST=self._keeps_least, BLOCK=kernels.BLOCK, **kernels.OPTIONS,
        )  # fmt: skip

    def _update(
        self, index: torch.Tensor, priority: torch.Tensor, ring: RingTensors | None, alpha: float, eps: float, *,
        is_mass: bool,
    ) -> torch.Tensor:  # fmt: skip
        count = len(index)
        if not count:
            return torch.zeros((), dtype=torch.int64, device=self._device)
        stale = torch.empty((), dtype=torch.int64, device=self._device)
        touched = torch.empty(count, dtype=torch.int64, device=self._device)
        masses = torch.empty(count, dtype=torch.float64, device=self._device)
        where = (self._stamps, stale, stale) if ring is None else ring[:3]
        slots, num_envs, alive = (1, 1, 1) if ring is None else (*ring.kind.shape, ring.alive)
        launch(kernels.update_kernel, self._leaves, 1)(
            index.contiguous(), priority.contiguous(), touched, masses, stale,
            self._leaves, self._sums, self._least, self._state, self._stamps, self.largest, self.faults, *where,
            count, self.num_leaves, self._levels, self._root, slots, num_envs, alive, alpha, eps,
            BY_ID=ring is not None, IS_MASS=is_mass, LEAST=self._keeps_least, BLOCK=kernels.BLOCK, **kernels.OPTIONS,
        )  # fmt: skip
        return stale

    # Looking

    def get(self, leaves: torch.Tensor) -> torch.Tensor:
        return self._leaves.index_select(0, leaves)

    def total(self) -> torch.Tensor:
        return self._sums[-1] / self._state[0]

    def smallest(self) -> torch.Tensor:
        self._keep_least()
        return self._least[-1].clone()

    def _keep_least(self) -> None:
        if not self._keeps_least:
            self._keeps_least = True
            self.rebuild()

    # Draws

    def draw(self, count: int, random: Any) -> torch.Tensor:
        return self._draw(count, random, "none")[0]

    def draw_weighted(
        self, count: int, random: Any, beta: float, by_smallest: bool, weights: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if by_smallest:
            self._keep_least()
        if weights is None:
            weights = torch.empty(count, dtype=torch.float32, device=self._device)
        leaves, priorities = self._draw(count, random, "global" if by_smallest else "batch", beta, weights)
        if count and not by_smallest:
            launch(kernels.weigh_kernel, self._leaves, -(-count // kernels.BLOCK))(
                priorities, self._smallest, weights, count, beta,
                NOTHING=kernels.NOTHING_DRAWN, BLOCK=kernels.BLOCK, **kernels.OPTIONS,
            )  # fmt: skip
        return leaves, weights

    def _draw(
        self, count: int, random: Any, normalize: str, beta: float = 0.0, weights: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        leaves = torch.empty(count, dtype=torch.int64, device=self._device)
        priorities = torch.empty(count, dtype=torch.float64, device=self._device)
        if count:
            launch(kernels.prioritized_draw_kernel, self._leaves, -(-count // kernels.DRAW_BLOCK))(
                random.numbers, self._leaves, self._sums, self._least, self._smallest, self.faults,
                leaves, priorities, priorities if weights is None else weights,
                count, self.num_leaves, self._levels, self._root, beta,
                NORMALIZE=normalize, BLOCK=kernels.DRAW_BLOCK, **kernels.DRAW_OPTIONS,
            )  # fmt: skip
        return leaves, priorities

    # All leaves

    def leaves_view(self) -> torch.Tensor:
        return self._leaves

    def rebuild(self) -> None:
        launch(kernels.rebuild_kernel, self._leaves, 1)(
            self._leaves, self._sums, self._least, self._state, self._stamps, self.num_leaves, self._levels, self._root,
            LEAST=self._keeps_least, BLOCK=kernels.BLOCK, **kernels.OPTIONS,
        )  # fmt: skip

    def check(self) -> float:
        worst = 0.0
        values, least, first = self._leaves * self._state[0], self._leaves, 0
        while first < len(self._sums) // 16:
            groups = -(-len(values) // 16)
            padding = (0, groups * 16 - len(values))
            running = torch.nn.functional.pad(values, padding).view(groups, 16).cumsum(1)
            stored = self._sums[first * 16 : (first + groups) * 16].view(groups, 16)
            error = torch.where(stored == running, 0.0, (stored - running).abs() / running)
            worst = max(worst, error.nan_to_num(math.inf).max().item())
            positive = torch.where(least > 0, least, math.inf)
            least = torch.nn.functional.pad(positive, padding, value=math.inf).view(groups, 16).amin(1)
            if self._keeps_least and not torch.equal(least, self._least[first : first + groups]):
                worst = math.inf
            values, first = stored[:, -1], first + groups
        return worst
