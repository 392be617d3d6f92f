"""Compile every Triton kernel ahead of time for three GPUs (none is needed) and write a page of used resources.

    python -m benchmarks.compile_kernels --page docs/compiled_kernels.md

Each variant that a module of `relive.kernels.triton` lists is compiled; registers and spills are those that the
assembler reports. It fails if a kernel does not compile or spills registers.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import os
import pkgutil
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

TARGETS = {"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64)}


class Usage(NamedTuple):
    """Resources that one variant uses on one target."""

    kernel: str
    variant: str
    target: str
    registers: int | None
    """Registers per thread; on gfx942 the vector registers. Triton 3.4 drops the report of NVIDIA's assembler."""
    spilled: int | None
    """Spilled bytes per thread; on gfx942 spilled registers."""
    shared: int
    """Bytes of shared memory per program."""


def variants() -> Iterator[Any]:
    """Yield every variant listed by a module of `relive.kernels.triton`."""
    package = importlib.import_module("relive.kernels.triton")
    for found in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{found.name}")
        yield from getattr(module, "VARIANTS", ())


def compiled(variant: Any, target: str, **options: Any) -> Usage:
    """Compile a variant for a target and return its resources."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = variant.kernel
    names = [parameter.name for parameter in kernel.params]
    signature = {name: variant.types.get(name, "constexpr") for name in names}
    constants = {(names.index(name),): value for name, value in variant.constants.items()}
    unknown = [name for name in names if (name in variant.types) == (name in variant.constants)]
    if unknown or len(names) != len(variant.types) + len(variant.constants):
        raise TypeError(f"{kernel.__name__} ({variant.name}): a type or a constant for each argument, see {unknown}")
    attributes = {path: [["tt.divisibility", 16]] for path in _aligned(variant, names)}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    knobs.compilation.always_compile = knobs.nvidia.dump_ptxas_log = True
    amd: Any = knobs.amd
    if hasattr(amd, "lld_path"):  # Triton 3.4 calls ROCm's linker, which its wheel lacks: the assembly is enough
        amd.lld_path = amd.lld_path or shutil.which("true")
    told = io.StringIO()
    with redirect_stdout(told):  # report of NVIDIA's assembler
        result: Any = triton.compile(source, target=GPUTarget(*TARGETS[target]), options={**variant.options, **options})
    used = _amd(result.asm["amdgcn"]) if target.startswith("gfx") else _nvidia(told.getvalue())
    return Usage(kernel.__name__, variant.name, target, *used, result.metadata.shared)


def _aligned(variant: Any, names: list[str]) -> Iterator[tuple[int, ...]]:
    """Return the positions of arguments divisible by 16, items of tuples included."""
    for name in variant.aligned:
        types = variant.types[name]
        if isinstance(types, tuple):
            yield from ((names.index(name), i) for i, each in enumerate(types) if each != "constexpr")
        else:
            yield (names.index(name),)


def _nvidia(told: str) -> tuple[int | None, int | None]:
    """Return registers and spilled bytes; None if Triton does not report them."""
    if not told:
        return None, None
    return _number(r"Used (\d+) registers", told), sum(map(int, re.findall(r"(\d+) bytes spill", told)))


def _amd(assembly: str) -> tuple[int, int]:
    spilled = sum(_number(rf"\.{kind}gpr_spill_count:\s*(\d+)", assembly) for kind in "vs")
    return _number(r"\.vgpr_count:\s*(\d+)", assembly), spilled


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"expected {pattern} in what the assembler said, got {text[:300]!r}")
    return int(found[1])


def chosen_variants(kernel: str, name: str) -> Iterator[Any]:
    """Select the variants of kernels whose name contains `kernel`, or the one variant of a given name."""
    for variant in variants():
        if kernel in variant.kernel.__name__ and name in ("", variant.name):
            yield variant


def page(rows: Sequence[Usage]) -> str:
    """Return the page of the docs."""
    import triton

    lines = [
        "# Compiled kernels",
        "",
        "Every Triton kernel of relive, compiled ahead of time by `python -m benchmarks.compile_kernels`",
        f"for three GPUs with Triton {triton.__version__}. Registers are those of a thread (on gfx942 the vector",
        "registers), spills are bytes (on gfx942 registers), shared memory is bytes of a program. No GPU was at hand:",
        "the kernels were compiled, and run by Triton's interpreter, but not on these machines.",
        "",
        "| kernel | variant | target | registers | spills | shared memory |",
        "|---|---|---|--:|--:|--:|",
    ]
    return "\n".join(lines + [f"| `{row[0]}` | " + " | ".join(map(str, row[1:])) + " |" for row in rows]) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, print a line of JSON for each variant and target, and write the page if one is named."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compile_kernels")
    parser.add_argument("--page", type=Path, help="the page to write")
    parser.add_argument("--target", action="append", choices=TARGETS, help="default: all of them")
    parser.add_argument("--kernel", default="", help="only kernels whose name contains this")
    parser.add_argument("--variant", default="", help="only the variant of this name")
    parser.add_argument("--most-registers", type=int, help="of a thread on NVIDIA, to see spills reported")
    parser.add_argument("--may-spill", action="store_true", help="fail only if a kernel does not compile")
    chosen = parser.parse_args(arguments)
    if os.environ.pop("TRITON_INTERPRET", "0") == "1" and "triton" in sys.modules:
        parser.error("Triton was imported as an interpreter: run this in a process of its own")
    import triton

    print(f"Triton {triton.__version__}", file=sys.stderr)
    options = {} if chosen.most_registers is None else {"maxnreg": chosen.most_registers}
    rows = []
    for variant in chosen_variants(chosen.kernel, chosen.variant):
        for target in chosen.target or TARGETS:
            rows.append(compiled(variant, target, **options))
            print(json.dumps(rows[-1]._asdict(), ensure_ascii=False), flush=True)
    if chosen.page is not None:
        chosen.page.write_text(page(rows), encoding="utf-8")
    return 1 if any(row.spilled for row in rows) and not chosen.may_spill else 0


if __name__ == "__main__":
    sys.exit(main())
