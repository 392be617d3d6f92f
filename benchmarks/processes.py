"""Throughput of concurrent writers and samplers of one replay buffer, in threads, in processes and in other libraries.

Every writer owns an environment and adds its steps one by one; every sampler draws a prioritized batch and updates its
priorities. Run it as `python -m benchmarks.processes [--quick] [--only KINDS] [--json PATH]`.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Protocol

import numpy as np
import torch

import relive as rl
from relive.replay.samplers import Sampler

from . import machine
from .report import Result
from .suite import Session, make_parser
from .timing import make_timing

KINDS = {
    "obs(17)": {"obs": (17,), "dtype": np.float32, "capacity": 100_000, "batch": 256},
    "84x84x4": {"obs": (84, 84, 4), "dtype": np.uint8, "capacity": 4_000, "batch": 32},
}
CROWDS = [(1, 0), (2, 0), (4, 0), (0, 1), (0, 2), (0, 4), (1, 1), (2, 2), (4, 4)]
"""Numbers of writers and samplers."""
MAX_WORKERS = 4
CONTEXT: Any = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["relive"])


class Entrant(Protocol):
    """A library whose buffer several workers use at once."""

    name: str
    draws: str
    """Sampling method; only contestants with the same method are compared."""

    def make(self, kind: str) -> Any:
        """Return a full buffer in the form that workers receive."""
        ...

    def writer(self, shared: Any, kind: str, env: int) -> Callable[[], object]:
        """In a worker: return a function that adds one step."""
        ...

    def sampler(self, shared: Any, kind: str) -> Callable[[], object]:
        """In a worker: return a function that samples one batch as torch tensors and updates its priorities."""
        ...


def make_step(kind: str) -> dict[str, np.ndarray]:
    """Return one step of one environment [1, …]."""
    random, settings = np.random.default_rng(0), KINDS[kind]
    obs = random.integers(0, 255, (2, 1, *settings["obs"])).astype(settings["dtype"])
    action = random.standard_normal((1, 6)).astype(np.float32)
    one, flag = np.ones(1, np.float32), np.zeros(1, bool)
    return {"obs": obs[0], "action": action, "reward": one, "terminated": flag, "truncated": flag, "next_obs": obs[1]}


class Ours:
    """`Memory.shared()` with a handle per process."""

    name, draws = "relive, shared memory", "prioritized"
    sampling: Sampler = rl.Prioritized()

    def make(self, kind: str) -> Any:
        self._replay = _make_buffer(kind, rl.Memory.shared(), self.sampling)  # the last process frees the memory
        return self._replay.handle()

    def writer(self, shared: Any, kind: str, env: int) -> Callable[[], object]:
        return _make_writer(rl.connect(shared), kind, env)

    def sampler(self, shared: Any, kind: str) -> Callable[[], object]:
        return _make_sampler(rl.connect(shared), kind)


class OursUniform(Ours):
    """Shared memory with uniform sampling."""

    name, draws = "relive, shared memory, uniform", "uniform"
    sampling = rl.Uniform()

    def sampler(self, shared: Any, kind: str) -> Callable[[], object]:
        replay, batch_size = rl.connect(shared), KINDS[kind]["batch"]
        return lambda: replay.sample(batch_size)


class Threads:
    """One buffer used by threads of one process."""

    name, draws = "relive, threads", "prioritized"

    def make(self, kind: str) -> Any:
        return _make_buffer(kind, "cpu", rl.Prioritized())

    def writer(self, shared: Any, kind: str, env: int) -> Callable[[], object]:
        return _make_writer(shared, kind, env)

    def sampler(self, shared: Any, kind: str) -> Callable[[], object]:
        return _make_sampler(shared, kind)


def _make_buffer(kind: str, device: Any, sampler: Sampler) -> rl.ReplayBuffer:
    settings = KINDS[kind]
    obs = rl.Field(settings["obs"], torch.from_numpy(np.zeros(0, settings["dtype"])).dtype)
    replay = rl.ReplayBuffer(settings["capacity"], obs, 6, num_envs=MAX_WORKERS, sampler=sampler, device=device)
    step = {name: np.concatenate([value] * MAX_WORKERS) for name, value in make_step(kind).items()}
    for _ in range(settings["capacity"] // MAX_WORKERS):
        replay.add(**step)
    return replay


def _make_writer(replay: rl.ReplayBuffer, kind: str, env: int) -> Callable[[], object]:
    step = make_step(kind)
    return lambda: replay.add(**step, env_ids=[env])


def _make_sampler(replay: rl.ReplayBuffer, kind: str) -> Callable[[], object]:
    batch_size = KINDS[kind]["batch"]
    priority = torch.rand(batch_size)
    return lambda: replay.update_priority(replay.sample(batch_size)["index"], priority)


class Cpprb:
    """cpprb's `MPPrioritizedReplayBuffer`."""

    name, draws = "cpprb", "prioritized"

    def make(self, kind: str) -> Any:
        import cpprb  # pyright: ignore[reportMissingImports]

        settings = KINDS[kind]
        obs = {"shape": settings["obs"], "dtype": settings["dtype"]}
        fields = {"obs": obs, "action": {"shape": 6}, "reward": {}, "next_obs": obs, "terminated": {}}
        buffer = cpprb.MPPrioritizedReplayBuffer(settings["capacity"], fields, ctx=CONTEXT)
        step = {name: np.repeat(value, 100, 0) for name, value in self._step(kind).items()}
        for _ in range(settings["capacity"] // 100):
            buffer.add(**step)
        return buffer

    def _step(self, kind: str) -> dict[str, np.ndarray]:
        return {name: value for name, value in make_step(kind).items() if name != "truncated"}

    def writer(self, shared: Any, kind: str, env: int) -> Callable[[], object]:
        step = self._step(kind)
        return lambda: shared.add(**step)

    def sampler(self, shared: Any, kind: str) -> Callable[[], object]:
        batch_size = KINDS[kind]["batch"]
        priority = np.random.default_rng(0).random(batch_size)

        def learn() -> None:
            batch = shared.sample(batch_size)
            for value in batch.values():
                torch.from_numpy(value)
            shared.update_priorities(batch["indexes"], priority)

        return learn


class TorchRL:
    """`TensorDictReplayBuffer` over a shared `LazyMemmapStorage`, as its documentation shows for several processes; it
    samples uniformly, since its prioritized sampler is not shared."""

    name, draws = "TorchRL, uniform", "uniform"

    def make(self, kind: str) -> Any:
        from tensordict import TensorDict
        from torchrl.data import (  # pyright: ignore[reportMissingImports]
            LazyMemmapStorage,
            TensorDictReplayBuffer,
        )

        settings = KINDS[kind]
        buffer = TensorDictReplayBuffer(
            storage=LazyMemmapStorage(settings["capacity"]), batch_size=settings["batch"], shared=True
        )
        step = {name: torch.from_numpy(np.repeat(value, 100, 0)) for name, value in make_step(kind).items()}
        for _ in range(settings["capacity"] // 100):
            buffer.extend(TensorDict(step, [100]))
        return buffer

    def writer(self, shared: Any, kind: str, env: int) -> Callable[[], object]:
        from tensordict import TensorDict

        step = {name: torch.as_tensor(value[0]) for name, value in make_step(kind).items()}
        return lambda: shared.add(TensorDict(step, []))

    def sampler(self, shared: Any, kind: str) -> Callable[[], object]:
        return shared.sample


ENTRANTS: dict[str, Entrant] = {
    "ours": Ours(),
    "uniform": OursUniform(),
    "threads": Threads(),
    "cpprb": Cpprb(),
    "torchrl": TorchRL(),
}


def work(key: str, shared: Any, kind: str, place: int, is_writer: bool, clock: Any, counts: Any) -> None:
    """Call until the time is over; write the calls per second into `counts`."""
    torch.set_num_threads(1)
    entrant = ENTRANTS[key]
    call = entrant.writer(shared, kind, place) if is_writer else entrant.sampler(shared, kind)
    for _ in range(5):
        call()
    clock[1 + place + MAX_WORKERS * (not is_writer)] = 1
    while clock[0] == 0:
        time.sleep(0.001)
    count, start = 0, time.perf_counter()
    while clock[0] == 1:
        call()
        count += 1
    counts[place + MAX_WORKERS * (not is_writer)] = count / (time.perf_counter() - start)


def run(key: str, shared: Any, kind: str, crowd: tuple[int, int], seconds: float) -> tuple[float, float]:
    """Return the calls per second of all writers and of all samplers."""
    threads = key == "threads"
    clock = [0] * 9 if threads else CONTEXT.Array("i", 9, lock=False)
    counts = [0.0] * 8 if threads else CONTEXT.Array("d", 8, lock=False)
    places = [(place, True) for place in range(crowd[0])] + [(place, False) for place in range(crowd[1])]
    make = threading.Thread if threads else CONTEXT.Process
    workers = [
        make(target=work, args=(key, shared, kind, place, is_writer, clock, counts)) for place, is_writer in places
    ]
    for worker in workers:
        worker.start()
    deadline = time.monotonic() + 120
    while sum(clock[1:]) < len(workers):
        if time.monotonic() > deadline or not all(worker.is_alive() for worker in workers):
            raise RuntimeError("a worker did not get ready")
        time.sleep(0.01)
    clock[0] = 1
    time.sleep(seconds)
    clock[0] = 2
    for worker in workers:
        worker.join(60)
    return sum(counts[:MAX_WORKERS]), sum(counts[MAX_WORKERS:])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all groups of workers, every contestant in turn, and print their throughput."""
    options = make_parser("processes", __doc__ or "", KINDS).parse_args(arguments)
    session = Session.create("processes", options)
    rounds, seconds = (2, 0.3) if options.quick else (3, 1.0)
    missing: dict[str, str] = {}
    outcomes = []
    for kind in options.only:
        buffers = _make_buffers(kind, missing)
        for crowd in CROWDS[:: 2 if options.quick else 1]:
            rates = [contest(buffers, kind, crowd, seconds, session) for _ in range(rounds)]
            outcomes += [session.compare(result) for result in make_results(kind, crowd, rates)]
    for name, reason in missing.items():
        session.console.print(f"[yellow]missing[/yellow] {name}: {reason}")
    session.about["peers"] = {name: machine.installed_version(name) for name in ("relive", "cpprb", "torchrl")}
    session.about["missing"] = missing
    return session.finish(outcomes)


def _make_buffers(kind: str, missing: dict[str, str]) -> dict[str, Any]:
    buffers: dict[str, Any] = {}
    for key, entrant in ENTRANTS.items():
        try:
            buffers[key] = entrant.make(kind)
        except Exception as error:  # a peer that is missing or broken must not end the run
            missing[entrant.name] = f"{type(error).__name__}: {error}"
    return buffers


Rates = dict[str, tuple[float, float]]


def contest(buffers: dict[str, Any], kind: str, crowd: tuple[int, int], seconds: float, session: Session) -> Rates:
    """Run one round in random order; return calls per second of all writers and all samplers by library."""
    rates: Rates = {}
    for key in session.rng.permutation(list(buffers)).tolist():
        with session.console.status(f"{kind}, {crowd}: {key}"), suppress(RuntimeError):
            rates[ENTRANTS[key].name] = run(key, buffers[key], kind, crowd, seconds)
    return rates


def make_results(kind: str, crowd: tuple[int, int], rounds: Sequence[Rates]) -> Iterator[Result]:
    """Yield a case for writers and for samplers of each method: seconds per call of all workers together."""
    crowded = f"{kind}, {crowd[0]} writers, {crowd[1]} samplers"
    processes = [entrant for entrant in ENTRANTS.values() if not isinstance(entrant, Threads)]
    uniform = [entrant for entrant in processes if entrant.draws == "uniform"]
    prioritized = [entrant for entrant in processes if entrant.draws == "prioritized"]
    for what, call, entrants in (
        ("shared memory: add", 0, processes),
        ("shared memory: sample", 1, uniform),
        ("shared memory: sample and update", 1, prioritized),
        ("threads: add", 0, [ENTRANTS["threads"]]),
        ("threads: sample and update", 1, [ENTRANTS["threads"]]),
    ):
        result = Result(f"{what}, {crowded}", [])
        for name in (entrant.name for entrant in entrants):
            seconds = [1 / rates[name][call] for rates in rounds if name in rates and rates[name][call]]
            if seconds:
                result.timings.append(make_timing(name, "ours" if name.startswith("relive") else "peer", seconds))
        if result.timings:
            yield result


if __name__ == "__main__":
    raise SystemExit(main())
