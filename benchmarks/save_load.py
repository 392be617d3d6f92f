"""Time saving a full replay buffer, saving it again after a few new steps, and loading it, for relive and its peers.

Run it as `python -m benchmarks.save_load [--quick] [--only save,again,load] [--json PATH]`. When our `save` returns,
the checkpoint is on disk (fsync), completely or not at all; peers and torch.save leave the writing to the system. One
row is torch.save followed by fsync: on disk, but not atomic.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from relive_conformance.adapters import Adapter, NotOffered, ReplayShape

from .experience import Experience, make_experience
from .replay import ATARI, ROBOT
from .report import Result
from .suite import Session, contestant, enter, refuse
from .timing import Contestant
from .verify_replay import check_transitions, fill

SHAPES = {"obs(17)": ROBOT._replace(capacity=200_000), "images": ATARI._replace(capacity=2_000)}
NEW_SHARE = 100
"""1 row in 100 is new when a buffer is saved again."""
OPERATIONS = {"save": "save: all", "again": "save: again after 1 % new rows", "load": "load: all"}


@dataclass(frozen=True)
class Case:
    """One operation on one buffer."""

    operation: str
    kind: str
    shape: ReplayShape
    folder: Path

    @property
    def name(self) -> str:
        return f"{OPERATIONS[self.operation]}, {self.shape.capacity:,} of {self.kind}"


def enter_peer(peer: Adapter, case: Case, data: Experience) -> Contestant:
    """Time a full buffer of a library, after a check of one saved and loaded copy."""
    if peer.replay is None:
        raise NotOffered
    replay: Any = peer.replay(case.shape)
    if not hasattr(replay, "save"):
        raise NotOffered
    fill(replay, data)
    path = case.folder / f"{peer.name} {case.operation}"
    replay.save(str(path))
    replay.load(str(path))
    refuse(check_transitions(replay, data, 256))
    return contestant(peer, **_run(case.operation, path, replay.save, replay.load, lambda: _add(replay, data)))


def _run(
    operation: str, path: Path, save: Callable[[str], object], load: Callable[[str], object], add: Callable[[], None]
) -> dict[str, Any]:
    """Return the timed operation `run` on a buffer saved at `path`, and `reset`, which prepares it."""
    if operation == "save":
        return {"run": lambda: save(str(path)), "reset": lambda: _remove(path)}
    if operation == "again":
        return {"run": lambda: save(str(path)), "reset": add}
    return {"run": lambda: load(str(path))}


def _add(replay: Any, data: Experience) -> None:
    rows = data.rows(np.arange(len(data) // NEW_SHARE))
    replay.fill(rows)


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def enter_torch(case: Case, data: Experience, *, syncs: bool) -> Contestant:
    """Time `torch.save` of a dict of tensors, for buffers that cannot save themselves; `syncs` adds an fsync."""
    name = "torch.save and fsync" if syncs else "torch.save of the tensors"
    path = case.folder / f"{name} {case.operation}"
    content = {name: torch.from_numpy(value.copy()) for name, value in vars(data.rows(np.arange(len(data)))).items()}

    def save(path: str) -> None:
        with open(path, "wb") as file:
            torch.save(content, file)
            if syncs:
                file.flush()
                os.fsync(file.fileno())

    save(str(path))
    return Contestant(name, "peer", **_run(case.operation, path, save, torch.load, lambda: None))


def make_limit(case: Case, data: Experience) -> Contestant:
    """Return the limit of the disk: write and sync, or read, the bytes of every observation once."""
    frame = int(np.prod(case.shape.obs)) * np.dtype(case.shape.dtype).itemsize
    nbytes = len(data) * (frame + 4 * (case.shape.action_dim + 1) + 2)
    if case.operation == "again":
        nbytes //= NEW_SHARE
    content = np.ones(nbytes, np.uint8)
    path = case.folder / f"bytes {case.operation}"
    content.tofile(path)
    if case.operation == "load":
        return Contestant("read of the same bytes", "limit", lambda: np.fromfile(path, np.uint8))

    def write() -> None:
        with path.open("wb") as file:
            file.write(content.data)
            os.fsync(file.fileno())

    return Contestant("write and fsync of the same bytes", "limit", write, reset=lambda: _remove(path))


def cases(operations: Sequence[str], root: Path, smaller: int) -> Iterator[Case]:
    """Yield every operation on every buffer, each with a new temporary folder."""
    for kind, shape in SHAPES.items():
        for operation in operations:
            folder = root / f"{kind} {operation}"
            folder.mkdir()
            yield Case(operation, kind, shape._replace(capacity=shape.capacity // smaller), folder)
            shutil.rmtree(folder)


def enter_case(case: Case, peers: Sequence[Adapter]) -> tuple[Result, list[Contestant]]:
    """Check every peer; those that pass are timed."""
    data = make_experience(case.shape, case.shape.capacity, seed=0)
    result, contestants = enter(case.name, peers, lambda peer: enter_peer(peer, case, data))
    own = [enter_torch(case, data, syncs=syncs) for syncs in ((False, True) if case.operation != "load" else (False,))]
    return result, [*contestants, *own, make_limit(case, data)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite."""
    session = Session.start("save_load", __doc__ or "", OPERATIONS, arguments)
    effort = replace(session.effort, rounds=min(session.effort.rounds, 30))
    with TemporaryDirectory() as root:
        chosen = cases(session.options.only, Path(root), 4 if session.options.quick else 1)
        return session.time_all(chosen, enter_case, effort)


if __name__ == "__main__":
    raise SystemExit(main())
