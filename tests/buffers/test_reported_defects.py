"""Defects found by a hostile review, each with one test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import relive as rl
from relive import kernels


def filled(steps: int, **settings: Any) -> rl.ReplayBuffer:
    replay = rl.ReplayBuffer(16, 2, 2, seed=0, **settings)
    add(replay, steps)
    return replay


def add(replay: rl.ReplayBuffer, steps: int) -> None:
    for t in range(steps):
        obs, following = np.full(2, t, np.float32), np.full(2, t + 1, np.float32)
        replay.add(obs, np.zeros(2), 0.0, terminated=False, truncated=False, next_obs=following)


def test_obs_and_next_obs_of_a_batch_do_not_share_memory() -> None:
    with kernels.force("torch"):
        batch = filled(8).sample(4)
    weight = torch.ones(2, requires_grad=True)
    loss = (batch["next_obs"] * weight).sum()
    batch["obs"].add_(1.0)
    loss.backward()
    assert batch["obs"].untyped_storage().data_ptr() != batch["next_obs"].untyped_storage().data_ptr()


def test_sequences_of_unsigned_observations_are_read_by_torch_ops() -> None:
    with kernels.force("torch"):
        replay = rl.ReplayBuffer(8, rl.Field(2, torch.uint16), (), seed=0)
        replay.add([1, 2], 0.0, 0.0, terminated=False, truncated=False, next_obs=[3, 4])
        assert replay.sample(1, rl.Sequence(2))["next_obs"].tolist() == [[[3, 4], [0, 0]]]


class Shifting(rl.Sampler):
    """A sampler that modifies the drawn slots through numpy, unseen by torch."""

    def sample(self, count: int) -> Any:
        slots = self.storage.draw(count, self.rng)
        slots.numpy()[:] = 5
        return slots, None


@pytest.mark.parametrize("view", [rl.Transition(), rl.NStep(2, 0.9), rl.Sequence(2)])
def test_a_sampler_may_change_the_slots_that_were_drawn(view: Any) -> None:
    with kernels.force("torch"):
        batch = filled(8, sampler=Shifting()).sample(3, view)
    assert batch["index"].tolist() == [5, 5, 5]
    assert batch["obs"].reshape(3, -1)[:, 0].tolist() == [5.0, 5.0, 5.0]


def test_minus_one_updates_no_priority_on_a_device() -> None:
    with kernels.force("torch"):
        replay: Any = filled(3, sampler=rl.Prioritized())
        replay.storage._is_host = False
        assert int(replay.update_priority(torch.tensor([-1, 0]), torch.tensor([9.0, 1.0]))) == 1
        replay.check()


def test_priorities_of_halves_do_not_overflow() -> None:
    errors = torch.full((1, 3), 6e4, dtype=torch.float16)
    assert rl.sequence_priority(errors, torch.ones(1, 3, dtype=torch.bool)).tolist() == pytest.approx([6e4], rel=1e-3)


def test_step_index_is_returned_when_drawing_and_reading_are_one_call() -> None:
    replay = filled(8)
    assert "step_index" not in replay.sample(3, rl.Sequence(2)).keys()
    batch = replay.sample(3, rl.Sequence(2, step_index=True))
    assert torch.equal(batch["step_index"][:, 0], batch["index"])


def test_readers_refuse_unknown_fields(tmp_path: Path) -> None:
    from relive.datasets import from_hdf5, to_hdf5  # noqa: PLC0415 (which needs h5py)

    to_hdf5(filled(8), tmp_path / "steps.hdf5")
    for wrong in ("Repeat", False):
        with pytest.raises(rl.SchemaError, match="final_obs: expected"):
            from_hdf5(tmp_path / "steps.hdf5", final_obs=wrong)  # pyright: ignore[reportArgumentType]


MISSING_DEVICE = torch.device("cuda" if not torch.cuda.is_available() else "privateuseone")
"""A device that this machine does not have."""


def rollout() -> rl.RolloutBuffer:
    buffer = rl.RolloutBuffer(4, None, 2, (), seed=0)
    for t in range(4):
        buffer.add([t, t], 0.0, 0.0, terminated=False, truncated=False)
    return buffer


def distillation() -> rl.DistillationBuffer:
    buffer = rl.DistillationBuffer(8, 2, (), seed=0)
    buffer.add(np.arange(16.0).reshape(8, 2), np.zeros(8))
    return buffer


READERS: dict[str, tuple[Any, Any]] = {
    "sample": (lambda: filled(8), lambda b, device: b.sample(4, device=device)),
    "prioritized": (lambda: filled(8, sampler=rl.Prioritized()), lambda b, device: b.sample(4, device=device)),
    "n-step": (lambda: filled(8), lambda b, device: b.sample(4, rl.NStep(2, 0.9), device=device)),
    "minibatches": (rollout, lambda b, device: next(b.minibatches(2, device=device))),
    "sequences": (rollout, lambda b, device: next(b.sequences(2, device=device))),
    "distillation": (distillation, lambda b, device: b.sample(4, device=device)),
    "epochs": (distillation, lambda b, device: next(b.epochs(4, device=device))),
    "mixture": (
        lambda: rl.Mixture({"a": filled(8), "b": filled(8)}, (2, 1)),
        lambda b, device: b.sample(4, device=device),
    ),
}


@pytest.mark.parametrize("name", READERS)
def test_a_missing_device_is_refused_before_rows_are_drawn(name: str) -> None:
    make, read = READERS[name]
    buffer, twin = make(), make()
    with pytest.raises(rl.SchemaError, match="device: expected a device of this machine, got "):
        read(buffer, MISSING_DEVICE)
    assert torch.equal(read(buffer, "cpu")["index"], read(twin, None)["index"])


def test_prefetching_for_a_missing_device_draws_nothing() -> None:
    replay = filled(8)
    with pytest.raises(rl.SchemaError, match="device: expected a device of this machine, got "):
        rl.prefetch(replay, 4, device=MISSING_DEVICE)
    assert torch.equal(replay.sample(4)["index"], filled(8).sample(4)["index"])


@pytest.mark.parametrize("offsets", [{-1, 0}, frozenset((0, 1))])
def test_offsets_of_a_window_must_be_ordered(offsets: Any) -> None:
    with pytest.raises(rl.SchemaError, match="Window.obs: expected several offsets, got a set, which has no order"):
        rl.Window(obs=offsets)
    with pytest.raises(rl.SchemaError, match="expected several times, got a set, which has no order"):
        rl.Window.from_seconds(10, obs=offsets)


@pytest.mark.parametrize("device", [MISSING_DEVICE, "privateuseone"])
def test_loading_onto_a_missing_device_is_refused(device: Any, tmp_path: Path) -> None:
    filled(4).save(tmp_path)
    with pytest.raises(rl.IncompatibleCheckpoint, match="expected a device of this machine, got "):
        rl.load(tmp_path, device=device)
