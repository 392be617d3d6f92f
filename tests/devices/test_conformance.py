"""The conformance cases, with relive's buffers on a device."""

from __future__ import annotations

import pytest

from relive_conformance import CASES, Case
from relive_conformance.adapters import relive as ours
from relive_conformance.outcome import PASSES
from tests.devices.place import Place, moving

SAVING = {"T13", "T17", "T18"}
"""Cases that save: the wrapped buffers of this test cannot be saved. See `test_replay`."""


@pytest.mark.thorough
@pytest.mark.parametrize("case", [case for case in CASES if case.number not in SAVING], ids=str)
def test_relive_passes_on_the_device(device_with_values: Place, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "rl", moving(device_with_values))
    with device_with_values.inside():
        outcome = case.run(ours.adapter())
    assert outcome.status == PASSES, (outcome.expected, outcome.got, outcome.reason)
