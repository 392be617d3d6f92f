"""Time the on-policy operations beside the peers: add, advantage, an epoch of minibatches, the whole cycle.

Run it as `python -m benchmarks.on_policy [--quick] [--only add,gae] [--json PATH]`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from benchmarks import machine
from benchmarks.report import Result, judge, print_table, write_json
from benchmarks.rollouts import RolloutData, make_rollout, reference_gae
from benchmarks.timing import FULL, QUICK, Contestant, Effort, Role, race
from benchmarks.verify import check_epoch, check_gae, check_rollout, fill
from recollect.conformance.peers import Discovery, Epoch, Peer, RolloutShape, discover

GAMMA, LAM = 0.99, 0.95
EPOCHS_A_CYCLE = 4
SUBJECT = "Time the on-policy operations beside the peers."
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Case:
    """One operation at one size. `name` is its key in `bars.BARS`."""

    operation: str
    name: str
    shape: RolloutShape
    batch_size: int = 0

    @property
    def any_batch_size(self) -> int:
        """A size to check a rollout with when the case itself reads no minibatches; it divides the rows."""
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


class Refused(Exception):
    """The library's result differs; it is not timed."""


class NotOffered(Exception):
    """The library has no such operation."""


def _contestant(peer: Peer, run: Callable[[], object], **more: Any) -> Contestant:
    role: Role = "ours" if peer.ours else "peer"
    return Contestant(peer.name, role, run, **more)


def _refuse(reason: str | None) -> None:
    if reason:
        raise Refused(reason)


def enter_gae(peer: Peer, case: Case, data: RolloutData) -> Contestant:
    """The stand-alone estimator on inputs in the library's own layout."""
    if peer.gae is None:
        raise NotOffered
    _refuse(check_gae(peer.gae(), data, gamma=GAMMA, lam=LAM))
    return _contestant(peer, peer.gae().prepare(data.trajectory, gamma=GAMMA, lam=LAM))


def enter_add(peer: Peer, case: Case, data: RolloutData) -> Contestant:
    """T adds into an empty buffer, a step."""
    if peer.rollout is None:
        raise NotOffered
    rollout = peer.rollout(case.shape)
    _refuse(check_rollout(rollout, case.any_batch_size, _two(data), gamma=GAMMA, lam=LAM))
    prepared = [rollout.prepare(step) for step in data.steps]

    def run() -> None:
        for step in prepared:
            rollout.add(step)

    return _contestant(peer, run, units=len(prepared), reset=rollout.clear)


def enter_epoch(peer: Peer, case: Case, data: RolloutData) -> Contestant:
    """One shuffled epoch of a full rollout."""
    epoch = _full(peer, case, data)
    _refuse(check_epoch(epoch, case.batch_size, data, gamma=GAMMA, lam=LAM))

    def run() -> None:
        for _ in epoch.minibatches(case.batch_size):
            pass

    return _contestant(peer, run)


def _full(peer: Peer, case: Case, data: RolloutData) -> Epoch:
    if peer.rollout is not None:
        rollout = peer.rollout(case.shape)
        fill(rollout, data, gamma=GAMMA, lam=LAM)
        return rollout
    if peer.epoch is not None:
        return peer.epoch(data.steps, *reference_gae(data.trajectory, gamma=GAMMA, lam=LAM))
    raise NotOffered


def enter_cycle(peer: Peer, case: Case, data: RolloutData) -> Contestant:
    """T adds, advantages, four epochs."""
    if peer.rollout is None:
        raise NotOffered
    rollout = peer.rollout(case.shape)
    _refuse(check_rollout(rollout, case.batch_size, _two(data), gamma=GAMMA, lam=LAM))
    prepared = [rollout.prepare(step) for step in data.steps]
    last_value, last_done = torch.from_numpy(data.trajectory.last_value), data.trajectory.ended[-1]

    def run() -> None:
        for step in prepared:
            rollout.add(step)
        rollout.advantage(last_value, last_done, gamma=GAMMA, lam=LAM)
        for _ in range(EPOCHS_A_CYCLE):
            for _ in rollout.minibatches(case.batch_size):
                pass

    return _contestant(peer, run, reset=rollout.clear)


