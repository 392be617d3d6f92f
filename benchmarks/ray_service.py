"""Rows per second into and out of a replay memory in a Ray cluster, compared with other ways to build one.

Run it as `python -m benchmarks.ray_service [--quick] [--only extend,sample] [--rows obs,image] [--json PATH]`.

The buffer of each contestant and each client run in separate processes. Clients start together and work for a fixed
time, in rounds, with the contestants in random order. Only ratios within a run mean anything.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import ray
import torch
from rich.console import Console

from relive.distributed import ReplayService
from relive.schema.fields import Field

from . import machine
from .report import Result
from .suite import Session, make_parser, names_type
from .timing import Role, make_timing

MAX_CLIENTS = 4
SIZES: dict[str, dict[str, Any]] = {
    "obs": {"shape": (17,), "dtype": np.float32, "capacity": 100_000, "block": 256, "batch": 256},
    "image": {"shape": (84, 84, 4), "dtype": np.uint8, "capacity": 2_000, "block": 64, "batch": 32},
}
PENDING = 4
"""Concurrent calls of a peer's client; the service chooses its own number."""


def make_block(size: dict[str, Any], env: int) -> dict[str, np.ndarray]:
    """Return steps [T, 1] of one environment in one episode; each observation is its step number."""
    steps = size["block"]
    frames = np.zeros((steps + 1, 1, *size["shape"]), size["dtype"])
    frames.reshape(steps + 1, -1)[:, 0] = np.arange(steps + 1)
    frames.reshape(steps + 1, -1)[:, 1] = env
    flags = np.zeros((steps, 1), np.bool_)
    return {
        "obs": frames[:-1].copy(),
        "action": np.ones((steps, 1, 6), np.float32),
        "reward": np.arange(steps, dtype=np.float32)[:, None],
        "terminated": flags,
        "truncated": flags,
        "next_obs": frames[1:].copy(),
    }


def check(obs: Any, reward: Any, next_obs: Any) -> None:
    """Raise if the sampled rows differ from the added ones."""
    first, second = (np.asarray(x).reshape(len(x), -1)[:, 0].astype(np.float32) for x in (obs, next_obs))
    if not (np.array_equal(second, first + 1) and np.array_equal(np.asarray(reward).reshape(-1), first)):
        raise RuntimeError("a batch with rows that were never sent")


# Contestants. `client` returns three functions: write a block, read a batch as tensors, wait for pending writes.


class Ours:
    """The service with `shards` shards.

    `ahead`: batches are requested before they are needed. `far`: clients call the shards, as from another machine;
    otherwise they read the shards in place.
    """

    def __init__(self, size: dict[str, Any], shards: int, ahead: bool = True, far: bool = False) -> None:
        self.ahead, self.far = ahead, far
        dtype = torch.from_numpy(np.empty(0, size["dtype"])).dtype
        self.service = ReplayService(
            f"bench-{shards}-{ahead}-{far}",
            size["capacity"],
            Field(size["shape"], dtype),
            6,
            num_envs=MAX_CLIENTS,
            num_shards=shards,
        )

    def client(self, env: int, size: dict[str, Any]) -> tuple[Callable[[], int], Callable[[], int], Callable[[], None]]:
        service, block = self.service, make_block(size, env)
        if self.far:
            service._reader.may_read_in_place = False
        batches = service.batches(size["batch"])

        def write() -> int:
            service.extend(block, env_ids=[env])
            return size["block"]

        def read() -> int:
            batch = next(batches) if self.ahead else service.sample(size["batch"])
            check(batch["obs"][:1], batch["reward"][:1], batch["next_obs"][:1])
            return size["batch"]

        return write, read, service.flush

    def close(self) -> None:
        self.service.close()


