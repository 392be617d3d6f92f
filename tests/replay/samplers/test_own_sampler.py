"""Tests of samplers that users write: the calls they get, and the check of their results."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import FrozenInstanceError, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import relive as rl
from relive import kernels


@dataclass
class FixedSampler(rl.Sampler):
    """Sampler that returns a fixed value, or the result of a function."""

    result: Any

    def sample(self, count: int) -> Any:
        return self.result(self, count) if callable(self.result) else self.result


class WeightedSampler(FixedSampler):
    returns_weights = True


class ShortSampler(FixedSampler):
    may_return_fewer = True


def make_buffer(sampler: rl.Sampler, rows: int = 5) -> rl.ReplayBuffer:
    replay = rl.ReplayBuffer(8, 1, (), sampler=sampler, seed=0)
    for t in range(rows):
        replay.add([t], 0.0, t, terminated=False, truncated=False, next_obs=[t + 1])
    return replay


def slots(*numbers: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(numbers, dtype=dtype)


ONES = torch.ones(3)


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (FixedSampler(None), r"\(slots, weight\), got None"),
        (FixedSampler(slots(0, 1, 2)), r"\(slots, weight\)"),
        (FixedSampler((slots(0, 1), None)), r"shape \(3,\) on cpu, got .*shape \(2,\)"),
        (FixedSampler((slots(0, 1, 2, 3), None)), r"shape \(3,\) on cpu, got .*shape \(4,\)"),
        (FixedSampler((slots(0, 1, 2, dtype=torch.int32), None)), r"int64 slots .* got torch.int32"),
        (FixedSampler(([0, 1, 2], None)), r"int64 slots .* got \[0, 1, 2\]"),
        (FixedSampler((slots(0, 1, -1), None)), r"slots of stored transitions, got slot -1"),
        (FixedSampler((slots(0, 1, 5), None)), r"slots of stored transitions, got slot 5"),
        (FixedSampler((slots(0, 1, 7), None)), r"slots of stored transitions, got slot 7"),
        (FixedSampler((slots(0, 1, 99), None)), r"slots of stored transitions, got slot 99"),
        (FixedSampler((slots(0, 1, 2), ONES)), r"returns_weights, which is False, got weights"),
        (WeightedSampler((slots(0, 1, 2), None)), r"returns_weights, which is True, got None"),
        (WeightedSampler((slots(0, 1, 2), ONES[:2])), r"float32 weights of shape \(3,\)"),
        (WeightedSampler((slots(0, 1, 2), ONES.double())), r"float32 weights .* got torch.float64"),
        (ShortSampler((slots(), None)), r"or fewer"),
        (rl.Counted(FixedSampler((slots(0, 1, 9), None))), r"got slot 9"),
    ],
)
@pytest.mark.parametrize("view", [rl.Transition(), rl.NStep(2, 0.9), rl.Sequence(2)])
def test_an_invalid_result_is_an_error_that_names_the_class(
    backend: str, sampler: Any, expected: str, view: Any
) -> None:
    with kernels.force("torch") if backend == "torch" else nullcontext():
        replay = make_buffer(sampler)
        inner = sampler.sampler if isinstance(sampler, rl.Counted) else sampler
        with pytest.raises(rl.SchemaError, match=rf"{type(inner).__name__}\.sample: .*{expected}"):
            replay.sample(3, view)
        replay.check()


def test_the_rows_of_a_valid_result_are_read() -> None:
    assert make_buffer(FixedSampler((slots(4, 0, 4), None))).sample(3)["reward"].tolist() == [4.0, 0.0, 4.0]
    batch = make_buffer(WeightedSampler((slots(1, 2, 3), ONES))).sample(3)
    assert batch["weight"].tolist() == [1.0, 1.0, 1.0]
    assert make_buffer(ShortSampler((slots(2), None))).sample(3)["reward"].tolist() == [2.0]


def test_a_sampler_of_the_old_interface_is_refused_with_the_new_methods() -> None:
    class OldSampler:
        def start(self, store: Any, random: Any) -> Any: ...

    with pytest.raises(rl.SchemaError, match=r"expected an rl\.Sampler, .*`bind\(storage, rng\)` replaces `start`"):
        make_buffer(OldSampler())  # type: ignore[arg-type]
    with pytest.raises(rl.SchemaError, match=r"got the class Uniform. Pass an instance"):
        make_buffer(rl.Uniform)  # type: ignore[arg-type]


def test_a_buffer_binds_a_copy_and_settings_stay_as_they_are() -> None:
    sampler = rl.Prioritized(alpha=0.5)
    first, second = make_buffer(sampler), make_buffer(sampler)
    assert first.sampler == second.sampler == sampler
    assert first.sampler is not second.sampler
    assert first.sampler is not sampler
    with pytest.raises(FrozenInstanceError):
        first.sampler.alpha = 0.7  # type: ignore[attr-defined]
    with pytest.raises(FrozenInstanceError):
        sampler.alpha = 0.7


def test_a_sampler_is_called_after_writes_and_after_clear() -> None:
    calls: list[Any] = []

    class RecordingSampler(rl.Uniform):
        def on_write(self, slots: torch.Tensor) -> None:
            calls.append(sorted(slots.tolist()))

        def on_clear(self) -> None:
            calls.append("clear")

    replay = make_buffer(RecordingSampler(), rows=2)
    replay.clear()
    assert calls == [[0], [1], "clear"]


class SamplerWithFloat8(rl.Sampler):
    def sample(self, count: int) -> tuple[torch.Tensor, None]:
        return self.storage.stored()[:count], None

    def state(self) -> dict[str, torch.Tensor]:
        return {"scale": torch.ones(1).to(torch.float8_e4m3fn)}


def test_a_state_of_a_dtype_that_files_lack_is_refused_by_name(tmp_path: Path) -> None:
    replay = rl.ReplayBuffer(4, obs=1, action=(), sampler=SamplerWithFloat8())
    replay.add([0], 0.0, 1.0, False, False, [1])
    with pytest.raises(rl.CheckpointError, match=r"sampler\.scale with one of the dtypes .*, got torch.float8_e4m3fn"):
        replay.save(tmp_path / "saved")
