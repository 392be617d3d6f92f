"""Canaries: deliberately broken variants, each of which a check must detect."""

from __future__ import annotations

import copy
import importlib
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase

import relive as rl
from relive import kernels
from relive.checkpoint import saving
from relive.kernels import priority
from relive.kernels.priority import PriorityTree, make_priority_tree
from relive.replay.native_backend import NativeBackend
from relive.replay.ring import Ring
from relive.rollout.storage import Storage as RolloutStorage
from relive.statistics import norm as moments
from tests.buffers.test_threads import run_at_once
from tests.faults import test_j_streams as streams
from tests.faults import test_k_machines as machines
from tests.faults import test_numbers as numbers
from tests.faults.test_abuse import Case, complaint, forget, prioritized, replay, right  # noqa: F401 (a fixture)
from tests.faults.traffic import Traffic

pytestmark = pytest.mark.thorough

CPU = torch.device("cpu")


class DifferenceTree:
    """A priority tree that updates its total by differences, in a given dtype."""

    def __init__(self, num_leaves: int, dtype: type[np.floating[Any]]) -> None:
        self.num_leaves = num_leaves
        self._leaves, self._total = np.zeros(num_leaves), dtype(0)

    def set(self, leaves: torch.Tensor, priorities: torch.Tensor) -> None:
        for leaf, value in zip(leaves.tolist(), priorities.tolist(), strict=True):
            self._total += type(self._total)(value - self._leaves[leaf])
            self._leaves[leaf] = value

    def total_priority(self) -> float:
        return float(self._total)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_tree_that_corrects_its_sums_drifts(dtype: Any) -> None:
    tree: Any = DifferenceTree(1 << 17, dtype)
    assert numbers.drift(tree, 100_000) > 1e-9


def test_a_tree_of_float32_drifts(monkeypatch: pytest.MonkeyPatch) -> None:
    def narrow(tree: Any, blocks: torch.Tensor) -> None:
        tree._normal[blocks] = (tree._blocks[blocks].float() * priority._NORMAL).sum(1).double()

    with rl.kernels.force_torch():
        tree: PriorityTree = make_priority_tree(1 << 17, CPU)
    monkeypatch.setattr(type(tree), "_recompute_sums", narrow)
    monkeypatch.setattr(type(tree), "rebuild", lambda tree: narrow(tree, torch.arange(len(tree._blocks))))
    assert numbers.drift(tree, 100_000) > 1e-9


def test_weights_of_zero_are_detected() -> None:
    batch = numbers.prioritized([1e-320, 1e308], eps=0.0, alpha=1.0, beta=1.0, normalize="global").sample(50)
    numbers.check_weights(batch, [1e-320, 1e308], "global", 1.0)
    batch["weight"] = torch.where(batch["weight"] < 1e-30, 0.0, batch["weight"])
    with pytest.raises(AssertionError):
        numbers.check_weights(batch, [1e-320, 1e308], "global", 1.0)


@pytest.mark.parametrize("broken", ["ids of 32 bits", "heads in float64"])
def test_narrow_counters_are_detected(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    of = Ring.ids_at
    narrow = {"ids of 32 bits": lambda x: x.int().long(), "heads in float64": lambda x: (x.double() + 0.0).long()}
    monkeypatch.setattr("relive.replay.ring.Ring.ids_at", lambda ring, slots: narrow[broken](of(ring, slots)))
    border = 2**31 if "32" in broken else 2**53
    with rl.kernels.force_torch(), pytest.raises((AssertionError, IndexError)):
        numbers.test_a_replay_buffer_passes_integer_borders_unchanged("torch", border, 1)


def tears_without_a_lock(method: str, width: int, folder: Path | None = None) -> bool:
    """Whether rows are torn if one method of the buffer takes no lock; the other methods keep theirs."""
    for attempt in range(5):  # one race may go well by chance, five do not
        traffic = Traffic(width, rl.Uniform(), folder and folder / f"{attempt}")
        unlocked: Any = copy.copy(traffic.replay)
        unlocked._lock = nullcontext()
        setattr(traffic.replay, method, getattr(unlocked, method))
        traffic.run(rows=200_000, seconds=2)
        if traffic.torn or traffic.errors:
            return True
    return False


def test_samplers_that_take_no_lock_read_torn_rows() -> None:
    assert tears_without_a_lock("sample", 1 << 16)


def test_saves_that_take_no_lock_hold_torn_rows(tmp_path: Path) -> None:
    assert tears_without_a_lock("save", 1 << 14, tmp_path)


def test_norms_without_a_lock_lose_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moments, "lock", nullcontext())
    for _ in range(20):
        with kernels.force("torch"):
            norm = rl.RunningNorm(3)
        run_at_once(*[partial(norm.update, torch.ones(4, 3))] * 4, times=500)
        if norm.count != 4 * 500 * 4:
            return
    pytest.fail("no update was lost")