class InActor:
    """A peer's buffer in an actor, with up to `reads` batches requested before they are needed.

    A plain actor requests one. Our `batches` requests more, with one call per batch.
    """

    def __init__(self, size: dict[str, Any], memory: type, reads: int) -> None:
        self.reads = reads
        self.actor: Any = ray.remote(num_cpus=0)(memory).remote(size)

    def client(self, env: int, size: dict[str, Any]) -> tuple[Callable[[], int], Callable[[], int], Callable[[], None]]:
        actor, block, pending, coming = self.actor, make_block(size, env), deque[Any](), deque[Any]()

        def write() -> int:
            if len(pending) == PENDING:
                ray.get(pending.popleft())
            pending.append(actor.write.remote(env, block))
            return size["block"]

        def read() -> int:
            while len(coming) < self.reads:
                coming.append(actor.read.remote(size["batch"]))
            answer: Any = ray.get(coming.popleft())
            batch = {name: torch.from_numpy(np.array(x)) for name, x in answer.items()}
            check(batch["obs"][:1], batch["reward"][:1], batch["next_obs"][:1])
            return size["batch"]

        def flush() -> None:
            while pending:
                ray.get(pending.popleft())

        return write, read, flush

    def close(self) -> None:
        ray.kill(self.actor)


class StableBaselines3:
    """Stable-Baselines3's replay buffer, which takes single steps; batches are sent as arrays, Ray's fastest form."""

    def __init__(self, size: dict[str, Any]) -> None:
        from stable_baselines3.common.buffers import ReplayBuffer  # pyright: ignore[reportMissingImports]

        space = gym.spaces.Box(0, 255, size["shape"], size["dtype"])
        actions = gym.spaces.Box(-1, 1, (6,), np.float32)
        self.buffer = ReplayBuffer(size["capacity"], space, actions, "cpu", handle_timeout_termination=False)

    def write(self, env: int, block: dict[str, np.ndarray]) -> None:
        add = self.buffer.add
        for t in range(len(block["obs"])):
            obs, next_obs, action = (block[name][t] for name in ("obs", "next_obs", "action"))
            add(obs, next_obs, action, block["reward"][t], block["terminated"][t], [{}])

    def read(self, batch_size: int) -> dict[str, np.ndarray]:
        batch = self.buffer.sample(batch_size)
        return {
            "obs": batch.observations.numpy(),
            "action": batch.actions.numpy(),
            "reward": batch.rewards.numpy(),
            "terminated": batch.dones.numpy(),
            "next_obs": batch.next_observations.numpy(),
        }


class TorchRL:
    """TorchRL's buffer in a Ray actor. It cannot be sent to another process: this process is its only client."""

    travels = False

    def __init__(self, size: dict[str, Any]) -> None:
        from functools import partial

        from torchrl.data import LazyTensorStorage, RayReplayBuffer  # pyright: ignore[reportMissingImports]

        self.buffer = RayReplayBuffer(
            storage=partial(LazyTensorStorage, size["capacity"]),
            batch_size=size["batch"],
            remote_config={"num_cpus": 0},
        )

    def client(self, env: int, size: dict[str, Any]) -> tuple[Callable[[], int], Callable[[], int], Callable[[], None]]:
        from tensordict import TensorDict

        block = TensorDict(
            {name: torch.from_numpy(x[:, 0].copy()) for name, x in make_block(size, env).items()}, [size["block"]]
        )

        def write() -> int:
            self.buffer.extend(block)
            return size["block"]

        def read() -> int:
            batch = self.buffer.sample()
            check(batch["obs"][:1], batch["reward"][:1], batch["next_obs"][:1])
            return size["batch"]

        return write, read, lambda: None

    def close(self) -> None:
        self.buffer.close()


CONTESTANTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "relive, 1 shard": lambda size: Ours(size, 1, ahead=False),
    "relive, 2 shards": lambda size: Ours(size, 2, ahead=False),
    "relive, 1 shard, by calls": lambda size: Ours(size, 1, ahead=False, far=True),
    "relive, 1 shard, by calls ahead": lambda size: Ours(size, 1, far=True),
    "Stable-Baselines3 in an actor": lambda size: InActor(size, StableBaselines3, 1),
    "the same, reads pipelined": lambda size: InActor(size, StableBaselines3, PENDING),
    "TorchRL RayReplayBuffer": TorchRL,
}


