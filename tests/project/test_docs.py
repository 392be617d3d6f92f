"""The code of the documentation and of docstrings runs, and the names that the documentation mentions exist."""

from __future__ import annotations

import ast
import doctest
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

import relive as rl

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
PAGES = {
    str(page.relative_to(DOCS)): blocks
    for page in sorted(DOCS.rglob("*.md"))
    # Other tests run the migrating pages, Ray's page, and the first page (test_readme.py).
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


SOURCE = Path(rl.__file__).parent
EXAMPLES = [
    ".".join(file.relative_to(SOURCE.parent).with_suffix("").parts)
    for file in sorted(SOURCE.rglob("*.py"))
    if "\n    >>> " in file.read_text(encoding="utf-8") and "compat" not in file.parts
]


@pytest.mark.parametrize("module", EXAMPLES)
def test_the_examples_in_the_docstrings_of_a_module_run(module: str) -> None:
    results = doctest.testmod(import_module(module))
    assert results.attempted > 0
    assert results.failed == 0


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="needs relive[docs]")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=DOCS.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "reference" / "index.html").stat().st_size > 0


def public_names(module: str) -> set[str]:
    """Return the public names of a module without importing it: its library may be missing."""
    code = (Path(rl.__file__).parent / module / "__init__.py").read_text("utf-8")
    (names,) = re.findall(r"^__all__ = (\[.*?\])", code, re.MULTILINE | re.DOTALL)
    return {f"{module}.{name}" for name in ast.literal_eval(names)}


REFERENCE = (DOCS / "reference.md").read_text(encoding="utf-8")


def test_every_public_name_is_in_the_reference() -> None:
    listed = re.findall(r"^\| `relive\.([\w.]+)", REFERENCE, re.MULTILINE)
    assert len(listed) == len(set(listed))
    public = (
        (set(rl.__all__) - {"kernels"})
        | public_names("distributed")
        | public_names("datasets")
        | public_names("compat")
    )
    assert set(listed) == public | {"inspector.Report", "kernels.backend", "kernels.force", "kernels.force_torch"}


MEMBERS = dict(re.findall(r"^- `([\w.]+)`:(.*?)\.$", REFERENCE, re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize("name", MEMBERS)
def test_the_members_that_the_reference_names_exist(name: str) -> None:
    if name.startswith("distributed"):
        pytest.importorskip("ray", reason="needs Ray: pip install '.[ray]'")
    members = set(re.findall(r"`(\w+)`", MEMBERS[name])) - {"len"}
    assert members
    owner = resolve_name(f"relive.{name}")
    fields = {key for kind in owner.__mro__ for key in getattr(kind, "__annotations__", {})}
    assert {member for member in members if not hasattr(owner, member) and member not in fields} == set()


def _exists(name: str) -> bool:
    place = Path(rl.__file__).parents[1].joinpath(*name.split("."))
    if place.is_dir() or place.with_suffix(".py").exists():  # a module; importing it could need a missing library
        return True
    try:
        resolve_name(name)
    except AttributeError:
        return False
    return True


def test_every_relive_name_on_a_page_exists() -> None:
    pages = [page.read_text("utf-8") for page in DOCS.rglob("*.md") if page.parent.name != "migrating"]
    code = [text for page in pages for text in re.findall(r"`([^`\n]+)`", page)]
    names = {name for text in code for name in re.findall(r"(?<![\w./-])relive(?:\.[a-zA-Z_]\w*)+", text)}
    assert len(names) > 5
    assert sorted(name for name in names if not _exists(name)) == []