def test_a_lock_that_is_not_reentrant_is_detected() -> None:
    buffer: Any = rl.DistillationBuffer(8, obs=3, action=rl.Field((), torch.int64))
    buffer._lock = threading.Lock()
    source = rl.ReplayBuffer(8, obs=3, action=rl.Field((), torch.int64))
    source.add([0.0] * 3, 1, 0.0, False, False, [1.0] * 3)
    with pytest.raises(AssertionError, match="never returned"):
        run_at_once(lambda: buffer.fill(source), times=1, watchdog=0.5)
    buffer._lock.release()  # and that thread continues


NAN = Case("NaN", prioritized, lambda b: b.update_priority([18, 20], [1.0, float("nan")]), rl.PriorityError)
SHORT = Case("a short reward", replay, lambda b: b.add(**(right() | {"reward": np.ones(1, np.float32)})))


def broken(case: Case, method: str, instead: Any) -> Case:
    """Return the case with one method of its buffer replaced."""

    def make() -> Any:
        buffer = case.make()
        kind = type(buffer)
        buffer.__class__ = type(kind.__name__, (kind,), {method: instead, "__module__": kind.__module__})
        return buffer

    return Case(case.name, make, case.call, case.error)


def clamps(buffer: rl.ReplayBuffer, index: Any, priority: Any) -> int:
    return rl.ReplayBuffer.update_priority(buffer, index, np.nan_to_num(np.maximum(priority, 0)))


def broadcasts(buffer: rl.ReplayBuffer, **fields: Any) -> None:
    rl.ReplayBuffer.add(buffer, **(fields | {"reward": np.broadcast_to(fields["reward"], (2,))}))


def draws_first(buffer: rl.ReplayBuffer, **fields: Any) -> None:
    buffer._random.uniform(1, CPU)
    rl.ReplayBuffer.add(buffer, **fields)


def writes_first(buffer: rl.ReplayBuffer, **fields: Any) -> None:
    buffer.storage.rows.leaves[0][0, 0] += 1
    rl.ReplayBuffer.add(buffer, **fields)


def asserts(buffer: rl.ReplayBuffer, **fields: Any) -> None:
    assert fields["reward"].shape == (2,), "reward"


def mumbles(buffer: rl.ReplayBuffer, **fields: Any) -> None:
    raise rl.SchemaError("wrong shape")


@pytest.mark.parametrize(
    ("case", "method", "instead", "words"),
    [
        (NAN, "update_priority", clamps, "it was taken"),
        (SHORT, "add", broadcasts, "it was taken"),
        (SHORT, "add", draws_first, "something has changed"),
        (SHORT, "add", writes_first, "something has changed"),
        (SHORT, "add", asserts, "AssertionError instead of SchemaError"),
        (SHORT, "add", mumbles, "in other words: wrong shape"),
    ],
)
def test_a_buffer_that_accepts_wrong_calls_is_detected(case: Case, method: str, instead: Any, words: str) -> None:
    assert complaint(case) is None
    found = complaint(broken(case, method, instead))
    assert found is not None
    assert found.startswith(words)


# Histories compared with a model

_write, _locate, _restore = NativeBackend.write, NativeBackend.locate, rl.ReplayBuffer.load_state
_draw = rl.WithoutReplacement.sample


