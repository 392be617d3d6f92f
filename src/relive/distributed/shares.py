"""How a batch is divided among shards, and the weights of its rows: as one buffer would draw and weight them."""

from __future__ import annotations

import numpy as np
import torch

from relive.distributed.shard_reader import Draw, ShardTotals
from relive.errors import NotReadyError, explain
from relive.fields.checks import nonempty
from relive.kernels.priority import weights
from relive.replay.samplers import Prioritized


def random_shares(random: np.random.Generator, count: int, batch_size: int, totals: list[ShardTotals]) -> np.ndarray:
    """The number of rows of each of `count` batches that come from each shard [S, count], drawn at random."""
    nonempty("sample", sum(shard.rows for shard in totals), "transition")
    mantissas, exponents = np.array([shard.mass for shard in totals]).T
    mass = np.ldexp(mantissas, (exponents - exponents[mantissas > 0].max(initial=-2000)).astype(np.int64))
    if not mass.any():
        remedy = "Update at least one priority to more than 0, or use eps > 0."
        raise NotReadyError(explain("sample", "a row of positive priority", "only zeros", remedy))
    return random.multinomial(batch_size, mass / mass.sum(), count).T


def batch_weights(sampler: Prioritized, draws: list[Draw], totals: list[ShardTotals], before: int) -> torch.Tensor:
    """Importance weights [B] after `before` draws, (smallest mass / mass_i)^beta over the rows of all shards."""
    masses = torch.from_numpy(np.concatenate([draw.masses for draw in draws if draw.masses is not None]))
    smallest = float(masses.min())
    if sampler.normalize == "global":
        smallest = min(smallest, *(shard.smallest for shard in totals))
    return weights(masses, smallest, sampler.beta_after(before))
