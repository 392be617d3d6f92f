"""Threads write, sample and read one buffer: rows are complete, and every pair of calls returns."""

from __future__ import annotations

import atexit
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from itertools import combinations_with_replacement, count
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch

import relive as rl
from tests.faults.traffic import Traffic
from tests.tiers import select
from tests.totals import tell, trials

WATCHDOG = 60.0
"""Seconds after which a few short calls count as blocked, even on a busy machine."""
REFUSALS = (rl.SchemaError, rl.NotReadyError, rl.BufferFullError, IndexError)
"""Errors that a call may raise because of another thread."""


def run_at_once(*works: Callable[[], object], times: int, watchdog: float = WATCHDOG) -> list[BaseException]:
    """Run every function in a thread, all started together; return the errors other than refusals."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(works))

    def repeat(work: Callable[[], object]) -> None:
        start.wait()
        for _ in range(times):
            try:
                work()
            except REFUSALS:
                pass
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=repeat, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(watchdog)
    assert not any(thread.is_alive() for thread in threads), "a call never returned"
    return errors


class TestTraffic:
    """Four writers, four samplers with priority updates, and saves, on a buffer of 64 rows with checksums."""

    def assert_whole(self, traffic: Traffic, rows: int, seconds: float, *, min_saves: int = 0) -> None:
        traffic.run(rows, seconds, min_drawn=1001, min_saves=min_saves)
        assert traffic.errors == []
        assert (traffic.torn, traffic.unknown) == (0, 0)
        assert traffic.drawn > 1000
        assert traffic.saves >= min_saves
        assert len(traffic.replay) == 64
        traffic.count(traffic.replay[traffic.replay.ids()])
        assert (traffic.torn, traffic.unknown) == (0, 0)

    @pytest.mark.promise("D1")
    @pytest.mark.parametrize("seconds", select(3, of=[3, 10]))
    def test_no_row_is_torn_or_unknown(self, seconds: int, tmp_path: Path) -> None:
        self.assert_whole(Traffic(64, rl.Prioritized(), tmp_path), rows=200_000, seconds=seconds, min_saves=5)

    # Rows of this size are copied without the GIL, so that only the buffer's lock prevents torn reads.
    @pytest.mark.thorough
    @pytest.mark.parametrize("sampler", select(rl.Prioritized(), of=[rl.Uniform(), rl.Prioritized()]), ids=repr)
    def test_no_large_row_is_torn_or_unknown(self, sampler: Any) -> None:
        self.assert_whole(Traffic(1 << 16, sampler), rows=200_000, seconds=3)

    @pytest.mark.long
    def test_no_row_is_torn_or_unknown_for_half_an_hour(self, tmp_path: Path) -> None:
        self.assert_whole(Traffic(1 << 12, rl.Prioritized(), tmp_path), rows=10**15, seconds=trials("D1_LONG", 1_800))


class TestCounts:
    """Updates from many threads are counted exactly once."""

    def test_norms_count_updates_of_all_threads(self) -> None:
        norm = rl.RunningNorm(3)
        rows = torch.arange(12.0).view(4, 3)
        assert run_at_once(*[lambda: norm.update(rows)] * 4, times=500) == []
        assert norm.count == 4 * 500 * 4
        torch.testing.assert_close(norm.mean, rows.double().mean(0))
        torch.testing.assert_close(norm.var, rows.double().var(0, correction=0))

    def test_statistics_count_updates_of_all_threads(self) -> None:
        stats = rl.EpisodeStats(2)
        step = [1.0, 2.0], [True, False], [False, False]
        assert run_at_once(*[lambda: stats.update(*step)] * 4, times=500) == []
        assert (stats.num_steps, stats.num_episodes) == (4000, 2000)
        assert stats.summary()["return_mean"] == 1.0
        assert float(stats.snapshot()["open"][0, 1]) == 4000.0


FLAG = np.zeros(2, bool)
STEP: dict[str, Any] = {
    "obs": np.zeros((2, 3), np.float32),
    "action": np.zeros(2, np.float32),
    "reward": np.ones(2, np.float32),
    "terminated": FLAG,
    "truncated": np.array([True, False]),
}
GYM = (np.ones((2, 3), np.float32), np.ones(2), FLAG, FLAG, {})
CONTINUING = (STEP["obs"].copy(), *GYM[1:])
"""A step whose next observation is the `obs` of STEP: a rollout warns of steps that start elsewhere after `clear`."""
INDEX = np.array([0, 1])
FOLDER = tempfile.TemporaryDirectory()
atexit.register(FOLDER.cleanup)
FOLDERS: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
NUMBERS = count()


def save_folder(buffer: Any) -> str:
    """Return the folder of a buffer's saves."""
    return FOLDERS.setdefault(buffer, f"{FOLDER.name}/{next(NUMBERS)}")


