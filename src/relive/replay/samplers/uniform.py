"""Samplers that draw rows uniformly: from all rows, from the newest rows of every environment, or in epochs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from relive.errors import NotReadyError, explain, verify
from relive.kernels.reader import copy_shuffled
from relive.replay.ring import TRANSITION
from relive.replay.samplers.sampler import Choice, Sampler
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
        # At most two rows without a transition lie between two transitions, so these ages include `window` transitions.
        self._row_ages = torch.arange(min(3 * self.window + 3, self._ring.slots), device=device).unsqueeze(1)
        self._envs = torch.arange(self._ring.num_envs, device=device)

    def sample(self, count: int) -> Choice:
        slots, running_count = self._find_newest_slots(self._row_ages)
        # All rows are searched if the newest rows hold no transition (see `Ring.exclude_rows`).
        if running_count.is_cpu and not running_count[-1]:
            slots, running_count = self._find_newest_slots(torch.arange(self._ring.slots, device="cpu").unsqueeze(1))
        return slots[
            torch.searchsorted(running_count, self.rng.integers_below(running_count[-1], count), right=True)
        ], None

    def _find_newest_slots(self, ages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the slots of the rows with these ages, newest first, and a running count of their transitions."""
        ring = self._ring
        rows = ring.newest_rows() - ages  # [ages, N]
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
        slots, remaining_ids = self._find_stored(self._remaining_ids, count)
        if len(slots) < (count if self.drop_last else 1):
            epoch = self.storage.ids(copy_shuffled(self.storage.stored(), self.rng))
            slots, remaining_ids = self._find_stored(epoch, count)
        # Ctrl-C cannot interrupt a single assignment, so this batch is either taken from the epoch or not drawn at all.
        self._remaining_ids = remaining_ids
        return slots, None

    def _find_stored(self, ids: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the slots of the first `count` ids that are still stored, and the ids after them."""
        stored_slots = ids[:0]
        while len(stored_slots) < count and len(ids):
            num_missing = count - len(stored_slots)
            slots, _ = self._ring.locate(ids[:num_missing])
            stored_slots, ids = torch.cat([stored_slots, slots[slots >= 0]]), ids[num_missing:]
        return stored_slots, ids

    def check(self) -> None:
        """Verify that the remaining ids of the epoch are distinct and were issued since the last clear."""
        ring, remaining_ids = self._ring, self._remaining_ids
        slots, is_unissued = ring.locate(remaining_ids)
        verify_elements(~is_unissued, "epoch", "ids of transitions", remaining_ids)
        is_cleared = remaining_ids // ring.num_envs < ring.floor[remaining_ids % ring.num_envs]
        verify_elements(~is_cleared, "epoch", "rows since the last clear", remaining_ids)
        is_remaining = torch.zeros(ring.slots * ring.num_envs, dtype=torch.bool, device=remaining_ids.device)
        is_remaining[slots[slots >= 0]] = True
        num_repeated_rows = int((slots >= 0).sum() - is_remaining.sum())
        verify(not num_repeated_rows, "epoch", "every row once", f"{num_repeated_rows} rows twice")

    def on_recover(self) -> None:
        self._remaining_ids = self._remaining_ids[self._ring.locate(self._remaining_ids)[0] >= 0]

    def on_clear(self) -> None:
        self._remaining_ids = self._remaining_ids[:0]

    def state(self) -> dict[str, torch.Tensor]:
        return {"ids": self._remaining_ids}

    def load_state(self, saved: Mapping[str, torch.Tensor]) -> None:
        self._remaining_ids = saved["ids"].to(self.storage.device, copy=True)
