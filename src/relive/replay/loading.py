"""The ring of a saved buffer."""

from __future__ import annotations

import numpy as np
import torch

from relive.checkpoint.snapshot import SnapshotReader
from relive.fields.invariants import on_host
from relive.replay.ring import HISTORY, TRANSITION, Ring
from relive.storage.codec import Node


def load_ring(ring: Ring, saved: SnapshotReader) -> None:
    """Restore a ring of the same size."""
    for name, (shape, dtype) in Ring.forms(ring.slots, ring.num_envs).items():
        saved.require_form(name, shape, dtype)
    check_ring(*(saved.tensor(name) for name in ("kind", "head", "count", "floor")))
    saved.copy_into(ring.state)


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
            raise Node(f"state: ring.{name}{place}", found[tuple(place)].item()).error(expected)
