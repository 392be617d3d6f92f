"""Buffers of every kind, and reproducible operations on them: equal seeds give equal operations."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode

import relive as rl
from relive.replay.ring import HISTORY, TRANSITION
from relive.schema.conversion import as_indexable
from relive.storage.codec import tensor_bytes

N = 3


@dataclass(frozen=True)
class Kind:
    """Functions that make a buffer, change it (the n-th time), and read it (which may draw)."""

    make: Callable[[], Any]
    act: Callable[[Any, int], None]
    read: Callable[[Any], list[Any]]


def _numbers(n: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(n).standard_normal(shape).astype(np.float32)


def step_replay(replay: rl.ReplayBuffer, n: int) -> None:
    """Add a step of all environments, every fifth time of one; some steps end an episode or jump."""
    rng = np.random.default_rng(n)
    envs = [int(rng.integers(N))] if n % 5 == 4 else list(range(N))
    t = getattr(replay, "_tests_clock", np.zeros(N))
    obs = np.stack([np.full(2, 10 * e + t[e]) for e in envs]).astype(np.float32)
    terminated, truncated = rng.random(len(envs)) < 0.2, rng.random(len(envs)) < 0.1
    t[envs] += 1 + 100 * (rng.random(len(envs)) < 0.1)
    replay._tests_clock = t  # type: ignore[attr-defined]
    replay.add(
        obs, _numbers(n, len(envs), 1), _numbers(n + 1, len(envs)), terminated, truncated, obs + 1,
        env_ids=envs if n % 5 == 4 else None, tag=np.full(len(envs), n % 1000, np.int32),
    )  # fmt: skip
    # Jumps without cut() are intended here: their warning is dropped.
    replay.storage.warning = None
    # After clear() there may be only a dummy step.
    if n % 7 == 6 and isinstance(replay.sampler, rl.Prioritized) and len(replay):
        batch = replay.sample(4)
        replay.update_priority(batch["index"], batch["reward"].abs())
    if n % 31 == 30:
        replay.cut([0])
    if n % 67 == 66:
        replay.clear()


def draw(replay: rl.ReplayBuffer) -> list[Any]:
    """Sample a batch of every view; nothing from an empty buffer."""
    if len(replay) < 8:
        return []
    views: list[Any] = [rl.Transition(), rl.NStep(3, 0.9), rl.Sequence(3)]
    return [replay.sample(4, view).to_dict() for view in views]


def make_replay(sampler: Any, **options: Any) -> rl.ReplayBuffer:
    extra = {"tag": rl.Field((), torch.int32)}
    return rl.ReplayBuffer(
        24,
        2,
        1,
        num_envs=N,
        extra=extra,
        sampler=sampler,
        seed=7,
        **({"stats": rl.EpisodeStats(N, window=5), "norm": {"obs": rl.RunningNorm(2)}} | options),
    )


def make_rollout() -> rl.RolloutBuffer:
    extra = {"hidden": {"a": rl.Carry(2)}, "tag": rl.Field((), torch.uint16)}
    return rl.RolloutBuffer(
        8, N, {"x": 2, "y": rl.Field(1, torch.bfloat16)}, 1, extra=extra, stats=rl.EpisodeStats(N), seed=3,
        autoreset=AutoresetMode.SAME_STEP,
    )  # fmt: skip


def step_rollout(rollout: rl.RolloutBuffer, n: int) -> None:
    """Add a step, partly staged; read and clear a full rollout."""
    if rollout.is_full:
        finals = rollout.final_obs["x"][:, 0]
        rollout.compute_advantage(_numbers(n, N), final_value=finals)
        if n % 2:
            return
        rollout.clear()
    rng = np.random.default_rng(n)
    obs = {"x": _numbers(n, N, 2), "y": torch.tensor(_numbers(n + 2, N, 1), device="cpu").bfloat16()}
    if "hidden" not in rollout._storage.staged:
        rollout.stage(hidden={"a": _numbers(n, N, 2)})
    if n % 3 == 0:
        return
    rollout.add(
        obs, _numbers(n, N, 1), _numbers(n, N), rng.random(N) < 0.2, rng.random(N) < 0.2, value=_numbers(n, N),
        final_obs={"x": _numbers(n + 9, N, 2), "y": torch.tensor(_numbers(n, N, 1), device="cpu").bfloat16()},
        tag=np.full(N, n % 100, np.uint16),
    )  # fmt: skip


def read_rollout(rollout: rl.RolloutBuffer) -> list[Any]:
    if not rollout.num_stored:
        return []
    batches = [*rollout.minibatches(4), *rollout.sequences(2, batch_size=3)]
    return [batch.to_dict() for batch in batches] + [rollout.final_obs.to_dict()]


def step_distillation(buffer: rl.DistillationBuffer, n: int) -> None:
    count = n % 4
    buffer.add(_numbers(n, count, 2), _numbers(n, count, 1), logits=_numbers(n, count, 3))
    if n % 6 == 5:
        buffer.next_round()
    if n % 29 == 28:
        buffer.clear()


def read_distillation(buffer: rl.DistillationBuffer) -> list[Any]:
    return [buffer.sample(5).to_dict(), *(batch.to_dict() for batch in buffer.epochs(4))] if len(buffer) else []


KINDS = {
    "uniform": Kind(lambda: make_replay(rl.Uniform()), step_replay, draw),
    "prioritized": Kind(lambda: make_replay(rl.Prioritized(normalize="global")), step_replay, draw),
    "epochs": Kind(lambda: make_replay(rl.WithoutReplacement()), step_replay, draw),
    "counted": Kind(lambda: make_replay(rl.Counted(rl.Prioritized())), step_replay, draw),
    "next step": Kind(lambda: make_replay(rl.Prioritized(), autoreset="NEXT_STEP"), step_replay, draw),
    "stored": Kind(
        lambda: make_replay(rl.Prioritized(), next_obs="stored"),
        step_replay,
        lambda replay: [replay.sample(4).to_dict() for _ in range(3)] if len(replay) >= 8 else [],
    ),
    "rollout": Kind(make_rollout, step_rollout, read_rollout),
    "distillation": Kind(lambda: rl.DistillationBuffer(13, 2, seed=5), step_distillation, read_distillation),
}


def equal(a: Any, b: Any) -> bool:
    """Whether two values are equal, bit by bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bytes(tensor_bytes(a)) == bytes(tensor_bytes(b))
    return a == b


