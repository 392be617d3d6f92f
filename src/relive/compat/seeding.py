"""Seeds of buffers without `seed=`: a seeded experiment is repeatable, and no global generator advances."""

from __future__ import annotations

import os
import zlib
from typing import Any

import numpy as np
import torch


def choose_seed(seed: int | None = None) -> int:
    """Return `seed`, or a seed from the state of torch's generator and the process's rank.

    The same `torch.manual_seed` gives the same seed. The state does not advance: two buffers that are made without a
    draw of torch between them have the same seed. Counting buffers would avoid that, but then a second run in the same
    process would not repeat the first.
    """
    if seed is not None:
        return seed
    state = zlib.crc32(torch.random.get_rng_state().numpy().tobytes())
    entropy = torch.initial_seed() % 2**64, state, _read_process_rank()
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> 1)


def make_generator(device: torch.device, seed: int) -> torch.Generator:
    """Return a seeded generator for a device; a copy or pickle continues with the same numbers."""
    return _SpawnableGenerator("cpu" if device.type == "meta" else device).manual_seed(seed)


class _SpawnableGenerator(torch.Generator):
    """A generator that is pickled without tensors, which a process that is being spawned cannot always receive."""

    def __reduce__(self) -> Any:
        return _restore_generator, (str(self.device), self.get_state().numpy())


def _restore_generator(device: str, state: np.ndarray) -> _SpawnableGenerator:
    generator = _SpawnableGenerator(device)
    generator.set_state(torch.from_numpy(state))
    return generator


def _read_process_rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdecimal() else 0
