"""Seeds of adapters that are given none: an experiment that is seeded repeats, and no global generator is touched."""

from __future__ import annotations

import itertools
import os

import numpy as np
import torch

_made = itertools.count()
"""How many buffers this process has made seeds for."""


def experiment_seed() -> int:
    """A seed of its own for each buffer: the same in every run of a process whose torch is seeded.

    It is made of torch's initial seed (which the system draws where nobody seeded torch), how many such buffers were
    made before, and the rank of the process.
    """
    entropy = torch.initial_seed() % 2**64, next(_made), _rank()
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> 1)


def _rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdecimal() else 0