def _two(data: RolloutData) -> tuple[RolloutData, RolloutData]:
    return make_rollout(data.shape, seed=1), data


def memcpy_of_the_same_bytes(data: RolloutData) -> Contestant:
    """A copy that moves as many bytes as GAE must: half of (what it reads + what it writes), read and written once."""
    trajectory = data.trajectory
    read = sum(getattr(trajectory, name).nbytes for name in trajectory.__dataclass_fields__)
    written = 2 * trajectory.reward.nbytes
    source = np.ones((read + written) // 2, dtype=np.uint8)
    target = np.zeros_like(source)
    return Contestant("memcpy of the same bytes", "limit", lambda: np.copyto(target, source))


ENTER = {"add": enter_add, "gae": enter_gae, "epoch": enter_epoch, "cycle": enter_cycle}


def _entrants(case: Case, peers: Sequence[Peer]) -> Iterator[Peer]:
    for peer in peers:
        yield peer
        if case.operation == "add":
            for kind, rollout in peer.rollout_given.items():
                yield replace(peer, name=f"{peer.name}, given {kind}", rollout=rollout)


def measure(case: Case, peers: Sequence[Peer], effort: Effort, rng: np.random.Generator) -> Result:
    """Check every peer, then race those that passed."""
    data = make_rollout(case.shape, seed=0)
    result = Result(case.name, [])
    contestants: list[Contestant] = []
    for peer in _entrants(case, peers):
        try:
            contestants.append(ENTER[case.operation](peer, case, data))
        except NotOffered:
            result.not_offered.append(peer.name)
        except Refused as refusal:
            result.refused[peer.name] = str(refusal)
        # A peer that breaks must not end the run of the others; the report says what it raised.
        except Exception as error:
            result.refused[peer.name] = f"{type(error).__name__}: {error}"
    if case.name == "gae 24x4096":
        contestants.append(memcpy_of_the_same_bytes(data))
    result.timings.extend(race(contestants, effort, rng))
    return result


def about(found: Discovery, quick: bool) -> dict[str, Any]:
    """What a results file says before the figures."""
    return {
        "suite": "on_policy",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "quick": quick,
        "machine": machine.describe(),
        "peers": {peer.name: peer.version for peer in found.peers},
        "missing": {missing.name: missing.reason for missing in found.missing},
    }


def _file_name(date: str, quick: bool) -> str:
    # Git ignores local-*: a quick run is not for keeping.
    return f"{'local-' if quick else ''}on_policy-{date[:16].replace(':', '')}.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite; the exit code is 0 whether or not the bars are met, which is for the reader to judge."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.on_policy", description=SUBJECT)
    parser.add_argument("--quick", action="store_true", help="a few rounds only: for development, not for claims")
    parser.add_argument("--only", default=",".join(ENTER), help=f"some of {','.join(ENTER)}")
    parser.add_argument("--json", type=Path, help="where to write the results (default: benchmarks/results/<date>)")
    options = parser.parse_args(arguments)
    operations = options.only.split(",")
    if unknown := set(operations) - ENTER.keys():
        parser.error(f"--only: expected some of {','.join(ENTER)}, got {','.join(sorted(unknown))}")

    console = Console()
    found = discover()
    header = about(found, options.quick)
    for missing in found.missing:
        console.print(f"[yellow]missing[/yellow] {missing.name}: {missing.reason}")
    rng = np.random.default_rng(0)
    effort = QUICK if options.quick else FULL
    judged = []
    for case in CASES:
        if case.operation in operations:
            with console.status(case.name):
                result = measure(case, found.peers, effort, rng)
            judged.append((result, judge(result, rng)))
    print_table(judged, console)
    if header["machine"]["busy"]:
        console.print("[yellow]busy[/yellow]: others used this machine when the run began; its ratios prove nothing")
    path = options.json or RESULTS / _file_name(header["date"], options.quick)
    write_json(path, judged, header)
    console.print(f"written to {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
