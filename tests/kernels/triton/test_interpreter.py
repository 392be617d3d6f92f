"""The simulated orders of programs reveal planted races."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton.interpreter import in_every_order, orders, programs_in_order

triton = pytest.importorskip("triton", reason="needs Triton: pip install 'relive[triton]'")
tl = pytest.importorskip("triton.language", reason="needs Triton: pip install 'relive[triton]'")


@triton.jit
def _count_kernel(counts, turns, next_turn):
    """Each program counts itself, and records its turn."""
    me = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.atomic_add(counts + me, 1)
    tl.store(turns + me, tl.atomic_add(next_turn, 1))


@triton.jit
def _last_program_wins_kernel(out):
    """Planted race: every program stores its number to one address."""
    tl.store(out, tl.program_id(0))


@triton.jit
def _sum_by_atomics_kernel(x, out):
    """Planted race: a float sum rounds in the order of its additions."""
    tl.atomic_add(out, tl.load(x + tl.program_id(0)))


@triton.jit
def _lanes_to_one_place_kernel(out):
    """Planted race inside a program: every lane stores its number to one address."""
    lane = tl.arange(0, 8)
    tl.store(out + lane * 0, lane, lane < 6)


@triton.jit
def _own_place_kernel(x, out):
    me = tl.program_id(0)
    tl.store(out + me, tl.load(x + me) * 2)


@pytest.mark.parametrize("order", orders(5))
def test_every_program_runs_once_in_each_order(order):
    counts, turns, next_turn = (torch.zeros(n, dtype=torch.int32) for n in (6, 6, 1))
    with programs_in_order(order):
        _count_kernel[(2, 3)](counts, turns, next_turn)
    assert counts.tolist() == [1] * 6
    assert turns.argsort().tolist() == list(order(6))


def test_programs_run_in_natural_order_afterwards():
    counts, turns, next_turn = (torch.zeros(n, dtype=torch.int32) for n in (6, 6, 1))
    with programs_in_order(orders(2)[1]):
        pass
    _count_kernel[(2, 3)](counts, turns, next_turn)
    assert turns.tolist() == [0, 1, 2, 3, 4, 5]


X = torch.tensor([1e8, 1.0, -1e8, 1.0], dtype=torch.float32)


def run(kernel, programs, *inputs):
    """Return what a kernel writes to zeros [8]."""
    out = torch.zeros(8, dtype=torch.float32 if inputs else torch.int32)
    kernel[(programs,)](*inputs, out)
    return out


@pytest.mark.parametrize(
    ("kernel", "programs", "inputs"),
    [(_last_program_wins_kernel, 4, ()), (_lanes_to_one_place_kernel, 1, ()), (_sum_by_atomics_kernel, 4, (X,))],
    ids=["programs", "lanes", "float atomics"],
)
def test_a_planted_race_is_found(kernel, programs, inputs):
    with pytest.raises(AssertionError, match="a race"):
        in_every_order(lambda: run(kernel, programs, *inputs))


def test_a_kernel_without_a_race_passes():
    assert in_every_order(lambda: run(_own_place_kernel, 4, X)).tolist() == [*(2 * X).tolist(), 0, 0, 0, 0]
