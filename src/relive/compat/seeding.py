"""Seeds of adapters that are given none: an experiment that is seeded repeats, and no global generator is moved."""

from __future__ import annotations

import os
import zlib

import numpy as np
import torch


def experiment_seed(seed: int | None = None) -> int:
    """`seed`, or one made of the state of torch's generator and the process's rank: equal after equal `manual_seed`s.

    The state is read and not moved, so that buffers made one after the other draw alike unless torch has drawn in
    between. A count of the buffers made before would tell them apart, but a second run in the same process would not
    repeat the first.
    """
    if seed is not None:
        return seed
    state = zlib.crc32(torch.random.get_rng_state().numpy().tobytes())
    entropy = torch.initial_seed() % 2**64, state, _rank()
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> 1)


def generator_on(device: torch.device, seed: int) -> torch.Generator:
    """A seeded generator for draws on a device."""
    return torch.Generator("cpu" if device.type == "meta" else device).manual_seed(seed)


def _rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdecimal() else 0
