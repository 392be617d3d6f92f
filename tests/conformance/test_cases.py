"""Every case passes a correct buffer and fails a wrong one; relive passes every case."""

from __future__ import annotations

from typing import Any

import pytest

from relive_conformance import CASES, Case, case
from relive_conformance.adapters import relive as ours
from relive_conformance.adapters.protocol import Adapter
from relive_conformance.outcome import DIFFERS, PASSES
from tests.conformance.mutants import MUTANTS, SharesNextObservations
from tests.conformance.reference_buffer import reference


@pytest.mark.parametrize("case", CASES, ids=str)
def test_relive_passes(case: Case) -> None:
    outcome = case.run(ours.adapter())
    assert outcome.status == PASSES, (outcome.expected, outcome.got, outcome.reason)


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_reference_passes(case: Case) -> None:
    outcome = case.run(reference())
    assert outcome.status == PASSES, (outcome.expected, outcome.got, outcome.reason)


def names(changed: dict[str, Any]) -> str:
    (part,) = changed.values()
    part = next(iter(part.values())) if isinstance(part, dict) else part
    return getattr(part, "__name__", "lambda")


@pytest.mark.thorough
@pytest.mark.parametrize(("number", "changed"), MUTANTS, ids=[f"{n}-{names(changed)}" for n, changed in MUTANTS])
def test_every_mutant_differs_with_figures(number: str, changed: dict[str, Any]) -> None:
    outcome = case(number).run(reference(**changed))
    assert outcome.status == DIFFERS
    assert outcome.expected
    assert outcome.got


@pytest.mark.thorough
def test_a_difference_of_an_option_names_the_option() -> None:
    said = {
        "": case("T7").run(reference(replay=SharesNextObservations)).expected,
        "sharing": case("T7").run(reference(replay_saving={"sharing": SharesNextObservations})).expected,
    }
    assert "option" not in said[""]
    assert said["sharing"].endswith(" with the option sharing")


def test_every_case_has_a_mutant() -> None:
    assert {number for number, _ in MUTANTS} == {found.number for found in CASES}
    assert [found.number for found in CASES] == [f"T{i}" for i in range(1, 29)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_adapter_without_capabilities_offers_no_case(case: Case) -> None:
    outcome = case.run(Adapter("nothing", ""))
    assert outcome.status == "not offered"
    assert outcome.reason
