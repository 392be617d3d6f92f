"""Samplers that draw rows uniformly: from all rows, from the newest ones, in epochs, new rows first, or counted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch

from relive.errors import NotReadyError, SchemaError, explain
from relive.kernels.shuffling import shuffled
from relive.replay.ring import PENDING, TRANSITION
from relive.replay.samplers.sampler import Chosen, Sampler
from relive.replay.views.view import require_order
from relive.schema.checks import positive
from relive.schema.invariants import require, require_all
from relive.schema.suggestions import suggests_init_keywords


@dataclass(unsafe_hash=True)
class Uniform(Sampler):
    """Draws uniformly, with replacement."""

    def sample(self, count: int) -> Chosen:
        return self.storage.draw(count, self.rng), None


@suggests_init_keywords
@dataclass(unsafe_hash=True)
class Recent(Sampler):
    """Draws uniformly, with replacement, from the newest `window` transitions of every environment.

    Older rows stay stored, for views that read around a row, and for another sampler after a reload.

    Args:
        window: transitions of each environment that may be drawn, at least 1; fewer where fewer are stored.
    """

    window: int

    def __post_init__(self) -> None:
        positive("Recent.window", self.window)

    def on_bind(self) -> None:
        self._ring, device = self.storage.ring, self.storage.device
        # Between two transitions lie at most two rows that hold only an observation.
        self._back = torch.arange(min(3 * self.window + 3, self._ring.slots), device=device).unsqueeze(1)
        self._envs = torch.arange(self._ring.num_envs, device=device)

    def sample(self, count: int) -> Chosen:
        slots, up_to = self._newest(self._back)
        if up_to.is_cpu and not up_to[-1]:  # so many rows in a row are withheld: see `Ring.exclude`
            slots, up_to = self._newest(torch.arange(self._ring.slots, device="cpu").unsqueeze(1))
        return slots[torch.searchsorted(up_to, self.rng.below(up_to[-1], count), right=True)], None

    def _newest(self, back: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The slots `back` rows before the newest ones, and how many transitions of the window lie up to each."""
        ring = self._ring
        rows = ring.newest() - back  # [rows, N], the newest first
        slots = ring.at(rows.clamp(min=0), self._envs)
        drawable = (rows >= ring.floor) & (ring.kind_at(slots) == TRANSITION)
        drawable &= drawable.cumsum(0) <= self.window
        return slots.view(-1), drawable.view(-1).cumsum(0)


@suggests_init_keywords
@dataclass(unsafe_hash=True)
class WithoutReplacement(Sampler):
    """An epoch permutes what is stored when it starts; rows that are overwritten meanwhile are skipped.

    The last batch of an epoch is what is left of it; then the next epoch starts.

    Args:
        drop_last: leave out a last batch that is shorter than the others.
    """

    drop_last: bool = False

    independent = False
    may_return_fewer = True

    def on_bind(self) -> None:
        self._ring = self.storage.ring
        self._ids = torch.empty(0, dtype=torch.int64, device=self.storage.device)
        """The rows of this epoch, in its order."""
        self._at = 0

    def require_rows(self, count: int) -> None:
        stored = len(self.storage)
        if count > stored:
            remedy = "Add steps or pass a smaller batch_size: without replacement a batch holds each transition once."
            raise NotReadyError(explain("sample", f"at least {count} stored transitions", stored, remedy))

    def sample(self, count: int) -> Chosen:
        self.require_rows(count)
        ids, (slots, at) = self._ids, self._next(self._ids, self._at, count)
        if len(slots) < (count if self.drop_last else 1):
            ids = self.storage.ids(shuffled(self.storage.stored(), self.rng))
            slots, at = self._next(ids, 0, count)
        self._ids, self._at = ids, at
        return slots, None

    def _next(self, ids: torch.Tensor, at: int, count: int) -> tuple[torch.Tensor, int]:
        """The epoch's next `count` rows that are still stored (fewer at its end), and the position after them."""
        found = ids[:0]
        while len(found) < count and at < len(ids):
            stop = at + count - len(found)
            slots, _ = self._ring.locate(ids[at:stop])
            found, at = torch.cat([found, slots[slots >= 0]]), stop
        return found, at

    def check(self) -> None:
        """Verify that the rest of the epoch is rows that were issued since the last clear, each once."""
        require(self._at >= 0, "epoch", "a place of at least 0", self._at)
        ring, left = self._ring, self._ids[self._at :]
        slots, never = ring.locate(left)
        require_all(~never, "epoch", "ids of transitions", left)
        forgotten = left // ring.num_envs < ring.floor[left % ring.num_envs]
        require_all(~forgotten, "epoch", "rows since the last clear", left)
        coming = torch.zeros(ring.slots * ring.num_envs, dtype=torch.bool, device=left.device)
        coming[slots[slots >= 0]] = True
        twice = int((slots >= 0).sum() - coming.sum())
        require(not twice, "epoch", "every row once", f"{twice} rows twice")

    def on_recover(self) -> None:
        left = self._ids[self._at :]
        self._ids, self._at = left[self._ring.locate(left)[0] >= 0], 0

    def on_clear(self) -> None:
        self._ids, self._at = self._ids[:0], 0

    def state(self) -> dict[str, torch.Tensor]:
        return {"ids": self._ids[self._at :]}

    def load_state(self, saved: Mapping[str, torch.Tensor]) -> None:
        self._ids, self._at = saved["ids"].to(self.storage.device, copy=True), 0


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
        oldest = torch.maximum(ring.floor, ring.newest() - ring.num_sampleable + 1).clamp(min=0)
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


@dataclass(unsafe_hash=True)
class Counted(Sampler):
    """Draws as `sampler` does and counts the draws of every row, for `relive.inspect` to show how rows are reused.

    A row's count begins at 0 when it is stored and goes when it is overwritten. It costs eight bytes a row, one
    addition a drawn row and one write a stored row; other samplers count nothing.

    Args:
        sampler: the sampler that chooses the rows.

    >>> from relive import Prioritized, ReplayBuffer
    >>> replay = ReplayBuffer(100, obs=2, action=(), sampler=Counted(Prioritized()))
    """

    sampler: Sampler = field(default_factory=Uniform)

    independent = False  # a draw is counted
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

    def sample(self, count: int) -> Chosen:
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
        else:  # a slot may come twice, changed and not
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

    def load_state(self, saved: Mapping[str, torch.Tensor]) -> None:
        drawn = saved["drawn"]
        if drawn.shape != self._counts.shape or bool((drawn < 0).any()):
            got = f"shape {tuple(drawn.shape)} with minimum {drawn.min() if drawn.numel() else None}"
            raise ValueError(f"counts of draws: expected {len(self._counts)} numbers of at least 0, got {got}")
        self._inner.load_state({name: tensor for name, tensor in saved.items() if name != "drawn"})
        self._counts.copy_(drawn)

    def check(self) -> None:
        """Verify that only transitions have a count of draws."""
        require(len(self._counts) == len(self._kind), "counts of draws", len(self._kind), len(self._counts))
        right = (self._counts == 0) | ((self._kind == TRANSITION) & (self._counts > 0))
        require_all(right, "count of draws", "0, or more for a transition", self._counts)
        self._inner.check()
