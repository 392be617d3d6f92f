"""How steps are joined, so that legal data that looks like a mistake is noticed (`DataWarning`).

*Cuts*: of at least 64 steps that follow no end, more than half do not start where the step before led. *Resets*: at
least 8 ends, all of which lead to the observation that the next episode starts with, and not to the one that they
started from. A truncated end may be an episode that simply goes on: it counts only if it leads elsewhere, or if the
environments are known to reset in the same step. An episode of one step tells nothing: a bandit may well pass the next
context. Counters belong to the object that writes, never to what is stored; the native core counts while it writes.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from dataclasses import astuple, dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from relive.errors import DataWarning, explain
from relive.replay.frames import leaf_at
from relive.replay.ring import FINAL, HISTORY, TRANSITION

if TYPE_CHECKING:
    from relive.replay.row_memory import RowMemory

FEWEST_STEPS, FEWEST_ENDS = 64, 8


@dataclass(frozen=True)
class Chains:
    """What was counted."""

    followed: int = 0
    """Steps after one that did not end its episode."""
    cut: int = 0
    """Of these, steps that do not start where the one before led."""
    ended: int = 0
    """Ends of episodes that a step was seen after."""
    reset: int = 0
    """Of these, ends that lead to the observation of that step and not to their own one."""

    def __add__(self, other: Chains) -> Chains:
        return Chains(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def doubts(self) -> Iterator[tuple[str, str]]:
        """What looks like a mistake: a name and a message each."""
        if self.followed >= FEWEST_STEPS and 2 * self.cut > self.followed:
            yield "cuts", self.of_cuts()
        if self.ended >= FEWEST_ENDS and self.reset == self.ended:
            yield "resets", self.of_resets()

    def of_cuts(self) -> str:
        """Episodes are cut at most steps."""
        remedy = (
            "Every such step cuts its episode: it takes two rows, and n-step returns and sequences stop there. Add "
            'observations unchanged and normalise when sampling; keep unordered rows with next_obs="stored"; give '
            "each player of turn-based self-play a column of its own (num_envs)."
        )
        got = f"{self.cut:,} of {self.followed:,} that do not"
        return explain("obs", "steps that start where the step before led", got, remedy)

    def of_resets(self) -> str:
        """Ends lead to where the next episodes start."""
        expected = "the observation that an episode ended with"
        got = f"the first one of the next episode at all {self.ended:,} ends"
        remedy = 'Use add_step, or pass info["final_obs"] where an episode ended (SAME_STEP resets in the same step).'
        return explain("next_obs", expected, got, remedy)


@dataclass
class Counter:
    """What one object has seen, and which doubts it has spoken of: each once."""

    is_on: bool
    """Counting on other devices than the host would be launches for every step; `check()` looks at what is stored."""
    seen: Chains = field(default_factory=Chains)
    told: set[str] = field(default_factory=set)

    def doubt(self, chains: Chains) -> str | None:
        """What looks like a mistake and was not spoken of yet."""
        for name, message in chains.doubts():
            if name not in self.told:
                self.told.add(name)
                return message
        return None


def speak(message: str) -> None:
    """Warn whoever called this library."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "relive":
        level, frame = level + 1, frame.f_back
    warnings.warn(message, DataWarning, stacklevel=level)


def of_steps(memory: RowMemory, leaves: list[torch.Tensor], nexts: list[torch.Tensor], env: torch.Tensor) -> Chains:
    """What steps [T, K, …] of the environments `env` add when they are written; on the host."""
    ring, count = memory.ring, len(env)
    if memory.keeps_next:
        return Chains()
    envs, head = env.numpy(), ring.head.numpy()[env.numpy()]
    terminated, truncated = (
        leaves[memory.schema.leaf_indices[name][0]].numpy() for name in ("terminated", "truncated")
    )
    ended = terminated | truncated
    obs = [leaves[i] for i in memory.observed]
    resets = np.zeros_like(ended)
    resets[0] = ring.resetting.numpy()[envs] & memory.next_step
    for t in range(1, len(ended) if memory.next_step else 0):
        resets[t] = ended[t - 1] & ~resets[t - 1]
    is_open = np.concatenate([ring.open.numpy()[envs][None], ~ended[:-1] | memory.next_step])
    places = np.stack([(head - back) % ring.slots * ring.num_envs + envs for back in (0, 1)])
    pending = np.where(is_open[0], *places)  # or where the last episode ended
    joined = np.empty_like(ended)
    joined[0] = _hold(memory, pending, [leaf[0] for leaf in obs])
    joined[1:] = _same([leaf[1:] for leaf in obs], [leaf[:-1] for leaf in nexts], (len(ended) - 1, count))
    follows = is_open & ~resets
    counted = Chains(int(follows.sum()), int((follows & ~joined).sum()))
    if memory.next_step:
        return counted
    starts = ~(follows & joined)
    is_end, is_over, leads_away = np.zeros((3, *ended.shape), bool)
    is_end[0], is_over[0], leads_away[0] = _ends(memory, places[1])
    is_end[1:], is_over[1:] = ended[:-1] & ~starts[:-1], terminated[:-1]
    leads_away[1:] = ~_same([leaf[:-1] for leaf in obs], [leaf[:-1] for leaf in nexts], (len(ended) - 1, count))
    return counted + _of_ends(is_end & ~is_open, is_over | memory.same_step, joined & leads_away)