def forgets_cuts(storage: NativeBackend, env: torch.Tensor, then: Any) -> None:
    then()


def returns_overwritten_rows(storage: NativeBackend, ids: torch.Tensor) -> torch.Tensor:
    return _locate(storage, ids).clamp(min=0)


def begins_epochs_anew(draws: Any, count: int) -> Any:
    draws._ids, draws._at = draws._ids[:0], 0
    return _draw(draws, count)


def restores_no_flags(replay: rl.ReplayBuffer, saved: Any) -> None:
    _restore(replay, saved)
    replay.storage.rows.ring.resetting.zero_()


def writes_and_then_fails(storage: NativeBackend, *arguments: Any) -> None:
    try:
        _write(storage, *arguments)
    except rl.SchemaError:
        storage.rows.ring.count[0] += 1
        raise


def calls_priorities_of_all_equal(draws: Any, slots: torch.Tensor, priority: torch.Tensor) -> int:
    return 0


def saves_without_the_newest(archive: Any, number: int, rows: Any, previous: Any) -> Any:
    if previous.saved_until is not None:
        return list(previous.segments)
    return _write_segments(archive, number, rows, previous)


def forgets_rounds(buffer: Any, starts: list[int]) -> None:
    buffer._starts = starts[-3:]
    buffer._device_starts = torch.tensor(buffer._starts)


def keeps_what_is_attached(storage: Any, *arguments: Any) -> None:
    attached = dict(storage.attached)
    _commit(storage, *arguments)
    storage.attached.update(attached)


_commit = RolloutStorage.commit_row
_write_segments = saving._write_segments

HISTORIES: dict[str, tuple[str, Any, str, Callable[..., Any]]] = {
    "cuts that are forgotten": ("shared uniform", NativeBackend, "end_episodes", forgets_cuts),
    "ids of rows that are gone": ("shared prioritized", NativeBackend, "locate", returns_overwritten_rows),
    "an epoch for every batch": ("shared epochs", rl.WithoutReplacement, "sample", begins_epochs_anew),
    "resets that a load forgets": ("shared uniform", rl.ReplayBuffer, "load_state", restores_no_flags),
    "a refused call that counts": ("stored uniform", NativeBackend, "write", writes_and_then_fails),
    "priorities that are not taken": ("stored prioritized", rl.Prioritized, "update", calls_priorities_of_all_equal),
    "saves without the newest rows": ("distillation", saving, "_write_segments", saves_without_the_newest),
    "rounds that are forgotten": ("distillation", rl.DistillationBuffer, "_set_rounds", forgets_rounds),
    "targets of older steps": ("rollout", RolloutStorage, "commit_row", keeps_what_is_attached),
}


@pytest.mark.parametrize("name", HISTORIES)
def test_histories_of_a_broken_buffer_differ_from_the_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, where, method, instead = HISTORIES[name]
    monkeypatch.setattr(where, method, instead)
    with pytest.raises(BaseException):  # noqa: B017, PT011 (whatever goes wrong first; pytest's own failures too)
        machines.live(kind, 600, 50, phases=(Phase.generate,))  # stop at the first failure


@pytest.mark.filterwarnings("ignore::relive.DataWarning")  # the traffic numbers observations across episode ends
def test_a_load_that_forgets_the_generator_is_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("uniform", "rollout", "distillation"):
        buffer = streams.lived(kind, 3, tmp_path / kind)
        twin: Any = rl.load(tmp_path / kind)
        if hasattr(buffer, "_tests_clock"):
            twin._tests_clock = buffer._tests_clock.copy()
        twin._random.restore(rl.rng.Randomness(1).snapshot())  # type: ignore[attr-defined]
        assert streams.stream(kind, twin, 3, 20) != streams.stream(kind, buffer, 3, 20)


def test_the_fork_server_can_import_its_preloaded_modules() -> None:
    """The fork server silently ignores a module that it cannot import; then every process would import torch."""
    assert importlib.import_module("tests.faults.preloaded").__all__
