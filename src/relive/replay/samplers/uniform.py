"""Samplers that draw rows uniformly: from all rows, from the newest ones, in epochs, new rows first, or counted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch

from relive.errors import NotReadyError, SchemaError, explain, verify
from relive.kernels.reader import copy_shuffled
from relive.replay.ring import PENDING, TRANSITION
from relive.replay.samplers.sampler import Choice, Sampler
from relive.replay.views.view import require_order
from relive.schema.checks import check_positive_int
from relive.schema.invariants import verify_elements
from relive.schema.suggestions import suggests_init_keywords


@dataclass(unsafe_hash=True)
class Uniform(Sampler):
    """Draws every stored transition with the same probability, with replacement."""

    def sample(self, count: int) -> Choice:
        return self.storage.draw(count, self.rng), None


@suggests_init_keywords
@dataclass(unsafe_hash=True)
class Recent(Sampler):
    """Draws uniformly, with replacement, from the newest `window` transitions of every environment.

    Older rows stay stored: views can read them, and a reloaded buffer can use another sampler.

    Args:
        window: maximum number of transitions per environment to draw from, at least 1.
    """

    window: int

    def __post_init__(self) -> None:
        check_positive_int("Recent.window", self.window)

    def on_bind(self) -> None:
        self._ring, device = self.storage.ring, self.storage.device
        # There are at most two rows without a transition between two transitions.
        self._row_ages = torch.arange(min(3 * self.window + 3, self._ring.slots), device=device).unsqueeze(1)
        self._envs = torch.arange(self._ring.num_envs, device=device)

    def sample(self, count: int) -> Choice:
        slots, running_count = self._newest_slots(self._row_ages)
        if (
            running_count.is_cpu and not running_count[-1]
        ):  # these rows hold no transition (see `Ring.exclude`): search all
            slots, running_count = self._newest_slots(torch.arange(self._ring.slots, device="cpu").unsqueeze(1))
        return slots[
            torch.searchsorted(running_count, self.rng.integers_below(running_count[-1], count), right=True)
        ], None

    def _newest_slots(self, ages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the slots of the rows of these ages, and a running count of the transitions among them."""
        ring = self._ring
        rows = ring.newest_rows() - ages  # [rows, N], the newest rows first
        slots = ring.flat_slots(rows.clamp(min=0), self._envs)
        drawable = (rows >= ring.floor) & (ring.kind_at(slots) == TRANSITION)
        drawable &= drawable.cumsum(0) <= self.window
        return slots.view(-1), drawable.view(-1).cumsum(0)


