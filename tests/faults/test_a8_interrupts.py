"""A8: Ctrl-C at every point of a public call leaves it whole or absent."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import relive as rl
from tests.faults.interrupts import handler, interrupted, is_free, points
from tests.totals import SEED, tell, trials

NUM_ENVS, CAPACITY = 2, 24


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    gc.collect()
    gc.disable()  # a signal that is delivered in a finalizer is printed and lost
    with handler():
        yield
    gc.enable()


# What a buffer is


def bits(tensor: torch.Tensor) -> bytes:
    return np.ascontiguousarray(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()).tobytes()


def state_of(buffer: Any) -> dict[str, Any]:
    """Everything that a buffer is, but for its generator: what may be read, saved and drawn."""
    values, arrays = buffer.state()
    state = {f"array {name}": bits(x) for name, x in arrays.items() if not name.startswith("random")}
    state |= {f"value {name}": repr(value) for name, value in values.items() if name != "random"}
    if isinstance(buffer, rl.ReplayBuffer):
        names = ("obs", "action", "reward", "next_obs", *buffer._schema.names[5:]) if len(buffer) else ()
        rows = buffer[buffer.ids()]
        state |= {f"row {name}": bits(rows[name]) for name in names}
        state["traffic"] = bits(buffer._traffic)
    if isinstance(buffer, rl.RolloutBuffer):
        stored = values["storage"]["num_stored"] if "storage" in values else values["num_stored"]
        for i, tensor in enumerate(buffer._storage.tensors):
            for name in [name for name in state if name.endswith(f"column{i}")]:
                state[name] = bits(tensor[:stored]) if len(tensor) > 1 else b""
    if isinstance(buffer, rl.DistillationBuffer):
        ring = buffer._ring
        rows = torch.arange(ring.oldest, ring.head) % ring.capacity
        state |= {f"row {i}": bits(column[rows]) for i, column in enumerate(buffer._columns)}
    return state


def difference(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    return sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))


# Calls


@dataclass
class Call:
    """A public call that is tried at every point; `prepare` is called before, without signals."""

    name: str
    make: Callable[[Any, int], Callable[[], Any]]
    prepare: Callable[[Any, int], Any] | None = None
    draws: bool = False
    """Parts of the sampler may each be as before or as after."""


@dataclass
class Trial:
    """A buffer that is interrupted, beside one that is not."""

    live: Any
    twin: Any
    folder: Path
    rng: random.Random
    number: int = 0
    tried: int = 0
    failures: list[str] = field(default_factory=list)

    def run(self, call: Call, most: int) -> int:
        """Interrupt a call at up to `most` points; returns how many there were."""
        place, total = 0, 1
        stride = 1
        while place < total:
            self.number += 1
            if call.prepare is not None:
                for buffer in (self.live, self.twin):
                    call.prepare(buffer, self.number)
            self._same_generators()
            before = state_of(self.live)
            found = points(call.make(self.twin, self.number))
            total, stride = len(found), max(len(found) // most, 1)
            if place >= total:
                interrupted(call.make(self.live, self.number), -1)
                break
            offset = self.rng.randrange(stride)
            at = found[min(place + offset, total - 1)]
            action = call.make(self.live, self.number)
            try:
                was = interrupted(action, at)
                wrong = self._wrong(call, before, was)
            except Exception as error:  # the buffer is broken: whatever is raised now is the failure
                was, wrong = True, [f"{type(error).__name__}: {error}"]
            self.tried += 1
            if wrong:
                self.failures.append(f"{call.name} at {at} ({place + offset} of {total}): {wrong}")
                raise AssertionError(self.failures[-1])
            place += stride
        return total

    def _wrong(self, call: Call, before: dict[str, Any], was: bool) -> list[str]:
        live, twin = self.live, self.twin
        if not is_free(lambda: live._lock):
            return ["the lock is held"]
        live.check()
        now, after = state_of(live), state_of(twin)
        if call.draws:
            mixed = [name for name in now if now[name] not in (before.get(name), after.get(name))]
            if mixed:
                return mixed
        elif not difference(now, after):
            pass
        elif difference(now, before) or not was:
            return [f"not as after: {difference(now, after)}; not as before: {difference(now, before)}"]
        if self.tried % 25 == 0:
            wrong = self._saved_otherwise(now)
            if wrong:
                return wrong
        if not call.draws and difference(now, after):
            call.make(live, self.number)()
            return difference(state_of(live), after)
        if call.draws:  # neither is ahead of the other
            for buffer in (live, twin):
                buffer.run.restore(buffer.run.snapshot())
            self._synchronise()
        return []

    def _synchronise(self) -> None:
        if isinstance(self.live, rl.ReplayBuffer) and difference(state_of(self.live), state_of(self.twin)):
            state = {name: x.clone() for name, x in self.twin.run.state().items()}
            self.live.run.load_state(state)

    def _same_generators(self) -> None:
        self.live._random.restore(self.twin._random.snapshot())

    def _saved_otherwise(self, now: dict[str, Any]) -> list[str]:
        folder = self.folder / f"saved{self.tried}"
        self.live.save(folder)
        loaded = rl.load(folder, device="cpu") if isinstance(self.live, rl.ReplayBuffer) else rl.load(folder)
        loaded.check()
        other = state_of(loaded)
        skipped = ("value memory", "traffic")
        return [name for name in difference(now, other) if name not in skipped]


def step(number: int, envs: int = NUM_ENVS) -> dict[str, Any]:
    """Steps whose numbers tell where they come from; an episode ends now and then."""
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


def made(where: Any, sampler: Any, **settings: Any) -> rl.ReplayBuffer:
    return rl.ReplayBuffer(
        CAPACITY, obs=2, action=(), num_envs=NUM_ENVS, sampler=sampler, device=where, extra=EXTRA, seed=0,
        stats=rl.EpisodeStats(NUM_ENVS, window=4), norm={"obs": rl.RunningNorm(2)}, **settings,
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
    if buffer._given.staged:
        rest = step(number) | extras(number)
        buffer.add(**{name: value for name, value in rest.items() if name not in ("obs", "number")})


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


CALLS = {
    "add": Call("add", add),
    "add of one": Call("add of one", add_some),
    "extend": Call("extend", extend),
    "add_step": Call("add_step", add_step),
    "stage": Call("stage", stage, complete_staged),
    "add of the rest": Call("add of the rest", add_staged, lambda buffer, number: stage(buffer, number)()),
    "update_priority": Call("update_priority", update),
    "write": Call("write", write),
    "cut": Call("cut", lambda buffer, _: buffer.cut, partial(add_more, count=1)),
    "clear": Call("clear", lambda buffer, _: buffer.clear, add_more),
    "commit": Call("commit", lambda buffer, _: buffer.commit),
    "sample": Call("sample", sample, draws=True),
    "sample of steps": Call("sample of steps", sample_steps, draws=True),
    "load_state_dict": Call(
        "load_state_dict", lambda buffer, _: partial(buffer.load_state_dict, COPIES[id(buffer)]),
        lambda buffer, number: copy_state(buffer, number),
    ),
}  # fmt: skip
COPIES: dict[int, Any] = {}


def copy_state(buffer: Any, number: int) -> None:
    """A state that the buffer has left behind."""
    taken = buffer.state_dict()
    COPIES[id(buffer)] = {**taken, "rows": _copied(taken["rows"]), "arrays": _copied(taken["arrays"])}
    add_more(buffer, number, 2)


def _copied(arrays: Any) -> Any:
    return {name: x.clone() for name, x in arrays.items()}


WRITES = ("add", "add of one", "extend", "add_step", "stage", "add of the rest", "cut", "clear", "write")
DRAWS = ("add", "sample", "sample of steps", "clear")
SAMPLERS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "uniform": (rl.Uniform(), (*WRITES, "sample", "load_state_dict")),
    "prioritized": (rl.Prioritized(), (*WRITES, "update_priority", "sample", "load_state_dict")),
    "counted": (rl.Counted(rl.Prioritized()), (*DRAWS, "update_priority")),
    "epochs": (rl.WithoutReplacement(), DRAWS),
    "new": (rl.NewFirst(), DRAWS),
    "recent": (rl.Recent(4), DRAWS),
}
PLACES = ("heap", "torch", "shared", "disk")


def tried(folder: Path, place: str, name: str, most: int, seed: int, settings: dict[str, Any] | None = None) -> int:
    """Interrupt the calls of one kind of buffer; returns at how many points."""
    sampler, names = SAMPLERS[name]
    with rl.kernels.force_torch() if place == "torch" else nullcontext():
        where = {"heap": ["cpu"] * 2, "torch": ["cpu"] * 2, "shared": [rl.Memory.shared(), rl.Memory.shared()]}
        where["disk"] = [rl.Memory.disk(folder / f"{place}-{name}-{i}") for i in range(2)]
        live, twin = (made(each, sampler, **({"autoreset": "SAME_STEP"} | (settings or {}))) for each in where[place])
        for number in range(1, 12):
            for buffer in (live, twin):
                add(buffer, number)()
        trial = Trial(live, twin, folder / f"{place}-{name}", random.Random(seed), 100)
        for each in names:
            if not (each == "load_state_dict" and place == "disk"):
                trial.run(CALLS[each], most)
        for buffer in (live, twin):
            buffer.close()
    return trial.tried


needs_native = pytest.mark.skipif(rl.kernels.native() is None, reason="needs a compiler")


@pytest.mark.promise("A8")
@pytest.mark.parametrize("place", PLACES)
def test_an_interrupted_call_is_whole_or_absent(tmp_path: Path, place: str) -> None:
    if place in ("shared", "disk") and rl.kernels.native() is None:
        pytest.skip("needs a compiler")
    most = trials("A8", 40)
    names = SAMPLERS if place in ("heap", "torch") else ("prioritized", "epochs")
    total = sum(tried(tmp_path, place, name, most, SEED) for name in names)
    tell(f"A8: {total} interrupts in {place} memory, seed {SEED}")
    assert total > 200
