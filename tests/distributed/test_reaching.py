"""A client reads the memory of shards directly or by calls, and never exceeds its timeout."""

import pytest

pytest.importorskip("ray", reason="needs Ray: pip install '.[ray]'")

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import relive as rl
from relive.distributed import ReplayService, ShardUnavailable
from relive.storage.allocator import supports_persistent_memory
from tests.distributed.local import LocalCalls, local_service, make_client, make_plan, make_steps


class Clocked(LocalCalls):
    """Calls with a simulated clock; every answer takes a second."""

    now = 0.0
    timeout = 1e9

    def new_deadline(self) -> float:
        return self.now + self.timeout

    def fetch_answer(self, shard: int, ref: Any, deadline: float) -> Any:
        self.now += 1
        if self.now > deadline:
            raise self.timeout_error(shard)
        return super().fetch_answer(shard, ref, deadline)


def update(service: ReplayService) -> int:
    return service.update_priority(torch.tensor([0, 1]), torch.tensor([2.0, 3.0]))


@pytest.mark.parametrize(
    "call", [lambda service: service.sample(64), update, len, ReplayService.save, ReplayService.clear]
)
def test_the_timeout_is_that_of_a_whole_call(call: Callable[[ReplayService], Any], tmp_path: Path) -> None:
    def seconds(timeout: float) -> float:
        plan = make_plan(40, 2, 2, sampler=rl.Prioritized(), checkpoint=f"{tmp_path}/{timeout}")
        calls = Clocked(plan)
        service = make_client(calls, plan)
        service.extend(make_steps(range(2), 0, 5))
        service.sample(1)
        calls.timeout, started = timeout, calls.now
        call(service)
        return calls.now - started

    needed = seconds(1e9)
    assert seconds(needed) == needed > 1
    with pytest.raises(ShardUnavailable, match="an answer within"):
        seconds(needed - 0.5)


@pytest.mark.skipif(not supports_persistent_memory(), reason="needs Linux and the native core")
def test_a_shard_that_could_not_be_read_in_place_once_is_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalCalls, "near", True)
    service, calls = local_service(make_plan(40, 2))
    service.extend(make_steps(range(2), 0, 5))

    def refused(*_: object, **__: object) -> None:
        raise ConnectionError("it ended just then")

    with monkeypatch.context() as away:
        away.setattr("relive.distributed.client.connect", refused)
        service.sample(8)
    for _ in range(20):
        service.sample(8)
    assert service.stats()["in_place"] == 0
    assert (calls.calls.count("memory_location"), calls.calls.count("draw")) == (1, 21)
    # The client tries again after some seconds, which are skipped here.
    monkeypatch.setattr("relive.distributed.client._REOPEN_SECONDS", 0.0)
    for _ in range(20):
        service.sample(8)
    assert service.stats()["in_place"] == 1
    assert (calls.calls.count("memory_location"), calls.calls.count("draw")) == (2, 21)
