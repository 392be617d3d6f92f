"""I: after a long life memory is flat, and no file, thread, mapping or shared segment is left behind."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch

import relive as rl
from tests.checkpoint.traffic import KINDS
from tests.faults.processes import apart
from tests.tiers import select
from tests.totals import tell, trials

MORE_MEMORY = 16 << 20
"""Bytes of growth that are no leak: arenas, caches, fragments."""
MORE_MAPPINGS = 40

Work = Callable[[int], Any]


class Held(NamedTuple):
    """Resources of a process."""

    memory: int
    files: int
    threads: int
    mappings: int
    shared: int

    @staticmethod
    def now() -> Held:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
        mappings = len(Path("/proc/self/maps").read_text().splitlines())
        return Held(
            resident,
            len(os.listdir("/proc/self/fd")),
            threading.active_count(),
            mappings,
            sum(f"{os.getpid()}" in entry for entry in os.listdir("/dev/shm")),  # of this process only
        )


def measure_growth(work: Work, cycles: int) -> dict[str, int]:
    """Return the growth of resources beyond tolerance, from a tenth of the `cycles` to all of them."""
    for n in range(max(cycles // 10, 1)):
        work(n)
    before = Held.now()
    for n in range(cycles):
        work(n)
    more = {name: after - then for name, after, then in zip(Held._fields, Held.now(), before, strict=True)}
    allowed = {"memory": MORE_MEMORY, "mappings": MORE_MAPPINGS}
    return {name: count for name, count in more.items() if count > allowed.get(name, 0)}


# Workloads


def use(kind: str) -> Work:
    """Run one more operation and sample."""
    buffer, subject = KINDS[kind].make(), KINDS[kind]

    def once(n: int) -> None:
        subject.act(buffer, n)
        subject.read(buffer)

    return once


def cycle() -> Work:
    """Add, sample and update priorities."""
    replay = rl.ReplayBuffer(10_000, obs=8, action=2, num_envs=4, sampler=rl.Prioritized(), seed=0)
    obs, flags = torch.zeros(4, 8), torch.zeros(4, dtype=torch.bool)
    priority = torch.rand(32, dtype=torch.float64)

    def once(n: int) -> None:
        replay.add(obs, obs[:, :2], obs[:, 0], flags, flags, obs + n)
        replay.update_priority(replay.sample(32)["index"], priority)

    return once


def save_and_load(kind: str, root: Path) -> Work:
    """Add a step, save incrementally, and load the checkpoint for the next step."""
    buffers: list[Any] = [KINDS[kind].make()]

    def once(n: int) -> None:
        KINDS[kind].act(buffers[0], n)
        clock = getattr(buffers[0], "_tests_clock", None)
        buffers[0].save(root)
        loaded: Any = rl.load(root)
        if clock is not None:
            loaded._tests_clock = clock
        buffers[0] = loaded

    return once


def cycles_apart(cycles: int) -> dict[str, int]:
    return measure_growth(cycle(), cycles)


def uses_apart(kind: str, cycles: int) -> dict[str, int]:
    return measure_growth(use(kind), cycles)


def saves_apart(kind: str, cycles: int) -> dict[str, int]:
    with TemporaryDirectory() as folder:
        found = measure_growth(save_and_load(kind, Path(folder)), cycles)
        left = list(Path(folder, "tmp").iterdir())
        kept = list(Path(folder, "manifests").iterdir())
    return found | ({"files in tmp": len(left)} if left else {}) | ({"manifests": len(kept)} if len(kept) > 2 else {})


def live_long(cycles: int, saves: int, kinds: Collection[str] = tuple(KINDS)) -> None:
    """Run cycles, uses and saves, each in a new process."""
    uses = cycles // 100
    assert apart(cycles_apart, cycles, timeout=7200) == {}
    for kind in kinds:
        assert apart(uses_apart, kind, uses, timeout=7200) == {}, kind
        assert apart(saves_apart, kind, saves, timeout=7200) == {}, kind
    tell(
        f"I4: {cycles} cycles of add, sample and update; {uses} uses and {saves} saves and loads of {len(kinds)} kinds"
    )


@pytest.mark.promise("I4")
@pytest.mark.parametrize("kinds", select(1, of=[1, len(KINDS)]))
def test_a_short_run_leaves_nothing_behind(kinds: int) -> None:
    live_long(trials("I4", 20_000), trials("I4_SAVES", 30), list(KINDS)[:kinds])


@pytest.mark.long
def test_a_long_run_leaves_nothing_behind() -> None:
    live_long(trials("I4_LONG", 1_000_000), trials("I4_SAVES_LONG", 1_000))


# Canaries: workloads that leak


def leak(what: str, cycles: int) -> dict[str, int]:
    kept: list[Any] = []
    stop = threading.Event()

    def a_thread(_: int) -> None:
        kept.append(threading.Thread(target=stop.wait, daemon=True))
        kept[-1].start()

    def a_shared_segment(n: int) -> None:
        kept.append(Path(f"/dev/shm/relive-canary-{os.getpid()}-{n % 2}-{len(kept)}"))
        kept[-1].touch()

    works: dict[str, Work] = {
        "memory": lambda _: kept.append(bytearray(os.urandom(1 << 12)) * 16),
        "files": lambda _: kept.append(os.open("/dev/null", os.O_RDONLY)),
        "threads": a_thread,
        "mappings": lambda n: kept.append(
            mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | (n % 2 * mmap.PROT_WRITE))
        ),
        "shared": a_shared_segment,
    }
    try:
        return measure_growth(works[what], cycles)
    finally:
        stop.set()
        for path in kept if what == "shared" else ():
            path.unlink()


@pytest.mark.thorough
@pytest.mark.parametrize(("what", "cycles"), [(what, 900 if what == "memory" else 60) for what in Held._fields])
def test_every_kind_of_leak_is_detected(what: str, cycles: int) -> None:
    assert what in apart(leak, what, cycles)
    assert apart(grown_of_nothing, 20) == {}


def grown_of_nothing(cycles: int) -> dict[str, int]:
    return measure_growth(lambda _: None, cycles)
