"""Random orders of rows: the native core on the host, numpy without it, torch on other devices."""

from __future__ import annotations

import numpy as np
import torch

from relive import kernels
from relive.rng import Randomness


def shuffled(index: torch.Tensor, random: Randomness) -> torch.Tensor:
    """The entries of `index` [n] in a random order, in a new tensor."""
    if index.device.type != "cpu":
        generator = random.generator(index.device)
        return index[torch.randperm(len(index), generator=generator, device=index.device)]
    index = index.clone()
    if kernels.runs_native((index,)):
        kernels.native().shuffle(kernels.buffer_of(index), random.capsule)
    else:
        np.random.Generator(random.bits).shuffle(index.numpy())
    return index


def permutation(count: int, random: Randomness, device: torch.device) -> torch.Tensor:
    """The numbers below `count` in a random order: `shuffled` of all of them."""
    if device.type == "cpu" and kernels.exchange():
        return kernels.native().permutation(count, random.capsule)
    if device.type != "cpu":
        return torch.randperm(count, generator=random.generator(device), device=device)
    return shuffled(torch.arange(count, device=device), random)
