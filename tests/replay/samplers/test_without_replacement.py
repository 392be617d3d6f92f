"""Tests of `WithoutReplacement` beyond those of all samplers: an epoch survives Ctrl-C inside a draw."""

from contextlib import suppress
from typing import Any

import pytest

import relive as rl
from relive.replay.samplers.sampler import Sampler


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("assignments", [0, 1])
def test_an_interrupt_while_an_epoch_starts_loses_no_row(assignments: int, monkeypatch: pytest.MonkeyPatch) -> None:
    replay = rl.ReplayBuffer(10, obs=(), action=(), sampler=rl.WithoutReplacement(), seed=0)
    for t in range(10):
        replay.add(t, 0, 0, False, False, t + 1)
    replay.sample(10)  # a whole epoch: the next batch starts another
    assign, left = Sampler.__setattr__, [assignments]

    def interrupted(self: Sampler, name: str, value: Any) -> None:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        assign(self, name, value)

    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "__setattr__", interrupted)
        with suppress(KeyboardInterrupt):
            replay.sample(4)

    replay.check()
    remaining = len(replay.sampler.state()["ids"])
    assert remaining == (6 if assignments else 0), "the batch is drawn, or it is not"
