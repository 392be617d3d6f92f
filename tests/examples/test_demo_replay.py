"""The demo's table of replay buffers: measured, ours among them, and honest about the bytes."""

from __future__ import annotations

import numpy as np
from rich.console import Console

from examples.demo import replay

SMALL = replay.SHAPE._replace(capacity=400, obs=(12, 10, 4))


def test_every_line_is_measured_and_stacked_frames_cost_one_frame() -> None:
    lines = {line.name: line for line in replay.measure(SMALL)}
    whole, stacked = lines["relive"], lines["relive (Stacked)"]
    assert whole.bytes_each is not None
    assert stacked.bytes_each is not None
    frame = int(np.prod(SMALL.obs[:2]))
    assert frame < stacked.bytes_each < 1.25 * frame
    assert 4 * frame < whole.bytes_each < 1.1 * 4 * frame
    assert all(line.batch_us > 0 for line in lines.values())


def test_the_table_is_printed_where_there_is_no_terminal() -> None:
    console = Console(record=True, width=100, force_terminal=False)
    replay.show(console, SMALL)
    text = console.export_text()
    assert "relive (Stacked)" in text
    assert "12 · 10 = 120 bytes" in text
