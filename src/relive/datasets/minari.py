"""Minari datasets: read episode by episode into any buffer, and written from a replay buffer."""

from __future__ import annotations

import json
import reprlib
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from relive.checkpoint.progress import show_progress
from relive.datasets.files import (
    convert_errors,
    dataset_error,
    import_extra,
    parse_json,
    read_episode_arrays,
    refuse_nested_fields,
    refuse_oversized_buffer,
    require_time_order,
)
from relive.datasets.filling import (
    STEP_FIELDS,
    EpisodeBlock,
    concatenate_leaves,
    declared_fields,
    fill_from_blocks,
    find_extra_fields,
    slice_leaves,
)
from relive.datasets.hdf5 import require_self_contained_file
from relive.errors import SchemaError
from relive.replay.buffer import ReplayBuffer
from relive.replay.samplers import Sampler
from relive.schema.conversion import as_tensor, path_name
from relive.schema.fields import DTYPES, Field, Tree, caller_shape, iter_leaves, map_leaves, narrow_dtype
from relive.storage import Memory

_MAX_METADATA_BYTES = 1 << 24
"""Maximum bytes of metadata.json, in which the space of an image has two limits per pixel."""
_MAX_SPACE_NUMBERS = 1 << 22


def open_dataset(dataset: Any) -> Any:
    """Check the files of a dataset, passed as object, path or id; return the MinariDataset."""
    minari = import_extra("minari", "minari", "Minari")
    if isinstance(dataset, minari.MinariDataset):
        _require_self_contained_data(Path(dataset.storage.data_path))
        return dataset
    if not isinstance(dataset, str | PathLike):
        remedy = "Pass a MinariDataset, its id or its path."
        raise dataset_error("dataset", "a Minari dataset", type(dataset).__name__, remedy)
    folder = find_dataset_folder(Path(dataset)) or find_dataset_folder(_find_dataset_path(str(dataset)))
    if folder is None:
        # No folder has this dataset, so Minari raises its own error here.
        return minari.load_dataset(str(dataset))
    _require_safe_spaces(folder)
    _require_self_contained_data(folder)
    with convert_errors(str(folder), "a Minari dataset that can be read"):
        return minari.MinariDataset(folder)


def _find_dataset_path(dataset_id: str) -> Path:
    return Path(import_extra("minari.storage", "minari").get_dataset_path(dataset_id))


def _require_safe_spaces(folder: Path) -> None:
    """Raise if a space is missing or huge.

    If a space is missing, Minari creates the environment of the dataset, which can run any code.
    """
    where, metadata = f"{folder.name}/metadata.json", _read_metadata(folder)
    for name in ("observation_space", "action_space"):
        if not isinstance(metadata.get(name), str):
            remedy = "Minari would create its environment: if you trust it, pass minari.MinariDataset(path)."
            raise dataset_error(where, f"the key {name!r}", "no such key", remedy)
        with convert_errors(f"{where}: {name}", "a space"):
            _require_small_space(f"{where}: {name}", json.loads(metadata[name]))


def _require_small_space(where: str, space: Any) -> None:
    """Raise if a space has a huge shape: Minari allocates limits for each of its numbers."""
    if isinstance(space, Mapping):
        for name in ("shape", "n") if space.get("type") != "Discrete" else ():
            axes = space.get(name)
            if isinstance(axes, list | int) and np.prod(axes, dtype=object) > _MAX_SPACE_NUMBERS:
                raise dataset_error(f"{where}: {name}", f"at most {_MAX_SPACE_NUMBERS:,} numbers", reprlib.repr(axes))
        subspaces = space.get("subspaces", ())
        for part in subspaces.values() if isinstance(subspaces, Mapping) else subspaces:
            _require_small_space(where, part)


def _read_metadata(folder: Path) -> dict[str, Any]:
    with (folder / "metadata.json").open("rb") as file:
        return parse_json(f"{folder.name}/metadata.json", file.read(_MAX_METADATA_BYTES + 1), _MAX_METADATA_BYTES)


