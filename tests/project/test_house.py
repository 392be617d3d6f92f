"""The house: rooms use themselves and the rooms before them, and keep their private names to themselves."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import relive

SOURCE = Path(__file__).parents[2] / "src" / "relive"
ROOMS = (
    "errors", "locking", "randomness", "fields", "kernels", "memory", "estimators", "statistics", "rollout", "replay",
    "distillation", "checkpoint", "concurrent", "distributed", "datasets", "inspector", "conformance", "compat", "cli",
)  # fmt: skip
LATE = {"save", "handle"}
"""Functions that may import a later room: the buffer's method is only the door to it."""
EXCEPTIONS: set[tuple[str, str]] = {
    ("kernels.priority", "memory"),
}
"""(module, imported module) that still look forward. This list only shrinks."""


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Every module of the package by its dotted name below `relive`."""
    for file in sorted(SOURCE.rglob("*.py")):
        name = ".".join(file.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
        if name.split(".")[0] in ROOMS:
            yield name, ast.parse(file.read_text(encoding="utf-8"))


def imported(tree: ast.AST, late: bool = False) -> Iterator[str]:
    """The modules below `relive` that code imports, but for types and for what `LATE` functions import."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None and not late:
            if node.module == "relive":
                yield from (alias.name for alias in node.names)
            elif node.module.startswith("relive."):
                yield node.module.removeprefix("relive.")
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        else:
            yield from imported(node, late or (isinstance(node, ast.FunctionDef) and node.name in LATE))


def test_rooms_use_only_the_rooms_before_them() -> None:
    forward = {
        (name, used)
        for name, tree in modules()
        for used in imported(tree)
        if used.split(".")[0] in ROOMS and ROOMS.index(used.split(".")[0]) > ROOMS.index(name.split(".")[0])
    }
    assert forward == EXCEPTIONS


def test_every_room_is_in_its_place() -> None:
    found = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert found - {"__init__", "__main__"} == set(ROOMS)
    assert relive.__file__ is not None


def test_the_tests_have_the_same_rooms() -> None:
    tests = Path(__file__).parents[1]
    assert {path.stem.removeprefix("test_") for path in tests.glob("test_*.py")} <= set(ROOMS)
    folders = {path.parent.name for path in tests.glob("*/__init__.py")}
    beside = {"benchmarks", "buffers", "examples", "faults", "project", "reference", "sanitizers"}
    assert folders - beside == {room for room in ROOMS if (SOURCE / room).is_dir()}
