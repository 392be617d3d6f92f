"""Checks that a replay buffer returns what was added, before anything is timed.

Each check returns None, or one sentence that says what differs. Such a library is not timed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from relive_conformance.adapters import ALPHA, BETA, PrioritizedReplay, Replay, ReplayBatch, Transitions

from .experience import Experience

Array = np.ndarray[Any, Any]

TOLERANCE = 1e-5
"""Relative and absolute tolerance: sums of a few float32 rewards, powers of float32 priorities."""
_WEIGHT_TOLERANCE = 2e-3
"""A wider tolerance: each library adds a different small number to priorities."""
_MIN_ROWS_CHECKED = 2048
"""Minimum number of checked rows: about ten of them end an episode."""


def fill(replay: Replay, data: Experience) -> None:
    """Store all rows of a single environment."""
    for block in data.blocks():
        replay.fill(block)


def check_add(replay: Replay, data: Experience) -> str | None:
    """Add every step, which must be more than the capacity: only the newest transitions may come out."""
    for step in data.steps():
        replay.add(replay.prepare(step))
    oldest = len(data) - data.shape.capacity
    return check_transitions(replay, data, batch_size=128, oldest=oldest)


def check_transitions(replay: Replay, data: Experience, batch_size: int, oldest: int = 0) -> str | None:
    """Check that every sampled transition equals a stored one in all fields, and that two draws differ."""
    seen: list[Array] = []
    for _ in range(max(2, -(-_MIN_ROWS_CHECKED // batch_size))):
        batch = replay.read(replay.sample(batch_size))
        rows = data.find_rows(batch.obs)
        if len(rows) != batch_size:
            return f"a batch has {len(rows)} rows instead of {batch_size}"
        if rows.min() < oldest:
            return "an observation was never stored, or is older than the capacity allows"
        if reason := _differs(batch, data.rows(rows)):
            return reason
        seen.append(rows)
    return "two batches are the same" if np.array_equal(seen[0], seen[1]) else None


def check_n_step(replay: Replay, data: Experience, n: int, gamma: float, *, strictly: bool) -> str | None:
    """Check that rewards are summed up to the end of the episode, with next observation and flag of the last step.

    Unless `strictly`, the next observation after a termination is not checked: no target uses it.
    """
    batch = replay.read(replay.sample(1024))
    rows = data.find_rows(batch.obs)
    count = np.minimum(n, data.last_of_episode()[rows] - rows + 1)
    counted = np.arange(n) < count[:, None]
    reward = data.reward[np.minimum(rows[:, None] + np.arange(n), len(data) - 1)].astype(np.float64)
    first, last = data.rows(rows), data.rows(rows + count - 1)
    expected = Transitions(
        first.obs,
        first.action,
        (counted * gamma ** np.arange(n) * reward).sum(1),
        last.terminated,
        last.truncated,
        last.next_obs,
    )
    if reason := _differs(batch, expected, next_matters=None if strictly else ~last.terminated):
        return reason
    if batch.discount is not None and not np.allclose(batch.discount, gamma**count, rtol=TOLERANCE):
        return "discount is not gamma to the number of steps"
    return None


def check_sequences(
    replay: Replay, data: Experience, batch_size: int, length: int, *, within_episodes: bool
) -> str | None:
    """Check that the steps of a sequence are consecutive stored steps; masked steps are not checked."""
    batch, another = (replay.read(replay.sample(batch_size)) for _ in range(2))
    if np.array_equal(batch.obs[:, 0], another.obs[:, 0]):
        return "two batches are the same"
    if batch.reward.shape != (batch_size, length):
        return f"rewards have shape {batch.reward.shape} instead of {(batch_size, length)}"
    mask = np.ones_like(batch.reward, dtype=bool) if batch.mask is None else batch.mask
    start = data.find_rows(batch.obs[:, 0])
    rows = start[:, None] + np.arange(length)
    last = data.last_of_episode()[start]
    if within_episodes and not np.array_equal(mask, rows <= last[:, None]):
        return "the mask does not end with the episode"
    steps = ReplayBatch(*(leaf[mask] for leaf in batch[:5] if leaf is not None))
    return _differs(steps, data.rows(rows[mask]))


def check_priorities(replay: PrioritizedReplay, data: Experience) -> str | None:
    """Set known priorities until every row has one, then compare weights, and how often rows are drawn.

    Libraries divide weights by the largest of the batch or of the buffer, so they are compared up to a factor.
    """
    fill(replay, data)
    priority = np.random.default_rng(0).uniform(0.5, 2.0, len(data)).astype(np.float32)
    known = np.zeros(len(data), dtype=bool)
    for _ in range(200):
        batch = replay.sample(256)
        rows = data.find_rows(replay.read(batch).obs)
        replay.update(batch, replay.priority(priority[rows]))
        known[rows] = True
    batches: list[Array] = []
    for _ in range(100):
        batch = replay.read(replay.sample(256))
        rows = data.find_rows(batch.obs)
        batches.append(rows)
        if batch.weight is None or batch.weight.min() <= 0 or batch.weight.max() > 1 + 1e-6:
            return "weights are not in (0, 1]"
        expected = (priority[rows] / priority[rows].min()) ** (-ALPHA * BETA)
        if not np.allclose(batch.weight / batch.weight.max(), expected, rtol=_WEIGHT_TOLERANCE):
            return "weights are not p^-beta"
    share = priority[known] ** ALPHA
    # The mean of 1/p over rows drawn in proportion to p is 1 over the mean of p.
    mean = float((1 / priority[np.concatenate(batches)] ** ALPHA).mean())
    if abs(mean * float(share.mean()) - 1) > 0.02:
        return "rows are not drawn in proportion to their priority"
    return None


def _differs(batch: ReplayBatch, expected: Transitions, next_matters: Array | None = None) -> str | None:
    for name in ("obs", "action", "terminated"):
        if not np.array_equal(getattr(batch, name), getattr(expected, name)):
            return f"{name} is not what was stored"
    if batch.reward.shape != expected.reward.shape or not np.allclose(
        batch.reward, expected.reward, rtol=TOLERANCE, atol=TOLERANCE
    ):
        return "reward is not what it should be"
    rows = slice(None) if next_matters is None else next_matters
    wrong = (batch.next_obs[rows] != expected.next_obs[rows]).reshape(len(batch.next_obs[rows]), -1).any(axis=1)
    if not wrong.any():
        return None
    ended = (expected.terminated | expected.truncated)[rows][wrong].all()
    return f"next_obs is not what was stored{', where an episode ended' if ended else ''}"
