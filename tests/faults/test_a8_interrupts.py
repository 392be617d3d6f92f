"""A8: Ctrl-C at any point of a public call leaves its effect complete or absent."""

from __future__ import annotations

import gc
import random
import shutil
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import relive as rl
from relive import locking
from relive.replay import torch_backend
from relive.replay.native_backend import NativeBackend
from tests.faults.interrupts import Interrupt, handler, interrupted, is_free, points
from tests.tiers import select
from tests.totals import SEED, tell, trials

pytestmark = [
    pytest.mark.filterwarnings("ignore::relive.DataWarning"),  # steps do not continue each other
    pytest.mark.filterwarnings("ignore:load. .* memory became own memory"),
    # Python prints and drops an exception raised in the callback of a weak reference.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

NUM_ENVS, CAPACITY = 2, 24
PATIENCE = 60.0
"""Seconds that a thread waits for the lock of a buffer."""


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    gc.collect()
    gc.disable()  # Python prints and drops an exception raised in a finalizer
    with handler():
        yield
    gc.enable()


# State of a buffer


def bits(tensor: torch.Tensor) -> bytes:
    return np.ascontiguousarray(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()).tobytes()


def read_state(buffer: Any) -> dict[str, Any]:
    """Return the state of a buffer without its generator: everything that can be read, saved and sampled."""
    values, arrays = buffer.state()
    state = {f"array {name}": bits(x) for name, x in arrays.items() if not name.startswith("random")}
    state |= {f"value {name}": repr(value) for name, value in values.items() if name != "random"}
    if isinstance(buffer, rl.ReplayBuffer):
        rows = buffer[buffer.ids()]
        state |= {f"row {name}": bits(rows[name]) for name in rows.keys()}
        state["traffic"] = bits(buffer._traffic)
    if isinstance(buffer, rl.RolloutBuffer):  # the row after the stored ones may hold a partial step
        for i, tensor in enumerate(buffer._storage.tensors):
            state[f"array rows.column{i}"] = bits(tensor[: buffer.num_stored]) if len(tensor) > 1 else b""
    if isinstance(buffer, rl.DistillationBuffer):
        ring = buffer._ring
        rows = torch.arange(ring.oldest_row, ring.head) % ring.capacity
        state |= {f"row {i}": bits(column[rows]) for i, column in enumerate(buffer._columns)}
    return state


def difference(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    return sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))


# Calls


@dataclass
class Call:
    """A public call to interrupt; `prepare` runs before it, without signals."""

    name: str
    make: Callable[[Any, int], Callable[[], Any]]
    prepare: Callable[[Any, int], Any] | None = None
    draws: bool = False
    """Whether each part of the sampler may be in its old or new state."""


