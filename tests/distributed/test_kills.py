"""Shards are killed again and again under load: nobody hangs, no row is missing or comes twice."""

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
from tests.distributed.local import steps_of
from tests.totals import tell

NUM_SHARDS, ROWS, BLOCK, LENGTH = 2, 20_000, 50, 37
CIRCLE = LENGTH * BLOCK * 4_000
"""Steps are numbered anew after so many whole episodes and blocks: float32 counts to 2^24."""
PATIENCE = 0.5
"""Seconds that a client waits for an answer: less than a shard needs to start again."""


class Client:
    """Calls that may fail for a while, each of which must end soon, and only in the documented way."""

    def __init__(self, name: str) -> None:
        self.service = ReplayService.connect(name, timeout=60.0)
        self.service._calls._timeout = PATIENCE
        self.seen: Counter[str] = Counter()
        self.longest = 0.0

    def attempt(self, verb: str, *arguments: Any, **more: Any) -> Any:
        """The result of a call, or None if a shard is not there just now."""
        started = time.monotonic()
        try:
            result = getattr(self.service, verb)(*arguments, **more)
            return True if result is None else result
        except ShardUnavailable as error:
            if not error.retry:
                raise
            self.seen["unavailable"] += 1
            return None
        finally:
            self.longest = max(self.longest, time.monotonic() - started)
            self.seen[verb] += 1

    def insist(self, verb: str, *arguments: Any, **more: Any) -> Any:
        """The result of a call, however long a shard is away."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            result = self.attempt(verb, *arguments, **more)
            if result is not None:
                return result
        raise TimeoutError(f"{verb} does not get through")


@ray.remote(num_cpus=0)
class Writes(Client):
    """The steps of one environment, in blocks, for some time."""

    def run(self, env: int, flag: Path) -> dict[str, Any]:
        sent = 0
        while not flag.exists():
            if self.attempt("extend", steps_of([env], sent % CIRCLE, BLOCK, LENGTH), env_ids=[env]):
                sent += BLOCK
        self.insist("flush")
        lost = sum(stream.lost for stream in self.service._sender.streams)
        return {"env": env, "sent": sent, "lost": lost, "longest": self.longest, "seen": self.seen}


@ray.remote(num_cpus=0)
class Samples(Client):
    """Batches whose every row is checked, with new priorities for them."""

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
    """The steps that a shard's checkpoint holds of its environment, oldest first."""
    buffer = rl.load(path / f"shard-{shard}", rl.ReplayBuffer)
    buffer.check()
    rows = buffer[buffer.ids()]
    assert set(rows["obs"][:, 0].int().tolist()) == {shard}
    return rows["obs"][:, 1].int().tolist()


def stress(path: Path, kills: int, pause: float, seed: int) -> dict[str, Any]:
    """Kill a random shard `pause` seconds after the last one is back, `kills` times; then see what is stored."""
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
        timeout=200.0,  # a busy machine needs long to start a process
    ) as service:
        writers: list[Any] = [Writes.remote("stress") for _ in range(2)]
        sampler: Any = Samples.remote("stress")
        shards: list[dict[str, Any]] = []
        runs = [*(each.run.remote(env, flag) for env, each in enumerate(writers)), sampler.run.remote(flag)]
        for _ in range(kills):
            victim = rng.randrange(NUM_SHARDS)
            os.kill(service.stats()["shards"][victim]["pid"], signal.SIGKILL)
            time.sleep(0.2)
            shards = service.stats()["shards"]  # waits until it is back
            ended, _ = ray.wait(runs, timeout=pause)
            assert not ended, ray.get(ended)
        flag.touch()
        *written, sampled = ray.get(runs, timeout=200)
        assert sum(shard["restarts"] for shard in shards) == kills
    for wrote in written:
        found = stored(path, wrote["env"])
        assert found == [step % CIRCLE for step in range(wrote["sent"] - len(found), wrote["sent"])]
        assert len(found) >= min(wrote["sent"], ROWS * LENGTH // (LENGTH + 1) - 2)
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
    assert totals["unavailable"] >= kills  # clients have met shards that were away, and have gone on
    assert totals["longest"] < PATIENCE + 5  # nobody hangs; the machine may be busy


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
