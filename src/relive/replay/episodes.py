"""The stored transitions of a replay buffer in the order in which they were lived."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from relive import lazy
from relive.replay.drawing import Drawing
from relive.replay.store import ReplayStore
from relive.schema.assembly import import_tensordict


class Ordered(NamedTuple):
    """All transitions, by environment and then by time."""

    ids: torch.Tensor
    slots: torch.Tensor
    """Where they are, in the flat list of slots."""
    starts: torch.Tensor
    """Which of them start an episode, or what is left of it."""

    def episodes(self) -> list[torch.Tensor]:
        """The ids of each episode."""
        edges = [*self.starts.nonzero().squeeze(1).tolist(), len(self.starts)]
        return [self.ids[start:stop] for start, stop in pairwise(edges)]


def read_episodes(store: ReplayStore, drawing: Drawing, lock: AbstractContextManager[Any]) -> Iterator[lazy.TensorDict]:
    """The transitions of each episode; each is read when it comes up, without rows that were overwritten by then."""
    import_tensordict()
    with lock:
        pieces = ordered(store).episodes()

    def still_stored(ids: torch.Tensor) -> lazy.TensorDict:
        with lock:
            slots = store.locate(ids)
            return drawing.read_slots(slots[slots >= 0])

    return filter(len, map(still_stored, pieces))


def ordered(store: ReplayStore) -> Ordered:
    """Sort what is stored."""
    ring, slots = store.memory.ring, store.stored()
    ids = store.ids(slots)
    env, row = ids % ring.num_envs, ids // ring.num_envs
    order = torch.argsort(env * (int(row.max()) + 1 if len(row) else 1) + row)
    ids, slots = ids[order], slots[order]
    follows = (ids[1:] == ids[:-1] + ring.num_envs).nonzero().squeeze(1) + 1
    starts = torch.ones_like(slots, dtype=torch.bool).index_fill(0, follows, False)
    return Ordered(ids, slots, starts | ring.first.view(-1)[slots])