Calls = dict[str, Callable[[Any], object]]

REPLAY: Calls = {
    "add": lambda b: b.add(**STEP, next_obs=np.ones((2, 3))),
    "add_step": lambda b: b.add_step(STEP["obs"], STEP["action"], GYM),
    "stage": lambda b: b.stage(action=STEP["action"]),
    "extend": lambda b: b.extend(
        {name: np.stack([value] * 3) for name, value in STEP.items()} | {"next_obs": np.ones((3, 2, 3))}
    ),
    "cut": lambda b: b.cut([1]),
    "clear": lambda b: b.clear(),
    "commit": lambda b: b.commit(),
    "sample": lambda b: b.sample(4, rl.NStep(2, 0.9)),
    "update_priority": lambda b: b.update_priority(INDEX, [1.0, 2.0]),
    "write": lambda b: b.write(INDEX, reward=[1.0, 2.0]),
    "ids": lambda b: b.ids(),
    "read": lambda b: b.read(INDEX, rl.NStep(2, 0.9)),
    "is_open": lambda b: b.is_open,
    "columns": lambda b: b.columns,
    "state_dict": lambda b: b.state_dict(),
    "load_state_dict": lambda b: b.load_state_dict(b.state_dict()),
    "save": lambda b: b.save(save_folder(b)),
    "handle": lambda b: b.handle(),
    "close": lambda b: b.close(),
    "check": lambda b: b.check(),
    "episodes": lambda b: list(b.episodes()),
    "nbytes": lambda b: b.nbytes,
    "stats": lambda b: b.stats.summary(),
    "norm": lambda b: b.norm["obs"].mean,
    "__getitem__": lambda b: b[INDEX],
    "__len__": len,
    "__repr__": repr,
}
ROLLOUT: Calls = {
    "state_dict": lambda b: b.state_dict(),
    "load_state_dict": lambda b: b.load_state_dict(b.state_dict()),
    "add": lambda b: b.add(**STEP, value=np.zeros(2), final_obs=np.ones((2, 3))),
    "add_step": lambda b: b.add_step(STEP["obs"], STEP["action"], CONTINUING, value=np.zeros(2)),
    "stage": lambda b: b.stage(action=STEP["action"]),
    "lend": lambda b: b.lend(),
    "nbytes": lambda b: b.nbytes,
    "save": lambda b: b.save(save_folder(b)),
    "check": lambda b: b.check(),
    "take_back": lambda b: b.take_back(3),
    "clear": lambda b: b.clear(),
    "compute_advantage": lambda b: b.compute_advantage(np.zeros(2), bootstrap_truncated=False),
    "attach": lambda b: b.attach(note=torch.zeros(3, 2)),
    "minibatches": lambda b: list(b.minibatches(2)),
    "sequences": lambda b: list(b.sequences(2)),
    "env_major": lambda b: b.env_major(),
    "final_obs": lambda b: b.final_obs,
    "data": lambda b: b.data,
    "columns": lambda b: b.columns,
    "stats": lambda b: b.stats.summary(),
    "norm": lambda b: b.norm["obs"].mean,
    "num_stored": lambda b: b.num_stored,
    "is_full": lambda b: b.is_full,
    "__getitem__": lambda b: b["reward"],
    "__len__": len,
    "__repr__": repr,
}
DISTILLATION: Calls = {
    "state_dict": lambda b: b.state_dict(),
    "load_state_dict": lambda b: b.load_state_dict(b.state_dict()),
    "add": lambda b: b.add(np.zeros((3, 2)), np.zeros(3)),
    "fill": lambda b: b.fill(SOURCE),
    "clear": lambda b: b.clear(),
    "round": lambda b: b.round,
    "save": lambda b: b.save(save_folder(b)),
    "check": lambda b: b.check(),
    "next_round": lambda b: b.next_round(),
    "mix": lambda b: b.mix(np.zeros(3), np.ones(3), 0.5),
    "sample": lambda b: b.sample(4, recent={1: 0.5}),
    "epochs": lambda b: list(b.epochs(2)),
    "is_full": lambda b: b.is_full,
    "nbytes": lambda b: b.nbytes,
    "__getitem__": lambda b: b[INDEX],
    "__len__": len,
    "__repr__": repr,
}
STATS: Calls = {
    "device": lambda s: s.device,
    "update": lambda s: s.update([1.0, 2.0], [True, False], [False, True]),
    "cut": lambda s: s.cut([0]),
    "check": lambda s: s.check(),
    "clear": lambda s: s.clear(),
    "num_episodes": lambda s: s.num_episodes,
    "num_steps": lambda s: s.num_steps,
    "episodes": lambda s: s.episodes(),
    "summary": lambda s: s.summary(),
    "to": lambda s: s.to("cpu"),
    "snapshot": lambda s: s.snapshot(),
    "restore": lambda s: s.restore(s.snapshot()),
}
NORM: Calls = {
    "update": lambda n: n.update(torch.ones(4, 3)),
    "merge": lambda n: n.merge(n),
    "check": lambda n: n.check(),
    "clear": lambda n: n.clear(),
    "normalize": lambda n: n.normalize(torch.ones(3)),
    "scale": lambda n: n.scale(torch.ones(3)),
    "denormalize": lambda n: n.denormalize(torch.ones(3)),
    "count": lambda n: n.count,
    "mean": lambda n: n.mean,
    "var": lambda n: n.var,
    "std": lambda n: n.std,
    "device": lambda n: n.device,
    "to": lambda n: n.to("cpu"),
    "snapshot": lambda n: n.snapshot(),
    "restore": lambda n: n.restore(n.snapshot()),
    "__call__": lambda n: n(torch.ones(3)),
}


