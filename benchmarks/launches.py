"""Count the operations that each call launches on a device, beside other libraries: `python -m benchmarks.launches`.

Views (a slice, another shape) and allocations are dispatched but launch nothing: they are not counted. A Triton grid is
one launch. Torch ops of ours are counted on the meta device, where the path is that of every device other than the CPU
and reading a number is an error; everything else on CPU tensors. A call of ours that waits for its device fails the
run. The counts are kept in docs/launches.json; `python docs/front_page.py` makes the table of docs/guides/gpu.md of it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

if not torch.cuda.is_available():
    # Read when Triton is imported, which anything below may do: its kernels then run on the host.
    os.environ.setdefault("TRITON_INTERPRET", "1")

import relive as rl
from relive import kernels
from relive.rng import Randomness

from . import launch_peers
from .launch_peers import BATCH, CALLS, NUM_ENVS, OBS, STEPS, Calls, rollout_step, transition

KEPT = Path(__file__).parents[1] / "docs" / "launches.json"
WAITING = (
    "_local_scalar_dense", "nonzero", "item", "is_nonzero", "masked_select", "equal.default", "unique", "bincount",
    "repeat_interleave.Tensor",
)  # fmt: skip
"""Operations that make the host wait for the device."""
_NO_LAUNCH = (
    "aten.detach.",
    "aten.lift_fresh.",
    "aten.promote_types",
    "aten.empty",
    "aten.new_empty",
    "aten._unsafe_view",
)


class Launches(TorchDispatchMode):
    """Records the launched operations, and those of them that wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func)
        if not (func.is_view or name.startswith(_NO_LAUNCH)):
            self.names.append(name)
            if _waits(name, args, kwargs or {}, result):
                self.waits.append(name)
        return result

    def __enter__(self) -> Launches:
        self._grids = ExitStack()
        self._grids.enter_context(_counted_grids(self.names))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._grids.close()


def _waits(name: str, args: Any, kwargs: Mapping[str, Any], result: Any) -> bool:
    if any(word in name for word in WAITING):
        return True
    tensors = [each for each in _flatten((args, kwargs)) if isinstance(each, torch.Tensor)]
    if name.startswith(("aten.index.", "aten.index_put", "aten._index_put")):
        # An index of flags waits: torch counts the flags to know the size of the result.
        indices = [each for each in _flatten(args[1]) if isinstance(each, torch.Tensor)]
        return any(each.dtype in (torch.bool, torch.uint8) for each in indices)
    copies = isinstance(result, torch.Tensor) and name.startswith(("aten._to_copy", "aten.copy", "aten._foreach_copy"))
    return copies and len({each.device for each in (*tensors, result)}) > 1


def _flatten(arguments: Any) -> Iterator[Any]:
    if isinstance(arguments, Mapping):
        arguments = arguments.values()
    if isinstance(arguments, (tuple, list, type({}.values()))):
        for each in arguments:
            yield from _flatten(each)
    else:
        yield arguments


@contextmanager
def _counted_grids(names: list[str]) -> Iterator[None]:
    """Append each grid that Triton's interpreter runs to `names`; its own torch operations are not counted."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None:
        yield
        return
    run = interpreter.GridExecutor.__call__

    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        names.append(f"triton.{self.fn.__name__}")
        with _disable_current_modes():
            run(self, *args, **kwargs)

    with patch.object(interpreter.GridExecutor, "__call__", counted):
        yield


@contextmanager
def _fast_interpreter() -> Iterator[None]:
    """Use Triton's interpreter without its slow emulation of overflows."""
    from triton.runtime import interpreter

    options = interpreter.InterpreterOptions(sanitize_overflow=False)
    with patch.object(interpreter.interpreter_builder, "options", options), np.errstate(all="ignore"):
        yield


def ours(device: str) -> Calls:
    """Return every call of relive by name; each is prepared before it is counted."""
    return {
        "replay add": lambda: _prepare_add(_replay(device)),
        "replay add, prioritized": lambda: _prepare_add(_replay(device, rl.Prioritized())),
        "uniform sample after a write": lambda: _prepare_sample(_replay(device), rl.Transition()),
        "3-step sample": lambda: _prepare_sample(_replay(device), rl.NStep(3, 0.99)),
        "sequences of 16": lambda: _prepare_sample(_replay(device), rl.Sequence(16)),
        "the same with burn-in, across episodes": lambda: _prepare_sample(_replay(device), rl.Sequence(16, 8, True)),
        "prioritized draw and update": lambda: _prepare_prioritized_update(_replay(device, rl.Prioritized())),
        "GAE of 24 steps": lambda: _prepare_gae(device),
        "minibatch of a rollout": lambda: _prepare_minibatch(_rollout(device).minibatches(BATCH, epochs=2)),
        "rollout add": lambda: _prepare_rollout_add(_rollout(device, full=False), device),
    }


