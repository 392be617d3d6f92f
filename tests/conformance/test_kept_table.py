"""The saved table: relive passes every case, and each difference of a library has a reproduction."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from relive_conformance import CASES, case, reproductions
from relive_conformance.outcome import DIFFERS, NOT_OFFERED, PASSES, Outcome
from relive_conformance.page import page
from relive_conformance.report import Report, Result, markdown
from relive_conformance.reproductions import REPRODUCTIONS

DOCS = Path(__file__).parents[2] / "docs"
KEPT = Report.from_json((DOCS / "conformance.json").read_text("utf-8"))
FILES = [file.read_text("utf-8") for file in Path(reproductions.__file__).parent.glob("*.md")]
SHOWN = [(name, number) for name, cases in REPRODUCTIONS.items() for number in cases]


def test_relive_passes_every_case_of_the_saved_table() -> None:
    ours = KEPT.results[0]
    assert ours.name == "relive"
    assert ours.count(PASSES) == len(CASES)


def test_every_library_was_tested_with_every_case() -> None:
    numbers = [case.number for case in CASES]
    assert not KEPT.missing
    assert len(KEPT.results) == 11
    for result in KEPT.results:
        assert list(result.outcomes) == numbers
        reasons = [outcome.reason for outcome in result.outcomes.values() if outcome.status == NOT_OFFERED]
        assert all(reasons)
        assert not [reason for reason in reasons if "load" in reason], (
            "not offered is about the library, not about this machine"
        )


def test_every_difference_has_a_reproduction_and_every_reproduction_a_difference() -> None:
    differences = [(result.name, number) for result in KEPT.results for number in result.differences]
    assert sorted(differences) == sorted(SHOWN)
    for result in KEPT.results:
        for number, outcome in result.differences.items():
            assert outcome.reproduction == REPRODUCTIONS[result.name][number].code


@pytest.mark.parametrize("name", REPRODUCTIONS)
def test_reproduction_files_have_the_version_date_and_figures_of_the_saved_table(name: str) -> None:
    (text,) = (text for text in FILES if text.startswith(f"# {name}\n"))
    result = next(result for result in KEPT.results if result.name == name)
    assert f"\n{name} {result.version}, seen on {KEPT.date}." in text
    for number, outcome in result.differences.items():
        figures = f"The suite expected {outcome.expected}; it got {outcome.got}."
        assert f"## {case(number).name}\n\n{figures} In a few lines:\n" in text


def test_a_reproduction_needs_only_its_own_library() -> None:
    for name, number in SHOWN:
        assert "relive" not in REPRODUCTIONS[name][number].code


def test_the_page_shows_the_output_of_each_reproduction() -> None:
    text = markdown(KEPT)
    for name, number in SHOWN:
        shown = REPRODUCTIONS[name][number]
        assert f"```python\n{shown.code}\n```\n\nprints\n\n```\n{shown.prints}\n```" in text


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "number"), SHOWN, ids=[f"{name}-{number}" for name, number in SHOWN])
def test_a_reproduction_prints_the_documented_output(name: str, number: str) -> None:
    seen = next(result.version for result in KEPT.results if result.name == name)
    try:
        here = metadata.version(name.lower().replace("-", "_"))
    except metadata.PackageNotFoundError:
        pytest.skip(f"{name} is not installed")
    if here != seen:
        pytest.skip(f"seen in {name} {seen}, here is {here}")
    shown = REPRODUCTIONS[name][number]
    command = [sys.executable, "-W", "ignore", "-c", shown.code]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.stdout.strip() == shown.prints, answer.stderr


def test_reports_are_merged_by_name() -> None:
    passed = {"T1": Outcome(PASSES)}
    here = Report([Result("a", "1", passed)], {"b": "missing", "c": "missing"})
    here.add(Report([Result("a", "2", {}), Result("b", "1", {"T1": Outcome(DIFFERS, "1", "2")})], {"c": "missing"}))
    assert [(result.name, result.version) for result in here.results] == [("a", "1"), ("b", "1")]
    assert here.missing == {"c": "missing"}


def test_texts_of_libraries_are_escaped_in_the_page() -> None:
    outcome = Outcome(DIFFERS, "a < b", "<script>alert(1)</script>", reproduction='print("<b>")')
    text = page(Report([Result("<i>", "&", {"T1": outcome, "T2": Outcome(NOT_OFFERED, reason='"quoted"')})]))
    assert "<script>" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert 'title="&quot;quoted&quot;"' in text
    assert 'href="#&lt;i&gt;-T1"' in text