@dataclass
class Trial:
    """A buffer that is interrupted, and a twin that is not."""

    live: Any
    twin: Any
    folder: Path
    rng: random.Random
    number: int = 0
    num_interrupts: int = 0

    def run(self, call: Call, max_points: int) -> None:
        """Interrupt a call at `max_points` of its points, or at all of them."""
        self._prepare(call, traced=False)
        for buffer in (self.live, self.twin):  # the first call imports modules: points that later calls do not have
            call.make(buffer, self.number)()
        places = self._prepare(call)
        stride = max(len(places) // max_points, 1)
        call.make(self.live, self.number)()
        for place in range(0, len(places), stride):
            at = places[min(place + self.rng.randrange(stride), len(places) - 1)]
            self._prepare(call, traced=False)
            before = read_state(self.live)
            call.make(self.twin, self.number)()
            action = call.make(self.live, self.number)
            try:
                failures = self._failures(call, before, interrupted(action, at))
            except Exception as error:  # the buffer is broken: report its error as the failure
                failures = [f"{type(error).__name__}: {error}"]
            self.num_interrupts += 1
            assert not failures, f"{call.name} at {at} ({place} of {len(places)}): {failures}"

    def _prepare(self, call: Call, *, traced: bool = True) -> list[int]:
        """Advance the step number and prepare both buffers; return the points of the call, traced on the twin."""
        self.number += 1
        if call.prepare is not None:
            for buffer in (self.live, self.twin):
                call.prepare(buffer, self.number)
        self.live._random.restore(self.twin._random.snapshot())
        return points(call.make(self.twin, self.number)) if traced else []

    def _failures(self, call: Call, before: dict[str, Any], was: bool) -> list[str]:
        live, twin = self.live, self.twin
        left = self._leftovers()
        if left:
            return left
        live.check()
        now, after = read_state(live), read_state(twin)
        if call.draws:
            mixed = [name for name in now if now[name] not in (before.get(name), after.get(name))]
            if mixed:
                return mixed
        elif not difference(now, after):
            pass
        elif difference(now, before) or not was:
            return [f"not as after: {difference(now, after)}; not as before: {difference(now, before)}"]
        if self.num_interrupts % 60 == 0:
            failures = self._saved_difference(now)
            if failures:
                return failures
        if not call.draws and difference(now, after):
            call.make(live, self.number)()
            return difference(read_state(live), after)
        if call.draws:  # both samplers continue from the same state
            self._synchronise()
        return []

    def _leftovers(self) -> list[str]:
        """Return what an interrupt left outside the buffer's state: a held lock, disabled gradients."""
        if not is_free(self.live._lock, PATIENCE):
            return ["the lock is held"]
        if not torch.is_grad_enabled():
            torch.set_grad_enabled(True)
            return ["gradients are off for the whole process"]
        return []

    def _synchronise(self) -> None:
        if difference(read_state(self.live), read_state(self.twin)):
            state = {name: x.clone() for name, x in self.twin.sampler.state().items()}
            self.live.sampler.load_state(state)

    def _saved_difference(self, now: dict[str, Any]) -> list[str]:
        folder = self.folder / f"saved{self.num_interrupts}"
        self.live.save(folder)
        loaded = rl.load(folder, device="cpu") if isinstance(self.live, rl.ReplayBuffer) else rl.load(folder)
        loaded.check()
        other = read_state(loaded)
        skipped = ("value memory", "traffic")
        return [name for name in difference(now, other) if name not in skipped]


def step(number: int, envs: int = NUM_ENVS) -> dict[str, Any]:
    """Return a step with recognisable numbers; every seventh step ends an episode."""
    obs = np.arange(envs, dtype=np.float32) * 1000 + number
    ends = np.array([(number + env) % 7 == 0 for env in range(envs)])
    return {
        "obs": np.stack([obs, -obs], 1),
        "action": obs * 2,
        "reward": obs * 3,
        "terminated": ends,
        "truncated": np.zeros(envs, bool),
        "next_obs": np.stack([obs + 1, -obs - 1], 1),
    }


EXTRA = {"mark": rl.Mutable(rl.Field()), "number": rl.Field((), torch.int64)}


def make_replay(where: Any, sampler: Any, **settings: Any) -> rl.ReplayBuffer:
    is_shared = rl.Memory.of(where).is_shared  # shared memory refuses statistics
    return rl.ReplayBuffer(
        CAPACITY, obs=2, action=(), num_envs=NUM_ENVS, sampler=sampler, device=where, extra=EXTRA, seed=0,
        **({} if is_shared else {"stats": rl.EpisodeStats(NUM_ENVS, window=4), "norm": {"obs": rl.RunningNorm(2)}}),
        **settings,
    )  # fmt: skip


def extras(number: int) -> dict[str, Any]:
    return {"mark": np.full(NUM_ENVS, number, np.float32), "number": np.full(NUM_ENVS, number)}


def add(buffer: Any, number: int) -> Callable[[], Any]:
    return partial(buffer.add, **step(number), **extras(number))


def add_some(buffer: Any, number: int) -> Callable[[], Any]:
    rows = {name: value[1:] for name, value in (step(number) | extras(number)).items()}
    return partial(buffer.add, **rows, env_ids=[1])


def extend(buffer: Any, number: int) -> Callable[[], Any]:
    blocks = [step(10 * number + t) | extras(number) for t in range(3)]
    return partial(buffer.extend, {name: np.stack([block[name] for block in blocks]) for name in blocks[0]})


def add_step(buffer: Any, number: int) -> Callable[[], Any]:
    one = step(number)
    info = {"final_obs": one["next_obs"], "_final_obs": one["terminated"]}
    result = one["next_obs"], one["reward"], one["terminated"], one["truncated"], info
    return partial(buffer.add_step, one["obs"], one["action"], result, **extras(number))


def add_more(buffer: Any, number: int, count: int = 4) -> None:
    for t in range(count):
        add(buffer, 1000 + 10 * number + t)()


def stage(buffer: Any, number: int) -> Callable[[], Any]:
    return partial(buffer.stage, obs=step(number)["obs"], number=extras(number)["number"])


def complete_staged(buffer: Any, number: int) -> None:
    if buffer._input.staged:
        rest = step(number) | extras(number)
        buffer.add(**{name: value for name, value in rest.items() if name not in ("obs", "number")})


def stage_some(buffer: Any, number: int) -> None:
    if not buffer._input.staged:
        stage(buffer, number)()


def add_staged(buffer: Any, number: int) -> Callable[[], Any]:
    return partial(complete_staged, buffer, number)


def update(buffer: Any, number: int) -> Callable[[], Any]:
    ids = buffer.ids()[:5]
    return partial(buffer.update_priority, ids, torch.arange(1, len(ids) + 1) * float(number))


def write(buffer: Any, number: int) -> Callable[[], Any]:
    ids = buffer.ids()[2:6]
    return partial(buffer.write, ids, mark=torch.full((len(ids),), float(number)))


def sample(buffer: Any, number: int) -> Callable[[], Any]:
    return partial(buffer.sample, 6)


def sample_steps(buffer: Any, number: int) -> Callable[[], Any]:
    return partial(buffer.sample, 6, rl.NStep(2, 0.9))


COPIES: dict[int, Any] = {}
"""Earlier states of buffers by `id`."""


def copy_state(buffer: Any, number: int) -> None:
    """Copy the state of a buffer, then change the buffer."""
    taken = buffer.state_dict()
    COPIES[id(buffer)] = {**taken, "rows": _copy_arrays(taken["rows"]), "arrays": _copy_arrays(taken["arrays"])}
    add_more(buffer, number, 2)


def _copy_arrays(arrays: Any) -> Any:
    return {name: x.clone() for name, x in arrays.items()}


CALLS = {
    "add": Call("add", add),
    "add of one": Call("add of one", add_some),
    "extend": Call("extend", extend),
    "add_step": Call("add_step", add_step),
    "stage": Call("stage", stage, complete_staged),
    "add of the rest": Call("add of the rest", add_staged, stage_some),
    "update_priority": Call("update_priority", update),
    "write": Call("write", write),
    "cut": Call("cut", lambda buffer, _: buffer.cut, partial(add_more, count=1)),
    "clear": Call("clear", lambda buffer, _: buffer.clear, add_more),
    "commit": Call("commit", lambda buffer, _: buffer.commit),
    "sample": Call("sample", sample, draws=True),
    "sample of steps": Call("sample of steps", sample_steps, draws=True),
    "load_state_dict": Call(
        "load_state_dict", lambda buffer, _: partial(buffer.load_state_dict, COPIES[id(buffer)]), copy_state
    ),
}  # fmt: skip
WRITES = ("add", "add of one", "extend", "add_step", "stage", "add of the rest", "cut", "clear", "write")
DRAWS = ("add", "sample", "sample of steps", "clear")
SAMPLERS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "uniform": (rl.Uniform(), (*WRITES, "sample", "load_state_dict")),
    "prioritized": (rl.Prioritized(), (*WRITES, "update_priority", "sample")),
    "counted": (rl.Counted(rl.Prioritized()), (*DRAWS, "update_priority")),
    "epochs": (rl.WithoutReplacement(), DRAWS),
    "new": (rl.NewFirst(), DRAWS),
    "recent": (rl.Recent(4), DRAWS),
}
PLACES = ("heap", "torch", "shared", "disk")


