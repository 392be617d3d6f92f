"""An online queue: every new row is shown once, soon after it was written."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real

import torch

from relive.errors import SchemaError, explain
from relive.replay.ring import PENDING, TRANSITION
from relive.replay.samplers.sampler import Chosen, Sampler
from relive.replay.views.view import require_order
from relive.schema.checks import positive
from relive.schema.invariants import require_all
from relive.schema.vocabulary import suggests_init_keywords


@suggests_init_keywords
@dataclass(unsafe_hash=True)
class NewFirst(Sampler):
    """Shows every new row once, before it is drawn at random: the oldest row not shown yet of every environment first.

    New rows come first in a batch; the rest of it is drawn uniformly, with replacement, from all rows. A row that is
    overwritten before its turn is not shown. (The online queue of Hafner et al., Mastering Diverse Domains through
    World Models, 2023.)

    Args:
        share: the largest part of a batch that is new, more than 0 and at most 1, rounded up to whole rows.
        length: the length of the sequences that are read. Then every `length`-th row of an episode is shown, as soon as
            the steps of its sequence are there, so that every new step is shown once.
    """

    share: float = 0.5
    length: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.share, bool) or not isinstance(self.share, Real) or not 0 < float(self.share) <= 1:
            remedy = "Pass such a number."
            raise SchemaError(explain("NewFirst.share", "a number in (0, 1]", repr(self.share), remedy))
        positive("NewFirst.length", self.length)

    independent = False
    keeps_state_in_memory = True

    def on_bind(self) -> None:
        storage = self.storage
        if self.length > 1:
            require_order(storage, self)
        self._ring = storage.ring
        self._envs = torch.arange(self._ring.num_envs, device=storage.device)
        self._shown = storage.allocator.allocate("sampler.shown", (self._ring.num_envs,), torch.int64)
        """The row [N] of each environment up to which all rows were shown, or will not be."""

    def sample(self, count: int) -> Chosen:
        slots = self.storage.draw(count, self.rng)
        new = self._next(math.ceil(self.share * count))
        slots[: len(new)] = torch.where(new >= 0, new, slots[: len(new)])
        return slots, None

    def _next(self, most: int) -> torch.Tensor:
        """The slots of the next `most` rows to be shown, which are now shown; -1 where there are fewer."""
        ring, length = self._ring, self.length
        oldest = torch.maximum(ring.floor, ring.newest() - ring.alive + 1).clamp(min=0)
        begin = torch.maximum(self._shown, oldest)
        # After a sequence at most two rows hold only an observation.
        width = min(most * (length + 2) + 3, ring.slots)
        place = torch.arange(width, device=begin.device).unsqueeze(1)
        slots = ring.at(begin + place, self._envs)  # [width, N]
        is_written = begin + place <= ring.newest()
        ready, steps = self._ready(slots, is_written, place)
        places = torch.where(ready, place, width).view(-1)
        queue = (places * ring.num_envs + self._envs.repeat(width)).topk(min(most, len(places)), largest=False).values
        found, env = queue < width * ring.num_envs, queue % ring.num_envs
        at = torch.where(found, queue, 0)
        shown = begin[env] + at // ring.num_envs + steps.view(-1)[at]
        self._shown.copy_(self._shown.scatter_reduce(0, env, torch.where(found, shown, 0), "amax"))
        return torch.where(found, slots.view(-1)[at], -1)

    def _ready(
        self, slots: torch.Tensor, is_written: torch.Tensor, place: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mask of rows [width, N] that start a sequence whose steps are all there, and how many steps each has."""
        ring, length, width = self._ring, self.length, len(slots)
        kind = ring.kind_at(slots)
        is_step = is_written & (kind == TRANSITION)
        start = torch.where(ring.first.view(-1)[slots] & is_written, place, 0).cummax(0).values
        is_start = is_step & ((place - start) % length == 0)
        # The next row that is no step: there an episode ends, or the newest row has no successor yet.
        stop = torch.where(is_step, width, place).flip(0).cummin(0).values.flip(0)
        ends = torch.cat([is_written & (kind != PENDING), torch.zeros_like(is_written[:1])])
        is_whole = (stop - place >= length) | ends.gather(0, stop)
        return is_start & is_whole, (stop - place).clamp(max=length)

    def on_recover(self) -> None:
        self._shown.copy_(torch.minimum(self._shown.clamp(min=0), self._ring.head))

    def state(self) -> dict[str, torch.Tensor]:
        return {"shown": self._shown}

    def load_state(self, saved: Mapping[str, torch.Tensor]) -> None:
        shown = saved["shown"]
        head = self._ring.head.cpu()
        if shown.shape != head.shape or bool(((shown < 0) | (shown.cpu() > head)).any()):
            raise ValueError(
                f"rows that were shown: expected {len(head)} rows from 0 to the head, got {shown.tolist()}"
            )
        self._shown.copy_(shown)

    def check(self) -> None:
        """Verify that only rows that were written have been shown."""
        right = (self._shown >= 0) & (self._shown <= self._ring.head)
        require_all(right, "rows that were shown", "a row of 0 to the head", self._shown)
