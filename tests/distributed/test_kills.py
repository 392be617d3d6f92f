"""Shards are killed repeatedly under load: no call hangs, and no row is missing or duplicated."""

import pytest

pytest.importorskip("ray", reason="needs Ray: pip install '.[ray]'")

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import ray
import torch

import relive as rl
from relive.distributed import Checkpoint, ReplayService, ShardUnavailable
from tests.distributed.local import make_steps
from tests.totals import tell

NUM_SHARDS, ROWS, BLOCK, LENGTH = 2, 20_000, 50, 37
CIRCLE = LENGTH * BLOCK * 4_000
"""Number of steps after which numbering restarts, because float32 counts to 2^24; whole episodes and blocks."""
PATIENCE = 0.5
"""The timeout of a client in seconds, shorter than the restart of a shard."""


class Client:
    """Makes calls that may fail for a while; each call must end soon, and only with a documented error."""

    def __init__(self, name: str) -> None:
        self.service = ReplayService.connect(name, timeout=60.0)
        self.service._calls.timeout = PATIENCE
        self.seen: Counter[str] = Counter()
        self.longest = 0.0

    def attempt(self, method: str, *arguments: Any, **more: Any) -> Any:
        """Return the result of a call, or None if a shard is unavailable."""
        started = time.monotonic()
        try:
            result = getattr(self.service, method)(*arguments, **more)
            return True if result is None else result
        except ShardUnavailable as error:
            if not error.retry:
                raise
            self.seen["unavailable"] += 1
            return None
        finally:
            self.longest = max(self.longest, time.monotonic() - started)
            self.seen[method] += 1

    def insist(self, method: str, *arguments: Any, **more: Any) -> Any:
        """Repeat a call until no shard is unavailable; return its result."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            result = self.attempt(method, *arguments, **more)
            if result is not None:
                return result
        raise TimeoutError(f"{method} does not get through")


@ray.remote(num_cpus=0)
class Writes(Client):
    """Writes the steps of one environment, in blocks, for some time."""

    def run(self, env: int, flag: Path) -> dict[str, Any]:
        sent = 0
        while not flag.exists():
            if self.attempt("extend", make_steps([env], sent % CIRCLE, BLOCK, LENGTH), env_ids=[env]):
                sent += BLOCK
        self.insist("flush")
        lost = sum(stream.num_lost for stream in self.service._streams)
        return {"env": env, "sent": sent, "lost": lost, "longest": self.longest, "seen": self.seen}


@ray.remote(num_cpus=0)
class Samples(Client):
    """Samples batches, checks every row, and updates priorities."""

    def run(self, flag: Path) -> dict[str, Any]:
        checked = stale = 0
        while not flag.exists():
            try:
                batch = self.attempt("sample", 64)
            except rl.NotReadyError:
                continue
            if batch is None:
                continue
            env, step = batch["obs"].T
            following = torch.where((step + 1) % LENGTH == 0, -1.0, step + 1)
            assert torch.equal(batch["next_obs"], torch.stack([env, following], 1))
            assert torch.equal(batch["reward"], step)
            assert torch.equal(batch["index"] % 2, env.long())
            checked += len(batch)
            stale += int(self.attempt("update_priority", batch["index"], step + 1) or 0)
        return {"checked": checked, "stale": stale, "longest": self.longest, "seen": self.seen}


def stored(path: Path, shard: int) -> list[int]:
    """Return the steps in a shard's checkpoint, oldest first."""
    buffer = rl.load(path / f"shard-{shard}", rl.ReplayBuffer)
    buffer.check()
    rows = buffer[buffer.ids()]
    assert set(rows["obs"][:, 0].int().tolist()) == {shard}
    return rows["obs"][:, 1].int().tolist()


def stress(path: Path, kills: int, pause: float, seed: int) -> dict[str, Any]:
    """Kill random shards, each `pause` seconds after the last restart; then compare the stored rows."""
    rng, flag = random.Random(seed), path / "stop"
    with ReplayService(
        "stress",
        ROWS * 2,
        2,
        (),
        num_envs=2,
        num_shards=NUM_SHARDS,
        sampler=rl.Prioritized(),
        checkpoint=Checkpoint(path, seconds=0.5),
        # On a busy machine, processes start slowly.
        timeout=200.0,
    ) as service:
        writers: list[Any] = [Writes.remote("stress") for _ in range(2)]
        sampler: Any = Samples.remote("stress")
        shards: list[dict[str, Any]] = []
        runs = [*(each.run.remote(env, flag) for env, each in enumerate(writers)), sampler.run.remote(flag)]
        for _ in range(kills):
            victim = rng.randrange(NUM_SHARDS)
            os.kill(service.stats()["shards"][victim]["pid"], signal.SIGKILL)
            time.sleep(0.2)
            shards = service.stats()["shards"]
            ended, _ = ray.wait(runs, timeout=pause)
            assert not ended, ray.get(ended)
        flag.touch()
        *written, sampled = ray.get(runs, timeout=200)
        assert sum(shard["restarts"] for shard in shards) == kills
    for wrote in written:
        actual = stored(path, wrote["env"])
        assert actual == [step % CIRCLE for step in range(wrote["sent"] - len(actual), wrote["sent"])]
        assert len(actual) >= min(wrote["sent"], ROWS * LENGTH // (LENGTH + 1) - 2)
        assert wrote["lost"] == 0
    return {
        "kills": kills,
        "rows": sum(wrote["sent"] for wrote in written),
        "sampled": sampled["checked"],
        "unavailable": sum(run["seen"]["unavailable"] for run in (*written, sampled)),
        "calls": sum(run["seen"].total() for run in (*written, sampled)),
        "longest": round(max(run["longest"] for run in (*written, sampled)), 2),
    }


def judge(totals: dict[str, Any], kills: int) -> None:
    assert totals["rows"] > 100 * kills
    assert totals["sampled"] > 64 * kills
    # Clients continued after shards were unavailable.
    assert totals["unavailable"] >= kills
    # No call hangs; a busy machine gets 5 s more.
    assert totals["longest"] < PATIENCE + 5


@pytest.mark.promise("F1")
def test_three_kills_under_load(tmp_path: Path, cluster: str) -> None:
    totals = stress(tmp_path, 3, pause=1.0, seed=0)
    tell(f"F1: {totals}")
    judge(totals, 3)


@pytest.mark.long
def test_two_hundred_kills_under_load(tmp_path: Path, cluster: str) -> None:
    totals = stress(tmp_path, kills=int(os.environ.get("RELIVE_KILLS", "200")), pause=3.0, seed=time.time_ns())
    tell(f"F1: {totals}")
    judge(totals, totals["kills"])
