"""The code of the documentation runs, and every public name is in the reference."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

import relive as rl
from relive_conformance import CASES

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
PAGES = {
    str(page.relative_to(DOCS)): blocks
    for page in sorted(DOCS.rglob("*.md"))
    # The pages of other libraries have their code beside ours and tests of their own; so has Ray's, and test_readme.py
    # runs the first page.
    if (blocks := BLOCK.findall(page.read_text(encoding="utf-8"))) and page.parent.name != "migrating"
    if page.name not in ("index.md", "ray.md")
}


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs_from_top_to_bottom(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}
    for number, block in enumerate(PAGES[page], 1):
        exec(compile(block, f"docs/{page}, block {number}", "exec", dont_inherit=True), names)


def exported(module: str) -> set[str]:
    """The public names of a module, which may need a library that is not installed here."""
    code = (Path(rl.__file__).parent / module / "__init__.py").read_text("utf-8")
    (names,) = re.findall(r"^__all__ = (\[.*?\])", code, re.MULTILINE | re.DOTALL)
    return {f"{module}.{name}" for name in ast.literal_eval(names)}


REFERENCE = (DOCS / "reference.md").read_text(encoding="utf-8")


def test_every_public_name_is_in_the_reference() -> None:
    listed = re.findall(r"^\| `relive\.([\w.]+)", REFERENCE, re.MULTILINE)
    assert len(listed) == len(set(listed))
    public = (set(rl.__all__) - {"kernels"}) | exported("distributed") | exported("datasets") | exported("compat")
    assert set(listed) == public | {"inspector.Report", "kernels.backend", "kernels.force", "kernels.force_torch"}


MEMBERS = dict(re.findall(r"^- `([\w.]+)`:(.*?)\.$", REFERENCE, re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize("name", MEMBERS)
def test_the_members_that_the_reference_names_exist(name: str) -> None:
    if name.startswith("distributed"):
        pytest.importorskip("ray", reason="needs Ray: pip install '.[ray]'")
    members = set(re.findall(r"`(\w+)`", MEMBERS[name])) - {"len"}
    assert members
    made = resolve_name(f"relive.{name}")
    fields = {key for kind in made.__mro__ for key in getattr(kind, "__annotations__", {})}
    assert {member for member in members if not hasattr(made, member) and member not in fields} == set()


def _exists(name: str) -> bool:
    place = Path(rl.__file__).parents[1].joinpath(*name.split("."))
    if place.is_dir() or place.with_suffix(".py").exists():  # a module, which may need a library that is missing here
        return True
    try:
        resolve_name(name)
    except AttributeError:
        return False
    return True


def test_names_inside_the_library_that_pages_mention_exist() -> None:
    pages = [page.read_text("utf-8") for page in DOCS.rglob("*.md") if page.parent.name != "migrating"]
    code = [text for page in pages for text in re.findall(r"`([^`\n]+)`", page)]
    names = {name for text in code for name in re.findall(r"(?<![\w./-])relive(?:\.[a-zA-Z_]\w*)+", text)}
    assert len(names) > 5
    assert sorted(name for name in names if not _exists(name)) == []


def _is_called(made: Any) -> bool:
    return inspect.isfunction(made) or (inspect.isclass(made) and not issubclass(made, Exception))


@pytest.mark.parametrize("name", [name for name in rl.__all__ if _is_called(getattr(rl, name))])
def test_every_argument_is_explained(name: str) -> None:
    """Docstrings explain each argument below "Args:", which the reference shows as a list."""
    made = getattr(rl, name)
    arguments = list(inspect.signature(made).parameters)
    _, _, section = (inspect.getdoc(made) or "").partition("Args:\n")
    section, _, _ = section.partition("\n\n")
    assert sorted(re.findall(r"^    (\w+): \S", section, re.MULTILINE)) == sorted(arguments)


def test_every_page_is_in_the_navigation() -> None:
    navigation = (DOCS.parent / "mkdocs.yml").read_text()
    for page in DOCS.rglob("*.md"):
        assert str(page.relative_to(DOCS)) in navigation, page


def test_a_conformance_case_has_its_title_wherever_it_is_mentioned() -> None:
    titles = {case.number: case.title for case in CASES}
    assert len(set(titles.values())) == len(titles)
    mentioned = 0
    reproductions = DOCS.parent / "conformance" / "relive_conformance" / "reproductions"
    for page in [*sorted(DOCS.rglob("*.md")), *sorted(reproductions.glob("*.md"))]:
        prose = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
        for number, words in re.findall(r"\b(T\d+)\b(.{0,80})", prose):
            mentioned += 1
            assert words.startswith(f" {titles[number]}"), f"{page.name}: {number}{words}"
    assert mentioned > 2 * len(CASES)
