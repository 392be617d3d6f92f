"""Sequences of a rollout as lists of row numbers, and of replay as lists of steps: slow, and obviously right."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

Step = TypeVar("Step")


def sequences(
    ended: Tensor, mask: Tensor, length: int | None, mode: str, split_episodes: bool, keep_tail: bool
) -> list[list[int]]:
    """Return the rows t·N + n of every sequence, ordered by environment and time; `ended` and `mask` are [T, N]."""
    found = []
    for run in runs(ended, mask, split_episodes):
        found += cut(run, length or len(run), mode, keep_tail)
    return found


def runs(ended: Tensor, mask: Tensor, split_episodes: bool) -> list[list[int]]:
    """Return the valid rows that may be in one sequence."""
    steps, envs = ended.shape
    found: list[list[int]] = []
    for env in range(envs):
        run: list[int] = []
        for t in range(steps):
            if not mask[t, env]:
                continue
            run.append(t * envs + env)
            if split_episodes and ended[t, env]:
                found.append(run)
                run = []
        found.append(run)
    return [run for run in found if run]


def cut(run: list[int], length: int, mode: str, keep_tail: bool) -> list[list[int]]:
    if len(run) < length:
        return [run]
    stride = {"chunked": length, "overlap": max(length // 2, 1), "every": 1}[mode]
    starts = [start for start in range(0, len(run), stride) if start + length <= len(run)]
    found = [run[start : start + length] for start in starts]
    if keep_tail and found[-1][-1] != run[-1]:
        found.append(run[starts[-1] + stride :])
    return found


def around(
    before: list[Step], after: list[Step], length: int, burn_in: int
) -> tuple[list[Step | None], list[bool], list[bool]]:
    """Return the steps of `rl.Sequence(length, burn_in)`, the mask of real steps, and the mask of trained steps.

    `before` are the stored steps of the episode before the drawn row, `after` are the drawn row and the steps after it.
    """
    burnt = before[-burn_in:] if burn_in else []
    trained = after[:length]
    padding = burn_in + length - len(burnt) - len(trained)
    steps = [*burnt, *trained, *[None] * padding]
    train = [False] * len(burnt) + [True] * len(trained) + [False] * padding
    return steps, [step is not None for step in steps], train