@suggests_init_keywords
@dataclass(unsafe_hash=True)
class WithoutReplacement(Sampler):
    """Draws every stored transition once per epoch, in random order.

    An epoch contains the rows stored at its start; rows overwritten meanwhile are skipped. The last batch of an epoch
    holds the remaining rows.

    Args:
        drop_last: skip a last batch that is shorter than requested.
    """

    drop_last: bool = False

    independent = False
    may_return_fewer = True

    def on_bind(self) -> None:
        self._ring = self.storage.ring
        self._remaining_ids = torch.empty(0, dtype=torch.int64, device=self.storage.device)
        """Ids of the rows of this epoch that were not drawn yet, in drawing order."""

    def require_rows(self, count: int) -> None:
        num_stored = len(self.storage)
        if count > num_stored:
            remedy = "Add steps or pass a smaller batch_size: without replacement a batch holds each transition once."
            raise NotReadyError(explain("sample", f"at least {count} stored transitions", num_stored, remedy))

    def sample(self, count: int) -> Choice:
        self.require_rows(count)
        slots, remaining_ids = self._take_stored(self._remaining_ids, count)
        if len(slots) < (count if self.drop_last else 1):
            slots, remaining_ids = self._take_stored(
                self.storage.ids(copy_shuffled(self.storage.stored(), self.rng)), count
            )
        self._remaining_ids = remaining_ids  # a single assignment, which Ctrl-C cannot leave half done
        return slots, None

    def _take_stored(self, ids: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the slots of the next `count` stored rows of an epoch (fewer at its end), and the ids after them."""
        stored_slots = ids[:0]
        while len(stored_slots) < count and len(ids):
            num_missing = count - len(stored_slots)
            slots, _ = self._ring.locate(ids[:num_missing])
            stored_slots, ids = torch.cat([stored_slots, slots[slots >= 0]]), ids[num_missing:]
        return stored_slots, ids

    def check(self) -> None:
        """Verify that the rest of the epoch consists of distinct rows issued since the last clear."""
        ring, remaining_ids = self._ring, self._remaining_ids
        slots, is_unissued = ring.locate(remaining_ids)
        verify_elements(~is_unissued, "epoch", "ids of transitions", remaining_ids)
        is_cleared = remaining_ids // ring.num_envs < ring.floor[remaining_ids % ring.num_envs]
        verify_elements(~is_cleared, "epoch", "rows since the last clear", remaining_ids)
        is_next = torch.zeros(ring.slots * ring.num_envs, dtype=torch.bool, device=remaining_ids.device)
        is_next[slots[slots >= 0]] = True
        num_rows_twice = int((slots >= 0).sum() - is_next.sum())
        verify(not num_rows_twice, "epoch", "every row once", f"{num_rows_twice} rows twice")

    def on_recover(self) -> None:
        self._remaining_ids = self._remaining_ids[self._ring.locate(self._remaining_ids)[0] >= 0]

    def on_clear(self) -> None:
        self._remaining_ids = self._remaining_ids[:0]

    def state(self) -> dict[str, torch.Tensor]:
        return {"ids": self._remaining_ids}

    def load_state(self, saved: Mapping[str, torch.Tensor]) -> None:
        self._remaining_ids = saved["ids"].to(self.storage.device, copy=True)


@suggests_init_keywords
@dataclass(unsafe_hash=True)
class NewFirst(Sampler):
    """Returns every new row once, oldest first, before it may be drawn at random.

    A batch starts with new rows; the rest is drawn uniformly, with replacement, from all rows. A row that is
    overwritten before its turn is never returned as new. (The online queue of Hafner et al., Mastering Diverse Domains
    through World Models, 2023.)

    Args:
        share: maximum share of new rows in a batch, in (0, 1], rounded up to whole rows.
        length: length of the sequences to read. Every `length`-th row of an episode is returned as new once all steps
            of its sequence are stored: every new step is read once.
    """

    share: float = 0.5
    length: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.share, bool) or not isinstance(self.share, Real) or not 0 < float(self.share) <= 1:
            remedy = "Pass such a number."
            raise SchemaError(explain("NewFirst.share", "a number in (0, 1]", repr(self.share), remedy))
        check_positive_int("NewFirst.length", self.length)

    independent = False
    keeps_state_in_memory = True

    def on_bind(self) -> None:
        storage = self.storage
        if self.length > 1:
            require_order(storage, self)
        self._ring = storage.ring
        self._envs = torch.arange(self._ring.num_envs, device=storage.device)
        self._first_new_rows = storage.allocator.allocate("sampler.shown", (self._ring.num_envs,), torch.int64)
        """First row [N] of each environment that was not returned as new yet."""

    def sample(self, count: int) -> Choice:
        slots = self.storage.draw(count, self.rng)
        new_slots = self._take_new(math.ceil(self.share * count))
        slots[: len(new_slots)] = torch.where(new_slots >= 0, new_slots, slots[: len(new_slots)])
        return slots, None

    def _take_new(self, max_rows: int) -> torch.Tensor:
        """Take the next `max_rows` new rows from the queue; returns their slots, -1 if there are fewer."""
        ring, length = self._ring, self.length
        oldest = torch.maximum(ring.floor, ring.newest_rows() - ring.num_sampleable + 1).clamp(min=0)
        begin = torch.maximum(self._first_new_rows, oldest)
        # A sequence is followed by at most two rows without a transition.
        width = min(max_rows * (length + 2) + 3, ring.slots)
        place = torch.arange(width, device=begin.device).unsqueeze(1)
        slots = ring.flat_slots(begin + place, self._envs)  # the next rows of every environment [width, N]
        is_written = begin + place <= ring.newest_rows()
        is_ready, steps = self._find_ready(slots, is_written, place)
        places = torch.where(is_ready, place, width).view(-1)
        queue = (
            (places * ring.num_envs + self._envs.repeat(width)).topk(min(max_rows, len(places)), largest=False).values
        )
        is_new, env = queue < width * ring.num_envs, queue % ring.num_envs
        at = torch.where(is_new, queue, 0)
        next_rows = begin[env] + at // ring.num_envs + steps.view(-1)[at]
        self._first_new_rows.copy_(
            self._first_new_rows.scatter_reduce(0, env, torch.where(is_new, next_rows, 0), "amax")
        )
        return torch.where(is_new, slots.view(-1)[at], -1)

    def _find_ready(
        self, slots: torch.Tensor, is_written: torch.Tensor, place: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a mask of rows [width, N] that start a complete sequence, and the number of steps of each."""
        ring, length, width = self._ring, self.length, len(slots)
        kind = ring.kind_at(slots)
        is_step = is_written & (kind == TRANSITION)
        start = torch.where(ring.first.view(-1)[slots] & is_written, place, 0).cummax(0).values
        is_start = is_step & ((place - start) % length == 0)
        # The next row without a step: the episode ends there, or the next step was not added yet.
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
            raise ValueError(
                f"rows that were shown: expected {len(head)} rows from 0 to the head, got {next_rows.tolist()}"
            )
        self._first_new_rows.copy_(next_rows)

    def check(self) -> None:
        """Verify that no row was returned as new before it was written."""
        is_valid = (self._first_new_rows >= 0) & (self._first_new_rows <= self._ring.head)
        verify_elements(is_valid, "rows that were shown", "a row of 0 to the head", self._first_new_rows)


@dataclass(unsafe_hash=True)
class Counted(Sampler):
    """Counts how often `sampler` draws each row; `relive.inspect` shows the reuse of rows.

    The count of a row starts at 0 when it is stored. Counting costs eight bytes per row, one addition per drawn row and
    one write per stored row.

    Args:
        sampler: the sampler that chooses the rows.

    >>> from relive import Prioritized, ReplayBuffer
    >>> replay = ReplayBuffer(100, obs=2, action=(), sampler=Counted(Prioritized()))
    """

    sampler: Sampler = field(default_factory=Uniform)

    independent = False  # a repeated draw would be counted twice
    keeps_state_in_memory = True

    def __post_init__(self) -> None:
        if isinstance(self.sampler, Counted) or not isinstance(self.sampler, Sampler):
            remedy = "Pass the sampler that chooses rows."
            raise SchemaError(explain("Counted", "a sampler whose draws are counted", repr(self.sampler), remedy))
        self.returns_weights, self.may_return_fewer = self.sampler.returns_weights, self.sampler.may_return_fewer

    def on_bind(self) -> None:
        inner: Any = self.sampler.bind(self.storage, self.rng)
        self._inner = inner
        self.updates_by_id, self.faults, self.require_rows = inner.updates_by_id, inner.faults, inner.require_rows
        self.rescale, self.optional_state = inner.rescale, inner.optional_state
        if inner.takes_priorities:
            self.update = inner.update
        self._kind = self.storage.ring.kind.view(-1)
        self._counts = self.storage.allocate("drawn", torch.int64)

    def sample(self, count: int) -> Choice:
        slots, weight = self._inner.choose(count)
        self._count(slots)
        return slots, weight

    def sample_into(self, count: int, weight: torch.Tensor) -> torch.Tensor:
        slots = self._inner.sample_into(count, weight)
        self._count(slots)
        return slots

    def _count(self, slots: torch.Tensor) -> None:
        self._counts.index_add_(0, slots, torch.ones_like(slots))

    def after_write(self) -> None:
        slots, changed = self.storage.changed_slots()
        if changed is None:
            self._counts[slots] = 0
        else:  # a slot may occur twice: as changed and as unchanged
            self._counts.scatter_reduce_(0, slots, (~changed).long(), "prod")
        if self._inner.follows_writes:
            self._inner.after_write()

    def on_recover(self) -> None:
        self._counts *= (self._kind == TRANSITION).long()
        self._inner.on_recover()

    def on_clear(self) -> None:
        self._counts.zero_()
        self._inner.on_clear()

    def state(self) -> dict[str, torch.Tensor]:
        return {"drawn": self._counts, **self._inner.state()}

    def own_arrays(self) -> tuple[torch.Tensor, ...]:  # does not call `state`: the inner sampler may be a user's
        return self._counts, *self._inner.own_arrays()

    def load_state(self, saved: Mapping[str, torch.Tensor]) -> None:
        draw_counts = saved["drawn"]
        if draw_counts.shape != self._counts.shape or bool((draw_counts < 0).any()):
            got = f"shape {tuple(draw_counts.shape)} with minimum {draw_counts.min() if draw_counts.numel() else None}"
            raise ValueError(f"counts of draws: expected {len(self._counts)} numbers of at least 0, got {got}")
        self._inner.load_state({name: tensor for name, tensor in saved.items() if name != "drawn"})
        self._counts.copy_(draw_counts)

    def check(self) -> None:
        """Verify that only transitions have a count above 0."""
        verify(len(self._counts) == len(self._kind), "counts of draws", len(self._kind), len(self._counts))
        is_valid = (self._counts == 0) | ((self._kind == TRANSITION) & (self._counts > 0))
        verify_elements(is_valid, "count of draws", "0, or more for a transition", self._counts)
        self._inner.check()
