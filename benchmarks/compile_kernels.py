"""Compile every Triton kernel ahead of time for three GPUs, of which none is needed, and print the used resources.

    python -m benchmarks.compile_kernels                   a line of JSON per variant and target
    python -m benchmarks.compile_kernels --page FILE.md    also a table

Calls of buffers and samplers are made with launches that are only recorded. Each recorded combination of a kernel,
argument types and constants is compiled. The command fails if a kernel does not compile or spills more than
`MAX_SPILLED` bytes per thread.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import torch

import relive as rl
from relive.schema.fields import caller_field, map_leaves

TARGETS = {"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64)}
_TYPES = {
    torch.bool: "i1", torch.uint8: "u8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64",
}  # fmt: skip


MAX_SPILLED = 8
"""NVIDIA's assembler may store and load one word to stay below 33 registers per thread."""


class Variant(NamedTuple):
    """One compiled form of a kernel."""

    kernel: Any
    """The function under `@triton.jit`."""
    call: str
    """The call that launches it."""
    types: tuple[Any, ...]
    """Types of the arguments: "*fp32" for a pointer, the class of a number, a tuple of types for a tuple."""
    constants: dict[str, Any]
    """Values of the `tl.constexpr` parameters."""
    options: dict[str, Any]
    """Launch options: `num_warps`, `enable_fp_fusion`."""


class Usage(NamedTuple):
    """Resources that one variant uses on one target."""

    kernel: str
    call: str
    target: str
    registers: int | None
    """Registers per thread; on gfx942 the vector registers. Triton 3.4 drops the report of NVIDIA's assembler."""
    spilled: int | None
    """Spilled bytes per thread; on gfx942 spilled registers."""
    shared: int
    """Bytes of shared memory per program."""


def calls() -> dict[str, Callable[[], object]]:
    """Return calls that together launch every kernel, in the forms that differ most."""
    rewards = {str(dtype)[6:]: rl.Field((), dtype) for dtype in (torch.float64, torch.float16, torch.bfloat16)}
    hidden = {"hidden": rl.Carry(256, torch.bfloat16)}
    image = rl.Field((84, 84, 4), torch.uint8)
    frame = rl.Field((84, 84), torch.uint8)
    return {
        "transitions of 48 floats": lambda: _replay().sample(256),
        "3 steps": lambda: _replay().sample(256, rl.NStep(3, 0.99)),
        "5 steps, three rewards": lambda: _replay(reward=rewards).sample(256, rl.NStep(5, 0.99)),
        "sequences of 16": lambda: _replay(extra=hidden).sample(256, rl.Sequence(16)),
        "burn-in of 8": lambda: _replay().sample(256, rl.Sequence(16, 8)),
        "burn-in of 8, crossing": lambda: _replay().sample(256, rl.Sequence(16, 8, True)),
        "sequences of 1,024, crossing": lambda: _replay().sample(8, rl.Sequence(1024, 0, True)),
        "65,536 environments": lambda: _replay(65_536).sample(256),
        "1 environment": lambda: _replay(1).sample(256),
        "NEXT_STEP, env_ids": _add_to_two_envs,
        "next_obs stored": lambda: _replay(next_obs="stored").sample(256),
        "an image and 48 floats": lambda: _replay(64, {"image": image, "state": 48}).sample(256),
        "4 stacked frames": lambda: _replay(64, rl.Stacked(frame, 4)).sample(256),
        "4 stacked frames along the first axis, zeros": lambda: _replay(64, rl.Stacked(frame, 4, 0, "zero")).sample(
            256
        ),
        "prioritized": lambda: _prioritize("batch"),
        "prioritized, weights by all": lambda: _prioritize("global"),
        "uniform numbers": _draw_numbers,
        "masses of leaves": _set_leaves,
    }


def _replay(num_envs: int = 4096, obs: Any = 48, **options: Any) -> rl.ReplayBuffer:
    """Return a buffer with one step."""
    replay = rl.ReplayBuffer(16 * num_envs, obs, 12, num_envs=num_envs, seed=0, **options)
    replay.add(**_make_step(replay, num_envs))
    return replay


def _make_step(replay: rl.ReplayBuffer, num_envs: int) -> dict[str, Any]:
    def zeros(field: Any) -> torch.Tensor:
        return torch.zeros(num_envs, *caller_field(field).shape, dtype=field.dtype)

    step = {name: map_leaves(zeros, tree) for name, tree in replay.storage.schema.trees.items()}
    return {**step, "next_obs": map_leaves(zeros, replay.storage.schema.trees["obs"])}


def _add_to_two_envs() -> None:
    replay = _replay(autoreset="NEXT_STEP")
    replay.add(**_make_step(replay, 2), env_ids=torch.tensor([1, 3]))


def _prioritize(normalize: Literal["batch", "global"]) -> None:
    replay = _replay(sampler=rl.Prioritized(normalize=normalize))
    replay.update_priority(replay.sample(256)["index"], torch.ones(256))


def _draw_numbers() -> None:
    _replay().storage.make_random(0).uniform(256, torch.device("cpu"))


def _set_leaves() -> None:
    _replay(sampler=rl.Prioritized()).storage.priority_tree().set(torch.zeros(256, dtype=torch.int64), 1.0)


