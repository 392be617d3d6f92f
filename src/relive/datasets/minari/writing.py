"""Writing the episodes of a replay buffer as a Minari dataset."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from relive.datasets.blocks import STEP, joined, sliced
from relive.datasets.episodes import require_ordered, written
from relive.datasets.minari.dataset import dataset_path, import_minari
from relive.fields.schema import DTYPES, Tree, caller_shape, map_leaves
from relive.replay.buffer import ReplayBuffer


def to_minari(replay: ReplayBuffer, dataset_id: str, **options: Any) -> Any:
    """Write the episodes of a replay buffer as the local Minari dataset `dataset_id`; returns the MinariDataset.

    Extra fields become infos, and each part of a field "info" becomes an info of its own name; infos of the reset,
    which a buffer does not store, are zero. Images are not compressed as JPEG, which is lossy, unless
    `jpeg_encoding=True`.

    Args:
        replay: a replay buffer in time order.
        dataset_id: the id of the dataset in Minari's form: "namespace/name-v0".
        options: options of `minari.create_dataset_from_buffers`: `env=` or spaces, author and so on. The default spaces
            are the widest that the fields allow.
    """
    minari = import_minari()
    require_ordered("to_minari", replay)
    trees = replay._schema.trees
    given = {"observation_space": _space(trees["obs"]), "action_space": _space(trees["action"])}
    options = {**({} if "env" in options else given), "jpeg_encoding": False, **options}
    spaces = [options.get(name) for name in ("observation_space", "action_space")]
    with warnings.catch_warnings():
        # Minari warns about missing authors and sources, which callers may leave out.
        warnings.filterwarnings("ignore", category=UserWarning, module="minari")
        is_ours = False

        def buffers() -> Iterator[Any]:
            nonlocal is_ours
            is_ours = True  # Minari has made the folder, which was not there before
            yield from (_written(one, spaces) for one in written(replay))

        try:
            return minari.create_dataset_from_buffers(dataset_id, buffers(), **options)
        except BaseException:
            if is_ours:
                shutil.rmtree(dataset_path(dataset_id), ignore_errors=True)
            raise


def _written(tree: dict[str, Any], spaces: list[Any]) -> Any:
    """An episode [T] as Minari's EpisodeBuffer."""
    obs = joined(tree["obs"], sliced(tree["next_obs"], slice(-1, None)))
    fields = {name: part for name, part in tree.items() if name not in (*STEP, "next_obs")}
    infos = {**fields.pop("info", {}), **fields}
    return import_minari().data_collector.EpisodeBuffer(
        observations=_as(spaces[0], obs),
        actions=_as(spaces[1], tree["action"]),
        rewards=tree["reward"],
        terminations=tree["terminated"],
        truncations=tree["truncated"],
        infos=map_leaves(_with_reset, infos) if infos else None,
    )


def _with_reset(info: np.ndarray) -> Any:
    """An info of all steps after an entry of zeros, for the reset."""
    entries = np.concatenate([np.zeros_like(info[:1]), info])
    return list(entries) if entries.ndim == 1 else entries  # Minari cannot read Arrow files of arrays without a shape


def _as(space: Any, tree: Any) -> Any:
    """The parts "0", "1", … of a Tuple space as a tuple."""
    if isinstance(space, gym.spaces.Tuple):
        return tuple(_as(part, tree[str(i)]) for i, part in enumerate(space.spaces))
    if isinstance(space, gym.spaces.Dict):
        return {name: _as(part, tree[name]) for name, part in space.spaces.items()}
    return tree


def _space(tree: Tree) -> gym.Space[Any]:
    if isinstance(tree, dict):
        return gym.spaces.Dict({name: _space(part) for name, part in tree.items()})
    dtype = DTYPES[tree.dtype] or np.dtype(np.float32)
    if dtype.kind == "f":
        low, high = -np.inf, np.inf
    else:
        low, high = (0, 1) if dtype.kind == "b" else (torch.iinfo(tree.dtype).min, torch.iinfo(tree.dtype).max)
    return gym.spaces.Box(low, high, caller_shape(tree), dtype.type)
