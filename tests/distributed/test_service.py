"""The service in a cluster: its processes are found by name, restart after a kill, and end on close."""

import pytest

pytest.importorskip("ray", reason="needs Ray: pip install '.[ray]'")

import os
import pickle
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

import relive as rl
from relive.distributed import IncompatibleService, ReplayService, ShardUnavailable
from relive.errors import IncompatibleCheckpoint, SchemaError
from relive.storage.allocator import supports_persistent_memory
from tests.distributed.local import make_steps

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.thorough]


def kill(service: ReplayService, shard: int = 0) -> None:
    os.kill(service.stats()["shards"][shard]["pid"], signal.SIGKILL)


@ray.remote(num_cpus=0)
class Actor:
    """Another process of the cluster, as a user would write it."""

    def __init__(self, service: ReplayService) -> None:
        self.service = service

    def act(self, env: int, steps: int) -> dict[str, Any]:
        with self.service.writer([env], block=8) as writer:
            for step in range(steps):
                block = {name: value[0] for name, value in make_steps([env], step, 1, length=10).items()}
                writer.add(**block)
        return {**self.service.stats(), "client pid": os.getpid()}


def test_actors_write_and_a_learner_samples_what_they_wrote() -> None:
    with ReplayService("written", 400, 2, (), num_envs=4, num_shards=2, sampler=rl.Prioritized(), seed=3) as service:
        actors: list[Any] = [Actor.remote(service) for _ in range(2)]
        contents = ray.get([actors[env % 2].act.remote(env, 30) for env in range(4)], timeout=60)
        pids = {
            os.getpid(),
            *(shard["pid"] for shard in contents[0]["shards"]),
            *(each["client pid"] for each in contents),
        }
        assert len(pids) == 5
        assert len(service) == 120
        learner = ReplayService.connect("written")
        batch = learner.sample(64, rl.NStep(3, 1.0))
        env, step = batch["obs"].int().T
        steps = 3 - (step % 10 - 7).clamp(min=0)
        assert torch.equal(batch["index"], (step + step // 10) * 4 + env)
        expected = [(step + i) * (i < steps) for i in range(3)]
        assert torch.equal(batch["reward"], torch.stack(expected).sum(0).float())
        assert torch.equal(batch["terminated"], step % 10 >= 7)
        assert all(leaf.is_contiguous() for leaf in batch.values())
        batch["obs"].zero_()
        assert learner.update_priority(batch["index"], np.arange(64)) == 0
        assert learner.sample(5, device="cpu")["weight"].max() == 1


def test_a_killed_shard_comes_back_with_everything_and_its_clients_wait_for_it(tmp_path: Path) -> None:
    with ReplayService("killed", 400, 2, (), num_envs=2, num_shards=2, checkpoint=tmp_path) as service:
        service.extend(make_steps([0, 1], 0, 50))
        service.save()
        service.extend(make_steps([0, 1], 50, 50))
        service.flush()
        impatient = ReplayService.connect("killed", timeout=0.2)
        kill(service)
        with pytest.raises(ShardUnavailable, match="shard 0 of 'killed'.*within 0.2 s") as caught:
            impatient.sample(10)
        assert caught.value.retry
        service.extend(make_steps([0, 1], 100, 50))
        service.flush()
        assert len(service) == 300
        stats = service.stats()
        assert (stats["lost"], [shard["restarts"] for shard in stats["shards"]]) == (0, [1, 0])
        assert sorted(set(service.sample(4000)["reward"].int().tolist())) == list(range(150))
        assert service.stats()["in_place"] == (2 if supports_persistent_memory() else 0)
        before = service.sample(8)["index"]
        kill(service, 1)
        assert set(service.sample(4000)["index"].tolist()) >= set(before.tolist())
        assert service.stats()["shards"][1]["restarts"] == 1


@pytest.mark.skipif(not supports_persistent_memory(), reason="needs Linux and the native core")
def test_a_shard_of_this_machine_that_holds_its_memory_for_too_long_is_unavailable() -> None:
    with ReplayService("busy", 40, 2, ()) as service:
        service.extend(make_steps([0], 0, 5))
        impatient = ReplayService.connect("busy", timeout=0.2)
        assert len(impatient.sample(3)) == 3
        assert len(service.sample(3)) == 3
        near = service._reader._local[0]
        assert near is not None
        with near.reader.lock:
            with ThreadPoolExecutor(1) as pool, pytest.raises(ShardUnavailable, match="within 0.2 s") as caught:
                pool.submit(impatient.sample, 3).result()
            assert caught.value.retry
        assert len(impatient.sample(3)) == 3


def test_without_a_checkpoint_a_dead_shard_is_gone_and_nobody_waits_for_it() -> None:
    service = ReplayService("mortal", 40, 2, (), timeout=20.0)
    service.extend(make_steps([0], 0, 5))
    kill(service)
    started = time.monotonic()
    with pytest.raises(ShardUnavailable, match="a running process, got a process that has ended") as caught:
        service.sample(1)
    assert not caught.value.retry
    assert time.monotonic() - started < 15
    assert not pickle.loads(pickle.dumps(caught.value)).retry


def test_a_closed_service_is_saved_gone_and_goes_on_under_the_same_name(tmp_path: Path) -> None:
    service = ReplayService("closed", 40, 2, (), checkpoint=tmp_path)
    with pytest.raises(SchemaError, match="a name not in use, got 'closed'"):
        ReplayService("closed", 40, 2, ())
    service.extend(make_steps([0], 0, 5))
    service.close()
    with pytest.raises(ShardUnavailable):
        service.sample(1)
    with pytest.raises(ShardUnavailable, match="a process in this cluster"):
        ReplayService.connect("closed")
    with ReplayService("closed", 40, 2, (), checkpoint=tmp_path) as again:
        assert len(again) == 5
    with pytest.raises(IncompatibleCheckpoint, match="capacity 80 against 40"):
        ReplayService("closed", 80, 2, (), checkpoint=tmp_path)
    with pytest.raises(ShardUnavailable):
        ReplayService.connect("closed")


def test_a_client_that_expects_another_service_is_told_the_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    with ReplayService("known", 40, {"a": 2}, (), num_envs=2, extra={"x": 3}):
        service = ReplayService.connect("known", obs={"a": 2}, num_envs=2, extra={"x": 3}, sampler=rl.Uniform())
        assert service.plan.capacity == 40
        with pytest.raises(IncompatibleService, match="obs .*'b'.* against .*'a'.*; num_envs 3 against 2"):
            ReplayService.connect("known", obs={"b": 2}, num_envs=3)
        with pytest.raises(SchemaError, match="arguments of a service"):
            ReplayService.connect("known", seeds=3)
        monkeypatch.setattr("relive.__version__", "0.0.9")
        with pytest.raises(IncompatibleService, match="relive '0.0.9' against"):
            ReplayService.connect("known")


def test_relive_does_not_need_ray() -> None:
    code = "import sys, relive; assert not [m for m in sys.modules if m.split('.')[0] == 'ray']"
    subprocess.run([sys.executable, "-c", code], check=True)
    code = "import sys; sys.modules['ray'] = None; import relive.distributed"
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert 'Run pip install ".[ray]" in a clone of relive' in ended.stderr
