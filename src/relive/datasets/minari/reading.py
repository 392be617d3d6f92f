"""Reading a Minari dataset into a buffer."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from relive.checkpoint.progress import watched
from relive.datasets.minari.dataset import STEP, Episode, episodes_of, opened, sliced
from relive.distillation import DistillationBuffer
from relive.errors import BufferFullError, DataWarning, SchemaError, explain
from relive.fields.conversion import as_tensor
from relive.fields.schema import Field, Tree
from relive.memory import Memory
from relive.replay.buffer import ReplayBuffer
from relive.replay.samplers import Sampler
from relive.rollout.buffer import RolloutBuffer

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


def _made(
    dataset: Any, infos: Iterable[str] | None, sampler: Sampler | None, device: Any, seed: int | None
) -> ReplayBuffer:
    first = next(episodes_of(dataset, infos), None)
    if first is None:
        raise SchemaError(explain("from_minari", "at least 1 episode", 0, "Pass a dataset that has episodes."))
    return ReplayBuffer(
        # The final observation of an episode takes a row too.
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
    # Learners work in float32, as in fields declared by a space.
    return Field(tensor.shape[1:], torch.float32 if tensor.dtype == torch.float64 else tensor.dtype)


def _extra(trees: Mapping[str, Tree], known: tuple[str, ...], episode: Episode) -> dict[str, Any]:
    """The values of an episode for the extra fields of a buffer."""
    given = {"info": episode.info, **episode.info}
    for name in trees:
        if name not in known and name not in given:
            where, remedy = f"episode {episode.number}", "Declare only fields that every episode has."
            known_infos = ", ".join(episode.info) or "it has no infos"
            expected = f"an info for each extra field ({known_infos})"
            raise SchemaError(explain(where, expected, repr(name), remedy))
    return {name: given[name] for name in trees if name not in known}


def _to_replay(replay: ReplayBuffer, episodes: Iterable[Episode]) -> int:
    """Add the episodes; returns how many of their steps are stored at the end."""
    before = replay.storage.heads.clone()
    taken = [0] * (replay.num_envs or 1)
    for episode in episodes:
        batch = {name: getattr(episode, name) for name in STEP[1:]}
        batch |= {"obs": sliced(episode.obs, slice(None, -1)), "next_obs": sliced(episode.obs, slice(1, None))}
        batch |= _extra(replay._schema.trees, STEP, episode)
        env = taken.index(min(taken))
        taken[env] += episode.size
        if replay.num_envs is None:
            replay.extend(batch)
            replay.cut()
        else:
            replay.extend({name: sliced(tree, (slice(None), None)) for name, tree in batch.items()}, env_ids=[env])
            replay.cut([env])
    row, env = replay.ids() // len(taken), replay.ids() % len(taken)
    return int((row >= before[env]).sum())


def _to_rollout(rollout: RolloutBuffer, episodes: Iterable[Episode]) -> int:
    before = rollout.num_stored
    if rollout.num_envs is not None:
        remedy = "Make it with num_envs=None: episodes are read one after the other."
        raise SchemaError(explain("from_minari", "a rollout with num_envs=None", rollout.num_envs, remedy))
    for episode in episodes:
        if not (episode.terminated[-1] or episode.truncated[-1]):
            remedy = "Read the dataset into a ReplayBuffer."
            raise SchemaError(
                explain(
                    f"episode {episode.number}",
                    "terminated or truncated at its last step",
                    "an episode without an end",
                    remedy,
                )
            )
        extra = _extra(rollout._schema.trees, (*STEP, "value", "log_prob"), episode)
        for t in range(episode.size):
            step = {name: sliced(getattr(episode, name), t) for name in STEP}
            final = {"final_obs": sliced(episode.obs, t + 1)} if episode.truncated[t] else {}
            rollout.add(**step, **final, **sliced(extra, t))
    return rollout.num_stored - before


def _to_distillation(buffer: DistillationBuffer, episodes: Iterable[Episode]) -> int:
    before = buffer._ring.head
    for episode in episodes:
        extra = _extra(buffer._schema.trees, ("obs", "action"), episode)
        buffer.add(sliced(episode.obs, slice(None, -1)), episode.action, **extra)
    return buffer._ring.head - max(buffer._ring.oldest, before)