def _replay(device: str, sampler: Any = None) -> rl.ReplayBuffer:
    """Return a buffer that was sampled and updated before: caches exist."""
    rows = 256 if device == "meta" else 32
    replay = rl.ReplayBuffer(
        rows * NUM_ENVS, OBS, launch_peers.ACTION, num_envs=NUM_ENVS, sampler=sampler, device=device, seed=0
    )
    for _ in range(2):
        replay.add(**transition(device))
        batch = replay.sample(BATCH)
        if sampler is not None:
            replay.update_priority(batch["index"], torch.ones(BATCH, device=device))
    replay.add(**transition(device))
    return replay


def _prepare_add(replay: rl.ReplayBuffer) -> Callable[[], object]:
    step = transition(str(replay.device))
    return lambda: replay.add(**step)


def _prepare_sample(replay: rl.ReplayBuffer, view: Any) -> Callable[[], object]:
    replay.sample(BATCH, view)
    replay.add(**transition(str(replay.device)))
    return lambda: replay.sample(BATCH, view)


def _prepare_prioritized_update(replay: rl.ReplayBuffer) -> Callable[[], object]:
    priority = torch.ones(BATCH, device=replay.device)
    return lambda: replay.update_priority(replay.sample(BATCH)["index"], priority)


def _prepare_gae(device: str) -> Callable[[], object]:
    numbers = [torch.zeros(STEPS, NUM_ENVS, device=device) for _ in range(3)]
    flags = [torch.zeros(STEPS, NUM_ENVS, dtype=torch.bool, device=device) for _ in range(2)]
    return lambda: rl.gae(*numbers, *flags, gamma=0.99, lam=0.95)


def _rollout(device: str, *, full: bool = True) -> rl.RolloutBuffer:
    rollout = rl.RolloutBuffer(STEPS, NUM_ENVS, OBS, launch_peers.ACTION, device=device, seed=0)
    for _ in range(STEPS if full else 1):
        rollout.add(**rollout_step(device))
    if full:
        rollout.attach(advantage=torch.zeros(STEPS, NUM_ENVS, device=device))
        rollout.attach({"return": torch.zeros(STEPS, NUM_ENVS, device=device)})
    return rollout


def _prepare_rollout_add(rollout: rl.RolloutBuffer, device: str) -> Callable[[], object]:
    step = rollout_step(device)
    return lambda: rollout.add(**step)


def _prepare_minibatch(batches: Iterator[Any]) -> Callable[[], object]:
    next(batches)  # an epoch is shuffled when it starts
    return lambda: next(batches)


def counted(calls: Calls) -> dict[str, Launches]:
    """Return the launches of every call by name."""
    found = {}
    for name, prepare in calls.items():
        call = prepare()
        with Launches() as launches:
            call()
        found[name] = launches
    return found


def of_ours(backend: Literal["torch", "triton"], device: str) -> dict[str, str]:
    """Return the counts of relive with one kind of kernels; raise if a call waits."""
    # Meta tensors have no generator: torch's default one launches as much.
    unseeded: AbstractContextManager[Any] = nullcontext()
    if device == "meta":
        unseeded = patch.object(Randomness, "generator", lambda *_: None)
    quick = _fast_interpreter() if backend == "triton" else nullcontext()
    with kernels.force(backend), quick, unseeded:
        found = counted(ours(device))
    for name, launches in found.items():
        if launches.waits:
            raise SystemExit(f"{name} with {backend} kernels waits for its device: {', '.join(launches.waits)}")
    return _format_counts(found)


def _format_counts(found: Mapping[str, Launches]) -> dict[str, str]:
    return {name: str(len(one.names)) + _with_waits(len(one.waits)) for name, one in found.items()}


def _with_waits(count: int) -> str:
    return "" if not count else ", 1 wait" if count == 1 else f", {count} waits"


def main(arguments: Sequence[str] | None = None) -> int:
    """Count, store and print the launches. Stored columns of libraries that are not installed stay."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.launches", description=__doc__)
    parser.add_argument("--fasttd3", metavar="PATH", type=Path, help="the file fast_td3_utils.py of a clone of FastTD3")
    parser.add_argument("--json", metavar="FILE", type=Path, default=KEPT, help="where counts are kept")
    options = parser.parse_args(arguments)
    tables = json.loads(options.json.read_text(encoding="utf-8")) if options.json.exists() else {}
    tables["relive, torch ops"] = of_ours("torch", "meta")
    of_ours("torch", "cpu")  # raises if a call waits on CPU tensors
    if find_spec("triton") is not None and not torch.cuda.is_available():
        tables["relive, Triton"] = of_ours("triton", "cpu")
    for title, calls in launch_peers.installed_peers(options.fasttd3):
        tables[title] = _format_counts(counted(calls))
    options.json.write_text(json.dumps(tables, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for name in CALLS:
        print(name, {title: counts.get(name, "–") for title, counts in tables.items()})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
