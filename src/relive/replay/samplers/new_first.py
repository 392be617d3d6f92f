"""A sampler that returns every new row once before it may be drawn at random."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real

import torch

from relive.errors import SchemaError, explain
from relive.replay.ring import PENDING, TRANSITION
from relive.replay.samplers.sampler import Choice, Sampler
from relive.replay.views.view import require_time_order
from relive.schema.checks import check_positive_int
from relive.schema.invariants import verify_elements
from relive.schema.suggestions import suggests_init_keywords


@suggests_init_keywords
@dataclass(unsafe_hash=True)
class NewFirst(Sampler):
    """Returns every new row once, oldest first, before it may be drawn at random.

    A batch starts with new rows; its other rows are drawn uniformly, with replacement, from all rows. A row that is
    overwritten before its turn is never returned as new. (The online queue of Hafner et al., Mastering Diverse Domains
    through World Models, 2023.)

    Args:
        share: maximum share of new rows in a batch, in (0, 1], rounded up to whole rows.
        length: length of the sequences to read. Every `length`-th row of an episode is returned as new once all steps
            of its sequence are stored: every new step is read once.
    """

    share: float = 0.5
    length: int = 1

    independent = False
    keeps_state_in_memory = True

    def __post_init__(self) -> None:
        if isinstance(self.share, bool) or not isinstance(self.share, Real) or not 0 < float(self.share) <= 1:
            remedy = "Pass such a number."
            raise SchemaError(explain("NewFirst.share", "a number in (0, 1]", repr(self.share), remedy))
        check_positive_int("NewFirst.length", self.length)

    def on_bind(self) -> None:
        storage = self.storage
        if self.length > 1:
            require_time_order(storage, self)
        self._ring = storage.ring
        self._envs = torch.arange(self._ring.num_envs, device=storage.device)
        self._first_new_rows = storage.allocator.allocate("sampler.shown", (self._ring.num_envs,), torch.int64)
        """First row [N] of each environment that was not returned as new yet."""

    def sample(self, count: int) -> Choice:
        slots = self.storage.draw(count, self.rng)
        new_slots = self._dequeue_new_rows(math.ceil(self.share * count))
        slots[: len(new_slots)] = torch.where(new_slots >= 0, new_slots, slots[: len(new_slots)])
        return slots, None

    def _dequeue_new_rows(self, max_rows: int) -> torch.Tensor:
        """Remove the next `max_rows` new rows from the queue; returns their slots, padded by -1."""
        ring, length = self._ring, self.length
        oldest = torch.maximum(ring.floor, ring.newest_rows() - ring.num_sampleable + 1).clamp(min=0)
        begin = torch.maximum(self._first_new_rows, oldest)
        # At most two rows without a transition follow a sequence, so `max_rows` sequences lie within `width` rows.
        width = min(max_rows * (length + 2) + 3, ring.slots)
        place = torch.arange(width, device=begin.device).unsqueeze(1)
        slots = ring.flat_slots(begin + place, self._envs)  # [width, N]
        is_written = begin + place <= ring.newest_rows()
        is_ready, steps = self._find_ready_sequences(slots, is_written, place)
        places = torch.where(is_ready, place, width).view(-1)
        queue = (
            (places * ring.num_envs + self._envs.repeat(width)).topk(min(max_rows, len(places)), largest=False).values
        )
        is_new, env = queue < width * ring.num_envs, queue % ring.num_envs
        queue_index = torch.where(is_new, queue, 0)
        next_rows = begin[env] + queue_index // ring.num_envs + steps.view(-1)[queue_index]
        self._first_new_rows.copy_(
            self._first_new_rows.scatter_reduce(0, env, torch.where(is_new, next_rows, 0), "amax")
        )
        return torch.where(is_new, slots.view(-1)[queue_index], -1)

    def _find_ready_sequences(
        self, slots: torch.Tensor, is_written: torch.Tensor, place: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a mask of the rows [width, N] that start a complete sequence, and the length of each sequence."""
        ring, length, width = self._ring, self.length, len(slots)
        kind = ring.kind_at(slots)
        is_step = is_written & (kind == TRANSITION)
        start = torch.where(ring.first.view(-1)[slots] & is_written, place, 0).cummax(0).values
        is_start = is_step & ((place - start) % length == 0)
        # `stop` is the first row from here on without a step: there the episode ends, or no step was added yet.
        stop = torch.where(is_step, width, place).flip(0).cummin(0).values.flip(0)
        ends = torch.cat([is_written & (kind != PENDING), torch.zeros_like(is_written[:1])])
        is_complete = (stop - place >= length) | ends.gather(0, stop)
        return is_start & is_complete, (stop - place).clamp(max=length)

    def on_recover(self) -> None:
        self._first_new_rows.copy_(torch.minimum(self._first_new_rows.clamp(min=0), self._ring.head))

    def state(self) -> dict[str, torch.Tensor]:
        return {"shown": self._first_new_rows}

    def load_state(self, saved: Mapping[str, torch.Tensor]) -> None:
        next_rows = saved["shown"]
        head = self._ring.head.cpu()
        if next_rows.shape != head.shape or bool(((next_rows < 0) | (next_rows.cpu() > head)).any()):
            got = next_rows.tolist()
            raise ValueError(f"first new rows: expected {len(head)} rows from 0 to the head, got {got}")
        self._first_new_rows.copy_(next_rows)

    def check(self) -> None:
        is_valid = (self._first_new_rows >= 0) & (self._first_new_rows <= self._ring.head)
        verify_elements(is_valid, "first new row", "a row from 0 to the head", self._first_new_rows)