def _require_self_contained_data(folder: Path) -> None:
    file = folder / "main_data.hdf5"
    if file.exists():
        require_self_contained_file(file, is_read_in_groups=True)


def find_dataset_folder(path: Path) -> Path | None:
    """Return the folder with the files of a dataset, `path` or `path / "data"`; None if there is no dataset."""
    for folder in (path, path / "data"):
        try:
            metadata = _read_metadata(folder)
        except (OSError, SchemaError):
            continue
        if "data_format" in metadata:
            return folder
    return None


def read_episodes(
    dataset: Any, info_names: Iterable[str] | None = None, episode_numbers: Iterable[int] | None = None
) -> Iterator[EpisodeBlock]:
    """Yield the nonempty episodes of a dataset in order, with the infos of each step in the field "info"."""
    names = None if info_names is None else list(info_names)
    with convert_errors(str(dataset.storage.data_path), "episodes that can be read"):
        for data in dataset.iterate_episodes(episode_numbers):
            if len(data.rewards):
                yield _make_episode_block(data, names)


def _make_episode_block(data: Any, info_names: list[str] | None) -> EpisodeBlock:
    where, size, infos = f"episode {int(data.id)}", len(data.rewards), data.infos or {}
    obs = _tuples_to_dicts(data.observations)
    for path, leaf in iter_leaves(("observations",), obs):
        if len(leaf) != size + 1:
            expected, remedy = f"{size + 1} observations", "Repair the dataset."
            raise dataset_error(f"{where}: {path_name(path)}", expected, len(leaf), remedy)
    info = {}
    for name in infos if info_names is None else info_names:
        if name not in infos:
            got = f"an episode with {', '.join(map(str, infos)) or 'no infos'}"
            raise dataset_error(f"{where}: infos", f"{name!r} in every episode", got, "Leave it out of infos=.")
        info[name] = _drop_reset_entry(f"{where}: infos: {name}", _tuples_to_dicts(infos[name]), size)
    steps = {
        "obs": slice_leaves(obs, slice(None, -1)),
        "next_obs": slice_leaves(obs, slice(1, None)),
        "action": _tuples_to_dicts(data.actions),
        "reward": np.asarray(data.rewards),
        "terminated": np.asarray(data.terminations).astype(bool),
        "truncated": np.asarray(data.truncations).astype(bool),
        "info": info,
    }
    return EpisodeBlock(where, steps)


def _tuples_to_dicts(tree: Any) -> Any:
    """Convert nested tuples to dicts with keys "0", "1", …, as buffers store them, and leaves to arrays."""
    if isinstance(tree, tuple):
        return {str(i): _tuples_to_dicts(part) for i, part in enumerate(tree)}
    if isinstance(tree, Mapping):
        return {str(name): _tuples_to_dicts(part) for name, part in tree.items()}
    return np.asarray(tree)


