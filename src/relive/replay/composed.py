"""Batches put together from what every store reads: leaves at slots, windows around them, ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from relive.kernels.constants import ends_of_run
from relive.kernels.torch_ops import n_step_sums
from relive.replay.row_memory import RowMemory
from relive.replay.store import Leaves, ReplayStore

ENDS = ("terminated", "truncated")
MARKS = ("mask",), ("train",), ("is_first",)


def named(memory: RowMemory, leaves: Sequence[torch.Tensor], which: Sequence[int] | None = None) -> Leaves:
    """Leaves under their paths: all of them, or the leaves `which`."""
    paths = memory.schema.paths
    return dict(zip(paths if which is None else (paths[i] for i in which), leaves, strict=True))


def named_next(memory: RowMemory, leaves: Sequence[torch.Tensor]) -> Leaves:
    """Leaves of next observations: `obs.camera` is `next_obs.camera`."""
    return dict(zip(memory.next_paths, leaves, strict=True))


def transitions(store: ReplayStore, slots: torch.Tensor) -> Leaves:
    """See `ReplayStore.transitions`."""
    leaves = named(store.memory, store.take(slots)) | named_next(store.memory, store.take_next(slots))
    return leaves | {("index",): store.ids(slots)}


def joined(store: ReplayStore, slots: torch.Tensor, both: torch.Tensor, known: Mapping[int, torch.Tensor]) -> Leaves:
    """Every leaf at slots, but for the `known` ones, and the observations that the rows led to.

    `both` [2 B] are the slots and then those of the observations that they led to: they are read at once.
    """
    memory = store.memory
    observed = [leaf.unflatten(0, (2, len(slots))) for leaf in store.take(both, memory.observed)]
    read = {i: leaf[0] for i, leaf in zip(memory.observed, observed, strict=True)} | dict(known)
    others = [i for i in range(len(memory.leaves)) if i not in read]
    read |= dict(zip(others, store.take(slots, others), strict=True))
    leaves = named(memory, [read[i] for i in range(len(memory.leaves))])
    # Not views of one memory: a caller may change one of them while torch keeps the other for a gradient.
    return leaves | named_next(memory, [leaf[1].clone() for leaf in observed])


def flat_steps_of(store: ReplayStore, windows: torch.Tensor, leaves: Sequence[int] | None = None) -> Leaves:
    """All leaves (or the leaves `leaves`) and next observations at windows [B, L] of slots: [B · L, …], zero at -1."""
    flat, memory = windows.reshape(-1), store.memory
    steps = named(memory, store.take(flat, leaves, padded=True), leaves)
    return steps | named_next(memory, store.take_next(flat, padded=True))


def in_windows(steps: Leaves, shape: torch.Size) -> Leaves:
    """Leaves [B · L, …] as [B, L, …]."""
    if shape[1] == 1:  # a third of the time: the shapes need not be computed
        return {path: leaf.unsqueeze(1) for path, leaf in steps.items()}
    return {path: leaf.view(shape + leaf.shape[1:]) for path, leaf in steps.items()}


def n_steps(store: ReplayStore, slots: torch.Tensor, n: int, gamma: float) -> Leaves:
    """See `ReplayStore.n_steps`."""
    memory, ids = store.memory, store.ids(slots)
    run, is_over = memory.ring.run(ids, min(n, memory.ring.slots))
    missing = is_over.sum(0)
    agents = memory.schema.leaf_indices["reward"]
    rewards = [leaf.unflatten(0, is_over.shape) for leaf in store.take(run[:-1].reshape(-1), agents)]
    sums, discount = n_step_sums(rewards, is_over, missing, gamma)
    # The row itself, the one that the steps led to, and their last.
    places, moves = ends_of_run(len(is_over), slots.device)
    at = run.gather(0, torch.addcmul(places, moves, missing))
    ends = [memory.schema.leaf_indices[name][0] for name in ENDS]
    known = dict(zip((*agents, *ends), (*sums, *store.take(at[2], ends)), strict=True))
    return joined(store, slots, at[:2].view(-1), known) | {("index",): ids, ("discount",): discount}


def sequences(store: ReplayStore, slots: torch.Tensor, before: int, after: int, cross: bool) -> Leaves:
    """See `ReplayStore.sequences`."""
    others = [i for i in range(len(store.memory.leaves)) if i not in store.memory.carried]
    windows, is_first = store.windows(slots, before, after, cross=cross)
    steps = in_windows(flat_steps_of(store, windows, others), windows.shape)
    return steps | marked(store, slots, windows, is_first)


def marked(store: ReplayStore, slots: torch.Tensor, windows: torch.Tensor, is_first: torch.Tensor) -> Leaves:
    """What a batch of sequences has beside its steps: the marks [B, L], and the carried leaves [B, …] at its start."""
    mask = windows >= 0
    drawn = (windows == slots.unsqueeze(1)).cummax(1).values  # from the drawn row on
    marks = dict(zip(MARKS, (mask, mask & drawn, is_first), strict=True))
    carried = store.memory.carried
    starts = store.take(windows[:, 0].contiguous(), carried) if carried else ()
    return marks | named(store.memory, starts, carried)
