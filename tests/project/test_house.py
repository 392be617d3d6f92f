"""The house: rooms use themselves and the rooms before them, and keep their private names to themselves."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import relive

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "relive"
ROOMS = (
    "errors", "lazy", "locking", "rng", "schema", "kernels", "storage", "checkpoint", "estimators", "statistics",
    "rollout", "replay", "distillation", "concurrent", "distributed", "datasets", "inspector",
    "compat", "cli", "gpu_report",
)  # fmt: skip
LATE = {"save", "handle"}
"""Functions that may import a later room: the buffer's method is only the door to it."""
EXCEPTIONS: set[tuple[str, str]] = {
    ("kernels.priority", "storage"),
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


def reached(tree: ast.Module) -> Iterator[str]:
    """Private names of other modules' objects that code touches: `x._name`, where no class here has that name."""
    nodes = list(ast.walk(tree))
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    of_self = [isinstance(node.value, ast.Name) and node.value.id in ("self", "cls") for node in attributes]
    own |= {node.attr for node, is_own in zip(attributes, of_self, strict=True) if is_own}
    for node in attributes:
        foreign = isinstance(node.value, ast.Name) and node.value.id in ("os", "sys", "torch", "np", "TensorDict")
        if node.attr.startswith("_") and not node.attr.startswith("__") and node.attr not in own and not foreign:
            yield node.attr


MOST_REACHED = 36
"""How often modules reach into each other. This number only shrinks; it was 207 before the house was built."""


def test_modules_keep_their_private_names_to_themselves() -> None:
    found = {name: list(reached(tree)) for name, tree in modules()}
    assert sum(map(len, found.values())) <= MOST_REACHED, {name: names for name, names in found.items() if names}


def test_every_room_is_in_its_place() -> None:
    found = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert found - {"__init__", "__main__"} == set(ROOMS)
    assert relive.__file__ is not None


def test_the_tests_have_the_same_rooms() -> None:
    tests = Path(__file__).parents[1]
    assert {path.stem.removeprefix("test_") for path in tests.glob("test_*.py")} <= set(ROOMS)
    folders = {path.parent.name for path in tests.glob("*/__init__.py")}
    beside = {
        "benchmarks",
        "buffers",
        "conformance",
        "devices",
        "examples",
        "faults",
        "project",
        "reference",
        "sanitizers",
        "tools",
    }
    assert folders - beside == {room for room in ROOMS if (SOURCE / room).is_dir()}


def used_modules(file: Path) -> set[str]:
    """The top-level modules that a file imports anywhere."""
    nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return {name.split(".")[0] for name in names}


def test_the_package_imports_no_tool_beside_it() -> None:
    # `relive conformance` runs relive_conformance by its name, where it is installed.
    tools = {"relive_conformance", "benchmarks", "examples", "tests", "tools"}
    assert {file.name for file in SOURCE.rglob("*.py") if used_modules(file) & tools} == set()


def test_the_conformance_suite_needs_torch_numpy_and_gymnasium_only() -> None:
    package = ROOT / "conformance"
    known = {"torch", "numpy", "gymnasium", "pytest", "relive_conformance", *sys.stdlib_module_names}
    foreign = {file: used_modules(file) - known for file in package.rglob("*.py")}
    adapters = package / "relive_conformance" / "adapters"  # each is imported where its library is
    assert {file: names for file, names in foreign.items() if names and file.parent != adapters} == {}
    assert [file.name for file, names in foreign.items() if "relive" in names] == ["relive.py"]
