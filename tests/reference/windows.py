"""Windows of single fields, straight from the definition: a list of an episode's steps, and an index into it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tests.reference.replay import Column

NO_LIMIT = 10**6


def at_offsets(episode: Sequence[Any], now: int, offsets: Sequence[int], pad: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the items of an episode at offsets from item `now`, and the mask of existing items."""
    inside = np.array([0 <= now + offset < len(episode) for offset in offsets])
    found = [np.asarray(episode[min(max(now + offset, 0), len(episode) - 1)]) for offset in offsets]
    kept = [x if real or pad == "repeat" else np.zeros_like(x) for x, real in zip(found, inside, strict=True)]
    return np.stack(kept), inside


def n_step(rewards: Sequence[np.ndarray], gamma: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the discounted sum of rewards in their dtype and the final discount, both computed in float64."""
    total, factor = rewards[0], 1.0
    for reward in rewards[1:]:
        factor *= gamma
        total = total + (factor * reward.astype(np.float64)).astype(reward.dtype)
    return total, np.array(factor * gamma, np.float32)


def read(
    column: Column, row: int, offsets: Mapping[tuple[str, ...], Sequence[int]], pad: str, n: int, gamma: float
) -> dict[tuple[str, ...], np.ndarray]:
    """Return the batch of one row; each step of the episode is a dict of leaves by path, next observation included."""
    before = [step["leaves"] for step in column.run_before(row, NO_LIMIT)]
    steps = before + [step["leaves"] for step in column.run(row, NO_LIMIT)]
    now = len(before)
    last = min(now + max(n, 1), len(steps)) - 1
    batch = {path: np.asarray(leaf) for path, leaf in steps[now].items()}
    for path in batch:
        if path[0] in ("terminated", "truncated", "next_obs"):
            batch[path] = np.asarray(steps[last][path])
    if n:
        for path in [path for path in batch if path[0] == "reward"]:
            sums = n_step([np.asarray(step[path]) for step in steps[now : last + 1]], gamma)
            batch[path], batch[("discount",)] = sums
    for named, wanted in offsets.items():
        stored = ("obs", *named[1:]) if named[0] == "next_obs" else named
        for path in [path for path in steps[now] if path[: len(stored)] == stored]:
            episode = [step[path] for step in steps]
            origin, target = now, path
            if stored[0] == "obs":
                episode.append(steps[-1][("next_obs", *path[1:])])
            if named[0] == "next_obs":
                origin, target = last + 1, ("next_obs", *path[1:])
            mask = (f"{named[0]}_mask", *named[1:])
            batch[target], batch[mask] = at_offsets(episode, origin, wanted, pad)
    return batch
