"""Reading a Minari dataset into a buffer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from relive.datasets.blocks import Block, sliced
from relive.datasets.filling import extra_of, fill
from relive.datasets.metadata import require_similar_size
from relive.datasets.minari.dataset import Episode, episodes_of, opened, stored_bytes
from relive.errors import SchemaError, explain
from relive.fields.conversion import as_tensor
from relive.fields.schema import Field, kept_dtype, leaves_of, map_leaves
from relive.replay.buffer import ReplayBuffer
from relive.replay.samplers import Sampler
from relive.storage import Memory

_HOST = torch.device("cpu")


def from_minari(
    dataset: Any,
    buffer: Any = None,
    *,
    infos: Iterable[str] | None = None,
    sampler: Sampler | None = None,
    device: torch.device | str | Memory = "cpu",
    seed: int | None = None,
) -> Any:
    """Read a Minari dataset, episode by episode, into a buffer; returns the buffer.

    A replay buffer with several environments stores each episode in the environment with the fewest steps so far. Of
    the extra fields, one called "info" takes all infos, and any other takes the info of its name. A RolloutBuffer must
    have num_envs=None and space for all steps. A terminal shows the progress of long reads.

    If the dataset is larger than the buffer, the newest steps stay, and a `DataWarning` says how many did not fit.

    Args:
        dataset: a `MinariDataset`, the id of a local dataset, or a path.
        buffer: the buffer to fill. None makes a ReplayBuffer with space for all steps and the dtypes of
            `ReplayBuffer.for_env`: float64 becomes float32. Other buffers keep the dtypes of their fields.
        infos: the names of the infos to keep in the field "info"; by default all, which must be arrays of numbers.
        sampler: the sampler of the new buffer.
        device: the device or memory of the new buffer.
        seed: the seed of the new buffer.
    """
    source = opened(dataset)
    if buffer is None:
        buffer = _made(source, infos, sampler, device, seed)
    extra = list(extra_of("from_minari", buffer))
    blocks = (_block(episode, extra) for episode in episodes_of(source, infos))
    return fill("from_minari", buffer, blocks, source.total_steps)


def _block(episode: Episode, extra: list[str]) -> Block:
    where = f"episode {episode.number}"
    given = {"info": episode.info, **episode.info}
    for name in extra:
        if name not in given:
            known = ", ".join(episode.info) or "it has no infos"
            remedy = "Declare only fields that every episode has."
            raise SchemaError(explain(where, f"an info for each extra field ({known})", repr(name), remedy))
    obs, next_obs = sliced(episode.obs, slice(None, -1)), sliced(episode.obs, slice(1, None))
    flags = episode.terminated, episode.truncated
    return Block(where, obs, next_obs, episode.action, episode.reward, *flags, {name: given[name] for name in extra})


def _made(
    dataset: Any, infos: Iterable[str] | None, sampler: Sampler | None, device: Any, seed: int | None
) -> ReplayBuffer:
    first = next(episodes_of(dataset, infos), None)
    if first is None:
        raise SchemaError(explain("from_minari", "at least 1 episode", 0, "Pass a dataset that has episodes."))
    rows = dataset.total_steps + dataset.total_episodes
    leaves = [leaf for tree in (first.obs, first.action, first.info) for _, leaf in leaves_of((), tree)]
    row_bytes = sum(leaf[:1].nbytes for leaf in leaves)
    require_similar_size("from_minari", rows, row_bytes, stored_bytes(dataset))
    return ReplayBuffer(
        # The final observation of an episode takes a row too.
        rows,
        dataset.observation_space,
        dataset.action_space,
        reward=Field(first.reward.shape[1:]),
        extra={"info": map_leaves(_field, first.info)} if first.info else None,
        sampler=sampler,
        device=device,
        seed=seed,
    )


def _field(values: np.ndarray) -> Field:
    tensor = as_tensor("info", values[:1], _HOST)
    return Field(tensor.shape[1:], kept_dtype(tensor.dtype))
