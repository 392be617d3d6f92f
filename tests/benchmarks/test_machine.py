"""What a run says of the machine: whether others use it."""

from __future__ import annotations

import pytest

from benchmarks import machine


@pytest.mark.parametrize(("idle", "is_busy"), [(100, False), (80, False), (70, True), (0, True)])
def test_a_machine_is_busy_when_others_have_a_quarter_of_it(
    monkeypatch: pytest.MonkeyPatch, idle: int, is_busy: bool
) -> None:
    ticks = iter([(5_000, 9_000), (5_000 + idle, 9_100)])
    monkeypatch.setattr(machine, "_idle_and_all", lambda: next(ticks))
    monkeypatch.setattr(machine.time, "sleep", lambda seconds: None)
    assert machine.is_busy() == is_busy


def test_elsewhere_the_last_minute_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_idle_and_all", lambda: None)
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 4)
    for load, is_busy in ((0.5, False), (1.5, True)):
        monkeypatch.setattr(machine.os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert machine.is_busy() == is_busy
