"""A user's own sampler: what it is told, and what it may return."""

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
class Returning(rl.Sampler):
    """Returns what it is given."""

    chosen: Any

    def sample(self, count: int) -> Any:
        return self.chosen(self, count) if callable(self.chosen) else self.chosen


class Weighted(Returning):
    returns_weights = True


class Shorter(Returning):
    may_return_fewer = True


def filled(sampler: rl.Sampler, rows: int = 5) -> rl.ReplayBuffer:
    replay = rl.ReplayBuffer(8, 1, (), sampler=sampler, seed=0)
    for t in range(rows):
        replay.add([t], 0.0, t, terminated=False, truncated=False, next_obs=[t + 1])
    return replay


def slots(*numbers: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(numbers, dtype=dtype)


ONE = torch.ones(3)


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (Returning(None), r"\(slots, weight\), got None"),
        (Returning(slots(0, 1, 2)), r"\(slots, weight\)"),
        (Returning((slots(0, 1), None)), r"shape \(3,\) on cpu, got .*shape \(2,\)"),
        (Returning((slots(0, 1, 2, 3), None)), r"shape \(3,\) on cpu, got .*shape \(4,\)"),
        (Returning((slots(0, 1, 2, dtype=torch.int32), None)), r"int64 slots .* got torch.int32"),
        (Returning(([0, 1, 2], None)), r"int64 slots .* got \[0, 1, 2\]"),
        (Returning((slots(0, 1, -1), None)), r"slots of stored transitions, got slot -1"),
        (Returning((slots(0, 1, 5), None)), r"slots of stored transitions, got slot 5"),  # waits for its step
        (Returning((slots(0, 1, 7), None)), r"slots of stored transitions, got slot 7"),  # never written
        (Returning((slots(0, 1, 99), None)), r"slots of stored transitions, got slot 99"),
        (Returning((slots(0, 1, 2), ONE)), r"returns_weights, which is False, got weights"),
        (Weighted((slots(0, 1, 2), None)), r"returns_weights, which is True, got None"),
        (Weighted((slots(0, 1, 2), ONE[:2])), r"float32 weights of shape \(3,\)"),
        (Weighted((slots(0, 1, 2), ONE.double())), r"float32 weights .* got torch.float64"),
        (Shorter((slots(), None)), r"or fewer"),
        (rl.Counted(Returning((slots(0, 1, 9), None))), r"got slot 9"),
    ],
)
@pytest.mark.parametrize("view", [rl.Transition(), rl.NStep(2, 0.9), rl.Sequence(2)])
def test_a_wrong_choice_is_an_error_that_names_the_class(backend: str, sampler: Any, expected: str, view: Any) -> None:
    with kernels.force("torch") if backend == "torch" else nullcontext():
        replay = filled(sampler)
        inner = sampler.sampler if isinstance(sampler, rl.Counted) else sampler
        with pytest.raises(rl.SchemaError, match=rf"{type(inner).__name__}\.sample: .*{expected}"):
            replay.sample(3, view)
        replay.check()


def test_a_right_choice_is_read() -> None:
    assert filled(Returning((slots(4, 0, 4), None))).sample(3)["reward"].tolist() == [4.0, 0.0, 4.0]
    batch = filled(Weighted((slots(1, 2, 3), ONE))).sample(3)
    assert batch["weight"].tolist() == [1.0, 1.0, 1.0]
    assert filled(Shorter((slots(2), None))).sample(3)["reward"].tolist() == [2.0]


def test_an_object_with_start_is_told_what_replaces_it() -> None:
    class Old:
        def start(self, store: Any, random: Any) -> Any: ...

    with pytest.raises(rl.SchemaError, match=r"expected an rl\.Sampler, .*`bind\(storage, rng\)` replaces `start`"):
        filled(Old())  # type: ignore[arg-type]
    with pytest.raises(rl.SchemaError, match=r"got the class Uniform. Pass an instance"):
        filled(rl.Uniform)  # type: ignore[arg-type]


def test_a_buffer_binds_a_copy_and_settings_stay_as_they_are() -> None:
    sampler = rl.Prioritized(alpha=0.5)
    first, second = filled(sampler), filled(sampler)
    assert first.sampler == second.sampler == sampler
    assert first.sampler is not second.sampler
    assert first.sampler is not sampler
    with pytest.raises(FrozenInstanceError):
        first.sampler.alpha = 0.7  # type: ignore[attr-defined]
    with pytest.raises(FrozenInstanceError):
        sampler.alpha = 0.7


def test_it_is_told_of_writes_and_of_clear() -> None:
    told: list[Any] = []

    class Listening(rl.Uniform):
        def on_write(self, slots: torch.Tensor) -> None:
            told.append(sorted(slots.tolist()))

        def on_clear(self) -> None:
            told.append("clear")

    replay = filled(Listening(), rows=2)
    replay.clear()
    assert told == [[0], [1], "clear"]


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