class Worker:
    """A client in a separate process."""

    def __init__(self, memory: Any, env: int, size: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        self.write, self.read, self.flush = memory.client(env, size)

    def work(self, verb: str, start: float, seconds: float) -> float:
        """Return the rows per second from `start` on."""
        step = self.write if verb == "extend" else self.read
        while time.time() < start:
            time.sleep(0.001)
        rows, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            rows += step()
        if verb == "extend":
            self.flush()
        return rows / (time.perf_counter() - began)


def measure(workers: list[Any], verb: str, seconds: float) -> float:
    """Return the rows per second of all clients together."""
    start = time.time() + 0.1
    if isinstance(workers[0], Worker):
        return workers[0].work(verb, start, seconds)
    return sum(ray.get([worker.work.remote(verb, start, seconds) for worker in workers], timeout=300))


def contest(size: dict[str, Any], verbs: list[str], rounds: int, seconds: float, console: Console) -> dict[str, Any]:
    """Return rows per second for each case `verb, clients` and contestant, by round."""
    memories, workers, missing = {}, {}, {}
    for name, make in CONTESTANTS.items():
        try:
            memories[name] = make(size)
            remote: Any = ray.remote(num_cpus=0)(Worker)
            if getattr(memories[name], "travels", True):
                workers[name] = [remote.remote(memories[name], env, size) for env in range(MAX_CLIENTS)]
            else:
                workers[name] = [Worker(memories[name], 0, size)]
            measure(workers[name], "extend", 0.3)
            measure(workers[name], "sample", 0.3)
        except Exception as error:  # a peer that breaks must not end the run
            missing[name] = f"{type(error).__name__}: {str(error).splitlines()[-1]}"
            workers.pop(name, None)
            console.print(f"[yellow]missing[/yellow] {name}: {missing[name]}")
    rng, found = np.random.default_rng(0), {}
    for verb in verbs:
        for clients in (1, 2, 4):
            candidates = [name for name in workers if len(workers[name]) >= clients]
            case = found[f"{verb}, {clients} clients"] = {name: [] for name in candidates}
            for _ in range(rounds):
                for name in rng.permutation(candidates).tolist():
                    case[name].append(measure(workers[name][:clients], verb, seconds))
    for name, memory in memories.items():
        for worker in workers.get(name, ()):
            if not isinstance(worker, Worker):
                ray.kill(worker)
        memory.close()
    return {"cases": found, "missing": missing}


def make_results(rows: str, found: dict[str, Any]) -> Iterator[Result]:
    """Return a case per verb and number of clients: seconds per row of all clients together."""
    for case, rates in found["cases"].items():
        result = Result(f"Ray: {case}, rows of {rows}", [])
        for name, rows_per_second in rates.items():
            role: Role = "ours" if name.startswith("relive") else "peer"
            result.timings.append(make_timing(name, role, [1 / rate for rate in rows_per_second]))
        yield result


def main(arguments: Sequence[str] | None = None) -> int:
    """Start a local cluster and run all contestants in it."""
    parser = make_parser("ray_service", __doc__ or "", ("extend", "sample"))
    parser.add_argument("--rows", type=names_type(SIZES), default=list(SIZES), help=f"some of {','.join(SIZES)}")
    options = parser.parse_args(arguments)
    session = Session.create("ray_service", options)
    rounds, seconds = (2, 0.25) if options.quick else (5, 1.0)
    outcomes = []
    session.about["missing"] = {}
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=1 << 30, log_to_driver=False)
    try:
        for rows in options.rows:
            found = contest(SIZES[rows], options.only, rounds, seconds, session.console)
            session.about["missing"] |= found["missing"]
            outcomes += [session.compare(result) for result in make_results(rows, found)]
    finally:
        ray.shutdown()
    names = ("relive", "ray", "stable-baselines3", "torchrl")
    session.about["peers"] = {name: machine.installed_version(name) for name in names}
    return session.finish(outcomes)


if __name__ == "__main__":
    raise SystemExit(main())
