"""Minari datasets: read episode by episode into any buffer, and written from a replay buffer."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict

from relive.checkpoint.progress import watched
from relive.datasets.hdf5 import require_own_bytes
from relive.distillation import DistillationBuffer
from relive.errors import BufferFullError, DataWarning, SchemaError, explain
from relive.fields.conversion import as_tensor, dotted
from relive.fields.schema import DTYPES, Field, Tree, given_shape, leaves_of
from relive.memory import Memory
from relive.replay.buffer import ReplayBuffer
from relive.replay.samplers import Sampler
from relive.rollout.buffer import RolloutBuffer

_HOST = torch.device("cpu")


class Episode(NamedTuple):
    """One episode of a dataset: T steps, and T + 1 observations."""

    number: int
    obs: Any
    action: Any
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    info: dict[str, Any]
    """Nested arrays, an entry for each step: what the step gave."""

    @property
    def size(self) -> int:
        """The number of steps."""
        return len(self.reward)


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

    A given replay buffer with several environments gets each episode into the one with the fewest steps so far. A field
    of its own, or of a DistillationBuffer, that is called "info" takes the infos; any other takes the info of that
    name. A RolloutBuffer has one environment and room for all steps. When it takes long, a terminal shows how far.

    Of a dataset that is larger than the buffer the newest steps stay, and a `DataWarning` says how many did not fit.

    Args:
        dataset: a `MinariDataset`, the id of a local one, or a path.
        buffer: where the steps go. None makes a ReplayBuffer with room for all of them and the dtypes that
            `ReplayBuffer.for_env` gives: float64 becomes float32. A given one keeps what its Fields declare.
        infos: names of what is kept of the infos, in the field "info": all by default, which must be arrays of numbers.
        sampler: the sampler of the buffer that is made.
        device: where the buffer that is made keeps its rows.
        seed: the seed of the buffer that is made.
    """
    source = opened(dataset)
    if buffer is None:
        buffer = _made(source, infos, sampler, device, seed)
    write = {ReplayBuffer: _to_replay, RolloutBuffer: _to_rollout, DistillationBuffer: _to_distillation}.get(
        type(buffer)
    )
    if write is None:
        remedy = "Pass a ReplayBuffer, a RolloutBuffer or a DistillationBuffer."
        raise SchemaError(explain("from_minari", "a buffer", type(buffer).__name__, remedy))
    if isinstance(buffer, RolloutBuffer):
        _require_room(source.total_steps, buffer.num_steps - buffer.num_stored)
    episodes = watched(episodes_of(source, infos), source.total_steps, "reading episodes", lambda one: one.size)
    kept = write(buffer, episodes)
    if kept < source.total_steps:
        remedy = "the oldest were overwritten. Make the buffer larger: the last observation of an episode is a row too."
        warnings.warn(_too_small(source.total_steps, kept, remedy), DataWarning, stacklevel=2)
    return buffer


def _require_room(steps: int, room: int) -> None:
    if steps > room:
        raise BufferFullError(_too_small(steps, room, f"make the rollout with num_steps={steps}."))


def _too_small(steps: int, room: int, remedy: str) -> str:
    lost = f"{steps - room} step{'s' if steps - room > 1 else ''} did not fit: {remedy}"
    return explain("from_minari", f"room for {steps} steps", f"room for {room}", lost)


def opened(dataset: Any) -> Any:
    """The dataset that is meant by an object, a path or an id."""
    minari = _minari()
    from minari.storage import get_dataset_path  # noqa: PLC0415 (an extra)

    if isinstance(dataset, minari.MinariDataset):
        _require_own_bytes(Path(dataset.storage.data_path))
        return dataset
    if not isinstance(dataset, str | PathLike):
        remedy = "Pass a MinariDataset, its id or its path."
        raise SchemaError(explain("dataset", "a Minari dataset", type(dataset).__name__, remedy))
    folder = dataset_folder(Path(dataset)) or dataset_folder(get_dataset_path(str(dataset)))
    if folder is None:
        return minari.load_dataset(str(dataset))  # which says that there is none
    _require_spaces(folder)
    _require_own_bytes(folder)
    return minari.MinariDataset(folder)