def make_observed(make: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Return a buffer of two environments with statistics and a norm."""
    listeners = {"stats": rl.EpisodeStats(2), "norm": {"obs": rl.RunningNorm(3)}}
    return make(*arguments, obs=3, action=(), num_envs=2, autoreset="Disabled", seed=0, **listeners, **options)


def source() -> rl.ReplayBuffer:
    replay = rl.ReplayBuffer(10, obs=2, action=())
    for t in range(10):
        replay.add([float(t), 0.0], 0.0, 0.0, False, False, [t + 1.0, 0.0])
    return replay


SOURCE = source()
KINDS: dict[str, tuple[type, Callable[[], Any], Calls]] = {
    "replay": (
        rl.ReplayBuffer,
        lambda: make_observed(rl.ReplayBuffer, 8, reward=rl.Mutable(()), sampler=rl.Prioritized()),
        REPLAY,
    ),
    "rollout": (rl.RolloutBuffer, lambda: make_observed(rl.RolloutBuffer, 3), ROLLOUT),
    "distillation": (rl.DistillationBuffer, lambda: rl.DistillationBuffer(8, obs=2, action=()), DISTILLATION),
    "stats": (rl.EpisodeStats, lambda: rl.EpisodeStats(2, window=3), STATS),
    "norm": (rl.RunningNorm, lambda: rl.RunningNorm(3), NORM),
}
CLASS_METHODS = {"for_env", "estimate_bytes", "from_config", "from_disk"}
LOCKED_METHODS = {"config", "state", "load_state", "rows", "components", "check_state"}
"""Methods that `save` calls under the lock, because the returned tensors share the buffer's memory."""


@pytest.mark.parametrize("kind", KINDS)
def test_every_public_name_is_among_the_calls(kind: str) -> None:
    made, _, calls = KINDS[kind]
    named = {name for kind in made.__mro__[:-1] for name in vars(kind) if hasattr(made, name)}
    public = {name for name in named if not name.startswith("_")} - CLASS_METHODS - LOCKED_METHODS
    assert public == {name for name in calls if not name.startswith("_")}


@pytest.mark.promise("D4")
@pytest.mark.parametrize("kind", select("distillation", of=KINDS))
def test_every_pair_of_calls_from_two_threads_returns(kind: str) -> None:
    _, make, calls = KINDS[kind]
    pairs = list(combinations_with_replacement(calls, 2))
    for first, second in pairs:
        one = make()
        for name in ("add", "update"):
            if name in calls:
                calls[name](one)
        errors = run_at_once(partial(calls[first], one), partial(calls[second], one), times=8)
        if "close" in (first, second):
            errors = [error for error in errors if "expected use before close()" not in str(error)]
        assert errors == [], f"{first} beside {second}"
    tell(f"D4: {kind}, {len(pairs)} pairs of calls returned")
