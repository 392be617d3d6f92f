"""A layer imports itself and the layers before it, and both packages import nothing that their users may lack."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "relive"
_, _, _MAP, *_ = re.split(r"^```$", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
LAYERS = [
    name for line in _MAP.strip().splitlines() for name in re.split(r" {2,}", line)[0].split(", ") if name != "csrc"
]
"""Layers in the order of CONTRIBUTING.md."""
LATE_IMPORTERS = {"save", "handle"}
"""Methods that may import a later layer inside the function."""
EXCEPTIONS: set[tuple[str, str]] = {
    ("kernels.priority", "storage"),
}
"""Exceptions: (module, imported module of a later layer). This list only shrinks."""


@cache
def modules() -> dict[str, ast.Module]:
    """Return the syntax tree of every module of the package by its dotted name below `relive`."""
    named = {".".join(file.relative_to(SOURCE).with_suffix("").parts): file for file in sorted(SOURCE.rglob("*.py"))}
    return {name.removesuffix(".__init__"): ast.parse(file.read_text("utf-8")) for name, file in named.items()}


def imported_modules(tree: ast.AST, late: bool = False) -> Iterator[str]:
    """Yield the imported modules below `relive`, except imports for types and inside `LATE` functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None and not late:
            if node.module == "relive":
                yield from (alias.name for alias in node.names)
            elif node.module.startswith("relive."):
                yield node.module.removeprefix("relive.")
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        else:
            yield from imported_modules(
                node, late or (isinstance(node, ast.FunctionDef) and node.name in LATE_IMPORTERS)
            )


def test_layers_import_only_the_layers_before_them() -> None:
    forward = {
        (name, used)
        for name, tree in modules().items()
        if name not in ("__init__", "__main__")
        for used in imported_modules(tree)
        if used.split(".")[0] in LAYERS and LAYERS.index(used.split(".")[0]) > LAYERS.index(name.split(".")[0])
    }
    assert forward == EXCEPTIONS


def used_modules(tree: ast.Module) -> set[str]:
    """Return the top-level modules that code imports anywhere."""
    nodes = list(ast.walk(tree))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return {name.split(".")[0] for name in names}


def test_the_package_imports_no_development_tool() -> None:
    # `relive conformance` runs relive_conformance by name, if it is installed.
    tools = {"relive_conformance", "benchmarks", "examples", "tests", "tools"}
    assert {name for name, tree in modules().items() if used_modules(tree) & tools} == set()


def test_the_conformance_suite_needs_torch_numpy_and_gymnasium_only() -> None:
    package = ROOT / "conformance"
    known = {"torch", "numpy", "gymnasium", "pytest", "relive_conformance", *sys.stdlib_module_names}
    foreign = {file: used_modules(ast.parse(file.read_text("utf-8"))) - known for file in package.rglob("*.py")}
    adapters = package / "relive_conformance" / "adapters"  # each needs its library
    assert {file: names for file, names in foreign.items() if names and file.parent != adapters} == {}
    assert [file.name for file, names in foreign.items() if "relive" in names] == ["relive.py"]
