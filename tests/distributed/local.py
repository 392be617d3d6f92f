"""A service whose shards are objects of this process and can be killed: the protocol without a cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from relive.distributed import Checkpoint, ReplayService
from relive.distributed.client import CallInterrupted, ShardCalls
from relive.distributed.protocol import ServicePlan
from relive.distributed.shard import Shard
from relive.replay.samplers import Uniform

HEALTHY, DIES_BEFORE, DIES_AFTER = "healthy", "dies before", "dies after"


class LocalCalls(ShardCalls):
    """Calls that are executed immediately; `fate` decides before each call whether the process of the shard dies."""

    near = False
    """Whether clients read the shards' memory in place."""

    def __init__(self, plan: ServicePlan, shard_type: type[Shard] = Shard) -> None:
        super().__init__("local", [None] * plan.num_shards, timeout=60.0)
        self._make = lambda number: shard_type(plan, number)
        self.shards = [self._make(number) for number in range(plan.num_shards)]
        self.fate: Callable[[str], str] = lambda method: HEALTHY
        self.calls: list[str] = []

    def start_call(self, shard: int, method: str, *arguments: Any) -> Any:
        if method == "memory_location" and not self.near:
            return None
        self.calls.append(method)
        fate = self.fate(method)
        result = None if fate == DIES_BEFORE else getattr(self.shards[shard], method)(*arguments)
        if fate == HEALTHY:
            return result
        self.die(shard)
        return CallInterrupted(fate)

    def die(self, shard: int) -> None:
        """Replace a shard by a new one, as after the end of its process."""
        self.shards[shard] = self._make(shard)

    def has_answer(self, ref: Any) -> bool:
        return True

    def fetch_answer(self, shard: int, ref: Any, deadline: float) -> Any:
        if isinstance(ref, CallInterrupted):
            raise ref
        return ref

    def kill_shards(self) -> None:
        self.shards = []


def local_service(
    plan: ServicePlan, *, shard_type: type[Shard] = Shard, max_pending: int = 4, seed: int | None = 0
) -> tuple[ReplayService, LocalCalls]:
    """Return a client of new shards, and its calls to the shards."""
    calls = LocalCalls(plan, shard_type)
    return make_client(calls, plan, max_pending=max_pending, seed=seed), calls


def make_client(calls: LocalCalls, plan: ServicePlan, *, max_pending: int = 4, seed: int | None = 0) -> ReplayService:
    """Return another client of the same shards."""
    service = ReplayService.__new__(ReplayService)
    service._attach_shards(plan, calls, max_pending, seed)
    for stream in service._streams:
        stream.poll_seconds = -1.0
    return service


def make_plan(capacity: int, num_envs: int, num_shards: int = 1, **changes: Any) -> ServicePlan:
    """Return the plan of a service whose observations are (environment, step)."""
    settings: dict[str, Any] = {
        "obs": 2,
        "action": (),
        "reward": (),
        "extra": {},
        "sampler": Uniform(),
        "autoreset": None,
        "checkpoint": None,
        "seed": 0,
        **changes,
    }
    if isinstance(settings["checkpoint"], str):
        settings["checkpoint"] = Checkpoint(settings["checkpoint"], seconds=1e9)
    return ServicePlan(capacity, num_envs=num_envs, num_shards=num_shards, **settings)


def make_steps(envs: Sequence[int], first: int, count: int, length: int = 0) -> dict[str, Any]:
    """Return steps `first` to `first + count` of environments; observation, action and reward identify them.

    Episodes of `length` steps are terminated; the next observation of the last one is step number -1.
    """
    step, env = np.meshgrid(
        np.arange(first, first + count, dtype=np.float32), np.array(envs, np.float32), indexing="ij"
    )
    ends = (step + 1) % length == 0 if length else np.zeros(step.shape, np.bool_)
    return {
        "obs": np.stack([env, step], -1),
        "action": env,
        "reward": step,
        "terminated": ends,
        "truncated": np.zeros(step.shape, np.bool_),
        "next_obs": np.stack([env, np.where(ends, -1, step + 1)], -1).astype(np.float32),
    }
