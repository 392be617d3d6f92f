"""Updates per second of a learner that samples its own batches, and of one that uses `rl.prefetch`.

Run it as `python -m benchmarks.prefetch [--quick] [--only obs(17)] [--json PATH]`. A learner is a DQN update: Q of a
network, the target of another, Huber loss, Adam. The sampling thread needs a
core: with one core, or if torch uses all of them, prefetching gains nothing or costs time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import relive as rl

from .report import Result
from .suite import Session
from .timing import Contestant

ACTIONS, GAMMA = 4, 0.99
UPDATES = 20
"""Updates per sample, enough for the thread to start."""


@dataclass(frozen=True)
class Task:
    """Shape of a learner's data."""

    obs: tuple[int, ...]
    dtype: torch.dtype
    capacity: int
    batch_size: int


TASKS = {
    "obs(17)": Task((17,), torch.float32, 500_000, 256),
    "images": Task((4, 84, 84), torch.uint8, 10_000, 32),
}


def network(task: Task) -> nn.Module:
    """Two hidden layers of 256, or three convolutions before one of 512."""
    if len(task.obs) == 1:
        return nn.Sequential(
            nn.Linear(task.obs[0], 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, ACTIONS)
        )
    layers = [nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, ACTIONS))


class Learner:
    """A DQN without an environment."""

    def __init__(self, task: Task) -> None:
        torch.manual_seed(0)
        self._q, self._target = network(task), network(task)
        self._adam = torch.optim.Adam(self._q.parameters(), lr=1e-4)

    def update(self, batch: Any) -> None:
        """Make one step of gradient descent."""
        obs, next_obs = (batch[name].float() for name in ("obs", "next_obs"))
        with torch.no_grad():
            continues = (~batch["terminated"]).float()
            target = batch["reward"] + GAMMA * continues * self._target(next_obs).amax(1)
        chosen = self._q(obs).gather(1, batch["action"][:, None]).squeeze(1)
        self._adam.zero_grad()
        nn.functional.smooth_l1_loss(chosen, target).backward()
        self._adam.step()


def make_buffer(task: Task) -> rl.ReplayBuffer:
    """Return a full buffer of noise."""
    replay = rl.ReplayBuffer(task.capacity, rl.Field(task.obs, task.dtype), rl.Field((), torch.int64), seed=0)
    random, block = torch.Generator().manual_seed(0), 1000
    frames = torch.randint(0, 255, (block + 1, *task.obs), generator=random).to(task.dtype)
    flags = torch.zeros(block, dtype=torch.bool)
    for _ in range(task.capacity // block):
        replay.extend(
            {
                "obs": frames[:-1],
                "action": torch.randint(0, ACTIONS, (block,), generator=random),
                "reward": torch.ones(block),
                "terminated": flags,
                "truncated": flags.clone(),
                "next_obs": frames[1:].clone(),
            }
        )
    return replay


def contestants(task: Task, replay: rl.ReplayBuffer, batches: Iterator[Any]) -> list[Contestant]:
    """Three learners: one samples itself, one uses a thread, one needs no sampling."""
    same = replay.sample(task.batch_size)
    takes = {"sampling itself": lambda: replay.sample(task.batch_size), "prefetching": lambda: next(batches)}

    def run(take: Callable[[], Any]) -> Callable[[], None]:
        learner = Learner(task)

        def updates() -> None:
            for _ in range(UPDATES):
                learner.update(take())

        return updates

    itself, ahead = (run(take) for take in takes.values())
    return [
        Contestant("relive, prefetching", "ours", ahead, units=UPDATES),
        Contestant("relive, sampling itself", "peer", itself, units=UPDATES),
        Contestant("the same batch again and again", "limit", run(lambda: same), units=UPDATES),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Both tasks with all threads and with one: prefetching needs a core that the learner does not use."""
    session = Session.start("prefetch", __doc__ or "", TASKS, arguments)
    outcomes, threads = [], torch.get_num_threads()
    for name in session.options.only:
        replay = make_buffer(TASKS[name])
        for count in sorted({1, threads}):
            torch.set_num_threads(count)
            case = f"prefetch: an update of a DQN, {name}, {count} torch thread{'s' * (count > 1)}"
            with session.console.status(case), closing(rl.prefetch(replay, TASKS[name].batch_size)) as batches:
                outcomes.append(session.time((Result(case, []), contestants(TASKS[name], replay, batches))))
    torch.set_num_threads(threads)
    return session.finish(outcomes)


if __name__ == "__main__":
    raise SystemExit(main())
