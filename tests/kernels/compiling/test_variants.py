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

from benchmarks.compile_kernels import TARGETS, Usage, variants

triton = pytest.importorskip("triton", reason="needs Triton: pip install 'relive[triton]'")
ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "src" / "relive"


def find_jitted(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    """Yield the functions under `@triton.jit`, with or without arguments."""
    for node in ast.walk(tree):
        decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
        if any(ast.unparse(each).startswith("triton.jit") for each in decorators):
            assert isinstance(node, ast.FunctionDef)
            yield node


def find_kernels(sources: list[str]) -> set[str]:
    """Return the names of launched kernels: jitted functions that no jitted function calls."""
    functions = [function for source in sources for function in find_jitted(ast.parse(source))]
    calls = [node for function in functions for node in ast.walk(function) if isinstance(node, ast.Call)]
    called = {node.func.id for node in calls if isinstance(node.func, ast.Name)}
    names = [function.name for function in functions if function.name not in called]
    assert len(names) == len(set(names)), f"expected unique names of kernels, got {sorted(names)}"
    return set(names)


def compile_kernels(*arguments: str, cache: Path, triton: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run the command in a new process with an empty cache, with the Triton in a folder or the installed one."""
    paths = os.pathsep.join(map(str, (triton, ROOT / "src", ROOT)))
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": paths, "TRITON_CACHE_DIR": str(cache), "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-m", "benchmarks.compile_kernels", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def read_rows(output: str) -> list[Usage]:
    return [Usage(**json.loads(line)) for line in output.splitlines()]


def test_every_kernel_is_launched_by_some_call() -> None:
    sources = [file.read_text(encoding="utf-8") for file in SOURCE.rglob("*.py")]
    assert {variant.kernel.__name__ for variant in variants()} == find_kernels(sources)


def test_a_forgotten_kernel_would_be_found() -> None:
    helper = "@triton.jit\ndef helper(x): return x\n"
    kernels = "@triton.jit(do_not_specialize=['n'])\ndef one(x): helper(x)\n@triton.jit\ndef two(x): helper(x)\n"
    assert find_kernels([helper, kernels + "def three(): one[(1,)](2)"]) == {"one", "two"}


ONE_VARIANT = ("--kernel", "draw_rows", "--call", "1 environment")


@pytest.mark.thorough
def test_a_kernel_compiles_without_spills(tmp_path: Path) -> None:
    done = compile_kernels(*ONE_VARIANT, "--target", "sm_90", cache=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [(row.target, row.spilled) for row in read_rows(done.stdout)] == [("sm_90", 0)]


@pytest.mark.thorough
def test_a_spill_is_reported(tmp_path: Path) -> None:
    done = compile_kernels(*ONE_VARIANT, "--target", "sm_80", "--max-registers", "16", cache=tmp_path)
    assert done.returncode == 1, done.stderr
    assert read_rows(done.stdout)[0].spilled


@pytest.mark.thorough
def test_all_kernels_compile_with_the_registers_that_the_guide_states(tmp_path: Path) -> None:
    done = compile_kernels(cache=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read_rows(done.stdout)
    assert {(row.kernel, row.target) for row in rows} == {
        (variant.kernel.__name__, target) for variant in variants() for target in TARGETS
    }
    assert max(row.registers or 0 for row in rows) <= 128
    spills = [(row.kernel, row.call, row.target) for row in rows if row.spilled]
    assert spills in ([], [("read_kernel", "an image and 48 floats", "sm_80")])