def variants() -> list[Variant]:
    """Return every variant that the calls launch, without launching it."""
    from relive.kernels.triton.launching import BoundKernel

    result: dict[Any, Variant] = {}
    current = "probe"

    def record(launch: Any, near: torch.Tensor, grid: Any, *arguments: Any, **varying: Any) -> None:
        kernel = launch._kernel
        types = tuple(map(_get_type, (*launch.view_arguments_as_words(arguments), *launch._fixed)))
        settings = launch._constants | varying
        constants = {name: settings[name] for name in kernel.arg_names if name in settings}
        options = {name: value for name, value in settings.items() if name not in constants}
        key = kernel.__name__, types, *constants.items()
        result.setdefault(key, Variant(kernel, current, types, constants, options))

    with patch.object(BoundKernel, "__call__", record), rl.kernels.force("triton"):
        for current, call in calls().items():  # noqa: B007 (`record` reads it)
            call()
    return list(result.values())


def _get_type(argument: Any) -> Any:
    """Return the type of an argument: a pointer in Triton's notation, or the class of a number."""
    if isinstance(argument, tuple):
        return tuple(map(_get_type, argument))
    return f"*{_TYPES[argument.dtype]}" if isinstance(argument, torch.Tensor) else type(argument)


def _get_signature(kind: Any, parameter: Any) -> Any:
    """Return the type of a parameter in Triton's notation."""
    if kind is int and not parameter.do_not_specialize:
        raise TypeError(f"{parameter.name}: expected a name in SIZES, or each new size compiles the kernel again")
    return parameter.annotation_type if isinstance(kind, type) else kind


def compile_variant(variant: Variant, target: str, **options: Any) -> Usage:
    """Compile a variant for a target and return its resources."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = variant.kernel
    names = [parameter.name for parameter in kernel.params]
    types = [*map(_get_signature, variant.types, kernel.params), *("constexpr" for _ in variant.constants)]
    signature = dict(zip(names, types, strict=True))
    constants = {(names.index(name),): value for name, value in variant.constants.items()}
    aligned = {path: [["tt.divisibility", 16]] for path in _find_pointers(variant.types)}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    knobs.compilation.always_compile = knobs.nvidia.dump_ptxas_log = True
    amd: Any = knobs.amd
    if hasattr(amd, "lld_path"):  # Triton 3.4 calls ROCm's linker, which its wheel lacks: the assembly is enough
        amd.lld_path = amd.lld_path or shutil.which("true")
    output = io.StringIO()
    with redirect_stdout(output):  # NVIDIA's assembler reports its resources here
        result: Any = triton.compile(source, target=GPUTarget(*TARGETS[target]), options={**variant.options, **options})
    is_amd = target.startswith("gfx")
    used = _read_amd_usage(result.asm["amdgcn"]) if is_amd else _read_nvidia_usage(output.getvalue())
    return Usage(kernel.__name__, variant.call, target, *used, result.metadata.shared)


def _find_pointers(types: tuple[Any, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the paths of all pointers: memory of tensors is aligned to 16 bytes."""
    for i, name in enumerate(types):
        if isinstance(name, tuple):
            yield from ((i, j) for j in range(len(name)))
        elif isinstance(name, str):
            yield (i,)


def _read_nvidia_usage(output: str) -> tuple[int | None, int | None]:
    """Return registers and spilled bytes; None if Triton does not report them."""
    if not output:
        return None, None
    return _find_number(r"Used (\d+) registers", output), sum(map(int, re.findall(r"(\d+) bytes spill", output)))


def _read_amd_usage(assembly: str) -> tuple[int, int]:
    """Return vector registers and spilled registers."""
    spilled = sum(_find_number(rf"\.{kind}gpr_spill_count:\s*(\d+)", assembly) for kind in "vs")
    return _find_number(r"\.vgpr_count:\s*(\d+)", assembly), spilled


def _find_number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"output of the assembler: expected {pattern}, got {text[:300]!r}")
    return int(match[1])


def make_table(rows: Sequence[Usage]) -> str:
    """Return a Markdown table of the used resources."""
    lines = ["| kernel | call | target | registers | spills | shared memory |", "|---|---|---|--:|--:|--:|"]
    return "\n".join(lines + [f"| `{row[0]}` | " + " | ".join(map(str, row[1:])) + " |" for row in rows]) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, and print a line of JSON per variant and target."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compile_kernels")
    parser.add_argument("--list", action="store_true", help="print the kernel of every variant, and compile nothing")
    parser.add_argument("--page", type=Path, help="a file for the table")
    parser.add_argument("--target", action="append", choices=TARGETS, help="default: all of them")
    parser.add_argument("--kernel", default="", help="only kernels whose name contains this")
    parser.add_argument("--call", default="", help="only the variants that this call launches first")
    parser.add_argument("--max-registers", type=int, help="per thread on NVIDIA, to see spills reported")
    parser.add_argument("--may-spill", action="store_true", help="fail only if a kernel does not compile")
    chosen = parser.parse_args(arguments)
    if os.environ.pop("TRITON_INTERPRET", "0") == "1" and "triton" in sys.modules:
        parser.error("Triton was imported as an interpreter: run this in a process of its own")
    import triton

    print(f"Triton {triton.__version__}", file=sys.stderr)
    if chosen.list:
        print("\n".join(variant.kernel.__name__ for variant in variants()))
        return 0
    options = {} if chosen.max_registers is None else {"maxnreg": chosen.max_registers}
    rows = []
    for variant in variants():
        if chosen.kernel not in variant.kernel.__name__ or chosen.call not in ("", variant.call):
            continue
        for target in chosen.target or TARGETS:
            rows.append(compile_variant(variant, target, **options))
            print(json.dumps(rows[-1]._asdict(), ensure_ascii=False), flush=True)
    if chosen.page is not None:
        chosen.page.write_text(make_table(rows), encoding="utf-8")
    return int(not chosen.may_spill and any((row.spilled or 0) > MAX_SPILLED for row in rows))


if __name__ == "__main__":
    sys.exit(main())
