"""Many threads on one small replay buffer with observations in which mixing is recognised."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

import relive as rl
from tests.totals import tell

WRITERS, SAMPLERS, ROWS = 4, 4, 64
PATIENCE = 120.0
"""Seconds after which the traffic ends without its minima."""
HEADER = 16
"""Bytes before an observation's payload: the tag, and a checksum of tag and payload."""


def observation(tag: int, width: int) -> np.ndarray:
    """Return `width` bytes: a tag, a checksum, and a payload that depends on the tag."""
    payload = (np.arange(width - HEADER, dtype=np.int64) * (2 * tag + 1)).astype(np.uint8)
    checksum = zlib.crc32(payload.data, zlib.crc32(tag.to_bytes(8, "little")))
    return np.concatenate([np.array([tag, checksum], np.int64).view(np.uint8), payload])


def read_tag(row: np.ndarray) -> int | None:
    """Return the tag of an observation; None if its checksum differs."""
    tag, checksum = row[:HEADER].view(np.int64).tolist()
    return tag if checksum == zlib.crc32(row[HEADER:].data, zlib.crc32(row[:8].data)) else None


class Traffic:
    """Threads that write (one environment each), sample, update priorities and save.

    Step t of environment e has the tag t·WRITERS + e, which is also its action and, without episode ends, its row id.
    """

    def __init__(self, width: int, sampler: Any, folder: Path | None = None) -> None:
        self.width = width
        self.folder = folder
        """Folder of the saves, each of which is loaded and verified; None for no saves."""
        self.replay = rl.ReplayBuffer(
            ROWS,
            obs=rl.Field(width, torch.uint8),
            action=rl.Field((), torch.int64),
            num_envs=WRITERS,
            sampler=sampler,
            seed=0,
        )
        self.begun = [0] * WRITERS
        """Number of steps of each environment passed to the buffer, the current call included."""
        self.drawn = self.torn = self.unknown = self.updated = self.saves = 0
        self.errors: list[BaseException] = []
        self._counting = threading.Lock()
        self._stop = threading.Event()

    @property
    def num_written(self) -> int:
        return sum(self.begun)

    def run(self, rows: int, seconds: float, *, min_drawn: int = 0, min_saves: int = 0) -> None:
        """Run until enough rows are written or the time is over, but at least until the minima are reached."""
        works = [lambda env=env: self._write(env) for env in range(WRITERS)] + [self._sample] * SAMPLERS
        works += [self._save] if self.folder is not None else []
        threads = [threading.Thread(target=self._until_stopped, args=(work,), daemon=True) for work in works]
        start = time.monotonic()
        for thread in threads:
            thread.start()
        while not self.errors and (spent := time.monotonic() - start) < max(seconds, PATIENCE):
            has_minima = self.drawn >= min_drawn and self.saves >= min_saves
            if has_minima and (self.num_written >= rows or spent >= seconds):
                break
            time.sleep(0.01)
        self._stop.set()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads), "a thread never ended"
        tell(
            f"D1: {self.num_written} rows of {self.width} bytes written, {self.drawn} observations read, "
            f"{self.updated} priorities updated, {self.saves} saves loaded in {time.monotonic() - start:.1f} s: "
            f"{self.torn} torn, {self.unknown} unknown"
        )

    def _until_stopped(self, work: Callable[[], None]) -> None:
        try:
            while not self._stop.is_set():
                work()
        except BaseException as error:
            self.errors.append(error)

    def _write(self, env: int) -> None:
        first = self.begun[env]
        steps = 1 + first % 12
        self.begun[env] += steps
        tags = [(first + t) * WRITERS + env for t in range(steps + 1)]
        obs = np.stack([observation(tag, self.width) for tag in tags])[:, None]
        flags = np.zeros((steps, 1), bool)
        block = {
            "obs": obs[:-1],
            "action": np.array(tags[:-1])[:, None],
            "reward": np.zeros((steps, 1), np.float32),
            "terminated": flags,
            "truncated": flags,
            "next_obs": obs[1:].copy(),
        }
        if steps == 1:
            self.replay.add(**{name: value[0] for name, value in block.items()}, env_ids=[env])
        else:
            self.replay.extend(block, env_ids=[env])

    def _sample(self) -> None:
        if not len(self.replay):
            return
        for view in (rl.Transition(), rl.NStep(3, 0.9), rl.Sequence(3)):
            batch = self.replay.sample(8, view)
            self.count(batch)
            if "weight" in batch.keys():
                self.replay.update_priority(batch["index"], torch.rand(8))
                self.updated += 8

    def _save(self) -> None:
        assert self.folder is not None
        number = self.replay.save(self.folder)
        loaded = rl.load(self.folder, rl.ReplayBuffer, number=number)
        loaded.check()
        self.count(loaded[loaded.ids()])
        self.saves += 1

    def count(self, batch: TensorDict) -> None:
        """Count the observations of a batch, and those that are torn or were never written."""
        begun = list(self.begun)  # read after sampling: every sampled row has begun
        real = batch["mask"] if "mask" in batch.keys() else torch.ones_like(batch["action"], dtype=torch.bool)
        obs, following = (batch[name][real].numpy() for name in ("obs", "next_obs"))
        action = batch["action"][real].tolist()
        first = batch["action"].reshape(len(batch), -1)[:, 0]
        torn = unknown = int((first != batch["index"]).sum())
        for row, after, tag in zip(obs, following, action, strict=True):
            tags = read_tag(row), read_tag(after)
            torn += None in tags or tags[0] != tag
            unknown += any(one is not None and one // WRITERS > begun[one % WRITERS] for one in tags)
        with self._counting:
            self.drawn += 2 * len(obs)
            self.torn += torn
            self.unknown += unknown
