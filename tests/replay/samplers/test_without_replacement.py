"""Test of `WithoutReplacement`: an epoch survives Ctrl-C inside a draw."""

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
    # The next batch starts another epoch.
    replay.sample(10)
    assign, num_left = Sampler.__setattr__, [assignments]

    def interrupt_after(self: Sampler, name: str, value: Any) -> None:
        if not num_left[0]:
            raise KeyboardInterrupt
        num_left[0] -= 1
        assign(self, name, value)

    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "__setattr__", interrupt_after)
        with suppress(KeyboardInterrupt):
            replay.sample(4)

    replay.check()
    remaining = len(replay.sampler.state()["ids"])
    assert remaining == (6 if assignments else 0), "the batch is drawn, or it is not"
