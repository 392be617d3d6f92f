"""Every row arrives once and in order: random histories of pushes, saves and kills, compared with a list."""

import pytest

pytest.importorskip("ray", reason="needs Ray: pip install '.[ray]'")

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import relive as rl
from relive.distributed import Checkpoint, ReplayService
from relive.distributed.protocol import Push, PushAck
from relive.distributed.shard import Shard
from relive.errors import IncompatibleCheckpoint, NotReadyError, SchemaError
from relive.storage.files import FileOperations
from tests.distributed.local import (
    DIES_AFTER,
    DIES_BEFORE,
    HEALTHY,
    LocalCalls,
    local_service,
    make_client,
    make_plan,
    make_steps,
)


class Forgetful(Shard):
    """A faulty shard that treats every push as new."""

    def push(self, client: str, pushes: list[Push]) -> PushAck:
        self._positions[client] = pushes[0].position
        return super().push(client, pushes)


class Amnesiac(Shard):
    """A faulty shard that saves rows, but not the positions of clients."""

    def save(self) -> int:
        positions, self._positions = self._positions, {}
        try:
            return super().save()
        finally:
            self._positions = positions


def stored(calls: LocalCalls) -> dict[int, list[int]]:
    """Return the stored steps of each environment, oldest first, from the checkpoints of the shards."""
    actual: dict[int, list[int]] = {}
    for number, shard in enumerate(calls.shards):
        buffer = shard._buffer
        for env in shard._plan.envs_of_shard(number):
            actual[env] = []
        for row in buffer[buffer.ids()]:
            env, step = row["obs"].int().tolist()
            assert row["next_obs"].int().tolist() in ([env, step + 1], [env, -1])
            assert (row["action"], row["reward"]) == (env, step)
            actual[env].append(step)
    return actual


@pytest.fixture(autouse=True)
def no_power_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip syncs to the disk, because only processes die."""
    monkeypatch.setattr(FileOperations, "sync", lambda *_: None)
    monkeypatch.setattr(FileOperations, "sync_folder", lambda *_: None)
    monkeypatch.setattr("relive.distributed.client._RETRY_PAUSE", 0.0)


FATES = st.sampled_from([HEALTHY] * 6 + [DIES_BEFORE, DIES_AFTER])
"""The fates of a shard's process at a call; most calls succeed."""
ACTIONS = st.sampled_from(["push"] * 5 + ["save", "die", "flush"])


def run(folder: Path, data: st.DataObject, shard_type: type[Shard] = Shard) -> None:
    plan = make_plan(400, 4, 2, checkpoint=Checkpoint(folder, seconds=1e9, rows=data.draw(st.sampled_from([None, 7]))))
    service, calls = local_service(plan, shard_type=shard_type, max_pending=data.draw(st.integers(1, 3)))
    calls.fate = lambda method: data.draw(FATES) if method in ("push", "resume", "save") else HEALTHY
    sent = 0
    for action in data.draw(st.lists(ACTIONS, max_size=15)):
        if action == "push":
            count = data.draw(st.integers(1, 3))
            service.extend(make_steps(range(4), sent, count, length=5))
            sent += count
        elif action == "die":
            calls.die(data.draw(st.integers(0, 1)))
        else:
            getattr(service, action)()
    calls.fate = lambda method: HEALTHY
    service.flush()
    assert stored(calls) == {env: list(range(sent)) for env in range(4)}
    for shard in calls.shards:
        shard._buffer.check()


