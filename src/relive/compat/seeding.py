"""Seeds of adapters that are given none: an experiment that is seeded repeats, and no global generator is touched."""

from __future__ import annotations

import itertools
import os

import numpy as np
import torch

_UNSEEDED = torch.Generator().initial_seed()
"""What torch calls its seed before anybody has set one."""
_made = itertools.count()
"""How many buffers this process has made seeds for."""


def experiment_seed() -> int | None:
    """A seed of its own for each buffer of a process whose torch was seeded; None, for the system's entropy, if not.

    It is made of torch's initial seed, how many such buffers were made before, and the rank of the process.
    """
    number = next(_made)
    if torch.initial_seed() == _UNSEEDED:
        return None
    entropy = torch.initial_seed() % 2**64, number, _rank()
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> 1)


def _rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdecimal() else 0
