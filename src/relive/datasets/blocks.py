"""Steps as every reader gives them: stretches of rows in a file's order, and blocks of one episode's steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from relive.fields.schema import map_leaves

STEP = ("obs", "action", "reward", "terminated", "truncated")
"""The fields of a step that every buffer has."""

BLOCK_BYTES = 1 << 21
"""Readers hold about this much of a file at once."""

_HELD = 2
"""Rows that wait for their successors. Two, so that an episode's last block has the step before the last one too."""


class Block(NamedTuple):
    """Consecutive steps of one episode: arrays [T, …], or nested dicts of them."""

    where: str
    """The episode, for messages."""
    obs: Any
    next_obs: Any
    action: Any
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    extra: dict[str, Any]
    is_last: bool = True
    """Whether the episode ends with this block."""
    knows_next: bool = True
    """Whether the last next observation is the true one, not the last observation again."""

    @property
    def size(self) -> int:
        """The number of steps."""
        return len(self.terminated)

    def without_last(self) -> Block:
        """All steps but the last, whose observation is the final one now; its time limit is the one before's."""
        truncated = self.truncated[:-1].copy()
        truncated[-1:] |= self.truncated[-1]
        names = ("obs", "next_obs", "action", "reward", "terminated", "extra")
        kept = {name: sliced(getattr(self, name), slice(None, -1)) for name in names}
        return self._replace(**kept, truncated=truncated, knows_next=True)


class Stretch(NamedTuple):
    """Consecutive rows of a file, which may belong to several episodes."""

    fields: dict[str, Any]
    """Arrays [K, …] by field: "obs" and "action"; the file may lack "reward", "terminated" and "truncated"."""
    episode: np.ndarray
    """The episode of each row."""
    next_obs: Any = None
    """The next observations, where the file has its own."""


def split(name: str, stretches: Iterable[Stretch], final_obs: Callable[[int], Any] | None = None) -> Iterator[Block]:
    """The blocks that stretches consist of.

    Where a file has no next observations, the next observation of a row is the row after it; `final_obs` gives the true
    final observation [1, …] of an episode. Where a file does not say what was truncated, an episode that does not
    terminate is truncated at its last step.
    """
    held: Stretch | None = None
    for stretch in stretches:
        rows = stretch if held is None else _joined(held, stretch)
        edges = [0, *(np.flatnonzero(np.diff(rows.episode)) + 1).tolist(), len(rows.episode)]
        for start, stop in pairwise(edges[:-1]):
            yield _block(name, rows, start, stop, final_obs, is_last=True)
        last = max(edges[-2], edges[-1] - _HELD)
        if last > edges[-2]:
            yield _block(name, rows, edges[-2], last, final_obs, is_last=False)
        held = _part(rows, slice(last, None))
    if held is not None:
        yield _block(name, held, 0, len(held.episode), final_obs, is_last=True)


def _block(
    name: str, rows: Stretch, start: int, stop: int, final_obs: Callable[[int], Any] | None, *, is_last: bool
) -> Block:
    number, at = int(rows.episode[start]), slice(start, stop)
    fields = {field: sliced(tree, at) for field, tree in rows.fields.items()}
    knows_next = True
    if rows.next_obs is not None:
        following = sliced(rows.next_obs, at)
    elif not is_last:
        following = sliced(rows.fields["obs"], slice(start + 1, stop + 1))
    else:
        knows_next = final_obs is not None
        final = sliced(fields["obs"], slice(-1, None)) if final_obs is None else final_obs(number)
        following = joined(sliced(fields["obs"], slice(1, None)), final)
    size = stop - start
    terminated = fields.pop("terminated", np.zeros(size, bool))
    truncated = fields.pop("truncated", None)
    if truncated is None:
        truncated = np.zeros(size, bool)
        truncated[-1] = is_last and not terminated[-1]
    obs, action, reward = fields.pop("obs"), fields.pop("action"), fields.pop("reward", np.zeros(size, np.float32))
    where = f"{name}, episode {number}"
    return Block(where, obs, following, action, reward, terminated, truncated, fields, is_last, knows_next)


def _joined(first: Stretch, second: Stretch) -> Stretch:
    next_obs = None if first.next_obs is None else joined(first.next_obs, second.next_obs)
    return Stretch(joined(first.fields, second.fields), np.concatenate([first.episode, second.episode]), next_obs)


def _part(rows: Stretch, at: slice) -> Stretch:
    next_obs = None if rows.next_obs is None else sliced(rows.next_obs, at)
    return Stretch(sliced(rows.fields, at), rows.episode[at], next_obs)


def sliced(tree: Any, at: Any) -> Any:
    """A nested dict with every leaf indexed by `at`."""
    return map_leaves(lambda leaf: leaf[at], tree)


def joined(tree: Any, more: Any) -> Any:
    """Two nested dicts with the same keys as one, each leaf joined along its first axis."""
    return map_leaves(lambda *leaves: np.concatenate(leaves), tree, more)
