"""Mutable fields of a service are written in the shard of each row, by calls and directly in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import relive as rl
from relive.distributed import ReplayService
from tests.distributed.local import DIES_AFTER, DIES_BEFORE, HEALTHY, LocalCalls, local_service, make_plan, make_steps

ENVS = 5


def filled(**changes: Any) -> tuple[ReplayService, LocalCalls]:
    extra = {"latent": rl.Mutable(rl.Carry(2, torch.bfloat16)), "target": rl.Mutable(())}
    service, calls = local_service(make_plan(ENVS * 20, ENVS, 2, extra=extra, **changes))
    steps = make_steps(range(ENVS), 0, 12, length=5)
    service.extend(steps | {"latent": steps["obs"], "target": steps["reward"]})
    service.flush()
    return service, calls


@pytest.fixture(params=["calls", "in place"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether clients read shards in place or by calls."""
    if request.param == "in place" and not hasattr(rl.kernels.native_core(), "ProcessLock"):
        pytest.skip("needs Linux and a compiler")
    monkeypatch.setattr(LocalCalls, "near", request.param == "in place")


@pytest.mark.usefixtures("where")
class TestWriting:
    def test_the_rows_of_every_shard_are_written(self) -> None:
        service, _ = filled()
        ids = service.sample(400)["index"].unique()
        assert len(ids) == ENVS * 12
        new = torch.stack([ids % 64, ids % 7], 1)
        assert service.write(ids, latent=new, target=-ids.float()) == 0
        batch = service.sample(100)
        assert torch.equal(batch["target"], -batch["index"].float())
        assert torch.equal(batch["latent"].float(), torch.stack([batch["index"] % 64, batch["index"] % 7], 1).float())

    def test_the_steps_of_sequences_are_written(self) -> None:
        service, _ = filled(sampler=rl.Prioritized())
        batch = service.sample(30, rl.Sequence(4, step_index=True))
        steps = batch["step_index"]
        assert torch.equal(steps >= 0, batch["mask"])
        assert torch.equal(steps[:, 0], batch["index"])
        assert service.write(steps, target=steps.float() * 2) == 0
        assert service.update_priority(steps, torch.ones(steps.shape)) == 0
        again = service.sample(60)
        written = torch.isin(again["index"], steps)
        assert torch.equal(again["target"][written], again["index"][written].float() * 2)

    def test_overwritten_rows_are_counted_and_unknown_ones_refused(self) -> None:
        service, _ = filled()
        ids = service.sample(400)["index"].unique()
        steps = make_steps(range(ENVS), 12, 15, length=5)
        service.extend(steps | {"latent": steps["obs"], "target": steps["reward"]})
        service.flush()
        left = service.sample(2000)["index"].unique()
        stale = int((~torch.isin(ids, left)).sum())
        assert stale
        assert service.write(ids, target=torch.zeros(len(ids))) == stale
        for wrong in (10**6, -1):
            with pytest.raises(IndexError, match="the id of a stored transition"):
                service.write(torch.tensor([wrong]), target=torch.zeros(1))

    def test_fields_that_cannot_be_written_are_refused(self) -> None:
        service, _ = filled()
        for fields, text in (
            ({"reward": torch.zeros(1)}, "reward: expected a Mutable field"),
            ({"target": torch.zeros(2)}, "target: expected shape"),
            ({}, "write: expected at least one Mutable field"),
        ):
            with pytest.raises(rl.SchemaError, match=text):
                service.write(torch.tensor([0]), **fields)


@pytest.mark.parametrize("fate", [DIES_BEFORE, DIES_AFTER])
def test_a_shard_that_dies_meanwhile_has_the_new_values_in_its_next_life(fate: str, tmp_path: Path) -> None:
    service, calls = filled(checkpoint=str(tmp_path))
    service.save()
    ids = service.sample(400)["index"].unique()
    left = [fate]
    calls.fate = lambda method: left.pop() if method == "write" and left else HEALTHY
    assert service.write(ids, target=-ids.float()) == 0
    assert not left
    batch = service.sample(100)
    assert torch.equal(batch["target"], -batch["index"].float())


def test_a_restarted_shard_has_the_values_of_its_checkpoint(tmp_path: Path) -> None:
    service, calls = filled(checkpoint=str(tmp_path))
    ids = service.sample(400)["index"].unique()
    service.write(ids, target=torch.full((len(ids),), 1.0))
    service.save()
    service.write(ids, target=torch.full((len(ids),), 2.0))
    calls.die(0)
    assert set(service.sample(200)["target"].tolist()) == {1.0, 2.0}
