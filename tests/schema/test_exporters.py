"""Objects with the buffer protocol as arguments: held until they are copied, and refused if incomplete."""

from __future__ import annotations

import array
import ctypes
import mmap
import pickle
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import relive as rl
from relive.schema.fields import DTYPES
from tests.exporters import Exporter, Lasting, c_strides
from tests.totals import SEED, tell, trials

NO_ACTION = np.zeros(1, np.float32)


def floats(*values: float, **hooks: Any) -> Exporter:
    """Return an exporter of float32 numbers whose memory is freed when no buffer is held."""
    return Exporter(struct.pack(f"<{len(values)}f", *values), "f", 4, (len(values),), (4,), **hooks)


def bytes_called_bool(*values: int) -> np.ndarray:
    return np.array(values, np.uint8).view(np.bool_)


@pytest.mark.usefixtures("backend")
def test_ctypes_arrays_are_stored() -> None:
    two = ctypes.c_float * 2
    replay = rl.ReplayBuffer(8, 2, 1)
    replay.add(two(1, 2), (ctypes.c_float * 1)(3), 1.0, False, False, two(4, 5))
    assert replay[0]["obs"].tolist() == [1, 2]
    assert replay[0]["next_obs"].tolist() == [4, 5]
    rollout = rl.RolloutBuffer(1, 2, 2, 1)
    rollout.add((two * 2)((1, 2), (3, 4)), np.zeros((2, 1)), np.zeros(2), [False] * 2, [False] * 2)
    assert rollout["obs"].tolist() == [[[1, 2], [3, 4]]]


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("moment", [np.datetime64(1, "s"), np.timedelta64(1, "s")])
def test_bytes_of_a_time_are_no_numbers(moment: Any) -> None:
    """A scalar exports eight bytes, as many as the flags of eight environments."""
    replay = rl.ReplayBuffer(8, rl.Field((), torch.uint8), 1, num_envs=8)
    rest = np.zeros((8, 1), np.float32), np.zeros(8, np.float32), np.zeros(8, np.bool_), np.zeros(8, np.bool_)
    with pytest.raises(rl.SchemaError, match=r"numbers or bools, got dtype (datetime|timedelta)64\[s\]"):
        replay.add(moment, *rest, np.ones(8, np.uint8))
    assert len(replay) == 0
    rollout = rl.RolloutBuffer(1, 8, rl.Field((), torch.uint8), 1)
    with pytest.raises(rl.SchemaError, match=r"numbers or bools, got dtype (datetime|timedelta)64\[s\]"):
        rollout.add(moment, *rest)


def test_memory_that_goes_with_its_buffer_is_copied_before() -> None:
    replay, rollout = rl.ReplayBuffer(8, 2, 1), rl.RolloutBuffer(1, None, 2, 1)
    given = [floats(1, 2), floats(3), floats(4, 5)]
    obs, action, next_obs = given
    replay.add(obs, action, 1.0, False, False, next_obs)
    assert replay[0]["obs"].tolist() == [1, 2]
    assert replay[0]["action"].tolist() == [3]
    assert replay[0]["next_obs"].tolist() == [4, 5]
    rollout.add(obs, action, 1.0, False, False)
    assert rollout["obs"].tolist() == [[1, 2]]
    assert rollout["action"].tolist() == [[3]]
    replay.extend({
        "obs": Exporter(struct.pack("<4f", 4, 5, 6, 7), "f", 4, (2, 2), (8, 4)), "action": np.zeros((2, 1)),
        "reward": np.zeros(2), "terminated": [False] * 2, "truncated": [False] * 2, "next_obs": np.ones((2, 2)),
    })  # fmt: skip
    assert replay[np.array([1, 3])]["obs"].tolist() == [[4, 5], [6, 7]]
    assert all(one.taken == one.released > 0 for one in given)


def test_a_refused_step_lets_go_of_its_buffers() -> None:
    replay, rollout = rl.ReplayBuffer(8, 2, 1), rl.RolloutBuffer(1, None, 2, 1)
    given = floats(1, 2)
    with pytest.raises(rl.SchemaError):
        replay.add(given, NO_ACTION, 1.0, False, False, np.zeros(3))
    with pytest.raises(rl.SchemaError):
        rollout.add(given, np.zeros(3), 1.0, False, False)
    assert given.taken == given.released > 0