def call_names(place: str, sampler: str, autoreset: str | None) -> list[str]:
    """Calls that a kind of replay buffer supports."""
    refused = set[str]()
    if place not in ("heap", "torch"):
        refused.add("load_state_dict")
    if autoreset is None:
        refused.add("add_step")
    return [name for name in SAMPLERS[sampler][1] if name not in refused]


def interrupt_calls(folder: Path, place: str, name: str, max_points: int, seed: int, autoreset: str | None) -> int:
    """Interrupt the calls of one kind of replay buffer; return the number of interrupts."""
    sampler = SAMPLERS[name][0]
    with rl.kernels.force_torch() if place == "torch" else nullcontext():
        folders = [folder / f"{place} {name} {i}" for i in range(2)]
        live, twin = (make_replay(memory(place, each), sampler, autoreset=autoreset) for each in folders)
        trial = Trial(live, twin, folder / f"{place} {name}", random.Random(seed), 100)
        for each in call_names(place, name, autoreset):
            for buffer in (live, twin):
                complete_staged(buffer, trial.number)
                add_more(buffer, trial.number, 12)
            trial.run(CALLS[each], max_points)
        for buffer in (live, twin):
            buffer.close()
    return trial.num_interrupts


def memory(place: str, folder: Path) -> Any:
    if place == "shared":
        return rl.Memory.shared()
    return rl.Memory.disk(folder) if place == "disk" else "cpu"


