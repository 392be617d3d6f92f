"""Continuity of steps: whether each `obs` equals the previous `next_obs`. Suspicious data is a `DataWarning`.

*Cuts*: of at least 64 steps that follow no end, more than half do not start at the previous `next_obs`. *Resets*: at
least 8 ends, and the `next_obs` of each equals the first observation of the next episode but not its own `obs`. A
truncated end counts only if its `next_obs` differs from that first observation, or under SAME_STEP, since the episode
may simply continue after the truncation. Episodes of one step do not count, because a bandit may pass the next context.
*Restarts*: an environment was reset without `cut()` although most steps are continuous: either the reset step
(NEXT_STEP) does not start with the last observation, or the buffer has statistics and an unfinished episode is not
continued.

The counts belong to the object that writes, not to the stored rows. Writes update the counts; the warning is issued at
the start of the next call, before that call changes anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from relive.errors import explain, explain_infinite_rewards
from relive.replay.ring import FINAL, HISTORY, TRANSITION

if TYPE_CHECKING:
    from relive.replay.row_storage import RowStorage

MIN_STEPS, MIN_ENDS = 64, 8


@dataclass(frozen=True)
class StepContinuityStats:
    """Numbers of steps, ends and restarts that the warnings about continuity need."""

    followed: int = 0
    """Number of steps whose previous step did not end an episode."""
    cut: int = 0
    """Number of steps among `followed` that do not start at the previous `next_obs`."""
    ended: int = 0
    """Number of ends of episodes that were followed by another step."""
    reset: int = 0
    """Number of ends among `ended` whose `next_obs` is the next episode's first observation, not their own `obs`."""

    restarted: int = 0
    """Number of steps after a reset without `cut()`."""
    infinite: int = 0
    """Number of writes with an infinite or NaN reward."""

    time_limits: int = field(default=0, compare=False)
    """Number of stored ends that are only truncated; 0 in the statistics of writes, which do not need it."""
    time_limits_to_start: int = field(default=0, compare=False)
    """Number of ends among `time_limits` whose `next_obs` is the next episode's first observation, not their own `obs`.

    They may be reset observations passed as next ones, or episodes that continue after the truncation.
    """

    def __add__(self, other: StepContinuityStats) -> StepContinuityStats:
        return StepContinuityStats(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def warnings(self) -> Iterator[tuple[str, str]]:
        """Yield (name, message) for every suspicious count. The native core has the same conditions."""
        if self.followed >= MIN_STEPS and 2 * self.cut > self.followed:
            remedy = (
                "Assign obs = step[0] after every step. A step that starts elsewhere cuts its episode: it takes two "
                "rows, and n-step returns and sequences stop there. Add observations unchanged and normalise when "
                'sampling; keep unordered rows with next_obs="stored"; give each player of turn-based self-play a '
                "column of its own (num_envs)."
            )
            got = f"{self.cut:,} of {self.followed:,} that do not"
            yield "cuts", explain("obs", "steps that start where the step before led", got, remedy)
        if self.ended >= MIN_ENDS and self.reset == self.ended:
            expected = "the observation that an episode ended with"
            got = f"the first one of the next episode at all {self.ended:,} ends"
            remedy = (
                'Use add_step, or pass info["final_obs"] where an episode ended (SAME_STEP resets in the same step). '
                "If the environment resets in the step after an end, declare autoreset=NEXT_STEP."
            )
            yield "resets", explain("next_obs", expected, got, remedy)
        if self.restarted and 2 * self.cut < self.followed:
            remedy = (
                "Call cut() after env.reset(), also when a run is resumed: otherwise statistics join two episodes, and "
                "under NEXT_STEP the first step of an environment that was about to reset is dropped."
            )
            got = f"{self.restarted:,} without an end or cut() that start elsewhere"
            yield "restarts", explain("obs", "steps that start where the step before led", got, remedy)
        if self.infinite:
            yield "infinite", explain_infinite_rewards(self.infinite)


@dataclass
class StepContinuityCounter:
    """The counts of one buffer object, and the names of the warnings that were already issued."""

    is_on: bool = True
    """Whether writes update the counts. If not, `check()` counts the stored rows: on devices this saves launches."""
    stats: StepContinuityStats = field(default_factory=StepContinuityStats)
    issued_names: set[str] = field(default_factory=set)

    def take_next_warning(self, stats: StepContinuityStats) -> str | None:
        """Return the first message of `stats` that was not issued yet; None if there is none."""
        for name, message in stats.warnings():
            if name not in self.issued_names:
                self.issued_names.add(name)
                return message
        return None


def count_step_continuity(
    rows: RowStorage, obs: list[torch.Tensor], env: torch.Tensor, head: torch.Tensor, is_open: torch.Tensor,
    resetting: torch.Tensor,
) -> StepContinuityStats:  # fmt: skip
    """Count whether a step of the environments `env` [K] starts where the previous one led, before it is written.

    `head`, `is_open` and `resetting` [K] are the ring state of these environments, on the CPU.
    """
    ring = rows.ring
    if rows.stores_next_obs:
        return StepContinuityStats()
    envs, heads, is_pending = env.numpy(), head.numpy(), is_open.numpy()
    pending, final = ((heads - age) % ring.slots * ring.num_envs + envs for age in (0, 1))
    continues_last = _find_equal_obs(rows, np.where(is_pending, pending, final), obs)
    follows = is_pending & ~(resetting.numpy() & rows.next_step)
    is_watched = is_pending if rows.has_stats else is_pending & ~follows
    restarted = int((is_watched & ~continues_last).sum())
    stats = StepContinuityStats(int(follows.sum()), int((follows & ~continues_last).sum()), restarted=restarted)
    if rows.next_step:
        return stats
    is_end, is_over, next_obs_differs = _find_episode_ends(rows, final)
    return stats + _count_episode_ends(
        is_end & ~is_pending, is_over | rows.same_step, continues_last & next_obs_differs
    )


def count_stored_continuity(rows: RowStorage) -> StepContinuityStats:
    """Return the statistics of the stored steps. An intended `cut()` cannot be distinguished from other cuts."""
    ring = rows.ring
    if rows.stores_next_obs:
        return StepContinuityStats()
    is_step = (ring.kind == TRANSITION) | (ring.kind == HISTORY)
    oldest = ring.row_numbers() <= torch.maximum(ring.floor, ring.newest_rows() - ring.slots + 1)
    continues = is_step & is_step.roll(1, 0) & ~ring.first & ~oldest
    final = ((ring.kind == FINAL) & (is_step & ring.first & ~oldest).roll(-1, 0)).view(-1).nonzero().squeeze(1)
    final = final[is_step.view(-1)[ring.shift(final, -1)]]
    last_steps, start = ring.shift(final, -1), ring.shift(final)
    flags = [flag.view(-1)[last_steps] for flag in rows.end_flags()]
    cut = int((~(flags[0] | flags[1])).sum())
    stats = StepContinuityStats(int(continues.sum()) + cut, cut)
    if rows.next_step or not len(final):
        return stats
    is_end, is_over, next_obs_differs = _find_episode_ends(rows, final.cpu().numpy())
    obs = [rows.read_bits(i, start) for i in rows.obs_leaves]
    leads_to_start = next_obs_differs & _find_equal_obs(rows, final.cpu().numpy(), obs)
    is_limit = is_end & ~is_over
    limits = int(is_limit.sum()), int((is_limit & leads_to_start).sum())
    stats = replace(stats, time_limits=limits[0], time_limits_to_start=limits[1])
    return stats + _count_episode_ends(is_end, is_over | rows.same_step, leads_to_start)


def _count_episode_ends(is_end: np.ndarray, is_over: np.ndarray, leads_to_start: np.ndarray) -> StepContinuityStats:
    """Count the ends of episodes, without truncated ends whose next observation may continue the same episode."""
    is_counted = is_end & ~(leads_to_start & ~is_over)
    return StepContinuityStats(ended=int(is_counted.sum()), reset=int((is_counted & leads_to_start).sum()))


def _find_episode_ends(rows: RowStorage, final_slots: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return three masks of the steps whose next observations are in the slots `final`.

    The masks are True for the ends of episodes of several steps, for terminated steps, and for steps whose `next_obs`
    differs from their `obs`.
    """
    ring = rows.ring
    last_steps = (final_slots - ring.num_envs) % (ring.slots * ring.num_envs)
    kind, first = (tensor.cpu().numpy().reshape(-1) for tensor in (ring.kind, ring.first))
    terminated, truncated = (flag.view(-1).cpu().numpy()[last_steps] for flag in rows.end_flags())
    is_step = (kind[last_steps] == TRANSITION) | (kind[last_steps] == HISTORY)
    is_end = is_step & (kind[final_slots] == FINAL) & ~first[last_steps] & (terminated | truncated)
    is_equal = np.ones(len(final_slots), bool)
    for i in rows.obs_leaves:
        is_equal &= (_read_leaf_bytes(rows, last_steps, i) == _read_leaf_bytes(rows, final_slots, i)).all(1)
    return is_end, terminated, ~is_equal


def _find_equal_obs(rows: RowStorage, slots: np.ndarray, obs: list[torch.Tensor]) -> np.ndarray:
    """Return a mask of the flat slots whose observations equal `obs` bit by bit."""
    is_equal = np.ones(len(slots), bool)
    for i, leaf_obs in zip(rows.obs_leaves, obs, strict=True):
        is_equal &= (_read_leaf_bytes(rows, slots, i) == _view_as_bytes(leaf_obs, len(slots))).all(1)
    return is_equal


def _read_leaf_bytes(rows: RowStorage, slots: np.ndarray, leaf: int) -> np.ndarray:
    """Return the bytes [slots, bytes] of an observation's leaf at flat slots, with frame stacks rebuilt."""
    if leaf in rows.stacked:
        return _view_as_bytes(rows.read_bits(leaf, torch.from_numpy(slots).to(rows.device)), len(slots))
    return _view_as_bytes(rows.leaves[leaf], rows.ring.kind.numel())[slots]


def _view_as_bytes(tensor: torch.Tensor, num_items: int) -> np.ndarray:
    """Return the bytes of a tensor as an array [num_items, bytes] on the host."""
    tensor = tensor.cpu().contiguous()
    # `as_strided` is needed because an axis of length 1 may have any stride, which `view(dtype)` rejects.
    flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
    return flat.reshape(num_items, flat.size // max(num_items, 1))
