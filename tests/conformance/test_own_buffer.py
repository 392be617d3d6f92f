"""The command and the pytest plugin on a user's own buffer: each difference is reported."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from relive_conformance import CASES, Adapter, Differs, __main__, case
from relive_conformance.__main__ import main
from relive_conformance.adapters.discovery import Discovery, Missing
from relive_conformance.outcome import DIFFERS, PASSES, Outcome
from relive_conformance.report import Report, Result, ask
from relive_conformance.table import printable, table
from relive_conformance.target import as_adapter, find
from tests.conformance.wrong_buffer import MISTAKES, WrongBuffer

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "conformance"
TARGET = "tests.conformance.wrong_buffer:WrongBuffer"
PAGE = (ROOT / "docs" / "conformance.md").read_text()
README = (SOURCE / "README.md").read_text(encoding="utf-8")


def test_the_command_names_the_cases_that_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert main([TARGET, "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert re.findall(r"^  (T\d+) ", said, re.MULTILINE) == MISTAKES
    assert "next_obs of step" in said
    assert "from tests.conformance.wrong_buffer import WrongBuffer" in said
    report = json.loads((tmp_path / "report.json").read_text())
    outcomes = report["results"][0]["outcomes"]
    assert [number for number, said in outcomes.items() if said["status"] == DIFFERS] == MISTAKES
    assert outcomes["T4"]["status"] == PASSES
    assert outcomes["T8"] == {"status": "not offered", "reason": "no prioritized buffer"}
    page = (tmp_path / "report.html").read_text()
    assert page.count('class="difference"') == len(MISTAKES)
    assert "prefers-color-scheme: dark" in page
    assert not re.search(r'(src|href)="?https?:', page), "no network"


def test_the_reproduction_of_a_difference_raises_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    code = ask(find(TARGET), [case("T27")], target=TARGET).outcomes["T27"].reproduction
    assert len(code.splitlines()) == 3
    with pytest.raises(Differs, match="to be refused, got accepted"):
        exec(code, {})


def test_json_prints_only_the_report_and_writes_no_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["--json", "--cases", "T1", "--libraries", "relive", "--out", str(tmp_path / "not")]
    assert main(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["results"][0]["outcomes"] == {"T1": {"status": "pass"}}
    assert not (tmp_path / "not").exists()


@pytest.mark.thorough
def test_another_interpreter_tests_the_missing_libraries(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed = tmp_path / "site-packages" / "relive_conformance"
    shutil.copytree(Path(__main__.__file__).parent, installed)
    (installed.parent / "numpy.py").write_text("raise ImportError('the numpy of the wrong environment')")
    monkeypatch.setattr(__main__, "__file__", str(installed / "__main__.py"))
    monkeypatch.setattr(__main__, "discover", lambda libraries: Discovery([], [Missing("cleanrl", "hidden")]))
    assert main(["--json", "--cases", "T1", "--libraries", "cleanrl", "--python", sys.executable]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [result["name"] for result in report["results"]] == ["CleanRL pattern"]
    assert report["missing"] == {}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nonsense"], "expected module:attribute, got 'nonsense'"),
        (["no_such_module:X"], "No module named 'no_such_module'"),
        (["json:no_such_name"], "no_such_name"),
    ],
)
def test_an_invalid_target_is_wrong_usage(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


def test_a_target_may_be_a_class_an_adapter_or_a_function() -> None:
    adapter = Adapter("mine", "1", replay=WrongBuffer)  # type: ignore[arg-type]
    assert as_adapter(adapter) is adapter
    assert as_adapter(lambda: adapter) is adapter
    assert as_adapter(WrongBuffer).name == "WrongBuffer"
    with pytest.raises(TypeError, match="expected a class, a function or an Adapter, got 3"):
        as_adapter(3)


def run_pytest(*arguments: str) -> str:
    path = os.pathsep.join((str(SOURCE), str(ROOT)))
    plugin = ["-p", "pytest_relive_conformance", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *plugin, "-q", *arguments]
    # Without autoload: pytest refuses an installed plugin that -p names again.
    settings = {**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    answer = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True, check=False)
    return answer.stdout + answer.stderr


@pytest.mark.thorough
def test_the_plugin_adds_a_test_for_each_case(tmp_path: Path) -> None:
    said = run_pytest("--rootdir", str(tmp_path), str(tmp_path), "--relive-conformance", TARGET, "-rfs")
    failed = re.findall(r"^FAILED .*\[(T\d+)\]", said, re.MULTILINE)
    assert failed == MISTAKES, said
    assert "expected  next_obs of step" in said
    others = [found for found in CASES if found.number not in MISTAKES]
    outcomes = ask(as_adapter(WrongBuffer), others).outcomes.values()
    passed, skipped = (sum(o.status == status for o in outcomes) for status in (PASSES, "not offered"))
    assert f"{len(MISTAKES)} failed, {passed} passed, {skipped} skipped" in said


def test_importing_the_plugin_does_not_import_torch() -> None:
    code = "import sys, pytest_relive_conformance; print('torch' in sys.modules)"
    settings = {**os.environ, "PYTHONPATH": str(SOURCE)}
    answer = subprocess.run([sys.executable, "-c", code], env=settings, capture_output=True, text=True, check=True)
    assert answer.stdout == "False\n"


def test_the_code_blocks_of_the_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    adapter, asked, tests = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len([line for line in adapter.splitlines() if line.strip()]) <= 20
    assert f"```python\n{adapter}```" in README
    names: dict[str, Any] = {}
    exec(adapter, names)
    exec(asked, names)
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "pass",
        "differs | 0.75 into a field of uint8 to be refused | accepted, and stored as [0.75]",
    ]
    exec(tests, names)
    names["test_my_buffer"](case("T4"))
    with pytest.raises(Differs):
        names["test_my_buffer"](case("T22"))


@pytest.mark.thorough
def test_the_buffer_of_the_readme_has_the_documented_outcomes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (tmp_path / "my_buffer.py").write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["my_buffer:MyBuffer", "--out", str(tmp_path / "out")]) == 1
    (said,) = re.findall(r"```\n(T22.*?)```", README, re.DOTALL)
    assert textwrap.indent(said, "  ") in capsys.readouterr().out
    result = Report.from_json((tmp_path / "out" / "report.json").read_text(encoding="utf-8")).results[0]
    counts = [result.count(status) for status in (PASSES, DIFFERS, "not offered")]
    assert counts == [8, 2, 18]
    assert "passes 8 cases and differs in two" in README
    assert "The other 18 cases" in README


def test_an_unwritable_report_folder_is_refused_before_any_case_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["--cases", "T1", "--libraries", "relive", "--out", str(tmp_path / "file" / "out")]) == 2
    assert "relive-conformance: " in (told := capsys.readouterr()).err
    assert told.out == ""


def test_the_printed_folder_of_a_report_is_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "z\x1b[2J"
    assert main(["--libraries", "relive", "--cases", "T1", "--out", name]) == 0
    assert f"in {printable(name)}" in capsys.readouterr().out.replace("\n", "")
    assert (tmp_path / name / "report.json").exists()


def test_a_table_escapes_the_control_characters_of_names_and_figures() -> None:
    name = "\x1b[2J\x1b]0;title\x07\x9b31m\u202efdp\r"
    assert printable(name) == r"\x1b[2J\x1b]0;title\x07\x9b31m\u202efdp\r"
    assert printable("Ünï\tcode\n✓ [/a]") == "Ünï\tcode\n✓ [/a]"
    cases = CASES[:1]
    outcome = Outcome("differs", name, name)
    shown = table(Report([Result(name, name, {cases[0].number: outcome})], {name: name}), cases)
    assert shown.count(printable(name)) >= 6
    assert not set(shown) & set("\x1b\x07\x9b\u202e\r")