# Rollout and distillation buffers


def rollout(**settings: Any) -> rl.RolloutBuffer:
    return rl.RolloutBuffer(
        5, NUM_ENVS, obs=2, action=(), stats=rl.EpisodeStats(NUM_ENVS, window=4), norm={"obs": rl.RunningNorm(2)},
        extra={"hidden": rl.Carry(3)}, seed=0, **settings,
    )  # fmt: skip


def rollout_step(number: int) -> dict[str, Any]:
    one = step(number)
    del one["next_obs"]
    hidden = np.full((NUM_ENVS, 3), number, np.float32)
    return one | {"value": one["reward"] / 2, "log_prob": one["reward"] / 4, "hidden": hidden}


def room(buffer: rl.RolloutBuffer, number: int) -> None:
    """Make room for one more step; after three steps, compute advantages first."""
    if buffer.num_stored == buffer.num_steps:
        buffer.clear()
    if buffer.num_stored == 3:
        buffer.compute_advantage(np.full(NUM_ENVS, number, np.float32), bootstrap_truncated=False)


def rollout_add(buffer: rl.RolloutBuffer, number: int) -> Callable[[], Any]:
    return partial(buffer.add, **rollout_step(number))


def rollout_add_step(buffer: rl.RolloutBuffer, number: int) -> Callable[[], Any]:
    one = rollout_step(number)
    obs, action, reward, terminated, truncated = (one.pop(name) for name in list(one)[:5])
    return partial(buffer.add_step, obs, action, (obs + 1, reward, terminated, truncated, {}), **one)


def rollout_stage(buffer: rl.RolloutBuffer, number: int) -> Callable[[], Any]:
    return partial(buffer.stage, obs=rollout_step(number)["obs"])


def rollout_rest(buffer: rl.RolloutBuffer, number: int) -> Callable[[], Any]:
    return partial(buffer.add, **{name: x for name, x in rollout_step(number).items() if name != "obs"})


def room_without_stage(buffer: rl.RolloutBuffer, number: int) -> None:
    if buffer._storage.staged:
        rollout_rest(buffer, number)()
    room(buffer, number)


def room_with_stage(buffer: rl.RolloutBuffer, number: int) -> None:
    if not buffer._storage.staged:
        room(buffer, number)
        rollout_stage(buffer, number)()


def some_steps(buffer: rl.RolloutBuffer, number: int) -> None:
    room(buffer, number)
    rollout_add(buffer, 1000 + number)()


def advantage(buffer: rl.RolloutBuffer, number: int) -> Callable[[], Any]:
    last = np.full(NUM_ENVS, number, np.float32)
    return partial(buffer.compute_advantage, last, last_obs=step(number)["obs"], bootstrap_truncated=False)


def attached(buffer: rl.RolloutBuffer, number: int) -> Callable[[], Any]:
    return partial(buffer.attach, note=torch.full((buffer.num_stored, NUM_ENVS), float(number)))


ROLLOUT_CALLS = [
    Call("add", rollout_add, room),
    Call("add_step", rollout_add_step, room),
    Call("stage", rollout_stage, room_without_stage),
    Call("add of the rest", rollout_rest, room_with_stage),
    Call("compute_advantage", advantage, some_steps),
    Call("attach", attached, some_steps),
    Call("clear", lambda buffer, _: buffer.clear, some_steps),
    Call("restart", lambda buffer, _: partial(buffer.clear, restarted=True), some_steps),
]


def rows(buffer: Any, number: int, count: int = 4) -> Callable[[], Any]:
    values = np.arange(count * 2, dtype=np.float32).reshape(count, 2) + 100 * number
    return partial(buffer.add, values, -values)


