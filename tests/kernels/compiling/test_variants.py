"""Every kernel is compiled ahead of time for three GPUs."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.compile_kernels import TARGETS, Usage, page, variants

triton = pytest.importorskip("triton", reason="needs Triton: pip install 'relive[triton]'")
ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "src" / "relive"
PAGE = ROOT / "docs" / "compiled_kernels.md"


def jitted(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    """The functions under `@triton.jit`, with or without arguments."""
    for node in ast.walk(tree):
        decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
        if any(ast.unparse(each).startswith("triton.jit") for each in decorators):
            assert isinstance(node, ast.FunctionDef)
            yield node


def entries(sources: list[str]) -> set[str]:
    """The kernels that are launched: jitted functions that no jitted function calls."""
    found = [function for source in sources for function in jitted(ast.parse(source))]
    calls = [node for function in found for node in ast.walk(function) if isinstance(node, ast.Call)]
    called = {node.func.id for node in calls if isinstance(node.func, ast.Name)}
    launched = [function.name for function in found if function.name not in called]
    assert len(launched) == len(set(launched)), f"kernels need names of their own: {sorted(launched)}"
    return set(launched)


def run(*arguments: str, cache: Path, triton: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Compile in a process of its own, with nothing compiled before, by the Triton in a folder or the installed one."""
    paths = os.pathsep.join(map(str, (triton, ROOT / "src", ROOT)))
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": paths, "TRITON_CACHE_DIR": str(cache), "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-m", "benchmarks.compile_kernels", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def rows(told: str) -> list[Usage]:
    return [Usage(**json.loads(line)) for line in told.splitlines()]


def test_every_kernel_that_is_launched_has_a_variant() -> None:
    sources = [file.read_text(encoding="utf-8") for file in SOURCE.rglob("*.py")]
    assert {variant.kernel.__name__ for variant in variants()} == entries(sources)


def test_a_forgotten_kernel_would_be_found() -> None:
    helper = "@triton.jit\ndef helper(x): return x\n"
    kernels = "@triton.jit(do_not_specialize=['n'])\ndef one(x): helper(x)\n@triton.jit\ndef two(x): helper(x)\n"
    assert entries([helper, kernels + "def three(): one[(1,)](2)"]) == {"one", "two"}


def test_the_docs_have_every_variant_on_every_target() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    names = [(f"`{variant.kernel.__name__}`", variant.name) for variant in variants()]
    expected = {(*name, target) for name in names for target in TARGETS}
    assert {tuple(line.strip("| ").split(" | ")[:3]) for line in lines if line.startswith("| `")} == expected
    assert len(names) == len(set(names))


@pytest.mark.thorough
def test_a_kernel_compiles_without_spills(tmp_path: Path) -> None:
    done = run("--kernel", "draw_rows", "--variant", "1 environment", "--target", "sm_90", cache=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [(row.target, row.spilled) for row in rows(done.stdout)] == [("sm_90", 0)]


@pytest.mark.thorough
def test_a_spill_is_reported(tmp_path: Path) -> None:
    few = ("--kernel", "draw_rows", "--variant", "1 environment", "--target", "sm_80", "--most-registers", "16")
    done = run(*few, cache=tmp_path)
    assert done.returncode == 1, done.stderr
    assert rows(done.stdout)[0].spilled


@pytest.mark.thorough
def test_all_kernels_compile_as_the_docs_say(tmp_path: Path) -> None:
    done = run(cache=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    kept = PAGE.read_text(encoding="utf-8")
    if triton.__version__ not in kept:
        pytest.skip(f"the docs are not of Triton {triton.__version__}: registers may differ")
    assert page(rows(done.stdout)) == kept, "write it again: python -m benchmarks.compile_kernels --page …"
