"""The adapters have every public name of the documents that they follow, at its path and with its arguments."""

from __future__ import annotations

import inspect
import json
import runpy
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.compat.documents.names import PREFIX, Name, difference, names, parsed

ROOT = Path(__file__).parents[2]
NAMES = list(names())


def ours(name: Name) -> Any:
    """Return our adapter's object of a name."""
    try:
        found: Any = import_module(PREFIX + name.module)
    except ModuleNotFoundError as error:
        if error.name == name.system:
            pytest.skip(f"{name.system} is not installed")
        raise
    for part in name.path.split("."):
        found = getattr(found, part)
    return found


# The dependencies of the originals warn.
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", NAMES, ids=str)
def test_a_printed_name_is_below_our_prefix_with_its_arguments_and_defaults(name: Name) -> None:
    found = ours(name)
    if name.arguments is not None:
        assert callable(found)
        assert difference(name, found) is None


def test_no_name_is_printed_twice_and_every_system_has_some() -> None:
    assert max(Counter(map(str, NAMES)).values()) == 1
    assert {name.system for name in NAMES} == {
        "agilerl", "apexrl", "embodichain", "rl_buffer", "rsl_rl", "stable_baselines3",
    }  # fmt: skip


FRONT_PAGE = runpy.run_path(str(ROOT / "docs" / "front_page.py"))
ORIGINALS = json.loads((ROOT / "docs" / "migrating" / "originals.json").read_text(encoding="utf-8"))


def test_the_tables_of_the_pages_are_those_of_the_kept_results() -> None:
    pages = list(FRONT_PAGE["pages"]())
    assert len(pages) > len(ORIGINALS)
    for path, tables in pages:
        page = path.read_text(encoding="utf-8")
        assert FRONT_PAGE["written"](page, tables) == page, f"{path.name}: run python docs/front_page.py"


@pytest.mark.parametrize("system", ORIGINALS)
def test_a_page_gives_the_reason_for_every_test_of_the_original_that_fails(system: str) -> None:
    page = (ROOT / "docs" / "migrating" / f"{system}.md").read_text(encoding="utf-8")
    failed = [name for tests in ORIGINALS[system]["tests"].values() for name in tests["failed"]]
    assert [name for name in failed if f"`{name.partition('[')[0]}`" not in page] == []


@pytest.mark.parametrize("system", ORIGINALS)
def test_nineteen_of_twenty_tests_of_the_original_pass(system: str) -> None:
    for tests in ORIGINALS[system]["tests"].values():
        assert tests["passed"] >= 0.95 * tests["total"]


@pytest.mark.parametrize("system", ORIGINALS)
def test_the_kept_number_of_names_is_that_of_the_list(system: str) -> None:
    assert ORIGINALS[system]["names"] == sum(name.system == system for name in NAMES)


def format_name(signature: str) -> Name:
    """Return a name in the notation of names.txt."""
    path, _, arguments = signature.partition("(")
    return Name("module", path, parsed(arguments.removesuffix(")")))


class Sample:
    """A class with a signature."""

    def add(self, obs: Any, done: Any, gamma: float = 0.99, *, seed: int | None = None) -> None:
        """Nothing."""


@pytest.mark.parametrize(
    ("signature", "told"),
    [
        ("add(obs, done, gamma=0.99)", None),
        ("add(obs, done)", None),
        ("add(_1, _2)", None),
        ("add(*, done, obs)", None),
        ("add(obs, done, *, seed=None)", None),
        ("add(done, obs)", "expected the arguments ['done', 'obs'], got ['obs', 'done']"),
        ("add(obs, done, gamma=0.9)", "expected gamma=0.9, got 0.99"),
        ("add(obs, done, gamma=None)", "expected gamma=None, got 0.99"),
        ("add(obs, done, gamma, lam)", "expected the arguments"),
        ("add(obs)", "to be enough: missing a required argument: 'done'"),
        ("add(obs, done, *, infos)", "unexpected keyword argument 'infos'"),
        ("add(_1, _2, _3, _4)", "expected the arguments"),
        ("add(obs, done, *, seed=0)", "expected seed=0, got None"),
    ],
)
def test_the_comparison_of_signatures_sees_differences(signature: str, told: str | None) -> None:
    found = difference(format_name(signature), Sample.add)
    assert (found is None) if told is None else (found is not None and told in found), found


def test_members_of_enumerations_are_compared_by_name() -> None:
    def made(kind: Any = inspect.Parameter.KEYWORD_ONLY) -> None: ...

    assert difference(format_name("made(kind=_ParameterKind.KEYWORD_ONLY)"), made) is None
    assert difference(format_name("made(kind=_ParameterKind.VAR_KEYWORD)"), made) is not None
