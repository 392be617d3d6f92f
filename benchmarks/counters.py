"""Time the cost of statistics, norms, Python lists and SAME_STEP relative to a plain step of the same run.

Run it as `python -m benchmarks.counters [--quick] [--only counted,lists,same_step] [--json PATH]`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import relive as rl
from relive_conformance.adapters import Adapter

from .report import Result
from .suite import Session
from .timing import Contestant

STEPS, OBS, ENDS = 500, 17, 20


@dataclass(frozen=True)
class Case:
    """One kind of step of one buffer. `name` is its key in `bars.BARS`."""

    operation: str
    buffer: type[rl.ReplayBuffer] | type[rl.RolloutBuffer]
    num_envs: int | None

    @property
    def name(self) -> str:
        """Key of the case."""
        kind = "replay" if self.buffer is rl.ReplayBuffer else "rollout"
        what = {"counted": "add, stats and norm", "lists": "add, lists", "same_step": "add_step, SAME_STEP"}
        return f"{kind} {what[self.operation]} N={self.num_envs or 1}"


CASES = [
    Case(operation, buffer, num_envs)
    for operation, sizes in {"counted": (None, 16), "lists": (None, 16), "same_step": (16,)}.items()
    for buffer in (rl.ReplayBuffer, rl.RolloutBuffer)
    for num_envs in sizes
]


def make_buffer(case: Case, **options: Any) -> Any:
    """Return a buffer that holds `STEPS` steps."""
    if case.buffer is rl.ReplayBuffer:
        capacity = STEPS * (case.num_envs or 1)
        return rl.ReplayBuffer(capacity, obs=OBS, action=6, num_envs=case.num_envs, seed=0, **options)
    return rl.RolloutBuffer(STEPS, case.num_envs, obs=OBS, action=6, seed=0, **options)


def make_steps(case: Case, *, ends: bool) -> list[tuple[Any, ...]]:
    """Return steps (obs, action, reward, terminated, truncated, next_obs); an episode ends now and then."""
    rng, leading_shape = np.random.default_rng(0), () if case.num_envs is None else (case.num_envs,)
    frames = [rng.normal(size=(*leading_shape, OBS)).astype(np.float32) for _ in range(STEPS + 1)]
    steps = []
    for t in range(STEPS):
        truncated = np.zeros(leading_shape, bool)
        if ends and t % ENDS == ENDS - 1:
            truncated[0] = True
        action, reward = (
            rng.normal(size=(*leading_shape, 6)).astype(np.float32),
            rng.normal(size=leading_shape).astype(np.float32),
        )
        steps.append((frames[t], action, reward, np.zeros(leading_shape, bool), truncated, frames[t + 1]))
    return steps


def make_add_loop(case: Case, steps: list[tuple[Any, ...]], **options: Any) -> Callable[[], None]:
    """Return a function that adds all steps to an empty rollout or to a replay buffer."""
    buffer = make_buffer(case, **options)
    is_replay = case.buffer is rl.ReplayBuffer

    def run() -> None:
        if not is_replay:
            buffer.clear()
        for *step, next_obs in steps:
            if is_replay:
                buffer.add(*step, next_obs=next_obs)
            else:
                buffer.add(*step)

    return run


def make_step_loop(case: Case, autoreset: str) -> Callable[[], None]:
    """Return a function that adds all steps with `add_step`, as Gymnasium returns them under an autoreset mode."""
    buffer = make_buffer(case, autoreset=autoreset)
    steps = []
    for obs, action, reward, terminated, truncated, next_obs in make_steps(case, ends=True):
        info: dict[str, Any] = {}
        if truncated.any() and autoreset == "SAME_STEP":
            finals = np.empty(len(truncated), object)
            finals[0] = next_obs[0] + 1
            info = {"final_obs": finals, "_final_obs": truncated}
        steps.append((obs, action, (next_obs, reward, terminated, truncated, info)))

    def run() -> None:
        if case.buffer is rl.RolloutBuffer:
            buffer.clear()
        for step in steps:
            buffer.add_step(*step)

    return run


def enter_case(case: Case, _: Sequence[Adapter]) -> tuple[Result, list[Contestant]]:
    """Compare a kind of step with the plain one."""
    steps = make_steps(case, ends=False)
    if case.operation == "same_step":
        ours, plain = make_step_loop(case, "SAME_STEP"), make_step_loop(case, "NEXT_STEP")
    elif case.operation == "lists":
        ours = make_add_loop(case, [tuple(value.tolist() for value in step) for step in steps])
        plain = make_add_loop(case, steps)
    else:
        counted = {"stats": rl.EpisodeStats(case.num_envs), "norm": {"obs": rl.RunningNorm(OBS)}}
        ours, plain = make_add_loop(case, steps, **counted), make_add_loop(case, steps)
    peer = "relive, NEXT_STEP" if case.operation == "same_step" else "relive, plain"
    contestants = [Contestant("relive", "ours", ours, units=STEPS), Contestant(peer, "peer", plain, units=STEPS)]
    return Result(case.name, []), contestants


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite."""
    operations = dict.fromkeys(case.operation for case in CASES)
    return Session.start("counters", __doc__ or "", operations, arguments).time_all(CASES, enter_case)


if __name__ == "__main__":
    raise SystemExit(main())
