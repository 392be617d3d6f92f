"""Seeds of buffers that Stable-Baselines3's algorithms make: the algorithm's own seed decides them."""

from __future__ import annotations

import zlib

import numpy as np
import torch


def algorithm_seed() -> int:
    """The same whenever torch's generator is as it is now, which is read and not moved.

    Stable-Baselines3 promises that two models made with one seed train alike, in one process too. A count of the
    buffers made before, which other adapters add, would break that; its algorithms seed torch before they make theirs.
    """
    state = zlib.crc32(torch.random.get_rng_state().numpy().tobytes())
    entropy = torch.initial_seed() % 2**64, state
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> 1)
