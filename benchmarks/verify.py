"""Checks of a library's results before anything is timed.

Each check returns None, or one sentence that says what differs. Such a library is not timed.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch

from relive_conformance.adapters import Batch, Epoch, Gae, Recurrent, Rollout

from .rollouts import RolloutData, reference_gae

Array = np.ndarray[Any, Any]

TOLERANCE = 1e-4
"""Relative and absolute tolerance: float32 sums over a few hundred steps against float64."""


def check_gae(gae: Gae, data: RolloutData, *, gamma: float, lam: float) -> str | None:
    """Compare advantages and returns with the float64 recurrence."""
    results = gae.read(gae.prepare(data.trajectory, gamma=gamma, lam=lam)())
    expected = reference_gae(data.trajectory, gamma=gamma, lam=lam)
    for name, got, want in zip(("advantage", "return"), results, expected, strict=True):
        if reason := _differs(name, np.asarray(got), want):
            return reason
    return None


def check_rollout(
    rollout: Rollout, batch_size: int, data: tuple[RolloutData, ...], *, gamma: float, lam: float
) -> str | None:
    """Fill, read and clear once for each of `data`: a later rollout may contain nothing of an earlier one."""
    for one in data:
        fill(rollout, one, gamma=gamma, lam=lam)
        if reason := check_epoch(rollout, batch_size, one, gamma=gamma, lam=lam):
            return reason
        rollout.clear()
    return None


def fill(rollout: Rollout, data: RolloutData, *, gamma: float, lam: float) -> None:
    """Add every step and compute advantages."""
    for step in data.steps:
        rollout.add(rollout.prepare(step))
    last_value, last_done = torch.from_numpy(data.trajectory.last_value), data.trajectory.ended[-1]
    rollout.advantage(last_value, last_done, gamma=gamma, lam=lam)


def check_epoch(epoch: Epoch, batch_size: int, data: RolloutData, *, gamma: float, lam: float) -> str | None:
    """Read two epochs: every row once, with its own fields, in batches of the requested size, in different orders."""
    orders: list[Array] = []
    for _ in range(2):
        batches = [epoch.read(batch) for batch in epoch.minibatches(batch_size)]
        if reason := _check_batches(batches, batch_size):
            return reason
        whole = Batch(*(torch.cat(field) for field in zip(*batches, strict=True)))
        order = whole.obs[:, 0].long().numpy()
        if reason := _check_rows(whole, order, epoch.standardizes, data, gamma=gamma, lam=lam):
            return reason
        orders.append(order)
    if np.array_equal(orders[0], orders[1]):
        return "two epochs have the same order"
    if np.array_equal(np.diff(orders[0]), np.ones(len(orders[0]) - 1)):
        return "rows are not shuffled"
    return None


def check_sequences(rollout: Recurrent, num_steps: int, data: RolloutData, state: Array) -> str | None:
    """Read an epoch: consecutive steps of one episode, no step twice, each sequence with the state before it."""
    seen: list[int] = []
    envs, flat = data.shape.num_envs, state.reshape(-1, state.shape[-1])
    ended = data.trajectory.ended.reshape(-1)
    for batch in rollout.minibatches(num_steps):
        rows, states = rollout.read(batch)
        for run in rows:
            if any(after != before + envs for before, after in pairwise(run)):
                return "a sequence has steps that do not follow each other"
            if ended[run[:-1]].any():
                return "a sequence crosses an end"
        if not np.array_equal(states, flat[[run[0] for run in rows]]):
            return "a sequence starts from another state"
        seen += [row for run in rows for row in run]
    if len(set(seen)) != len(seen):
        return "a step appears twice"
    # Steps after the last full sequence may be dropped, which is documented behaviour.
    return None if len(seen) >= 0.75 * len(ended) else f"an epoch has {len(seen)} steps of {len(ended)}"


def _check_batches(batches: list[Batch], batch_size: int) -> str | None:
    for batch in batches:
        for name, field in zip(Batch._fields, batch, strict=True):
            if not isinstance(field, torch.Tensor) or field.dtype != torch.float32:
                return f"{name} is no float32 tensor"
            if len(field) != batch_size:
                return f"a minibatch has {len(field)} rows of {name} instead of {batch_size}"
    return None


def _check_rows(
    whole: Batch, order: Array, standardizes: bool, data: RolloutData, *, gamma: float, lam: float
) -> str | None:
    rows = data.shape.num_steps * data.shape.num_envs
    if not np.array_equal(np.sort(order), np.arange(rows)):
        return f"an epoch has {len(np.unique(order))} different rows of {rows}"
    for name in ("obs", "action", "value", "log_prob"):
        if not np.array_equal(getattr(whole, name).numpy(), data.stacked(name)[order]):
            return f"{name} is not what was stored"
    advantage, return_ = reference_gae(data.trajectory, gamma=gamma, lam=lam)
    if standardizes:
        advantage = (advantage - advantage.mean()) / advantage.std(ddof=1)
    return _differs("advantage", whole.advantage.numpy(), advantage.reshape(-1)[order]) or _differs(
        "return", whole.return_.numpy(), return_.reshape(-1)[order]
    )


def _differs(name: str, got: Array, want: Array) -> str | None:
    if got.shape != want.shape:
        return f"{name} has shape {got.shape} instead of {want.shape}"
    if np.allclose(got, want, rtol=TOLERANCE, atol=TOLERANCE):
        return None
    return f"{name} differs from the float64 reference by up to {np.abs(got - want).max():.3g}"
