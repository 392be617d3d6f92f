"""Runs of steps, for recurrent learners and world models."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

import torch

from relive.errors import SchemaError, explain
from relive.fields.schema import Carry, positive
from relive.fields.vocabulary import worded
from relive.randomness import Randomness
from relive.replay.storage import ReplayStorage
from relive.replay.views.protocol import Leaves, named, named_next, require_order

_MOST_STEPS = 2**30
_MARKS = ("mask",), ("train",), ("is_first",)


@worded
@dataclass(frozen=True)
class Sequence:
    """`burn_in + length` steps [B, L, …] around each drawn row, which is the first trained one.

    Burn-in lies before it, as much of its episode as is still stored, so that its length varies by row. Real steps come
    first and padding, which is zero, only at the end: position 0 is always real, and `Carry` fields [B, …] are its
    state. "mask" says which steps are real, "train" which of them are no burn-in, "is_first" which start an episode.
    "index" and "weight" are those of the drawn row.

    Args:
        length: steps to train on, at least 1.
        burn_in: at most so many steps before them, for a recurrent network to find its state.
        cross_episodes: go on into the next episode, where "is_first" says that the state starts anew; otherwise a
            sequence ends with its episode.
    """

    length: int
    burn_in: int = 0
    cross_episodes: bool = False

    def __post_init__(self) -> None:
        positive("Sequence.length", self.length)
        if isinstance(self.burn_in, bool) or not isinstance(self.burn_in, Integral) or self.burn_in < 0:
            raise SchemaError(
                explain("Sequence.burn_in", "a non-negative int", repr(self.burn_in), "Pass an int of at least 0.")
            )

    def check(self, storage: ReplayStorage) -> None:
        """Refuse a buffer whose rows are in no order, and steps that no memory holds."""
        require_order(storage, self)
        if self.burn_in + self.length > _MOST_STEPS:
            got = f"{self.burn_in} + {self.length}"
            raise MemoryError(explain("Sequence", f"at most {_MOST_STEPS} steps", got, "Pass a shorter length."))

    def read(self, storage: ReplayStorage, slots: torch.Tensor, random: Randomness) -> Leaves:
        carried = _carried(storage)
        columns = [i for i in range(len(storage.columns)) if i not in carried]
        found = storage.sequences(slots, self.burn_in, self.length, self.cross_episodes, carried)
        if found is not None:
            paths = storage.schema.paths
            steps, starts = ([paths[i] for i in which] for which in (columns, carried))
            names = *steps, *storage.next_paths, *_MARKS, *starts, ("index",)
            return dict(zip(names, found, strict=True))
        windows, is_first = storage.windows(slots, self.burn_in, self.length, cross=self.cross_episodes)
        flat = windows.view(-1)
        steps = named(storage, storage.take(flat, columns, padded=True), columns)
        steps |= named_next(storage, storage.take_next(flat, padded=True))
        batch = {path: leaf.view(*windows.shape, *leaf.shape[1:]) for path, leaf in steps.items()}
        return batch | _marks(slots, windows, is_first) | _at_start(storage, windows, carried)

    def windows(self, storage: ReplayStorage, slots: torch.Tensor) -> torch.Tensor:
        """The steps that are read: [B, L] flat slots, -1 where there is none."""
        if self.cross_episodes:
            remedy = "Pass cross_episodes=False: goals belong to one episode."
            raise SchemaError(explain("Sequence", "one episode", "cross_episodes=True", remedy))
        return storage.windows(slots, self.burn_in, self.length)[0]

    def reduce(self, storage: ReplayStorage, slots: torch.Tensor, windows: torch.Tensor, steps: Leaves) -> Leaves:
        """A batch from its steps [B, L, …]."""
        carried = _carried(storage)
        hidden = {storage.schema.paths[i] for i in carried}
        batch = {path: leaf for path, leaf in steps.items() if path not in hidden}
        is_first = storage.ring.first.view(-1)[windows.clamp(min=0)] & (windows >= 0)
        return batch | _marks(slots, windows, is_first) | _at_start(storage, windows, carried)


def _marks(slots: torch.Tensor, windows: torch.Tensor, is_first: torch.Tensor) -> Leaves:
    mask = windows >= 0
    drawn = (windows == slots.unsqueeze(1)).cumsum(1) > 0  # from the drawn row on
    return dict(zip(_MARKS, (mask, mask & drawn, is_first), strict=True))


def _carried(storage: ReplayStorage) -> list[int]:
    return [i for i, field in enumerate(storage.schema.fields) if isinstance(field, Carry)]


def _at_start(storage: ReplayStorage, windows: torch.Tensor, carried: list[int]) -> Leaves:
    """The carried leaves at the first step of each window [B, …]."""
    return named(storage, storage.take(windows[:, 0].contiguous(), carried), carried) if carried else {}
