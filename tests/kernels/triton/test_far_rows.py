"""Rows beyond 2^31 are written and read: of three billion slots only the written pages take memory."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.kernels.triton.interpreter import interpreter, quick_arithmetic

pytest.importorskip("triton", reason="needs Triton: pip install 'relive[triton]'")

from relive.kernels.triton.draw import RowDrawer, sum_counts_by_group
from relive.kernels.triton.launching import as_words
from relive.kernels.triton.read import AT_NEXT, AT_ROW, RowReader, Source
from relive.kernels.triton.rings import FrameLayout, Leaf, Rings
from relive.kernels.triton.stream import CELLS
from relive.kernels.triton.windows import Windows, find_windows
from relive.kernels.triton.write import StepWriter

SLOTS, WIDTH = 3_000_000_000, 3
NO_RESERVE = 0x4000
"""Linux's flag for memory that is allocated when it is written; Python names it from 3.13 on."""


@pytest.fixture(autouse=True)
def _nothing_is_copied(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep the interpreter from copying every argument back after a launch, which would write to all memory."""
    monkeypatch.setattr(interpreter().GridExecutor, "_restore_args_dev", lambda *_: None)
    with quick_arithmetic():
        yield


def make_sparse_zeros(*shape: int) -> torch.Tensor:
    """Return zero bytes that take memory only where they are written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    return torch.from_numpy(np.frombuffer(mmap.mmap(-1, int(np.prod(shape)), flags=flags), np.uint8)).view(*shape)


def rings(head: int) -> Rings:
    state = {name: torch.zeros(1, dtype=torch.uint8) for name in ("open", "resetting")}
    numbers = {name: torch.tensor([value]) for name, value in (("head", head), ("count", 0), ("floor", head))}
    return Rings(
        make_sparse_zeros(SLOTS, 1),
        make_sparse_zeros(SLOTS, 1),
        slots=SLOTS,
        num_envs=1,
        num_sampleable=SLOTS,
        **state,
        **numbers,
    )


@pytest.mark.parametrize("head", [2**31 - 2, SLOTS - 2, 5 * SLOTS - 2])
def test_steps_are_written_drawn_and_read_beyond_2_to_the_31(head: int) -> None:
    ring, obs, others = rings(head), Leaf.from_column(make_sparse_zeros(SLOTS, 1, WIDTH), FrameLayout(), 4), []
    for _ in range(2):
        others.append(Leaf.from_column(make_sparse_zeros(SLOTS, 1), FrameLayout(), 4))
    obs_rows = torch.arange(5 * WIDTH, dtype=torch.uint8).view(5, 1, WIDTH) + 1
    flags = (torch.zeros(4, 1, dtype=torch.uint8),) * 2
    totals, broken, unknown = sum_counts_by_group(ring.count), *torch.zeros(2, 1, dtype=torch.int64)
    writer = StepWriter(ring, [obs], [], others, totals, (broken, unknown), flags=(0, 1), next_step=False)
    writer.write((obs_rows[:4],), (obs_rows[1:],), flags, 1, 4, None, None)
    slots = torch.tensor([(head + i) % SLOTS for i in range(4)])
    assert ring.kind[slots, 0].tolist() == [1] * 4
    assert (int(ring.head), int(ring.count), int(ring.open)) == (head + 4, 4, 1)
    stream = torch.tensor([7] + CELLS * [0])
    flat_slots = RowDrawer(ring, totals).draw(stream, 40)
    assert set(flat_slots.tolist()) == set(slots.tolist())
    out = [torch.zeros(4, WIDTH, dtype=torch.uint8) for _ in range(2)]
    ids = torch.zeros(4, dtype=torch.int64)
    reader = RowReader(ring, [Source(obs, AT_ROW.value), Source(obs, AT_NEXT.value)])
    reader.read(slots, [as_words(leaf) for leaf in out], ids)
    assert torch.equal(out[0], obs_rows[:4, 0])
    assert torch.equal(out[1], obs_rows[1:, 0])
    assert ids.tolist() == [head + i for i in range(4)]
    mask, train, is_first = (torch.zeros(1, 4, dtype=torch.uint8) for _ in range(3))
    windows = Windows(torch.zeros(1, 4, dtype=torch.int64), mask, train, is_first, ids)
    find_windows(ring, slots[1:2].contiguous(), 1, 3, False, windows)
    assert windows.slots.tolist() == [slots.tolist()]
    assert windows.train.tolist() == [[0, 1, 1, 1]]
