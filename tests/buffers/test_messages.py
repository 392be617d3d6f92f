"""Errors of typical first mistakes, each with a remedy."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import relive as rl
from relive.storage.files import FileOperations

AGENTS: dict[str, Any] = {"fox": (), "hare": ()}


def rollout() -> rl.RolloutBuffer:
    made, never = rl.RolloutBuffer(2, 2, 1, ()), np.zeros(2, bool)
    for t in range(2):
        made.add(np.full((2, 1), t), np.zeros(2), np.zeros(2), never, never, value=np.zeros(2))
    return made


def replay(**options: Any) -> rl.ReplayBuffer:
    made = rl.ReplayBuffer(8, 1, (), seed=0, **options)
    fields = {"h": [0.0]} if "extra" in options else {}
    for t in range(4):
        made.add([t], 0.0, 0.0, False, False, [t + 1], **fields)
    return made


@pytest.mark.parametrize("name", ["advantage", "return"])
def test_reading_targets_before_compute_advantage_names_the_remedy(name: str) -> None:
    made = rollout()
    with pytest.raises(KeyError, match=rf"{name}: expected .* Call compute_advantage\(last_value\) first"):
        made[name]
    with pytest.raises(rl.SchemaError, match=rf"{name}: expected .* Call compute_advantage\(last_value\) first"):
        made.minibatches(2, fields=["obs", name])
    made.compute_advantage(np.zeros(2))
    assert made[name].shape == (2, 2)


def test_reading_a_missing_field_names_the_remedy() -> None:
    made = rollout()
    with pytest.raises(KeyError, match=r"log_prob: expected .* Pass log_prob= to every add, or attach"):
        made["log_prob"]
    with pytest.raises(rl.SchemaError, match=r"log_prob: expected .* Pass log_prob= to every add, or attach"):
        made.minibatches(2, fields=["log_prob"])


@pytest.mark.skipif(sys.platform != "linux", reason="disk memory")
def test_a_full_disk_is_refused_at_construction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileOperations, "free_bytes", lambda self: 1000)
    expected = "capacity: expected at most 1,000 bytes, the free space of the disk of .*disk, got"
    with pytest.raises(MemoryError, match=expected):
        rl.ReplayBuffer(1000, 4, 1, device=rl.Memory.disk(tmp_path / "disk"))


def test_the_message_of_a_full_memory_names_its_own_description() -> None:
    memory = rl.Memory(torch.device("cpu"), free_bytes=lambda: 1000, free_of="the memory of the board")
    with pytest.raises(MemoryError, match="capacity: expected at most 1,000 bytes, the memory of the board, got"):
        rl.ReplayBuffer(1000, 4, 1, device=memory)


@pytest.mark.parametrize("flag", ["terminated", "truncated"])
def test_flags_per_agent_are_refused(backend: str, flag: str) -> None:
    obs, each = {"fox": [0.0], "hare": [0.0]}, {"fox": 0.0, "hare": 0.0}
    flags: dict[str, Any] = {"terminated": False, "truncated": False, flag: {"fox": True, "hare": False}}
    buffers: list[Any] = [
        rl.RolloutBuffer(2, None, {"fox": 1, "hare": 1}, AGENTS, reward=AGENTS, value=AGENTS),
        rl.ReplayBuffer(4, {"fox": 1, "hare": 1}, AGENTS, reward=AGENTS),
    ]
    for buffer, more in zip(buffers, ({}, {"next_obs": {"fox": [1.0], "hare": [1.0]}}), strict=True):
        with pytest.raises(
            rl.SchemaError, match=f"{flag}: expected one value, got a dict of fox, hare. {flag} is the env"
        ):
            buffer.add(obs, each, each, **flags, **more)


@pytest.mark.filterwarnings("default")
def test_our_buffers_in_stable_baselines3_name_the_adapter() -> None:
    sb3 = pytest.importorskip("stable_baselines3", reason="Stable-Baselines3 is not installed")
    for algorithm, argument, kind in (
        (sb3.DQN, "replay_buffer_class", rl.ReplayBuffer),
        (sb3.PPO, "rollout_buffer_class", rl.RolloutBuffer),
    ):
        named = f"Pass {argument}=relive.compat.stable_baselines3.{kind.__name__}"
        with pytest.raises(TypeError, match=re.escape(named)):
            algorithm("MlpPolicy", "CartPole-v1", **{argument: kind})


@pytest.mark.parametrize("folder", ["state", "segments"])
def test_a_missing_checkpoint_file_is_named(tmp_path: Path, folder: str) -> None:
    replay().save(tmp_path)
    (file,) = (tmp_path / folder).iterdir()
    file.unlink()
    with pytest.raises(
        rl.CorruptCheckpoint, match=f"{folder}/{file.name}: expected a file, got none of this name.*left out"
    ):
        rl.load(tmp_path)


def test_padding_of_a_flattened_step_index_is_refused(backend: str) -> None:
    made = replay(sampler=rl.Prioritized(), extra={"h": rl.Mutable(rl.Field(1))})
    batch = made.sample(2, rl.Sequence(6, step_index=True))
    ids = batch["step_index"].flatten()
    for call in (
        lambda: made.update_priority(ids, torch.ones(12)),
        lambda: made.write(ids, h=torch.ones(12, 1)),
        lambda: made[ids],
    ):
        with pytest.raises(IndexError, match=r"got -1\. -1 pads batch\['step_index'\]: pass it in its shape \[B, L\]"):
            call()
    made.update_priority(batch["step_index"], torch.ones(2, 6))


def test_a_summary_before_the_first_end_names_the_missing_episode() -> None:
    stats = rl.EpisodeStats(None)
    with pytest.raises(KeyError, match="summary: return_mean: expected at least 1 finished episode, got 0"):
        stats.summary()["return_mean"]
    assert stats.summary() == {"episodes": 0.0}
    assert stats.summary().get("return_mean") is None
    stats.update(1.0, True, False)
    assert stats.summary()["return_mean"] == 1.0
    with pytest.raises(KeyError, match="summary: expected one of episodes, return_mean, .*got 'speed_mean'"):
        stats.summary()["speed_mean"]