def test_a_bytearray_cannot_be_resized_while_it_is_stored() -> None:
    """Another thread tries to free the memory during the copy."""
    size = 1 << 22
    replay = rl.ReplayBuffer(2, rl.Field(size, torch.uint8), 1)
    data, other, stop = bytearray(size), np.ones(size, np.uint8), threading.Event()
    refused = 0

    def resize() -> None:
        nonlocal refused
        while not stop.is_set():
            try:
                data.clear()
                data.extend(bytes(size))
            except BufferError:
                refused += 1

    thread = threading.Thread(target=resize)
    thread.start()
    end = time.monotonic() + 2
    while time.monotonic() < end and refused < 5:
        try:
            replay.add(data, NO_ACTION, 0.0, False, False, other)
        # The exporter is refused while it is empty.
        except rl.SchemaError:
            continue
    stop.set()
    thread.join()
    replay.check()


@pytest.mark.skipif(sys.version_info < (3, 12), reason="classes export buffers (__buffer__) from Python 3.12 on")
def test_a_class_may_make_memory_for_each_buffer() -> None:
    class Fresh:
        def __buffer__(self, flags: int) -> memoryview:
            return memoryview(array.array("f", [1, 2]))

    replay = rl.ReplayBuffer(8, 2, 1)
    replay.add(Fresh(), NO_ACTION, 1.0, False, False, np.zeros(2, np.float32))
    assert replay[0]["obs"].tolist() == [1, 2]


