"""The scan for an original's words in our adapters."""

from __future__ import annotations

from pathlib import Path

from tools.original_words import runs, sentences, shared


def written(path: Path, code: str) -> Path:
    path.write_text(code)
    return path


def test_lines_and_sentences_that_both_sides_have_are_found(tmp_path: Path) -> None:
    theirs = written(
        tmp_path / "theirs.py",
        "import a_module_with_a_rather_long_name\n"
        "def add(self, observation: Tensor) -> None:\n"
        '    raise ValueError("The buffer has no room " f"for one more step of {n}.")\n',
    )
    ours = written(
        tmp_path / "ours.py",
        "import a_module_with_a_rather_long_name\n"
        "def add(self, observation: Tensor) -> None:\n"
        "    # the buffer has no room for anything\n"
        '    raise ValueError("Call clear() first.")\n',
    )
    lines, found = shared([ours], [theirs])
    assert lines == ["ours.py: def add(self, observation: Tensor) -> None:"]
    assert found == ["ours.py: the buffer has no room for"]


def test_strings_that_follow_each_other_are_one_text() -> None:
    code = 'x = ("a b c "\n     "d e f")\ny = "a b"\n'
    assert [list(runs(text)) for text in sentences(code)] == [["a b c d e f"], []]
