"""Drawing rows uniformly: the transitions of every environment are a queue, which they enter and leave in one order."""

from __future__ import annotations

import torch

from relive.replay.ring import TRANSITION, Ring
from relive.replay.torch_writer import Written
from relive.rng import Randomness
from relive.schema.invariants import require_all

_LAST = 2**63 - 1


class Queues:
    """Where the j-th transition of each environment is: a draw is one number below the count of all transitions.

    Made by the first draw and then kept up by writes, so that neither looks at all slots.
    """

    def __init__(self, ring: Ring, *, in_order: bool) -> None:
        self._ring, self._in_order = ring, in_order
        self._entries: torch.Tensor | None = None
        """Slot, following slot and id [3, S·N] of the j-th transition of environment e, at (j mod S) · N + e.

        Where rows are in no order, there is no following slot.
        """
        self._ends = self._starts = self._bounds = self._total = torch.empty(0, device="cpu")

    def forget(self) -> None:
        """The rows are others: look at all of them before the next draw."""
        self._entries = None

    def follow(self, steps: list[Written]) -> None:
        """Enter the rows that were written; the ring has counted those that left."""
        if self._entries is None:
            return
        size, num_envs = self._ring.size, self._ring.num_envs
        for step in steps:
            ends = self._ends if step.envs is None else self._ends[step.envs]
            self._entries.index_copy_(1, ends % size, torch.cat([step.slots, step.ids[:1]]))
            # A row that only resets is in the queue's next place, which the next row takes.
            grown = num_envs if step.is_reset is None else (~step.is_reset).long() * num_envs
            if step.envs is None:
                self._ends += grown
            else:
                self._ends[step.envs] = ends + grown
        self._add_up()

    def draw(self, count: int, random: Randomness) -> torch.Tensor:
        """Entries of transitions [3, count], uniformly and with replacement."""
        if self._entries is None:
            self._entries = self._found()
            self._add_up()
        number = random.integers(count, self._ring.kind.device) % self._total
        env = torch.searchsorted(self._bounds, number, right=True)
        places = torch.add(self._starts.index_select(0, env), number, alpha=self._ring.num_envs)
        return self._entries.index_select(1, places % self._ring.size)

    def _add_up(self) -> None:
        counts = self._ring.count.cumsum(0)
        self._bounds = counts[:-1]  # without the last, so that a number is of some environment, even if none has rows
        self._total = counts[-1].clamp(min=1)
        self._starts = torch.sub(self._ends, counts, alpha=self._ring.num_envs)

    @torch.inference_mode(False)  # writes change it later, in whatever mode
    def _found(self) -> torch.Tensor:
        ring = self._ring
        self._ends = torch.add(ring.first_ids[0], ring.count, alpha=ring.num_envs)
        ids = ring.ids().view(ring.slots, -1)
        ids = ids.masked_fill_(ids < 0, _LAST).sort(0).values
        slots = ids % ring.size
        entry = (slots, ring.after(slots), ids) if self._in_order else (slots, ids)
        return torch.stack(entry).view(len(entry), -1)

    def check(self) -> None:
        """Every queue holds the transitions of its environment, the oldest first."""
        if self._entries is None:
            return
        ring, fresh = self._ring, Queues(self._ring, in_order=self._in_order)
        fresh._entries = fresh._found()
        number = torch.arange(ring.slots, device=ring.kind.device).unsqueeze(1)
        first = self._ends - ring.count * ring.num_envs
        places = (first + number * ring.num_envs) % ring.size
        expected = fresh._entries.view(-1, ring.slots, ring.num_envs)
        right = (self._entries[:, places] == expected).all(0) | (number >= ring.count)
        require_all(right, "queue", "the transitions of its environment", self._entries[-1][places])
        drawable = (ring.kind == TRANSITION).sum()
        require_all(self._total == drawable.clamp(min=1), "queue", "as many as there are transitions", self._total)