@pytest.mark.skipif(rl.kernels.native_core() is None, reason="this install has no native core (no compiler)")
@pytest.mark.parametrize("when", ["during", "after"])
@pytest.mark.parametrize("kind", ["replay", "rollout"])
def test_an_exporter_that_adds_to_the_same_buffer_is_refused(kind: str, when: str) -> None:
    """An inner `add` would overwrite the memory that the outer `add` reads into."""
    said: list[str] = []
    replay, rollout = rl.ReplayBuffer(8, 2, 1), rl.RolloutBuffer(4, None, 2, 1)

    def add(obs: Any) -> None:
        if kind == "replay":
            replay.add(obs, NO_ACTION, 0.0, False, False, np.ones(2, np.float32))
        else:
            rollout.add(obs, NO_ACTION, 0.0, False, False)

    def meddle() -> None:
        if not said:
            said.append("")
            with pytest.raises(RuntimeError, match="one step at a time") as caught:
                add(np.zeros(2, np.float32))
            said[0] = str(caught.value)

    add(floats(1, 2, **{when: meddle}))
    assert "Add it afterwards." in said[0]
    buffer = replay if kind == "replay" else rollout
    buffer.check()
    assert len(buffer) == 1
    add(floats(3, 4))
    assert len(buffer) == 2


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("made", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_any_byte_but_0_is_true_wherever_it_is_stored(made: Callable[[Any], Any], tmp_path: Any) -> None:
    flag = rl.Field((), torch.bool)
    odd, even = made(bytes_called_bool(2, 0)), made(bytes_called_bool(0, 255))
    obs, action = np.zeros((2, 2), np.float32), np.zeros((2, 1), np.float32)
    replay = rl.ReplayBuffer(8, 2, 1, num_envs=2, extra={"on": flag}, stats=rl.EpisodeStats(2))
    rollout = rl.RolloutBuffer(2, 2, 2, 1, extra={"on": flag}, stats=rl.EpisodeStats(2))
    distillation = rl.DistillationBuffer(8, {"on": flag}, flag)
    replay.add(obs, action, np.zeros(2, np.float32), odd, even, obs + 1, on=odd)
    replay.stage(on=odd)
    rollout.stage(on=odd)
    rollout.add(obs, action, np.zeros(2, np.float32), odd, even, final_obs=obs)
    rollout.attach(off=odd.reshape(1, 2))
    distillation.add({"on": odd}, even)
    for buffer in (replay, rollout, distillation):
        buffer.check()
        buffer.save(tmp_path / type(buffer).__name__)
        rl.load(tmp_path / type(buffer).__name__).check()
    assert replay.columns["on"].view(torch.uint8).unique().tolist() == [0, 1]
    assert replay[replay.ids()]["terminated"].tolist() == [True, False]
    assert rollout["off"].view(torch.uint8).tolist() == [[1, 0]]
    assert distillation[np.arange(2)]["action"].view(torch.uint8).tolist() == [0, 1]


def test_statistics_and_lent_memory_know_such_bytes_too(tmp_path: Any) -> None:
    stats = rl.EpisodeStats(2)
    stats.update(np.ones(2), bytes_called_bool(2, 0), bytes_called_bool(0, 4), mask=bytes_called_bool(8, 1))
    stats.check()
    assert stats.episodes()["terminated"].tolist() == [True, False]
    assert stats.num_steps == 2
    rollout = rl.RolloutBuffer(1, 2, 2, 1)
    rollout.lend()["terminated"].view(torch.uint8)[:, 0] = torch.tensor([2, 0], dtype=torch.uint8)
    rollout.take_back()
    rollout.save(tmp_path)
    assert rl.load(tmp_path)["terminated"].tolist() == [[True, False]]


def _hostile(random: np.random.Generator) -> Any:
    """Return a buffer unlike any array: too many axes, odd sizes, missing or wrong strides, misaligned memory."""
    kind = str(
        random.choice(["f", "d", "?", "b", "B", "q", "<f", ">f", "Zf", "c", "T{f:x:}", "", "2f", "e", "=l", "x"])
    )
    shape = tuple(int(n) for n in random.choice([0, 1, 2, 3, 8], int(random.integers(0, 4))))
    itemsize = int(random.choice([1, 2, 3, 4, 8, 16]))
    count = int(np.prod(shape))
    strides = c_strides(itemsize, shape) if random.random() < 0.7 else None
    if strides and random.random() < 0.2:
        strides = tuple(0 for _ in strides)
    return Lasting(random.bytes(count * itemsize), kind, itemsize, shape, strides, offset=int(random.integers(0, 9)))


def _ordinary(random: np.random.Generator) -> Any:
    dtype = np.dtype(
        str(random.choice(["f4", "f8", "?", "u1", "i8", "i4", "c8", "f2", ">f4", "M8[s]", "m8[s]", "S3", "V5"]))
    )
    shape = tuple(int(n) for n in random.choice([1, 2, 3, 8], int(random.integers(0, 3))))
    values = np.frombuffer(random.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)
    forms: list[Callable[[], Any]] = [
        lambda: values,
        lambda: values[()] if not shape else values.flat[0],
        lambda: values[..., ::-1] if shape else values,
        lambda: values[::2] if shape else values,
        lambda: bytearray(values.tobytes()),
        values.tobytes,
        lambda: memoryview(values.tobytes()),
        lambda: memoryview(values.tobytes())[::-1],
        lambda: array.array("f", [1, 2, 3][: int(random.integers(0, 4))]),
        lambda: (ctypes.c_float * 2)(1, 2),
        lambda: (ctypes.c_bool * 2)(True, False),
        lambda: (ctypes.c_char * 4)(b"a"),
        lambda: ctypes.c_double(2.0),
        ctypes.c_float * 2 * 3,
        lambda: pickle.PickleBuffer(values.tobytes()),
        lambda: mmap.mmap(-1, 8),
    ]
    return forms[int(random.integers(len(forms)))]()


def _form(value: Any) -> tuple[tuple[int, ...], torch.dtype]:
    """Return the shape and dtype to declare for a value; float32 if torch lacks its dtype."""
    try:
        array = np.asarray(value)
    except Exception:
        return (), torch.float32
    kinds = {np.dtype(kind): named for named, kind in DTYPES.items() if kind is not None}
    return array.shape, kinds.get(array.dtype.newbyteorder("="), torch.float32)


def _stored(make: Callable[[], Any], kind: torch.dtype, shape: tuple[int, ...], envs: int | None) -> bytes | None:
    """Return the bytes that a replay and a rollout buffer store for a value; None if both refuse it."""
    lead = () if envs is None else (envs,)
    rest: list[Any] = [np.zeros((*lead, 1), np.float32), np.zeros(lead, np.float32)] + [np.zeros(lead, np.bool_)] * 2
    field = rl.Field(shape, kind)
    found: list[bytes | None] = []
    replay = rl.ReplayBuffer(2 * (envs or 4), field, 1, num_envs=envs)
    rollout = rl.RolloutBuffer(1, envs, field, 1)
    nexts = torch.zeros((*lead, *shape), dtype=kind)
    buffers: tuple[tuple[Any, tuple[Any, ...]], ...] = ((replay, (nexts,)), (rollout, ()))
    for buffer, more in buffers:
        try:
            buffer.add(make(), *rest, *more)
        except rl.SchemaError as error:
            assert "expected" in str(error)  # noqa: PT017 (either is right, but nothing in between)
            found.append(None)
        else:
            column = replay[replay.ids()]["obs"] if more else rollout["obs"][0]
            found.append(column.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        buffer.check()
    assert found[0] == found[1]
    return found[0]


def test_whatever_is_exported_is_stored_alike_or_refused() -> None:
    """The native core and torch ops, which are independent, must agree."""
    random = np.random.default_rng(SEED)
    count, stored = trials("EXPORTERS", 300), 0
    for _ in range(count):
        hostile = bool(random.random() < 0.5)
        state = random.bit_generator.state
        value: Any = None

        def make(state: Any = state, hostile: bool = hostile) -> Any:
            again = np.random.default_rng()
            again.bit_generator.state = state
            return _hostile(again) if hostile else _ordinary(again)

        value = make()
        random.random()
        shape, kind = _form(value) if random.random() < 0.8 else ((2,), torch.float32)
        envs = shape[0] if shape and random.random() < 0.3 else None
        shape = shape if envs is None else shape[1:]
        if 0 in (envs, *shape):
            continue
        if random.random() < 0.2:
            kind = [torch.float32, torch.float64, torch.bool, torch.uint8, torch.int64][int(random.integers(5))]
        native = _stored(make, kind, shape, envs)
        with rl.kernels.force_torch():
            assert _stored(make, kind, shape, envs) == native, (value, kind, shape, envs)
        stored += native is not None
    tell(
        f"exporters: {count} objects of the buffer protocol, {stored} stored alike by both backends, the others refused"
    )
    assert stored > count // 10


@pytest.mark.parametrize("as_object", [memoryview, lambda a: array.array("f", a), np.asarray])
def test_obs_and_next_obs_in_one_memory_are_refused_whatever_exports_it(as_object: Any, backend: str) -> None:
    one = as_object(np.zeros(2, np.float32))
    replay = rl.ReplayBuffer(8, obs=2, action=())
    with pytest.raises(rl.SchemaError, match="next_obs: expected memory of its own|reuses its array"):
        replay.add(one, 0.0, 1.0, True, False, one)
    assert len(replay) == 0


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex128, np.int16])
def test_arrays_at_odd_addresses_are_stored(dtype: Any, backend: str) -> None:
    itemsize = np.dtype(dtype).itemsize

    def odd(value: float) -> np.ndarray:
        memory = np.zeros(4 * itemsize + 16, np.uint8)
        start = (-memory.ctypes.data) % 16 + (itemsize // 2 or 1)
        there = memory[start : start + 2 * itemsize].view(dtype)
        there[:] = value
        return there

    field = rl.Field(2, torch.from_numpy(np.zeros(1, dtype)).dtype)
    replay = rl.ReplayBuffer(8, obs=field, action=())
    replay.add(odd(1), 0.0, 1.0, True, False, odd(2))
    assert (replay[0]["obs"] == 1).all()
    assert (replay[0]["next_obs"] == 2).all()
    rollout = rl.RolloutBuffer(1, None, obs=field, action=())
    rollout.add(odd(3), 0.0, 1.0, True, False)
    assert (rollout["obs"] == 3).all()
    assert rollout["reward"].tolist() == [1.0]
