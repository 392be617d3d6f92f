"""What a reader with bad intentions has found, each once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import relive as rl
from relive import kernels
from relive.replay import Drawn


def filled(steps: int, **settings: Any) -> rl.ReplayBuffer:
    replay = rl.ReplayBuffer(16, 2, 2, seed=0, **settings)
    add(replay, steps)
    return replay


def add(replay: rl.ReplayBuffer, steps: int) -> None:
    for t in range(steps):
        obs, following = np.full(2, t, np.float32), np.full(2, t + 1, np.float32)
        replay.add(obs, np.zeros(2), 0.0, terminated=False, truncated=False, next_obs=following)


@pytest.mark.parametrize("backend", ["native", "torch"], indirect=True)
def test_an_epoch_goes_on_in_a_larger_buffer_without_rows_that_are_gone(backend: str, tmp_path: Path) -> None:
    replay = filled(40, sampler=rl.WithoutReplacement())
    replay.sample(2)
    add(replay, 3)  # which overwrite rows that the epoch has yet to show
    replay.save(tmp_path)
    with pytest.warns(UserWarning, match="capacity 16 became 32"):
        larger = rl.load(tmp_path, rl.ReplayBuffer, capacity=32)
    assert torch.equal(larger.ids(), replay.ids())
    larger.check()


def test_what_a_batch_holds_of_two_observations_are_two_memories() -> None:
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


class Shifting:
    """A sampler that changes what the store has drawn, behind torch's back."""

    def start(self, store: Any, random: Any) -> Any:
        class Run:
            def draw(self, count: int) -> Any:
                slots = store.draw(count, random)
                slots.numpy()[:] = 5
                return Drawn(slots)

        return Run()


@pytest.mark.parametrize("view", [rl.Transition(), rl.NStep(2, 0.9), rl.Sequence(2)])
def test_a_sampler_may_change_the_slots_that_were_drawn(view: Any) -> None:
    with kernels.force("torch"):
        batch = filled(8, sampler=Shifting()).sample(3, view)
    assert batch["index"].tolist() == [5, 5, 5]
    assert batch["obs"].reshape(3, -1)[:, 0].tolist() == [5.0, 5.0, 5.0]


def test_no_row_is_found_by_minus_one_where_the_host_does_not_look() -> None:
    with kernels.force("torch"):
        replay: Any = filled(3, sampler=rl.Prioritized())
        replay.storage._waits = False  # as on another device
        assert int(replay.update_priority(torch.tensor([-1, 0]), torch.tensor([9.0, 1.0]))) == 1
        replay.check()


def test_priorities_of_halves_do_not_overflow() -> None:
    errors = torch.full((1, 3), 6e4, dtype=torch.float16)
    assert rl.sequence_priority(errors, torch.ones(1, 3, dtype=torch.bool)).tolist() == pytest.approx([6e4], rel=1e-3)


def test_the_names_of_steps_are_not_left_out_by_a_store_that_draws_and_reads_at_once() -> None:
    assert rl.Sequence(2).fused is not None
    assert rl.Sequence(2, step_index=True).fused is None


def test_readers_refuse_what_they_do_not_know(tmp_path: Path) -> None:
    from relive.datasets import from_hdf5, to_hdf5  # noqa: PLC0415 (which needs h5py)

    to_hdf5(filled(8), tmp_path / "steps.hdf5")
    for wrong in ("Repeat", False):
        with pytest.raises(rl.SchemaError, match="final_obs: expected"):
            from_hdf5(tmp_path / "steps.hdf5", final_obs=wrong)  # pyright: ignore[reportArgumentType]
