"""The ring of a saved buffer in a ring of the same size or of another."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from relive.fields.invariants import on_host
from relive.memory.documents import Node
from relive.memory.rows import Rows
from relive.memory.saved import Saved
from relive.replay.ring import EMPTY, FINAL, HISTORY, TRANSITION, Ring


class Moved(NamedTuple):
    """Where the rows of a saved ring lie in one of another size: their flat slots there, and here."""

    slots: int
    """How many flat slots the saved ring had."""
    source: torch.Tensor
    target: torch.Tensor

    def numbers(self, saved: torch.Tensor, drawable: torch.Tensor) -> torch.Tensor:
        """Numbers of the saved slots at their new places; zero where no row may be drawn."""
        moved = torch.zeros(drawable.shape, dtype=saved.dtype, device="cpu")
        moved[self.target] = saved[self.source]
        return torch.where(drawable.cpu(), moved, 0)


def load_ring(ring: Ring, saved: Saved, slots: int) -> Moved | None:
    """Become the ring of so many slots that was saved; returns where its rows lie now if that is another number."""
    for name, (shape, dtype) in Ring.forms(slots, ring.num_envs).items():
        saved.require_form(name, shape, dtype)
    check_ring(*(saved.tensor(name) for name in ("kind", "head", "count", "floor")))
    if slots == ring.slots:
        saved.copy_into(ring.state)
        return None
    return _resize(ring, {name: saved.tensor(name) for name in ring.state})


def check_ring(*state: torch.Tensor) -> None:
    """Kind, head, count and floor, which everything else is computed from: a wrong one would lead out of the memory."""
    kind, head, count, floor = map(on_host, state)
    most = (1 << 62) // (2 * len(head))
    for name, right, found, expected in (
        ("kind", kind <= HISTORY, kind, f"a kind of 0 to {HISTORY}"),
        ("head", (head >= 0) & (head < most), head, f"a row of 0 to {most}"),
        ("floor", (floor >= 0) & (floor <= head), floor, "a row of 0 to the head"),
        ("count", count == np.count_nonzero(kind == TRANSITION, axis=0), count, "the number of transitions"),
    ):
        if not bool(right.all()):
            place = np.argwhere(~right)[0].tolist()
            raise Node(f"state: ring.{name}{place}", found[tuple(place)].item()).wrong(expected)


def _resize(ring: Ring, old: dict[str, torch.Tensor]) -> Moved:
    """Move the marks of rows that fit into a ring of another size."""
    slots = len(old["kind"])
    for name in ("head", "open", "resetting", "floor"):
        getattr(ring, name).copy_(old[name])
    newest = (old["head"] - (~old["open"]).long()).cpu()
    oldest = torch.maximum(newest - min(slots, ring.slots) + 1, old["floor"]).clamp(min=0)
    kept = Rows({"kind": old["kind"]}, oldest, newest + 1)
    source, target = kept.places(slots), kept.places(ring.slots)
    row, env = kept.numbers()
    kind = old["kind"].view(-1)[source]
    if ring.slots > slots:
        # There is room for older rows, which are gone; ends of episodes that went with them mean nothing.
        begins = torch.where(kind == FINAL, int(newest.max()) + 2, row)
        floor = (newest + 1).scatter_reduce(0, env, begins, "amin")
        kind = torch.where(row < floor[env], EMPTY, kind.long()).to(torch.uint8)
        ring.floor.copy_(torch.maximum(floor, old["floor"]))
        # Where nothing is left, the coming observation starts an episode.
        ring.open &= ring.head > ring.floor
        nothing = (old["open"] & ~ring.open.cpu())[env] & (row == newest[env])
        kind = torch.where(nothing, EMPTY, kind.long()).to(torch.uint8)
    expired = HISTORY if ring.slots > ring.alive else EMPTY
    kind = torch.where((kind == TRANSITION) & (row <= newest[env] - ring.alive), expired, kind.long()).to(torch.uint8)
    device = ring.kind.device
    ring.kind.view(-1)[target.to(device)] = kind.to(device)
    ring.first.view(-1)[target.to(device)] = old["first"].view(-1)[source].to(device)
    ring.count.copy_((ring.kind == TRANSITION).sum(0))
    return Moved(slots * ring.num_envs, source, target)