@pytest.mark.thorough
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_every_row_arrives_once_and_in_order_whatever_dies(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    run(tmp_path_factory.mktemp("service"), data)


@pytest.mark.thorough
@pytest.mark.parametrize("broken", [Forgetful, Amnesiac])
def test_a_shard_that_forgets_what_it_was_sent_is_found_out(tmp_path_factory: Any, broken: type[Shard]) -> None:
    @given(data=st.data())
    @settings(max_examples=200, deadline=None, database=None, derandomize=True, phases=[Phase.generate])
    def attempt(data: st.DataObject) -> None:
        run(tmp_path_factory.mktemp("service"), data, broken)

    with pytest.raises(AssertionError):
        attempt()


def test_a_lost_answer_makes_no_duplicate(tmp_path: Path) -> None:
    service, calls = local_service(make_plan(100, 1, checkpoint=str(tmp_path)))
    service.extend(make_steps([0], 0, 5))
    service.save()
    calls.fate = lambda method: DIES_AFTER if method == "push" else HEALTHY
    service.extend(make_steps([0], 5, 5))
    calls.fate = lambda method: HEALTHY
    service.flush()
    assert stored(calls) == {0: list(range(10))}
    # A network may send the same block twice.
    stream = service._streams[0]
    ack = calls.shards[0].push(stream._client, list(stream._unsaved_pushes))
    assert ack.num_stored == 10
    assert stored(calls) == {0: list(range(10))}
    assert service.stats()["shards"][0]["duplicate"] == 5


def test_what_is_kept_no_more_is_reported_as_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relive.distributed.client.MAX_RESEND_BYTES", 1)
    service, calls = local_service(make_plan(100, 1, checkpoint=str(tmp_path)), max_pending=1)
    service.extend(make_steps([0], 0, 5))
    service.save()
    for first in range(5, 25, 5):
        service.extend(make_steps([0], first, 5))
    calls.die(0)
    service.extend(make_steps([0], 25, 5))
    with pytest.warns(UserWarning, match="restarted, and lost 20 rows") as warned:
        service.flush()
    assert [warning.filename for warning in warned] == [__file__], "the warning names the caller's line"
    assert stored(calls) == {0: [*range(5), *range(25, 30)]}
    stats = service.stats()
    assert (stats["lost"], stats["shards"][0]["lost"]) == (20, 20)
    # An n-step return ends before the lost rows.
    batch = calls.shards[0]._buffer.read(np.array([4]), rl.NStep(3, 0.5))
    assert batch["reward"].tolist() == [4.0]


def test_a_client_waits_for_answers_and_keeps_little(tmp_path: Path) -> None:
    service, calls = local_service(make_plan(100, 1, checkpoint=str(tmp_path)), max_pending=5)
    stream, busy = service._streams[0], True
    calls.has_answer = lambda ref: not busy
    sizes = []
    calls.fetch_answer = lambda shard, ref, deadline: sizes.append(stream.num_pending) or ref
    for first in range(20):
        service.extend(make_steps([0], first, 1))
        assert stream.num_pending <= 5
    assert min(sizes) == 5
    assert calls.calls.count("push") < 12
    busy, waits = False, len(sizes)
    service.extend(make_steps([0], 20, 1))
    assert len(sizes) == waits + 1
    service.save()
    assert (len(stream._unsaved_pushes), stream.num_pending) == (0, 0)
    assert stored(calls) == {0: list(range(21))}


def test_a_block_that_is_refused_is_named_and_does_not_come_again(tmp_path: Path) -> None:
    stacked = rl.Stacked(rl.Field(()), 2)
    service, _ = local_service(make_plan(100, 1, obs=stacked, checkpoint=str(tmp_path)), max_pending=1)

    def block(*frames: float) -> dict[str, Any]:
        pairs = np.array([[[a, b]] for a, b in pairwise(frames)], np.float32)
        flags = np.zeros((len(pairs) - 1, 1), np.bool_)
        numbers = np.zeros((len(pairs) - 1, 1), np.float32)
        return {
            "obs": pairs[:-1],
            "next_obs": pairs[1:],
            "action": numbers,
            "reward": numbers,
            "terminated": flags,
            "truncated": flags,
        }

    service.extend(block(1, 1, 2, 3))
    # The frames of this stack do not continue the frames before.
    service.extend(block(7, 8, 9))
    with pytest.raises(SchemaError, match="stack"):
        service.flush()
    service.extend(block(2, 3, 4))
    service.flush()
    assert len(service) == 3


def test_episodes_are_cut_with_the_steps_that_follow(tmp_path: Path) -> None:
    service, calls = local_service(make_plan(100, 2, checkpoint=str(tmp_path)))
    service.extend(make_steps([0, 1], 0, 3))
    service.cut([1])
    service.extend(make_steps([0, 1], 3, 3))
    service.flush()
    batch = calls.shards[0]._buffer.read(np.array([2 * 2, 2 * 2 + 1]), rl.NStep(2, 1.0))
    assert batch["reward"].tolist() == [2.0 + 3.0, 2.0]


def test_a_service_goes_on_from_its_checkpoint_and_not_from_anothers(tmp_path: Path) -> None:
    plan = make_plan(80, 4, 2, checkpoint=str(tmp_path), sampler=rl.Prioritized())
    service, _ = local_service(plan)
    service.extend(make_steps(range(4), 0, 5))
    index = service.sample(6)["index"]
    service.update_priority(index, torch.arange(6.0))
    service.save()
    service.close()
    again, actual = local_service(plan)
    assert len(again) == 20
    assert stored(actual) == {env: list(range(5)) for env in range(4)}
    for changed in (make_plan(160, 4, 2, checkpoint=str(tmp_path), sampler=rl.Prioritized()),
                    make_plan(80, 4, 1, checkpoint=str(tmp_path), sampler=rl.Prioritized())):  # fmt: skip
        other, _ = local_service(changed)
        with pytest.raises(IncompatibleCheckpoint, match="(capacity 160|num_shards 1) against (80|2)"):
            other.sample(1)
    rl.ReplayBuffer(80, 2, (), num_envs=4, device=plan.shard_memory).save(tmp_path / "own" / "shard-0")
    with pytest.raises(IncompatibleCheckpoint, match="a shard of a service"):
        len(local_service(make_plan(80, 4, checkpoint=str(tmp_path / "own")))[0])


def test_a_failing_save_costs_no_push_and_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "service"
    service, _ = local_service(make_plan(100, 1, checkpoint=Checkpoint(folder, rows=5)))
    (folder / "shard-0").rename(tmp_path / "elsewhere")
    (folder / "shard-0").write_text("no folder")
    service.extend(make_steps([0], 0, 5))
    with pytest.warns(
        UserWarning, match=r"^shard 0: cannot write checkpoints, .* save to .*: expected a writable"
    ) as warned:
        service.flush()
    assert [warning.filename for warning in warned] == [__file__], "the warning names the caller's line"
    service.extend(make_steps([0], 5, 5))
    service.flush()
    assert len(service) == 10
    assert "save to" in service.stats()["shards"][0]["trouble"]
    (folder / "shard-0").unlink()
    service.save()
    assert service.stats()["shards"][0]["trouble"] is None


def test_a_warning_from_the_thread_of_batches_names_the_callers_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "service"
    service, calls = local_service(make_plan(100, 1, checkpoint=Checkpoint(folder, rows=5)))
    (folder / "shard-0").rename(tmp_path / "elsewhere")
    (folder / "shard-0").write_text("no folder")
    service.extend(make_steps([0], 0, 5))
    with monkeypatch.context() as patch:
        patch.setattr(calls, "has_answer", lambda ref: False)
        # The block waits in the client until `batches` sends it.
        service.extend(make_steps([0], 5, 5))
    with pytest.warns(UserWarning, match="^shard 0: cannot write checkpoints") as warned:
        next(service.batches(2))
    assert [warning.filename for warning in warned] == [__file__]


def test_only_so_many_clients_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relive.distributed.shard.MAX_CLIENTS", 3)
    plan = make_plan(100, 1, checkpoint=str(tmp_path))
    _, calls = local_service(plan)
    for first in range(5):
        make_client(calls, plan).extend(make_steps([0], first, 1))
    assert calls.shards[0].stats()["clients"] == 3


def test_an_id_of_before_a_restart_is_stale_after_it(tmp_path: Path) -> None:
    plan = make_plan(100, 1, checkpoint=str(tmp_path), sampler=rl.Prioritized())
    service, calls = local_service(plan)
    service.extend(make_steps([0], 0, 5))
    service.save()
    before = service.sample(50)["index"].unique()
    service.extend(make_steps([0], 5, 5))
    service.flush()
    lost = torch.arange(5, 10)
    assert service.update_priority(lost, torch.ones(5)) == 0
    calls.die(0)
    service.flush()
    assert stored(calls) == {0: list(range(10))}
    assert service.update_priority(lost, torch.full((5,), 9.0)) == 5
    assert service.update_priority(before, torch.ones(len(before))) == 0
    ids = service.sample(200)["index"]
    assert set(ids[ids >= 5].tolist()) == {(1 << 32) + i for i in range(5, 10)}
    with pytest.raises(IndexError, match="the id of a stored transition"):
        service.update_priority(torch.tensor([(1 << 32) + 10]), torch.ones(1))


def test_an_empty_service_says_so() -> None:
    for shards in (1, 2):
        service: ReplayService = local_service(make_plan(8, 2, shards))[0]
        with pytest.raises(NotReadyError, match="sample: expected at least 1 stored transition, got 0"):
            service.sample(1)