def digest(buffer: Any) -> Any:
    """Return the contents of a checkpoint of a buffer."""
    (values, arrays), rows = buffer.state(), buffer.rows()
    columns: dict[str, torch.Tensor] = {}
    if rows is not None and len(rows):
        flat_slots = rows.flat_slots()
        columns = {name: as_indexable(column.flatten(0, 1))[flat_slots] for name, column in rows.columns.items()}
        if isinstance(buffer, rl.ReplayBuffer):
            # In a row with only an observation, the other fields are undefined.
            kind = buffer.storage.rows.ring.kind.view(-1)[flat_slots]
            for name in columns.keys() - {f"column{i}" for i in buffer.storage.rows.obs_leaves}:
                columns[name][(kind != TRANSITION) & (kind != HISTORY)] = 0
        columns |= {"first": rows.first.clone(), "stop": rows.stop.clone()}
    values = {name: part for name, part in values.items() if name != "memory"}
    return buffer.config(), values, {name: x.clone() for name, x in arrays.items()}, columns


def fingerprint(buffer: Any) -> str:
    """Return a hash of the contents of a checkpoint of a buffer."""
    found = hashlib.sha256()

    def take(node: Any) -> None:
        if isinstance(node, dict):
            for key in sorted(node):
                found.update(f"{key}:".encode())
                take(node[key])
        elif isinstance(node, list | tuple):
            for item in node:
                take(item)
        elif isinstance(node, torch.Tensor):
            found.update(f"{node.dtype}{tuple(node.shape)}".encode() + bytes(tensor_bytes(node)))
        else:
            found.update(f"{node!r};".encode())

    take(digest(buffer))
    return found.hexdigest()
