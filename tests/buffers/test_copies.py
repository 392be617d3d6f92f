"""Buffers as ordinary objects: `copy.deepcopy`, `pickle` and `state_dict` of every kind of buffer."""

from __future__ import annotations

import copy
import os
import pickle
import runpy
import sys
import warnings
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from torch.multiprocessing import reductions

import relive as rl
from relive import kernels, locking
from relive.checkpoint import state_dict as portable
from tests.checkpoint.traffic import KINDS, digest, equal
from tests.tiers import select

COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda buffer: pickle.loads(pickle.dumps(buffer)),
    "the pickler of torch's queues": lambda buffer: pickle.loads(reductions.reduction.ForkingPickler.dumps(buffer)),
}


def make_buffer(kind: str, steps: int = 40) -> Any:
    buffer = KINDS[kind].make()
    for n in range(steps):
        KINDS[kind].act(buffer, n)
    return buffer


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("way", select("pickle", of=COPIES))
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_equals_the_buffer_and_stays_equal_after_the_same_steps(kind: str, way: str) -> None:
    buffer = make_buffer(kind)
    before = digest(buffer)
    copied = COPIES[way](buffer)
    copied.check()
    assert type(copied) is type(buffer)
    assert equal(digest(copied), before)
    assert equal(KINDS[kind].read(copied), KINDS[kind].read(buffer))
    for n in range(40, 55):
        KINDS[kind].act(copied, n)
    assert not equal(digest(copied), digest(buffer))
    for n in range(40, 55):
        KINDS[kind].act(buffer, n)
    assert equal(digest(copied), digest(buffer))
    assert equal(KINDS[kind].read(copied), KINDS[kind].read(buffer))


class Named(rl.ReplayBuffer):
    """A subclass with further arguments and attributes."""

    def __init__(self, name: str) -> None:
        self.seen: list[int] = []
        super().__init__(8, 1, (), seed=0)
        self.name = name

    def add(self, *values: Any, **fields: Any) -> None:
        super().add(*values, **fields)
        self.seen.append(len(self))


@pytest.mark.parametrize("way", COPIES.values(), ids=COPIES)
def test_a_subclass_is_copied_with_its_attributes(way: Callable[[Any], Any]) -> None:
    named = Named("mine")
    named.add([1.0], 0.5, 1.0, False, False, [2.0])
    copied = way(named)
    assert (type(copied), copied.name, copied.seen) == (Named, "mine", [1])
    copied.add([2.0], 0.5, 1.0, False, False, [3.0])
    assert (copied.seen, named.seen, len(copied), len(named)) == ([1, 2], [1], 2, 1)


@pytest.mark.parametrize("way", COPIES.values(), ids=COPIES)
def test_statistics_and_norms_are_copied(way: Callable[[Any], Any]) -> None:
    stats, norm = rl.EpisodeStats(2, reasons=("fall",)), rl.RunningNorm(2, clip=3.0)
    stats.update([1.0, 2.0], [True, False], [False, False], reasons=["fall", None])
    norm.update([[1.0, 2.0], [3.0, 5.0]])
    others = way(stats), way(norm)
    for one, other in zip((stats, norm), others, strict=True):
        other.check()
        assert repr(other) == repr(one)
        assert equal(other.snapshot(), one.snapshot())
    others[0].update([1.0, 2.0], [True, True], [False, False])
    others[1].update([[7.0, 7.0]])
    assert (stats.num_episodes, others[0].num_episodes, norm.count, others[1].count) == (1, 3, 2, 3)


@pytest.mark.parametrize("way", COPIES.values(), ids=COPIES)
def test_norms_of_a_copy_are_found_by_field_and_by_path(way: Callable[[Any], Any]) -> None:
    norms = {"obs": rl.RunningNorm(2), ("action",): rl.RunningNorm(())}
    copied = way(rl.ReplayBuffer(8, 2, (), norm=norms, seed=0))
    for name in ("obs", "action"):
        assert copied.norm[name] is copied.norm[name,]
    with pytest.raises(KeyError, match="reward"):
        copied.norm["reward"]


@pytest.mark.skipif(kernels.native_core() is None or sys.platform != "linux", reason="needs Linux and the native core")
@pytest.mark.parametrize("way", COPIES.values(), ids=COPIES)
def test_shared_and_disk_memory_are_not_copied(way: Callable[[Any], Any], tmp_path: Path) -> None:
    for memory, remedy in ((rl.Memory.shared(), r"handle\(\)"), (rl.Memory.disk(tmp_path / "memory"), r"save\(\)")):
        replay = rl.ReplayBuffer(8, 1, (), device=memory, seed=0)
        with pytest.raises(TypeError, match=remedy):
            way(replay)
        replay.close()


