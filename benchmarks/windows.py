"""Time batches of windows, an observation history and a chunk of actions, for relive and LeRobot's own dataset.

Run it as `python -m benchmarks.windows [--quick] [--only state,image] [--python PATH] [--json PATH]`. LeRobot conflicts
with this environment: `--python` names an interpreter that has it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, RandomSampler

import relive as rl

from .interpreters import add_python_option, finish_with_interpreters
from .machine import installed_version
from .report import Line, Result
from .suite import Refused, Session, make_parser
from .timing import Contestant

PEER = "LeRobotDataset"
FPS, HISTORY, CHUNK, BATCH_SIZE = 50, (-1, 0), 16, 32
WINDOW = rl.Window.from_seconds(FPS, obs=[i / FPS for i in HISTORY], action=[i / FPS for i in range(CHUNK)])


@dataclass(frozen=True)
class Case:
    """Demonstrations of a robot: a state, actions, and perhaps the pictures of one camera."""

    operation: str
    episodes: int
    steps: int
    image: int | None = None
    """Pixels per side."""

    @property
    def name(self) -> str:
        picture = f", image {self.image}x{self.image}" if self.image else ""
        return f"windows: {BATCH_SIZE} rows, history of {len(HISTORY)}, {CHUNK} actions{picture}"

    def frames(self) -> list[dict[str, np.ndarray]]:
        """Return the frames of each episode; a picture is noise with the frame number in its first bytes."""
        rng, episodes = np.random.default_rng(0), []
        for episode in range(self.episodes):
            number = episode * self.steps + np.arange(self.steps)
            state = rng.standard_normal((self.steps, 14)).astype(np.float32)
            state[:, 0] = number
            frames = {"state": state, "action": rng.standard_normal((self.steps, 14)).astype(np.float32)}
            if self.image:
                frames["image"] = rng.integers(0, 256, (self.steps, self.image, self.image, 3), np.uint8)
                frames["image"][:, 0, 0, :2] = np.stack([number // 256, number % 256], 1)
            episodes.append(frames)
        return episodes


CASES = [Case("state", episodes=20, steps=200), Case("image", episodes=8, steps=100, image=96)]


def make_buffer(case: Case) -> rl.ReplayBuffer:
    """Return a buffer of all frames; the last frame of an episode is its own next observation."""
    obs: dict[str, Any] = {"state": 14}
    if case.image:
        obs["image"] = rl.Field((case.image, case.image, 3), torch.uint8)
    replay = rl.ReplayBuffer(case.episodes * (case.steps + 1), obs=obs, action=14, seed=0)
    for frames in case.frames():
        next_index = np.minimum(np.arange(case.steps) + 1, case.steps - 1)
        flags = np.zeros((2, case.steps), bool)
        flags[1, -1] = True
        replay.extend(
            {
                "obs": {name: frames[name] for name in obs},
                "action": frames["action"],
                "reward": np.zeros(case.steps, np.float32),
                "terminated": flags[0],
                "truncated": flags[1],
                "next_obs": {name: frames[name][next_index] for name in obs},
            }
        )
    return replay


def write_dataset(case: Case, folder: Path) -> Any:
    """Return a LeRobot dataset of the same frames."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset  # pyright: ignore[reportMissingImports]

    vector = {"dtype": "float32", "shape": (14,), "names": None}
    features: dict[str, Any] = {"observation.state": vector, "action": vector}
    if case.image:
        axes = ["height", "width", "channels"]
        features["observation.image"] = {"dtype": "image", "shape": (case.image, case.image, 3), "names": axes}
    dataset = LeRobotDataset.create("relive/windows", FPS, features, root=folder, use_videos=False)
    for frames in case.frames():
        for t in range(case.steps):
            frame = {f"observation.{name}": frames[name][t] for name in frames if name != "action"}
            dataset.add_frame({**frame, "action": frames["action"][t], "task": "drive"})
        dataset.save_episode()
    dataset.finalize()
    times: dict[str, list[float]] = {name: [i / FPS for i in HISTORY] for name in features if name != "action"}
    times["action"] = [i / FPS for i in range(CHUNK)]
    return LeRobotDataset("relive/windows", root=folder, delta_timestamps=times)


def as_floats(batch: Any) -> Any:
    """Return a batch with pictures as LeRobot returns them: channels first, from 0 to 1."""
    if ("obs", "image") in batch.keys(True):
        batch["obs", "image"] = batch["obs", "image"].movedim(-1, -3).contiguous().float().div_(255)
    return batch


def check(case: Case, replay: rl.ReplayBuffer, dataset: Any) -> None:
    """Raise if a window differs between both libraries, also at both ends of an episode."""
    if len(dataset) != len(replay):
        raise Refused(f"{len(dataset)} frames instead of {len(replay)}")
    rng = np.random.default_rng(1)
    numbers = [0, 1, case.steps - 1, case.steps, case.steps + 1, *rng.integers(0, len(replay), 40).tolist()]
    ours = as_floats(replay.read(replay.ids()[numbers], WINDOW))
    names = {"observation.state": ("obs", "state"), "action": "action"}
    names |= {"observation.image": ("obs", "image")} if case.image else {}
    for row, number in enumerate(numbers):
        theirs = dataset[number]
        for name, path in names.items():
            mask = ours["action_mask" if name == "action" else "obs_mask"][row]
            if not torch.equal(ours[path][row], theirs[name]) or not torch.equal(mask, ~theirs[f"{name}_is_pad"]):
                raise Refused(f"frame {number}: another window of {name}")


def enter(case: Case, folder: Path) -> tuple[Result, list[Contestant]]:
    """Return both contestants of a case after comparing their results."""
    replay, dataset, result = make_buffer(case), write_dataset(case, folder), Result(case.name, [])
    try:
        check(case, replay, dataset)
    except Refused as refusal:
        result.refused[PEER] = str(refusal)
        return result, []
    sampler = RandomSampler(dataset, replacement=True, num_samples=2**31)
    batches = iter(DataLoader(dataset, BATCH_SIZE, sampler=sampler))
    ours: dict[str, Callable[[], object]] = {"relive": lambda: replay.sample(BATCH_SIZE, WINDOW)}
    if case.image:
        ours["relive, pictures as floats"] = lambda: as_floats(replay.sample(BATCH_SIZE, WINDOW))
    contestants = [Contestant(name, "ours", run) for name, run in ours.items()]
    return result, [*contestants, Contestant(PEER, "peer", lambda: next(batches))]


def run_here(session: Session) -> list[tuple[Result, list[Line]]]:
    """Time all cases; without LeRobot, report that it is missing."""
    if find_spec("lerobot") is None:
        session.about["missing"][PEER] = "not installed"
        return []
    session.about["peers"][PEER] = installed_version("lerobot")
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": f"{folder}/cache", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
        for case in CASES:
            if case.operation in session.options.only:
                with session.console.status(case.name):
                    outcomes.append(session.time(enter(case, Path(folder) / case.operation)))
    return outcomes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite."""
    parser = make_parser("windows", __doc__ or "", (case.operation for case in CASES))
    add_python_option(parser)
    session = Session.create("windows", parser.parse_args(arguments))
    return finish_with_interpreters(session, run_here(session), lambda _: PEER)


if __name__ == "__main__":
    raise SystemExit(main())
