"""`torch.set_default_device` affects the user's tensors only: the library passes `device=` for every tensor."""

from __future__ import annotations

import ast
import copy
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._device import _device_constructors  # pyright: ignore[reportPrivateImportUsage]

import relive as rl
from tests.checkpoint.traffic import KINDS, digest, equal, make_replay, step_replay
from tests.tiers import select

SOURCES = Path(rl.__file__).parent
PROGRAMS = ("cli.py", "gpu_report.py")
"""Commands and adapters' drivers, which are separate programs."""


@pytest.fixture
def default_device() -> Iterator[Callable[[str | None], None]]:
    yield torch.set_default_device
    torch.set_default_device(None)


def run_history(kind: str, folder: Path) -> list[Any]:
    """Return batches of a buffer, of its copies and of its checkpoint."""
    scenario = KINDS[kind]
    buffer = scenario.make()
    results: list[Any] = []
    for n in range(60):
        scenario.act(buffer, n)
        if n % 20 == 19:
            results.append(scenario.read(buffer))
    buffer.save(folder / kind)
    fresh = scenario.make()
    fresh.load_state_dict(buffer.state_dict())
    for each in (rl.load(folder / kind), copy.deepcopy(buffer), pickle.loads(pickle.dumps(buffer)), fresh):
        each.check()
        results.append(digest(each)[1:])
        results.append(scenario.read(each))
    return results


@pytest.mark.parametrize("kind", select("uniform", "prioritized", "rollout", "distillation", of=KINDS))
def test_buffers_on_the_host_do_the_same_under_any_default_device(
    kind: str, backend: str, default_device: Callable[[str | None], None], tmp_path: Path
) -> None:
    usual = run_history(kind, tmp_path / "usual")
    default_device("meta")
    under = run_history(kind, tmp_path / "under")
    default_device(None)
    assert equal(usual, under)


@pytest.mark.parametrize("sampler", [rl.Prioritized(), rl.Recent(5), rl.NewFirst()])
def test_samplers_views_and_helpers_do_the_same_under_any_default_device(
    sampler: Any, default_device: Callable[[str | None], None]
) -> None:
    def read() -> list[Any]:
        replay = make_replay(sampler)
        for n in range(40):
            step_replay(replay, n)
        window = rl.Window(obs=[-1, 0])
        batches = [replay.sample(4, view).to_dict() for view in (rl.NStep(2, 0.9), rl.Sequence(3, burn_in=1), window)]
        batches += [replay[replay.ids()].to_dict(), *(episode.to_dict() for episode in replay.episodes())]
        batches.append(rl.Mixture({"a": replay}, {"a": 1.0}).sample(4).to_dict())
        # Prefetching comes last, because its thread draws more rows.
        with rl.prefetch(replay, 4) as coming:
            batches.append(next(iter(coming)).to_dict())
        return [*batches, replay.stats.summary() if replay.stats else {}]

    usual = read()
    default_device("meta")
    under = read()
    default_device(None)
    assert equal(usual, under)


def test_disk_and_shared_memory_are_on_the_host_under_any_default_device(
    default_device: Callable[[str | None], None], tmp_path: Path
) -> None:
    if rl.kernels.native_core() is None:
        pytest.skip("this install has no native core (no compiler)")
    default_device("meta")
    for memory in (rl.Memory.disk(tmp_path / "disk"), rl.Memory.shared()):
        uncounted = {"stats": None, "norm": None} if memory.is_shared else {}
        replay = make_replay(rl.Prioritized(), device=memory, **uncounted)
        for n in range(30):
            step_replay(replay, n)
        replay.check()
        assert replay.sample(4)["obs"].device.type == "cpu"
        replay.close()
    reopened: Any = rl.load(tmp_path / "disk")
    assert reopened.sample(4)["obs"].is_cpu


@pytest.mark.promise("G3")
def test_every_tensor_constructor_passes_a_device() -> None:
    makers = {function.__name__ for function in _device_constructors()}
    assert {"zeros", "tensor", "as_tensor", "arange"} <= makers
    silent = [
        f"{path.relative_to(SOURCES)}:{call.lineno}: {ast.unparse(call)}"
        for path in SOURCES.rglob("*.py")
        if path.relative_to(SOURCES).parts[0] not in PROGRAMS
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and _constructor_name(call) in makers
        if not any(keyword.arg in ("device", None) for keyword in call.keywords)
    ]
    assert silent == []


def _constructor_name(call: ast.Call) -> str | None:
    """Return the name of a call of `torch.<name>`."""
    function = call.func
    is_torch = (
        isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id == "torch"
    )
    return function.attr if is_torch else None  # pyright: ignore[reportAttributeAccessIssue]


def test_a_rollout_computes_the_same_under_any_default_device(default_device: Callable[[str | None], None]) -> None:
    def advantage() -> torch.Tensor:
        reward, value = np.ones((4, 2), np.float32), np.full((4, 2), 0.5, np.float32)
        never = np.zeros((4, 2), bool)
        tensors = (torch.from_numpy(x) for x in (reward, value, value, never, never))
        return rl.gae(*tensors, gamma=0.9, lam=0.8)[0]

    usual = advantage()
    default_device("meta")
    assert torch.equal(advantage(), usual)


@pytest.mark.thorough
def test_the_first_batch_of_a_process_works_under_any_default_device() -> None:
    program = (
        "import torch, relive as rl; r = rl.ReplayBuffer(20, obs=2, action=());"
        "r.add([0, 0.0], 0.0, 1.0, False, False, [1, 0.0]); torch.set_default_device('meta');"
        "assert r.sample(2)['reward'].tolist() == [1.0, 1.0]"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
