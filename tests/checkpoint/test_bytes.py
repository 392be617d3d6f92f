"""Every file of a save equals, byte for byte, the file that format 1 has always had for the same buffer.

`golden/bytes.json` has a checksum of every file of the folders below. All numbers are exact in any order of addition,
so that every processor writes the same. `python -m tests.checkpoint.test_bytes` wrote it.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import relive as rl
from relive import kernels
from relive.checkpoint.saving import save
from relive.storage import disk

RECORDED = Path(__file__).parent / "golden" / "bytes.json"
N = 2


def make_replay(sampler: Any, **options: Any) -> rl.ReplayBuffer:
    """Return a buffer after seven steps of two environments with ends, a cut, a draw, priorities and staged fields."""
    obs = {"x": 2, "frames": rl.Stacked(rl.Field(1, torch.uint8), 2)} if options.pop("stacked", False) else {"x": 2}
    stats = rl.EpisodeStats(N, window=3, metrics=("tag",), reasons=("fall",))
    norm: Any = {("obs", "x"): rl.RunningNorm(2, clip=5.0)}
    extra = {"tag": rl.Field((), torch.int32), "hidden": {"a": rl.Carry(2)}}
    buffer = rl.ReplayBuffer(
        16, obs, 1, num_envs=N, extra=extra, sampler=sampler, stats=stats, norm=norm, seed=7, **options
    )
    for t in range(7):
        step(buffer, t)
        if t == 4:
            buffer.cut([0])
    batch = buffer.sample(3)
    if isinstance(sampler, rl.Prioritized):
        buffer.update_priority(batch["index"], torch.tensor([1.0, 2.0, 4.0]))
    buffer.stage(action=np.ones((N, 1), np.float32))
    return buffer


def step(buffer: rl.ReplayBuffer, t: int) -> None:
    x = np.stack([np.full(2, 10.0 * e + t) for e in range(N)]).astype(np.float32)
    obs: dict[str, Any] = {"x": x}
    if buffer._schema.max_stack_frames > 1:
        obs["frames"] = np.full((N, 1, 2), 5, np.uint8)
    nexts = {name: leaf.copy() for name, leaf in obs.items()} | {"x": x + 1}
    ends, tag = np.array([t == 3, t == 5]), np.full(N, t, np.int32)
    hidden = {"a": np.full((N, 2), t, np.float32)}
    action = {} if "action" in buffer._input.staged else {"action": np.full((N, 1), t, np.float32)}
    buffer.add(obs, reward=np.full(N, 0.5), terminated=ends, truncated=~ends & False, next_obs=nexts, tag=tag,
             hidden=hidden, **action)  # fmt: skip


def make_rollout() -> rl.RolloutBuffer:
    """Return a rollout after five of six steps, with final observations, an attached field, hidden states, last values
    and a staged field."""
    extra = {"hidden": rl.Carry(2), "tag": rl.Field((), torch.uint16)}
    buffer = rl.RolloutBuffer(
        6, N, {"x": 2, "y": rl.Field(1, torch.bfloat16)}, 1, extra=extra, stats=rl.EpisodeStats(N), seed=3,
        autoreset="SAME_STEP", norm={"value": rl.RunningNorm()},
    )  # fmt: skip
    obs: Any = None
    for t in range(5):
        obs = {"x": np.full((N, 2), t, np.float32), "y": torch.full((N, 1), t, dtype=torch.bfloat16)}
        buffer.add(
            obs, np.full((N, 1), t, np.float32), np.full(N, 0.5), np.array([t == 1, False]), np.array([False, t == 2]),
            value=np.full(N, t, np.float32), final_obs=obs, tag=np.full(N, t, np.uint16),
            hidden=np.full((N, 2), t, np.float32),
        )  # fmt: skip
    buffer.compute_advantage(np.zeros(N), final_value=np.ones(1), last_obs=obs, gamma=1.0, lam=1.0)
    buffer.attach(more=torch.arange(5 * N, dtype=torch.int16).view(5, N))
    next(iter(buffer.minibatches(4)))
    buffer.stage(tag=np.full(N, 9, np.uint16))
    return buffer


def make_distillation() -> rl.DistillationBuffer:
    """Return a buffer for six rows after nine rows in three rounds."""
    buffer = rl.DistillationBuffer(6, {"x": 2}, seed=5)
    for n in range(3):
        rows = np.arange(6, dtype=np.float32).reshape(3, 2) + n
        buffer.add({"x": rows}, rows[:, :1], logits=rows)
        buffer.next_round()
    buffer.sample(2)
    return buffer


SAVED: dict[str, Callable[[], Any]] = {
    "uniform": lambda: make_replay(rl.Uniform()),
    "prioritized": lambda: make_replay(rl.Prioritized(alpha=1.0, beta=0.5, eps=0.0, normalize="global")),
    "epochs": lambda: make_replay(rl.WithoutReplacement(drop_last=True)),
    "counted": lambda: make_replay(rl.Counted(rl.Uniform())),
    "a schedule": lambda: make_replay(rl.Prioritized(alpha=1.0, beta=lambda draws: 0.5, eps=0.0)),
    "next step": lambda: make_replay(rl.Uniform(), autoreset="NEXT_STEP"),
    "stored": lambda: make_replay(rl.Uniform(), next_obs="stored"),
    "stacked": lambda: make_replay(rl.Uniform(), stacked=True),
    "one environment": lambda: rl.ReplayBuffer(3, 1, (), seed=0),
    "rollout": make_rollout,
    "an empty rollout": lambda: rl.RolloutBuffer(2, None, 1, (), seed=0),
    "distillation": make_distillation,
    "an empty distillation": lambda: rl.DistillationBuffer(6, 2, seed=5),
}


def save_and_checksum(kind: str, root: Path) -> dict[str, str]:
    """Save a buffer twice (then with a note), write disk memory of a replay, and return a checksum per file."""
    buffer = SAVED[kind]()
    buffer.save(root / "saved")
    if isinstance(buffer, rl.ReplayBuffer) and buffer.num_envs:
        step(buffer, 7)
    save(buffer, root / "saved", note=({"said": [1, "two"]}, {"numbers": torch.arange(3)}))
    if kind in ("uniform", "prioritized", "epochs", "counted"):
        make_replay(buffer.sampler, device=rl.Memory.disk(root / "disk")).close()
    files = sorted(path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def replace_random_ids(patch: Callable[[Any, str, Any], None]) -> None:
    """Replace random ids by constants."""
    patch(secrets, "token_hex", lambda count: "5e" * count)
    patch(disk, "read_boot_id", lambda: "the machine that wrote the checksums")


@pytest.mark.skipif(
    kernels.native_core() is None or sys.platform != "linux", reason="draws of the native core, disk memory"
)
@pytest.mark.parametrize("kind", SAVED)
def test_a_save_writes_the_bytes_of_format_1(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_random_ids(monkeypatch.setattr)
    assert save_and_checksum(kind, tmp_path) == json.loads(RECORDED.read_text())[kind]


if __name__ == "__main__":
    replace_random_ids(setattr)
    checksums = {}
    for name in SAVED:
        with tempfile.TemporaryDirectory() as folder:
            checksums[name] = save_and_checksum(name, Path(folder))
    RECORDED.write_text(json.dumps(checksums, indent=1) + "\n")
