"""`make test` covers every public name, adapter, promise and conformance case."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import pytest

import relive as rl
from relive import compat
from relive_conformance import CASES
from tests.conftest import COLLECTED

ROOT = Path(__file__).parents[2]
SHARED = {"__main__", "patching", "pickling", "seeding", "step_rows", "views"}
"""Modules of `compat` that are no adapters."""
ADAPTERS = [module.name for module in iter_modules(compat.__path__) if module.name not in SHARED]
TESTED_BY_SANITIZERS = {"D5"}
"""Promises tested by `make sanitize` instead."""


@pytest.fixture(scope="module")
def collected(request: pytest.FixtureRequest) -> list[Any]:
    """Tests of `make test-all`; `make test` collects them too."""
    config = request.config
    if config.args != config.getini("testpaths") or config.option.keyword:
        pytest.skip("expected a run of all tests, as make test and make test-all are, got a part of them")
    return [item for item in config.stash[COLLECTED] if not item.get_closest_marker("long")]


@pytest.fixture(scope="module")
def selected(collected: list[Any]) -> list[Any]:
    """Tests of `make test`."""
    return [item for item in collected if not item.get_closest_marker("thorough")]


def used_names(items: list[Any], module: str) -> set[str]:
    """Return every name used by tests and helpers in the files that mention a module."""
    found: set[str] = set()
    for path in {item.path for item in items}:
        text = path.read_text(encoding="utf-8")
        if module in text:
            tests = {item.originalname for item in items if item.path == path}
            for node in ast.walk(SelectedTests(tests).visit(ast.parse(text))):
                found |= {node.id} if isinstance(node, ast.Name) else set()
                found |= {node.attr} if isinstance(node, ast.Attribute) else set()
    return found


class SelectedTests(ast.NodeTransformer):
    """Removes unselected tests from a syntax tree."""

    def __init__(self, tests: set[str]) -> None:
        self._tests = tests

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef | None:
        return None if node.name.startswith("test") and node.name not in self._tests else node


def test_every_public_name_is_used(selected: list[Any]) -> None:
    assert set(rl.__all__) <= used_names(selected, "relive")


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_every_buffer_and_function_of_an_adapter_is_used(adapter: str, selected: list[Any]) -> None:
    if adapter == "sb3_contrib":
        pytest.importorskip("sb3_contrib", reason="needs sb3-contrib: pip install sb3-contrib")
    names = {name for name in import_module(f"relive.compat.{adapter}").__all__ if name.islower() or "Buffer" in name}
    unused = {"BaseBuffer", "PrioritizedReplayBufferSamples", "get_system_info"}  # users do not construct these
    assert names - unused <= used_names(selected, adapter)


def test_every_promise_has_a_test(selected: list[Any]) -> None:
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    promised = set(re.findall(r"\b(?:[A-L]\d+\b|[A-L](?=:\s))", page)) - TESTED_BY_SANITIZERS
    assert len(promised) >= 20
    kept = {name for item in selected for mark in item.iter_markers("promise") for name in mark.args}
    assert kept == promised
    files = {item.nodeid.partition("::")[0] for item in selected}
    rows = "".join(re.findall(r"^\|.*$", page, re.MULTILINE))
    assert set(re.findall(r"`(tests/\S+\.py)`", rows)) <= files


def test_every_conformance_case_is_run(selected: list[Any]) -> None:
    asked = {item.name for item in selected if item.module.__name__ == "tests.conformance.test_cases"}
    assert {f"test_relive_passes[{case}]" for case in CASES} <= asked