def _require_spaces(folder: Path) -> None:
    """Without its spaces Minari makes the environment that a dataset names, whatever code that is."""
    metadata = json.loads((folder / "metadata.json").read_text("utf-8"))
    missing = [name for name in ("observation_space", "action_space") if not isinstance(metadata.get(name), str)]
    if missing:
        remedy = "Its environment would be made: if you trust it, pass minari.MinariDataset(path) instead of the path."
        raise SchemaError(explain(f"{folder.name}/metadata.json", f"the {missing[0]}", "none", remedy))


def _require_own_bytes(folder: Path) -> None:
    file = folder / "main_data.hdf5"
    if file.exists():
        require_own_bytes(file)


def dataset_folder(path: Path) -> Path | None:
    """The folder of a Minari dataset's files: this one, or "data" in it; None where there is no dataset."""
    for folder in (path, path / "data"):
        try:
            found = json.loads((folder / "metadata.json").read_text("utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(found, dict) and "data_format" in found:
            return folder
    return None


def _minari() -> Any:
    try:
        import minari  # noqa: PLC0415 (an extra)
    except ImportError as error:
        remedy = 'Run pip install ".[minari]" in a clone of relive.'
        raise ImportError(explain("relive.datasets", "Minari to be installed", error, remedy)) from error
    return minari


# Reading


def episodes_of(
    dataset: Any, infos: Iterable[str] | None = None, which: Iterable[int] | None = None
) -> Iterator[Episode]:
    """The episodes of a dataset that have a step, in its order."""
    names = None if infos is None else list(infos)
    for data in dataset.iterate_episodes(which):
        if len(data.rewards):
            yield _episode(data, names)


def _episode(data: Any, names: list[str] | None) -> Episode:
    number, steps = int(data.id), len(data.rewards)
    where = f"episode {number}"
    for path, leaf in leaves_of(("observations",), _mapped(data.observations)):
        if len(leaf) != steps + 1:
            raise SchemaError(
                explain(f"{where}: {dotted(path)}", f"{steps + 1} observations", len(leaf), "Repair the dataset.")
            )
    given = data.infos or {}
    info = {name: _info(f"{where}: infos", given, name, steps) for name in (given if names is None else names)}
    terminated, truncated = (np.asarray(flag).astype(bool) for flag in (data.terminations, data.truncations))
    obs, action = _mapped(data.observations), _mapped(data.actions)
    return Episode(number, obs, action, np.asarray(data.rewards), terminated, truncated, info)


def _mapped(tree: Any) -> Any:
    """Tuples as the dicts that buffers keep them as, arrays as they are."""
    if isinstance(tree, tuple):
        return {str(i): _mapped(part) for i, part in enumerate(tree)}
    if isinstance(tree, Mapping):
        return {str(name): _mapped(part) for name, part in tree.items()}
    return np.asarray(tree)


def _info(where: str, given: Mapping[str, Any], name: str, steps: int) -> Any:
    if name not in given:
        known = ", ".join(map(str, given)) or "none"
        raise SchemaError(
            explain(where, f"{name!r} in every episode", f"an episode with {known}", "Leave it out of infos=.")
        )
    return _per_step(f"{where}: {name}", _mapped(given[name]), steps)


def _per_step(where: str, tree: Any, steps: int) -> Any:
    if isinstance(tree, dict):
        return {name: _per_step(f"{where}.{name}", part, steps) for name, part in tree.items()}
    if tree.dtype.kind not in "biufc" or not tree.ndim or len(tree) not in (steps, steps + 1):
        got = f"dtype {tree.dtype} of shape {tree.shape}"
        remedy = "Pass infos= with the names to keep, or infos=() to keep none."
        raise SchemaError(explain(where, f"numbers, an entry for each of {steps} steps", got, remedy))
    return tree[1:] if len(tree) == steps + 1 else tree  # the first is what reset gave


def _made(
    dataset: Any, infos: Iterable[str] | None, sampler: Sampler | None, device: Any, seed: int | None
) -> ReplayBuffer:
    first = next(episodes_of(dataset, infos), None)
    if first is None:
        raise SchemaError(explain("from_minari", "at least 1 episode", 0, "Pass a dataset that has episodes."))
    return ReplayBuffer(
        # The observation that an episode ended with takes a row too.
        dataset.total_steps + dataset.total_episodes,
        dataset.observation_space,
        dataset.action_space,
        reward=Field(first.reward.shape[1:]),
        extra={"info": _like(first.info)} if first.info else None,
        sampler=sampler,
        device=device,
        seed=seed,
    )


def _like(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _like(part) for name, part in tree.items()}
    tensor = as_tensor("info", tree[:1], _HOST)
    # As of spaces: learners work in float32.
    return Field(tensor.shape[1:], torch.float32 if tensor.dtype == torch.float64 else tensor.dtype)


def _extra(trees: Mapping[str, Tree], known: tuple[str, ...], episode: Episode) -> dict[str, Any]:
    """What an episode has for the fields that a buffer declares beside its own."""
    given = {"info": episode.info, **episode.info}
    for name in trees:
        if name not in known and name not in given:
            where, remedy = f"episode {episode.number}", "Declare only fields that every episode has."
            expected = f"one of its infos ({', '.join(episode.info) or 'none'}) for each further field"
            raise SchemaError(explain(where, expected, repr(name), remedy))
    return {name: given[name] for name in trees if name not in known}


_STEP = ("obs", "action", "reward", "terminated", "truncated")


def _to_replay(replay: ReplayBuffer, episodes: Iterable[Episode]) -> int:
    """Returns how many of the steps are stored in the end."""
    before = replay.storage.heads.clone()
    taken = [0] * (replay.num_envs or 1)
    for episode in episodes:
        batch = {name: getattr(episode, name) for name in _STEP[1:]}
        batch |= {"obs": _slice(episode.obs, slice(None, -1)), "next_obs": _slice(episode.obs, slice(1, None))}
        batch |= _extra(replay._schema.trees, _STEP, episode)
        env = taken.index(min(taken))
        taken[env] += episode.size
        if replay.num_envs is None:
            replay.extend(batch)
            replay.cut()
        else:
            replay.extend({name: _slice(tree, (slice(None), None)) for name, tree in batch.items()}, env_ids=[env])
            replay.cut([env])
    row, env = replay.ids() // len(taken), replay.ids() % len(taken)
    return int((row >= before[env]).sum())


def _slice(tree: Any, at: Any) -> Any:
    return {name: _slice(part, at) for name, part in tree.items()} if isinstance(tree, dict) else tree[at]


def _to_rollout(rollout: RolloutBuffer, episodes: Iterable[Episode]) -> int:
    before = rollout.num_stored
    if rollout.num_envs is not None:
        remedy = "Make it with num_envs=None: episodes are read one after the other."
        raise SchemaError(explain("from_minari", "a rollout with num_envs=None", rollout.num_envs, remedy))
    for episode in episodes:
        if not (episode.terminated[-1] or episode.truncated[-1]):
            remedy = "Read the dataset into a ReplayBuffer."
            raise SchemaError(
                explain(f"episode {episode.number}", "terminated or truncated at its end", "neither", remedy)
            )
        extra = _extra(rollout._schema.trees, (*_STEP, "value", "log_prob"), episode)
        for t in range(episode.size):
            step = {name: _slice(getattr(episode, name), t) for name in _STEP}
            final = {"final_obs": _slice(episode.obs, t + 1)} if episode.truncated[t] else {}
            rollout.add(**step, **final, **_slice(extra, t))
    return rollout.num_stored - before


def _to_distillation(buffer: DistillationBuffer, episodes: Iterable[Episode]) -> int:
    before = buffer._ring.head
    for episode in episodes:
        extra = _extra(buffer._schema.trees, ("obs", "action"), episode)
        buffer.add(_slice(episode.obs, slice(None, -1)), episode.action, **extra)
    return buffer._ring.head - max(buffer._ring.oldest, before)


# Writing


def to_minari(replay: ReplayBuffer, dataset_id: str, **options: Any) -> Any:
    """Write the episodes of a replay buffer as the local Minari dataset `dataset_id`; returns the MinariDataset.

    What was added beside obs, action, reward and ends becomes infos, the parts of a field "info" each under its own
    name; before the first step, where reset would have given some, they are zero. Pictures are not compressed as JPEG,
    which loses some of them, unless `jpeg_encoding=True` asks for it.

    Args:
        replay: a replay buffer in the order of time.
        dataset_id: the name of the dataset, as Minari has them: "namespace/name-v0".
        options: those of `minari.create_dataset_from_buffers`: `env=` or spaces, author and so on. Without them the
            spaces are the widest that the fields allow.
    """
    minari = _minari()
    if type(replay) is not ReplayBuffer or replay.storage.keeps_next:
        remedy = 'Use a ReplayBuffer with next_obs="shared": only it stores the observations of an episode in order.'
        raise SchemaError(explain("to_minari", "a replay buffer in time order", repr(replay), remedy))
    trees = replay._schema.trees
    given = {"observation_space": _space(trees["obs"]), "action_space": _space(trees["action"])}
    options = {**({} if "env" in options else given), "jpeg_encoding": False, **options}
    spaces = [options.get(name) for name in ("observation_space", "action_space")]
    episodes = watched(replay.episodes(), len(replay), "writing episodes", len)
    with warnings.catch_warnings():
        # Who made it and where it came from is the caller's to say, or not.
        warnings.filterwarnings("ignore", category=UserWarning, module="minari")
        return minari.create_dataset_from_buffers(dataset_id, (_written(one, spaces) for one in episodes), **options)


def _written(episode: TensorDict, spaces: list[Any]) -> Any:
    """An episode [T] as Minari takes it."""
    tree = {name: _arrays(value) for name, value in episode.items()}
    obs = _joined(tree["obs"], _slice(tree["next_obs"], slice(-1, None)))
    fields = {name: part for name, part in tree.items() if name not in (*_STEP, "next_obs", "index")}
    infos = {**fields.pop("info", {}), **fields}
    return _minari().data_collector.EpisodeBuffer(
        observations=_as(spaces[0], obs),
        actions=_as(spaces[1], tree["action"]),
        rewards=tree["reward"],
        terminations=tree["terminated"],
        truncations=tree["truncated"],
        infos=_listed(_joined(_nothing(infos), infos)) if infos else None,
    )


def _arrays(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (value.float() if DTYPES[value.dtype] is None else value).cpu().numpy()
    return {name: _arrays(part) for name, part in value.items()}


def _joined(tree: Any, more: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _joined(part, more[name]) for name, part in tree.items()}
    return np.concatenate([tree, more])


def _nothing(tree: Any) -> Any:
    """One entry of zeros."""
    return {name: _nothing(part) for name, part in tree.items()} if isinstance(tree, dict) else np.zeros_like(tree[:1])


def _listed(tree: Any) -> Any:
    """Numbers of a step as lists: of arrays without a shape of their own Minari's Arrow files cannot be read."""
    if isinstance(tree, dict):
        return {name: _listed(part) for name, part in tree.items()}
    return list(tree) if tree.ndim == 1 else tree


def _as(space: Any, tree: Any) -> Any:
    """Parts "0", "1", … as the tuple that a Tuple space has."""
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
    return gym.spaces.Box(low, high, given_shape(tree), dtype.type)
