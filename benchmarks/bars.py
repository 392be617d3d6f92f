"""How many times faster than the fastest peer each operation must be: the one place that says so."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bar:
    """What our median must reach in the same run."""

    times_faster: float
    """At least this many times as fast as the fastest peer."""
    times_memcpy: float | None = None
    """At most this many times the duration of a memcpy of the same bytes."""


BARS: dict[str, Bar] = {
    "add N=16": Bar(6.0),
    "add N=4096": Bar(1.3),
    "gae 2048x8": Bar(10.0),
    "gae 128x64": Bar(10.0),
    "gae 24x4096": Bar(6.0, times_memcpy=3.0),
    "epoch 128x64 size 64": Bar(4.0),
    "epoch 128x64 size 4096": Bar(2.0),
    "epoch 24x4096 size 4096": Bar(2.5),
    "cycle 128x64 size 64": Bar(4.0),
    "cycle 24x4096 size 4096": Bar(2.5),
}