DISTILLATION_CALLS = [
    Call("add", rows),
    Call("next_round", lambda buffer, _: buffer.next_round),
    Call("clear", lambda buffer, _: buffer.clear, lambda buffer, number: rows(buffer, number)()),
]


def interrupt_other_buffers(folder: Path, place: str, max_points: int, seed: int) -> int:
    """Interrupt the calls of rollout and distillation buffers; return the number of interrupts."""
    with rl.kernels.force_torch() if place == "torch" else nullcontext():
        live, twin = (rollout(autoreset="NEXT_STEP") for _ in range(2))
        trial = Trial(live, twin, folder / f"{place} rollout", random.Random(seed))
        for call in ROLLOUT_CALLS:
            trial.run(call, max_points)
        live, twin = (rl.DistillationBuffer(10, obs=2, action=2, seed=0) for _ in range(2))
        other = Trial(live, twin, folder / f"{place} rows", random.Random(seed))
        for call in DISTILLATION_CALLS:
            other.run(call, max_points)
    return trial.num_interrupts + other.num_interrupts


# Tests


def require_place(place: str) -> None:
    if place in ("shared", "disk") and not hasattr(rl.kernels.native_core(), "ProcessLock"):
        pytest.skip("needs Linux and a compiler")


def interrupt_all_buffers(folder: Path, place: str, max_points: int, seed: int, names: Iterable[str]) -> int:
    total = sum(interrupt_calls(folder, place, name, max_points, seed, autoreset="SAME_STEP") for name in names)
    return total + (interrupt_other_buffers(folder, place, max_points, seed) if place in ("heap", "torch") else 0)


@pytest.mark.promise("A8")
@pytest.mark.parametrize("place", select("heap", "disk", of=PLACES))
def test_an_interrupted_call_is_whole_or_absent(tmp_path: Path, place: str) -> None:
    require_place(place)
    max_points = trials("A8", 20)
    names = SAMPLERS if place == "heap" else ("prioritized", "epochs")
    total = interrupt_all_buffers(tmp_path, place, max_points, SEED, names)
    tell(f"A8: {total} interrupts in {place} memory, seed {SEED}")
    assert total >= 12 * max_points


MODES = ("SAME_STEP", "NEXT_STEP", "DISABLED", None)


