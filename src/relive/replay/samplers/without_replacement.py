"""Epochs: every stored transition once, in a random order, before any comes again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from relive.errors import NotReadyError, explain
from relive.kernels.reader import shuffled
from relive.replay.samplers.sampler import Chosen, Sampler
from relive.schema.invariants import require, require_all
from relive.schema.vocabulary import suggests_init_keywords


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
