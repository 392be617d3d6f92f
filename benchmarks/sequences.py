"""Time an epoch of sequence minibatches of a rollout, for relive and its peers.

Run it as `python -m benchmarks.sequences [--quick] [--json PATH]`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from relive_conformance.adapters import Adapter, NotOffered, RolloutShape

from .rollouts import RolloutData, make_rollout
from .suite import Session, contestant, enter, refuse
from .timing import Contestant, make_memcpy
from .verify import check_sequences

SHAPE = RolloutShape(num_steps=128, num_envs=64, obs_dim=64, action_dim=4)
LENGTH, HIDDEN = 16, 64
CASES = {f"rollout sequences 128x64 length {LENGTH}, {size} steps a batch": size for size in (256, 1024, 8192)}
NBYTES = 4 * SHAPE.num_steps * SHAPE.num_envs * (SHAPE.obs_dim + SHAPE.action_dim + 4)
"""Bytes of an epoch's batches, without the initial states."""


def enter_sequences(peer: Adapter, num_steps: int, data: RolloutData) -> Contestant:
    """Time one epoch, from the flags of a full rollout to the last batch."""
    if peer.recurrent is None:
        raise NotOffered
    state = np.random.default_rng(1).standard_normal((SHAPE.num_steps, SHAPE.num_envs, HIDDEN), dtype=np.float32)
    rollout = peer.recurrent(SHAPE, LENGTH)
    rollout.fill(data.steps, state, data.trajectory.reward, data.trajectory.value)
    refuse(check_sequences(rollout, num_steps, data, state))

    def run() -> None:
        for _ in rollout.minibatches(num_steps):
            pass

    return contestant(peer, run)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite."""
    session = Session.start("sequences", __doc__ or "", ["sequences"], arguments)
    data = make_rollout(SHAPE, seed=0)
    outcomes = []
    for case, size in CASES.items():
        with session.console.status(case):
            entered = enter(case, session.discovery.adapters, lambda peer, size=size: enter_sequences(peer, size, data))
            outcomes.append(session.time((entered[0], [*entered[1], make_memcpy(NBYTES)])))
    return session.finish(outcomes)


if __name__ == "__main__":
    raise SystemExit(main())