def _drop_reset_entry(where: str, tree: Any, num_steps: int) -> Any:
    if isinstance(tree, dict):
        return {name: _drop_reset_entry(f"{where}.{name}", part, num_steps) for name, part in tree.items()}
    if tree.dtype.kind not in "biufc" or not tree.ndim or len(tree) not in (num_steps, num_steps + 1):
        got = f"dtype {tree.dtype} of shape {tree.shape}"
        remedy = "Pass infos= with the names to keep, or infos=() to read without infos."
        raise dataset_error(where, f"numbers, an entry for each of {num_steps} steps", got, remedy)
    # An info with one entry more than steps begins with the info of the reset, which is left out.
    return tree[1:] if len(tree) == num_steps + 1 else tree


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
    """Read a Minari dataset, episode by episode, into a buffer; return the buffer.

    A replay buffer with several environments stores each episode in the environment with the fewest steps so far. Of
    the extra fields, one called "info" takes all infos, and any other takes the info of its name. A RolloutBuffer must
    have num_envs=None and space for all steps. A terminal shows the progress of long reads.

    If the dataset is larger than the buffer, the newest steps stay, and a `DataWarning` says how many did not fit.

    Args:
        dataset: a `MinariDataset`, the id of a local dataset, or a path.
        buffer: the buffer to fill. None makes a ReplayBuffer with space for all steps and the dtypes of
            `ReplayBuffer.for_env`: float64 becomes float32. Other buffers keep the dtypes of their fields.
        infos: the names of the infos to read into the field "info"; by default all, which must be arrays of numbers.
        sampler: the sampler of the new buffer.
        device: the device or memory of the new buffer.
        seed: the seed of the new buffer.
    """
    source = open_dataset(dataset)
    if buffer is None:
        buffer = _make_buffer(source, infos, sampler, device, seed)
    extra = list(find_extra_fields("from_minari", buffer))
    blocks = (_add_extra_fields(episode, extra) for episode in read_episodes(source, infos))
    blocks = show_progress(blocks, source.total_steps, "reading episodes", len)
    return fill_from_blocks("from_minari", buffer, blocks, source.total_steps)


def _add_extra_fields(episode: EpisodeBlock, field_names: list[str]) -> EpisodeBlock:
    """Add extra fields to an episode: the field "info" has all infos, any other field the info of the same name."""
    steps = dict(episode.steps)
    info = steps.pop("info")
    for name in field_names:
        if name != "info" and name not in info:
            expected = f"an info for each extra field ({', '.join(info) or 'it has no infos'})"
            remedy = "Declare only fields that every episode has."
            raise dataset_error(episode.where, expected, repr(name), remedy)
    return replace(episode, steps=steps | {name: info.get(name, info) for name in field_names})


def _make_buffer(
    dataset: Any, infos: Iterable[str] | None, sampler: Sampler | None, device: Any, seed: int | None
) -> ReplayBuffer:
    first = next(read_episodes(dataset, infos), None)
    if first is None:
        raise dataset_error("from_minari", "at least 1 episode", 0, "Pass a dataset that has episodes.")
    # The final observation of an episode takes an additional row, so each episode adds one row to the capacity.
    rows = dataset.total_steps + dataset.total_episodes
    obs, action, reward, info = (first.steps[name] for name in ("obs", "action", "reward", "info"))
    leaves = [leaf for tree in (obs, action, info) for _, leaf in iter_leaves((), tree)]
    stored_bytes = sum(path.stat().st_size for path in Path(dataset.storage.data_path).rglob("*") if path.is_file())
    refuse_oversized_buffer("from_minari", rows, sum(leaf[:1].nbytes for leaf in leaves), stored_bytes)
    return ReplayBuffer(
        rows,
        dataset.observation_space,
        dataset.action_space,
        reward=Field(reward.shape[1:]),
        extra={"info": map_leaves(_infer_field, info)} if info else None,
        sampler=sampler,
        device=device,
        seed=seed,
    )


def _infer_field(values: np.ndarray) -> Field:
    tensor = as_tensor("info", values[:1], _HOST)
    return Field(tensor.shape[1:], narrow_dtype(tensor.dtype))


