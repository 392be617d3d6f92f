"""Prioritized draws from one buffer: the masses of its rows in a tree, and what was drawn and accepted so far."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from relive import kernels
from relive.errors import NotReadyError, SchemaError, explain
from relive.fields.conversion import as_numpy_if_cpu
from relive.fields.invariants import require, require_all
from relive.randomness import Randomness
from relive.replay.ring import TRANSITION
from relive.replay.samplers.protocol import Drawn, Draws
from relive.replay.store import ReplayStore

if TYPE_CHECKING:
    from relive.replay.samplers.prioritized import Prioritized


class PriorityRun(Draws):
    """Prioritized draws from one buffer."""

    wants_touched = True
    independent_draws = True
    atomic_draws = True
    weighs = True
    takes_priorities = True
    beside_rows = True

    def __init__(self, settings: Prioritized, store: ReplayStore, random: Randomness) -> None:
        self._settings, self._store, self._random = settings, store, random
        self._ring = store.memory.ring
        self.tree = store.tree()
        """The masses of slots; the leaf after them is nowhere: writes to it need no synchronisation."""
        self._slots = self.tree.num_leaves - 1
        self._numbers: Any = [1.0, 0]
        """The largest priority accepted so far (a tensor where the data is elsewhere), and how many rows were drawn."""
        allocator = store.memory.allocator
        if allocator.persistent:
            self._numbers = allocator.allocate("sampler.numbers", (2,), torch.float64).numpy()
            if not allocator.reopened:
                self._largest = 1.0

    @property
    def _largest(self) -> Any:
        return self._numbers[0]

    @_largest.setter
    def _largest(self, largest: Any) -> None:
        self._numbers[0] = largest

    @property
    def _num_drawn(self) -> int:
        return int(self._numbers[1])

    @_num_drawn.setter
    def _num_drawn(self, count: int) -> None:
        self._numbers[1] = count

    def snapshot(self) -> int:
        return self._num_drawn

    def restore(self, snapshot: int) -> None:
        self._num_drawn = snapshot

    def draw(self, count: int, weight: torch.Tensor | None = None) -> Drawn:
        beta = self._beta()
        drawn = self.tree.draw_weighted(count, self._random, beta, self._settings.normalize == "global", weight)
        if drawn is None:
            remedy = "Update at least one priority to more than 0, or use eps > 0."
            raise NotReadyError(explain("sample", "a row of positive priority", "only zeros", remedy))
        self._num_drawn += count
        return Drawn(*drawn)

    def _beta(self) -> float:
        settings = self._settings
        if callable(settings.beta) and is_capturing(self._store.device):
            remedy = "Pass a number as beta, or sample outside the graph."
            expected = "a number while a CUDA graph is captured, which would repeat one value for ever"
            raise SchemaError(explain("Prioritized.beta", expected, "a function", remedy))
        return settings.beta_after(self._num_drawn)

    def update(self, slots: torch.Tensor, priority: torch.Tensor) -> torch.Tensor | int:
        done = self.tree.update(slots, priority, self._settings.alpha, self._settings.eps, self._numbers)
        if done is not None and done[0] < 0:
            return done[1]
        values, mass = self._settings.accept(priority, len(slots))
        is_gone = slots < 0
        largest = self._largest
        if len(values):
            largest = self._larger(as_numpy_if_cpu(values.masked_fill(is_gone, 0.0)).max())
        leaves, masses = slots.masked_fill(is_gone, self._slots), mass.masked_fill_(is_gone, 0.0)
        kernels.complete(partial(self._set, leaves, masses, largest))
        stale = as_numpy_if_cpu(is_gone).sum()
        return stale if isinstance(stale, torch.Tensor) else int(stale)

    def _larger(self, largest: Any) -> Any:
        if isinstance(largest, torch.Tensor):
            return largest.clamp_(min=self._largest)
        return max(self._largest, float(largest))

    def _set(self, leaves: torch.Tensor, masses: torch.Tensor, largest: Any) -> None:
        self.tree.set(leaves, masses)
        self._largest = largest

    def written(self) -> None:
        self._store.mark(self._settings.mass(self._largest))

    def cleared(self) -> None:
        self.tree.set(torch.arange(self._slots, device=self._store.device), 0.0)
        self._largest = 1.0

    def mended(self) -> None:
        self._check_own()
        ring, leaves = self._ring, self.tree.leaves_view()
        slots, drawable = leaves[:-1], ring.kind.view(-1) == TRANSITION
        known = (slots > 0) | (self._settings.eps == 0)
        slots.copy_(torch.where(drawable, torch.where(known, slots, self._settings.mass(self._largest)), 0.0))
        leaves[-1] = 0.0
        self.tree.rebuild()

    def state(self) -> dict[str, torch.Tensor]:
        largest = torch.as_tensor(self._largest, dtype=torch.float64, device=self._store.device)
        drawn = torch.tensor(self._num_drawn, device="cpu")
        return {"mass": self.tree.leaves_view()[: self._slots], "largest": largest, "draws": drawn}

    def load_state(self, saved: Mapping[str, torch.Tensor]) -> None:
        mass, largest = saved["mass"], float(saved["largest"])
        if len(mass) != self._slots or not bool((torch.isfinite(mass) & (mass >= 0)).all()):
            raise ValueError(f"priorities: expected {self._slots} finite numbers of at least 0")
        if not 0 <= largest < float("inf"):
            raise ValueError(f"the largest priority: expected a finite number of at least 0, got {largest}")
        self.tree.leaves_view()[: self._slots].copy_(mass)
        self.tree.rebuild()
        there = saved["largest"].to(self._store.device)
        self._largest = there if as_numpy_if_cpu(there) is there else largest
        self._num_drawn = int(saved["draws"])

    def check(self) -> None:
        """Transitions have a priority, nothing else has, and the sums are those of the priorities."""
        ring, leaves = self._ring, self.tree.leaves_view()
        require(len(leaves) == self._slots + 1, "priorities", self._slots + 1, len(leaves))
        slots, nowhere = leaves[:-1].view(ring.slots, ring.num_envs), leaves[-1]
        drawable = ring.kind == TRANSITION
        require_all(slots.isfinite() & (slots >= 0), "priority", "a finite number of at least 0", slots)
        require_all(drawable | (slots == 0), "priority", "0 where there is no transition", slots)
        may_be_zero = ~drawable | (self._settings.eps == 0)
        require_all((slots > 0) | may_be_zero, "priority", "more than 0 for a transition", slots)
        require(nowhere == 0, "priority of no row", 0, float(nowhere))
        self._check_own()
        error = self.tree.check()
        require(
            error <= 1e-9, "sums of priorities", "the sums over the rows, to 1e-9", f"a relative error of {error:.1e}"
        )

    def _check_own(self) -> None:
        """Its own two numbers, which may come from a file."""
        largest, draws = float(self._numbers[0]), float(self._numbers[1])
        require(1 <= largest < math.inf, "largest priority", "a finite number of at least 1", largest)
        require(0 <= draws < 1 << 62 and draws == int(draws), "draws", "a number of at least 0", draws)

    # As one of several buffers that are drawn from as if they were one

    @property
    def drawn(self) -> int:
        """How many rows were drawn so far."""
        return self._num_drawn

    def total(self) -> tuple[float, int]:
        """The mass of all rows as m · 2^e, since a sum of large priorities may be more than a float64 holds."""
        total = float(self.tree.total())
        if math.isfinite(total):
            return math.frexp(total)
        m, e = math.frexp(float((self.tree.leaves_view() * 2.0**-64).sum()))
        return m, e + 64

    def smallest(self) -> float:
        """The smallest mass that is not zero, or infinity."""
        return float(self.tree.smallest())

    def masses(self, slots: torch.Tensor) -> torch.Tensor:
        """The masses of rows: float64 [K]."""
        return self.tree.get(slots)

    def largest(self, elsewhere: float = 0.0) -> float:
        """The priority of new rows, which is from now on at least what was accepted `elsewhere`."""
        self._largest = max(self._largest, elsewhere)
        return float(self._largest)


def is_capturing(device: torch.device) -> bool:
    """Whether what is launched on a device now becomes part of a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def check_priorities(priority: torch.Tensor, count: int) -> None:
    """Refuse what cannot be the priorities of so many rows, whatever their values are."""
    if tuple(priority.shape) != (count,):
        remedy = "Pass a priority for each index."
        raise SchemaError(explain("priority", f"shape ({count},)", tuple(priority.shape), remedy))
    if priority.dtype == torch.bool or priority.is_complex():
        raise SchemaError(explain("priority", "real numbers", priority.dtype, "Pass absolute errors."))
