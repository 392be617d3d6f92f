"""How steps are joined, so that legal data that looks like a mistake is noticed (`DataWarning`).

*Cuts*: of at least 64 steps that follow no end, more than half do not start where the step before led. *Resets*: at
least 8 ends, all of which lead to the observation that the next episode starts with, and not to the one that they
started from. A truncated end may be an episode that simply goes on: it counts only if it leads elsewhere, or if the
environments are known to reset in the same step. An episode of one step tells nothing: a bandit may well pass the next
context. *Restarts*: a step that shows a reset from outside that no `cut()` announced, where most steps are joined: the
row that only resets (NEXT_STEP) does not start with the observation that the episode ended with, or the buffer has
statistics and an episode that has not ended is not continued. Counters belong to the object that writes, never to what
is stored. They are counted while steps are written; the warning is issued at the start of the next call, before that
changes anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from relive.errors import explain, infinite_rewards
from relive.replay.ring import FINAL, HISTORY, TRANSITION

if TYPE_CHECKING:
    from relive.replay.row_storage import RowStorage

MIN_STEPS, MIN_ENDS = 64, 8


@dataclass(frozen=True)
class ContinuityStats:
    """Counts of joined and unjoined steps."""

    followed: int = 0
    """Steps after one that did not end its episode."""
    cut: int = 0
    """Steps among `followed` that do not start where the one before led."""
    ended: int = 0
    """Ends of episodes that a step was seen after."""
    reset: int = 0
    """Ends among `ended` that lead to the observation of that step and not to their own one."""

    restarted: int = 0
    """Steps that show a reset from outside that was not announced by `cut()`."""
    infinite: int = 0
    """Writes with a reward that is infinite or no number."""

    def __add__(self, other: ContinuityStats) -> ContinuityStats:
        return ContinuityStats(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def warnings(self) -> Iterator[tuple[str, str]]:
        """Yield a name and a message for everything that looks like a mistake."""
        if self.followed >= MIN_STEPS and 2 * self.cut > self.followed:
            yield "cuts", self.cut_warning()
        if self.ended >= MIN_ENDS and self.reset == self.ended:
            yield "resets", self.reset_warning()
        if self.restarted and 2 * self.cut < self.followed:
            yield "restarts", self.restart_warning()
        if self.infinite:
            yield "infinite", self.reward_warning()

    def cut_warning(self) -> str:
        """Episodes are cut at most steps."""
        remedy = (
            "Assign obs = step[0] after every step. A step that starts elsewhere cuts its episode: it takes two rows, "
            "and n-step returns and sequences stop there. Add "
            'observations unchanged and normalise when sampling; keep unordered rows with next_obs="stored"; give '
            "each player of turn-based self-play a column of its own (num_envs)."
        )
        got = f"{self.cut:,} of {self.followed:,} that do not"
        return explain("obs", "steps that start where the step before led", got, remedy)

    def reset_warning(self) -> str:
        """Ends lead to where the next episodes start."""
        expected = "the observation that an episode ended with"
        got = f"the first one of the next episode at all {self.ended:,} ends"
        remedy = (
            'Use add_step, or pass info["final_obs"] where an episode ended (SAME_STEP resets in the same step). If the'
            " environment resets in the step after an end, declare autoreset=NEXT_STEP."
        )
        return explain("next_obs", expected, got, remedy)

    def restart_warning(self) -> str:
        """Environments were reset from outside."""
        remedy = (
            "Call cut() after env.reset(), also when a run is resumed: otherwise statistics join two episodes, and "
            "under NEXT_STEP the first step of an environment that was about to reset is dropped."
        )
        got = f"{self.restarted:,} without an end or cut() that start elsewhere"
        return explain("obs", "steps that start where the step before led", got, remedy)

    def reward_warning(self) -> str:
        """Rewards are infinite or no numbers."""
        return infinite_rewards(self.infinite)


@dataclass
class ContinuityCounter:
    """The counts of one buffer object, and the doubts that it has spoken of: each once."""

    is_on: bool
    """Counting on other devices than the host would be launches for every step; `check()` looks at what is stored."""
    seen: ContinuityStats = field(default_factory=ContinuityStats)
    issued: set[str] = field(default_factory=set)

    def next_warning(self, stats: ContinuityStats) -> str | None:
        """The first message that was not spoken of yet; None without one."""
        for name, message in stats.warnings():
            if name not in self.issued:
                self.issued.add(name)
                return message
        return None


def step_continuity(
    rows: RowStorage, obs: list[torch.Tensor], env: torch.Tensor, head: torch.Tensor, is_open: torch.Tensor,
    resetting: torch.Tensor,
) -> ContinuityStats:  # fmt: skip
    """The counts that a step of the environments `env` [K] adds, before it is written; on the host.

    `head`, `is_open` and `resetting` [K] are the state of these environments' rings.
    """
    ring = rows.ring
    if rows.stores_next_obs:
        return ContinuityStats()
    envs, heads, opened = env.numpy(), head.numpy(), is_open.numpy()
    pending, final = ((heads - back) % ring.slots * ring.num_envs + envs for back in (0, 1))
    joined = _hold(rows, np.where(opened, pending, final), obs)
    follows = opened & ~(resetting.numpy() & rows.next_step)
    watched = opened if rows.has_stats else opened & ~follows
    restarted = int((watched & ~joined).sum())
    counted = ContinuityStats(int(follows.sum()), int((follows & ~joined).sum()), restarted=restarted)
    if rows.next_step:
        return counted
    is_end, is_over, leads_away = _ends(rows, final)
    return counted + _of_ends(is_end & ~opened, is_over | rows.same_step, joined & leads_away)


def stored_continuity(rows: RowStorage) -> ContinuityStats:
    """The counts that the stored steps show; an announced `cut()` looks like any other."""
    ring = rows.ring
    if rows.stores_next_obs:
        return ContinuityStats()
    is_step = (ring.kind == TRANSITION) | (ring.kind == HISTORY)
    oldest = ring.rows() <= torch.maximum(ring.floor, ring.newest() - ring.slots + 1)
    goes_on = is_step & is_step.roll(1, 0) & ~ring.first & ~oldest
    final = ((ring.kind == FINAL) & (is_step & ring.first & ~oldest).roll(-1, 0)).view(-1).nonzero().squeeze(1)
    final = final[is_step.view(-1)[ring.before(final)]]
    own, start = ring.before(final), ring.after(final)
    flags = [flag.view(-1)[own] for flag in rows.flags()]
    cut = int((~(flags[0] | flags[1])).sum())
    counted = ContinuityStats(int(goes_on.sum()) + cut, cut)
    if rows.next_step or not len(final):
        return counted
    is_end, is_over, leads_away = _ends(rows, final.cpu().numpy())
    obs = [rows.bits_at(i, start) for i in rows.obs_leaves]
    return counted + _of_ends(is_end, is_over | rows.same_step, leads_away & _hold(rows, final.cpu().numpy(), obs))


def _of_ends(is_end: np.ndarray, is_over: np.ndarray, leads_to_start: np.ndarray) -> ContinuityStats:
    told = is_end & ~(leads_to_start & ~is_over)
    return ContinuityStats(ended=int(told.sum()), reset=int((told & leads_to_start).sum()))


def _ends(rows: RowStorage, final: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Masks of flat slots: holds the end of an episode of several steps, is terminated, leads elsewhere."""
    ring = rows.ring
    own = (final - ring.num_envs) % (ring.slots * ring.num_envs)
    kind, first = (tensor.cpu().numpy().reshape(-1) for tensor in (ring.kind, ring.first))
    terminated, truncated = (flag.view(-1).cpu().numpy()[own] for flag in rows.flags())
    is_step = (kind[own] == TRANSITION) | (kind[own] == HISTORY)
    is_end = is_step & (kind[final] == FINAL) & ~first[own] & (terminated | truncated)
    stays = np.ones(len(final), bool)
    for i in rows.obs_leaves:
        stays &= (_bytes_at(rows, own, i) == _bytes_at(rows, final, i)).all(1)
    return is_end, terminated, ~stays


def _hold(rows: RowStorage, slots: np.ndarray, obs: list[torch.Tensor]) -> np.ndarray:
    """Mask of flat slots that hold these observations, bit by bit."""
    same = np.ones(len(slots), bool)
    for i, given in zip(rows.obs_leaves, obs, strict=True):
        same &= (_bytes_at(rows, slots, i) == _raw(given, len(slots))).all(1)
    return same


def _bytes_at(rows: RowStorage, slots: np.ndarray, leaf: int) -> np.ndarray:
    """The bytes [slots, bytes] of an observation's leaf at flat slots; of stacked frames the whole stack."""
    if leaf in rows.stacked:
        return _raw(rows.bits_at(leaf, torch.from_numpy(slots).to(rows.device)), len(slots))
    return _raw(rows.leaves[leaf], rows.ring.kind.numel())[slots]


def _raw(tensor: torch.Tensor, items: int) -> np.ndarray:
    """The bytes of `items` items [items, bytes], on the host."""
    tensor = tensor.cpu().contiguous()
    # An axis of length one may have any stride, which a view of bytes minds: say that memory is in one piece.
    flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
    return flat.reshape(items, flat.size // max(items, 1))
