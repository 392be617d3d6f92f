"""Predictable steps for buffers of several layouts, and the rows that a buffer must hold after a fault."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

import relive as rl
from relive.replay.ring import MAX_ROWS_PER_STEP
from tests.faults.traffic import observation


@dataclass(frozen=True)
class Layout:
    """A kind of buffer and its traffic. Step t of environment e has the action t·envs + e."""

    envs: int
    rows: int
    """Rows per environment."""
    width: int = 64
    block: int = 1
    """Steps per call; more than one uses `extend`."""
    subsets: bool = False
    """Whether sometimes only a part of the environments steps."""
    options: dict[str, Any] = field(default_factory=dict)
    frames: int = 1

    @property
    def next_step(self) -> bool:
        return self.options.get("autoreset") == "NEXT_STEP"

    def make(self, memory: rl.Memory | str, **more: Any) -> rl.ReplayBuffer:
        obs: Any = rl.Field(self.width, torch.uint8)
        if self.frames > 1:
            obs = rl.Stacked(obs, self.frames, axis=0)
        return rl.ReplayBuffer(
            self.rows * self.envs,
            obs,
            rl.Field((), torch.int64),
            num_envs=self.envs,
            extra={"wide": rl.Field(9, torch.float64)},
            device=memory,
            **self.options,
            **more,
        )


LAYOUTS = {
    "large rows": Layout(1, 12, width=1 << 20),
    "several environments": Layout(3, 40, width=1 << 14, options={"sampler": rl.Prioritized()}),
    "some environments": Layout(4, 40, width=1 << 13, subsets=True, options={"sampler": rl.Prioritized()}),
    "next step": Layout(
        3, 40, width=1 << 13, subsets=True, options={"autoreset": "NEXT_STEP", "sampler": rl.WithoutReplacement()}
    ),
    "stacked": Layout(2, 40, width=1 << 14, frames=3, options={"sampler": rl.Prioritized()}),
    "stored": Layout(3, 40, width=1 << 13, options={"next_obs": "stored"}),
    "blocks": Layout(2, 48, width=1 << 14, block=20),
}


class Story:
    """Expected events of each environment: episodes end at known steps, and every process begins new ones."""

    def __init__(self, layout: Layout, begins: list[int]) -> None:
        self.layout, self.begins = layout, begins
        """First step of each process."""

    def ends(self, t: int, e: int) -> bool:
        return (7 * t + 3 * e) % 11 == 10 and not self.is_reset(t, e)

    def is_reset(self, t: int, e: int) -> bool:
        """Whether step t is a dummy step (NEXT_STEP), after an end in the same process."""
        return self.layout.next_step and t not in self.begins and (7 * (t - 1) + 3 * e) % 11 == 10

    def start(self, t: int, e: int) -> int:
        """Return the first step of the episode of step t."""
        while t not in self.begins and t > 0 and not self.ends(t - 1, e) and not self.is_reset(t - 1, e):
            t -= 1
        return t

    def frame(self, t: int, e: int, *, final: bool = False) -> np.ndarray:
        """Return the observation before step t, or the final observation of the episode that step t ended."""
        return observation(2 * (t * self.layout.envs + e) + final, self.layout.width)

    def _stack(self, frames: list[np.ndarray]) -> np.ndarray:
        k = self.layout.frames
        return np.stack(([frames[0]] * k + frames)[-k:]) if k > 1 else frames[-1]

    def obs(self, t: int, e: int) -> np.ndarray:
        if self.is_reset(t, e):
            return self._stack([self.frame(t - 1, e, final=True)])
        first = max(self.start(t, e), t - self.layout.frames + 1)
        return self._stack([self.frame(s, e) for s in range(first, t + 1)])

    def next_obs(self, t: int, e: int) -> np.ndarray:
        if self.is_reset(t, e):
            return self._stack([self.frame(t + 1, e)])
        first = max(self.start(t, e), t - self.layout.frames + 2)
        last = self.frame(t, e, final=True) if self.ends(t, e) else self.frame(t + 1, e)
        return self._stack([*(self.frame(s, e) for s in range(first, t + 1)), last])

    def steps(self, ts: list[int], envs: list[int]) -> dict[str, np.ndarray]:
        """Return a block [T, K] of steps that starts at step ts[k] of the k-th environment."""
        at = [[(t + i, e) for t, e in zip(ts, envs, strict=True)] for i in range(self.layout.block)]

        def each(fn: Callable[[int, int], Any], dtype: Any) -> np.ndarray:
            return np.array([[fn(t, e) for t, e in row] for row in at], dtype)

        action = each(lambda t, e: t * self.layout.envs + e, np.int64)
        return {
            "obs": each(self.obs, np.uint8),
            "action": action,
            "reward": action.astype(np.float32),
            "terminated": each(lambda t, e: self.ends(t, e) and t % 2 == 0, bool),
            "truncated": each(lambda t, e: self.ends(t, e) and t % 2 == 1, bool),
            "wide": np.repeat(action[..., None] * 0.5, 9, -1),
            "next_obs": each(self.next_obs, np.uint8),
        }


def write(replay: rl.ReplayBuffer, story: Story, clock: np.ndarray, turn: int, begun: np.ndarray | None = None) -> None:
    """Add a step or block of all or some environments, advance `clock` [envs], and use the sampler."""
    layout = story.layout
    envs = list(range(layout.envs))
    if layout.subsets and turn % 3 == 2:
        envs = [e for e in envs if (turn + e) % 2]
    batch = story.steps([int(clock[e]) for e in envs], envs)
    ids = None if len(envs) == layout.envs else envs
    if begun is not None:
        begun[envs] = clock[envs] + layout.block
    if layout.block == 1:
        replay.add(**{name: value[0] for name, value in batch.items()}, env_ids=ids)
    else:
        replay.extend(batch, env_ids=ids)
    clock[envs] += layout.block
    if turn % 4 == 3 and len(replay) > 8:
        drawn = replay.sample(4)
        if isinstance(replay.sampler, rl.Prioritized):
            replay.update_priority(drawn["index"], drawn["reward"].abs() % 10)


Life = tuple[int, np.ndarray, np.ndarray]
"""First step of a process, next step of each environment [envs], and last begun step of each environment [envs]."""


def verify(replay: rl.ReplayBuffer, story: Story, lives: list[Life], oldest: np.ndarray | None = None) -> None:
    """Every row is exact and known, none is missing in between, and the newest ones are there.

    What is older than the steps `oldest` [envs] may be lost; by default only what a step may have overwritten.
    """
    layout = story.layout
    replay.check()
    ids = replay.ids()
    stored = replay[ids] if len(ids) else None
    found: dict[int, list[int]] = {e: [] for e in range(layout.envs)}
    for i in range(len(ids)):
        assert stored is not None
        action = int(stored["action"][i])
        t, e = divmod(action, layout.envs)
        assert int(ids[i]) % layout.envs == e
        assert any(first <= t < begun[e] for first, _, begun in lives), f"step {t} of {e} was never written"
        assert not story.is_reset(t, e)
        found[e].append(t)
        for name, expected in {name: value[0, 0] for name, value in _single(story, t, e).items()}.items():
            got = stored[name][i].numpy()
            assert np.array_equal(got, expected), f"{name} of step {t}, environment {e}"
    for e, steps in found.items():
        done = [t for first, due, _ in lives for t in range(first, int(due[e])) if not story.is_reset(t, e)]
        held = set(steps)
        missing = [t for t in done if t not in held and (not steps or t > steps[0])]
        assert not missing, f"environment {e}: without the steps {missing}, of {steps}"
        # Ends of episodes and cuts by a fault take one row each. A step that was undone may have overwritten the oldest
        # rows.
        if oldest is not None:
            continue
        full = min(len(done), int(0.75 * layout.rows) - 2 * MAX_ROWS_PER_STEP - layout.frames - 2 * layout.block)
        assert len(steps) >= full, f"environment {e}: {len(steps)} rows of {full}"


def _single(story: Story, t: int, e: int) -> dict[str, np.ndarray]:
    one = Story(Layout(**{**vars(story.layout), "block": 1}), story.begins)
    return one.steps([t], [e])


def write_until_killed(name: str, root: Path, counts: Path, begins: list[int]) -> None:
    """Reopen the memory and add until killed; `counts` [2, envs] holds the steps begun and done."""
    layout = LAYOUTS[name]
    replay = layout.make(rl.Memory.disk(root))
    replay.cut()
    told = np.memmap(counts, np.int64, "r+", shape=(3, layout.envs))
    clock = told[1]
    told[:2] = begins[-1]
    story = Story(layout, begins)
    for turn in range(1 << 30):
        write(replay, story, clock, turn, told[0])
        told[2, 0] = turn + 1


RECOVERY = ("ring.py", "replay/recovery.py", "prioritized.py")
"""Files of the code that recovers a buffer."""
CREATION = (*RECOVERY, "storage/disk.py")
"""Files of the code that creates disk memory."""


def open_until(name: str, root: Path, line: int, boot: str | None, files: tuple[str, ...]) -> None:
    """Open the memory and die at the `line`-th executed line of these files."""
    if boot is not None:
        from relive.storage import disk  # noqa: PLC0415

        disk.read_boot_id = lambda: boot
    left = iter(range(line))

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.endswith(files):
            return None
        if event == "line" and next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    LAYOUTS[name].make(rl.Memory.disk(root))
