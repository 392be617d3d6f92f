"""Time the on-policy operations of relive and its peers: add, advantage, an epoch of minibatches, the whole cycle.

Run it as `python -m benchmarks.on_policy [--quick] [--only add,gae] [--json PATH]`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import torch

from relive_conformance.adapters import Adapter, Epoch, NotOffered, RolloutShape

from .report import Result
from .rollouts import RolloutData, make_rollout, reference_gae
from .suite import Session, contestant, enter, refuse
from .timing import Contestant, make_memcpy
from .verify import check_epoch, check_gae, check_rollout, fill

GAMMA, LAM = 0.99, 0.95
EPOCHS_PER_CYCLE = 4


@dataclass(frozen=True)
class Case:
    """One operation at one size. `name` is its key in `bars.BARS`."""

    operation: str
    name: str
    shape: RolloutShape
    batch_size: int = 0

    @property
    def any_batch_size(self) -> int:
        """Batch size of the check, also for cases without minibatches; a divisor of the number of rows."""
        return self.batch_size or self.shape.num_steps * self.shape.num_envs // 4


SMALL = RolloutShape(num_steps=128, num_envs=64, obs_dim=64, action_dim=4)
ROBOTS = RolloutShape(num_steps=24, num_envs=4096, obs_dim=48, action_dim=12)

CASES = (
    Case("add", "add N=16", SMALL._replace(num_envs=16)),
    Case("add", "add N=4096", ROBOTS),
    Case("gae", "gae 2048x8", RolloutShape(2048, 8, 1, 1)),
    Case("gae", "gae 128x64", RolloutShape(128, 64, 1, 1)),
    Case("gae", "gae 24x4096", RolloutShape(24, 4096, 1, 1)),
    Case("epoch", "epoch 128x64 size 64", SMALL, 64),
    Case("epoch", "epoch 128x64 size 4096", SMALL, 4096),
    Case("epoch", "epoch 24x4096 size 4096", ROBOTS, 4096),
    Case("cycle", "cycle 128x64 size 64", SMALL, 64),
    Case("cycle", "cycle 24x4096 size 4096", ROBOTS, 4096),
)


def enter_gae(peer: Adapter, case: Case, data: RolloutData) -> Contestant:
    """Time the stand-alone estimator on inputs in the library's layout."""
    if peer.gae is None:
        raise NotOffered
    refuse(check_gae(peer.gae(), data, gamma=GAMMA, lam=LAM))
    return contestant(peer, peer.gae().prepare(data.trajectory, gamma=GAMMA, lam=LAM))


def enter_add(peer: Adapter, case: Case, data: RolloutData) -> Contestant:
    """Time T adds into an empty buffer, per step."""
    if peer.rollout is None:
        raise NotOffered
    rollout = peer.rollout(case.shape)
    refuse(check_rollout(rollout, case.any_batch_size, _two(data), gamma=GAMMA, lam=LAM))
    prepared = [rollout.prepare(step) for step in data.steps]

    def run() -> None:
        for step in prepared:
            rollout.add(step)

    return contestant(peer, run, units=len(prepared), reset=rollout.clear)


def enter_epoch(peer: Adapter, case: Case, data: RolloutData) -> Contestant:
    """Time one shuffled epoch of a full rollout."""
    epoch = _full(peer, case, data)
    refuse(check_epoch(epoch, case.batch_size, data, gamma=GAMMA, lam=LAM))

    def run() -> None:
        for _ in epoch.minibatches(case.batch_size):
            pass

    return contestant(peer, run)


def _full(peer: Adapter, case: Case, data: RolloutData) -> Epoch:
    if peer.rollout is not None:
        rollout = peer.rollout(case.shape)
        fill(rollout, data, gamma=GAMMA, lam=LAM)
        return rollout
    if peer.epoch is not None:
        return peer.epoch(data.steps, *reference_gae(data.trajectory, gamma=GAMMA, lam=LAM))
    raise NotOffered


def enter_cycle(peer: Adapter, case: Case, data: RolloutData) -> Contestant:
    """Time T adds, advantages and four epochs."""
    if peer.rollout is None:
        raise NotOffered
    rollout = peer.rollout(case.shape)
    refuse(check_rollout(rollout, case.batch_size, _two(data), gamma=GAMMA, lam=LAM))
    prepared = [rollout.prepare(step) for step in data.steps]
    last_value, last_done = torch.from_numpy(data.trajectory.last_value), data.trajectory.ended[-1]

    def run() -> None:
        for step in prepared:
            rollout.add(step)
        rollout.advantage(last_value, last_done, gamma=GAMMA, lam=LAM)
        for _ in range(EPOCHS_PER_CYCLE):
            for _ in rollout.minibatches(case.batch_size):
                pass

    return contestant(peer, run, reset=rollout.clear)


def _two(data: RolloutData) -> tuple[RolloutData, RolloutData]:
    return make_rollout(data.shape, seed=1), data


def make_limit(case: Case, data: RolloutData) -> Contestant:
    """Return a memcpy of the bytes that an operation must move.

    For advantages half of the bytes read and written: a copy does both.
    """
    trajectory = data.trajectory
    read = sum(getattr(trajectory, name).nbytes for name in trajectory.__dataclass_fields__)
    rows = case.shape.num_steps * case.shape.num_envs
    nbytes = {
        "add": sum(getattr(step, field.name).nbytes for step in data.steps for field in fields(step)),
        "gae": (read + 2 * trajectory.reward.nbytes) // 2,
        "epoch": 4 * rows * (case.shape.obs_dim + case.shape.action_dim + 4),
    }
    nbytes["cycle"] = nbytes["add"] + nbytes["gae"] + EPOCHS_PER_CYCLE * nbytes["epoch"]
    return make_memcpy(nbytes[case.operation], len(data.steps) if case.operation == "add" else 1)


ENTER = {"add": enter_add, "gae": enter_gae, "epoch": enter_epoch, "cycle": enter_cycle}


def _entrants(case: Case, peers: Sequence[Adapter]) -> Iterator[Adapter]:
    for peer in peers:
        yield peer
        if case.operation == "add":
            for kind, rollout in peer.rollout_given.items():
                yield replace(peer, name=f"{peer.name}, given {kind}", rollout=rollout)


def enter_case(case: Case, peers: Sequence[Adapter]) -> tuple[Result, list[Contestant]]:
    """Check every peer; those that pass are timed."""
    data = make_rollout(case.shape, seed=0)
    result, contestants = enter(case.name, _entrants(case, peers), lambda peer: ENTER[case.operation](peer, case, data))
    return result, [*contestants, make_limit(case, data)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite."""
    session = Session.start("on_policy", __doc__ or "", ENTER, arguments)
    return session.time_all(CASES, enter_case)


if __name__ == "__main__":
    raise SystemExit(main())