@pytest.mark.long
@pytest.mark.promise("A8")
@pytest.mark.parametrize("place", PLACES)
def test_interrupted_calls_of_every_kind_and_mode_are_whole_or_absent(tmp_path: Path, place: str) -> None:
    """Each round tries every point of short calls and different points of long ones."""
    require_place(place)
    cases = [(mode, name) for mode in MODES for name in SAMPLERS]
    num_calls = sum(len(call_names(place, name, mode)) for mode, name in cases)
    min_interrupts, total, seed = trials("A8_LONG", 100_000) // len(PLACES), 0, SEED
    max_points = -(-min_interrupts // num_calls)
    while total < min_interrupts:
        for mode, name in cases:
            folder = tmp_path / f"{seed} {mode} {name}"
            total += interrupt_calls(folder, place, name, max_points, seed, mode)
            shutil.rmtree(folder, ignore_errors=True)
        if place in ("heap", "torch"):
            total += interrupt_other_buffers(tmp_path / f"{seed}", place, max_points, seed)
        seed += 1
    tell(f"A8: {total} interrupts in {place} memory, seeds {SEED} to {seed - 1}")


def test_a_rate_limit_counts_only_completed_adds() -> None:
    live, twin = (make_replay("cpu", rl.Prioritized(), autoreset="SAME_STEP") for _ in range(2))
    limits = {id(each): rl.RateLimit(each, samples_per_insert=1.0, tolerance=1e9) for each in (live, twin)}
    trial = Trial(live, twin, Path(), random.Random(SEED), num_interrupts=1)
    add_limited = lambda buffer, number: partial(limits[id(buffer)].add, **step(number), **extras(number))  # noqa: E731
    trial.run(Call("limit.add", add_limited), 25)
    assert trial.num_interrupts > 20
    assert limits[id(live)].inserted == limits[id(twin)].inserted > 0


@pytest.mark.promise("A8")
def test_disk_memory_that_is_being_closed_is_open_or_closed(tmp_path: Path) -> None:
    """An interrupted `close()` can be repeated and releases the folder."""
    require_place("disk")

    def opened(number: int) -> rl.ReplayBuffer:
        replay = rl.ReplayBuffer(8, 1, (), device=rl.Memory.disk(tmp_path / str(number)), seed=0)
        replay.add([1.0], 0.0, 1.0, False, False, [2.0])
        return replay

    places = points(opened(0).close)
    chosen = sorted({*range(0, len(places), max(len(places) // 60, 1)), *range(len(places) - 60, len(places))})
    for number, place in enumerate(chosen, 1):
        replay = opened(number)
        interrupted(replay.close, places[place])
        replay.close()
        replay.close()
        with pytest.raises(rl.ClosedError):
            len(replay)
        again = rl.load(tmp_path / str(number), rl.ReplayBuffer)
        assert again[again.ids()]["reward"].tolist() == [1.0], place
        again.close()
    tell(f"A8: {len(chosen)} interrupts of close")


def test_a_buffer_that_is_filled_leaves_gradients_as_they_were() -> None:
    source = rl.ReplayBuffer(8, 1, (), seed=0)
    for t in range(4):
        source.add([float(t)], 0.0, 0.0, False, False, [t + 1.0])
    call = partial(rl.DistillationBuffer(8, 1, ()).fill, source)
    for point in points(call)[::3]:
        interrupted(partial(rl.DistillationBuffer(8, 1, ()).fill, source), point)
        assert torch.is_grad_enabled(), point


def test_real_signals_leave_a_write_whole_or_absent() -> None:
    """A system timer instead of a trace function confirms the simulation of the other tests."""
    live, twin = (make_replay("cpu", rl.Prioritized(), autoreset="SAME_STEP") for _ in range(2))
    rng, number, done = random.Random(SEED), 0, 0
    for _ in range(trials("A8_REAL", 100)):
        with handler(signal.SIGALRM):
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-4, 2e-3))
                while True:
                    number += 1
                    add(live, number)()
                    update(live, number)()
            except Interrupt:
                pass
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0.0)
        for each in range(done + 1, number):
            add(twin, each)()
            update(twin, each)()
        now = read_state(live)
        for rest in (None, add, update):
            if rest is not None:
                rest(twin, number)()
            if not difference(now, read_state(twin)):
                break
        else:
            raise AssertionError(f"neither before nor after: {difference(now, read_state(twin))}, seed {SEED}")
        done = number
        live.load_state_dict(twin.state_dict())
        live.check()
    tell(f"A8: {trials('A8_REAL', 100)} real signals in {number} steps, seed {SEED}")


# Deliberately broken variants


def failure_of_variant(folder: Path, place: str = "heap") -> str:
    """Return the failure that the check reports for a broken variant."""
    with pytest.raises(AssertionError) as caught:
        interrupt_calls(folder, place, "prioritized", 40, SEED, autoreset="SAME_STEP")
    return str(caught.value)


def test_an_incomplete_write_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(store: NativeBackend, leaves: Any, nexts: Any, envs: Any, steps: Any = None, then: Any = None) -> Any:
        doubt = _write(store, leaves, nexts, envs, steps, None)
        if doubt is None and then is not None:
            then()
        return doubt

    _write = NativeBackend.write
    monkeypatch.setattr(NativeBackend, "write", careless)
    assert "add at" in failure_of_variant(tmp_path)


def test_incomplete_torch_operations_are_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_backend, "complete", lambda change: change())
    assert "add at" in failure_of_variant(tmp_path, "torch")


def test_a_lock_in_python_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_place("disk")
    monkeypatch.setattr(rl.kernels, "make_guarded_lock", locking.GuardedLock)
    monkeypatch.setattr("tests.faults.test_a8_interrupts.PATIENCE", 0.2)
    assert "the lock is held" in failure_of_variant(tmp_path, "disk")


def test_without_the_native_core_a_change_is_completed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = [0, 0]

    def change() -> None:
        for i in range(2):
            numbers[i] = int("7")

    found = points(partial(locking.complete, change))
    for point in found[2:]:
        numbers[:] = [0, 0]
        assert interrupted(partial(locking.complete, change), point)
        assert numbers in ([0, 0], [7, 7])
