"""A replay buffer with every kind of field and of episode end, for round trips through datasets."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import relive as rl

DECLARED: dict[str, Any] = {
    "obs": {
        "camera": rl.Field((40, 36), torch.uint8),
        "pose": rl.Field(3, torch.float64),
        "pair": (rl.Field(2), rl.Field((), torch.int64)),
    },
    "action": rl.Field((), torch.int64),
    "reward": rl.Field((), torch.float64),
    "extra": {"info": {"success": rl.Field((), torch.bool), "force": rl.Field((2, 2))}, "note": 3},
}
ENDS = {3: "terminated", 1: "truncated", 5: "", 4: "truncated"}
"""The end of each episode, by the length of the episode; "" is cut."""


def make_rich_replay(seed: int = 0) -> rl.ReplayBuffer:
    """Return a buffer of random episodes with every kind of field; all differ, and one is cut."""
    rng = np.random.default_rng(seed)

    def look() -> dict[str, Any]:
        camera = rng.integers(0, 256, (40, 36), dtype=np.uint8)
        pair = rng.normal(size=2).astype(np.float32), int(rng.integers(9))
        return {"camera": camera, "pose": rng.normal(size=3), "pair": pair}

    replay = rl.ReplayBuffer(100, **DECLARED, seed=0)
    for length, end in ENDS.items():
        obs = look()
        for t in range(length):
            info = {"success": bool(rng.integers(2)), "force": rng.normal(size=(2, 2)).astype(np.float32)}
            ends = [t == length - 1 and end == kind for kind in ("terminated", "truncated")]
            following = look()
            note = rng.normal(size=3).astype(np.float32)
            replay.add(obs, int(rng.integers(4)), rng.normal(), *ends, next_obs=following, info=info, note=note)
            obs = following
        replay.cut()
    return replay


def leaves(steps: Any) -> dict[Any, torch.Tensor]:
    return {key: steps.get(key) for key in steps.keys(True, True) if key != "index"}


def assert_same(replay: rl.ReplayBuffer, other: rl.ReplayBuffer) -> None:
    """Assert that two buffers have the same episodes, bit for bit."""
    for mine, theirs in zip(replay.episodes(), other.episodes(), strict=True):
        expected, actual = leaves(mine), leaves(theirs)
        assert expected.keys() == actual.keys()
        for key, leaf in expected.items():
            assert leaf.dtype == actual[key].dtype
            assert torch.equal(leaf, actual[key]), key