def to_minari(replay: ReplayBuffer, dataset_id: str, **options: Any) -> Any:
    """Write the episodes of a replay buffer as the local Minari dataset `dataset_id`; return the MinariDataset.

    Extra fields become infos, and each part of a field "info" becomes an info of its own name; infos of the reset,
    which a buffer does not store, are zero. Images are not compressed as JPEG, which is lossy, unless
    `jpeg_encoding=True`.

    Args:
        replay: a replay buffer in time order.
        dataset_id: the id of the dataset in Minari's form: "namespace/name-v0".
        options: options of `minari.create_dataset_from_buffers`: `env=` or spaces, author and so on. The default spaces
            are the widest that the fields allow.
    """
    minari = import_extra("minari", "minari", "Minari")
    require_time_order("to_minari", replay)
    trees = declared_fields(replay)
    refuse_nested_fields("to_minari", trees, ("reward",), "Write the buffer with to_hdf5, to_zarr or to_lerobot.")
    info = trees.get("info")
    for name in info if isinstance(info, dict) else ():
        if name in trees and name not in STEP_FIELDS:
            raise dataset_error("to_minari", "infos of distinct names", f"{name!r} twice", "Rename one of the fields.")
    default_spaces = {
        "observation_space": _make_widest_space(trees["obs"]),
        "action_space": _make_widest_space(trees["action"]),
    }
    options = {**({} if "env" in options else default_spaces), "jpeg_encoding": False, **options}
    spaces = [options.get(name) for name in ("observation_space", "action_space")]
    with warnings.catch_warnings():
        # Warnings are ignored, because Minari warns about missing authors and sources, which are optional.
        warnings.filterwarnings("ignore", category=UserWarning, module="minari")
        is_folder_new = False

        def buffers() -> Iterator[Any]:
            nonlocal is_folder_new
            # Minari creates the folder before it requests the first episode, so the folder exists from here on.
            is_folder_new = True
            yield from (_make_minari_episode(episode, spaces) for episode in read_episode_arrays(replay))

        try:
            return minari.create_dataset_from_buffers(dataset_id, buffers(), **options)
        except BaseException:
            if is_folder_new:
                shutil.rmtree(_find_dataset_path(dataset_id), ignore_errors=True)
            raise


def _make_minari_episode(tree: dict[str, Any], spaces: list[Any]) -> Any:
    """Convert an episode [T] to Minari's EpisodeBuffer."""
    obs = concatenate_leaves(tree["obs"], slice_leaves(tree["next_obs"], slice(-1, None)))
    fields = {name: part for name, part in tree.items() if name not in (*STEP_FIELDS, "next_obs")}
    info = fields.pop("info", {})
    infos = {**(info if isinstance(info, dict) else {"info": info}), **fields}
    return import_extra("minari.data_collector", "minari").EpisodeBuffer(
        observations=_restore_tuples(spaces[0], obs),
        actions=_restore_tuples(spaces[1], tree["action"]),
        rewards=tree["reward"],
        terminations=tree["terminated"],
        truncations=tree["truncated"],
        infos=map_leaves(_prepend_reset_entry, infos) if infos else None,
    )


def _prepend_reset_entry(info: np.ndarray) -> Any:
    """Prepend zeros, the info of the reset, to an info [T, …]."""
    entries = np.concatenate([np.zeros_like(info[:1]), info])
    # Numbers become a list, because Minari cannot read back an Arrow column of arrays without a shape.
    return list(entries) if entries.ndim == 1 else entries


def _restore_tuples(space: Any, tree: Any) -> Any:
    """Convert the parts "0", "1", … of a Tuple space to a tuple."""
    if isinstance(space, gym.spaces.Tuple):
        return tuple(_restore_tuples(part, tree[str(i)]) for i, part in enumerate(space.spaces))
    if isinstance(space, gym.spaces.Dict):
        return {name: _restore_tuples(part, tree[name]) for name, part in space.spaces.items()}
    return tree


def _make_widest_space(tree: Tree) -> gym.Space[Any]:
    if isinstance(tree, dict):
        return gym.spaces.Dict({name: _make_widest_space(part) for name, part in tree.items()})
    dtype = DTYPES[tree.dtype] or np.dtype(np.float32)
    if dtype.kind == "f":
        low, high = -np.inf, np.inf
    else:
        low, high = (0, 1) if dtype.kind == "b" else (torch.iinfo(tree.dtype).min, torch.iinfo(tree.dtype).max)
    return gym.spaces.Box(low, high, caller_shape(tree), dtype.type)
