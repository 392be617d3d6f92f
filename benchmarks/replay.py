"""Time the off-policy operations of relive and its peers: add, uniform, prioritized, n-step and sequence samples.

Run it as `python -m benchmarks.replay [--quick] [--only add,uniform] [--json PATH]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import ParamSpec, TypeVar

import numpy as np

from relive_conformance.adapters import Adapter, NotOffered, PrioritizedReplay, Replay, ReplayShape

from .experience import Experience, make_experience
from .report import Result
from .suite import Session, contestant, enter, get_role, refuse
from .timing import Contestant, make_memcpy
from .verify_replay import (
    check_add,
    check_n_step,
    check_priorities,
    check_sequences,
    check_transitions,
    fill,
)

P = ParamSpec("P")
T = TypeVar("T")
N_STEPS, GAMMA = 3, 0.99
SEQUENCE = 80


@dataclass(frozen=True)
class Case:
    """One operation at one size. `name` is its key in `bars.BARS`."""

    operation: str
    name: str
    shape: ReplayShape
    batch_size: int = 0
    num_steps: int = 0
    """Number of different steps of an add case, which are added repeatedly."""


ROBOT = ReplayShape(capacity=10**6, num_envs=1, obs=(17,), action_dim=6)
ATARI = ReplayShape(capacity=20_000, num_envs=1, obs=(84, 84, 4), action_dim=1, dtype=np.uint8)

CASES = (
    Case("add", "replay add N=1", ROBOT._replace(capacity=100_000), num_steps=1000),
    Case("add", "replay add N=16", ROBOT._replace(capacity=102_400, num_envs=16), num_steps=400),
    Case("add", "replay add image", ATARI._replace(capacity=4_000), num_steps=400),
    Case("uniform", "uniform 256 of 1e6", ROBOT, 256),
    Case("uniform", "uniform 4096 of 5e5", ReplayShape(500_000, 1, (48,), 12), 4096),
    Case("uniform", "uniform 32 images", ATARI, 32),
    Case("prioritized", "prioritized 32 of 2^20", ROBOT._replace(capacity=2**20), 32),
    Case("prioritized", "prioritized 256 of 2^20", ROBOT._replace(capacity=2**20), 256),
    Case("prioritized", "prioritized 4096 of 2^20", ROBOT._replace(capacity=2**20), 4096),
    Case("n_step", "n-step 256", ROBOT, 256),
    Case("sequences", "sequences 32x80", ROBOT, 32),
)


def enter_add(peer: Adapter, case: Case, data: Experience) -> Contestant:
    """Time adds into a full buffer, per step."""
    make = _offered(peer.replay)
    small = case.shape._replace(capacity=max(256, 64 * case.shape.num_envs))
    refuse(check_add(make(small), replace(data, shape=small)))
    replay = make(case.shape)
    prepared = [replay.prepare(step) for step in data.steps()]
    for _ in range(-(-case.shape.capacity // len(data))):
        _add_again(replay, prepared, data)

    def run() -> None:
        for step in prepared:
            replay.add(step)

    return contestant(peer, run, units=len(prepared))


def _add_again(replay: Replay, prepared: list[object], data: Experience) -> None:
    if data.shape.num_envs == 1:
        fill(replay, data)
        return
    for step in prepared:
        replay.add(step)


def enter_uniform(peer: Adapter, case: Case, data: Experience) -> Contestant:
    """Time a batch of transitions as new tensors."""
    replay = _offered(peer.replay)(case.shape)
    fill(replay, data)
    refuse(check_transitions(replay, data, case.batch_size))
    return contestant(peer, lambda: replay.sample(case.batch_size))


def enter_prioritized(peer: Adapter, case: Case, data: Experience) -> Contestant:
    """Time a batch of transitions with weights and the update of its priorities."""
    make = _offered(peer.prioritized)
    small = case.shape._replace(capacity=1024)
    refuse(check_priorities(make(small), make_experience(small, small.capacity - 8, seed=0)))
    replay = make(case.shape)
    fill(replay, data)
    refuse(check_transitions(replay, data, case.batch_size))
    return contestant(peer, sample_and_update(replay, case.batch_size))


def sample_and_update(replay: PrioritizedReplay, batch_size: int) -> Callable[[], object]:
    """Return a function that samples a batch and updates its priorities; most rows have different priorities before."""
    rng = np.random.default_rng(0)

    def priorities(size: int) -> object:
        return replay.priority(rng.uniform(0.5, 2.0, size).astype(np.float32))

    for _ in range(min(256, 1 + replay.stored // 4096)):
        replay.update(replay.sample(min(4096, replay.stored)), priorities(min(4096, replay.stored)))
    upcoming = cycle([priorities(batch_size) for _ in range(16)])

    def run() -> None:
        replay.update(replay.sample(batch_size), next(upcoming))

    return run


def enter_n_step(peer: Adapter, case: Case, data: Experience) -> Contestant:
    """Time a batch of 3-step transitions."""
    replay = _offered(peer.n_step)(case.shape, N_STEPS, GAMMA)
    fill(replay, data)
    refuse(check_n_step(replay, data, N_STEPS, GAMMA, strictly=get_role(peer) == "ours"))
    return contestant(peer, lambda: replay.sample(case.batch_size))


def enter_sequences(peer: Adapter, case: Case, data: Experience) -> Contestant:
    """Time a batch of sequences of 80 steps."""
    replay = _offered(peer.sequence)(case.shape, SEQUENCE)
    fill(replay, data)
    refuse(check_sequences(replay, data, case.batch_size, SEQUENCE, within_episodes=get_role(peer) == "ours"))
    return contestant(peer, lambda: replay.sample(case.batch_size))


def _offered(make: Callable[P, T] | None) -> Callable[P, T]:
    if make is None:
        raise NotOffered
    return make


ENTER = {
    "add": enter_add,
    "uniform": enter_uniform,
    "prioritized": enter_prioritized,
    "n_step": enter_n_step,
    "sequences": enter_sequences,
}


def _entrants(case: Case, peers: Sequence[Adapter]) -> Iterator[Adapter]:
    for peer in peers:
        yield peer
        if case.operation == "add":
            for kind, make in peer.replay_given.items():
                yield replace(peer, name=f"{peer.name}, given {kind}", replay=make)
        if case.shape.is_image:
            for settings, make in peer.replay_saving.items():
                yield replace(peer, name=f"{peer.name}, {settings}", replay=make)


def enter_case(case: Case, peers: Sequence[Adapter]) -> tuple[Result, list[Contestant]]:
    """Check every peer; those that pass are timed."""
    data = make_experience(case.shape, case.num_steps or case.shape.capacity, seed=0)
    result, contestants = enter(case.name, _entrants(case, peers), lambda peer: ENTER[case.operation](peer, case, data))
    return result, [*contestants, make_limit(case, data)]


def make_limit(case: Case, data: Experience) -> Contestant:
    """Return a copy of the bytes of a stored step (every observation once) or of a batch."""
    shape = case.shape
    obs = int(np.prod(shape.obs)) * np.dtype(shape.dtype).itemsize
    rest = 4 * (shape.action_dim + 1) + 2
    if case.operation == "add":
        return make_memcpy(len(data) * (obs + rest), len(data) // shape.num_envs)
    return make_memcpy(case.batch_size * (2 * obs + rest) * (SEQUENCE if case.operation == "sequences" else 1))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite."""
    session = Session.start("replay", __doc__ or "", ENTER, arguments)
    return session.time_all(CASES, enter_case)


if __name__ == "__main__":
    raise SystemExit(main())
