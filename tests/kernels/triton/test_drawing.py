"""Draws are uniform for every distribution of rows, and equal in every order of programs and on every machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import relive as rl
from tests.kernels.triton.interpreter import in_every_order, interpreted, programs_in_order

pytest.importorskip("triton", reason="needs Triton: pip install 'relive[triton]'")

from relive.gpu_report import compute_philox
from relive.kernels.triton import launching
from relive.kernels.triton.stream import CELLS, MAX_DRAWS, DeviceStream

CPU = torch.device("cpu")


def make_steps(steps: int, envs: int, ended: Any) -> dict[str, torch.Tensor]:
    """Return consecutive steps [steps, envs], with `ended` as the mask of ends."""
    obs = torch.arange(steps, dtype=torch.float32).view(-1, 1, 1).expand(steps, envs, 1).contiguous()
    flags = torch.as_tensor(ended).expand(steps, envs).contiguous()
    return {
        "obs": obs, "action": torch.zeros(steps, envs, 1), "reward": torch.zeros(steps, envs), "terminated": flags,
        "truncated": torch.zeros_like(flags), "next_obs": obs + 1,
    }  # fmt: skip


def many_final_rows() -> rl.ReplayBuffer:
    """Return a buffer of episodes of one step, separated by a reset and, in every other environment, by a cut."""
    replay = rl.ReplayBuffer(60, 1, 1, num_envs=4, autoreset="NEXT_STEP", seed=1)
    for _ in range(6):
        replay.extend(make_steps(2, 4, torch.tensor([[True], [False]])))
        replay.cut([0, 2])
    return replay


def unequal_fills() -> rl.ReplayBuffer:
    """Return a buffer whose environments have from one row to a full ring, with some ends."""
    replay = rl.ReplayBuffer(5 * 12, 1, 1, num_envs=5, seed=2)
    for env, steps in enumerate((1, 3, 7, 12, 20)):
        replay.extend(make_steps(steps, 1, torch.arange(steps).view(-1, 1) % 3 == 1), env_ids=[env])
    return replay


def one_of_thousands() -> rl.ReplayBuffer:
    replay = rl.ReplayBuffer(3000 * 8, 1, 1, num_envs=3000, seed=3)
    replay.extend(make_steps(7, 1, False), env_ids=[2345])
    return replay


def get_stream(replay: rl.ReplayBuffer) -> DeviceStream:
    assert isinstance(replay._random, DeviceStream)
    return replay._random


LAYOUTS: dict[str, Callable[[], rl.ReplayBuffer]] = {
    "many final rows": many_final_rows, "unequal fills": unequal_fills, "one of thousands": one_of_thousands,
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_transition_is_as_likely_as_any_other(name: str) -> None:
    with interpreted():
        replay = LAYOUTS[name]()
        slots = torch.cat([replay.storage.draw(1024, replay._random) for _ in range(4)])
        ids = replay.storage.ids(slots)
        stored = replay.ids()
    counts = torch.bincount(torch.searchsorted(stored, ids), minlength=len(stored)).double()
    assert torch.isin(ids, stored).all()
    expected = len(slots) / len(stored)
    chi = float(((counts - expected) ** 2 / expected).sum())
    freedom = len(stored) - 1
    assert abs(chi - freedom) < 5 * np.sqrt(2 * freedom) + 1e-9, (chi, freedom)


def test_a_draw_from_a_buffer_with_only_a_reset_row_ends() -> None:
    with interpreted():
        replay = rl.ReplayBuffer(8, 1, 1, num_envs=1, autoreset="NEXT_STEP", seed=0)
        replay.extend(make_steps(1, 1, True))
        replay.clear()
        replay.extend(make_steps(1, 1, False))
        assert len(replay) == 0
        assert 0 <= int(replay.storage.draw(2, replay._random).max()) < replay.storage.rows.ring.kind.numel()


@pytest.mark.thorough
@pytest.mark.parametrize("items", [1, 64])
def test_draws_do_not_depend_on_programs_nor_on_their_order(items: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def draw() -> list[torch.Tensor]:
        with interpreted():
            replay = unequal_fills()
            return [replay.storage.draw(75, replay._random) for _ in range(2)] + [get_stream(replay).numbers.clone()]

    whole = draw()
    monkeypatch.setattr(launching, "MAX_INTERPRETED", items)
    for expected, draws in zip(whole, in_every_order(draw, 3), strict=True):
        assert torch.equal(expected, draws)
    assert not torch.equal(whole[0], whole[1])
    assert whole[2][1:].tolist() == [2] * 5 + [0] * (CELLS - 5)


def test_a_seed_gives_these_rows_everywhere() -> None:
    with interpreted():
        replay = unequal_fills()
        assert int(get_stream(replay).numbers[0]) == KEY
        assert replay.sample(8)["index"].tolist() == ROWS
        assert replay._random.uniform(2, CPU).tolist() == NUMBERS


KEY = 1055234335903679899
ROWS = [78, 17, 17, 6, 1, 27, 7, 124]
NUMBERS = [0.6631154880377554, 0.5462605981235135]


@pytest.mark.parametrize("call", [0, 5, 2**32 + 7])
def test_numbers_are_those_of_philox(call: int) -> None:
    stream = DeviceStream(11, CPU)
    stream.numbers[1] = call
    with interpreted():
        numbers = stream.uniform(3, CPU).tolist()
    key = int(stream.numbers[0])
    expected = []
    for place in range(3):
        a, b, _, _ = compute_philox([place, call & 0xFFFFFFFF, call >> 32, 0], key)
        expected.append((((a << 31) ^ b) >> 10) * 2.0**-53)
    assert numbers == expected
    assert stream.numbers[1:].tolist() == [call + 1] + [0] * (CELLS - 1)


def test_a_stream_is_restored_from_a_snapshot() -> None:
    stream = DeviceStream(3, CPU)
    with interpreted():
        before = stream.snapshot()
        first = stream.uniform(4, CPU)
        assert not torch.equal(stream.uniform(4, CPU), first)
        stream.restore(before)
        assert torch.equal(stream.uniform(4, CPU), first)
    stream.numbers[2] = -1
    with pytest.raises(rl.InvariantError, match="at least 0"):
        stream.check()


@pytest.mark.parametrize("counter", [0, 1, 7])
def test_no_draw_repeats_whatever_the_counters_hold(counter: int) -> None:
    stream, seen = DeviceStream(3, CPU), set()
    # An interrupted launch, or a launch beside another one, may leave a counter that differs from the others.
    stream.numbers[2] = counter
    with interpreted(), programs_in_order(lambda n: range(n - 1, -1, -1)), pytest.MonkeyPatch.context() as patch:
        patch.setattr(launching, "MAX_INTERPRETED", 16)
        for _ in range(4):
            seen |= set(stream.uniform(70, CPU).tolist())
    assert len(seen) == 4 * 70
    assert stream.numbers[1:4].tolist() == [4, 4 + counter, 4]


def test_draws_beyond_the_limit_of_a_launch_take_several_launches() -> None:
    stream = DeviceStream(3, CPU)
    with interpreted():
        assert len(set(stream.uniform(MAX_DRAWS + 5, CPU).tolist())) == MAX_DRAWS + 5
    assert stream.numbers[1:3].tolist() == [2, 1]


def test_a_generator_of_an_earlier_format_is_loaded() -> None:
    with interpreted():
        replay = rl.ReplayBuffer(8, 1, 1, seed=0)
        state = replay.state_dict()
        (name,) = (name for name in state["arrays"] if name.endswith("philox"))
        state["arrays"][name] = torch.tensor([KEY, 5])
        replay.load_state_dict(state)
        assert get_stream(replay).numbers.tolist() == [KEY] + [5] * CELLS
