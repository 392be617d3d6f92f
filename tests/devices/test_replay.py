"""Replay buffers on a device equal those of the host, row by row, and never wait for the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import relive as rl
from benchmarks import launches
from relive import kernels
from tests.devices.place import Place, same
from tests.layouts import World, arrays

VIEWS = [rl.Transition(), rl.NStep(3, 0.9), rl.Sequence(4), rl.Sequence(3, 2), rl.Sequence(3, 2, True)]
ENVS = 3


def both(on: Place, length: int, *, next_step: bool = False, **options: Any) -> tuple[rl.ReplayBuffer, rl.ReplayBuffer]:
    """Apply the same random history on the host and on the device."""
    options = {"num_envs": ENVS, "seed": 0, "autoreset": "NEXT_STEP" if next_step else None, **options}
    host = rl.ReplayBuffer(20 * ENVS, 1, (), **options)
    with on.inside():
        there = rl.ReplayBuffer(20 * ENVS, 1, (), device=on.device, **options)
        world = World(np.random.default_rng(0), ENVS, next_step=next_step)
        for t in range(length):
            chosen = list(range(ENVS)) if t % 3 else [t % ENVS]
            step = arrays([world.step(env) for env in chosen])
            env_ids = None if len(chosen) == ENVS else chosen
            host.add(**step, env_ids=env_ids)
            there.add(**on.there({name: torch.from_numpy(value) for name, value in step.items()}), env_ids=env_ids)
            if t % 17 == 16:
                host.cut([1])
                there.cut([1])
                world.resetting[1] = False
    return host, there


@pytest.mark.parametrize("next_step", [False, True])
@pytest.mark.parametrize("view", VIEWS, ids=str)
def test_batches_equal_those_of_the_host(device_with_values: Place, view: Any, next_step: bool) -> None:
    host, there = both(device_with_values, 90, next_step=next_step)
    with device_with_values.inside():
        ids = there.ids().cpu()
        assert ids.tolist() == host.ids().tolist()
        same(there.read(device_with_values.there(ids), view), host.read(ids, view))
        there.check()


def test_draws_are_uniform_and_of_stored_rows(device_with_values: Place) -> None:
    _, there = both(device_with_values, 90)
    with device_with_values.inside():
        ids = there.ids().cpu()
        drawn_ids = torch.cat([there.sample(512)["index"].cpu() for _ in range(20)])
    assert torch.isin(drawn_ids, ids).all()
    counts = torch.bincount(torch.searchsorted(ids, drawn_ids), minlength=len(ids)).double()
    mean = len(drawn_ids) / len(ids)
    excess = float(((counts - mean) ** 2 / mean).sum()) - (len(ids) - 1)
    assert abs(excess) < 5 * (2 * len(ids)) ** 0.5


def test_priorities_equal_those_of_the_host(device_with_values: Place) -> None:
    host, there = both(device_with_values, 60, sampler=rl.Prioritized())
    ids = host.ids()
    index = torch.cat([ids, ids[:5], torch.tensor([0, 1])])  # some ids twice, two of overwritten rows
    priority = torch.linspace(0.1, 3.0, len(index))
    gone = host.update_priority(index, priority)
    with device_with_values.inside():
        assert int(there.update_priority(*device_with_values.there((index, priority)))) == gone == 2
        masses = [replay.state_dict()["arrays"]["sampler.mass"] for replay in (host, there)]
        torch.testing.assert_close(*(torch.as_tensor(mass).cpu() for mass in masses), rtol=1e-12, atol=0)
        batch = there.sample(256)
        assert torch.isin(batch["index"].cpu(), ids).all()
        there.check()
    assert float(batch["weight"].max()) == pytest.approx(1.0)


@pytest.mark.parametrize("sampler", [rl.Uniform(), rl.Prioritized()], ids=str)
def test_a_checkpoint_moves_to_the_host_and_back(device_with_values: Place, sampler: Any, tmp_path: Path) -> None:
    host, there = both(device_with_values, 60, sampler=sampler)
    ids = host.ids()
    with device_with_values.inside():
        there.save(tmp_path / "there")
    host.save(tmp_path / "host")
    elsewhere = device_with_values.device.type != "cpu"
    arrived: Any = rl.load(tmp_path / "there", device="cpu" if elsewhere else None)
    same(arrived[ids], host[ids])
    with device_with_values.inside():
        back: Any = rl.load(tmp_path / "host", device=device_with_values.device if elsewhere else None)
        same(back[device_with_values.there(ids)], host[ids])
        back.sample(4)
        back.check()


def test_every_call_runs_and_nothing_waits(on: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    if on.device.type == "meta":
        monkeypatch.setattr("relive.rng.Randomness.generator", lambda *_: None)
    monkeypatch.setattr(launches, "NUM_ENVS", 8)
    monkeypatch.setattr(launches.launch_peers, "NUM_ENVS", 8)
    monkeypatch.setattr(launches, "BATCH", 16)
    with on.inside():
        for prepare in launches.ours(str(on.device)).values():
            call = prepare()
            if on.device.type == "cuda":
                torch.cuda.set_sync_debug_mode("error")
            try:
                (counted_call,) = launches.counted({"call": lambda call=call: call}).values()
            finally:
                if on.device.type == "cuda":
                    torch.cuda.set_sync_debug_mode("default")
            assert not counted_call.waits


def test_a_training_step_is_captured_in_a_cuda_graph(on: Place) -> None:
    if on.device.type != "cuda" or kernels.choose_backend([torch.zeros(1, device=on.device)]) != "triton":
        pytest.skip("only Triton's kernels on a CUDA device are captured")
    _, there = both(on, 60, sampler=rl.Prioritized())
    out = there.sample(64)
    stream = torch.cuda.Stream()
    # torch requires a few calls before a capture.
    with torch.cuda.stream(stream):
        for _ in range(3):
            there.sample(64, out=out)
            there.update_priority(out["index"], out["reward"].abs() + 1)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        there.sample(64, out=out)
        there.update_priority(out["index"], out["reward"].abs() + 1)
    batches = []
    for _ in range(3):
        graph.replay()
        batches.append(out["index"].tolist())
    assert batches[0] != batches[1] != batches[2]
    there.check()