def of_stored(memory: RowMemory) -> Chains:
    """What the stored steps show; `cut()` is told from a cut by nothing."""
    ring = memory.ring
    if memory.keeps_next:
        return Chains()
    is_step = (ring.kind == TRANSITION) | (ring.kind == HISTORY)
    oldest = ring.rows() <= torch.maximum(ring.floor, ring.newest() - ring.slots + 1)
    goes_on = is_step & is_step.roll(1, 0) & ~ring.first & ~oldest
    final = ((ring.kind == FINAL) & (is_step & ring.first & ~oldest).roll(-1, 0)).view(-1).nonzero().squeeze(1)
    final = final[is_step.view(-1)[ring.before(final)]]
    own, start = ring.before(final), ring.after(final)
    flags = [flag.view(-1)[own] for flag in memory.flags()]
    cut = int((~(flags[0] | flags[1])).sum())
    counted = Chains(int(goes_on.sum()) + cut, cut)
    if memory.next_step or not len(final):
        return counted
    is_end, is_over, leads_away = _ends(memory, final.cpu().numpy())
    obs = [leaf_at(memory, i, start) for i in memory.observed]
    return counted + _of_ends(is_end, is_over | memory.same_step, leads_away & _hold(memory, final.cpu().numpy(), obs))


def _of_ends(is_end: np.ndarray, is_over: np.ndarray, leads_to_start: np.ndarray) -> Chains:
    told = is_end & ~(leads_to_start & ~is_over)
    return Chains(ended=int(told.sum()), reset=int((told & leads_to_start).sum()))


def _ends(memory: RowMemory, final: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of flat slots: the end of an episode of several steps is there, it is a terminated one, and it leads away."""
    ring = memory.ring
    own = (final - ring.num_envs) % (ring.slots * ring.num_envs)
    kind, first = (tensor.cpu().numpy().reshape(-1) for tensor in (ring.kind, ring.first))
    terminated, truncated = (flag.view(-1).cpu().numpy()[own] for flag in memory.flags())
    is_step = (kind[own] == TRANSITION) | (kind[own] == HISTORY)
    is_end = is_step & (kind[final] == FINAL) & ~first[own] & (terminated | truncated)
    stays = np.ones(len(final), bool)
    for i in memory.observed:
        stays &= (_held(memory, own, i) == _held(memory, final, i)).all(1)
    return is_end, terminated, ~stays


def _hold(memory: RowMemory, slots: np.ndarray, obs: list[torch.Tensor]) -> np.ndarray:
    """Which flat slots hold these observations, bit by bit."""
    same = np.ones(len(slots), bool)
    for i, given in zip(memory.observed, obs, strict=True):
        same &= (_held(memory, slots, i) == _raw(given, len(slots))).all(1)
    return same


def _held(memory: RowMemory, slots: np.ndarray, leaf: int) -> np.ndarray:
    """The bytes [slots, bytes] of an observation's leaf at flat slots; of stacked frames the whole stack."""
    if leaf in memory.stacked:
        return _raw(leaf_at(memory, leaf, torch.from_numpy(slots).to(memory.device)), len(slots))
    return _raw(memory.leaves[leaf], memory.ring.kind.numel())[slots]


def _same(a: list[torch.Tensor], b: list[torch.Tensor], shape: tuple[int, int]) -> np.ndarray:
    """Which of the observations [T, K, …] are the same, bit by bit."""
    same = np.ones(shape, bool)
    for x, y in zip(a, b, strict=True):
        same &= (_raw(x, same.size) == _raw(y, same.size)).all(1).reshape(shape)
    return same


def _raw(tensor: torch.Tensor, items: int) -> np.ndarray:
    """The bytes of `items` items [items, bytes], on the host."""
    tensor = tensor.cpu().contiguous()
    # An axis of length one may have any stride, which a view of bytes minds: say that memory is in one piece.
    flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
    return flat.reshape(items, flat.size // max(items, 1))