@pytest.mark.parametrize("kind", ["uniform", "rollout", "distillation"])
def test_a_buffer_is_refused_as_argument_of_a_spawned_process(kind: str) -> None:
    process = get_context("spawn").Process(target=len, args=(make_buffer(kind),))
    with pytest.raises(TypeError, match=r"expected a handle.*handle\(\).*save\(\)"):
        process.start()


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_state_dict_replaces_the_whole_state(kind: str) -> None:
    buffer, other = make_buffer(kind), make_buffer(kind, 23)
    other.load_state_dict(copy.deepcopy(buffer.state_dict()))
    other.check()
    assert equal(digest(other), digest(buffer))
    assert equal(KINDS[kind].read(other), KINDS[kind].read(buffer))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("kind", KINDS)
def test_a_buffer_loads_its_own_state_dict(kind: str) -> None:
    buffer = make_buffer(kind)
    before = copy.deepcopy(digest(buffer))
    # The tensors of a state dict share the buffer's memory.
    buffer.load_state_dict(buffer.state_dict())
    buffer.check()
    assert equal(digest(buffer), before)


@pytest.mark.parametrize("kind", ["rollout", "distillation"])
def test_a_wrong_state_dict_changes_nothing(kind: str) -> None:
    other = make_buffer(kind, 23)
    before = digest(other)
    state = make_buffer(kind).state_dict()
    names = [(part, name) for part in ("rows", "arrays") for name in state[part]]
    wrong = [torch.zeros(99, 7), torch.zeros(1).to_sparse(), torch.zeros(1, device="meta"), 3]
    for part, name in names:
        for value in wrong:
            with pytest.raises(rl.SchemaError, match="expected"):
                other.load_state_dict({**state, part: {**state[part], name: value}})
        with pytest.raises(rl.SchemaError, match="expected"):
            other.load_state_dict({**state, part: {key: x for key, x in state[part].items() if key != name}})
    for name in state["values"]:
        with pytest.raises(rl.SchemaError, match="expected"):
            other.load_state_dict({**state, "values": {k: v for k, v in state["values"].items() if k != name}})
    assert equal(digest(other), before)


def test_a_distillation_buffer_learns_its_fields_from_a_state() -> None:
    buffer = make_buffer("distillation")
    other = rl.DistillationBuffer(13, 2)
    other.load_state_dict(buffer.state_dict())
    other.check()
    assert equal(digest(other), digest(buffer))


def test_a_class_with_the_same_name_is_refused(tmp_path: Path) -> None:
    rl.ReplayBuffer(2, 1, (), seed=0).save(tmp_path)
    impostor: Any = type("ReplayBuffer", (), {})
    with pytest.raises(rl.IncompatibleCheckpoint, match="expected a ReplayBuffer, got a ReplayBuffer"):
        rl.load(tmp_path, impostor)
    assert type(rl.load(tmp_path, rl.ReplayBuffer)) is rl.ReplayBuffer


def test_a_damaged_file_warns_after_the_save(tmp_path: Path) -> None:
    replay = rl.ReplayBuffer(8, 1, (), seed=0)
    replay.add([1.0], 0.5, 1.0, False, False, [2.0])
    replay.save(tmp_path)
    (segment,) = (tmp_path / "segments").iterdir()
    segment.write_bytes(bytes(len(segment.read_bytes())))
    os.utime(segment, (1, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="a file that was saved before is damaged; all rows are written again"):
            replay.save(tmp_path)
        assert replay.save(tmp_path) == 3
    assert rl.load(tmp_path, rl.ReplayBuffer)[np.array([0])]["obs"].tolist() == [[1.0]]


@pytest.mark.parametrize("text", ["abc", "-1", "nan", ""])
def test_an_invalid_lock_timeout_warns_and_the_default_is_used(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELIVE_LOCK_SECONDS", text)
    with pytest.warns(UserWarning, match="RELIVE_LOCK_SECONDS: expected a positive number of seconds"):
        names = runpy.run_path(locking.__file__)
    assert names["LOCK_SECONDS"] == 600.0


def test_add_waits_while_a_state_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    replay = rl.ReplayBuffer(8, obs=1, action=(), seed=0)
    replay.add([0.0], 0.0, 0.0, False, False, [1.0])
    adding, pack = Thread(target=replay.add, args=([1.0], 0.0, 1.0, False, False, [2.0])), portable.pack_arrays

    def pack_slowly(arrays: Any) -> Any:
        if adding.ident is None:
            adding.start()
        adding.join(timeout=0.1)
        assert adding.is_alive()
        return pack(arrays)

    monkeypatch.setattr(portable, "pack_arrays", pack_slowly)
    state = portable.pack_state(replay)
    adding.join(timeout=10)
    assert len(replay) == 2
    other = rl.ReplayBuffer(8, obs=1, action=(), seed=1)
    portable.load_packed_state(other, state)
    assert len(other) == 1
