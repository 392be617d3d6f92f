"""Performance bars: required speed relative to the fastest peer, and permitted memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bar:
    """Bar for our median within one run."""

    times_faster: float
    """At least this many times as fast as the fastest peer."""
    times_memcpy: float | None = None
    """At most this many times the duration of a memcpy of the same bytes."""
    aside: str | None = None
    """A peer that does less work and does not count as "the fastest"."""
    times_aside: float | None = None
    """At most this many times the duration of that peer."""


# rlox pushes flat float32 into fixed columns: no schema, no other dtypes, nothing nested.
_ADD_ONE_STEP = Bar(2.5, aside="rlox", times_aside=4.0)

_SEQUENCES = Bar(5.0)

# Relative to a plain step of the same buffer: at most four, eight and three times as long.
_COUNTED, _LISTS, _SAME_STEP = Bar(0.25), Bar(0.125), Bar(0.33)

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
    "rollout sequences 128x64 length 16, 256 steps a batch": _SEQUENCES,
    "rollout sequences 128x64 length 16, 1024 steps a batch": _SEQUENCES,
    "rollout sequences 128x64 length 16, 8192 steps a batch": _SEQUENCES,
    "replay add N=1": _ADD_ONE_STEP,
    "replay add N=16": _ADD_ONE_STEP,
    "replay add image": Bar(2.0),
    "uniform 256 of 1e6": Bar(2.5),
    "uniform 4096 of 5e5": Bar(3.0),
    "uniform 32 images": Bar(1.5),
    "prioritized 32 of 2^20": Bar(5.0),
    "prioritized 256 of 2^20": Bar(6.0),
    "prioritized 4096 of 2^20": Bar(3.0),
    "n-step 256": Bar(2.5),
    "sequences 32x80": Bar(4.0),
    **{f"{kind} add, stats and norm N={n}": _COUNTED for kind in ("replay", "rollout") for n in (1, 16)},
    **{f"{kind} add, lists N={n}": _LISTS for kind in ("replay", "rollout") for n in (1, 16)},
    **{f"{kind} add_step, SAME_STEP N=16": _SAME_STEP for kind in ("replay", "rollout")},
}

KINDS_OF_BARS: dict[str, Bar] = {
    "shared memory": Bar(3.0),
    "Ray": Bar(2.0),
    "windows": Bar(20.0),
    # An adapter is not slower than the original.
    **dict.fromkeys(("AgileRL", "ApexRL", "EmbodiChain", "rl-buffer", "rsl_rl", "Stable-Baselines3"), Bar(1.0)),
}
"""Bars of families of cases, whose names begin with "<kind>: "."""


def find_bar(case: str) -> Bar | None:
    """Return the bar of a case; None without one."""
    return BARS.get(case) or KINDS_OF_BARS.get(case.partition(":")[0])


BYTES_PER_TRANSITION: dict[str, float] = {
    "memory image": 7120.0,
    "memory obs(17)": 106.0,
}
"""Maximum bytes per transition, everything counted; images are stored as single frames by `Stacked`."""
